"""What several scripts of this folder need to build artifacts with the worker's own task."""

import shutil
from pathlib import Path

from vllm.model_executor.models import registry

from tensorize_assets.core.tasks import ShardRequest, ShardResult
from tensorize_assets.worker import shard
from tensorize_assets.worker.session import Progress

# vLLM inspects each architecture it meets in a process of its own, 10 s each the first time on a
# machine (not to start CUDA in this one), and caches what it finds. Here, in this process.
registry._run_in_subprocess = lambda inspect: inspect()


def request(snapshot: Path, root: Path, name: str, **changes: object) -> ShardRequest:
    """Ask for `snapshot` to be built at TP=1 in bfloat16, under `vllm/tiny/NAME` of `root`."""
    fields: dict[str, object] = {
        "model": f"tiny/{snapshot.name}",
        "suffix": name.rpartition("/")[2],
        "snapshot": str(snapshot),
        "root": str(root),
        "directory": f"vllm/tiny/{name}",
        "scratch_dir": str(root / ".scratch"),
        "tensor_parallel_size": 1,
        "dtype": "bfloat16",
    }
    return ShardRequest.model_validate(fields | changes)


def artifact(snapshot: Path, root: Path, name: str, **changes: object) -> tuple[Path, ShardResult]:
    """Build `snapshot`, with its config and tokenizer beside the shards, as the asset does."""
    asked = request(snapshot, root, name, **changes)
    result = shard.run(asked, Progress.silent())
    folder = root / asked.directory
    for file in snapshot.iterdir():
        if file.suffix not in (".safetensors", ".bin"):
            shutil.copy(file, folder)
    return folder, result
