"""The services of docker-compose.yml as processes of this machine, without Docker.

Their commands, environments and health checks are the file's own. What differs is what containers
would give them: host names are 127.0.0.1, ports are free ones, and volumes are folders.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import yaml

from tensorize_assets.demo import s3_server
from tensorize_assets.demo.ports import free_port
from tests.postgres import Postgres, postgres, programs

REPO = Path(__file__).parents[2]
COMPOSE = REPO / "docker-compose.yml"
STAND_IN = "stand_in_location"
_PORTS = (5432, 8333, 4000, 3000, 8765)
_STOP_S = 20.0
T = TypeVar("T")


def services() -> dict[str, Any]:
    """The services of docker-compose.yml, its variables at their defaults."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", COMPOSE.read_text())
    return yaml.safe_load(text)["services"]


def wait_for(what: str, ask: Callable[[], T | None], timeout_s: float) -> T:
    """What `ask` answers, asked until it is something."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := ask():
            return found
        time.sleep(0.2)
    raise TimeoutError(f"{what}: not within {timeout_s:.0f} s")


@dataclass
class Composed:
    """Running services. `folder` holds their volumes, and their logs by name."""

    folder: Path
    variables: Mapping[str, str]
    location: str
    ports: dict[int, int] = field(default_factory=dict)
    services: dict[str, Any] = field(default_factory=services)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    inner: list[str] = field(default_factory=lambda: _inner_ports())

    def start(self, name: str) -> None:
        """Start a service; it is not ready yet."""
        with self.log(name).open("ab") as out:
            self.running[name] = subprocess.Popen(
                self._command(name),
                cwd=self.folder / "home",
                env=self._environment(name),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_healthy(self, name: str) -> None:
        """Run the service's own health check until it passes, as often as the file allows."""
        check = self.services[name]["healthcheck"]
        command = self._here(name, check["test"][1:])
        allowed_s = _seconds(check.get("start_period", "0s")) + check["retries"] * _seconds(
            check["interval"]
        )
        deadline = time.monotonic() + allowed_s
        while True:
            process = self.running.get(name)
            if process is not None and process.poll() is not None:
                raise RuntimeError(f"{name} ended with {process.returncode}: {self.said(name)}")
            done = subprocess.run(
                command,
                env=self._environment(name),
                cwd=self.folder / "home",
                capture_output=True,
                text=True,
                timeout=_seconds(check["timeout"]),
            )
            if done.returncode == 0:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{name} is not healthy after {allowed_s:.0f} s: {done.stdout}{done.stderr}"
                    f"\n{self.said(name)}"
                )
            time.sleep(0.5)

    def kill(self, name: str) -> None:
        """End a service and every process of it at once, as a lost machine would."""
        _end(self.running.pop(name), grace_s=0)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def said(self, name: str) -> str:
        """The last lines of a service's log."""
        return "\n".join(self.log(name).read_text(errors="replace").splitlines()[-30:])

    def ask(self, query: str, **variables: Any) -> Any:
        """What the webserver's GraphQL answers."""
        answer = httpx.post(
            f"http://127.0.0.1:{self.ports[3000]}/graphql",
            json={"query": query, "variables": variables},
            timeout=30,
            trust_env=False,
        ).json()
        assert "errors" not in answer, answer
        return answer["data"]

    def environment(self, name: str) -> dict[str, str]:
        """The variables that docker-compose.yml gives a service, made to fit this machine."""
        given = self.services[name].get("environment") or {}
        return {key: self._fitted(name, str(text or "")) for key, text in given.items()}

    def _environment(self, name: str) -> dict[str, str]:
        # Nothing of the test's own: what a service needs must stand in the file.
        image = {
            "PATH": os.pathsep.join(
                [str(Path(sys.executable).parent), str(programs()), os.defpath]
            ),
            "HOME": str(self.folder / "user"),
            "LANG": "C.UTF-8",
        }
        return image | self.environment(name) | (dict(self.variables) if name == "code" else {})

    def _command(self, name: str) -> list[str]:
        command = self._here(name, self.services[name]["command"])
        if name == "s3":
            command += self.inner
        return command

    def _here(self, name: str, command: Sequence[str]) -> list[str]:
        fitted = [self._fitted(name, str(part)) for part in command]
        found = shutil.which(fitted[0], path=_path())
        if found is None:
            raise FileNotFoundError(f"{name}: {shlex.join(command)}")
        return [found, *fitted[1:]]

    def _fitted(self, name: str, text: str) -> str:
        folders = {
            "/opt/tensorize/catalog": "catalog",
            "/opt/tensorize": "home",
            "/var/lib/tensorize": "work",
            "/run/secrets": f"secrets-of-{name}",
            "/data": "s3",
        }
        for there, here in folders.items():
            text = re.sub(rf"(?<![\w/]){there}\b", str(self.folder / here), text)
        for port, free in self.ports.items():
            text = re.sub(rf"(?<=[@/])(postgres|s3|code):{port}\b", f"127.0.0.1:{free}", text)
            text = re.sub(rf"(?<=[:=]){port}\b", str(free), text)
        text = text.replace("0.0.0.0", "127.0.0.1")
        return text.replace("tensorize_assets.definitions", self.location)


@contextmanager
def composed(
    folder: Path, *, catalog: str, variables: Mapping[str, str], location: str = STAND_IN
) -> Iterator[Composed]:
    """All services, each healthy before those that wait for it are started.

    `variables` go to the code location, beside those of the file. Every process is ended, by its
    own id, however this ends; the logs stay in `folder`.
    """
    stack = Composed(folder, variables, location)
    _lay_out(stack, catalog)
    with ExitStack() as ending:
        server = ending.enter_context(_postgres(stack))
        stack.ports = {5432: server.port} | {port: free_port() for port in _PORTS[1:]}
        _write_workspace(stack)
        ending.callback(_end_all, stack)
        stack.wait_until_healthy("postgres")
        last = ("webserver", "daemon", "webhook")
        for name in ("s3", "code", *last):
            for other in stack.services[name].get("depends_on", {}):
                stack.wait_until_healthy(other)
            stack.start(name)
        for name in last:
            stack.wait_until_healthy(name)
        yield stack


def _path() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), str(programs())])


def _lay_out(stack: Composed, catalog: str) -> None:
    """The folders that images, volumes and secrets would be."""
    home = ("home", "home/keys", "home/seen", "home/run_locks")
    for name in (*home, "work", "work/tmp", "s3", "user", "catalog"):
        (stack.folder / name).mkdir(parents=True)
    shutil.copy(REPO / "deploy" / "dagster.yaml", stack.folder / "home")
    (stack.folder / "catalog" / "models.yaml").write_text(catalog)
    made = stack.folder / "secrets"
    subprocess.run(["sh", str(REPO / "deploy" / "secrets.sh"), str(made)], check=True, timeout=30)
    files = yaml.safe_load(COMPOSE.read_text())["secrets"]
    for name, service in stack.services.items():
        own = stack.folder / f"secrets-of-{name}"
        own.mkdir()
        for secret in service.get("secrets", []):
            shutil.copy(made / Path(files[secret]["file"]).name, own / secret)


@contextmanager
def _postgres(stack: Composed) -> Iterator[Postgres]:
    """What the entry point of Postgres's image does with its variables, and then the command."""
    given = stack.environment("postgres")
    program, *options = stack.services["postgres"]["command"]
    assert "postgres" == program
    with postgres(
        stack.folder / "postgres",
        user=given["POSTGRES_USER"],
        password=Path(given["POSTGRES_PASSWORD_FILE"]).read_text(),
        database=given["POSTGRES_DB"],
        options=options,
    ) as server:
        yield server


def _write_workspace(stack: Composed) -> None:
    text = (REPO / "deploy" / "workspace.yaml").read_text()
    fitted = text.replace("host: code", "host: 127.0.0.1").replace(
        "port: 4000", f"port: {stack.ports[4000]}"
    )
    (stack.folder / "home" / "workspace.yaml").write_text(fitted)


def _inner_ports() -> list[str]:
    """Of the servers within the S3 server, which have a network of their own in the container."""
    free = s3_server._free_ports()
    inner = [name for name in free if name != "s3"]
    return [
        f"-{n.removesuffix('.grpc')}.port{'.grpc' if '.grpc' in n else ''}={free[n]}" for n in inner
    ]


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+)(s|m)", text)
    assert found is not None, text
    return int(found[1]) * {"s": 1, "m": 60}[found[2]]


def _end_all(stack: Composed) -> None:
    # First who asks, then who answers.
    for name in reversed(list(stack.running)):
        # The S3 server takes up to 28 s to say good-bye, and loses nothing without.
        _end(stack.running.pop(name), grace_s=1 if name == "s3" else _STOP_S)


def _end(leader: subprocess.Popen[bytes], grace_s: float) -> None:
    """End a process and all that it started, wherever those went."""
    family: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(leader.pid)
        family = [process, *process.children(recursive=True)]
    if grace_s:
        leader.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            leader.wait(grace_s)
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    leader.kill()
    leader.wait(10)
    psutil.wait_procs(family, timeout=10)
