"""Which types a rank holds, and what a loader that casts to the model's type would change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from tensorize_assets.core.manifest import CastEntry, DtypeCensus, DtypeCount
from tensorize_assets.worker.module_tensors import module_tensors


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def rank_census(
    model: torch.nn.Module, rank: int, model_dtype: torch.dtype
) -> tuple[Counter[str], Counter[str], list[CastEntry]]:
    """Tensors and bytes by type, and the casts of stock vLLM, which passes `dtype` on.

    tensorizer casts every tensor but booleans to that type, also integers (vllm#45504).
    """
    casts: list[CastEntry] = []
    for name, _, tensor in module_tensors(model):
        if tensor.dtype in (model_dtype, torch.bool):
            continue
        casts.append(
            CastEntry(
                name=name,
                from_dtype=dtype_name(tensor.dtype),
                to_dtype=dtype_name(model_dtype),
                lossy=_loses_values(tensor, model_dtype),
                rank=rank,
            )
        )
    return *count(tensor for _, _, tensor in module_tensors(model)), casts


def count(tensors: Iterable[torch.Tensor]) -> tuple[Counter[str], Counter[str]]:
    """Tensors and bytes by type."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        counts[dtype_name(tensor.dtype)] += 1
        sizes[dtype_name(tensor.dtype)] += tensor.nbytes
    return counts, sizes


def merge(
    parts: list[tuple[Counter[str], Counter[str], list[CastEntry]]], model_dtype: torch.dtype
) -> DtypeCensus:
    """One census over all ranks."""
    tensors: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for count, size, _ in parts:
        tensors.update(count)
        sizes.update(size)
    return DtypeCensus(
        by_dtype={
            name: DtypeCount(tensors=tensors[name], bytes=sizes[name]) for name in sorted(tensors)
        },
        model_dtype=dtype_name(model_dtype),
        cast_by_stock=tuple(cast for _, _, casts in parts for cast in casts),
    )


def _loses_values(tensor: torch.Tensor, to: torch.dtype) -> bool:
    back = tensor.to(to).to(tensor.dtype)
    if tensor.dtype.is_floating_point:
        return not torch.allclose(tensor, back, rtol=0, atol=0, equal_nan=True)
    return not torch.equal(tensor, back)
