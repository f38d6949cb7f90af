"""A snapshot's safetensors in the store, read by ranges: of each tensor what a rank wants of it.

Nothing is believed unverified: ranges are widened to whole blocks, whose hashes were made when the
file was downloaded from the Hub and verified as a whole (`core.block_hashes`).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch

from tensorize_assets.core.block_hashes import BLOCK_BYTES, require_blocks, widened
from tensorize_assets.core.errors import PreflightError
from tensorize_assets.core.local_store import sync_folder
from tensorize_assets.core.printable import quoted
from tensorize_assets.core.ranged import RangeSource, patiently
from tensorize_assets.core.safetensors_header import TensorPlace, read_header
from tensorize_assets.worker.lazy_tensors import LazyTensor, bytes_of
from tensorize_assets.worker.snapshots import CACHE_VARIABLE

AT_ONCE = 8
"""Threads that read: one connection does not fill a link to S3."""

# A request below a megabyte is mostly waiting.
_SMALLEST_PART_BYTES = 8 * BLOCK_BYTES
_LARGEST_PART_BYTES = 64 * BLOCK_BYTES
# Norms, biases and scales: there are many, and each would cost a request of its own.
_SMALL_BYTES = 64 * 1024

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "C64": torch.complex64,
}


class Counter:
    """Bytes that came from the store."""

    def __init__(self) -> None:
        self.bytes = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Count some more."""
        with self._lock:
            self.bytes += count


class RemoteFile:
    """One file, of which any part can be read and verified; for one reading thread.

    `pool` is that of all files of a snapshot: a large one has hundreds.
    """

    def __init__(
        self, ranges: RangeSource, hashes: bytes, counter: Counter, pool: ThreadPoolExecutor
    ) -> None:
        self.uri = ranges.uri
        self.size = ranges.size
        self._ranges = ranges
        self._hashes = hashes
        self._counter = counter
        self._stop = threading.Event()
        self._places: tuple[TensorPlace, ...] | None = None
        self._pool = pool

    def places(self) -> tuple[TensorPlace, ...]:
        """What the file holds. Raises as `safetensors_header.read_header` and `read`."""
        if self._places is None:
            self._places = read_header(self.content, self.size, self.uri)
        return self._places

    def content(self, start: int, end: int) -> bytes:
        """The bytes from `start` to `end`. Raises as `read`."""
        data = bytearray(end - start)
        self.read([(start, memoryview(data))])
        return bytes(data)

    def close(self) -> None:
        """Give up every read."""
        self._stop.set()

    def read(self, wanted: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer with the file's bytes from its position on.

        Raises:
            StoreError: the file cannot be read, or is not the one that was verified.
        """
        even = sum(len(buffer) for _, buffer in wanted) // AT_ONCE
        part = max(_SMALLEST_PART_BYTES, min(even, _LARGEST_PART_BYTES))
        reads = [
            self._pool.submit(self._part, start, buffer[offset : offset + length])
            for first, buffer in wanted
            for start, offset, length in _parts(first, len(buffer), part - part % BLOCK_BYTES)
        ]
        done, running = wait(reads, return_when=FIRST_EXCEPTION)
        try:
            for read in done:
                read.result()
        except BaseException:
            self._stop.set()
            raise
        finally:
            wait(running)

    def _part(self, start: int, buffer: memoryview) -> None:
        end = start + len(buffer)
        begin, finish = widened(start, end, self.size)
        exact = (begin, finish) == (start, end)
        room = buffer if exact else memoryview(bytearray(finish - begin))
        patiently(self._stop)(self._ranges.read_into, begin, room, self._stop.is_set)
        self._counter.add(len(room))
        require_blocks(room, begin, self._hashes, self.uri)
        if not exact:
            buffer[:] = room[start - begin : end - begin]


def _parts(start: int, length: int, part: int) -> Iterator[tuple[int, int, int]]:
    """Position, offset in the buffer, and length of each part; each ends with a block."""
    offset = 0
    while offset < length:
        end = (start + offset) // part * part + part
        step = min(end - start - offset, length - offset)
        yield start + offset, offset, step
        offset += step


@dataclass
class _StoredTensor:
    """A tensor in a RemoteFile, as `lazy_tensors.Source`."""

    file: RemoteFile
    place: TensorPlace
    cache: Path | None

    def __post_init__(self) -> None:
        if self.place.dtype not in _DTYPES:
            raise PreflightError(
                f"{self.file.uri}: tensor {quoted(self.place.name)} is of type {self.place.dtype}, "
                "which PyTorch has not, or not in elements of its own; choose another revision, or "
                "build it with launcher: subprocess"
            )
        self.shape = torch.Size(self.place.shape)
        self.dtype = _DTYPES[self.place.dtype]
        self._small: bytes | None = None

    def read(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        if self._small is not None:
            for start, buffer in ranges:
                buffer[:] = self._small[start : start + len(buffer)]
            return
        self.file.read([(self.place.start + start, buffer) for start, buffer in ranges])

    def span(self, start: int, end: int) -> torch.Tensor:
        if self.cache is not None and self._small is None:
            return self._on_disk(self.cache)[start:end]
        values = torch.empty(end - start, dtype=self.dtype)
        self.read([(start * self.dtype.itemsize, bytes_of(values))])
        return values

    def _on_disk(self, folder: Path) -> torch.Tensor:
        """The whole tensor, mapped: read once by the ranks of one machine that share `folder`."""
        name = hashlib.sha256(f"{self.file.uri}\0{self.place.name}".encode()).hexdigest()
        path = folder / f"{name}.bin"
        size = self.place.end - self.place.start
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / f"{name}.lock", "wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    made = path.with_suffix(f".{os.getpid()}")
                    _make_room(made, size)
                    self.read([(0, bytes_of(_mapped(made, size, writable=True)))])
                    # What is found under its name later is believed.
                    with open(made, "rb") as file:
                        os.fsync(file.fileno())
                    made.rename(path)
                    sync_folder(folder)
        return _mapped(path, size).view(self.dtype)

    def hold(self, data: bytes) -> None:
        """Keep its bytes, which were read together with others'."""
        self._small = data


def _make_room(path: Path, size: int) -> None:
    """Make a file of `size` bytes, whose disk is taken: a full one would end whoever maps it.

    Raises:
        PreflightError: there is no room.
    """
    with open(path, "wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            path.unlink()
            raise PreflightError(
                f"{path.parent} has no room for {size:,} bytes of a tensor that the ranks of this "
                f"machine share ({error.strerror}): set {CACHE_VARIABLE} to a folder of a larger "
                "disk"
            ) from error


def _mapped(path: Path, size: int, *, writable: bool = False) -> torch.Tensor:
    return torch.from_file(str(path), shared=writable, size=size, dtype=torch.uint8)


def tensors_of(file: RemoteFile, cache: Path | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a safetensors file by its name, none of them read but the smallest.

    `cache` is a folder for tensors of which the ranks of one machine take columns each: then they
    are read once for all of them. Without, each rank reads them whole, and keeps its columns.

    Raises:
        PreflightError: it is no safetensors file, or one with types that cannot be read in parts.
        StoreError: as `RemoteFile.read`.
    """

    sources = [_StoredTensor(file, place, cache) for place in file.places()]
    for group in _small(sources):
        start, end = group[0].place.start, group[-1].place.end
        data = file.content(start, end)
        for source in group:
            source.hold(data[source.place.start - start : source.place.end - start])
    for source in sources:
        yield source.place.name, LazyTensor(source)


def _small(sources: Sequence[_StoredTensor]) -> Iterator[list[_StoredTensor]]:
    """Small tensors that lie together."""
    group: list[_StoredTensor] = []
    for source in sources:
        if source.place.end - source.place.start <= _SMALL_BYTES:
            group.append(source)
        elif group:
            yield group
            group = []
    if group:
        yield group
