"""A fleet as `make ui` opens it, over a local Hub, with a real model; and a browser."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import yaml
from playwright.sync_api import Page, sync_playwright

from tensorize_assets.core.channel import ChannelEntry, read_channel
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.signing import load_or_create_signing_key
from tensorize_assets.demo.hub_server import LocalHub, folder_files
from tensorize_assets.demo.models import MODEL, make_snapshot
from tensorize_assets.demo.ports import free_port

SUFFIX = "v1"
TOKEN = "token-of-the-pusher"
PARTITION = f"{MODEL.replace('/', '--')}|{SUFFIX}"

_HOME = Path(__file__).parents[2] / "dagster_home"
_MODULE = "tensorize_assets.definitions"
# Debian's; a browser of Playwright's own is never downloaded.
_CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
_OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# Names a folder that the pictures of README.md are written to.
_SCREENSHOTS = "TENSORIZE_ASSETS_SCREENSHOTS"

T = TypeVar("T")


def waited_for(look: Callable[[], T | None], timeout_s: float, what: str) -> T:
    """Return what `look` finds as soon as it finds something."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        found = look()
        if found is not None:
            return found
        time.sleep(0.5)
    pytest.fail(f"waited {timeout_s:.0f} s for {what}", pytrace=False)


@dataclass(frozen=True)
class Fleet:
    """A running UI with its daemon, the home it has, and the Hub that it watches."""

    url: str
    model: str
    home: Path
    hub: LocalHub
    log: Path

    def ask(self, query: str, **variables: object) -> dict[str, Any]:
        """The answer of Dagster's GraphQL API."""
        answer = httpx.post(
            f"{self.url}/graphql", json={"query": query, "variables": variables}, timeout=60
        ).json()
        assert "errors" not in answer, answer["errors"]
        return answer["data"]

    def runs(self) -> list[dict[str, Any]]:
        """Every run, the newest first, with its tags."""
        found = self.ask(
            "{runsOrError(limit: 50) {... on Runs {results "
            "{id status jobName creationTime startTime endTime tags {key value}}}}}"
        )
        return [
            {**run, "tags": {tag["key"]: tag["value"] for tag in run["tags"]}}
            for run in found["runsOrError"]["results"]
        ]

    def run_of(self, commit: str) -> dict[str, Any] | None:
        """The run that was requested for a commit, once it has ended."""
        for run in self.runs():
            ended = run["status"] in ("SUCCESS", "FAILURE", "CANCELED")
            if ended and run["tags"].get("tensorize_assets/commit") == commit:
                return run
        return None

    def refused(self, run_id: str) -> set[str]:
        """The checks that did not pass in a run."""
        found = self.ask(
            "query($id: ID!) {logsForRun(runId: $id) {... on EventConnection {events "
            "{... on AssetCheckEvaluationEvent {evaluation {checkName success}}}}}}",
            id=run_id,
        )
        events = found["logsForRun"]["events"]
        checks = [event["evaluation"] for event in events if "evaluation" in event]
        assert checks, f"run {run_id} has no checks"
        return {check["checkName"] for check in checks if not check["success"]}

    def channel(self) -> tuple[ChannelEntry, ...]:
        """The channel's history."""
        key = load_or_create_signing_key(self.home / "keys" / "signing.key")
        store = LocalStore(self.home / "artifacts")
        found = read_channel(store, self.model, SUFFIX, (key.public_key,))
        return found.channel.entries if found else ()

    def push(self, folder: Path) -> str:
        """Push a folder's files with the Hub's own client; the commit that this made."""
        hf = Path(sys.executable).with_name("hf")
        environment = {
            **os.environ,
            "HF_ENDPOINT": self.hub.endpoint,
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
        }
        done = subprocess.run(
            [hf, "upload", self.model, folder],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert 0 == done.returncode, done.stderr
        return str(httpx.get(f"{self.hub.endpoint}/api/models/{self.model}").json()["sha"])


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's files."""
    return make_snapshot(tmp_path_factory.mktemp("model"), lambda _: None)


@contextmanager
def running_fleet(
    folder: Path, model: str, files: Mapping[str, bytes | Path], *, sensor: bool, **profile: object
) -> Generator[Fleet]:
    """Everything of `make ui`, over a Hub with `model`, in `folder`; ended with the block.

    The profile is the model's only one. With `sensor` False `hf_revision_sensor` is off, as
    somebody has left it.
    """
    home = folder / "home"
    home.mkdir(parents=True)
    shutil.copy(_HOME / "dagster.yaml", home)
    profiles = {SUFFIX: {"reload_device": "cpu", **profile}}
    catalog = {
        "root": "artifacts",
        "automation": {"revisions": {"every_seconds": 5}},
        "models": {model: {"profiles": profiles}},
    }
    (home / "models.yaml").write_text(yaml.safe_dump(catalog))
    log = folder / "dagster.log"
    with LocalHub() as hub, log.open("w") as output:
        hub.commit(model, files)
        hub.accept_pushes(folder / "pushes", TOKEN)
        environment = {
            **{name: text for name, text in os.environ.items() if not name.startswith("TENSORIZE")},
            "DAGSTER_HOME": str(home),
            "HF_ENDPOINT": hub.endpoint,
        }
        dagster = [sys.executable, "-m", "dagster"]
        if not sensor:
            subprocess.run(
                [*dagster, "sensor", "stop", "hf_revision_sensor", "--module-name", _MODULE],
                env=environment,
                cwd=folder,
                check=True,
                capture_output=True,
                timeout=120,
            )
        port = free_port()
        process = subprocess.Popen(
            [
                *(*dagster, "dev", "--host", "127.0.0.1", "--port", str(port)),
                *("--log-level", "warning", "--module-name", _MODULE),
            ],
            env=environment,
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        running = Fleet(f"http://127.0.0.1:{port}", model, home, hub, log)
        try:
            waited_for(lambda: _answers(running, process), 120, f"Dagster ({log})")
            yield running
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, snapshot: Path) -> Iterator[Fleet]:
    """The demo's model; the sensor is off."""
    folder = tmp_path_factory.mktemp("fleet")
    files = folder_files(snapshot)
    with running_fleet(folder, MODEL, files, sensor=False, dtype="bfloat16") as running:
        yield running


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A page of a real browser."""
    if _CHROMIUM is None:
        pytest.skip("Debian's Chromium is not installed (apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_CHROMIUM, args=list(_OPTIONS))
        opened = browser.new_page(viewport={"width": 1500, "height": 950})
        opened.set_default_timeout(60_000)
        yield opened
        browser.close()


@pytest.fixture(scope="module")
def picture(page: Page, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], None]:
    """Keeps what the page shows, under a name."""
    folder = Path(os.environ.get(_SCREENSHOTS) or tmp_path_factory.mktemp("pictures"))
    folder.mkdir(parents=True, exist_ok=True)

    def take(name: str) -> None:
        # Dagster draws its tables and graphs a moment after their data have come.
        page.wait_for_timeout(1500)
        page.screenshot(path=folder / f"{name}.png")

    return take


def changed(weights: Path, change: Callable[[dict[str, Any], bytearray], None], to: Path) -> Path:
    """A folder with a safetensors file whose header and data `change` has altered."""
    content = weights.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    data = bytearray(content[8 + length :])
    change(header, data)
    text = json.dumps(header).encode()
    to.mkdir()
    (to / weights.name).write_bytes(struct.pack("<Q", len(text)) + text + data)
    return to


def bump(header: Mapping[str, Any], data: bytearray, name: str, bits: int | None = None) -> None:
    """Set the first value of a 16-bit tensor: to these bits, or to its neighbour."""
    start, _ = header[name]["data_offsets"]
    (before,) = struct.unpack_from("<H", data, start)
    struct.pack_into("<H", data, start, before ^ 1 if bits is None else bits)


def _answers(fleet: Fleet, process: subprocess.Popen[bytes]) -> bool | None:
    if process.poll() is not None:
        pytest.fail(f"dagster dev has ended:\n{fleet.log.read_text()[-3000:]}", pytrace=False)
    try:
        found = fleet.ask("{repositoriesOrError {... on RepositoryConnection {nodes {name}}}}")
    except (httpx.HTTPError, ValueError):
        return None
    return bool(found["repositoriesOrError"].get("nodes")) or None
