"""Tensors that are read when they are copied: as PyTorch has them, and no more than is wanted."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tensorize_assets.core.block_hashes import BLOCK_BYTES

RunScript = Callable[..., None]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory, run_script: RunScript) -> dict[str, Any]:
    """What lazy_cases.py found."""
    out = tmp_path_factory.mktemp("lazy")
    run_script("lazy_cases.py", out / "files", out / "cases.json")
    return json.loads((out / "cases.json").read_text())


def test_every_view_and_value_is_pytorchs_own(cases: dict[str, Any]) -> None:
    """Slices, splits, turns and the rest: same values, same strides, read only when needed."""
    assert cases["names"]
    assert [] == cases["wrong"]


def test_opening_a_file_reads_its_header_and_small_tensors(cases: dict[str, Any]) -> None:
    """Norms and scales lie together and come in one request; the header takes two."""
    assert cases["open"]["requests"] <= 8
    assert cases["open"]["bytes"] <= 8 * BLOCK_BYTES


def test_a_rank_reads_its_rows_and_no_more(cases: dict[str, Any]) -> None:
    """Four ranks together read the tensor once, and up to a block more at each end."""
    assert cases["size"] <= cases["rows"] <= cases["size"] + 8 * BLOCK_BYTES


def test_columns_are_read_once_a_machine(cases: dict[str, Any]) -> None:
    """Columns are too short a run: without a shared cache each rank reads the whole tensor."""
    assert cases["size"] <= cases["columns cached"] <= cases["size"] + 2 * BLOCK_BYTES
    assert cases["columns"] > 3.5 * cases["size"]
    assert [".bin", ".lock"] == cases["cache"]


def test_a_changed_block_is_refused(cases: dict[str, Any]) -> None:
    """Only what lies in it, and what else stands in its block."""
    assert 1 <= len(cases["changed"]) < 9
    for said in cases["changed"].values():
        assert "has other bytes in block" in said
        assert "materialize hf_snapshot again" in said
