"""Load every model below MODELS in vLLM's own ranks and have each rank write its file into OUT.

    python real_matrix.py MODELS OUT TP…

For each TP one executor is started; its ranks, with their real process groups, then load the other
models through vLLM's own `load_model`, of which only the post-load step is left out: it packs
weights for this processor.
"""

import os
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

from vllm.v1.executor.abstract import Executor

from tensorize_assets.worker import model_builder


def write_rank(_worker: object, folder: str, size: int, out: str) -> int:
    """Runs inside a rank."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.model_executor.model_loader import base_loader, get_model_loader

    from tensorize_assets.core import layout
    from tensorize_assets.worker import model_builder
    from tensorize_assets.worker.write_shard import write_shard

    rank = get_tensor_model_parallel_rank()
    config = model_builder.configure(folder, size, "bfloat16")
    with (
        set_current_vllm_config(config),
        patch.object(base_loader, "process_weights_after_loading"),
    ):
        loader = get_model_loader(config.load_config)
        model = loader.load_model(vllm_config=config, model_config=config.model_config)
    target = Path(out, Path(folder).name, f"tp{size}")
    target.mkdir(parents=True, exist_ok=True)
    write_shard(model, target / layout.shard_name(rank, size), {}, lambda _: None)
    return rank


def write_all(folders: list[Path], out: Path, size: int) -> None:
    config = model_builder.configure(str(folders[0]), size, "bfloat16")
    # Else start-up fails on vLLM's estimate of what the host has left.
    config.cache_config.kv_cache_memory_bytes = 64 << 20
    # vLLM's default but for CPUs, where it says "spawn": each rank would import all anew, 10 s.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    executor = Executor.get_class(config)(config)
    try:
        for folder in folders:
            ranks = executor.collective_rpc(
                partial(write_rank, folder=str(folder), size=size, out=str(out))
            )
            assert sorted(ranks) == list(range(size)), ranks
    finally:
        executor.shutdown()


def main(models: Path, out: Path, sizes: list[int]) -> None:
    # TP=1 is had in this process, whose threads a fork would not have: last.
    for size in sorted(sizes, reverse=True):
        write_all(sorted(models.iterdir()), out, size)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [int(size) for size in sys.argv[3:]])
