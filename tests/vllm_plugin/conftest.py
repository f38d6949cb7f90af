"""Builds as they are served, made once; vLLM stays out of pytest's own process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Real servers, and the files they are told by; pytest does not put these folders on the path.
for folder in (Path(__file__).parent / "scripts", Path(__file__).parents[1] / "serving"):
    sys.path.insert(0, str(folder))


@pytest.fixture(scope="session")
def builds(
    tiny_models: Path, tmp_path_factory: pytest.TempPathFactory, run_script: Callable[..., None]
) -> Path:
    """What real_builds.py leaves."""
    out = tmp_path_factory.mktemp("builds") / "out"
    run_script(Path(__file__).parent / "scripts" / "real_builds.py", tiny_models, out)
    return out
