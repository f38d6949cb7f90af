"""What a fake rank may do, by its request's suffix; the snapshot is a folder where they meet."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import cast

from tensorize_assets.core.errors import PreflightError
from tensorize_assets.core.manifest import (
    DtypeCensus,
    DtypeCount,
    FileEntry,
    ShardEntry,
    StockVllm,
)
from tensorize_assets.core.tasks import ShardRequest, ShardResult
from tensorize_assets.worker import session
from tensorize_assets.worker.session import Progress


def shard(request: ShardRequest, progress: Progress) -> ShardResult:
    assert request.ranks is not None
    assert request.snapshot.folder is not None
    (rank,) = request.ranks
    here = Path(request.snapshot.folder)
    (here / f"rank-{rank}").write_text(f"{os.getpid()} {request.scratch_dir}")
    progress.update("writing", rank, request.tensor_parallel_size)
    print(f"(EngineCore pid={os.getpid()}) WARNING 11-29 14:00:00 [x.py:1] as vLLM prints")
    if request.suffix == "fail" and rank == 1:
        # Not before rank 0 has something to clean up.
        while not (here / "working").exists():
            time.sleep(0.05)
        raise RuntimeError("rank 1 is the cause")
    if request.suffix == "fail":
        try:
            (here / "working").touch()
            # What interrupts a task interrupts no call into the kernel.
            while True:
                time.sleep(0.05)
        finally:
            (here / "cleaned").touch()
    if request.suffix == "lost":
        os.kill(os.getpid(), signal.SIGKILL)
    if request.suffix == "broken":
        # What is no result fails outside of the task's own work.
        return cast("ShardResult", None)
    if request.suffix == "refuse":
        raise PreflightError("this vLLM cannot construct it")
    secret = session.secrets().get("data_key", b"")
    name = f"model-rank-{rank:03d}.tensors"
    return ShardResult(
        dtype="bfloat16",
        architecture="FakeForCausalLM",
        files=(FileEntry(path=name, size=len(secret) + 1, sha256=f"{rank:064x}"),),
        shards=(ShardEntry(rank=rank, file=name, tensors=()),),
        census=DtypeCensus(
            by_dtype={"bfloat16": DtypeCount(tensors=1, bytes=2)},
            model_dtype="bfloat16",
            cast_by_stock=(),
        ),
        tied=(),
        stock_vllm=StockVllm(loadable=True, reasons=()),
        versions={},
        seconds={"write": 0.5},
    )
