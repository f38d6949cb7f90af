"""What vLLM's own ranks do in executor mode: each writes its file instead of serving.

The worker that starts them names a folder by an environment variable. It holds the job and, where
the file is to be encrypted, the key; ranks leave there how far they are, what they wrote, or why
they did not.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import JsonValue
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.platforms import current_platform
from vllm.v1.worker.worker_base import WorkerWrapperBase

from tensorize_assets.core import layout
from tensorize_assets.core.jsonio import Record
from tensorize_assets.worker import preflight
from tensorize_assets.worker.write_rank import WrittenRank, write_rank

FOLDER_VARIABLE = "TENSORIZE_ASSETS_SHARD_RANKS"

LOAD_FORMAT = "tensorize_assets_shard"

PROCESS_NAME = "VllmWorker-"
"""vLLM's name for a rank's process; its number follows."""

_JOB = "job.json"
# Whoever watches looks no more often.
_SAID_EVERY_S = 0.5


class Job(Record):
    """What every rank is to do: write its file into `scratch`."""

    where: str
    ranks: int
    scratch: str
    keyfile: str | None
    serialization_kwargs: dict[str, JsonValue]

    def write(self, folder: Path) -> None:
        """Leave it for the ranks that are told of `folder`."""
        (folder / _JOB).write_text(self.model_dump_json())


class State(Record):
    """How far a rank is; counts as far as they are known."""

    stage: str
    tensors_done: int | None = None
    bytes_done: int | None = None
    bytes_total: int | None = None


class Failure(Record):
    """Why a rank has not written its file. `when` is in seconds since the epoch."""

    rank: int
    kind: str
    message: str
    traceback: str
    when: float


def register() -> None:
    """Offer vLLM the loader, and have a rank of this process, or a fork of it, say why it fails."""
    register_model_loader(LOAD_FORMAT)(ShardWriter)
    if WorkerWrapperBase.init_device is not _init_device:
        WorkerWrapperBase.init_device = _init_device


_plain_init_device = WorkerWrapperBase.init_device


def _init_device(self: WorkerWrapperBase) -> None:
    """What fails before the model is loaded (devices, process groups), vLLM only logs."""
    try:
        _plain_init_device(self)
    except Exception as error:
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder:
            write_failure(Path(folder), self.rpc_rank, error)
        raise


class ShardWriter(BaseModelLoader):
    """Loads as vLLM's default loader up to the post-load step, and writes what it has loaded."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self._folder = Path(os.environ[FOLDER_VARIABLE])
        self._job = Job.model_validate_json((self._folder / _JOB).read_bytes())

    def download_model(self, model_config: ModelConfig) -> None:
        """Do nothing: the snapshot is there."""

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Do nothing: `load_model` does it all."""

    def load_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> torch.nn.Module:
        """Raises as `write_rank` does; the worker is told."""
        rank = get_tensor_model_parallel_rank()
        try:
            return self._load_model(vllm_config, rank)
        except Exception as error:
            write_failure(self._folder, rank, error)
            raise

    def _load_model(self, config: VllmConfig, rank: int) -> torch.nn.Module:
        job = self._job
        last = 0.0
        said = ""

        def say(stage: str, **counts: int | None) -> None:
            nonlocal last, said
            now = time.monotonic()
            if stage != said or now - last >= _SAID_EVERY_S:
                last, said = now, stage
                _write(self._folder, f"state-{rank:03d}.json", State(stage=stage, **counts))

        def require_room(size: int) -> None:
            # Ranks write at the same time, and their files lie there until all are written.
            if rank == 0:
                needed = (size + preflight.METADATA_REGION) * job.ranks
                preflight.check_scratch(Path(job.scratch), needed, job.where)

        kept: list[torch.nn.Module] = []
        written = write_rank(
            config,
            rank,
            Path(job.scratch, layout.shard_name(rank, job.ranks)),
            sharding="executor",
            device=torch.device(current_platform.device_type),
            require_room=require_room,
            say=say,
            key=Path(job.keyfile).read_bytes() if job.keyfile else None,
            serialization_kwargs=job.serialization_kwargs,
            where=f"{job.where}, rank {rank} of {job.ranks}",
            keep=kept.append,
        )
        _write(self._folder, f"rank-{rank:03d}.json", written)
        # vLLM wants one; nothing is asked of it.
        return kept[0]


def write_failure(folder: Path, rank: int, error: BaseException) -> None:
    """Leave why a rank failed, unless it said so before."""
    name = f"failure-{rank:03d}.json"
    if not (folder / name).exists():
        failure = Failure(
            rank=rank,
            kind=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
            when=time.time(),
        )
        _write(folder, name, failure)


def failures(folder: Path) -> tuple[Failure, ...]:
    """Why ranks failed, the first of them first."""
    found = (
        Failure.model_validate_json(path.read_bytes()) for path in folder.glob("failure-*.json")
    )
    return tuple(sorted(found, key=lambda failure: failure.when))


def states(folder: Path) -> Mapping[int, State]:
    """How far each rank is that has begun to load."""
    return {
        int(path.stem.removeprefix("state-")): State.model_validate_json(path.read_bytes())
        for path in folder.glob("state-*.json")
    }


def written(folder: Path, rank: int) -> WrittenRank | None:
    """What a rank wrote; None while it has not."""
    path = folder / f"rank-{rank:03d}.json"
    return WrittenRank.model_validate_json(path.read_bytes()) if path.exists() else None


def _write(folder: Path, name: str, record: Record) -> None:
    # Whole: the worker may be looking for it.
    part = folder / f".{name}-{os.getpid()}"
    part.write_text(record.model_dump_json())
    part.rename(folder / name)
