"""Attempts to load an encrypted artifact that must fail: each reads one tensor of its first shard.

They go the way that our loader goes, through a stream that flips one byte; no shard is copied.
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from struct import pack
from typing import Any, BinaryIO, cast

from tensorizer import serialization as tensorizer_format
from vllm.model_executor.model_loader.tensorizer import TensorizerConfig

from tensorize_assets.core import compare
from tensorize_assets.core.errors import StoreError
from tensorize_assets.core.private_files import create_private
from tensorize_assets.core.tasks import Refusal
from tensorize_assets.vllm_plugin import streams
from tensorize_assets.vllm_plugin.loader import arguments_of, file_errors, require_whole


@dataclass(frozen=True)
class _Flip:
    """The byte at `position` differs from the stored one in the bits of `mask`."""

    position: int
    mask: int = 0x80


def try_all(file: streams.TensorFile, keyfile: Path) -> tuple[Refusal, ...]:
    """What becomes of each of `compare.ATTEMPTS`. Keys are written beside `keyfile`.

    Raises:
        StoreError: the store, or the way to it, is in trouble, or the file was replaced.
        ValueError, CryptographyError, HashMismatchError: it does not load as it is.
    """
    name, flips = _places(file, keyfile)
    keys: dict[str, Path | None] = {
        "no key": None,
        "wrong key": _written(keyfile.with_name("wrong-key"), os.urandom(32)),
        "short key": _written(keyfile.with_name("short-key"), keyfile.read_bytes()[:31]),
    }
    return tuple(
        _tried(attempt, file, keys.get(attempt, keyfile), name, flips.get(attempt))
        for attempt in compare.ATTEMPTS
    )


def _tried(
    attempt: str, file: streams.TensorFile, keyfile: Path | None, name: Any, flip: _Flip | None
) -> Refusal:
    try:
        _read(file, keyfile, name, flip)
    except StoreError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever refuses, refuses: its message is judged
        said = f"{type(error).__name__}: {error}"
        return Refusal(attempt=attempt, refused=True, message=said)
    return Refusal(attempt=attempt, refused=False, message="")


def _read(
    file: streams.TensorFile, keyfile: Path | None, name: Any = None, flip: _Flip | None = None
) -> Any:
    """Load one tensor, by default the smallest that has values.

    Returns the deserializer, closed, and the tensor's header.
    """
    config = TensorizerConfig(
        tensorizer_uri=file.uri,
        verify_hash=True,
        num_readers=1,
        encryption_keyfile=str(keyfile) if keyfile else None,
    )
    arguments = arguments_of(config).deserialization_kwargs
    stream = file.glance()
    if flip is not None:
        stream = cast("BinaryIO", _Flipped(stream, flip))
    with (
        file_errors(file.uri),
        stream,
        streams.Deserializer(stream, device="cpu", lazy_load=True, **arguments) as deserializer,
    ):
        require_whole(file, deserializer)
        if name is None:
            sizes = {key: entry.data_length for key, entry in deserializer._metadata.items()}
            name = min(filter(sizes.__getitem__, sizes), key=sizes.__getitem__)
        [loaded] = deserializer._bulk_load([name])
        return deserializer, loaded.header


def _places(file: streams.TensorFile, keyfile: Path) -> tuple[Any, dict[str, _Flip]]:
    """A tensor of a file that loads, and which byte each attempt flips."""
    deserializer, header = _read(file, keyfile)
    entry = deserializer._metadata[header.name]
    magic = len(tensorizer_format.TENSORIZER_MAGIC)
    index = magic + len(deserializer._file_header.to_bytes())
    location = pack("<QQQ", entry.offset, entry.data_offset, entry.data_length)
    size = index + deserializer._metadata_raw.index(location) + len(location) - 8
    own_size = pack("<Q", entry.data_length)
    # Where only one byte of the size is not zero, as of many a norm's, the size becomes zero: a
    # tensor without values, of which tensorizer makes zeros.
    byte, value = next((at, value) for at, value in enumerate(own_size) if value)
    method = deserializer._get_encryption_method(header.crypt_info)
    tag = bytes(method.macs[0] if hasattr(method, "macs") else method.mac)
    return header.name, {
        "header": _Flip(magic),
        "metadata": _Flip(size),
        "tensor header": _Flip(entry.data_offset - len(own_size) + byte, value),
        "tensor": _Flip(entry.data_offset + entry.data_length // 2),
        "tag": _Flip(entry.offset + bytes(header.buffer).index(tag)),
    }


class _Flipped(io.BufferedIOBase):
    """A stream with one byte changed."""

    def __init__(self, stream: BinaryIO, flip: _Flip) -> None:
        self._stream = stream
        self._flip = flip

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._stream.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return self._stream.seek(offset, whence)

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        start = self._stream.tell()
        count = cast("io.BufferedIOBase", self._stream).readinto(view)
        if start <= self._flip.position < start + count:
            view[self._flip.position - start] ^= self._flip.mask
        return count

    def read(self, size: int | None = -1, /) -> bytes:
        start = self._stream.tell()
        data = bytearray(self._stream.read(-1 if size is None else size))
        if start <= self._flip.position < start + len(data):
            data[self._flip.position - start] ^= self._flip.mask
        return bytes(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


def _written(path: Path, key: bytes) -> Path:
    def write(descriptor: int) -> None:
        os.write(descriptor, key)

    create_private(path, write)
    return path
