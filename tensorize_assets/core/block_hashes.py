"""Hashes of a file's blocks, so that a part of it can be told from another without the rest.

A file's own SHA-256 says nothing of a range. So whoever has read a whole, verified file makes this
list and signs it, and a reader of ranges believes nothing else.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection, Iterable, Iterator
from typing import Literal

from tensorize_assets.core import jsonio, signing
from tensorize_assets.core.errors import StoreError

BLOCK_BYTES = 128 * 1024
"""Small beside what a rank reads of one tensor: ranges are widened to whole blocks."""

_HASH_BYTES = 32

# Base64 takes 4 bytes for 3, and the document around it is small.
LARGEST_FILE = (jsonio.MAX_BYTES - 4096) // 4 * 3 // _HASH_BYTES * BLOCK_BYTES
"""Of larger files, above 45 GB, there is no list: nobody would read so large a document."""


class _BlockList(jsonio.Record):
    """The signed document: `hashes` is the base64 of what `BlockHasher.finish` returns."""

    format: Literal[1] = 1
    file_sha256: jsonio.Sha256
    size: int
    block_bytes: int
    hashes: str


class BlockHasher:
    """Takes a file's bytes in their order, in chunks of any size."""

    def __init__(self) -> None:
        self._hashes: list[bytes] = []
        self._block = hashlib.sha256()
        self._filled = 0

    def update(self, chunk: bytes | memoryview) -> None:
        """Go on with `chunk`."""
        view = memoryview(chunk)
        while view:
            part = view[: BLOCK_BYTES - self._filled]
            self._block.update(part)
            self._filled += len(part)
            if self._filled == BLOCK_BYTES:
                self._end()
            view = view[len(part) :]

    def passing(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Hand on the chunks of a file, each hashed."""
        for chunk in chunks:
            self.update(chunk)
            yield chunk

    def finish(self) -> bytes:
        """Return the SHA-256 of each block, one after another; of the last, shorter one too."""
        if self._filled:
            self._end()
        return b"".join(self._hashes)

    def _end(self) -> None:
        self._hashes.append(self._block.digest())
        self._block = hashlib.sha256()
        self._filled = 0


def hashes_of(chunks: Iterable[bytes | memoryview]) -> bytes:
    """Return what `BlockHasher.finish` does for a file's chunks."""
    hasher = BlockHasher()
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.finish()


def encode(file_sha256: str, size: int, hashes: bytes, key: signing.SecretKey) -> bytes:
    """Return the signed list of a file's blocks."""
    listed = _BlockList(
        file_sha256=file_sha256,
        size=size,
        block_bytes=BLOCK_BYTES,
        hashes=base64.b64encode(hashes).decode(),
    )
    return signing.sign("blocks", jsonio.dump_record(listed), key)


def decode(data: bytes, file_sha256: str, size: int, trusted: Collection[str], where: str) -> bytes:
    """Return the hashes in the signed list of a file's blocks.

    Raises:
        SignatureError: nobody who is trusted has signed it.
        StoreError: it is damaged, or of another file or other blocks.
    """
    payload = signing.verify("blocks", data, trusted, where).payload
    listed = jsonio.load_record(_BlockList, jsonio.canonical(payload, where), where)
    try:
        hashes = base64.b64decode(listed.hashes, validate=True)
    except ValueError as error:
        raise StoreError(f"{where} is damaged ({error}); remove it") from None
    blocks = -(-size // BLOCK_BYTES)
    if (listed.file_sha256, listed.size, listed.block_bytes, len(hashes)) != (
        file_sha256,
        size,
        BLOCK_BYTES,
        blocks * _HASH_BYTES,
    ):
        raise StoreError(f"{where} is the list of another file, or of other blocks; remove it")
    return hashes


def widened(start: int, end: int, size: int) -> tuple[int, int]:
    """Return the range of whole blocks around the bytes `start` to `end` of a file of `size`."""
    return start - start % BLOCK_BYTES, min(-(-end // BLOCK_BYTES) * BLOCK_BYTES, size)


def require_blocks(data: memoryview, start: int, hashes: bytes, uri: str) -> None:
    """Hold whole blocks that begin at byte `start` against the file's `hashes`.

    Raises:
        StoreError: one differs.
    """
    for offset in range(0, len(data), BLOCK_BYTES):
        number = (start + offset) // BLOCK_BYTES
        found = hashlib.sha256(data[offset : offset + BLOCK_BYTES]).digest()
        if found != hashes[number * _HASH_BYTES : (number + 1) * _HASH_BYTES]:
            raise StoreError(
                f"{uri} has other bytes in block {number} (of {BLOCK_BYTES}) than the file "
                "that was downloaded and verified: it was changed or damaged in the store. Remove "
                "it and materialize hf_snapshot again"
            )
