"""Load every model below MODELS in vLLM's own ranks and have each rank write its file into OUT.

    python real_matrix.py MODELS OUT TP…

By the loader of executor mode. For each TP one executor is started; its ranks, with their real
process groups, then load the other models, of which each alone would be started for 3 s.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from vllm.config import VllmConfig
from vllm.v1.executor.abstract import Executor

from tensorize_assets.vllm_plugin import shard_writer
from tensorize_assets.worker import model_builder
from tensorize_assets.worker.executor_ranks import ARGUMENTS


def target(folder: Path, size: int, out: Path) -> Path:
    return out / folder.name / f"tp{size}"


def leave_job(folder: Path, size: int, out: Path) -> None:
    """What is to be done with a model, where its ranks look for it."""
    scratch = target(folder, size, out)
    scratch.mkdir(parents=True)
    shard_writer.Job(
        where=f"{folder.name} {size}",
        ranks=size,
        scratch=str(scratch),
        keyfile=None,
        serialization_kwargs={},
    ).write(scratch)


@contextmanager
def told(folder: Path, size: int, out: Path) -> Iterator[None]:
    os.environ[shard_writer.FOLDER_VARIABLE] = str(target(folder, size, out))
    try:
        yield
    finally:
        del os.environ[shard_writer.FOLDER_VARIABLE]


def write_rank(_worker: object, folder: Path, size: int, out: Path) -> int:
    """Runs inside a rank."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.model_executor.model_loader import get_model_loader

    config = configured(folder, size)
    with set_current_vllm_config(config), told(folder, size, out):
        get_model_loader(config.load_config).load_model(config, config.model_config)
    return get_tensor_model_parallel_rank()


def configured(folder: Path, size: int) -> VllmConfig:
    return model_builder.configure(str(folder), size, "bfloat16", **ARGUMENTS)


def write_all(folders: list[Path], out: Path, size: int) -> None:
    """Where some are mixtures of experts, the first is one: else vLLM makes no group for them."""
    for folder in folders:
        leave_job(folder, size, out)
    shard_writer.register()
    config = configured(folders[0], size)
    # vLLM's default but for CPUs, where it says "spawn": each rank would import all anew, 10 s.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    with told(folders[0], size, out):
        executor = Executor.get_class(config)(config)
    try:
        for folder in folders[1:]:
            ranks = executor.collective_rpc(
                partial(write_rank, folder=folder, size=size, out=out), timeout=60
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
