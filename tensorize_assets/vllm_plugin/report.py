"""What one rank says of its load, as a file beside the others: ranks are separate processes."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch
from vllm.platforms import current_platform

from tensorize_assets.core.errors import StoreError, StoreUnavailableError
from tensorize_assets.core.jsonio import Record
from tensorize_assets.core.tasks import RankLoad, TensorReport

# Set by the reload check for the engine it starts; unset in production, where nothing is reported.
FOLDER_VARIABLE = "TENSORIZE_ASSETS_LOAD_REPORT"


def reporting() -> bool:
    """Whether this process was asked to report its load."""
    return bool(os.environ.get(FOLDER_VARIABLE))


def write(report: RankLoad) -> None:
    """Leave `report` in the folder named by the environment."""
    folder = Path(os.environ[FOLDER_VARIABLE])
    (folder / f"rank-{report.rank:03d}.json").write_text(report.model_dump_json())


class Failure(Record):
    """Why a rank did not load.

    `store`: the store, or the way to it, said no, which need not be the artifact's fault.
    `store_unavailable`: and that may pass by itself.
    """

    rank: int
    kind: str
    message: str
    store: bool
    store_unavailable: bool

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.kind}: {self.message}"


def write_failure(rank: int, error: BaseException) -> None:
    """Leave why a rank did not load in the same folder."""
    folder = Path(os.environ[FOLDER_VARIABLE])
    failure = Failure(
        rank=rank,
        kind=type(error).__name__,
        message=str(error),
        store=isinstance(error, StoreError),
        store_unavailable=isinstance(error, StoreUnavailableError),
    )
    (folder / f"failure-{rank:03d}.json").write_text(failure.model_dump_json())


def host_memory() -> int:
    """Resident bytes of this process."""
    return psutil.Process().memory_info().rss


@cache
def device_name() -> str:
    """The device this process computes on, as its maker calls it."""
    if current_platform.is_cpu():
        from cpuinfo import get_cpu_info

        return str(get_cpu_info().get("brand_raw") or "CPU")
    return str(current_platform.get_device_name())


def tensor_reports(
    tensors: dict[str, torch.Tensor], header_hashes: dict[str, Any]
) -> dict[str, TensorReport]:
    """Hash each tensor as it stands in the model, the way tensorizer hashed it when it wrote it.

    Args:
        tensors: by stored name.
        header_hashes: by stored name, a SHA-256 object that has seen the tensor's header.
    """

    def one(name: str) -> TensorReport:
        tensor = tensors[name].detach().cpu().contiguous()
        digest = header_hashes[name].copy()
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        # Not every 8-bit type has its own `isfinite`.
        values = tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
        finite = bool(torch.isfinite(values).all())
        return TensorReport(sha256=digest.hexdigest(), finite=finite)

    names = [name for name in tensors if name in header_hashes]
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))
