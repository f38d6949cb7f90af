"""Task `shard`: a snapshot becomes one tensorizer file for each tensor-parallel rank."""

from __future__ import annotations

import gc
import pickle
import platform
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from tensorize_assets import __version__
from tensorize_assets.core import layout
from tensorize_assets.core.errors import PreflightError, WorkerError
from tensorize_assets.core.manifest import (
    CastEntry,
    DtypeCensus,
    FileEntry,
    ShardEntry,
    StockVllm,
    TensorEntry,
    TiedGroup,
)
from tensorize_assets.core.store import FileDigest, open_store
from tensorize_assets.core.tasks import ShardRequest, ShardResult
from tensorize_assets.worker import census, model_builder, preflight
from tensorize_assets.worker.module_tensors import module_tensors, tied_names
from tensorize_assets.worker.read_back import read_back
from tensorize_assets.worker.scratch import scratch_folder
from tensorize_assets.worker.session import Progress
from tensorize_assets.worker.virtual_ranks import virtual_rank
from tensorize_assets.worker.write_shard import write_shard

if TYPE_CHECKING:
    from vllm.config import VllmConfig

RankCensus = tuple[Counter[str], Counter[str], list[CastEntry]]


class _Stopwatch:
    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - start


def run(request: ShardRequest, progress: Progress) -> ShardResult:
    """Build, write, verify and store every rank, one after another; peak memory is one shard.

    Raises:
        PreflightError: the model, the format or the scratch disk does not allow it; nothing
            was written.
        WorkerError: what was written does not read back.
        StoreError: the store refuses a file.
    """
    where = f"{request.model} {request.suffix}"
    clock = _Stopwatch()
    ranks = request.tensor_parallel_size
    progress.update("configuring vLLM")
    with clock("configure"):
        config = model_builder.configure(request.snapshot_dir, ranks, request.dtype, where)
        preflight.check_model(config, where)
    store = open_store(request.root)
    files: list[FileEntry] = []
    shards: list[ShardEntry] = []
    counts: list[RankCensus] = []
    tied: set[tuple[str, ...]] = set()
    with scratch_folder(Path(request.scratch_dir), request.directory) as scratch:
        for rank in range(ranks):
            path = scratch / layout.shard_name(rank, ranks)
            with virtual_rank(rank, ranks):
                counted, groups, names = _write_rank(config, rank, path, request, progress, clock)
            counts.append(counted)
            tied.update(groups)
            with clock("verify"):
                progress.update("verifying", rank, ranks)
                file, tensors = read_back(path)
                _require_all(file, tensors, names, where)
            with clock("store"):
                progress.update("storing", rank, ranks)
                key = layout.file_key(request.directory, file.path)
                found = FileDigest(file.size, file.sha256)
                store.put_file(key, path, sha256=file.sha256, move=True, just_read=found)
            files.append(file)
            shards.append(ShardEntry(rank=rank, file=file.path, tensors=tensors))
            progress.log(_rank_line(rank, ranks, file, tensors))
    model_dtype = config.model_config.dtype
    merged = census.merge(counts, model_dtype)
    return ShardResult(
        dtype=census.dtype_name(model_dtype),
        architecture=config.model_config.architecture,
        files=tuple(files),
        shards=tuple(shards),
        census=merged,
        # Stock vLLM refuses a file that leaves one of the tied names out ("tensors on meta"), so
        # both are stored; our loader ties them again.
        tied=tuple(TiedGroup(names=names, stored_once=False) for names in sorted(tied)),
        stock_vllm=_stock_vllm(config, merged),
        versions=_versions(),
        seconds={stage: round(seconds, 3) for stage, seconds in clock.seconds.items()},
    )


def _write_rank(
    config: VllmConfig,
    rank: int,
    path: Path,
    request: ShardRequest,
    progress: Progress,
    clock: _Stopwatch,
) -> tuple[RankCensus, tuple[tuple[str, ...], ...], set[str]]:
    """The rank's census, its groups of tied names, and all its names."""
    ranks = request.tensor_parallel_size
    where = f"{request.model} {request.suffix}, rank {rank} of {ranks}"
    progress.update("loading", rank, ranks)
    with clock("load"):
        with _refusals(f"{where}: the installed vLLM cannot construct this model here"):
            model = model_builder.construct(config)
        size = preflight.check_tensors(model, where)
        if rank == 0:
            needed = (size + preflight.METADATA_REGION) * ranks
            preflight.check_scratch(path.parent, needed, where)
        with _refusals(f"{where}: vLLM's own weight loader refuses this snapshot"):
            model_builder.load_weights(
                config,
                model,
                lambda tensors, done: progress.update(
                    "loading", rank, ranks, tensors_done=tensors, bytes_done=done
                ),
                where,
            )
    with clock("census"):
        counted = census.rank_census(model, rank, config.model_config.dtype)
        groups = tied_names(model)
        names = {name for name, _, _ in module_tensors(model)}
    with clock("write"):
        write_shard(
            model,
            path,
            dict(request.serialization_kwargs),
            lambda done: progress.update("writing", rank, ranks, bytes_done=done, bytes_total=size),
        )
    del model
    gc.collect()
    return counted, groups, names


def _require_all(
    file: FileEntry, tensors: tuple[TensorEntry, ...], names: set[str], where: str
) -> None:
    found = {tensor.name for tensor in tensors}
    if found != names:
        raise WorkerError(
            f"{where}: {file.path} holds {len(found)} tensors and the model has {len(names)}; "
            f"they differ in {', '.join(sorted(found ^ names)[:5])}"
        )


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    """Report what vLLM refuses as such: retrying, or another host, does not help."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise PreflightError(
            f"{what}: a weights file asks to run code or holds other objects than tensors, and is "
            f"not read ({_one_line(error)}). Use a repo, or a revision, with safetensors"
        ) from error
    except (
        ValueError,
        RuntimeError,
        NotImplementedError,
        AssertionError,
        KeyError,
        TypeError,
        AttributeError,
        ImportError,
        SafetensorError,
    ) as error:
        if "can't allocate memory" in str(error):
            raise WorkerError(
                f"{what}: the memory of this host does not hold one rank ({_one_line(error)}). "
                "Run the worker on a larger host, or use a larger tensor_parallel_size"
            ) from error
        raise PreflightError(
            f"{what} ({type(error).__name__}: {_one_line(error)}). If it refuses "
            "this tensor_parallel_size, real ranks fail alike: choose another. If the CPU build "
            "lacks a part, the model needs executor mode (vLLM's own ranks on their devices)"
        ) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]


def _stock_vllm(config: VllmConfig, merged: DtypeCensus) -> StockVllm:
    reasons: list[str] = []
    if config.model_config.use_mla:
        reasons.append("multi-head latent attention needs the post-load step (vllm#55198)")
    lossy = [cast for cast in merged.cast_by_stock if cast.lossy]
    if lossy:
        reasons.append(
            f"stock vLLM casts {len(lossy)} tensors to {merged.model_dtype} and loses values, "
            f"first {lossy[0].name} ({lossy[0].from_dtype})"
        )
    return StockVllm(loadable=not reasons, reasons=tuple(reasons))


def _versions() -> dict[str, str]:
    import vllm

    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "tensorizer": version("tensorizer"),
        "tensorize_assets": __version__,
        "python": platform.python_version(),
    }


def _rank_line(rank: int, ranks: int, file: FileEntry, tensors: tuple[TensorEntry, ...]) -> str:
    return f"rank {rank}/{ranks}: {len(tensors)} tensors, {file.size:,} bytes, {file.path}"
