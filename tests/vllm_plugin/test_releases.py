"""Which releases of vLLM take our builds, and in what way."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tensorize_assets.core import releases

SCRIPT = Path(__file__).parent / "scripts" / "release_cases.py"
RANGE = "and this package works with vLLM 0.31.x to 0.32.x"


@pytest.fixture(scope="session")
def cases(
    builds: Path, tmp_path_factory: pytest.TempPathFactory, run_script: Callable[..., None]
) -> dict[str, Any]:
    """What the installed release says."""
    out = tmp_path_factory.mktemp("release")
    cache = str(out / "cache")
    build = builds / "root/vllm/tiny/plain"
    run_script(SCRIPT, build, out / "cases.json", VLLM_CACHE_ROOT=cache, VLLM_ASSETS_CACHE=cache)
    return json.loads((out / "cases.json").read_text())


@pytest.fixture(scope="session")
def another_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with the metadata of a release that was never tried."""
    folder = tmp_path_factory.mktemp("another")
    found = releases.installed()
    assert found
    name = found.distribution.replace("-", "_")
    info = folder / f"{name}-0.40.1.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {found.distribution}\nVersion: 0.40.1\n"
    (info / "METADATA").write_text(metadata)
    return folder


@pytest.fixture(scope="session")
def untried(another_release: Path, run_script: Callable[..., None]) -> dict[str, Any]:
    """What our plugin does in that one."""
    cases = another_release / "cases.json"
    run_script(SCRIPT, "nothing", cases, PYTHONPATH=str(another_release), UNTRIED="1")
    return json.loads(cases.read_text())


def test_a_model_in_s3_is_refused_with_tensorizer(cases: dict[str, Any]) -> None:
    """In both releases: `vllm serve s3://… --load-format tensorizer` does not start (vllm#32807).

    A release that takes it makes this fail: then our directories in S3 need no `tensorize serve`.
    """
    assert cases["release"] in ("0.31", "0.32")
    assert (
        "To load a model from object storage (S3/GCS/Azure), 'load_format' must be"
        in (cases["from s3"])
    )
    assert "but got 'tensorizer'" in cases["from s3"]


def test_a_release_that_is_supported_has_our_loader_and_our_resolver(cases: dict[str, Any]) -> None:
    """And its own for everything else."""
    assert "done: TensorizedModelLoader" == cases["ours"]
    assert "done: DefaultModelLoader" == cases["others"]
    assert ["tensorize_assets"] == cases["resolvers"]


def test_another_release_refuses_our_files_and_loads_others(untried: dict[str, Any]) -> None:
    """What it would do with them nobody knows; a server of something else goes on."""
    assert untried["ours"].startswith("PreflightError: vLLM 0.40.1 is installed, ")
    assert RANGE in untried["ours"]
    assert "done: DefaultModelLoader" == untried["others"]
    assert [] == untried["resolvers"]


def test_a_worker_of_another_release_refuses_every_task(another_release: Path) -> None:
    """At its start, before it imports vLLM."""
    code = (
        "import sys\n"
        "from tensorize_assets.core.tasks import ReferenceRequest\n"
        "from tensorize_assets.worker import __main__ as worker\n"
        "from tensorize_assets.worker.session import Progress\n"
        "request = ReferenceRequest(model='a/b', suffix='v1', tensor_parallel_size=1,\n"
        "    dtype='auto', device='cpu', prompts=('x',), snapshot='nowhere')\n"
        "payload = request.model_dump(mode='json')\n"
        "answer = worker.answer(worker.TASKS, payload, None, Progress.silent())\n"
        "print(answer.kind, answer.message)\n"
        "assert 'vllm' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(another_release), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert 0 == done.returncode, done.stderr
    assert done.stdout.startswith("preflight vLLM 0.40.1 is installed, ")
    assert RANGE in done.stdout
