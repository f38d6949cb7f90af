"""tensorizer's file format (2.10.1), as far as files are made of other files without torch.

tensorizer's own code can only write a module that is loaded; tests hold the two against each other.
"""

from __future__ import annotations

import hashlib
import io
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from struct import Struct, pack, unpack_from
from struct import error as StructError
from typing import Any, BinaryIO, Literal

import numpy

from tensorize_assets.core.errors import WorkerError
from tensorize_assets.core.manifest import TensorEntry
from tensorize_assets.core.tensorizer_limits import DTYPE
from tensorize_assets.worker import secretbox

CHUNK_BYTES = 2 << 20
"""What tensorizer encrypts under one nonce; a reader takes it from the file."""

END = bytes(8)
"""What ends a file: the length of a header that does not come."""

MARKER_NAME = ".vllm_tensorized_marker"
"""`module_tensors.MARKER` as a file has it, which cannot be had without torch."""

# Magic, version, flags, bytes of tensor data, number of tensors, bytes of the index.
_FILE_HEADER = Struct("<5sI32sQ8xQQ")
_MAGIC = b"|TZR|"
_INDEX_BYTES = 256 << 10
_NO_FLAGS = bytes(32)
_ENCRYPTED = b"\x01" + bytes(31)
# The first version that knows encryption, and says by its number alone that a file has it. The
# next has flags, and is what a file with vLLM's marker gets, a tensor without data.
_ENCRYPTED_VERSION = 3
FLAGS_VERSION = 4
_PLAIN_VERSIONS = (1, 2, 4)

_CRC32 = b"\x00\x04"
_SHA256 = b"\x01\x20"
_XSALSA20 = 2
_LENGTH = Struct("<q")
# Before a tensor's MACs: the method, the size of a chunk, the first nonce, how many MACs.
_METHOD = Struct("<HQ24sQ")
# Bytes before the method, and of a tensor that has none.
_SIZES = 18
_NONE = 10

KINDS: dict[int, Literal["parameter", "buffer"]] = {0: "parameter", 1: "buffer", 2: "parameter"}
"""Of tensors, by the number in a file. A state dict's, such as an adapter's, have none: 2."""

# A damaged index or header unpacks to these, or not at all.
BROKEN = (StructError, ValueError, TypeError, KeyError)


def dtype_name(stored: str) -> str:
    """Return torch's name of a dtype as a file has it."""
    # Types numpy does not have are stored as "<numpy type>\0<torch type>".
    numpy_name, _, torch_name = stored.partition("\0")
    if not DTYPE.fullmatch(numpy_name):
        raise ValueError(f"{stored[:80]!r} is no type")
    return torch_name.removeprefix("torch.") or numpy.dtype(numpy_name).name


@dataclass(frozen=True, slots=True)
class Crypt:
    """How a tensor's data are encrypted: the first chunk's nonce, and every chunk's MAC."""

    nonce: bytes
    macs: Sequence[bytes]

    def packed(self) -> bytes:
        """As a header holds it; a tensor without data has none."""
        if not self.macs:
            return pack("<QH", 2, 0)
        method = _METHOD.pack(_XSALSA20, CHUNK_BYTES, self.nonce, len(self.macs))
        method += b"".join(self.macs)
        return pack("<QHQ", 2 + 8 + len(method), 1, len(method)) + method


@dataclass(frozen=True, slots=True)
class Entry:
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

    def chunk_size(self, number: int) -> int:
        return min(CHUNK_BYTES, self.size - number * CHUNK_BYTES)

    @property
    def text(self) -> str:
        return self.name.decode(errors="replace")

    def tensor(self, sha256: bytes) -> TensorEntry:
        return TensorEntry(
            name=self.text,
            kind=KINDS[self.kind],
            dtype=dtype_name(self.dtype.decode()),
            shape=self.shape,
            size=self.size,
            sha256=sha256.hex(),
        )

    def hashed(self, module: int, *, encrypted: bool) -> Any:
        """The SHA-256 that goes on with the tensor's data: of a header with its hashes zeroed.

        What is on encryption is left out, and counts only in the header's length.
        """
        crc32 = None if encrypted and self.size else bytes(4)
        header = self._header(module, crc32, bytes(32), self._crypt_size if encrypted else 0)
        return hashlib.sha256(header + _LENGTH.pack(self.size))

    def header(self, module: int, sha256: bytes, crypt: Crypt) -> bytes:
        """The header of the encrypted tensor."""
        # Poly1305 takes the place of the CRC where there are data.
        crc32 = None
        if not self.size:
            empty = self._header(module, bytes(4), bytes(32), self._crypt_size)
            crc32 = zlib.crc32(empty + _LENGTH.pack(0)).to_bytes(4, "little")
        start = self._header(module, crc32, sha256, self._crypt_size)
        return start + crypt.packed() + _LENGTH.pack(self.size)

    def header_size(self, *, encrypted: bool) -> int:
        crc32 = None if encrypted and self.size else bytes(4)
        start = self._header(0, crc32, bytes(32), 0)
        return len(start) + (self._crypt_size if encrypted else 0) + _LENGTH.size

    def parsed(self, header: bytes, *, encrypted: bool) -> Parsed | None:
        """What the tensor's header holds; None unless it is this tensor's."""
        crypt = Crypt(bytes(secretbox.NONCE_BYTES), ())
        end = len(header) - _LENGTH.size
        if encrypted:
            end -= self._crypt_size
            if self.size:
                _, _, nonce, _ = _METHOD.unpack_from(header, end + _SIZES)
                first = end + _SIZES + _METHOD.size
                macs = [header[at : at + 16] for at in range(first, first + 16 * self.chunks, 16)]
                crypt = Crypt(nonce, macs)
        # Before it stand the CRC, where there is one, and the SHA-256.
        sha256 = header[end - 32 : end]
        crc32 = None if encrypted and self.size else header[end - 38 : end - 34]
        module = int.from_bytes(header[8:10], "little")
        crypt_size = self._crypt_size if encrypted else 0
        start = self._header(module, crc32, sha256, crypt_size)
        whole = start + (crypt.packed() if encrypted else b"") + _LENGTH.pack(self.size)
        return Parsed(module, sha256, crypt) if header == whole else None

    def packed(self) -> bytes:
        """As the index holds it."""
        return b"".join(
            (
                pack("<H", len(self.name)),
                self.name,
                pack("<BB", self.kind, len(self.dtype)),
                self.dtype,
                pack(f"<B{len(self.shape)}I", len(self.shape), *self.shape),
                pack("<QQQ", self.offset, self.data_offset, self.size),
            )
        )

    @property
    def _crypt_size(self) -> int:
        # Not by packing one: a damaged size stands for any number of MACs.
        return _SIZES + _METHOD.size + secretbox.MAC_BYTES * self.chunks if self.size else _NONE

    def _header(self, module: int, crc32: bytes | None, sha256: bytes, crypt_size: int) -> bytes:
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


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a tensor's header holds beside what its index entry does."""

    module: int
    sha256: bytes
    crypt: Crypt


@dataclass(frozen=True)
class Index:
    """What a file begins with: which tensors it holds, and whether they are encrypted."""

    version: int
    encrypted: bool
    entries: tuple[Entry, ...]

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        last = self.entries[-1]
        return last.data_offset + last.size + len(END)

    def as_encrypted(self) -> Index:
        """The index of the file with every tensor encrypted."""
        offset = _FILE_HEADER.size + _INDEX_BYTES
        entries: list[Entry] = []
        for entry in self.entries:
            data_offset = offset + entry.header_size(encrypted=True)
            entries.append(replace(entry, offset=offset, data_offset=data_offset))
            offset = data_offset + entry.size
        return Index(max(self.version, _ENCRYPTED_VERSION), True, tuple(entries))

    def packed(self) -> bytes:
        """The header and index of a file that is encrypted."""
        header = _FILE_HEADER.pack(
            _MAGIC,
            self.version,
            _ENCRYPTED if self.version >= FLAGS_VERSION else _NO_FLAGS,
            sum(entry.size for entry in self.entries),
            len(self.entries),
            _INDEX_BYTES,
        )
        return header + b"".join(map(Entry.packed, self.entries)).ljust(_INDEX_BYTES, b"\0")


def read_index(file: BinaryIO, where: str) -> Index:
    """Read the header and index of `file`, and leave it at its first tensor.

    Raises:
        WorkerError: it is not a whole file as tensorizer writes it; `where` is what it is called.
    """
    try:
        return _index(file, where)
    except BROKEN as error:
        raise damaged(where, f"{type(error).__name__}: {error}") from error


def has_index_of_another_size(file: BinaryIO) -> bool:
    """Whether `file` says that its index is larger or smaller than tensorizer's is."""
    raw = file.read(_FILE_HEADER.size)
    whole = len(raw) == _FILE_HEADER.size and raw.startswith(_MAGIC)
    return whole and _FILE_HEADER.unpack(raw)[-1] != _INDEX_BYTES


def damaged(where: str, how: str) -> WorkerError:
    """The error of a file that is not whole."""
    folder, _, name = where.rpartition("/")
    return WorkerError(
        f"{name} is not as tensorizer wrote it, and was not encrypted: {how}. Check the store "
        f"({folder}), make the file again and run again"
    )


def _index(file: BinaryIO, where: str) -> Index:
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    raw = file.read(_FILE_HEADER.size)
    if not raw.startswith(_MAGIC):
        raise damaged(where, "it is no tensorizer file")
    _, version, flags, data_size, count, index_size = _FILE_HEADER.unpack(raw)
    encrypted = version == _ENCRYPTED_VERSION or (version == FLAGS_VERSION and flags == _ENCRYPTED)
    own_flags = _ENCRYPTED if encrypted and version == FLAGS_VERSION else _NO_FLAGS
    if (
        (not encrypted and version not in _PLAIN_VERSIONS)
        or flags != own_flags
        or index_size != _INDEX_BYTES
    ):
        raise damaged(where, f"its header is of another format (version {version})")
    raw = file.read(_INDEX_BYTES)
    entries: list[Entry] = []
    position, offset = 0, _FILE_HEADER.size + _INDEX_BYTES
    for _ in range(count):
        entry, position = _entry(raw, position)
        # Nothing lies between tensors: a gap is one that fell out of the index.
        own = offset + entry.header_size(encrypted=encrypted)
        if entry.offset != offset or entry.data_offset != own:
            raise damaged(where, f"tensor {entry.text!r} is not where the one before it ends")
        offset = entry.data_offset + entry.size
        entries.append(entry)
    if not entries or any(raw[position:]) or data_size != sum(entry.size for entry in entries):
        raise damaged(where, "its header and its index disagree")
    if size != offset + len(END):
        raise damaged(where, f"it has {size} bytes, and {offset + len(END)} by its index")
    return Index(version, encrypted, tuple(entries))


def _entry(raw: bytes, position: int) -> tuple[Entry, int]:
    """Unpack the entry of one tensor, and say where it ends. Damage raises one of BROKEN."""
    (name_size,) = unpack_from("<H", raw, position)
    position += 2
    name, kind, dtype_size = unpack_from(f"<{name_size}sBB", raw, position)
    position += name_size + 2
    dtype, dimensions = unpack_from(f"<{dtype_size}sB", raw, position)
    position += dtype_size + 1
    *shape, offset, data_offset, size = unpack_from(f"<{dimensions}IQQQ", raw, position)
    position += 4 * dimensions + 24
    return Entry(name, kind, dtype, tuple(shape), offset, data_offset, size), position
