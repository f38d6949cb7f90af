"""Fixtures for more than one folder of tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tensorize_assets.demo.hub_server import LocalHub


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    """A running local Hub without repos."""
    with LocalHub() as running:
        yield running


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small random snapshot of each architecture, by its name."""
    folder = tmp_path_factory.mktemp("tiny-models")
    script = Path(__file__).parent / "worker" / "scripts" / "tiny_models.py"
    # In a process of its own: transformers stays out of pytest's.
    subprocess.run([sys.executable, str(script), str(folder)], check=True, capture_output=True)
    return folder


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI every part is installed, so that a skip there is a missing part; a GPU is excepted."""
    report = yield
    if (
        report.skipped
        and os.environ.get("TENSORIZE_ASSETS_CI")
        and not item.get_closest_marker("cuda")
    ):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
    return report
