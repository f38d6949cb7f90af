"""A real Ray cluster on this machine: a head and worker nodes, each with processes of its own."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

from tensorize_assets.demo.ports import free_port

_READY_S = 180.0
_SHORT_S = 15.0
# The least that Ray takes; what crosses it here are results of some kilobytes.
_OBJECT_STORE = 80 * 1_000_000
_LAST_LINES = 10
_ATTEMPTS = 3
_SETTINGS = {
    # How soon a lost node is noticed: by default after 15 s. A node that only starts slowly, on a
    # busy machine, is not lost.
    "RAY_health_check_period_ms": "1000",
    # Said here: unset, it depends on whether this user's home happens to have a token of Ray's.
    "RAY_AUTH_MODE": "disabled",
}
# Each node has a loopback address of its own, as machines do. Not 127.0.0.1, which Ray takes for
# the machine's address on its network.
_HEAD = "127.0.0.2"


@dataclass
class Node:
    """A node: `ray start`, and all that it started."""

    process: subprocess.Popen[bytes]
    address: str
    log: Path

    def processes(self) -> dict[psutil.Process, str]:
        """Every process of it, and what it calls itself."""
        found: dict[psutil.Process, str] = {}
        with suppress(psutil.NoSuchProcess):
            leader = psutil.Process(self.process.pid)
            for process in [leader, *leader.children(recursive=True)]:
                with suppress(psutil.Error):
                    found[process] = " ".join(process.cmdline())
        return found

    def kill(self) -> None:
        """End every process of it at once, as a machine that loses its power does."""
        family = list(self.processes())
        # Nobody of them may start another one, or say goodbye.
        for number in ("suspend", "kill"):
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    getattr(process, number)()
        psutil.wait_procs(family, timeout=_SHORT_S)
        self.process.wait(_SHORT_S)


@dataclass
class RayCluster:
    """The head takes jobs at `address` and no work: its nodes do that.

    `env` is what every process of it has in its environment beside this process's own.
    """

    env: dict[str, str] = field(default_factory=dict)
    # Of few letters: the path of a socket below it has at most 107.
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp")))
    nodes: list[Node] = field(default_factory=list)

    def __enter__(self) -> RayCluster:
        # Ray looks for most of its ports itself, and loses some to others, as we may ours.
        for attempt in Retrying(
            retry=retry_if_exception_type(_EndedError),
            stop=stop_after_attempt(_ATTEMPTS),
            reraise=True,
        ):
            with attempt:
                try:
                    self._start_head()
                except BaseException:
                    self.__exit__()
                    raise
        return self

    def _start_head(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self._gcs, dashboard, clients = free_port(), free_port(), free_port()
        self.address = f"http://{_HEAD}:{dashboard}"
        self.head = self._start(
            "--head",
            f"--port={self._gcs}",
            f"--dashboard-host={_HEAD}",
            f"--dashboard-port={dashboard}",
            f"--ray-client-server-port={clients}",
            f"--temp-dir={self.folder}",
            "--num-cpus=0",
            "--no-monitor",
        )
        # Where one of its servers does not start, the head ends, and some answer until then.
        self._wait(lambda: _listens(clients) and bool(self.ask("/api/version")), self.head)

    def __exit__(self, *_: object) -> None:
        for node in self.nodes[::-1]:
            with suppress(psutil.NoSuchProcess):
                node.kill()
        self.nodes.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, *, cpus: int, **resources: float) -> Node:
        """Start a node with these resources; `wait_for` waits for it."""
        return self._start(
            f"--address={_HEAD}:{self._gcs}",
            f"--num-cpus={cpus}",
            f"--resources={json.dumps(resources)}",
        )

    def wait_for(self, count: int) -> None:
        """Wait until as many nodes are alive, the head among them."""
        self._wait(lambda: len(self.alive()) == count, self.head)

    def alive(self) -> list[dict[str, Any]]:
        """The living nodes, as Ray's state API shows them."""
        return self._living("nodes")

    def nodes_of(self, actor: str) -> list[str]:
        """The addresses of the nodes where an actor of this class lives."""
        addresses = {node["node_id"]: node["node_ip"] for node in self.alive()}
        actors = [one for one in self._living("actors") if one["class_name"] == actor]
        return [addresses[one["node_id"]] for one in actors]

    def ask(self, path: str) -> Any:
        """What the dashboard answers, as JSON; None while it does not."""
        try:
            with urllib.request.urlopen(self.address + path, timeout=_SHORT_S) as answer:
                return json.load(answer)
        except (OSError, ValueError):
            return None

    def _living(self, what: str) -> list[dict[str, Any]]:
        found = self.ask(f"/api/v0/{what}?limit=100&timeout=5&detail=False")
        listed = found["data"]["result"]["result"] if found else []
        return [one for one in listed if one["state"] == "ALIVE"]

    def _start(self, *arguments: str) -> Node:
        address = f"127.0.0.{2 + len(self.nodes)}"
        log = self.folder / f"node-{len(self.nodes)}.log"
        command = [
            str(Path(sys.executable).parent / "ray"),
            "start",
            *arguments,
            "--block",
            f"--node-ip-address={address}",
            "--disable-usage-stats",
            "--num-gpus=0",
            f"--object-store-memory={_OBJECT_STORE}",
            f"--dashboard-agent-listen-port={free_port()}",
            # Any that are free: by default all nodes of a machine give out the same ones.
            "--min-worker-port=0",
            "--max-worker-port=0",
        ]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env=os.environ | _SETTINGS | self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        node = Node(process, address, log)
        self.nodes.append(node)
        # Nodes of a machine share a folder, and two that start at once take the same names there.
        sockets = self.folder / "session_latest" / "sockets"
        self._wait(lambda: len(list(sockets.glob("raylet*"))) == len(self.nodes), node)
        return node

    def _wait(self, condition: Any, node: Node) -> None:
        deadline = time.monotonic() + _READY_S
        while not condition():
            has_ended = node.process.poll() is not None
            if has_ended or time.monotonic() > deadline:
                logs = [node.log.read_text(errors="replace") for node in self.nodes]
                last = ["\n".join(log.splitlines()[-_LAST_LINES:]) for log in logs]
                kind = _EndedError if has_ended else RuntimeError
                raise kind("the Ray cluster does not start:\n" + "\n\n".join(last))
            time.sleep(0.1)


class _EndedError(RuntimeError):
    """A node ended before it was ready."""


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((_HEAD, port)) == 0
