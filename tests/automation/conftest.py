"""A home whose Hub holds models of a few bytes, an instance, and a clock for the sensors."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import pytest

from tensorize_assets.automation import partitions, revisions
from tensorize_assets.demo.hub_server import LocalHub

# The helpers of these tests; pytest does not put their folders on the path.
sys.path.insert(0, str(Path(__file__).parents[1] / "assets"))
sys.path.insert(0, str(Path(__file__).parent))

from chain_home import Home
from ticks import FILES, Clock, Ticker


@pytest.fixture(scope="session")
def empty_instance(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an instance with all its tables, which take a second to make."""
    folder = tmp_path_factory.mktemp("empty-instance")
    with dg.DagsterInstance.local_temp(str(folder)) as made:
        made.get_runs(limit=1)
        made.get_dynamic_partitions("tensorize_model")
        made.all_instigator_state()
    return folder


@pytest.fixture
def instance(tmp_path: Path, empty_instance: Path) -> Iterator[dg.DagsterInstance]:
    """An instance on the disk, as the sensors' own process would open it."""
    folder = tmp_path / "instance"
    shutil.copytree(empty_instance, folder)
    with dg.DagsterInstance.local_temp(str(folder)) as made:
        yield made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of the sensors, which stands still until a test moves it."""
    made = Clock()
    monkeypatch.setattr(revisions, "time", made)
    monkeypatch.setattr(partitions, "time", made)
    return made


@pytest.fixture
def small_home(tmp_path: Path, hub: LocalHub) -> Home:
    """Two suffixes of one model, which is too small to be built."""
    hub.commit("org/a", FILES)
    home = Home(tmp_path / "home", hub.endpoint)
    home.write_catalog({"org/a": {"v1": {}, "v2": {"dtype": "float32"}}})
    return home


@pytest.fixture
def ticker(
    small_home: Home, instance: dg.DagsterInstance, clock: Clock
) -> Callable[[dg.SensorDefinition], Ticker]:
    """Makes the ticks of a sensor."""
    return lambda sensor: Ticker(small_home, instance, sensor)
