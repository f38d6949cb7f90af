"""What follows a materialization by itself, across runs: asked of Dagster over a real instance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from chain_home import (
    MODEL,
    NO_WORKER,
    UP_TO_ARTIFACT,
    Home,
    Run,
    flipped,
    oneshot,
    stand_in,
)

from tensorize_assets import partitions
from tensorize_assets.assets.fleet_status import fleet_status
from tensorize_assets.assets.target import CHAIN_TAG
from tensorize_assets.automation.conditions import conditions_sensor
from tensorize_assets.core.layout import ONESHOT_PARTITION
from tensorize_assets.definitions import ASSETS
from tensorize_assets.demo.hub_server import LocalHub
from tensorize_assets.resources.launchers.local import SubprocessLauncher

AFTER_SNAPSHOT = {
    "tensorized_shards",
    "lora_adapters",
    "encrypted_shards",
    "artifact",
    "reference_outputs",
    "reload_check",
    "published",
}
NOON = datetime(2026, 6, 1, 12, 10, tzinfo=UTC)


class Daemon:
    """Evaluates the conditions as Dagster's daemon does, tick by tick."""

    def __init__(self, home: Home, instance: dg.DagsterInstance) -> None:
        self.home = home
        self.instance = instance
        self._cursor: Any = None

    def tick(self, at: datetime = NOON) -> dict[str, set[str | None]]:
        """The partitions that are requested of each asset."""
        result = dg.evaluate_automation_conditions(
            dg.Definitions(assets=[*ASSETS, fleet_status], resources=self.home.resources()),
            self.instance,
            evaluation_time=at,
            cursor=self._cursor,
        )
        self._cursor = result.cursor
        found: dict[str, set[str | None]] = {}
        for asset in (*AFTER_SNAPSHOT, "hf_snapshot", "fleet_status"):
            if asked := result.get_requested_partitions(dg.AssetKey(asset)):
                found[asset] = {*asked}
        return found

    def run(
        self,
        *assets: str,
        suffix: str = "v1",
        tags: Mapping[str, str] | None = None,
        launcher: SubprocessLauncher = NO_WORKER,
    ) -> Run:
        """Some assets alone, as a person materializes them in the UI."""
        return self.home.run(
            suffix=suffix,
            selection=assets,
            instance=self.instance,
            launcher=launcher,
            tags=tags,
        )

    def build(self, suffix: str = "v1") -> dg.ExecuteInProcessResult:
        """A run of the job `build`, which has no selection of assets, as sensors request it."""
        chain = dg.define_asset_job("build", [*ASSETS], tags={CHAIN_TAG: "true"})
        defs = dg.Definitions(
            assets=ASSETS,
            jobs=[chain],
            resources=self.home.resources(NO_WORKER),
        )
        return defs.resolve_job_def("build").execute_in_process(
            instance=self.instance,
            partition_key=partitions.partition_key(MODEL, suffix),
            raise_on_error=False,
        )


@pytest.fixture
def daemon(stand_in_home: Home, tmp_path: Path) -> Iterator[Daemon]:
    """Over a home with one pair in the catalog, and partitions for more; it has ticked once.

    That pair is built, so that a run takes no worker, but nothing of it is in this event log.
    """
    (tmp_path / "instance").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "instance")) as instance:
        partitions.add_pairs(instance, [MODEL, "tiny/other"], ["v1", "v2", ONESHOT_PARTITION])
        running = Daemon(stand_in_home, instance)
        assert {} == running.tick()
        yield running


def pair(suffix: str = "v1") -> str:
    return str(partitions.partition_key(MODEL, suffix))


def test_what_is_after_a_snapshot_follows_it(daemon: Daemon):
    """Somebody materializes hf_snapshot alone: the rest is asked for once, of that pair."""
    assert daemon.run("hf_snapshot").success
    assert {asset: {pair()} for asset in AFTER_SNAPSHOT} == daemon.tick()
    assert {} == daemon.tick()


def test_a_whole_chain_starts_nothing_more(daemon: Daemon):
    """The revision sensor's run goes on to the channel by itself."""
    assert daemon.build().success
    assert {} == daemon.tick()
    assert {} == daemon.tick()


def test_a_chain_that_failed_is_not_taken_up(
    daemon: Daemon, model_hub: LocalHub, second_files: Any
):
    """To try again, and when, is the revision sensor's: two would build the same twice."""
    model_hub.commit(MODEL, second_files)
    assert not daemon.build().success
    assert {} == daemon.tick()
    assert {} == daemon.tick()


def test_a_refused_reload_is_not_published(daemon: Daemon):
    """Across runs Dagster does not wait for blocking checks unless it is told to."""
    sealed = daemon.run(*UP_TO_ARTIFACT, "reference_outputs")
    shard = daemon.home.artifact(sealed) / "model.tensors"
    whole = shard.read_bytes()
    assert {"reload_check", "published"} == daemon.tick().keys()
    (entry,) = daemon.home.channel()
    daemon.home.store.delete(entry.evidence_key)
    shard.write_bytes(flipped(whole))
    refused = daemon.run("reload_check", launcher=stand_in())
    assert not refused.checks["tensor_hashes_equal"]
    assert {} == daemon.tick()
    shard.write_bytes(whole)
    assert daemon.run("reload_check", launcher=stand_in()).success
    assert {"published": {pair()}} == daemon.tick()
    assert {} == daemon.tick()


def test_a_one_shot_build_is_left_alone(daemon: Daemon):
    """Only a run with its tag can go on with it."""
    assert daemon.run("hf_snapshot", suffix=ONESHOT_PARTITION, tags=oneshot("mine")).success
    assert {} == daemon.tick()


def test_a_pair_outside_the_catalog_is_never_asked_for(daemon: Daemon):
    """Partitions are every model by every suffix, the catalog is less."""
    assert not daemon.run("hf_snapshot", suffix="v2").success
    assert {} == daemon.tick()
    assert daemon.run("hf_snapshot").success
    assert {pair()} == set().union(*daemon.tick().values())


def test_the_fleets_table_follows_what_is_published(daemon: Daemon):
    """Soon after a channel was published to, but once an hour at most; else once a day."""
    hour = timedelta(hours=1)
    assert {} == daemon.tick(NOON + hour)
    assert daemon.build().success
    assert {"fleet_status"} == daemon.tick(NOON + hour * 1.1).keys()
    assert {} == daemon.tick(NOON + hour * 1.2)
    assert daemon.run("published").success
    assert {} == daemon.tick(NOON + hour * 1.3)
    assert {"fleet_status"} == daemon.tick(NOON + hour * 2).keys()
    assert {} == daemon.tick(NOON + hour * 3)
    assert {"fleet_status"} == daemon.tick(NOON + hour * 18).keys()


def test_the_sensor_runs_without_being_turned_on():
    """`make ui` alone is to be enough."""
    sensor = conditions_sensor([*ASSETS, fleet_status])
    assert dg.DefaultSensorStatus.RUNNING is sensor.default_status
    # The daemon evaluates it: a code server would have to within its 60 s.
    assert not sensor.emit_backfills
