"""Read a tensorizer file once: hash the whole, and hold every tensor against its own hash."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Literal

from tensorizer import TensorDeserializer
from tensorizer import serialization as tensorizer_format

from tensorize_assets.core.errors import WorkerError
from tensorize_assets.core.manifest import FileEntry, TensorEntry

MARKER = ".vllm_tensorized_marker"
_CHUNK = 8 << 20
_KINDS: dict[int, Literal["parameter", "buffer"]] = {0: "parameter", 1: "buffer"}


def read_back(path: Path) -> tuple[FileEntry, tuple[TensorEntry, ...]]:
    """Size and SHA-256 of `path`, and its tensors with their hashes, in one pass over the bytes.

    A tensor's SHA-256 is tensorizer's own: over the tensor's header (hash fields zeroed) and data.

    Raises:
        WorkerError: what the file holds is not what was written to it.
    """
    with TensorDeserializer(str(path), device="cpu", lazy_load=True) as reader:
        entries = sorted(reader._metadata.values(), key=lambda entry: entry.offset)
    tensors: list[TensorEntry] = []
    whole = hashlib.sha256()
    with path.open("rb") as file, ThreadPoolExecutor(1) as beside:
        position = 0
        for entry in entries:
            _skim(file, whole, entry.offset - position)
            header_bytes = file.read(entry.data_offset - entry.offset)
            whole.update(header_bytes)
            header = tensorizer_format._TensorHeaderDeserializer(bytearray(header_bytes))
            name = str(header.name.normalize_())
            digest = header.compute_sha256()
            left = entry.data_length
            while left:
                chunk = file.read(min(_CHUNK, left))
                if not chunk:
                    raise WorkerError(f"{path.name} ends inside tensor {name!r}: the disk lost it")
                # hashlib lets go of the interpreter lock: both hashes run at once.
                ahead = beside.submit(digest.update, chunk)
                whole.update(chunk)
                ahead.result()
                left -= len(chunk)
            position = entry.data_offset + entry.data_length
            stored = _stored_sha256(header)
            if digest.digest() != stored:
                raise WorkerError(
                    f"tensor {name!r} in {path.name} reads back differently than it was written "
                    f"(SHA-256 {digest.hexdigest()}, written {stored.hex()}); check the scratch "
                    "disk and run again"
                )
            if name != MARKER:
                tensors.append(_tensor_entry(entry, name, stored.hex()))
        _skim(file, whole, None)
        size = file.tell()
    if MARKER not in {entry.name.normalize_() for entry in entries}:
        raise WorkerError(f"{path.name} carries no vLLM marker; stock vLLM would not load it")
    tensors.sort(key=lambda tensor: tensor.name)
    return FileEntry(path=path.name, size=size, sha256=whole.hexdigest()), tuple(tensors)


def _skim(file: BinaryIO, whole: Any, length: int | None) -> None:
    """Hash `length` bytes (to the end if None) that belong to no tensor."""
    while length is None or length > 0:
        chunk = file.read(_CHUNK if length is None else min(_CHUNK, length))
        if not chunk:
            return
        whole.update(chunk)
        if length is not None:
            length -= len(chunk)


def _stored_sha256(header: Any) -> bytes:
    for stored in header.hashes:
        if stored.type == tensorizer_format.HashType.SHA256:
            return bytes(stored.hash)
    raise WorkerError(f"tensor {header.name.normalize_()!r} was written without a SHA-256")


def _tensor_entry(entry: Any, name: str, sha256: str) -> TensorEntry:
    # Types numpy does not have are stored as "<numpy type><separator><torch type>".
    numpy_name, _, torch_name = entry.dtype.partition(tensorizer_format.OPAQUE_DTYPE_SEP)
    return TensorEntry(
        name=name,
        kind=_KINDS[int(entry.type)],
        dtype=torch_name.removeprefix("torch.") or _torch_name(numpy_name),
        shape=tuple(entry.shape),
        size=entry.data_length,
        sha256=sha256,
    )


def _torch_name(numpy_name: str) -> str:
    import numpy

    return numpy.dtype(numpy_name).name
