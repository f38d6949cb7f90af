"""Tensors that are read when they are copied, and of them only what was asked for.

vLLM's weight loaders get whole tensors and take their rank's part of each. Given a `LazyTensor`,
the same code slices a shape, and bytes move only when the slice is copied into the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

# Shorter runs of bytes are not worth a request each: what lies between them is read as well.
_SHORTEST_RUN_BYTES = 1 << 20
# At most so much of that is in memory at a time.
_SPAN_BYTES = 64 << 20


class Source(Protocol):
    """A tensor in a file somewhere, its elements one after another."""

    shape: torch.Size
    dtype: torch.dtype

    def read(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer with the tensor's bytes from its position on."""
        ...

    def span(self, start: int, end: int) -> torch.Tensor:
        """The elements `start` to `end`, of which only some are wanted here."""
        ...


class _Base:
    """What the views of a tensor share: its source, and its values once one of them was changed."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.values: torch.Tensor | None = None

    def hold(self) -> torch.Tensor:
        if self.values is None:
            self.values = torch.empty(self.source.shape, dtype=self.source.dtype)
            self.source.read([(0, bytes_of(self.values))])
        return self.values


class LazyTensor(torch.Tensor):
    """A view of a Source: it has a shape, strides and a type, and no values in memory.

    What only changes the view (slicing, transposing, splitting) gives another one. Everything else
    reads the values first. What changes them in place, as some loaders zero a bias on all ranks but
    one, changes them for every view, as it would for any tensor: the whole one is then held.
    """

    base: _Base
    # On the meta device, of the same strides and offset: PyTorch says what becomes of a view.
    view_: torch.Tensor

    @staticmethod
    def __new__(cls, source: Source | _Base, view: torch.Tensor | None = None) -> LazyTensor:
        base = source if isinstance(source, _Base) else _Base(source)
        if view is None:
            view = torch.empty(base.source.shape, dtype=base.source.dtype, device="meta")
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            view.size(),
            strides=view.stride(),
            storage_offset=view.storage_offset(),
            dtype=view.dtype,
            device=torch.device("cpu"),
        )
        made.base, made.view_ = base, view
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first: Any = args[0] if args else None
        if isinstance(first, LazyTensor) and _only_views(func):
            plain = tree_map_only(LazyTensor, lambda one: one.view_, (args, kwargs))
            views = func(*plain[0], **plain[1])
            return tree_map_only(torch.Tensor, lambda view: LazyTensor(first.base, view), views)
        if func is torch.ops.aten.copy_.default and not isinstance(first, LazyTensor):
            return _copy(first, args[1])
        changed = _changed(func, args, kwargs)
        for lazy in changed:
            lazy.base.hold()
        args, kwargs = tree_map_only(LazyTensor, LazyTensor.read, (args, kwargs))
        result = func(*args, **kwargs)
        # An operator that works in place returns what it changed.
        return first if any(lazy is first for lazy in changed) else result

    def read(self) -> torch.Tensor:
        """The values, in memory."""
        view = self.view_
        if self.base.values is not None:
            return self.base.values.as_strided(view.size(), view.stride(), view.storage_offset())
        order = sorted(range(view.dim()), key=lambda dim: -view.stride(dim))
        # In the order in which its elements lie in the file.
        laid = view.permute(order)
        values = torch.empty(laid.size(), dtype=view.dtype)
        ranges = _ranges(laid, values)
        if ranges is None:
            _gather(self.base.source, laid, values)
        else:
            self.base.source.read(ranges)
        return values.permute(sorted(range(view.dim()), key=order.__getitem__))

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"LazyTensor({tuple(self.shape)}, {self.dtype})"


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous tensor's own memory."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


# It counts as a view, and what it returns has elements of other sizes and meanings.
_OTHER_TYPE = torch.ops.aten.view.dtype


def _only_views(func: Any) -> bool:
    """Whether what an operator returns shares its first argument's values, unchanged."""
    returned = func._schema.returns
    return (
        func is not _OTHER_TYPE
        and bool(returned)
        and all(one.alias_info is not None and not one.alias_info.is_write for one in returned)
    )


def _changed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[LazyTensor]:
    """The arguments that an operator writes to."""
    found: list[LazyTensor] = []
    for number, one in enumerate(func._schema.arguments):
        if one.alias_info is not None and one.alias_info.is_write:
            given = args[number] if number < len(args) else kwargs.get(one.name)
            found += [given] if isinstance(given, LazyTensor) else []
    return found


def _copy(into: torch.Tensor, lazy: LazyTensor) -> torch.Tensor:
    """`into.copy_(lazy)`, without a second copy in memory where the bytes can go straight there."""
    straight = (
        lazy.base.values is None
        and into.device.type == "cpu"
        and into.is_contiguous()
        and (into.shape, into.dtype) == (lazy.shape, lazy.dtype)
    )
    ranges = _ranges(lazy.view_, into) if straight else None
    if ranges is not None:
        lazy.base.source.read(ranges)
        return into
    return into.copy_(lazy.read())


def _ranges(view: torch.Tensor, into: torch.Tensor) -> list[tuple[int, memoryview]] | None:
    """The runs of bytes that `view` is made of, and where each goes in `into`, of the same shape.

    None where they are too short to be read one by one.
    """
    if not view.numel():
        return []
    run, outer = _run(view)
    size = view.element_size()
    if outer and run * size < _SHORTEST_RUN_BYTES:
        return None
    room = bytes_of(into.detach())
    starts = _starts(view, outer)
    return [
        (start * size, room[number * run * size : (number + 1) * run * size])
        for number, start in enumerate(starts)
    ]


def _gather(source: Source, view: torch.Tensor, into: torch.Tensor) -> None:
    """Fill `into` from spans that hold more than `view`, some rows of it at a time."""
    if view.dim() == 1:
        view, into = view.unsqueeze(0), into.unsqueeze(0)
    stride = view.stride(0)
    inner = 1 + sum((view.size(dim) - 1) * view.stride(dim) for dim in range(1, view.dim()))
    rows = max(1, _SPAN_BYTES // max(1, stride * view.element_size()))
    for first in range(0, view.size(0), rows):
        part = view[first : first + rows]
        start = int(part.storage_offset())
        span = source.span(start, start + (part.size(0) - 1) * stride + inner)
        into[first : first + rows].copy_(span.as_strided(part.size(), part.stride()))


def _run(view: torch.Tensor) -> tuple[int, int]:
    """How many elements lie together, and how many leading dimensions there are around them."""
    run, dim = 1, view.dim()
    while dim and (view.size(dim - 1) == 1 or view.stride(dim - 1) == run):
        run *= view.size(dim - 1)
        dim -= 1
    return run, dim


def _starts(view: torch.Tensor, dims: int) -> list[int]:
    """The offsets at which the runs begin, in order."""
    starts = [int(view.storage_offset())]
    for dim in range(dims):
        starts = [
            start + index * view.stride(dim) for start in starts for index in range(view.size(dim))
        ]
    return starts
