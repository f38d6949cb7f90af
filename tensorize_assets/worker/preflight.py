"""Refuse what cannot be built, before any weight is read."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tensorizer._NumpyTensor import _NumpyTensor

from tensorize_assets.core.errors import PreflightError
from tensorize_assets.worker.module_tensors import MARKER, marker, module_tensors

# tensorizer reserves this much for its index and raises "Metadata overflow" half-way through.
METADATA_REGION = 256 * 1024
_MAX_DIMENSION = 2**32
_MAX_NAME = 2**16 - 1


def check_types(model: torch.nn.Module, where: str) -> None:
    """Refuse a constructed virtual rank with 8-bit floating-point weights.

    vLLM constructs some such layers on a CPU, and fails as they are asked something. What else its
    CPU build lacks, it refuses as it constructs.

    Raises:
        PreflightError: the model needs vLLM's own ranks on a GPU.
    """
    small = {
        str(parameter.dtype).removeprefix("torch."): name
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and parameter.itemsize == 1
    }
    if small:
        dtype, name = next(iter(small.items()))
        raise PreflightError(
            f"{where}: weights of type {dtype} (first {name}) need executor mode on a GPU: vLLM's "
            "CPU build lacks kernels for them on most processors. Set sharding: executor and "
            "reload_device: cuda in the profile, and run the worker on a GPU host"
        )


def check_tensors(model: torch.nn.Module, where: str) -> int:
    """Hold a constructed rank's tensors, and the marker beside them, against tensorizer's format.

    Returns:
        The bytes that they take.

    Raises:
        PreflightError: the format cannot hold them.
    """
    tensors = ((name, tensor) for name, _, tensor in module_tensors(model))
    index = _index_entry_size(f".{MARKER}", marker())
    return check_format(tensors, where, "this model cannot be stored in one file a rank", index)


def check_format(
    tensors: Iterable[tuple[str, torch.Tensor]], where: str, too_many: str, index: int = 0
) -> int:
    """As `check_tensors`, for any names and tensors; `index` bytes of the index are taken already.

    `too_many` ends the message for more tensors than the index has room for.
    """
    total = count = 0
    for name, tensor in tensors:
        if len(name.encode()) > _MAX_NAME:
            raise PreflightError(
                f"{where}: a tensor's name has {len(name.encode())} bytes; tensorizer's format "
                f"holds names of up to {_MAX_NAME}: {name[:80]!r}…"
            )
        index += _index_entry_size(name, tensor)
        count += 1
        total += tensor.numel() * tensor.element_size()
        for dimension in tensor.shape:
            if dimension >= _MAX_DIMENSION:
                raise PreflightError(
                    f"{where}: tensor {name!r} has a dimension of {dimension}; tensorizer's "
                    "format holds dimensions below 2^32. Use a larger tensor_parallel_size"
                )
    if index > METADATA_REGION:
        raise PreflightError(
            f"{where}: the index of its {count} tensors takes {index} bytes and tensorizer "
            f"reserves {METADATA_REGION}; {too_many}"
        )
    return total


def check_scratch(folder: Path, needed: int, where: str, what: str = "the shards take") -> None:
    """Raises PreflightError where `folder`'s disk has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PreflightError(
            f"{where}: {what} {needed:,} bytes and the scratch folder {folder} has "
            f"{free:,} free; make room or set another scratch folder"
        )


def _index_entry_size(name: str, tensor: Any) -> int:
    """Bytes of one entry in tensorizer's index (its `_MetadataDeserializer._read_entry`)."""
    sample = _NumpyTensor.from_tensor(torch.empty((0,), dtype=tensor.dtype))
    dtype = sample.numpy_dtype + (f"\0{sample.torch_dtype}" if sample.is_opaque else "")
    return 2 + len(name.encode()) + 1 + 1 + len(dtype) + 1 + 4 * tensor.ndim + 24
