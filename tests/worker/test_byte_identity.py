"""Ranks built alone on a CPU are, byte for byte, what vLLM's own ranks load."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

# Grouped heads; biases with tied embeddings; three other ways to slice q, k and v.
ARCHITECTURES = ("llama", "opt", "qwen2", "gemma", "gpt_neox", "gpt2")
SIZES = (1, 2, 4)
FILES = [(name, size, rank) for name in ARCHITECTURES for size in SIZES for rank in range(size)]


@pytest.fixture(scope="session")
def real(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory, run_script: Any) -> Path:
    """The files that vLLM's real ranks write of the same models, under `NAME/tpN`."""
    out = tmp_path_factory.mktemp("real")
    run_script("real_matrix.py", tiny_models, out, *SIZES)
    return out


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(("name", "size", "rank"), FILES)
def test_a_virtual_rank_writes_the_file_of_a_real_one(
    virtual: Path, real: Path, built: dict[str, Any], name: str, size: int, rank: int
) -> None:
    """The whole design rests on it: no GPU, no process group, and the same weights."""
    file = "model.tensors" if size == 1 else f"model-rank-{rank:03d}.tensors"
    expected = sha256(real / name / f"tp{size}" / file)
    assert expected == sha256(virtual / "vllm" / "tiny" / name / f"tp{size}" / file)
    assert expected == built[f"{name}-{size}"]["files"][rank]["sha256"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_ranks_hold_different_slices(built: dict[str, Any], name: str) -> None:
    """Four equal files would also equal four real ranks that all loaded rank 0's weights."""
    assert 4 == len({file["sha256"] for file in built[f"{name}-4"]["files"]})
