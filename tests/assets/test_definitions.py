"""What Dagster loads: held against a committed text, so that a lost asset shows in review."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tensorize_assets.definitions import defs

SNAPSHOT = Path(__file__).parent / "definitions.txt"
HEAVY = ("torch", "vllm", "tensorizer", "transformers")


def described() -> str:
    """Assets with dependencies, checks and pools; jobs, automation, resources: a line each."""
    graph = defs.resolve_asset_graph()
    repository: Any = defs.get_repository_def()
    lines: list[str] = []
    for key in sorted(graph.get_all_asset_keys(), key=str):
        node = graph.get(key)
        definition: Any = defs.resolve_assets_def(key)
        lines.append(f"asset {key.to_user_string()}")
        lines += [
            f"    group {node.group_name}",
            f"    kinds {', '.join(sorted(node.kinds))}",
            f"    partitions {_dimensions(node.partitions_def)}",
            f"    code version {node.code_version}",
            f"    pool {definition.op.pool}",
            f"    retry policy {definition.op.retry_policy}",
            f"    condition {_label(node.automation_condition)}",
            f"    freshness {_windows(node.freshness_policy)}",
            f"    io manager {node.io_manager_key}",
            f"    resources {', '.join(sorted(definition.required_resource_keys))}",
        ]
        lines += [
            f"    after {parent}" for parent in sorted(p.to_user_string() for p in node.parent_keys)
        ]
        for check in sorted(node.check_keys, key=lambda check: check.name):
            spec: Any = graph.get_check_spec(check)
            blocking = "blocking" if spec.blocking else "not blocking"
            lines.append(f"    check {check.name}, {blocking}, {_dimensions(spec.partitions_def)}")
    for job in sorted(defs.resolve_all_job_defs(), key=lambda job: job.name):
        if not job.name.startswith("__"):
            tags = "".join(f", tag {name}={value}" for name, value in sorted(job.run_tags.items()))
            lines.append(f"job {job.name}, partitions {_dimensions(job.partitions_def)}{tags}")
    lines += [
        f"sensor {one.name}, {one.default_status.value}, each {one.minimum_interval_seconds} s"
        for one in sorted(repository.sensor_defs, key=lambda one: one.name)
    ]
    lines += [
        f"schedule {one.name}, {one.default_status.value}, {one.cron_schedule}"
        for one in sorted(repository.schedule_defs, key=lambda one: one.name)
    ]
    lines += [f"resource {name}" for name in sorted(defs.resources or {})]
    return "\n".join(lines) + "\n"


def _dimensions(definition: Any) -> str:
    if definition is None:
        return "none"
    return " x ".join(
        f"{dimension.name}={dimension.partitions_def.name}"
        for dimension in definition.partitions_defs
    )


def _label(condition: Any) -> str:
    return "none" if condition is None else str(condition.get_label())


def _windows(policy: Any) -> str:
    if policy is None:
        return "none"
    warn, fail = (window.to_timedelta() for window in (policy.warn_window, policy.fail_window))
    return f"warns after {warn}, fails after {fail}"


def test_the_loaded_definitions_are_the_committed_ones():
    """A renamed asset loses its history, a check without partitions its meaning, a pool the GPU.

    After an intended change: `UPDATE_SNAPSHOTS=1 pytest tests/assets/test_definitions.py`.
    """
    if os.environ.get("UPDATE_SNAPSHOTS"):
        SNAPSHOT.write_text(described())
    assert SNAPSHOT.read_text() == described()


def test_loading_them_imports_no_tensor_library():
    """`import vllm` takes ten seconds, in each of Dagster's processes."""
    program = (
        "import sys; import tensorize_assets.definitions; "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "[]" == done.stdout.strip()


def test_dagster_finds_them_valid(tmp_path: Path):
    """What `dagster dev` and a deployment do first; also in a folder without a Dagster home."""
    done = subprocess.run(
        [
            sys.executable,
            *["-m", "dagster", "definitions", "validate", "-m", "tensorize_assets.definitions"],
        ],
        cwd=tmp_path,
        env={**os.environ, "DAGSTER_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    assert "All code locations passed validation" in done.stderr + done.stdout
    assert "PreviewWarning" not in done.stderr
    assert "DeprecationWarning" not in done.stderr
