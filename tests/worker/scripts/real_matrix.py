"""Load every model below MODELS in vLLM's own ranks and have each rank write its file into OUT.

    python real_matrix.py MODELS OUT TP

One executor is started; its ranks, with their real process groups, then load the other models
through vLLM's own `load_model`, of which only the post-load step is left out: it packs weights for
this processor.
"""

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


def main(models: Path, out: Path, size: int) -> None:
    folders = sorted(models.iterdir())
    config = model_builder.configure(str(folders[0]), size, "bfloat16")
    # Else start-up fails on vLLM's estimate of what the host has left.
    config.cache_config.kv_cache_memory_bytes = 64 << 20
    executor = Executor.get_class(config)(config)
    try:
        for folder in folders:
            ranks = executor.collective_rpc(
                partial(write_rank, folder=str(folder), size=size, out=str(out))
            )
            assert sorted(ranks) == list(range(size)), ranks
    finally:
        executor.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
