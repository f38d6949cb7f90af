"""The header of a safetensors file, without the file.

The format is that of huggingface/safetensors: eight bytes with the length of the header, the header
(a JSON object), and the tensors' bytes. Its own library wants a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from tensorize_assets.core import jsonio
from tensorize_assets.core.errors import PreflightError

# The library's own limit.
_MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8

ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}
"""Bytes of an element, by the format's names of types."""


class TensorPlace(NamedTuple):
    """Where a tensor lies in its file, in bytes, and what it is."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


_Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 62)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    dtype: str
    shape: list[_Count]
    data_offsets: tuple[_Count, _Count]


_ENTRIES = TypeAdapter(dict[str, _Entry])


def read_header(
    read: Callable[[int, int], bytes], size: int, where: str
) -> tuple[TensorPlace, ...]:
    """Return what a file of `size` bytes holds, in the order of its bytes.

    `read` returns the bytes from a start to an end.

    Raises:
        PreflightError: it is no safetensors file: a header that is cut, too long or no JSON, an
            unknown type, sizes that do not fit, tensors that overlap or leave gaps.
    """

    def refused(reason: str) -> PreflightError:
        return PreflightError(f"{where} is no safetensors file, or damaged: {reason}")

    if size < _LENGTH_BYTES:
        raise refused(f"it has {size} bytes")
    length = int.from_bytes(read(0, _LENGTH_BYTES), "little")
    first = _LENGTH_BYTES + length
    if length > _MAX_HEADER_BYTES or first > size:
        raise refused(f"its header would have {length} bytes, of {size} in all")
    try:
        fields = jsonio.loads(read(_LENGTH_BYTES, first).decode())
        if isinstance(fields, dict):
            fields.pop("__metadata__", None)  # pyright: ignore[reportUnknownMemberType]
        entries = _ENTRIES.validate_python(fields)
    except ValidationError as error:
        raise refused(f"its header: {jsonio.describe(error)}") from None
    except ValueError as error:
        raise refused(f"its header is no JSON ({error})") from None
    places = sorted(
        (
            TensorPlace(name, one.dtype, tuple(one.shape), *(first + at for at in one.data_offsets))
            for name, one in entries.items()
        ),
        key=lambda place: (place.start, place.end),
    )
    position = first
    for place in places:
        if place.dtype not in ITEM_BYTES:
            raise refused(f"tensor {place.name!r} is of an unknown type {place.dtype!r}")
        wanted = math.prod(place.shape) * ITEM_BYTES[place.dtype]
        if place.start != position or place.end - place.start != wanted:
            raise refused(
                f"tensor {place.name!r} of shape {list(place.shape)} lies at bytes {place.start} "
                f"to {place.end}, and the one before it ends at {position}"
            )
        position = place.end
    if position != size:
        raise refused(f"its tensors end at byte {position}, of {size}")
    return tuple(places)
