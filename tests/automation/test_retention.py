"""The asset store_retention: a report of what can go, and its removal where that was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from chain_home import MODEL, Home, stand_in
from upkeep import Materialized, next_commit, other_jobs_run, published_home

from tensorize_assets import partitions
from tensorize_assets.automation import retention as automation
from tensorize_assets.automation.retention import busy, job, schedule, store_retention
from tensorize_assets.core import removal
from tensorize_assets.core.catalog_automation import Retention
from tensorize_assets.core.retention import Busy


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, tiny_models: Path) -> Iterator[Home]:
    """Three builds of one suffix, each published."""
    with published_home(tmp_path_factory.mktemp("retention"), tiny_models) as (home, hub):
        for name in "bc":
            next_commit(hub, tiny_models, name)
            assert {} == home.run(launcher=stand_in()).failures
        yield home


@pytest.fixture
def home(built: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A home in which everything was built long ago."""
    monkeypatch.setattr(removal, "_SETTLE_S", 0.0)
    monkeypatch.setattr(automation, "datetime", _MonthsLater)
    copied = built.copy_to(tmp_path / "home", built.endpoint)
    rules(copied)
    return copied


class _MonthsLater(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return super().now(tz) + timedelta(days=100)


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


def rules(home: Home, *, protect: tuple[str, ...] = (), **fields: object) -> None:
    automation = {"retention": {"keep": 1, **fields}, "protect": list(protect)}
    home.write_catalog({MODEL: {"v1": {}}}, automation=automation)


def test_it_runs_each_night_by_itself() -> None:
    """At the catalog's time, in the job that a person starts too."""
    definition = schedule(Retention(cron="5 1 * * *"))
    assert dg.DefaultScheduleStatus.RUNNING == definition.default_status
    assert ("5 1 * * *", "retention") == (definition.cron_schedule, definition.job_name)
    assert "retention" == job.name


def test_it_reports_and_removes_nothing_by_default(
    home: Home, instance: dg.DagsterInstance
) -> None:
    """The first thing that a new user's fleet does must not be to delete."""
    before = home.store.list("")
    first, *_ = home.channel()

    night = Materialized(store_retention, home, instance)

    assert night.result.success
    assert before == home.store.list("")
    rows = night.rows("going")
    assert home.store.uri(first.directory) in {row["where"] for row in rows}
    assert night.metadata["going_count"] == len(rows) > 0
    assert night.metadata["going_bytes"] == sum(row["bytes"] for row in rows)
    assert (0, False) == (night.metadata["removed_count"], night.metadata["deleted"])
    assert any("nothing was" in line for line in night.log)
    reasons = {row["reason"] for row in night.rows("summary")}
    assert {"current for vLLM 0.31.0", "a rollback goes back to it"} <= reasons


@pytest.mark.parametrize("by", ["catalog", "run"])
def test_it_removes_where_that_was_asked_for(
    home: Home, instance: dg.DagsterInstance, by: str
) -> None:
    """By the catalog for each night, or by a person's run."""
    first, second, third = home.channel()
    rules(home, delete=by == "catalog")

    night = Materialized(store_retention, home, instance, {"delete": True} if by == "run" else None)

    assert night.result.success
    assert () == home.store.list(f"{first.directory}/")
    for entry in (second, third):
        assert home.store.list(f"{entry.directory}/")
    assert night.metadata["removed_count"] == night.metadata["going_count"]
    assert night.metadata["removed_bytes"] == night.metadata["going_bytes"]


def test_a_run_can_hold_back_what_the_catalog_allows(
    home: Home, instance: dg.DagsterInstance
) -> None:
    """To look first."""
    rules(home, delete=True)
    before = home.store.list("")
    Materialized(store_retention, home, instance, {"delete": False})
    assert before == home.store.list("")


def test_protected_builds_stay(home: Home, instance: dg.DagsterInstance) -> None:
    """By the list in the catalog."""
    first, *_ = home.channel()
    rules(home, delete=True, protect=(first.build_id,))
    Materialized(store_retention, home, instance)
    assert home.store.list(f"{first.directory}/")


def test_a_pair_with_a_run_under_way_is_left_alone(
    home: Home, instance: dg.DagsterInstance
) -> None:
    """Of the runs that Dagster knows, from the UI, a sensor or a schedule."""
    rules(home, delete=True)
    key = partitions.partition_key(MODEL, "v1")
    tags = {
        **partitions.model_suffix.get_tags_for_partition_key(key),
        "tensorize_assets/commit": "a" * 40,
    }
    other_jobs_run(instance, tags)
    assert Busy(frozenset([(MODEL, "v1")]), frozenset(["a" * 40])) == busy(instance)
    first, *_ = home.channel()

    night = Materialized(store_retention, home, instance)

    assert home.store.list(f"{first.directory}/")
    assert "a run of it is under way" in {row["reason"] for row in night.rows("summary")}


def test_an_empty_root_has_nothing_to_go(home: Home, instance: dg.DagsterInstance) -> None:
    """A first night."""
    empty = Home(home.folder, home.endpoint, root="empty")
    empty.write_catalog({MODEL: {"v1": {}}})
    night = Materialized(store_retention, empty, instance)
    assert night.result.success
    assert ([], 0) == (night.rows("going"), night.metadata["total_bytes"])
