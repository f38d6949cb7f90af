"""What tensorizer's format cannot hold is refused before a weight is read."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.engine


def test_the_largest_index_that_fits_is_accepted(formats: dict[str, Any]) -> None:
    """To the byte, with the marker that vLLM wants in it."""
    found = formats["fits"]
    assert 2 * found["tensors"] == found["bytes"]
    assert found["tensors"] == found["read"]
    assert "tensorizer" not in found


def test_one_byte_more_is_refused_by_us_and_by_tensorizer(formats: dict[str, Any]) -> None:
    """tensorizer says so only half-way through, as a RuntimeError."""
    found = formats["does not fit"]
    assert "Metadata overflow" == found["tensorizer"]
    assert found["refused"].startswith(
        f"org/model v1: the index of its {found['tensors']} tensors takes 262145 bytes and "
        "tensorizer reserves 262144"
    )


def test_a_dimension_of_2_to_the_32_is_refused(formats: dict[str, Any]) -> None:
    """The format has 32 bits for it."""
    found = formats["refusals"]
    assert found["dimension"].startswith(
        "org/model v1: tensor '.weight' has a dimension of 4294967296"
    )
    assert 4 * (2**32 - 1) == found["largest dimension"]


def test_a_name_longer_than_the_format_holds_is_refused(formats: dict[str, Any]) -> None:
    """The format has 16 bits for its length, the dot before it included."""
    found = formats["refusals"]
    assert found["name"].startswith("org/model v1: a tensor's name has 65536 bytes")
    assert 4 == found["longest name"]


def test_too_little_scratch_is_told_in_bytes(formats: dict[str, Any]) -> None:
    """Whoever makes room must know how much."""
    message = formats["refusals"]["scratch"]
    assert message.startswith("org/model v1: the shards take 4,611,686,018,427,387,904 bytes")


def test_a_tensor_without_values_is_not_written(formats: dict[str, Any]) -> None:
    """tensorizer would store it as zeros."""
    expected = "tensor '.weight' was never given values (it is on the meta device)"
    assert expected == formats["refusals"]["unset"]


def test_the_census_tells_what_a_cast_loses(formats: dict[str, Any]) -> None:
    """Stock vLLM casts everything but booleans to the model's type, integers too."""
    merged = formats["census"]["merged"]
    casts = [(cast["name"], cast["rank"], cast["lossy"]) for cast in merged["cast_by_stock"]]
    expected = [
        (".kept", 3, False),
        (".rounded", 3, True),
        (".overflowing", 3, True),
        (".float16", 3, True),
        (".small_integer", 3, False),
        (".integer", 3, True),
        (".empty", 3, False),
        (".scalar", 3, False),
    ]
    assert expected * 2 == casts
    assert {"tensors": 2, "bytes": 4} == merged["by_dtype"]["bfloat16"]
    assert {"tensors": 2, "bytes": 2} == merged["by_dtype"]["bool"]
    assert {"tensors": 8, "bytes": 56} == merged["by_dtype"]["float32"]


def test_names_that_share_a_parameter_are_found(formats: dict[str, Any]) -> None:
    """They are stored under each name, and the manifest says that they are one."""
    assert [["one.weight", "two.weight"]] == formats["census"]["tied"]
