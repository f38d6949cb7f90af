"""The chain in a real `dagster dev`: webserver, daemon, code server and a process a step."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import dagster as dg
import psutil
import pytest
from chain_home import MODEL, Home

from tensorize_assets import partitions
from tensorize_assets.core import compare
from tensorize_assets.core.catalog import load_catalog
from tensorize_assets.demo.ports import free_port

pytestmark = pytest.mark.engine

REPO = Path(__file__).parents[2]
# Without sensors: only these tests start runs.
CODE = """\
from pathlib import Path

from tensorize_assets import build_defs

HOME = Path(__file__).parent
defs = build_defs(HOME / "models.yaml", HOME, sensors=False, schedules=False)
"""
T = TypeVar("T")


def wait_for(what: str, ask: Callable[[], T | None], timeout_s: float) -> T:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = ask()
        if found:
            return found
        time.sleep(0.2)
    raise TimeoutError(f"{what}: not within {timeout_s} s")


@dataclass(frozen=True)
class Dev:
    """A running `dagster dev` over a home."""

    home: Home
    url: str
    process: psutil.Process

    def ask(self, query: str, **variables: Any) -> Any:
        """What GraphQL answers."""
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(
            f"{self.url}/graphql", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            answer = json.load(response)
        assert "errors" not in answer, answer
        return answer["data"]

    def launch(self, suffix: str) -> str:
        """Start the job `build` for one partition, as the UI does; the run's id."""
        key = partitions.partition_key(MODEL, suffix)
        tags = {"dagster/partition": str(key)} | {
            f"dagster/partition/{name}": value for name, value in key.keys_by_dimension.items()
        }
        found = self.ask(
            """mutation($params: ExecutionParams!) { launchRun(executionParams: $params) {
                __typename
                ... on LaunchRunSuccess { run { runId } }
                ... on PythonError { message }
                ... on RunConfigValidationInvalid { errors { message } } } }""",
            params={
                "selector": {
                    "repositoryLocationName": "quiet.py",
                    "repositoryName": "__repository__",
                    "jobName": "build",
                },
                "mode": "default",
                "runConfigData": {},
                "executionMetadata": {
                    "tags": [{"key": key, "value": value} for key, value in tags.items()]
                },
            },
        )["launchRun"]
        assert "LaunchRunSuccess" == found["__typename"], found
        return found["run"]["runId"]

    def run(self, run_id: str) -> dict[str, Any]:
        return self.ask(
            """query($id: ID!) { runOrError(runId: $id) {
                ... on Run { status tags { key value } } } }""",
            id=run_id,
        )["runOrError"]

    def ended(self, run_id: str, timeout_s: float) -> str:
        """The status in which a run ended."""

        def status() -> str | None:
            found = self.run(run_id)["status"]
            return found if found in ("SUCCESS", "FAILURE", "CANCELED") else None

        return wait_for(f"the end of run {run_id}", status, timeout_s)

    def worker(self) -> psutil.Process | None:
        """The worker that runs now."""
        for process in self.process.children(recursive=True):
            try:
                if process.cmdline()[1:3] == ["-m", "tensorize_assets.worker"]:
                    return process
            except psutil.Error:
                continue
        return None


@pytest.fixture(scope="module")
def dev(
    first_build: Any, first_files: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Dev]:
    """Over a home whose first build is finished, with two more suffixes of the same model."""
    from tensorize_assets.demo.hub_server import LocalHub

    folder = tmp_path_factory.mktemp("dev") / "home"
    with LocalHub() as hub:
        hub.commit(MODEL, first_files)
        home = first_build.home.copy_to(folder, hub.endpoint)
        home.write_catalog({MODEL: {"v1": {}, "v2": {}, "v3": {}}})
        shutil.copy(REPO / "dagster_home" / "dagster.yaml", folder)
        with dg.DagsterInstance.from_config(str(folder)) as instance:
            partitions.add_catalog(instance, load_catalog(folder / "models.yaml"))
        port = free_port()
        log = folder / "dev.log"
        (folder / "quiet.py").write_text(CODE)
        command = f"-m dagster dev -h 127.0.0.1 -p {port} -f quiet.py"
        with log.open("w") as out:
            started = subprocess.Popen(
                [sys.executable, *command.split()],
                cwd=folder,
                env=_environment(DAGSTER_HOME=str(folder), HF_ENDPOINT=hub.endpoint),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        running = Dev(home, f"http://127.0.0.1:{port}", psutil.Process(started.pid))
        try:
            wait_for(f"dagster dev ({log.read_text()[-2000:]})", lambda: _answers(running), 90)
            yield running
        finally:
            _stop(started)


def _environment(**more: str) -> Mapping[str, str]:
    ours = ("DAGSTER_", "TENSORIZE_", "HF_")
    return {k: v for k, v in os.environ.items() if not k.startswith(ours)} | more


def _answers(dev: Dev) -> bool:
    try:
        urllib.request.urlopen(f"{dev.url}/server_info", timeout=5).close()
    except OSError:
        return False
    return True


def _stop(started: subprocess.Popen[bytes]) -> None:
    family = [psutil.Process(started.pid), *psutil.Process(started.pid).children(recursive=True)]
    started.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        started.wait(30)
    for process in family:
        if process.is_running():
            process.kill()
    started.wait(10)


def test_a_cancelled_run_takes_its_worker_along(dev: Dev):
    """The worker holds the GPU: within seconds nothing of it may be left, and nothing retried."""
    run_id = dev.launch("v3")
    worker = wait_for("a worker", dev.worker, 90)
    # Past its first imports, into those of torch and vLLM.
    time.sleep(3)
    family = [worker, *worker.children(recursive=True)]
    found = dev.ask(
        """mutation($id: String!) { terminateRun(runId: $id) { __typename } }""", id=run_id
    )
    assert "TerminateRunSuccess" == found["terminateRun"]["__typename"]
    _, alive = psutil.wait_procs(family, timeout=15)
    assert [] == alive
    assert "CANCELED" == dev.ended(run_id, 60)
    assert dev.worker() is None
    assert () == dev.home.channel(suffix="v3")


def test_a_partition_is_built_from_the_ui(dev: Dev):
    """Steps run in processes of their own here, take the pool's one place in turn, and publish."""
    partition = str(partitions.partition_key(MODEL, "v2"))
    run_id = dev.launch("v2")
    assert "SUCCESS" == dev.ended(run_id, 300)
    (entry,) = dev.home.channel(suffix="v2")
    tags = {tag["key"]: tag["value"] for tag in dev.run(run_id)["tags"]}
    assert entry.build_id == tags["tensorize_assets/build_id"]
    # The other partition's cancelled run is not among them.
    for check in compare.CHECKS:
        (execution,) = dev.ask(
            """query($check: String!, $partition: String!) {
                assetCheckExecutions(
                    assetKey: {path: ["reload_check"]},
                    checkName: $check, partition: $partition, limit: 10
                ) { status runId evaluation { success partition } } }""",
            check=check,
            partition=partition,
        )["assetCheckExecutions"]
        assert {
            "status": "SUCCEEDED",
            "runId": run_id,
            "evaluation": {"success": True, "partition": partition},
        } == execution
