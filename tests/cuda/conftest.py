"""A GPU, or the reason why there is none."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

_ASK = "import torch; print(torch.__version__, torch.cuda.device_count())"


@pytest.fixture(scope="session")
def gpu() -> None:
    """Skips where vLLM cannot compute on one."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed (extra `gpu`)")
    # In a process of its own: torch stays out of pytest's.
    asked = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True)
    version, _, count = asked.stdout.strip().partition(" ")
    if count in ("", "0"):
        pytest.skip(f"no GPU: torch {version or 'is not installed'} finds no CUDA device")
