"""`tensorize build` is killed, and the next goes on: settings of `dagster_home/`, no daemon."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from chain_home import MODEL, Home, stand_in
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
from tensorize_assets.core.catalog import load_catalog


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


def _build(home: Home, *rules: Rule) -> int:
    path = [Path(part) for part in stand_in().env["PYTHONPATH"].split(os.pathsep)]
    variables = {
        "HF_ENDPOINT": home.endpoint,
        "TENSORIZE_HUB_CACHE": str(home.folder / "hub"),
    }
    return subprocess.run(
        [sys.executable, "-c", _BUILD, str(home.folder)],
        env=os.environ | environment(rules, *path) | variables,
        stdin=subprocess.DEVNULL,
        timeout=_TOO_LONG_S,
    ).returncode


@pytest.mark.fault(
    "Kill",
    "`tensorize build`, its worker at work in a pool: SIGKILL to the command",
    "its run is failed, its place in the pool is free, and the next command goes on",
)
def test_the_next_build_takes_the_place_of_a_killed_one(home: Home, tmp_path: Path) -> None:
    """Nobody else gives its place back, and it would be waited for until the run's last hour."""
    launch = "tensorize_assets.resources.launchers.local:SubprocessLauncher.run"
    killed = _build(home, Rule(launch, "before", "kill", str(tmp_path / "fired")))
    assert killed == -signal.SIGKILL
    with dg.DagsterInstance.from_config(str(home.folder)) as instance:
        (run,) = instance.get_runs()
        assert run.status is dg.DagsterRunStatus.STARTED
        assert 1 == _places_taken(instance)
    assert 0 == _build(home)
    with dg.DagsterInstance.from_config(str(home.folder)) as instance:
        killed_run = instance.get_run_by_id(run.run_id)
        assert killed_run is not None
        assert killed_run.status is dg.DagsterRunStatus.FAILURE
        assert 0 == _places_taken(instance)
    assert [] == list((home.folder / "run_locks").iterdir())
    assert home.channel()


def _places_taken(instance: dg.DagsterInstance) -> int:
    storage = instance.event_log_storage
    pools = storage.get_concurrency_keys()
    return sum(len(storage.get_concurrency_info(pool).claimed_slots) for pool in pools)
