"""`tensorize build` is killed, and the next goes on: settings of `dagster_home/`, no daemon."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import pytest
from chain import places_taken
from chain_home import MODEL, Home, stand_in
from dagster._core.storage.tags import WILL_RETRY_TAG
from injection import Rule, environment

from tensorize_assets.demo.hub_server import LocalHub, folder_files

_HERE = Path(__file__).parent
_SETTINGS = _HERE.parents[1] / "dagster_home" / "dagster.yaml"
_TOO_LONG_S = 120
# As `tensorize build`, with workers that take no vLLM.
_BUILD = """\
import sys
from pathlib import Path

from chain_home import MODEL, stand_in

from tensorize_assets import build_defs, running
from tensorize_assets.automation import run_lock
from tensorize_assets.core.catalog import load_catalog

run_lock._BEAT_S = 0.2


def definitions(home, loggers):
    return build_defs(home / "models.yaml", home, launcher=stand_in(), loggers=loggers)


running.definitions = definitions
home = Path(sys.argv[1])
catalog = load_catalog(home / "models.yaml")
with running.open_instance(home) as instance:
    result = running.build_pair(instance, home, catalog, MODEL, "v1")
sys.exit(not result.success)
"""


@pytest.fixture
def home(tmp_path: Path, tiny_models: Path) -> Iterator[Home]:
    with LocalHub() as hub:
        hub.commit(MODEL, folder_files(tiny_models / "llama"))
        made = Home(tmp_path / "home", hub.endpoint)
        made.write_catalog({MODEL: {"v1": {}}})
        shutil.copy(_SETTINGS, made.folder)
        yield made


def _build(home: Home, *rules: Rule) -> subprocess.Popen[bytes]:
    path = [Path(part) for part in stand_in().env["PYTHONPATH"].split(os.pathsep)]
    variables = {
        "HF_ENDPOINT": home.endpoint,
        "TENSORIZE_HUB_CACHE": str(home.folder / "hub"),
    }
    return subprocess.Popen(
        [sys.executable, "-c", _BUILD, str(home.folder)],
        env=os.environ | environment(rules, *path) | variables,
        stdin=subprocess.DEVNULL,
    )


_LAUNCH = "tensorize_assets.resources.launchers.local:SubprocessLauncher.run"


@pytest.mark.fault(
    "Kill",
    "`tensorize build`, its worker at work in a pool: SIGKILL to the command",
    "its run is failed, its place in the pool is free, and the next command goes on",
)
def test_the_next_build_takes_the_place_of_a_killed_one(home: Home, tmp_path: Path) -> None:
    """Nobody else gives its place back, and it would be waited for until the run's last hour."""
    with _build(home, Rule(_LAUNCH, "before", "kill", str(tmp_path / "fired"))) as killed:
        assert killed.wait(_TOO_LONG_S) == -signal.SIGKILL
    with dg.DagsterInstance.from_config(str(home.folder)) as instance:
        (run,) = instance.get_runs()
        assert run.status is dg.DagsterRunStatus.STARTED
        assert 1 == places_taken(instance)
    with _build(home) as following:
        assert following.wait(_TOO_LONG_S) == 0
    _require_over(home, run.run_id)


@pytest.mark.fault(
    "Kill",
    "`tensorize build`, while another one waits for its place in a pool: SIGKILL to the command",
    "its run is failed, and the other one gets the place",
)
def test_a_build_that_waits_gets_the_place_of_a_killed_one(home: Home, tmp_path: Path) -> None:
    """Nobody starts a third one, which would look."""
    holding = tmp_path / "fired"
    with _build(home, Rule(_LAUNCH, "before", "hold", str(holding))) as first:
        _wait(holding.exists)
        with dg.DagsterInstance.from_config(str(home.folder)) as instance:
            (run,) = instance.get_runs()
            with _build(home) as waiting:
                _wait(lambda: 1 == _places_waited_for(instance))
                first.kill()
                assert waiting.wait(_TOO_LONG_S) == 0
    _require_over(home, run.run_id)


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _TOO_LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _require_over(home: Home, killed: str) -> None:
    """The killed run is failed for good, no place is taken, and the build is published."""
    with dg.DagsterInstance.from_config(str(home.folder)) as instance:
        run = instance.get_run_by_id(killed)
        assert run is not None
        assert run.status is dg.DagsterRunStatus.FAILURE
        # Else no alert is sent: Dagster says that it starts it anew, and cannot.
        assert run.tags.get(WILL_RETRY_TAG) != "true"
        assert 0 == places_taken(instance)
    assert [] == list((home.folder / "run_locks").iterdir())
    assert home.channel()


def _places_waited_for(instance: dg.DagsterInstance) -> int:
    storage = instance.event_log_storage
    pools = storage.get_concurrency_keys()
    return sum(storage.get_concurrency_info(pool).pending_step_count for pool in pools)
