"""What was written is read back, and any damage to it is told as such."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.engine

DAMAGED = "reads back differently than it was written"


@pytest.fixture(scope="session")
def reading(formats: dict[str, Any]) -> dict[str, Any]:
    """A small file as `read_back` reads it, whole and damaged."""
    return formats["reading"]


def test_a_whole_file_is_read_as_tensorizer_reads_it(reading: dict[str, Any]) -> None:
    """The manifest is made of this: names, kinds, types, shapes, sizes and hashes."""
    file = reading["file"]
    assert file["expected"] == file["tensors"]
    assert {
        ".index": ("buffer", "int64", [3]),
        ".mask": ("buffer", "bool", [2]),
        "inner.bias": ("parameter", "float32", [6]),
        "inner.scale": ("buffer", "float32", []),
        "inner.weight": ("parameter", "bfloat16", [4, 6]),
    } == {t["name"]: (t["kind"], t["dtype"], t["shape"]) for t in file["tensors"]}


def test_every_byte_is_handed_on_in_order_in_the_same_pass(reading: dict[str, Any]) -> None:
    """The store takes these bytes instead of reading the file once more."""
    assert reading["file"]["sha256"] == reading["file"]["handed_on"]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("data", "tensor 'inner.weight' has SHA-256 "),
        ("header", "its index and the header of tensor i/ner.weight disagree"),
        ("index", "its index and the header of tensor .vllm_tensorized_marker disagree"),
        ("cut", "disagree"),
        ("longer", "what follows its last tensor"),
        ("empty", "Not a tensorizer file"),
        ("other", "Not a tensorizer file"),
        ("gone", "No such file"),
    ],
)
def test_damage_is_told_with_the_file_and_what_to_do(
    reading: dict[str, Any], damage: str, says: str
) -> None:
    """tensorizer's own answers go from a bare struct.error to none at all."""
    error = reading[damage]
    assert error.startswith("WorkerError: ")
    assert DAMAGED in error
    assert says in error
    assert "run again" in error


def test_a_file_without_the_marker_is_refused(reading: dict[str, Any]) -> None:
    """vLLM would take it for a Hugging Face model, and fail over its names."""
    assert reading["unmarked"].startswith("WorkerError: unmarked.tensors carries no vLLM marker")


def test_no_flipped_byte_gives_other_tensors_or_another_error(reading: dict[str, Any]) -> None:
    """Each byte of the file that means something, one after another.

    `same`: a byte that changes no tensor, such as one of a CRC, beside which there is a SHA-256.
    """
    assert reading["flipped"] > 1000
    assert ["WorkerError", "same"] == reading["flips"]


def test_no_cut_is_read(reading: dict[str, Any]) -> None:
    """A full disk ends a file anywhere."""
    assert ["WorkerError"] == reading["cuts"]
