"""The fleet's table, made of what real runs left in a real event log."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from chain_home import MODEL, NO_WORKER, Home, Run, flipped, oneshot, stand_in

from tensorize_assets import partitions
from tensorize_assets.assets.fleet_status import fleet_status, read_fleet
from tensorize_assets.core import fleet
from tensorize_assets.core.catalog import load_catalog
from tensorize_assets.core.fleet import FleetRow
from tensorize_assets.core.layout import ONESHOT_PARTITION
from tensorize_assets.core.publish import roll_back
from tensorize_assets.demo.hub_server import LocalHub
from tensorize_assets.resources.launchers.local import SubprocessLauncher


class Fleet:
    """A home and the instance of its runs."""

    def __init__(self, home: Home, instance: dg.DagsterInstance) -> None:
        self.home = home
        self.instance = instance

    def run(self, *assets: str, launcher: SubprocessLauncher = NO_WORKER, **more: Any) -> Run:
        return self.home.run(
            selection=assets or None, instance=self.instance, launcher=launcher, **more
        )

    def rows(self) -> dict[str, FleetRow]:
        """What the table says of each suffix."""
        catalog = load_catalog(self.home.folder / "models.yaml")
        return {row.suffix: row for row in read_fleet(self.instance, catalog)}

    def row(self) -> FleetRow:
        return self.rows()["v1"]


@pytest.fixture
def empty(home: Home, tmp_path: Path) -> Iterator[Fleet]:
    """Over a home in which nothing was built."""
    (tmp_path / "instance").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "instance")) as instance:
        partitions.add_pairs(instance, [MODEL], ["v1"])
        yield Fleet(home, instance)


@pytest.fixture(scope="module")
def begun(stand_in_build: Any, first_files: Any, tmp_path_factory: Any) -> Path:
    """A folder of a home and an instance: one pair, published by a run that is in its event log."""
    folder = tmp_path_factory.mktemp("begun")
    (folder / "instance").mkdir()
    with LocalHub() as hub:
        hub.commit(MODEL, first_files)
        home = stand_in_build.home.copy_to(folder / "home", hub.endpoint)
        with dg.DagsterInstance.local_temp(str(folder / "instance")) as instance:
            assert Fleet(home, instance).run().success
    return folder


@pytest.fixture
def ours(begun: Path, tmp_path: Path, model_hub: LocalHub) -> Iterator[Fleet]:
    """A copy of both of one's own."""
    shutil.copytree(begun, tmp_path / "ours", symlinks=True)
    home = Home(tmp_path / "ours" / "home", model_hub.endpoint)
    with dg.DagsterInstance.local_temp(str(tmp_path / "ours" / "instance")) as instance:
        yield Fleet(home, instance)


def test_a_pair_that_was_never_built_is_in_the_table(empty: Fleet):
    """What is not there is easily overlooked."""
    assert {"v1": FleetRow(model=MODEL, suffix="v1", state="unpublished")} == empty.rows()


def test_a_published_build_has_all_that_speaks_for_it(ours: Fleet):
    """Read from the event log alone: the same as what store and channel say."""
    (entry,) = ours.home.channel()
    current, reload = fleet.look_up(ours.home.store, entry, ours.home.trusted, held=False)
    assert (
        FleetRow(
            model=MODEL,
            suffix="v1",
            state="current",
            current=current,
            found_commit=entry.commit,
            reload=reload,
        )
        == ours.row()
    )
    assert ours.home.key.key_id == current.signed_by


def test_a_newer_commit_that_is_not_published_is_behind(
    ours: Fleet, model_hub: LocalHub, second_files: Any
):
    """Found on the Hub, and not in the channel: whatever keeps it is worth a look."""
    commit = model_hub.commit(MODEL, second_files)
    assert ours.run("hf_snapshot").success
    row = ours.row()
    assert ("behind", True, commit) == (row.state, row.behind, row.found_commit)


def test_a_chain_that_failed_is_said(ours: Fleet, model_hub: LocalHub, second_files: Any):
    """The channel stands where it was, and the table says why that is not enough."""
    model_hub.commit(MODEL, second_files)
    assert not ours.run().success
    row = ours.row()
    assert row.current is not None
    assert ("failed", 1) == (row.state, row.current.entry)
    assert ours.run(launcher=stand_in()).success
    row = ours.row()
    assert row.current is not None
    assert ("current", 2, False) == (row.state, row.current.entry, row.behind)


def test_a_refused_reload_is_the_last_one(ours: Fleet):
    """Its evidence is in the store, its outcome in the table: no longer the good one."""
    good = ours.row().reload
    (entry,) = ours.home.channel()
    ours.home.store.delete(entry.evidence_key)
    shard = ours.home.store.root / entry.directory / "model.tensors"
    shard.write_bytes(flipped(shard.read_bytes()))
    assert not ours.run("reload_check", launcher=stand_in()).success
    row = ours.row()
    assert good is not None
    assert row.reload is not None
    assert (True, False) == (good.passed, row.reload.passed)
    assert good.when < row.reload.when
    assert "current" == row.state


def test_a_rollback_that_a_run_met_is_held(ours: Fleet, model_hub: LocalHub, second_files: Any):
    """The newest build is kept out on purpose, until somebody says otherwise."""
    model_hub.commit(MODEL, second_files)
    assert ours.run(launcher=stand_in()).success
    home = ours.home
    roll_back(home.store, home.key, home.trusted, model=MODEL, suffix="v1")
    assert "current" == ours.row().state
    assert "held" == fleet.verified(home.store, ours.row(), home.trusted).state
    assert ours.run().success
    assert ("held", True) == (ours.row().state, ours.row().behind)


def test_what_left_the_catalog_stays_in_the_table(ours: Fleet):
    """Its channel still serves, and nobody keeps it fresh any more."""
    ours.home.write_catalog({MODEL: {"v2": {}}})
    rows = ours.rows()
    assert {"v1": (False, "current"), "v2": (True, "unpublished")} == {
        suffix: (row.in_catalog, row.state) for suffix, row in rows.items()
    }


def test_one_shot_builds_are_no_part_of_it(ours: Fleet):
    """They share one partition, so that the last of them would speak for all."""
    assert ours.run(suffix=ONESHOT_PARTITION, tags=oneshot("mine")).success
    assert {"v1"} == ours.rows().keys()


def test_the_asset_is_one_table_and_numbers_that_plot(ours: Fleet):
    """What a person opens in the UI in the morning."""
    ours.home.write_catalog({MODEL: {"v1": {}, "v2": {}}})
    result = dg.materialize(
        [fleet_status, dg.AssetSpec("published", partitions_def=partitions.model_suffix)],
        selection=["fleet_status"],
        instance=ours.instance,
        resources=ours.home.resources(),
    )
    (event,) = result.get_asset_materialization_events()
    metadata: dict[str, Any] = {
        name: value.value
        for name, value in event.step_materialization_data.materialization.metadata.items()
    }
    table = metadata["fleet"]
    assert ["v2", "v1"] == [record.data["suffix"] for record in table.records]
    assert list(fleet.COLUMNS) == [column.name for column in table.schema.columns]
    assert all(list(fleet.COLUMNS) == list(record.data) for record in table.records)
    assert (2, 1, 1) == (metadata["pairs"], metadata["unpublished"], metadata["current"])
    assert metadata["bytes"] > 0


def test_an_empty_catalog_is_an_empty_table(empty: Fleet):
    """The first thing that a new user materializes."""
    empty.home.write_catalog({})
    assert [] == read_fleet(empty.instance, load_catalog(empty.home.folder / "models.yaml"))
    assert 0 == fleet.totals([], datetime.now(UTC)).pairs
