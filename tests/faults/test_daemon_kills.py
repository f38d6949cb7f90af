"""Dagster's daemon is killed between a new commit and its build; the next one takes it from there.

A real daemon with the settings of `dagster_home/`, the revision sensor, the queue, and the chain
with workers that take no vLLM.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import dagster as dg
import psutil
import pytest
import yaml
from chain import places_taken
from chain_home import MODEL, Home, stand_in
from injection import Rule, environment

from tensorize_assets import partitions
from tensorize_assets.core.catalog import load_catalog
from tensorize_assets.demo.hub_server import LocalHub, folder_files

_HERE = Path(__file__).parent
_SETTINGS = _HERE.parents[1] / "dagster_home" / "dagster.yaml"
_CODE = """\
from pathlib import Path

from chain_home import stand_in

from tensorize_assets import build_defs

HOME = Path(__file__).parent
defs = build_defs(HOME / "models.yaml", HOME, schedules=False, launcher=stand_in())
"""
_SENSOR = "hf_revision_sensor"
_TOO_LONG_S = 150
_TICK = "dagster._daemon.sensor"
_QUEUE = "dagster._daemon.run_coordinator.queued_run_coordinator_daemon:QueuedRunCoordinatorDaemon"


class Moment(NamedTuple):
    """A call in the daemon, before or after which it is killed."""

    what: str
    when: Any
    at: str


MOMENTS = (
    Moment("the sensor has answered", "after", f"{_TICK}:_evaluate_sensor"),
    Moment("its run requests are kept", "after", f"{_TICK}:SensorLaunchContext.set_run_requests"),
    Moment("a run is made", "before", f"{_TICK}:_create_sensor_run"),
    Moment("a run is made", "after", f"{_TICK}:_create_sensor_run"),
    Moment("a run is queued", "after", f"{_TICK}:_submit_run_request"),
    Moment("a run is taken from the queue", "before", f"{_QUEUE}._dequeue_run"),
    Moment("a run is taken from the queue", "after", f"{_QUEUE}._dequeue_run"),
)


@pytest.fixture
def home(tmp_path: Path, tiny_models: Path) -> Iterator[Home]:
    """A home of ours, quicker; its Hub has a commit that nothing was built of."""
    with LocalHub() as hub:
        hub.commit(MODEL, folder_files(tiny_models / "llama"))
        made = Home(tmp_path / "home", hub.endpoint)
        made.write_catalog({MODEL: {"v1": {}}})
        settings = yaml.safe_load(_SETTINGS.read_text())
        settings["run_coordinator"]["config"]["dequeue_interval_seconds"] = 1
        # Of a run whose process was gone before it said anything.
        settings["run_monitoring"] |= {"poll_interval_seconds": 2, "start_timeout_seconds": 20}
        (made.folder / "dagster.yaml").write_text(yaml.safe_dump(settings))
        (made.folder / "defs_of_home.py").write_text(_CODE)
        with dg.DagsterInstance.from_config(str(made.folder)) as instance:
            partitions.add_catalog(instance, load_catalog(made.folder / "models.yaml"))
        _dagster(made, "sensor", "start", _SENSOR, "-f", "defs_of_home.py")
        yield made


def _environment(home: Home, *rules: Rule) -> dict[str, str]:
    path = [Path(part) for part in stand_in().env["PYTHONPATH"].split(os.pathsep)]
    return {
        **os.environ,
        **environment(rules, *path),
        "DAGSTER_HOME": str(home.folder),
        "HF_ENDPOINT": home.endpoint,
        "TENSORIZE_HUB_CACHE": str(home.folder / "hub"),
    }


def _dagster(home: Home, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dagster", *arguments],
        cwd=home.folder,
        env=_environment(home),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TOO_LONG_S,
    )
    assert done.returncode == 0, done.stdout[-3000:]


@contextmanager
def _daemon(home: Home, *rules: Rule) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon, and everything that it started, until the context ends."""
    log = home.folder / "daemon.log"
    with log.open("ab") as out:
        started = subprocess.Popen(
            [sys.executable, "-m", "dagster._daemon", "run", "-f", "defs_of_home.py"],
            cwd=home.folder,
            env=_environment(home, *rules),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        yield started
    finally:
        started.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            started.wait(20)
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("DAGSTER_HOME") == str(home.folder):
                    process.kill()
        started.wait(10)


def _wait(what: str, home: Home, ask: Callable[[], Any]) -> None:
    deadline = time.monotonic() + _TOO_LONG_S
    while not ask():
        log = (home.folder / "daemon.log").read_text(errors="replace")[-3000:]
        assert time.monotonic() < deadline, f"{what}: not within {_TOO_LONG_S} s: {log}"
        time.sleep(0.2)


def _require_one_build(home: Home) -> None:
    _wait("a published build", home, home.channel)
    with dg.DagsterInstance.from_config(str(home.folder)) as instance:

        def over() -> bool:
            return all(run.is_finished for run in instance.get_runs())

        _wait("the end of all runs", home, over)
        builds = [run for run in instance.get_runs() if run.job_name == "build"]
        # A run that was lost is tried again as another one of the same key.
        keys = [run.tags["dagster/run_key"] for run in builds if run.parent_run_id is None]
        assert len(keys) == len(set(keys)), keys
        assert 1 == len([run for run in builds if run.is_success])
        # Nothing of a pool is taken any more.
        assert 0 == places_taken(instance)
    assert 1 == len(home.channel())


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(
            moment,
            id=f"{moment.when} {moment.what}",
            marks=[
                pytest.mark.fault(
                    "Kill",
                    f"a new commit, {moment.when} {moment.what}: SIGKILL to Dagster's daemon",
                    "the next daemon starts the build, once",
                ),
                *([] if number == 3 else [pytest.mark.long]),
            ],
        )
        for number, moment in enumerate(MOMENTS)
    ],
)
def test_a_commit_is_built_once_by_the_next_daemon(
    home: Home, moment: Moment, tmp_path: Path
) -> None:
    fired = tmp_path / "fired"
    with _daemon(home, Rule(moment.at, moment.when, "kill", str(fired))) as first:
        _wait("the daemon's death", home, lambda: first.poll() is not None)
        assert first.returncode == -signal.SIGKILL
        assert fired.exists()
    with _daemon(home):
        _require_one_build(home)
