"""Task `shard`: a snapshot becomes one tensorizer file for each tensor-parallel rank."""

from __future__ import annotations

import gc
import pickle
import platform
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from threading import Event
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
from tensorize_assets.core.protocol import format_bytes
from tensorize_assets.core.store import Store
from tensorize_assets.core.tasks import DATA_KEY, ShardRequest, ShardResult
from tensorize_assets.worker import census, model_builder, preflight, session
from tensorize_assets.worker.access import store_of
from tensorize_assets.worker.module_tensors import module_tensors, tied_names
from tensorize_assets.worker.read_back import read_back
from tensorize_assets.worker.scratch import scratch_folder
from tensorize_assets.worker.session import Progress
from tensorize_assets.worker.virtual_ranks import virtual_rank
from tensorize_assets.worker.write_shard import write_encrypted_shard, write_shard

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SAID_EVERY_S = 10.0
# No upload of one shard takes as long. What this build's own killed runs left goes at once, when
# the same shard is stored.
_ORPHANED_S = 2 * 24 * 3600.0

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
    """Build and write every rank, one after another; peak memory is one shard.

    While a rank is built, the one before it is read back once: verified, and stored by the same
    read. It appears in the store only if both agree. An encrypted one is written by our own code,
    which takes no `serialization_kwargs`; these change no byte.

    Raises:
        PreflightError: the model, the format or the scratch disk does not allow it; nothing
            was written.
        WorkerError: what was written does not read back; or there is no key to encrypt with.
        StoreError: the store refuses a file.
    """
    where = f"{request.model} {request.suffix}"
    key = session.secrets().get(DATA_KEY) if request.encrypted else None
    if request.encrypted and key is None:
        raise WorkerError(
            f"{where}: it is to be written encrypted, and there is no data key; the launcher hands "
            "it over as a secret"
        )
    clock = _Stopwatch()
    ranks = request.tensor_parallel_size
    progress.update("configuring vLLM")
    with clock("configure"):
        config = model_builder.configure(request.snapshot_dir, ranks, request.dtype, where)
        preflight.check_model(config, where)
    store = store_of(request.root, request.s3)
    orphans = store.sweep(f"{layout.model_folder(request.model)}/", _ORPHANED_S)
    if orphans:
        progress.log(f"aborted {orphans} uploads that killed runs of {request.model} left behind")
    shards: list[_Stored] = []
    counts: list[RankCensus] = []
    tied: set[tuple[str, ...]] = set()
    with (
        scratch_folder(Path(request.scratch_dir), request.directory) as scratch,
        _Shelf(store, progress, clock, key) as shelf,
    ):
        for rank in range(ranks):
            path = scratch / layout.shard_name(rank, ranks)
            with virtual_rank(rank, ranks):
                counted, groups, wrote = _write_rank(
                    config, rank, path, request, store, shelf, progress, clock, key
                )
            counts.append(counted)
            tied.update(groups)
            # Scratch holds two shards at most: the one just written, and the one being stored.
            shards += shelf.wait()
            shelf.store(rank, ranks, path, request.directory, wrote, where)
        shards += shelf.wait()
    model_dtype = config.model_config.dtype
    merged = census.merge(counts, model_dtype)
    return ShardResult(
        dtype=census.dtype_name(model_dtype),
        architecture=config.model_config.architecture,
        files=tuple(stored.file for stored in shards),
        shards=tuple(
            ShardEntry(rank=rank, file=stored.file.path, tensors=stored.tensors)
            for rank, stored in enumerate(shards)
        ),
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
    store: Store,
    shelf: _Shelf,
    progress: Progress,
    clock: _Stopwatch,
    key: bytes | None,
) -> tuple[RankCensus, tuple[tuple[str, ...], ...], _Wrote]:
    """The rank's census, its groups of tied names, and what was written."""
    ranks = request.tensor_parallel_size
    where = f"{request.model} {request.suffix}, rank {rank} of {ranks}"
    progress.update("loading", rank, ranks)
    with clock("load"):
        with _refusals(f"{where}: the installed vLLM cannot construct this model here"):
            model = model_builder.construct(config)
        size = preflight.check_tensors(model, where)
        if rank == 0:
            # On a disk that is also the root's, what is stored stays.
            kept = ranks if store.local_path(request.directory) else min(ranks, 2)
            needed = (size + preflight.METADATA_REGION) * kept
            preflight.check_scratch(path.parent, needed, where)

        def loaded(tensors: int, done: int) -> None:
            progress.update("loading", rank, ranks, tensors_done=tensors, bytes_done=done)
            shelf.check()

        with _refusals(f"{where}: vLLM's own weight loader refuses this snapshot"):
            model_builder.load_weights(config, model, loaded, where)
    with clock("census"):
        counted = census.rank_census(model, rank, config.model_config.dtype)
        groups = tied_names(model)
        names = {name for name, _, _ in module_tensors(model)}

    def written(done: int) -> None:
        progress.update("writing", rank, ranks, bytes_done=done, bytes_total=size)

    tensors = None
    with clock("write"):
        if key is None:
            write_shard(model, path, dict(request.serialization_kwargs), written)
        else:
            tensors = write_encrypted_shard(model, path, key, written)
    del model
    gc.collect()
    return counted, groups, _Wrote(frozenset(names), tensors)


@dataclass(frozen=True)
class _Wrote:
    """Names of all tensors of a rank; of an encrypted one, with the hashes they had in memory."""

    names: frozenset[str]
    tensors: tuple[TensorEntry, ...] | None


@dataclass(frozen=True)
class _Stored:
    """One rank's file as it was read back, and stored."""

    file: FileEntry
    tensors: tuple[TensorEntry, ...]


class _Shelf:
    """Verifies and stores one shard while the next is built: one read of the file for both."""

    def __init__(
        self, store: Store, progress: Progress, clock: _Stopwatch, key: bytes | None
    ) -> None:
        self._store = store
        self._key = key
        self._progress = progress
        self._clock = clock
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._stop = Event()
        self._running: Future[_Stored] | None = None
        self._what = (0, 0, 0)
        self._passed = self._said = 0
        self._said_at = 0.0

    def __enter__(self) -> _Shelf:
        return self

    def __exit__(self, *_: object) -> None:
        # An upload that is still running belongs to a build that failed: it is aborted.
        self._stop.set()
        self._pool.shutdown()

    def store(
        self,
        rank: int,
        ranks: int,
        path: Path,
        directory: str,
        wrote: _Wrote,
        where: str,
    ) -> None:
        """Start on a file that `wait` waits for."""
        size = path.stat().st_size
        self._what = (rank, ranks, size)
        self._passed = self._said = 0
        self._said_at = time.monotonic()
        self._progress.update("storing", rank, ranks, bytes_done=0, bytes_total=size)
        self._running = self._pool.submit(self._run, rank, ranks, path, directory, wrote, where)

    def check(self) -> None:
        """Raise what storing the last file failed with: nothing more need be built."""
        if self._running is not None and self._running.done():
            self._running.result()

    def wait(self) -> tuple[_Stored, ...]:
        """Wait for the file that is being stored, if one is. Raises as `run` does."""
        if self._running is None:
            return ()
        rank, ranks, size = self._what
        while not wait([self._running], timeout=1).done:
            self._progress.update("storing", rank, ranks, bytes_done=self._passed, bytes_total=size)
        stored, self._running = self._running.result(), None
        return (stored,)

    def _run(
        self, rank: int, ranks: int, path: Path, directory: str, wrote: _Wrote, where: str
    ) -> _Stored:
        start = time.perf_counter()
        tensors: list[TensorEntry] = []
        key = layout.file_key(directory, path.name)
        with self._clock("store"):
            found = self._store.put_file(
                key, path, move=True, chunks=self._verified(path, tensors, wrote, where)
            )
        took = time.perf_counter() - start
        self._progress.log(
            f"rank {rank}/{ranks}: {len(tensors)} tensors, {found.size:,} bytes, {path.name}, "
            f"verified and stored at {format_bytes(found.size / max(took, 1e-3))}/s"
        )
        file = FileEntry(path=path.name, size=found.size, sha256=found.sha256)
        return _Stored(file, tuple(tensors))

    def _say(self) -> None:
        """Report beside the building of the next rank, whose stage the progress shows."""
        now = time.monotonic()
        if now - self._said_at >= _SAID_EVERY_S:
            rank, ranks, size = self._what
            rate = (self._passed - self._said) / (now - self._said_at)
            self._said_at, self._said = now, self._passed
            self._progress.log(
                f"rank {rank}/{ranks}: storing: {format_bytes(self._passed)} of "
                f"{format_bytes(size)}, {format_bytes(rate)}/s"
            )

    def _verified(
        self, path: Path, tensors: list[TensorEntry], wrote: _Wrote, where: str
    ) -> Iterator[bytes]:
        """The file's bytes; raises after the last one unless they are what was to be written."""
        for chunk in read_back(path, tensors, key=self._key):
            if self._stop.is_set():
                raise WorkerError(f"{where}: stopped before {path.name} was stored")
            yield chunk
            self._passed += len(chunk)
            self._say()
        found = {tensor.name for tensor in tensors}
        if found != wrote.names:
            raise WorkerError(
                f"{where}: {path.name} holds {len(found)} tensors and the model has "
                f"{len(wrote.names)}; they differ in {', '.join(sorted(found ^ wrote.names)[:5])}"
            )
        if wrote.tensors is not None and wrote.tensors != tuple(tensors):
            raise WorkerError(
                f"{where}: {path.name} holds other tensors than were encrypted into it. Check the "
                f"scratch disk ({path.parent}) and run again"
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
