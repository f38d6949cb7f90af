"""Task `shard`: a snapshot becomes one tensorizer file for each tensor-parallel rank."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import torch

from tensorize_assets.core import layout
from tensorize_assets.core.errors import WorkerError
from tensorize_assets.core.manifest import (
    DtypeCensus,
    FileEntry,
    ShardEntry,
    StockVllm,
    TensorEntry,
    TiedGroup,
)
from tensorize_assets.core.protocol import format_bytes
from tensorize_assets.core.scratch import scratch_folder
from tensorize_assets.core.shard_parts import cast_reasons
from tensorize_assets.core.store import Store
from tensorize_assets.core.tasks import ShardRequest, ShardResult
from tensorize_assets.worker import arguments, census, model_builder, preflight, session, snapshots
from tensorize_assets.worker.access import store_of
from tensorize_assets.worker.environment import versions
from tensorize_assets.worker.read_back import read_back
from tensorize_assets.worker.remote_snapshot import lists_of_blocks, remote_snapshot
from tensorize_assets.worker.remote_weights import Counter
from tensorize_assets.worker.session import Progress
from tensorize_assets.worker.virtual_ranks import virtual_rank
from tensorize_assets.worker.write_rank import Stopwatch, WrittenRank, write_rank

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SAID_EVERY_S = 10.0
# No upload of one shard takes as long. What this build's own killed runs left goes at once, when
# the same shard is stored.
_ORPHANED_S = 2 * 24 * 3600.0


def run(request: ShardRequest, progress: Progress) -> ShardResult:
    """Build and write every rank; read each file back once: verified, and stored by the same read.

    It appears in the store only if both agree. Virtual ranks are built one after another, while the
    one before is stored, so that peak memory is one shard. In executor mode vLLM's own ranks write
    all at once. An encrypted file is written by our own code, which takes no
    `serialization_kwargs`; these change no byte.

    Raises:
        PreflightError: the model, the format, an argument, the device or the scratch disk does not
            allow it; nothing was written.
        WorkerError: what was written does not read back; a rank died; or there is no key to encrypt
            with.
        StoreError: the store refuses a file.
    """
    where = f"{request.model} {request.suffix}"
    arguments.check_serialization(request.serialization_kwargs, where)
    key = session.data_key(where) if request.encrypted else None
    clock = Stopwatch()
    ranks = request.tensor_parallel_size
    executor = request.sharding == "executor"
    more: Mapping[str, Any] = {}
    if executor:
        # They import vLLM's engine, which virtual ranks do without.
        from tensorize_assets.worker.engine import check_device
        from tensorize_assets.worker.executor_ranks import ARGUMENTS

        check_device(request.device, ranks, where)
        more = ARGUMENTS
    store = store_of(request.root, request.s3)
    orphans = store.sweep(f"{layout.model_folder(request.model)}/", _ORPHANED_S)
    if orphans:
        progress.log(f"aborted {orphans} uploads that killed runs of {request.model} left behind")
    # Ranks that are built apart may share a disk, and a scratch folder is one worker's.
    apart = "" if request.ranks is None else f"/ranks-{'-'.join(map(str, request.ranks))}"
    with (
        scratch_folder(Path(request.scratch_dir), request.directory + apart) as scratch,
        _opened(request, store, scratch, progress) as (folder, counter),
        _Shelf(store, progress, clock, key) as shelf,
    ):
        progress.update("configuring vLLM")
        with clock("configure"):
            config = model_builder.configure(str(folder), ranks, request.dtype, where, **more)
        work = _Work(config, request, scratch, store, shelf, progress, clock, key, where)
        written, stored = (_by_executor if executor else _virtually)(work)
    model_dtype = config.model_config.dtype
    merged = census.merge([one.census for one in written], model_dtype)
    tied = {names for one in written for names in one.tied}
    return ShardResult(
        dtype=census.dtype_name(model_dtype),
        architecture=config.model_config.architecture,
        files=tuple(one.file for one in stored),
        shards=tuple(
            ShardEntry(rank=rank.rank, file=one.file.path, tensors=one.tensors)
            for rank, one in zip(written, stored, strict=True)
        ),
        census=merged,
        # Stock vLLM refuses a file that leaves one of the tied names out ("tensors on meta"), so
        # both are stored; our loader ties them again.
        tied=tuple(TiedGroup(names=names, stored_once=False) for names in sorted(tied)),
        stock_vllm=_stock_vllm(config, merged),
        sharding=request.sharding,
        versions=versions(),
        seconds={stage: round(seconds, 3) for stage, seconds in clock.seconds.items()},
        source_bytes=counter and counter.bytes,
    )


@contextmanager
def _opened(
    request: ShardRequest, store: Store, scratch: Path, progress: Progress
) -> Iterator[tuple[Path, Counter | None]]:
    """The snapshot's folder; with a counter where its weights are read by ranges, from the mirror.

    A virtual rank reads its own part of them. Real ranks each read whole files, from a disk.
    """
    mirrored = request.snapshot.mirrored
    virtual = request.sharding == "virtual"
    blocks = lists_of_blocks(mirrored, store) if mirrored is not None and virtual else None
    every = partial(snapshots.local_folder, request.snapshot, request.root, request.s3, progress)
    if mirrored is None or blocks is None:
        if mirrored is not None and virtual:
            progress.log(
                f"the weights of {mirrored.model} are brought here whole: they are no safetensors, "
                "or no list of their blocks is signed by a key that the catalog trusts",
                "warning",
            )
        yield every(), None
        return
    counter = Counter()
    here = scratch / "snapshot"
    shared = request.tensor_parallel_size > 1 and request.shares_machine
    cache = snapshots.columns(mirrored) if shared else None
    with remote_snapshot(
        mirrored, store, blocks, every(snapshots.is_small), here, counter, cache
    ) as folder:
        yield folder, counter


@dataclass(frozen=True)
class _Work:
    config: VllmConfig
    request: ShardRequest
    scratch: Path
    store: Store
    shelf: _Shelf
    progress: Progress
    clock: Stopwatch
    key: bytes | None
    where: str

    @property
    def ranks(self) -> int:
        return self.request.tensor_parallel_size

    def path(self, rank: int) -> Path:
        return self.scratch / layout.shard_name(rank, self.ranks)

    def where_of(self, rank: int) -> str:
        return f"{self.where}, rank {rank} of {self.ranks}"

    def shelve(self, written: WrittenRank) -> None:
        """Start on storing a rank's file; `shelf.wait` has it."""
        self.shelf.store(
            written,
            self.ranks,
            self.path(written.rank),
            self.request.directory,
            self.where_of(written.rank),
        )


def _virtually(work: _Work) -> tuple[list[WrittenRank], list[_Stored]]:
    wanted = work.request.ranks or range(work.ranks)
    written: list[WrittenRank] = []
    stored: list[_Stored] = []

    def say(rank: int, stage: str, **counts: int | None) -> None:
        work.progress.update(stage, rank, work.ranks, **counts)
        work.shelf.check()

    def require_room(rank: int, size: int) -> None:
        if rank == wanted[0]:
            # On a disk that is also the root's, what is stored stays.
            local = work.store.local_path(work.request.directory)
            kept = len(wanted) if local else min(len(wanted), 2)
            needed = (size + preflight.METADATA_REGION) * kept
            preflight.check_scratch(work.scratch, needed, work.where_of(rank))

    for rank in wanted:
        with virtual_rank(rank, work.ranks, experts=work.config.model_config.is_moe):
            one = write_rank(
                work.config,
                rank,
                work.path(rank),
                sharding="virtual",
                device=torch.device("cpu"),
                require_room=partial(require_room, rank),
                say=partial(say, rank),
                key=work.key,
                serialization_kwargs=work.request.serialization_kwargs,
                where=work.where_of(rank),
            )
        for stage, seconds in one.seconds.items():
            work.clock.seconds[stage] += seconds
        written.append(one)
        # Scratch holds two shards at most: the one just written, and the one being stored.
        stored += work.shelf.wait()
        work.shelve(one)
    stored += work.shelf.wait()
    return written, stored


def _by_executor(work: _Work) -> tuple[list[WrittenRank], list[_Stored]]:
    from tensorize_assets.worker.executor_ranks import write_ranks

    with work.clock("start"):
        written = write_ranks(work.config, work.request, work.scratch, work.progress, work.where)
    for stage in written[0].seconds:
        slowest = max(one.seconds[stage] for one in written)
        work.clock.seconds[stage] = slowest
        work.clock.seconds["start"] -= slowest
    stored: list[_Stored] = []
    for one in written:
        work.shelve(one)
        stored += work.shelf.wait()
    return list(written), stored


@dataclass(frozen=True)
class _Stored:
    """One rank's file as it was read back, and stored."""

    file: FileEntry
    tensors: tuple[TensorEntry, ...]


class _Shelf:
    """Verifies and stores one shard while the next is built: one read of the file for both."""

    def __init__(
        self, store: Store, progress: Progress, clock: Stopwatch, key: bytes | None
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

    def store(self, wrote: WrittenRank, ranks: int, path: Path, directory: str, where: str) -> None:
        """Start on a file that `wait` waits for."""
        rank, size = wrote.rank, path.stat().st_size
        self._what = (rank, ranks, size)
        self._passed = self._said = 0
        self._said_at = time.monotonic()
        self._progress.update("storing", rank, ranks, bytes_done=0, bytes_total=size)
        self._running = self._pool.submit(self._run, ranks, path, directory, wrote, where)

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
        self, ranks: int, path: Path, directory: str, wrote: WrittenRank, where: str
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
            f"rank {wrote.rank}/{ranks}: {len(tensors)} tensors, {found.size:,} bytes, "
            f"{path.name}, verified and stored at {format_bytes(found.size / max(took, 1e-3))}/s"
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
        self, path: Path, tensors: list[TensorEntry], wrote: WrittenRank, where: str
    ) -> Iterator[bytes]:
        """The file's bytes; raises after the last one unless they are what was to be written."""
        for chunk in read_back(path, tensors, key=self._key):
            if self._stop.is_set():
                raise WorkerError(f"{where}: stopped before {path.name} was stored")
            yield chunk
            self._passed += len(chunk)
            self._say()
        found = {tensor.name for tensor in tensors}
        names = set(wrote.names)
        if found != names:
            raise WorkerError(
                f"{where}: {path.name} holds {len(found)} tensors and the model has {len(names)}; "
                f"they differ in {', '.join(sorted(found ^ names)[:5])}"
            )
        if wrote.encrypted is not None and wrote.encrypted != tuple(tensors):
            raise WorkerError(
                f"{where}: {path.name} holds other tensors than were encrypted into it. Check the "
                f"scratch disk ({path.parent}) and run again"
            )


def _stock_vllm(config: VllmConfig, merged: DtypeCensus) -> StockVllm:
    reasons: list[str] = []
    quantization = config.model_config.quantization
    if quantization is not None:
        reasons.append(
            f"layers quantized with {quantization} need the post-load step (vllm#55198) and their "
            "own types, which stock vLLM casts (vllm#45504)"
        )
    if config.model_config.is_moe:
        reasons.append("a mixture of experts' kernels need the post-load step (vllm#55198)")
    if config.model_config.use_mla:
        reasons.append("multi-head latent attention needs the post-load step (vllm#55198)")
    reasons += cast_reasons(merged)
    return StockVllm(loadable=not reasons, reasons=tuple(reasons))
