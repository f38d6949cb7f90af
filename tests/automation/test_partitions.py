"""Partitions follow the catalog, and what is in use stays."""

from __future__ import annotations

from collections.abc import Callable

import dagster as dg
import pytest
from chain_home import Home
from ticks import Clock, Tick, Ticker

from tensorize_assets import partitions
from tensorize_assets.automation.partitions import catalog_partitions
from tensorize_assets.core import layout

BUILD = "0123456789ab"


@pytest.fixture
def sensor(ticker: Callable[[dg.SensorDefinition], Ticker]) -> Ticker:
    return ticker(catalog_partitions)


def keys(instance: dg.DagsterInstance) -> tuple[set[str], set[str]]:
    return (
        set(instance.get_dynamic_partitions("tensorize_model")),
        set(instance.get_dynamic_partitions("tensorize_suffix")),
    )


def tick_after(sensor: Ticker, clock: Clock, seconds: float) -> Tick:
    clock.now += seconds
    return sensor.tick()


def test_the_catalog_is_what_there_is(
    sensor: Ticker, small_home: Home, instance: dg.DagsterInstance, clock: Clock
) -> None:
    """The UI offers what can be built, without a command; a tick without news emits nothing."""
    sensor.tick()
    assert ({"org--a"}, {"v1", "v2"}) == keys(instance)
    assert tick_after(sensor, clock, 30).nothing
    small_home.write_catalog({"org/a": {"v1": {}, "v2": {}}, "org/b": {"v3": {}}})
    tick_after(sensor, clock, 30)
    assert ({"org--a", "org--b"}, {"v1", "v2", "v3"}) == keys(instance)


def test_what_leaves_the_catalog_without_a_trace_goes(
    sensor: Ticker, small_home: Home, instance: dg.DagsterInstance, clock: Clock
) -> None:
    """After a minute: an editor may save half a catalog, and a run may be about to begin."""
    partitions.add_pairs(instance, ["org/b"], ["v3"])
    early = sensor.tick()
    assert ({"org--a", "org--b"}, {"v1", "v2", "v3"}) == keys(instance)
    assert () == early.log
    assert tick_after(sensor, clock, 30).nothing
    late = tick_after(sensor, clock, 30)
    assert ({"org--a"}, {"v1", "v2"}) == keys(instance)
    assert any("removed" in line and "org--b" in line for line in late.log)
    assert tick_after(sensor, clock, 3600).nothing


def test_what_has_artifacts_stays_and_is_named(
    sensor: Ticker, small_home: Home, instance: dg.DagsterInstance, clock: Clock
) -> None:
    """Its history, checks and channel are still looked at, and its builds still served."""
    place = layout.artifact_dir("org/b", "v1", BUILD)
    small_home.store.put_bytes(layout.manifest_key(place), b"{}")
    partitions.add_pairs(instance, ["org/b", "org/c"], [])
    sensor.tick()
    tick = tick_after(sensor, clock, 60)
    assert {"org--a", "org--b"} == keys(instance)[0]
    assert any("stay" in line and "org--b" in line for line in tick.log)
    assert tick_after(sensor, clock, 30).nothing
    small_home.store.delete(layout.manifest_key(place))
    tick_after(sensor, clock, 600)
    assert {"org--a"} == keys(instance)[0]


@pytest.mark.parametrize(
    "place",
    [
        layout.channel_key("org/a", "old"),
        layout.manifest_key(layout.artifact_dir("org/a", "old", BUILD)),
        layout.manifest_key(layout.encrypted_dir("org/a", "old", BUILD)),
    ],
)
def test_a_suffix_stays_while_a_model_has_it(
    sensor: Ticker, small_home: Home, instance: dg.DagsterInstance, clock: Clock, place: str
) -> None:
    """And `old` is not `old-tp2`, whose folders begin with the same letters."""
    sensor.tick()
    partitions.add_pairs(instance, [], ["old", "old-tp2", "ol"])
    small_home.store.put_bytes(place, b"{}")
    sensor.tick()
    tick_after(sensor, clock, 60)
    assert {"v1", "v2", "old"} == keys(instance)[1]


def test_a_suffix_of_longer_name_keeps_no_shorter_one(
    sensor: Ticker, small_home: Home, instance: dg.DagsterInstance, clock: Clock
) -> None:
    """The other way round."""
    sensor.tick()
    partitions.add_pairs(instance, [], ["old", "old-tp2"])
    place = layout.artifact_dir("org/a", "old-tp2", BUILD)
    small_home.store.put_bytes(layout.manifest_key(place), b"{}")
    sensor.tick()
    tick_after(sensor, clock, 60)
    assert {"v1", "v2", "old-tp2"} == keys(instance)[1]


def test_one_shot_builds_keep_their_partitions(
    sensor: Ticker, instance: dg.DagsterInstance, clock: Clock
) -> None:
    """They are in no catalog, and may have gone to another root."""
    partitions.add_oneshot(instance, "org/once")
    key = partitions.partition_key("org/once", layout.ONESHOT_PARTITION)
    instance.report_runless_asset_event(dg.AssetMaterialization("hf_snapshot", partition=key))
    sensor.tick()
    tick_after(sensor, clock, 60)
    assert ({"org--a", "org--once"}, {"v1", "v2", "adhoc"}) == keys(instance)


@pytest.mark.parametrize("ended", [False, True])
def test_a_run_keeps_its_partition(
    sensor: Ticker, instance: dg.DagsterInstance, clock: Clock, ended: bool
) -> None:
    """Removed under a run, its steps would fail."""
    partitions.add_pairs(instance, ["org/b"], ["v9"])
    tags = {"dagster/partition/model": "org--b", "dagster/partition/suffix": "v9"}
    status = dg.DagsterRunStatus.FAILURE if ended else dg.DagsterRunStatus.STARTED
    sensor.add_run("any", tags, status)
    sensor.tick()
    tick_after(sensor, clock, 60)
    left = ({"org--a"}, {"v1", "v2"}) if ended else ({"org--a", "org--b"}, {"v1", "v2", "v9"})
    assert left == keys(instance)


@pytest.mark.parametrize("cursor", ["garbage", '{"format":3}'])
def test_a_foreign_cursor_removes_nothing_at_once(
    sensor: Ticker, instance: dg.DagsterInstance, clock: Clock, cursor: str
) -> None:
    """It only knows less."""
    partitions.add_pairs(instance, ["org/b"], [])
    sensor.cursor = cursor
    sensor.tick()
    assert "org--b" in keys(instance)[0]
    tick_after(sensor, clock, 60)
    assert "org--b" not in keys(instance)[0]


def test_a_catalog_with_mistakes_changes_nothing(
    sensor: Ticker, small_home: Home, instance: dg.DagsterInstance, clock: Clock
) -> None:
    """A missing colon must not empty a fleet."""
    sensor.tick()
    (small_home.folder / "models.yaml").write_text("root: artifacts\nmodels:\n  org/b: {}\n")
    assert "models.yaml:3: " in tick_after(sensor, clock, 3600).data.skip_message
    assert ({"org--a"}, {"v1", "v2"}) == keys(instance)


def test_a_store_that_cannot_be_read_keeps_everything(
    sensor: Ticker, small_home: Home, instance: dg.DagsterInstance, clock: Clock
) -> None:
    """What is not seen may be there."""
    partitions.add_pairs(instance, ["org/b"], ["v9"])
    sensor.tick()
    (small_home.folder / "artifacts").write_text("not a folder")
    tick = tick_after(sensor, clock, 60)
    assert any("the store cannot be read" in line for line in tick.log)
    assert ({"org--a", "org--b"}, {"v1", "v2", "v9"}) == keys(instance)
