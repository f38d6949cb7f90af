"""The demo as `make demo-all` and `make demo ROOT=disk` run it, and its artifact in stock vLLM."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from tensorize_assets.core.compare import CHECKS
from tensorize_assets.demo.models import MODEL
from tensorize_assets.demo.ports import free_port

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1700)]

STOCK = Path(__file__).parent / "worker" / "scripts" / "stock_cases.py"


def demo(folder: Path, *options: str) -> dict[str, Any]:
    """Run the demo in `folder` and return its report."""
    command = [sys.executable, "-m", "tensorize_assets.cli", "demo", "--json"]
    done = subprocess.run(
        [*command, "--directory", str(folder), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=1500,
    )
    assert 0 == done.returncode, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the demo ran."""
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="session")
def report(folder: Path) -> dict[str, Any]:
    """What the demo said of TP=1 and TP=3, in S3."""
    return demo(folder, "--all")


@pytest.fixture(scope="session")
def on_disk(folder: Path) -> dict[str, Any]:
    """What the demo said of TP=1, on the disk."""
    return demo(folder, "--root", "disk", "--no-serve")


def test_every_check_passes_at_one_and_at_three_ranks(report: dict[str, Any]) -> None:
    """A real model with grouped-query attention and tied embeddings, not a tiny random one."""
    assert report["success"]
    assert [1, 3] == [build["tensorized_shards"]["ranks"] for build in report["builds"]]
    for build in report["builds"]:
        assert CHECKS.keys() == {check["check"] for check in build["checks"]}
        assert all(check["passed"] for check in build["checks"])


def test_the_reloaded_model_answers(report: dict[str, Any]) -> None:
    """Equal answers of two broken models would be equal too."""
    assert "Paris" in report["builds"][0]["reload_check"]["first_answer"]


def test_the_adapter_and_the_encrypted_variant_are_reloaded_too(report: dict[str, Any]) -> None:
    """A base that answers says nothing of what is served beside it."""
    build = report["builds"][0]
    reload = build["reload_check"]
    # It was trained to answer in capitals.
    assert re.search(r"[A-Z]{4}", reload["first_answer_with_capitals"])
    assert reload["first_answer_with_capitals"] == reload["encrypted_first_answer_with_capitals"]
    assert "s3" == reload["encrypted_load_source"]
    assert build["published"]["encrypted"].endswith("-encrypted")


def test_what_was_published_answers_over_http(report: dict[str, Any]) -> None:
    """The demo ends where a user's work begins: `tensorize serve` and an HTTP request."""
    served = report["served"]
    reload = report["builds"][0]["reload_check"]
    model, capitals = served["answers"].values()
    assert "Paris" in model
    assert reload["first_answer"] == served["prompt"] + model
    assert reload["first_answer_with_capitals"] == served["prompt"] + capitals
    assert "s3" == served["report"]["source"]


def test_the_artifact_lies_in_s3_and_is_read_from_there(report: dict[str, Any]) -> None:
    """A copy on the disk would prove nothing of what serving hosts load."""
    for build in report["builds"]:
        assert build["directory"].startswith("s3://tensorize-demo/models/vllm/")
        assert "s3" == build["reload_check"]["load_source"]


def test_the_demo_takes_its_s3_server_and_the_keys_with_it(
    report: dict[str, Any], folder: Path
) -> None:
    """What stays is data: no process, no key, and a catalog that names none."""
    folders: set[Path] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            folders.add(Path(process.cwd()))
    assert folder / "s3" not in folders
    assert not (folder / "s3" / "identities.json").exists()
    catalog = yaml.safe_load((Path(report["home"]) / "models.yaml").read_text())
    assert {"root", "recipients", "models"} == catalog.keys()


def test_the_demo_on_the_disk_passes_too(on_disk: dict[str, Any], folder: Path) -> None:
    """The same catalog with a folder as its root."""
    (build,) = on_disk["builds"]
    assert build["success"]
    assert build["directory"].startswith(f"{folder}/artifacts/vllm/")
    assert all(check["passed"] for check in build["checks"])


def test_the_published_directory_loads_in_stock_vllm(on_disk: dict[str, Any], folder: Path) -> None:
    """So that a GPU host with plain vLLM can load it; see test_stock_vllm for what is put in."""
    cases = folder / "stock.json"
    variables = {
        "VLLM_PLUGINS": "",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }

    folders = [str(folder / "snapshot"), on_disk["builds"][0]["directory"]]
    subprocess.run(
        [sys.executable, str(STOCK), str(cases), str(folder / "stock"), *folders],
        env={**os.environ, **variables},
        check=True,
        capture_output=True,
        timeout=300,
    )

    case = json.loads(cases.read_text())[Path(folders[1]).name]
    assert case["stored"] == case["loaded"]
    assert case["source"] == case["artifact"]


def test_a_second_demo_builds_nothing(report: dict[str, Any], folder: Path) -> None:
    """What is complete is recognised, also by a process and an S3 server of their own."""
    again = demo(folder, "--no-serve")["builds"][0]

    assert again["success"]
    assert "worker_seconds" not in again["tensorized_shards"]
    assert report["builds"][0]["directory"] == again["directory"]


def test_the_ui_takes_the_push_that_it_prints(
    folder: Path, on_disk: dict[str, Any], tmp_path: Path
) -> None:
    """And takes all of its processes along when it is ended."""
    assert on_disk["success"]
    (tmp_path / "push").mkdir()
    (tmp_path / "push" / "README.md").write_text("# Another\n")
    said = tmp_path / "said"
    port, hub_port = free_port(), free_port()
    with said.open("w") as output:
        command = [sys.executable, "-m", "tensorize_assets.cli", "demo", "--ui", "--root", "disk"]
        command += ["--directory", str(folder), "--port", str(port), "--hub-port", str(hub_port)]
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    started: list[psutil.Process] = []
    try:
        for url in (f"http://127.0.0.1:{port}/server_info", f"http://127.0.0.1:{hub_port}/"):
            _answers(url, process, said)
        push = re.search(r"^push a commit: (.*)$", said.read_text(), re.MULTILINE)
        assert push is not None, said.read_text()
        model = f"http://127.0.0.1:{hub_port}/api/models/{MODEL}"
        before = httpx.get(model).json()["sha"]
        subprocess.run(
            push[1].replace("FOLDER", str(tmp_path / "push")),
            shell=True,
            check=True,
            capture_output=True,
            timeout=120,
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        )
        assert before != httpx.get(model).json()["sha"]
        started = psutil.Process(process.pid).children(recursive=True)
        # Runs that the sensor has begun are ended by whoever ends the machine.
        services = [one for one in started if "-m dagster" in " ".join(one.cmdline())]
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        assert [] == psutil.wait_procs(services, timeout=30)[1]
    finally:
        for one in [*started, psutil.Process(process.pid)] if process.poll() is None else started:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def _answers(url: str, process: subprocess.Popen[bytes], said: Path) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        assert process.poll() is None, said.read_text()[-2000:]
        with contextlib.suppress(httpx.HTTPError):
            httpx.get(url)
            return
        time.sleep(0.2)
    pytest.fail(f"{url} does not answer: {said.read_text()[-2000:]}")
