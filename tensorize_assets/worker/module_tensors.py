"""The tensors of a module under the names that tensorizer stores them by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch

Kind = Literal["parameter", "buffer"]

MARKER = "vllm_tensorized_marker"
"""vLLM takes the direct path (no weight iterator) where a file holds a tensor of this name."""


def marker() -> torch.nn.Parameter:
    """The tensor that goes under `MARKER`, as vLLM's own script makes it: without data."""
    return torch.nn.Parameter(torch.tensor((1,), device="meta"), requires_grad=False)


def module_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Kind, torch.Tensor]]:
    """Every parameter and buffer, also non-persistent ones; a tied tensor under each name.

    Modules that are the same object appear once, as in `TensorSerializer.write_module`.
    """
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{path}.{name}", "parameter", parameter
        for name, buffer in module.named_buffers(recurse=False):
            yield f"{path}.{name}", "buffer", buffer


def tied_names(model: torch.nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of names that share one parameter."""
    groups: dict[int, list[str]] = {}
    for name, kind, tensor in module_tensors(model):
        if kind == "parameter":
            groups.setdefault(id(tensor), []).append(name)
    return tuple(sorted(tuple(sorted(names)) for names in groups.values() if len(names) > 1))
