"""Make of a tensorizer file the one that tensorizer would have written with a key.

Nothing of this imports torch, which alone would take half of the memory that encrypting may use.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, TypeVar, cast

from tensorize_assets.core.errors import WorkerError
from tensorize_assets.core.manifest import TensorEntry
from tensorize_assets.worker import secretbox
from tensorize_assets.worker.secretbox import MAC_BYTES, Bytes
from tensorize_assets.worker.tensor_file import (
    BROKEN,
    CHUNK_BYTES,
    END,
    MARKER_NAME,
    Crypt,
    Entry,
    Index,
    damaged,
)

# A tensor's header holds the MACs of its data, and stands before it. Tensors of up to so many
# bytes wait for it in memory, two of them at most; larger ones do, encrypted, in scratch.
HELD_BYTES = 64 << 20
# Chunks, across tensors, that are read and not yet encrypted, so that no thread runs out of them.
_CHUNKS_AHEAD = 12

_T = TypeVar("_T")


def check_key(key: Bytes, what: str) -> None:
    """Raises WorkerError when a data key has not the length of one."""
    size = memoryview(key).nbytes
    if size != secretbox.KEY_BYTES:
        raise WorkerError(
            f"{what} was not encrypted: the data key has {size} bytes, and "
            f"{secretbox.KEY_BYTES} are needed; give the whole key, as it was made"
        )


def encrypt_shard(
    file: BinaryIO,
    index: Index,
    where: str,
    key: Bytes,
    tensors: list[TensorEntry],
    *,
    scratch: Path,
    old_key: Bytes | None = None,
    expected: Collection[TensorEntry] | None = None,
    threads: int | None = None,
    share: int = 1,
) -> Generator[bytes]:
    """Yield the encrypted file, in order, reading `file` once and checking it on the way.

    `file` stands where `read_index` left it; `where` is what messages call it. With `old_key` it is
    encrypted already: each chunk's MAC is verified, and what is yielded is encrypted with `key`.

    What it holds is appended to `tensors`, and is complete when this ends. A tensor's SHA-256 in
    there is of its plain data and of its encrypted header, and so differs from that of a plaintext
    file. `expected` are the tensors of `file` as they were when it was made: the hashes inside of
    it tell damage, not another file put in its place. The same file and key give the same bytes.

    A large tensor waits, encrypted, in a nameless file in `scratch`. `threads` encrypt at once, by
    default one for each core; two more hash. Memory: at most about 180 MiB by `share`, in how many
    such streams this is one.

    Raises:
        WorkerError: the key has not 32 bytes; `file` is damaged, is encrypted and there is no
            `old_key` (or the other way round), or not what was `expected`; or a disk fails. Nothing
            that was yielded may be kept then.
    """
    check_key(key, where)
    if old_key is not None:
        check_key(old_key, where)
    if index.encrypted and old_key is None:
        raise WorkerError(
            f"{where} is encrypted already; encrypt the plaintext file it was made of, or give "
            "the key that it has"
        )
    if old_key is not None and not index.encrypted:
        raise WorkerError(f"{where} is not encrypted, and there is a key to open it: leave it out")
    work = _Encryption(
        file=file,
        index=index,
        where=where,
        key=key,
        old_key=old_key,
        scratch=scratch,
        held=HELD_BYTES // share,
        ahead=max(4, _CHUNKS_AHEAD // share),
        threads=threads or len(os.sched_getaffinity(0)),
    )
    return _file(work, tensors, expected)


@dataclass(frozen=True)
class _Encryption:
    """What is to be done, and in how much room."""

    file: BinaryIO
    index: Index
    where: str
    key: Bytes
    old_key: Bytes | None
    scratch: Path
    held: int
    ahead: int
    threads: int


@dataclass(frozen=True)
class _Tensor:
    """A tensor that is being encrypted.

    `stored` is the SHA-256 that `checked` must come to, and `hidden` makes that of the encrypted
    file: the same one where the tensor was encrypted before.
    """

    entry: Entry
    module: int
    stored: bytes
    crypt: Crypt
    nonce: bytes
    checked: Any
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
        return bytes(view[:MAC_BYTES]), view[MAC_BYTES : MAC_BYTES + self.size]


@dataclass(frozen=True)
class _Encrypted:
    header: bytes
    data: Iterable[bytes]
    tensor: TensorEntry


def _file(
    work: _Encryption, tensors: list[TensorEntry], expected: Collection[TensorEntry] | None
) -> Generator[bytes]:
    missing = None if expected is None else {tensor.name: tensor for tensor in expected}
    with _told(work):
        yield work.index.as_encrypted().packed()
        made = _encrypted(work, missing)
        with closing(made), closing(_one_ahead(made)) as coming:
            for tensor in coming:
                yield tensor.header
                yield from tensor.data
                if tensor.tensor.name != MARKER_NAME:
                    tensors.append(tensor.tensor)
        if work.file.read(len(END) + 1) != END:
            raise damaged(work.where, "what follows its last tensor is not its end")
    if missing:
        raise _other(work.where, min(missing))
    yield END
    tensors.sort(key=lambda tensor: tensor.name)


def _encrypted(work: _Encryption, missing: dict[str, TensorEntry] | None) -> Generator[_Encrypted]:
    ahead: deque[_Tensor | _Chunk] = deque()
    chunks_ahead = 0
    # Memory that is used again: to be given fresh pages costs a fifth of what encrypting does.
    plains: list[bytearray] = []
    rooms: list[bytearray] = []
    with (
        ThreadPoolExecutor(work.threads, "seal") as sealing,
        # One thread for each of the two hashes of a tensor keeps its chunks in order.
        ThreadPoolExecutor(1, "hash-plain") as hashing_plain,
        ThreadPoolExecutor(1, "hash-hidden") as hashing_hidden,
    ):

        def begin_chunk(tensor: _Tensor, number: int) -> _Chunk:
            size = tensor.entry.chunk_size(number)
            plain = plains.pop() if plains else bytearray(MAC_BYTES + CHUNK_BYTES)
            room = rooms.pop() if rooms else bytearray(MAC_BYTES + CHUNK_BYTES)
            data = memoryview(plain)[MAC_BYTES : MAC_BYTES + size]
            if _fill(work.file, data) < size:
                raise damaged(work.where, f"it ends inside tensor {tensor.entry.text!r}")
            nonce = secretbox.following(tensor.nonce, number)
            if work.old_key is None:
                sealed = sealing.submit(secretbox.seal, data, nonce, work.key, room)
                checked = hashing_plain.submit(tensor.checked.update, data)
                hidden = hashing_hidden.submit(tensor.hidden.update, data)
                return _Chunk(size, plain, room, (checked, hidden, sealed))
            plain[:MAC_BYTES] = tensor.crypt.macs[number]
            sealed = sealing.submit(_seal_anew, work, tensor, number, plain, nonce, room)
            hidden = hashing_hidden.submit(_after, sealed, tensor.hidden.update, data)
            return _Chunk(size, plain, room, (sealed, hidden))

        def read() -> Iterator[_Tensor | _Chunk]:
            for entry in work.index.entries:
                tensor = _begin(work, entry)
                yield tensor
                for number in range(entry.chunks):
                    yield begin_chunk(tensor, number)

        def take() -> _Tensor | _Chunk:
            nonlocal chunks_ahead
            while not ahead or chunks_ahead < work.ahead:
                found = next(reading, None)
                if found is None:
                    break
                ahead.append(found)
                chunks_ahead += isinstance(found, _Chunk)
            taken = ahead.popleft()
            chunks_ahead -= isinstance(taken, _Chunk)
            return taken

        reading = read()
        for entry in work.index.entries:
            tensor = cast("_Tensor", take())
            spill = entry.size > work.held
            data = _Spilled(work.scratch) if spill else []
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
            yield _finish(work, tensor, macs, data, missing)


def _fill(file: BinaryIO, data: memoryview) -> int:
    """Read all of `data`, or up to the end; return how much."""
    return cast("Any", file).readinto(data)


def _seal_anew(
    work: _Encryption,
    tensor: _Tensor,
    number: int,
    plain: bytearray,
    nonce: bytes,
    room: bytearray,
) -> None:
    size = tensor.entry.chunk_size(number)
    before = secretbox.following(tensor.crypt.nonce, number)
    if not secretbox.open_in_place(plain, size, before, cast("Bytes", work.old_key)):
        raise damaged(
            work.where,
            f"chunk {number} of tensor {tensor.entry.text!r} was changed, or encrypted with "
            "another key than the one given for it",
        )
    secretbox.seal(memoryview(plain)[MAC_BYTES : MAC_BYTES + size], nonce, work.key, room)


def _after(first: Future[None], then: Callable[[memoryview], None], data: memoryview) -> None:
    first.result()
    then(data)


def _begin(work: _Encryption, entry: Entry) -> _Tensor:
    header = work.file.read(entry.header_size(encrypted=work.index.encrypted))
    parsed = entry.parsed(header, encrypted=work.index.encrypted)
    if parsed is None:
        raise damaged(work.where, f"its index and the header of tensor {entry.text!r} disagree")
    hidden = entry.hashed(parsed.module, encrypted=True)
    again = work.index.encrypted
    return _Tensor(
        entry=entry,
        module=parsed.module,
        stored=parsed.sha256,
        crypt=parsed.crypt,
        nonce=secretbox.synthetic_nonce(parsed.sha256, work.key),
        checked=hidden if again else entry.hashed(parsed.module, encrypted=False),
        hidden=hidden,
    )


def _finish(
    work: _Encryption,
    tensor: _Tensor,
    macs: list[bytes],
    data: Iterable[bytes],
    missing: dict[str, TensorEntry] | None,
) -> _Encrypted:
    entry = tensor.entry
    if tensor.checked.digest() != tensor.stored:
        raise damaged(
            work.where,
            f"tensor {entry.text!r} has SHA-256 {tensor.checked.hexdigest()}, and had "
            f"{tensor.stored.hex()} when it was written",
        )
    if missing is not None and entry.text != MARKER_NAME:
        was = missing.pop(entry.text, None)
        if was != entry.tensor(tensor.stored):
            raise _other(work.where, entry.text)
    sha256 = tensor.hidden.digest()
    header = entry.header(tensor.module, sha256, Crypt(tensor.nonce, macs))
    return _Encrypted(header, data, entry.tensor(sha256))


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
def _told(work: _Encryption) -> Iterator[None]:
    """Tell what goes wrong with the file, or with scratch, as WorkerError."""
    try:
        yield
    except OSError as error:
        raise WorkerError(
            f"{work.where} was not encrypted: {error.strerror or error}. Check its disk, and the "
            f"free space of {work.scratch} (its largest tensor must fit there), and run again"
        ) from error
    # What a damaged index unpacks to, or does not.
    except BROKEN as error:
        raise damaged(work.where, f"{type(error).__name__}: {error}") from error


def _other(where: str, name: str) -> WorkerError:
    folder, _, file = where.rpartition("/")
    return WorkerError(
        f"{file} is not the file that was to be encrypted: tensor {name!r} is another one, or "
        f"in one of the two only. Check who writes to {folder}, and make the file again"
    )
