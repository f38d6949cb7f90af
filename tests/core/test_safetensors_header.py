"""Headers of safetensors files: what they hold, and every way in which one can lie."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tensorize_assets.core.errors import PreflightError
from tensorize_assets.core.safetensors_header import TensorPlace, read_header


def _file(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def _tensor(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def _read(data: bytes) -> tuple[TensorPlace, ...]:
    return read_header(lambda start, end: data[start:end], len(data), "s3://b/model.safetensors")


def test_tensors_come_in_the_order_of_their_bytes() -> None:
    """Places are of the file; metadata is none; a tensor may be empty, or of half bytes."""
    header = {
        "__metadata__": {"format": "pt"},
        "halves": _tensor("F4", [2, 3], 16, 19),
        "b": _tensor("BF16", [2, 3], 4, 16),
        "none": _tensor("F32", [0, 7], 16, 16),
        "a": _tensor("F32", [], 0, 4),
    }
    data = _file(header, bytes(19))
    first = len(data) - 19
    assert (
        TensorPlace("a", "F32", (), first, first + 4),
        TensorPlace("b", "BF16", (2, 3), first + 4, first + 16),
        TensorPlace("none", "F32", (0, 7), first + 16, first + 16),
        TensorPlace("halves", "F4", (2, 3), first + 16, first + 19),
    ) == _read(data)


_TWO = {"a": _tensor("F32", [2], 0, 8), "b": _tensor("I8", [4], 8, 12)}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "it has 0 bytes"),
        (b"1234567", "it has 7 bytes"),
        (_file(_TWO, bytes(12), length=1 << 40), "its header would have 1099511627776 bytes"),
        (_file(_TWO, length=1 << 62), "its header would have"),
        (_file(b"<html>"), "its header is no JSON"),
        (_file(b"\xff\xfe"), "its header is no JSON"),
        (_file(b"[" * 5000), "its header is no JSON"),
        (_file([]), "its header: "),
        (_file({"a": 1}), "its header: "),
        (_file({"a": _tensor("F32", [-1], 0, 4)}, bytes(4)), "its header: "),
        (_file({"a": _tensor("F32", [1.0], 0, 4)}, bytes(4)), "its header: "),  # type: ignore[list-item]
        (_file({"a": _tensor("F32", [1 << 70], 0, 4)}, bytes(4)), "its header: "),
        (_file({"a": _tensor("F32", [1], 0, 4) | {"more": 1}}, bytes(4)), "its header: "),
        (_file(b'{"a": {}, "a": {}}'), "its header is no JSON"),
        (_file({"a": _tensor("F5", [1], 0, 4)}, bytes(4)), "of an unknown type 'F5'"),
        (_file({"a": _tensor("F4", [1], 0, 1)}, bytes(1)), "lies at bytes"),
        (_file({"a": _tensor("F32", [2], 0, 4)}, bytes(4)), "lies at bytes"),
        (_file({"a": _tensor("F32", [1 << 40, 1 << 40], 0, 4)}, bytes(4)), "lies at bytes"),
        (_file({"a": _tensor("F32", [1], 4, 8)}, bytes(8)), "lies at bytes"),
        (_file(_TWO | {"c": _tensor("I8", [4], 6, 10)}, bytes(12)), "lies at bytes"),
        (_file({"a": _tensor("F32", [1], 4, 0)}, bytes(4)), "lies at bytes"),
        (_file(_TWO, bytes(11)), "its tensors end at byte"),
        (_file(_TWO, bytes(13)), "its tensors end at byte"),
    ],
)
@pytest.mark.fault(
    "Bad Hub",
    "read: safetensors with a lying header, in every way",
    "refused: the file and the tensor are named",
)
def test_a_header_that_lies_is_refused(data: bytes, says: str) -> None:
    """As safetensors' own library refuses it, with the file's name."""
    with pytest.raises(PreflightError) as refused:
        _read(data)
    assert str(refused.value).startswith("s3://b/model.safetensors is no safetensors file")
    assert says in str(refused.value)
