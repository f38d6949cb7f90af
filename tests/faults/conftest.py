"""Faults and attacks against the whole of it. The helpers of the chain's tests are at hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
for _folder in (_HERE, _HERE.parent / "assets", _HERE.parent / "core"):
    sys.path.insert(0, str(_folder))


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory, tiny_models: Path) -> Path:
    """`llama`, a model of more than one part of an upload, and `adapters` of a smaller one."""
    folder = tmp_path_factory.mktemp("sources")
    scripts = _HERE.parent / "worker" / "scripts"
    for script, *arguments in (
        (_HERE / "scripts" / "larger_llama.py", folder / "llama"),
        (scripts / "tiny_adapters.py", tiny_models, folder / "adapters"),
    ):
        command = [sys.executable, str(script), *map(str, arguments)]
        path = os.environ | {"PYTHONPATH": str(scripts)}
        subprocess.run(command, check=True, capture_output=True, env=path)
    return folder
