"""The demo as `make demo-all` runs it, and its artifact in stock vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tensorize_assets.core.compare import CHECKS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

STOCK = Path(__file__).parent / "worker" / "scripts" / "stock_cases.py"


def demo(folder: Path, *options: str) -> dict[str, Any]:
    """Run the demo in `folder` and return its report."""
    command = [sys.executable, "-m", "tensorize_assets.cli", "demo", "--json"]
    done = subprocess.run(
        [*command, "--directory", str(folder), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    assert 0 == done.returncode, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the demo ran."""
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="session")
def report(folder: Path) -> dict[str, Any]:
    """What the demo said of TP=1 and TP=3."""
    return demo(folder, "--all")


def test_every_check_passes_at_one_and_at_three_ranks(report: dict[str, Any]) -> None:
    """A real model with grouped-query attention and tied embeddings, not a tiny random one."""
    assert report["success"]
    assert [1, 3] == [build["tensorized_shards"]["ranks"] for build in report["builds"]]
    for build in report["builds"]:
        assert CHECKS.keys() == {check["check"] for check in build["checks"]}
        assert all(check["passed"] for check in build["checks"])


def test_the_reloaded_model_answers(report: dict[str, Any]) -> None:
    """Equal answers of two broken models would be equal too."""
    assert "Paris" in report["builds"][0]["reload_check"]["first_answer"]


def test_the_published_directory_loads_in_stock_vllm(report: dict[str, Any], folder: Path) -> None:
    """So that a GPU host with plain vLLM can load it; see test_stock_vllm for what is put in."""
    cases = folder / "stock.json"
    variables = {
        "VLLM_PLUGINS": "",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }

    folders = [str(folder / "snapshot"), report["builds"][0]["directory"]]
    subprocess.run(
        [sys.executable, str(STOCK), str(cases), *folders],
        env={**os.environ, **variables},
        check=True,
        capture_output=True,
        timeout=300,
    )

    case = json.loads(cases.read_text())["snapshot"]
    assert case["stored"] == case["loaded"]
    assert case["source"] == case["artifact"]


def test_a_second_demo_builds_nothing(report: dict[str, Any], folder: Path) -> None:
    """What is complete is recognised, also by a process that knows nothing of the first."""
    again = demo(folder)["builds"][0]

    assert again["success"]
    assert "worker_seconds" not in again["tensorized_shards"]
    assert report["builds"][0]["directory"] == again["directory"]
