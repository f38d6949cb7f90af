"""Make of a plaintext tensorizer file the one that tensorizer would have written with a key.

tensorizer 2.10.1's format is spelled out here, since its own code can only write a module that is
loaded; tests hold the two against each other. Nothing of this imports torch, which alone would
take half of the memory that encrypting may use.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import zlib
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from struct import Struct, pack, unpack_from
from struct import error as StructError
from tempfile import TemporaryFile
from typing import Any, Literal, TypeVar, cast

import numpy

from tensorize_assets.core.errors import WorkerError
from tensorize_assets.core.manifest import TensorEntry
from tensorize_assets.worker import secretbox
from tensorize_assets.worker.secretbox import Bytes

CHUNK_BYTES = 2 << 20
"""What tensorizer encrypts under one nonce; a reader takes it from the file."""

# Magic, version, flags, bytes of tensor data, number of tensors, bytes of the index.
_FILE_HEADER = Struct("<5sI32sQ8xQQ")
_MAGIC = b"|TZR|"
_INDEX_BYTES = 256 << 10
_NO_FLAGS = bytes(32)
_ENCRYPTED = b"\x01" + bytes(31)
# The first version that knows encryption, and says by its number alone that a file has it. The
# next has flags, and is what a file with vLLM's marker gets, a tensor without data.
_ENCRYPTED_VERSION = 3
_FLAGS_VERSION = 4
_PLAIN_VERSIONS = (1, 2, 4)
# tensorizer ends a file with the length of a header that does not come.
_END = bytes(8)

_CRC32 = b"\x00\x04"
_SHA256 = b"\x01\x20"
_XSALSA20 = 2
_LENGTH = Struct("<q")
_MAC = secretbox.MAC_BYTES

# A state dict's tensors, such as an adapter's, have no kind of their own.
_KINDS: dict[int, Literal["parameter", "buffer"]] = {0: "parameter", 1: "buffer", 2: "parameter"}
# `module_tensors.MARKER`, which cannot be had without torch.
_MARKER = ".vllm_tensorized_marker"

# A tensor's header holds the MACs of its data, and stands before it. Tensors of up to so many
# bytes wait for it in memory, two of them at most; larger ones do, encrypted, in scratch.
_HELD_BYTES = 64 << 20
# Chunks, across tensors, that are read and not yet encrypted, so that no thread runs out of them.
_CHUNKS_AHEAD = 12

_T = TypeVar("_T")


def encrypted_size(path: Path) -> int:
    """Return how many bytes `encrypt_shard` makes of the file `path`; reads only its index.

    Raises:
        WorkerError: `path` is not a whole plaintext file of tensorizer.
    """
    with _told(path), path.open("rb") as file:
        return _index(path, file).encrypted_size


def encrypt_shard(
    path: Path,
    key: Bytes,
    tensors: list[TensorEntry],
    *,
    expected: Collection[TensorEntry] | None = None,
    threads: int | None = None,
) -> Iterator[bytes]:
    """Yield the encrypted file, in order, reading `path` once and checking it on the way.

    What it holds is appended to `tensors`, and is complete when this ends. A tensor's SHA-256 in
    there is of its plain data and of its header, and so differs from the one in `path`: the header
    does. `expected` are the tensors of `path` as they were when it was made (`read_back`): the
    hashes inside of it tell damage, not another file put in its place. A tensor above 64 MiB waits,
    encrypted, in a nameless file beside `path`. `threads` encrypt at once, by default one for each
    core; two more hash. Memory: at most about 220 MiB.

    Raises:
        WorkerError: the key has not 32 bytes; `path` is damaged, encrypted already or not what was
            `expected`; or a disk fails. Nothing that was yielded may be kept then.
    """
    size = memoryview(key).nbytes
    if size != secretbox.KEY_BYTES:
        raise WorkerError(
            f"{path.name} was not encrypted: the data key has {size} bytes, and "
            f"{secretbox.KEY_BYTES} are needed; give the whole key, as it was made"
        )
    return _file(path, key, tensors, expected, threads or _cores())


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor as the index has it; `offset` is where its header begins."""

    name: bytes
    kind: int
    dtype: bytes
    shape: tuple[int, ...]
    offset: int
    data_offset: int
    size: int

    @property
    def chunks(self) -> int:
        return -(-self.size // CHUNK_BYTES)

    @property
    def text(self) -> str:
        return self.name.decode(errors="replace")

    def tensor(self, sha256: bytes) -> TensorEntry:
        # Types numpy does not have are stored as "<numpy type>\0<torch type>".
        numpy_name, _, torch_name = self.dtype.decode().partition("\0")
        return TensorEntry(
            name=self.text,
            kind=_KINDS[self.kind],
            dtype=torch_name.removeprefix("torch.") or numpy.dtype(numpy_name).name,
            shape=self.shape,
            size=self.size,
            sha256=sha256.hex(),
        )

    def packed(self, offset: int, data_offset: int) -> bytes:
        return b"".join(
            (
                pack("<H", len(self.name)),
                self.name,
                pack("<BB", self.kind, len(self.dtype)),
                self.dtype,
                pack(f"<B{len(self.shape)}I", len(self.shape), *self.shape),
                pack("<QQQ", offset, data_offset, self.size),
            )
        )

    def header(self, module: int, crc32: bytes | None, sha256: bytes, crypt_size: int) -> bytes:
        """The header up to where information on its encryption goes, and the data's size."""
        hashes = b"" if crc32 is None else _CRC32 + crc32
        hashes += _SHA256 + sha256
        body = b"".join(
            (
                pack("<HBH", module, self.kind, len(self.name)),
                self.name,
                pack("<B", len(self.dtype)),
                self.dtype,
                pack(f"<B{len(self.shape)}I", len(self.shape), *self.shape),
                pack("<HB", 1 + len(hashes), 1 if crc32 is None else 2),
                hashes,
            )
        )
        return pack("<Q", 8 + len(body) + crypt_size + _LENGTH.size) + body

    @property
    def header_size(self) -> int:
        return len(self.header(0, bytes(4), bytes(32), 0)) + _LENGTH.size

    @property
    def crypt_size(self) -> int:
        return len(_crypt_info(bytes(secretbox.NONCE_BYTES), [bytes(16)] * self.chunks))

    @property
    def encrypted_header_size(self) -> int:
        # Poly1305 takes the place of the CRC where there are data.
        crc32 = None if self.size else bytes(4)
        return len(self.header(0, crc32, bytes(32), 0)) + self.crypt_size + _LENGTH.size


@dataclass(frozen=True)
class _Index:
    version: int
    entries: tuple[_Entry, ...]

    @property
    def encrypted_size(self) -> int:
        headers = sum(entry.encrypted_header_size for entry in self.entries)
        data = sum(entry.size for entry in self.entries)
        return _FILE_HEADER.size + _INDEX_BYTES + headers + data + len(_END)

    def encrypted(self) -> bytes:
        """The file's header and index as they are with every tensor encrypted."""
        version = max(self.version, _ENCRYPTED_VERSION)
        offset = _FILE_HEADER.size + _INDEX_BYTES
        packed: list[bytes] = []
        for entry in self.entries:
            data_offset = offset + entry.encrypted_header_size
            packed.append(entry.packed(offset, data_offset))
            offset = data_offset + entry.size
        header = _FILE_HEADER.pack(
            _MAGIC,
            version,
            _ENCRYPTED if version >= _FLAGS_VERSION else _NO_FLAGS,
            sum(entry.size for entry in self.entries),
            len(self.entries),
            _INDEX_BYTES,
        )
        return header + b"".join(packed).ljust(_INDEX_BYTES, b"\0")


@dataclass
class _Work:
    """A tensor that is being encrypted; `stored` is the SHA-256 that it must have."""

    entry: _Entry
    module: int
    stored: bytes
    nonce: bytes
    plain: Any
    hidden: Any


@dataclass(frozen=True)
class _Chunk:
    """A chunk of a tensor's data, and what goes on with it."""

    size: int
    plain: bytearray
    sealed: bytearray
    going_on: tuple[Future[None], ...]

    def wait(self) -> tuple[bytes, memoryview]:
        """Its MAC and its ciphertext, when everything is done with it."""
        for future in self.going_on:
            future.result()
        view = memoryview(self.sealed)
        return bytes(view[:_MAC]), view[_MAC : _MAC + self.size]


@dataclass(frozen=True)
class _Encrypted:
    header: bytes
    data: Iterable[bytes]
    tensor: TensorEntry


def _file(
    path: Path,
    key: Bytes,
    tensors: list[TensorEntry],
    expected: Collection[TensorEntry] | None,
    threads: int,
) -> Iterator[bytes]:
    missing = None if expected is None else {tensor.name: tensor for tensor in expected}
    with _told(path), path.open("rb") as file:
        index = _index(path, file)
        yield index.encrypted()
        made = _encrypted(path, file, index, key, missing, threads)
        with closing(made), closing(_one_ahead(made)) as coming:
            for tensor in coming:
                yield tensor.header
                yield from tensor.data
                if tensor.tensor.name != _MARKER:
                    tensors.append(tensor.tensor)
        if file.read(len(_END) + 1) != _END:
            raise _damaged(path, "what follows its last tensor is not its end")
    if missing:
        raise _other(path, min(missing))
    yield _END
    tensors.sort(key=lambda tensor: tensor.name)


def _encrypted(
    path: Path,
    file: BufferedReader,
    index: _Index,
    key: Bytes,
    missing: dict[str, TensorEntry] | None,
    threads: int,
) -> Generator[_Encrypted]:
    ahead: deque[_Work | _Chunk] = deque()
    chunks_ahead = 0
    # Memory that is used again: to be given fresh pages costs a fifth of what encrypting does.
    plains: list[bytearray] = []
    rooms: list[bytearray] = []
    with (
        ThreadPoolExecutor(threads, "seal") as sealing,
        # One thread for each of the two hashes of a tensor keeps its chunks in order.
        ThreadPoolExecutor(1, "hash-plain") as hashing_plain,
        ThreadPoolExecutor(1, "hash-hidden") as hashing_hidden,
    ):

        def begin_chunk(work: _Work, number: int) -> _Chunk:
            size = min(CHUNK_BYTES, work.entry.size - number * CHUNK_BYTES)
            plain = plains.pop() if plains else bytearray(CHUNK_BYTES)
            room = rooms.pop() if rooms else bytearray(_MAC + CHUNK_BYTES)
            data = memoryview(plain)[:size]
            if file.readinto(data) < size:
                raise _damaged(path, f"it ends inside tensor {work.entry.text!r}")
            nonce = secretbox.following(work.nonce, number)
            going_on = (
                hashing_plain.submit(work.plain.update, data),
                hashing_hidden.submit(work.hidden.update, data),
                sealing.submit(secretbox.seal, data, nonce, key, room),
            )
            return _Chunk(size, plain, room, going_on)

        def read() -> Iterator[_Work | _Chunk]:
            for entry in index.entries:
                work = _begin(path, file, entry)
                yield work
                for number in range(entry.chunks):
                    yield begin_chunk(work, number)

        def take() -> _Work | _Chunk:
            nonlocal chunks_ahead
            while not ahead or chunks_ahead < _CHUNKS_AHEAD:
                found = next(reading, None)
                if found is None:
                    break
                ahead.append(found)
                chunks_ahead += isinstance(found, _Chunk)
            taken = ahead.popleft()
            chunks_ahead -= isinstance(taken, _Chunk)
            return taken

        reading = read()
        for entry in index.entries:
            work = cast("_Work", take())
            spill = entry.size > _HELD_BYTES
            data = _Spilled(path.parent) if spill else []
            macs: list[bytes] = []
            for _ in range(entry.chunks):
                chunk = cast("_Chunk", take())
                mac, sealed = chunk.wait()
                macs.append(mac)
                # The takers of bytes hash, slice and write them; a view does, without a copy.
                data.append(cast("bytes", sealed))
                plains.append(chunk.plain)
                if spill:
                    rooms.append(chunk.sealed)
            yield _finish(path, work, macs, data, missing)


def _begin(path: Path, file: BufferedReader, entry: _Entry) -> _Work:
    size = entry.header_size
    header = file.read(size)
    length = _LENGTH.pack(entry.size)
    # A header ends with its CRC, its SHA-256 and the size of its data.
    sha256 = header[-len(length) - 32 : -len(length)]
    crc32 = header[-len(length) - 38 : -len(length) - 34]
    module = int.from_bytes(header[8:10], "little")
    if header != entry.header(module, crc32, sha256, 0) + length:
        raise _damaged(path, f"its index and the header of tensor {entry.text!r} disagree")
    hidden_crc32 = None if entry.size else bytes(4)
    return _Work(
        entry=entry,
        module=module,
        stored=sha256,
        nonce=secrets.token_bytes(secretbox.NONCE_BYTES),
        # tensorizer hashes a header with its hashes zeroed, and without what is on encryption.
        plain=hashlib.sha256(entry.header(module, bytes(4), bytes(32), 0) + length),
        hidden=hashlib.sha256(
            entry.header(module, hidden_crc32, bytes(32), entry.crypt_size) + length
        ),
    )


def _finish(
    path: Path,
    work: _Work,
    macs: list[bytes],
    data: Iterable[bytes],
    missing: dict[str, TensorEntry] | None,
) -> _Encrypted:
    entry = work.entry
    if work.plain.digest() != work.stored:
        raise _damaged(
            path,
            f"tensor {entry.text!r} has SHA-256 {work.plain.hexdigest()}, and had "
            f"{work.stored.hex()} when it was written",
        )
    if missing is not None and entry.text != _MARKER:
        was = missing.pop(entry.text, None)
        if was != entry.tensor(work.stored):
            raise _other(path, entry.text)
    length = _LENGTH.pack(entry.size)
    crc32 = None
    if not entry.size:
        hashed = entry.header(work.module, bytes(4), bytes(32), entry.crypt_size) + length
        crc32 = zlib.crc32(hashed).to_bytes(4, "little")
    sha256 = work.hidden.digest()
    header = entry.header(work.module, crc32, sha256, entry.crypt_size)
    crypt = _crypt_info(work.nonce, macs)
    return _Encrypted(header + crypt + length, data, entry.tensor(sha256))


def _crypt_info(nonce: bytes, macs: list[bytes]) -> bytes:
    """A tensor's information on its encryption, with its size; one without data has none of it."""
    if not macs:
        return pack("<QH", 2, 0)
    method = pack("<HQ24sQ", _XSALSA20, CHUNK_BYTES, nonce, len(macs)) + b"".join(macs)
    return pack("<QHQ", 2 + 8 + len(method), 1, len(method)) + method


def _index(path: Path, file: BufferedReader) -> _Index:
    """Read the header and index of `file`, and leave it at its first tensor."""
    raw = file.read(_FILE_HEADER.size)
    if not raw.startswith(_MAGIC):
        raise _damaged(path, "it is no tensorizer file")
    _, version, flags, data_size, count, index_size = _FILE_HEADER.unpack(raw)
    if version == _ENCRYPTED_VERSION or (version >= _FLAGS_VERSION and flags == _ENCRYPTED):
        raise WorkerError(
            f"{path.name} is encrypted already; encrypt the plaintext file it was made of"
        )
    if version not in _PLAIN_VERSIONS or flags != _NO_FLAGS or index_size != _INDEX_BYTES:
        raise _damaged(path, f"its header is of another format (version {version})")
    raw = file.read(_INDEX_BYTES)
    entries: list[_Entry] = []
    position, offset = 0, _FILE_HEADER.size + _INDEX_BYTES
    for _ in range(count):
        entry, position = _entry(raw, position)
        # Nothing lies between tensors: a gap is one that fell out of the index.
        if entry.offset != offset or entry.data_offset != offset + entry.header_size:
            raise _damaged(path, f"tensor {entry.text!r} is not where the one before it ends")
        offset = entry.data_offset + entry.size
        entries.append(entry)
    size = os.fstat(file.fileno()).st_size
    if not entries or any(raw[position:]) or data_size != sum(entry.size for entry in entries):
        raise _damaged(path, "its header and its index disagree")
    if size != offset + len(_END):
        raise _damaged(path, f"it has {size} bytes, and {offset + len(_END)} by its index")
    return _Index(version, tuple(entries))


def _entry(raw: bytes, position: int) -> tuple[_Entry, int]:
    """Unpack the entry of one tensor, and say where it ends. Damage raises struct's error."""
    (name_size,) = unpack_from("<H", raw, position)
    position += 2
    name, kind, dtype_size = unpack_from(f"<{name_size}sBB", raw, position)
    position += name_size + 2
    dtype, dimensions = unpack_from(f"<{dtype_size}sB", raw, position)
    position += dtype_size + 1
    *shape, offset, data_offset, size = unpack_from(f"<{dimensions}IQQQ", raw, position)
    position += 4 * dimensions + 24
    return _Entry(name, kind, dtype, tuple(shape), offset, data_offset, size), position


class _Spilled:
    """Chunks in a nameless file of a folder; whoever reads them reads them once."""

    def __init__(self, folder: Path) -> None:
        self._file = TemporaryFile(dir=folder)  # noqa: SIM115 - its reader closes it

    def append(self, chunk: bytes) -> None:
        self._file.write(chunk)

    def __iter__(self) -> Iterator[bytes]:
        with self._file as file:
            file.seek(0)
            while chunk := file.read(CHUNK_BYTES):
                yield chunk


def _one_ahead(items: Iterator[_T]) -> Generator[_T]:
    """Yield `items`, the next of which is made, in a thread, while one is used."""
    with ThreadPoolExecutor(1, "ahead") as thread:
        coming = thread.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = thread.submit(next, items, None)
            yield item


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Tell what goes wrong with `path` as WorkerError."""
    try:
        yield
    except OSError as error:
        raise WorkerError(
            f"{path} was not encrypted: {error.strerror or error}. Check that disk and its free "
            "space (its largest tensor must fit there once more), and run again"
        ) from error
    # What a damaged index unpacks to, or does not.
    except (StructError, ValueError, TypeError, KeyError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error


def _damaged(path: Path, how: str) -> WorkerError:
    return WorkerError(
        f"{path.name} is not as tensorizer wrote it, and was not encrypted: {how}. Check the disk "
        f"({path.parent}), make the file again and run again"
    )


def _other(path: Path, name: str) -> WorkerError:
    return WorkerError(
        f"{path.name} is not the file that was to be encrypted: tensor {name!r} is another one, or "
        f"in one of the two only. Check who writes to {path.parent}, and make the file again"
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0))
