"""Build every model below MODELS at every TP with the worker's own task, into OUT, and
write the results to OUT/results.json (vLLM logs to stdout).

    python virtual_matrix.py MODELS OUT TP…
"""

import json
import sys
from pathlib import Path

from tensorize_assets.core.tasks import ShardRequest
from tensorize_assets.worker import shard
from tensorize_assets.worker.session import Progress


def main(models: Path, out: Path, sizes: list[int]) -> None:
    results = {}
    for model in sorted(models.iterdir()):
        for size in sizes:
            request = ShardRequest(
                model=f"tiny/{model.name}",
                suffix=f"tp{size}",
                snapshot_dir=str(model),
                root=str(out),
                directory=f"vllm/tiny/{model.name}/tp{size}",
                scratch_dir=str(out / ".scratch"),
                tensor_parallel_size=size,
                dtype="bfloat16",
            )
            result = shard.run(request, Progress.silent())
            results[f"{model.name}-{size}"] = result.model_dump(mode="json")
    (out / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [int(size) for size in sys.argv[3:]])
