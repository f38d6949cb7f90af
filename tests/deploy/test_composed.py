"""The very commands of docker-compose.yml, as processes here: a build from the UI into S3."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from chain_home import MODEL, PROFILE
from composed import REPO, STAND_IN, Composed, composed, wait_for

from tensorize_assets import partitions
from tensorize_assets.core import layout
from tensorize_assets.core.s3 import S3Settings, resolve
from tensorize_assets.core.store import Store, open_store
from tensorize_assets.demo.hub_server import LocalHub, folder_files

ROOT = "s3://models/prod"


@pytest.fixture
def start(tmp_path: Path, tiny_models: Path) -> Iterator[Callable[[str], Composed]]:
    """Starts everything, with a code location, over one tiny model of a local Hub."""
    with ExitStack() as ending:
        hub = ending.enter_context(LocalHub())
        hub.commit(MODEL, folder_files(tiny_models / "llama"))
        variables = {
            "HF_ENDPOINT": hub.endpoint,
            # Of the stand-in's location, and of nothing that the file says.
            "PYTHONPATH": os.pathsep.join(
                str(path) for path in (Path(__file__).parent, REPO / "tests" / "assets")
            ),
        }
        catalog = {"root": ROOT, "models": {MODEL: {"profiles": {"v1": dict(PROFILE)}}}}
        yield lambda location: ending.enter_context(
            composed(
                tmp_path / "volumes",
                catalog=yaml.safe_dump(catalog),
                variables=variables,
                location=location,
            )
        )


REPOSITORY = {
    "repositoryLocationName": "tensorize_assets",
    "repositoryName": "__repository__",
}


def launch(stack: Composed, suffix: str) -> str:
    """Start the job `build` for one partition, as the UI does; the run's id."""
    key = partitions.partition_key(MODEL, suffix)
    for definition, name in (("tensorize_model", "model"), ("tensorize_suffix", "suffix")):
        stack.ask(
            """mutation($selector: RepositorySelector!, $definition: String!, $key: String!) {
                addDynamicPartition(repositorySelector: $selector,
                    partitionsDefName: $definition, partitionKey: $key) { __typename } }""",
            selector=REPOSITORY,
            definition=definition,
            key=key.keys_by_dimension[name],
        )
    tags = {"dagster/partition": str(key)} | {
        f"dagster/partition/{name}": value for name, value in key.keys_by_dimension.items()
    }
    found = stack.ask(
        """mutation($params: ExecutionParams!) { launchRun(executionParams: $params) {
            __typename
            ... on LaunchRunSuccess { run { runId } }
            ... on PythonError { message } } }""",
        params={
            "selector": {**REPOSITORY, "jobName": "build"},
            "mode": "default",
            "runConfigData": {},
            "executionMetadata": {"tags": [{"key": k, "value": v} for k, v in tags.items()]},
        },
    )["launchRun"]
    assert "LaunchRunSuccess" == found["__typename"], found
    return found["run"]["runId"]


def run(stack: Composed, run_id: str) -> dict[str, Any]:
    """What the UI shows of a run."""
    found = stack.ask(
        """query($id: ID!) { runOrError(runId: $id) {
            ... on Run { status tags { key value } } } }""",
        id=run_id,
    )["runOrError"]
    return {"status": found["status"], **{tag["key"]: tag["value"] for tag in found["tags"]}}


def ended(stack: Composed, run_id: str, timeout_s: float) -> str:
    """The status in which a run ended."""

    def status() -> str | None:
        found = run(stack, run_id)["status"]
        return found if found in ("SUCCESS", "FAILURE", "CANCELED") else None

    return wait_for(f"the end of run {run_id}", status, timeout_s)


def store(stack: Composed, monkeypatch: pytest.MonkeyPatch, root: str) -> Store:
    """A root in the services' own S3, by the keys that they have."""
    given = stack.environment("code")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, given[name])
    return open_store(root, resolve(S3Settings(endpoint_url=given["AWS_ENDPOINT_URL_S3"])))


def secrets_in(stack: Composed) -> list[str]:
    """Where passwords and keys show that have no business there."""
    folder = stack.folder / "secrets"
    hidden = {
        (folder / "postgres_password").read_text(),
        (folder / "webhook_secret").read_text(),
        *re.findall(r"=(\w+)", (folder / "s3_credentials").read_text()),
    }
    places = {name: stack.log(name).read_text(errors="replace") for name in stack.running}
    for name, leader in stack.running.items():
        for process in (leader.pid, *(p.pid for p in psutil.Process(leader.pid).children(True))):
            for kind in ("cmdline", "environ"):
                with suppress(OSError):
                    text = Path(f"/proc/{process}/{kind}").read_text(errors="replace")
                    places[f"{kind} of {process} ({name})"] = text
    return [place for place, text in places.items() if any(secret in text for secret in hidden)]


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_build_from_the_ui_ends_in_the_bucket(
    start: Callable[[str], Composed], monkeypatch: pytest.MonkeyPatch
):
    """What the file says of users, folders, addresses and secrets suffices for a whole build."""
    stack = start("tensorize_assets.definitions")
    run_id = launch(stack, "v1")
    assert "SUCCESS" == ended(stack, run_id, 400), stack.said("code")
    found = store(stack, monkeypatch, ROOT).stat(layout.channel_key(MODEL, "v1"))
    assert found is not None


@pytest.mark.timeout(900)
def test_a_run_that_is_lost_with_its_machine_is_started_anew(
    start: Callable[[str], Composed], monkeypatch: pytest.MonkeyPatch
):
    """Otherwise it counts as running for ever, and nothing of its partition is built again."""
    stack = start(STAND_IN)
    lost = launch(stack, "v1")
    wait_for("its start", lambda: "STARTED" == run(stack, lost)["status"], 60)
    machine = ("s3", "code", "daemon")
    for name in machine:
        stack.kill(name)
    for name in machine:
        stack.start(name)
        stack.wait_until_healthy(name)
    assert "FAILURE" == ended(stack, lost, 120), stack.said("daemon")
    again = wait_for("its retry", lambda: run(stack, lost).get("dagster/auto_retry_run_id"), 60)
    wait_for("its start", lambda: "STARTED" == run(stack, again)["status"], 120)
    assert [] == secrets_in(stack)
    assert "SUCCESS" == ended(stack, again, 300), stack.said("code")
    found = store(stack, monkeypatch, ROOT).stat(layout.channel_key(MODEL, "v1"))
    assert found is not None
    # What its steps said is where the webserver, on another machine, can show it.
    assert [] != store(stack, monkeypatch, "s3://logs/dagster").list("storage")
    assert [] == secrets_in(stack)
    # The image's own folder is read-only.
    assert {"dagster.yaml", "workspace.yaml", "keys", "run_locks", "seen"} == set(
        os.listdir(stack.folder / "home")
    )
