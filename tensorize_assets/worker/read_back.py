"""Read a tensorizer file once: hand its bytes on, and hold every tensor against its own hash."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from tensorizer import DecryptionParams, TensorDeserializer
from tensorizer import _crypt_info as tensorizer_crypt_info
from tensorizer import serialization as tensorizer_format

from tensorize_assets.core.errors import WorkerError
from tensorize_assets.core.manifest import TensorEntry
from tensorize_assets.core.tensorizer_limits import MAX_HEADER_BYTES
from tensorize_assets.worker import secretbox
from tensorize_assets.worker.module_tensors import MARKER
from tensorize_assets.worker.secretbox import MAC_BYTES, Bytes
from tensorize_assets.worker.tensor_file import (
    CHUNK_BYTES,
    END,
    KINDS,
    dtype_name,
    has_index_of_another_size,
)

_CHUNK = 8 << 20


def read_back(
    path: Path,
    tensors: list[TensorEntry],
    *,
    needs_marker: bool = True,
    key: Bytes | None = None,
) -> Iterator[bytes]:
    """Yield every byte of `path` in order, each read once, and check it on the way.

    What it holds is appended to `tensors`, and is complete when this ends. A tensor's SHA-256 is
    tensorizer's own: over the tensor's header (hash fields zeroed) and data. An adapter's file
    needs no marker of vLLM's. With `key` the file is encrypted: every tensor is decrypted here, its
    MACs are verified, and its hash is that of the plain data.

    Raises:
        WorkerError: what the file holds is not what was written to it.
    """
    try:
        yield from _read(path, tensors, needs_marker, key)
    except (WorkerError, GeneratorExit):
        raise
    except Exception as error:  # Damage stops tensorizer's parser anywhere.
        raise _damaged(path, f"{type(error).__name__}: {error}") from error


def _read(
    path: Path, tensors: list[TensorEntry], needs_marker: bool, key: Bytes | None
) -> Iterator[bytes]:
    encryption = None if key is None else DecryptionParams.from_key(bytes(key))
    # tensorizer would make room for any index.
    with path.open("rb") as file:
        if has_index_of_another_size(file):
            raise _damaged(path, "its index has another size")
    with TensorDeserializer(
        str(path), device="cpu", lazy_load=True, encryption=encryption
    ) as reader:
        entries = sorted(reader._metadata.values(), key=lambda entry: entry.offset)
    marked = False
    with path.open("rb") as file, ThreadPoolExecutor(1) as beside:
        yield from _upto(file, entries[0].offset)
        for entry in entries:
            # Nothing lies between tensors: a gap is one that fell out of the index.
            if file.tell() != entry.offset:
                raise _damaged(path, f"bytes {file.tell()} to {entry.offset} are of no tensor")
            if entry.data_offset - entry.offset > MAX_HEADER_BYTES:
                raise _damaged(path, f"the header of tensor {entry.name} is too large")
            header_bytes = file.read(entry.data_offset - entry.offset)
            yield header_bytes
            header = tensorizer_format._TensorHeaderDeserializer(
                bytearray(header_bytes), check_crypt_info=key is not None
            )
            _require_same(path, header, entry)
            name = str(header.name.normalize_())
            digest = header.compute_sha256()
            chunk_bytes, check = _CHUNK, digest.update
            if key is not None and entry.data_length:
                opened = _Opened(path, name, header, key, digest)
                chunk_bytes, check = opened.chunk_bytes, opened
            left = entry.data_length
            while left:
                chunk = file.read(min(chunk_bytes, left))
                if not chunk:
                    raise _damaged(path, f"it ends inside tensor {name!r}")
                # hashlib lets go of the interpreter lock: this hash and what the taker of the
                # chunk does with it run at once.
                ahead = beside.submit(check, chunk)
                yield chunk
                ahead.result()
                left -= len(chunk)
            stored = _stored_sha256(path, header)
            if digest.digest() != stored:
                raise _damaged(
                    path,
                    f"tensor {name!r} has SHA-256 {digest.hexdigest()}, and had {stored.hex()} "
                    "when it was written",
                )
            if name == f".{MARKER}":
                marked = True
            else:
                tensors.append(_tensor_entry(entry, name, stored.hex()))
        end = file.read(len(END) + 1)
        if end != END:
            raise _damaged(
                path, f"what follows its last tensor at byte {file.tell()} is not its end"
            )
        yield end
    if needs_marker and not marked:
        raise WorkerError(
            f"{path.name} carries no vLLM marker, and vLLM would not load it as a model of its "
            "own; write it with write_shard"
        )
    tensors.sort(key=lambda tensor: tensor.name)


class _Opened:
    """Decrypts one tensor's chunks, as they come, into the digest of its plain data."""

    def __init__(self, path: Path, name: str, header: Any, key: Bytes, digest: Any) -> None:
        (method,) = header.crypt_info.chunks
        parallel = isinstance(method, tensorizer_crypt_info.XSalsa20ParallelChunk)
        if not parallel or method.chunk_size != CHUNK_BYTES:
            raise _damaged(path, f"tensor {name!r} is encrypted in another way")
        self.chunk_bytes = method.chunk_size
        self._path, self._name, self._method = path, name, method
        self._key, self._digest = key, digest
        self._count = 0
        self._room = bytearray(MAC_BYTES + method.chunk_size)

    def __call__(self, chunk: bytes, /) -> None:
        number, self._count = self._count, self._count + 1
        size = len(chunk)
        self._room[:MAC_BYTES] = self._method.macs[number]
        self._room[MAC_BYTES : MAC_BYTES + size] = chunk
        nonce = secretbox.following(bytes(self._method.nonce), number)
        if not secretbox.open_in_place(self._room, size, nonce, self._key):
            raise _damaged(self._path, f"chunk {number} of tensor {self._name!r} was changed")
        self._digest.update(memoryview(self._room)[MAC_BYTES : MAC_BYTES + size])


def _damaged(path: Path, how: str) -> WorkerError:
    return WorkerError(
        f"{path.name} reads back differently than it was written: {how}. Check the scratch disk "
        f"({path.parent}) and run again"
    )


def _upto(file: BinaryIO, position: int) -> Iterator[bytes]:
    """Yield from here up to `position`, or to the end of a file that is shorter."""
    while chunk := file.read(min(_CHUNK, max(0, position - file.tell()))):
        yield chunk


def _require_same(path: Path, header: Any, entry: Any) -> None:
    """A tensor's hash covers its own header, not its entry in the index of the file."""
    ours = (header.name, header.tensor_type, header.dtype, header.shape, header.data_length)
    theirs = (entry.name, entry.type, entry.dtype, entry.shape, entry.data_length)
    if ours != theirs:
        raise _damaged(path, f"its index and the header of tensor {header.name} disagree")


def _stored_sha256(path: Path, header: Any) -> bytes:
    for stored in header.hashes:
        if stored.type == tensorizer_format.HashType.SHA256:
            return bytes(stored.hash)
    raise _damaged(path, f"tensor {header.name} has no SHA-256")


def _tensor_entry(entry: Any, name: str, sha256: str) -> TensorEntry:
    return TensorEntry(
        name=name,
        kind=KINDS[int(entry.type)],
        dtype=dtype_name(entry.dtype),
        shape=tuple(entry.shape),
        size=entry.data_length,
        sha256=sha256,
    )
