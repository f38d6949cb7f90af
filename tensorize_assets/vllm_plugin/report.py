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

from tensorize_assets.core import serving
from tensorize_assets.core.errors import StoreError, StoreUnavailableError
from tensorize_assets.core.jsonio import Record
from tensorize_assets.core.tasks import RankLoad, TensorReport

# Set by the reload check for the engine it starts.
FOLDER_VARIABLE = "TENSORIZE_ASSETS_LOAD_REPORT"


def checking() -> bool:
    """Whether this process loads for the reload check, which wants every tensor's hash."""
    return bool(os.environ.get(FOLDER_VARIABLE))


def reporting() -> bool:
    """Whether this process was asked to report its load: by that check, or by `tensorize serve`."""
    return _folder() is not None


def _folder() -> Path | None:
    if checking():
        return Path(os.environ[FOLDER_VARIABLE])
    served = serving.current()
    return Path(served.reports) if served else None


def write(report: RankLoad) -> None:
    """Leave `report` in the folder named by the environment."""
    _write(f"rank-{report.rank:03d}.json", report)


def _write(name: str, record: Record) -> None:
    folder = _folder()
    if folder is not None:
        # Whole: somebody may be looking for it. Data-parallel replicas have the same ranks.
        part = folder / f".{name}-{os.getpid()}"
        part.write_text(record.model_dump_json())
        part.rename(folder / name)


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
    failure = Failure(
        rank=rank,
        kind=type(error).__name__,
        message=str(error),
        store=isinstance(error, StoreError),
        store_unavailable=isinstance(error, StoreUnavailableError),
    )
    _write(f"failure-{rank:03d}.json", failure)


def failures(folder: Path) -> tuple[Failure, ...]:
    """Why ranks did not load, by rank; none where none said so."""
    return tuple(
        Failure.model_validate_json(path.read_bytes()) for path in sorted(folder.glob("failure-*"))
    )


def loads(folder: Path) -> tuple[RankLoad, ...]:
    """The reports in `folder`, by rank."""
    return tuple(
        RankLoad.model_validate_json(path.read_bytes()) for path in sorted(folder.glob("rank-*"))
    )


def host_memory() -> int:
    """Resident bytes of this process."""
    return psutil.Process().memory_info().rss


@cache
def device_name() -> str:
    """The device this process computes on, as its maker calls it; of CUDA's with its architecture.

    Post-load steps choose kernels, and so what weights become, by the architecture.
    """
    if current_platform.is_cpu():
        from cpuinfo import get_cpu_info

        return str(get_cpu_info().get("brand_raw") or "CPU")
    name = str(current_platform.get_device_name())
    capability = current_platform.get_device_capability()
    return f"{name}, compute capability {capability.as_version_str()}" if capability else name


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
