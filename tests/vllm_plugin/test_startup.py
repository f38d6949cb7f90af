"""What a server says of its start, whatever processes vLLM makes of itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

SCRIPT = Path(__file__).parent / "scripts" / "startup_cases.py"
KEY = bytes(range(32))
ENGINE = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}


def started(run_script: Callable[..., None], build: Path, out: Path, *more: Path, **variables: str):
    out.mkdir()
    run_script(SCRIPT, build, out, *more, **ENGINE, **variables)
    case = json.loads((out / "case.json").read_text())
    said = (out / "said").read_text(errors="replace")
    reports = [json.loads(line) for line in said.splitlines() if line.startswith('{"event"')]
    return {**case, "said": said, "lines": reports}


@pytest.fixture(scope="session")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("startup")


@pytest.fixture(scope="session")
def inside(builds: Path, out: Path, run_script: Any) -> dict[str, Any]:
    """All in one process, of an encrypted build whose key stands in no argument."""
    keyfile = out / "key"
    keyfile.write_bytes(KEY)
    build = builds / "root/vllm/tiny/secret"
    return started(run_script, build, out / "inside", keyfile, VLLM_ENABLE_V1_MULTIPROCESSING="0")


@pytest.fixture(scope="session")
def two(builds: Path, out: Path, run_script: Any) -> dict[str, Any]:
    """Two ranks and an engine beside the server's own process."""
    return started(run_script, builds / "root/vllm/tiny/two", out / "two")


@pytest.fixture(scope="session")
def damaged(builds: Path, out: Path, run_script: Any) -> dict[str, Any]:
    """The same, with one byte of the second rank's file changed."""
    build = out / "root/vllm/tiny/two-damaged"
    shutil.copytree(builds / "root/vllm/tiny/two", build)
    file = build / "model-rank-001.tensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    return started(run_script, build, out / "damaged")


@pytest.fixture(scope="session")
def swapped(builds: Path, out: Path, run_script: Any) -> dict[str, Any]:
    """The same, with the first rank's file in the place of the second's: whole, and as large."""
    build = out / "root/vllm/tiny/two-swapped"
    shutil.copytree(builds / "root/vllm/tiny/two", build)
    shutil.copy(build / "model-rank-000.tensors", build / "model-rank-001.tensors")
    return started(run_script, build, out / "swapped")


@pytest.mark.parametrize(("name", "ranks"), [("inside", 1), ("two", 2)])
def test_one_line_says_what_was_loaded(
    request: pytest.FixtureRequest, name: str, ranks: int, builds: Path
) -> None:
    """By the server alone, once every rank has loaded; a log collector reads it as it is."""
    case = request.getfixturevalue(name)
    assert case["failed"] is None
    [line] = case["lines"]
    build = builds / "root/vllm/tiny" / ("secret" if name == "inside" else "two")
    manifest = json.loads((build / "manifest.json").read_text())
    tensors = [tensor for shard in manifest["shards"] for tensor in shard["tensors"]]
    assert {
        "event": "model_loaded",
        "model": "tiny/llama",
        "suffix": "v1",
        "build_id": manifest["build_id"],
        "commit": manifest["snapshot"]["commit"],
        "ranks": ranks,
        "source": "disk",
        "retries": 0,
        "device": "cpu",
        "evidence_device": "cpu",
    }.items() <= line.items()
    assert line.keys() - {"event", "model", "suffix", "build_id", "commit", "ranks", "source"} == {
        "bytes",
        "seconds",
        "bytes_per_second",
        "retries",
        "device",
        "device_name",
        "vllm_version",
        "evidence_device",
        "seconds_since_start",
    }
    # Each rank's marker for vLLM takes 8.
    assert sum(tensor["size"] for tensor in tensors) + 8 * ranks == line["bytes"]
    assert 0 < line["seconds"] < line["seconds_since_start"]


@pytest.mark.parametrize(("name", "ranks"), [("inside", 1), ("two", 2)])
def test_ranks_report_without_hashing(
    request: pytest.FixtureRequest, name: str, ranks: int
) -> None:
    """A server should answer soon; the reload check has hashed every tensor before."""
    case = request.getfixturevalue(name)
    assert [f"rank-{rank:03d}.json" for rank in range(ranks)] == case["reports"]
    assert not case["hashed"]


def test_the_same_stands_among_the_metrics(inside: dict[str, Any]) -> None:
    """For dashboards: which build each server has, and how fast it came."""
    [line] = inside["lines"]
    metrics = dict(metric.rsplit(" ", 1) for metric in inside["metrics"])
    for name, field in (
        ("load_seconds", "seconds"),
        ("load_bytes", "bytes"),
        ("load_bytes_per_second", "bytes_per_second"),
        ("load_retries", "retries"),
        ("start_seconds", "seconds_since_start"),
    ):
        assert line[field] == float(metrics.pop(f"tensorize_assets_{name}"))
    [(info, one)] = metrics.items()
    assert "1.0" == one
    labels = ("build_id", "commit", "model", "source", "suffix")
    expected = ",".join(f'{label}="{line[label]}"' for label in labels)
    assert f"tensorize_assets_build_info{{{expected}}}" == info


def test_a_rank_that_fails_is_in_the_log_and_nothing_is_loaded(damaged: dict[str, Any]) -> None:
    """Which rank, of which build, and what to do; no line says that it was loaded."""
    assert damaged["failed"]
    assert [] == damaged["lines"]
    assert [] == damaged["metrics"]
    assert "failure-001.json" in damaged["reports"]
    [line] = [line for line in damaged["said"].splitlines() if "v1 was not loaded" in line]
    assert " ERROR " in line
    assert "tiny/llama v1 was not loaded: rank 1: HashMismatchError: " in line
    assert "model-rank-001.tensors is damaged" in line
