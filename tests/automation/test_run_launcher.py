"""Whether a started run still has its process, as the run monitoring asks the launcher."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.events import EngineEventData
from dagster._core.launcher import WorkerStatus
from dagster._core.storage.tags import GRPC_INFO_TAG

from tensorize_assets.automation import run_lock
from tensorize_assets.demo.ports import free_port

SETTINGS = {
    "run_launcher": {
        "module": "tensorize_assets.automation.run_launcher",
        "class": "WatchedRunLauncher",
    }
}


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.local_temp(str(tmp_path), overrides=SETTINGS) as found:
        yield found


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """What stands for a run's process."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as running:
        yield running
        running.kill()


@pytest.fixture
def code_server() -> Iterator[int]:
    """The port of a code server that was just started."""
    port = free_port()
    command = [sys.executable, "-m", "dagster", "api", "grpc", "--host=127.0.0.1", f"--port={port}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + 60
            while not _listens(port):
                assert server.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield port
        finally:
            server.kill()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def status(
    instance: dg.DagsterInstance,
    server: dict[str, object] | None,
    pid: int | None = None,
    started: float | None = None,
) -> WorkerStatus:
    """What the launcher says of a run of `server` whose process reported itself as `pid`."""
    tags = {} if server is None else {GRPC_INFO_TAG: json.dumps(server)}
    run = instance.create_run_for_job(job, tags=tags)
    if pid is not None:
        event = dg.DagsterEvent(
            dg.DagsterEventType.ENGINE_EVENT.value,
            "build",
            event_specific_data=EngineEventData.in_process(pid),
        )
        instance.handle_new_event(
            dg.EventLogEntry(
                error_info=None,
                level=20,
                user_message="",
                run_id=run.run_id,
                timestamp=started or time.time(),
                dagster_event=event,
            )
        )
    assert instance.run_launcher.supports_check_run_worker_health
    return instance.run_launcher.check_run_worker_health(run).status


@dg.job
def job():
    pass


ON_THIS_MACHINE: dict[str, object] = {"host": "localhost", "socket": "/tmp/of-a-code-server"}


def test_a_run_of_dagster_dev_lives_as_long_as_its_process(
    instance: dg.DagsterInstance, process: subprocess.Popen[bytes]
):
    """Its code server may be another one meanwhile: a reload in the UI must end no run."""
    assert WorkerStatus.RUNNING == status(instance, ON_THIS_MACHINE, process.pid)
    process.kill()
    process.wait()
    assert WorkerStatus.NOT_FOUND == status(instance, ON_THIS_MACHINE, process.pid)


def test_another_process_under_the_same_number_is_not_the_run(instance: dg.DagsterInstance):
    """After a reboot numbers are given out anew."""
    before_it_was_born = time.time() - 24 * 60 * 60
    assert WorkerStatus.NOT_FOUND == status(
        instance, ON_THIS_MACHINE, os.getpid(), before_it_was_born
    )


def test_a_restarted_code_server_has_lost_its_runs(instance: dg.DagsterInstance, code_server: int):
    """It takes them along when it ends."""
    here = {"host": "127.0.0.1", "port": code_server}
    assert WorkerStatus.NOT_FOUND == status(instance, here)


@pytest.mark.parametrize(
    ("server", "why"),
    [
        (None, "a run of this process, such as a notebook's"),
        ({"host": "127.0.0.1", "port": 1}, "the code server restarts, or the network is down"),
        (ON_THIS_MACHINE, "its process has not said yet which one it is"),
    ],
)
def test_what_is_not_known_counts_as_alive(
    instance: dg.DagsterInstance, server: dict[str, object] | None, why: str
):
    """A run that is failed while it works would be built twice at once."""
    assert WorkerStatus.RUNNING == status(instance, server), why


_BUILDING = """
import sys
import dagster as dg
from tensorize_assets.automation import run_lock
with dg.DagsterInstance.local_temp(sys.argv[1]) as instance:
    with run_lock.held(instance, sys.argv[2]):
        print(flush=True)
        input()
"""


@pytest.fixture
def build(instance: dg.DagsterInstance) -> Iterator[tuple[dg.DagsterRun, subprocess.Popen[bytes]]]:
    """A run of `tensorize build`, and its process."""
    run = instance.create_run_for_job(job)
    with subprocess.Popen(
        [sys.executable, "-c", _BUILDING, instance.root_directory, run.run_id],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as running:
        assert running.stdout is not None
        running.stdout.readline()
        yield run, running
        running.kill()


def locks(instance: dg.DagsterInstance) -> Path:
    return Path(instance.root_directory, "run_locks")


def test_a_build_of_a_terminal_lives_as_long_as_its_process(
    instance: dg.DagsterInstance, build: tuple[dg.DagsterRun, subprocess.Popen[bytes]]
):
    """No code server started it, and nobody else knows of its process."""
    run, process = build
    check = instance.run_launcher.check_run_worker_health
    assert WorkerStatus.RUNNING == check(run).status
    process.kill()
    process.wait()
    assert WorkerStatus.NOT_FOUND == check(run).status


def test_a_build_of_another_machine_lives_as_long_as_it_says_so(
    instance: dg.DagsterInstance, build: tuple[dg.DagsterRun, subprocess.Popen[bytes]]
):
    """Some file systems keep locks for their own machine only."""
    run, process = build
    process.kill()
    process.wait()
    (path,) = locks(instance).iterdir()
    path.write_text("another kernel")
    check = instance.run_launcher.check_run_worker_health
    assert WorkerStatus.RUNNING == check(run).status
    silent = time.time() - 2 * run_lock._SILENT_S
    os.utime(path, (silent, silent))
    assert WorkerStatus.NOT_FOUND == check(run).status


def test_a_build_that_ended_leaves_no_lock(instance: dg.DagsterInstance):
    run = instance.create_run_for_job(job)
    with run_lock.held(instance, run.run_id):
        assert not run_lock.is_lost(instance, run.run_id)
    assert not run_lock.is_lost(instance, run.run_id)
    assert [] == list(locks(instance).iterdir())


def test_a_build_whose_end_was_not_written_down_is_lost(instance: dg.DagsterInstance):
    """Dagster raises what its database said, and the run stays started."""
    run = instance.create_run_for_job(job)
    with pytest.raises(ConnectionError), run_lock.held(instance, run.run_id):
        raise ConnectionError
    assert run_lock.is_lost(instance, run.run_id)
    with run_lock.held(instance, instance.create_run_for_job(job).run_id):
        ended = instance.get_run_by_id(run.run_id)
        assert ended is not None
        assert ended.status is dg.DagsterRunStatus.FAILURE


def test_what_else_lies_among_the_locks_is_in_no_builds_way(
    instance: dg.DagsterInstance, caplog: pytest.LogCaptureFixture
):
    """It is somebody else's trouble."""
    locks(instance).mkdir()
    (locks(instance) / ".nfs000001").write_bytes(b"\xff")
    odd = locks(instance) / str(uuid.uuid4())
    odd.mkdir()
    run = instance.create_run_for_job(job)
    with run_lock.held(instance, run.run_id):
        assert locks(instance) / run.run_id in locks(instance).iterdir()
    assert odd.name in caplog.text


def test_without_a_folder_for_its_lock_a_build_goes_on(
    instance: dg.DagsterInstance, caplog: pytest.LogCaptureFixture
):
    """As where the home cannot be written to."""
    locks(instance).write_text("no folder")
    with run_lock.held(instance, "a-run"):
        pass
    assert "if this run is killed" in caplog.text
