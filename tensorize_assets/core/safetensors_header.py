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
from tensorize_assets.core.printable import quoted

# That of 300,000 tensors. The library takes 100 MB, which fill gigabytes as Python's objects.
_MAX_HEADER_BYTES = 32 * 1024 * 1024
# Each value has a comma or a bracket before it. A tensor has less than ten of them.
_MAX_VALUES = 3_000_000
_MAX_DIMENSIONS = 64
_LENGTH_BYTES = 8

ITEM_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "C64": 64,
}
"""Bits of an element, by the format's names of types."""


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
    shape: Annotated[list[_Count], Field(max_length=_MAX_DIMENSIONS)]
    data_offsets: tuple[_Count, _Count]


_HEADER = TypeAdapter(dict[str, object])


def read_header(
    read: Callable[[int, int], bytes], size: int, where: str
) -> tuple[TensorPlace, ...]:
    """Return what a file of `size` bytes holds, in the order of its bytes.

    `read` returns the bytes from a start to an end.

    Raises:
        PreflightError: it is no safetensors file: a header that is cut, too long or no JSON, a
            name twice, an unknown type, sizes that do not fit, tensors that overlap or leave gaps.
    """

    def refused(reason: str) -> PreflightError:
        return PreflightError(f"{where} is no safetensors file, or damaged: {reason}")

    if size < _LENGTH_BYTES:
        raise refused(f"it has {size} bytes")
    length = int.from_bytes(read(0, _LENGTH_BYTES), "little")
    first = _LENGTH_BYTES + length
    if length > _MAX_HEADER_BYTES or first > size:
        raise refused(f"its header would have {length} bytes, of {size} in all")
    text = read(_LENGTH_BYTES, first)
    if sum(map(text.count, (b",", b"[", b"{"))) > _MAX_VALUES:
        raise refused(f"its header holds more than {_MAX_VALUES:,} values")
    try:
        fields = _HEADER.validate_python(jsonio.loads(text.decode()))
    except ValidationError as error:
        raise refused(f"its header: {jsonio.describe(error)}") from None
    except ValueError as error:
        raise refused(f"its header is no JSON ({error})") from None
    fields.pop("__metadata__", None)
    places: list[TensorPlace] = []
    for name, value in fields.items():
        try:
            one = _Entry.model_validate(value)
        except ValidationError as error:
            # The first one will do: there may be a million.
            raise refused(f"its header: {quoted(name)}: {jsonio.describe(error)}") from None
        start, end = (first + at for at in one.data_offsets)
        places.append(TensorPlace(name, one.dtype, tuple(one.shape), start, end))
    places.sort(key=lambda place: (place.start, place.end))
    position = first
    for place in places:
        if place.dtype not in ITEM_BITS:
            raise refused(
                f"tensor {quoted(place.name)} is of an unknown type {quoted(place.dtype)}"
            )
        wanted = math.prod(place.shape) * ITEM_BITS[place.dtype]
        if place.start != position or (place.end - place.start) * 8 != wanted:
            raise refused(
                f"tensor {quoted(place.name)} of shape {list(place.shape)} lies at bytes "
                f"{place.start} to {place.end}, and the one before it ends at {position}"
            )
        position = place.end
    if position != size:
        raise refused(f"its tensors end at byte {position}, of {size}")
    return tuple(places)
