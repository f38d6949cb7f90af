"""What the scripts beside it leave: vLLM, torch and tensorizer stay out of pytest's own process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunScript = Callable[..., None]


@pytest.fixture(scope="session")
def virtual(
    tiny_models: Path, tmp_path_factory: pytest.TempPathFactory, run_script: RunScript
) -> Path:
    """A store in which every tiny model is built at TP 1, 2 and 4, under `vllm/tiny/NAME/tpN`."""
    out = tmp_path_factory.mktemp("virtual")
    run_script("virtual_matrix.py", tiny_models, out, 1, 2, 4)
    return out


@pytest.fixture(scope="session")
def built(virtual: Path) -> dict[str, Any]:
    """What the task said of each of these builds, by `NAME-N`."""
    return json.loads((virtual / "results.json").read_text())


@pytest.fixture(scope="session")
def formats(
    tmp_path_factory: pytest.TempPathFactory, virtual: Path, run_script: RunScript
) -> dict[str, Any]:
    """What format_cases.py found: of files that it made itself, and of those in `virtual`."""
    out = tmp_path_factory.mktemp("formats")
    shards = sorted((virtual / "vllm").rglob("*.tensors"))
    run_script("format_cases.py", out / "files", out / "cases.json", *shards)
    return json.loads((out / "cases.json").read_text())


@pytest.fixture(scope="session")
def artifacts(virtual: Path, tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifact directories at TP=1, by model: a snapshot's small files beside the shard."""
    out = tmp_path_factory.mktemp("artifacts")
    for snapshot in tiny_models.iterdir():
        folder = out / snapshot.name
        shutil.copytree(snapshot, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        shutil.copy(virtual / "vllm" / "tiny" / snapshot.name / "tp1" / "model.tensors", folder)
    return out


@pytest.fixture(scope="session")
def encrypted(
    tiny_models: Path, tmp_path_factory: pytest.TempPathFactory, run_script: RunScript
) -> Path:
    """What encrypted_shard_cases.py leaves: `artifacts/both` and `artifacts/only`.

    What it found is in `cases.json` beside this folder.
    """
    out = tmp_path_factory.mktemp("encrypted-shards") / "out"
    run_script("encrypted_shard_cases.py", tiny_models, out, out.parent / "cases.json")
    return out
