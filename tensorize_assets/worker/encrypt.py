"""Task `encrypt`: tensor files become encrypted ones, without vLLM, torch or the model."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import BinaryIO, cast

from tensorize_assets.core import layout
from tensorize_assets.core.errors import WorkerError
from tensorize_assets.core.manifest import FileEntry, TensorEntry
from tensorize_assets.core.protocol import format_bytes
from tensorize_assets.core.ranged import RangedReader
from tensorize_assets.core.scratch import scratch_folder
from tensorize_assets.core.store import Store
from tensorize_assets.core.tasks import (
    OLD_DATA_KEY,
    EncryptRequest,
    EncryptResult,
    TensorFile,
)
from tensorize_assets.worker import session
from tensorize_assets.worker.access import store_of
from tensorize_assets.worker.encrypt_shard import encrypt_shard
from tensorize_assets.worker.session import Progress
from tensorize_assets.worker.tensor_file import read_index

# Files at once; the memory that one may use is shared among them.
_FILES = 4
# An upload has 144 MiB of its own, so only one at a time, in little room, and read ahead by little.
_UPLOAD_SHARE = 16
_PART_BYTES = 4 << 20
_PARTS_AHEAD = 2
# No upload of one file takes as long. What killed runs of this build left goes at once.
_ORPHANED_S = 2 * 24 * 3600.0


def run(request: EncryptRequest, progress: Progress) -> EncryptResult:
    """Encrypt every file, several at once, each read once and stored by the same read.

    It appears in the store only if every tensor was the expected one.

    Raises:
        WorkerError: there is no data key; or a file is not what was to be encrypted.
        StoreError: the store lacks a file, or refuses one.
    """
    key = session.data_key(f"{request.model} {request.suffix}")
    store = store_of(request.root, request.s3)
    local = store.local_path(request.directory) is not None
    cores = len(os.sched_getaffinity(0))
    at_once = min(len(request.files), cores, _FILES) if local else 1
    orphans = store.sweep(f"{layout.model_folder(request.model)}/", _ORPHANED_S)
    if orphans:
        progress.log(f"removed {orphans} pieces that killed runs of {request.model} left behind")
    start = time.perf_counter()
    with scratch_folder(Path(request.scratch_dir), request.directory) as scratch:
        work = _Work(
            request=request,
            store=store,
            progress=progress,
            key=key,
            old_key=session.secrets().get(OLD_DATA_KEY),
            scratch=scratch,
            threads=max(1, cores // at_once),
            share=at_once if local else _UPLOAD_SHARE,
        )
        made = work.all(at_once)
    return EncryptResult(
        files=tuple(file for file, _ in made),
        tensors=tuple(tensors for _, tensors in made),
        seconds={"encrypt": round(time.perf_counter() - start, 3)},
    )


@dataclass
class _Work:
    request: EncryptRequest
    store: Store
    progress: Progress
    key: bytes
    old_key: bytes | None
    scratch: Path
    threads: int
    share: int
    stop: Event = field(default_factory=Event)
    done: dict[str, int] = field(default_factory=dict[str, int])

    def all(self, at_once: int) -> list[tuple[FileEntry, TensorFile]]:
        """Every file, in the order of the request."""
        total = sum(tensor.size for file in self.request.files for tensor in file.tensors)
        with ThreadPoolExecutor(at_once, "encrypt") as pool:
            running = [pool.submit(self._one, file) for file in self.request.files]
            try:
                left: set[Future[tuple[FileEntry, TensorFile]]] = set(running)
                while left:
                    ended, left = wait(left, timeout=1, return_when=FIRST_EXCEPTION)
                    # The first that fails ends the others, whose results nobody wants.
                    for future in ended:
                        future.result()
                    self.progress.update(
                        "encrypting", bytes_done=sum(self.done.values()), bytes_total=total
                    )
            except BaseException:
                self.stop.set()
                pool.shutdown(cancel_futures=True)
                raise
        return [future.result() for future in running]

    def _one(self, file: TensorFile) -> tuple[FileEntry, TensorFile]:
        source = layout.file_key(self.request.source, file.path)
        target = layout.file_key(self.request.directory, file.path)
        where = self.store.uri(source)
        start = time.perf_counter()
        tensors: list[TensorEntry] = []
        with _opened(self.store, source) as stream:
            index = read_index(stream, where)
            size = index.as_encrypted().size
            with closing(
                encrypt_shard(
                    stream,
                    index,
                    where,
                    self.key,
                    tensors,
                    scratch=self.scratch,
                    old_key=self.old_key,
                    expected=file.tensors,
                    threads=self.threads,
                    share=self.share,
                )
            ) as chunks:
                found = self.store.put_stream(target, self._counted(file.path, chunks), size=size)
        took = time.perf_counter() - start
        self.progress.log(
            f"{file.path}: {len(tensors)} tensors, {found.size:,} bytes, verified, encrypted and "
            f"stored at {format_bytes(found.size / max(took, 1e-3))}/s"
        )
        entry = FileEntry(path=file.path, size=found.size, sha256=found.sha256)
        return entry, TensorFile(path=file.path, tensors=tuple(tensors))

    def _counted(self, path: str, chunks: Iterator[bytes]) -> Iterator[bytes]:
        passed = 0
        for chunk in chunks:
            if self.stop.is_set():
                raise WorkerError(f"{path}: stopped before it was encrypted")
            yield chunk
            passed += len(chunk)
            self.done[path] = passed


def _opened(store: Store, key: str) -> BinaryIO:
    stream = store.open_read(key)
    if isinstance(stream, RangedReader):
        # The same object, in smaller parts: an upload needs the memory.
        return cast(
            "BinaryIO", RangedReader(stream.source, part_bytes=_PART_BYTES, ahead=_PARTS_AHEAD)
        )
    return stream
