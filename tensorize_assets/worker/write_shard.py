"""Write one loaded rank as tensorizer does, in the form that vLLM takes for its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread
from typing import Any, BinaryIO, NamedTuple

import numpy
import torch
from tensorizer import TensorSerializer
from tensorizer._NumpyTensor import _NumpyTensor

from tensorize_assets.core.errors import WorkerError
from tensorize_assets.core.manifest import TensorEntry
from tensorize_assets.core.store import explained
from tensorize_assets.worker import secretbox
from tensorize_assets.worker.encrypt_shard import check_key
from tensorize_assets.worker.module_tensors import MARKER, marker, module_tensors
from tensorize_assets.worker.secretbox import MAC_BYTES, Bytes
from tensorize_assets.worker.serializer import serializer
from tensorize_assets.worker.tensor_file import (
    CHUNK_BYTES,
    END,
    FLAGS_VERSION,
    MARKER_NAME,
    Crypt,
    Entry,
    Index,
)

_KINDS = {"parameter": 0, "buffer": 1}


def write_shard(
    model: torch.nn.Module,
    path: Path,
    serialization_kwargs: dict[str, Any],
    written: Callable[[int], None],
) -> None:
    """Serialize `model` to `path` and sync it to the disk. `written` gets bytes, every second.

    Raises:
        WorkerError: a tensor has no values; tensorizer would store it as zeros.
        StoreError: the disk refuses the file.
    """
    _prepare(model)
    _serialize(lambda writer: writer.write_module(model), path, serialization_kwargs, written)


def write_state_dict(
    tensors: Mapping[str, torch.Tensor],
    path: Path,
    serialization_kwargs: dict[str, Any],
    written: Callable[[int], None],
) -> None:
    """Serialize tensors under their own names, without vLLM's marker; else as `write_shard`."""
    _serialize(
        lambda writer: writer.write_state_dict(dict(tensors)),
        path,
        serialization_kwargs,
        written,
    )


def _serialize(
    write: Callable[[TensorSerializer], None],
    path: Path,
    serialization_kwargs: dict[str, Any],
    written: Callable[[int], None],
) -> None:
    done = Event()

    def watch() -> None:
        while not done.wait(1):
            written(path.stat().st_blocks * 512)

    watcher = Thread(target=watch, name="written-bytes", daemon=True)
    with serializer(path, **serialization_kwargs) as writer:
        watcher.start()
        try:
            write(writer)
        finally:
            done.set()
            watcher.join()
    with explained("write", str(path)), path.open("rb") as file:
        os.fsync(file.fileno())


def write_encrypted_shard(
    model: torch.nn.Module, path: Path, key: Bytes, written: Callable[[int], None]
) -> tuple[TensorEntry, ...]:
    """Write the file that `encrypt_shard` would make of `write_shard`'s; return its tensors.

    Only ciphertext is written, and memory stays as it is: tensorizer's own writer encrypts tensors
    in place, and cannot write one without elements. `written` gets bytes, after each tensor.

    Raises as `write_shard`, and WorkerError for a key that is not 32 bytes.
    """
    _prepare(model)
    modules = {name: number for number, (name, _) in enumerate(model.named_modules())}
    tensors = [
        Named(name, _KINDS[kind], modules[name.rpartition(".")[0]], tensor)
        for name, kind, tensor in module_tensors(model)
    ]
    return write_encrypted(tensors, path, key, written)


class Named(NamedTuple):
    """A tensor under the name that a file has it by; `kind` and `module` are tensorizer's."""

    name: str
    kind: int
    module: int
    tensor: torch.Tensor


def write_encrypted(
    tensors: Sequence[Named], path: Path, key: Bytes, written: Callable[[int], None]
) -> tuple[TensorEntry, ...]:
    """Write the encrypted file of any tensors, and sync it; as `write_encrypted_shard`.

    A state dict's have kind 2 and module 0.
    """
    check_key(key, path.name)
    found: list[TensorEntry] = []
    index = _index(tensors)
    with (
        explained("write", str(path)),
        path.open("wb") as file,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
    ):
        file.write(index.packed())
        for entry, (_, _, module, tensor) in zip(index.entries, tensors, strict=True):
            data = _bytes(tensor) if entry.size else memoryview(b"")
            sha256 = _write_tensor(file, pool, entry, module, data, key)
            if entry.text != MARKER_NAME:
                found.append(entry.tensor(sha256))
            written(file.tell())
        file.write(END)
        file.flush()
        os.fsync(file.fileno())
    return tuple(sorted(found, key=lambda tensor: tensor.name))


def _index(tensors: Sequence[Named]) -> Index:
    entries: list[Entry] = []
    for name, kind, _, tensor in tensors:
        # An empty one tells the type; a copy of a whole one would take as much memory again.
        sample = _NumpyTensor.from_tensor(torch.empty((0,), dtype=tensor.dtype))
        dtype = sample.numpy_dtype + (f"\0{sample.torch_dtype}" if sample.is_opaque else "")
        size = 0 if tensor.is_meta else tensor.numel() * tensor.element_size()
        shape = tuple(tensor.shape)
        entries.append(Entry(name.encode(), kind, dtype.encode(), shape, 0, 0, size))
    marked = any(tensor.is_meta for _, _, _, tensor in tensors)
    return Index(FLAGS_VERSION if marked else 1, False, tuple(entries)).as_encrypted()


def _prepare(model: torch.nn.Module) -> None:
    for name, _, tensor in module_tensors(model):
        if tensor.is_meta:
            raise WorkerError(f"tensor {name!r} was never given values (it is on the meta device)")
    model.register_parameter(MARKER, marker())


def _bytes(tensor: torch.Tensor) -> memoryview:
    array = _NumpyTensor.from_tensor(tensor.contiguous()).data
    return array.reshape(-1).view(numpy.uint8).data


def _write_tensor(
    file: BinaryIO,
    pool: ThreadPoolExecutor,
    entry: Entry,
    module: int,
    data: memoryview,
    key: Bytes,
) -> bytes:
    """Write the tensor's header, which holds its MACs, after its data; return its SHA-256."""
    hidden = entry.hashed(module, encrypted=True)
    hidden.update(data)
    sha256 = hidden.digest()
    nonce = secretbox.synthetic_nonce(sha256, key)
    macs: list[bytes] = []
    file.seek(entry.data_offset)
    for room in _sealed(pool, entry, data, nonce, key):
        macs.append(bytes(room[:MAC_BYTES]))
        file.write(room[MAC_BYTES:])
    end = file.tell()
    file.seek(entry.offset)
    file.write(entry.header(module, sha256, Crypt(nonce, macs)))
    file.seek(end)
    return sha256


def _sealed(
    pool: ThreadPoolExecutor, entry: Entry, data: memoryview, nonce: bytes, key: Bytes
) -> Iterator[memoryview]:
    """Each chunk's MAC and ciphertext, in order; a few are made at once."""
    rooms = [bytearray(MAC_BYTES + CHUNK_BYTES) for _ in range(min(entry.chunks, 8))]

    def seal(number: int) -> memoryview:
        start, size = number * CHUNK_BYTES, entry.chunk_size(number)
        room = rooms[number % len(rooms)]
        chunk = data[start : start + size]
        secretbox.seal(chunk, secretbox.following(nonce, number), key, room)
        return memoryview(room)[: MAC_BYTES + size]

    for first in range(0, entry.chunks, 8):
        yield from pool.map(seal, range(first, min(first + 8, entry.chunks)))
