"""The asset store_audit: what it reads, and how what rotted shows in the UI."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from chain_home import MODEL, Home, flipped, stand_in
from upkeep import Materialized, published_home

from tensorize_assets.automation.audit import job, schedule, store_audit
from tensorize_assets.core import layout
from tensorize_assets.core.catalog_automation import Audit
from tensorize_assets.core.s3 import S3Settings
from tensorize_assets.demo.s3_server import REGION, LocalS3


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, tiny_models: Path) -> Iterator[Home]:
    with published_home(tmp_path_factory.mktemp("audit"), tiny_models) as made:
        yield made[0]


@pytest.fixture
def home(built: Home, tmp_path: Path) -> Home:
    return built.copy_to(tmp_path / "home", built.endpoint)


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


def test_it_runs_each_night_by_itself() -> None:
    """At the catalog's time, in the job that a person starts too."""
    definition = schedule(Audit(cron="5 1 * * *"))
    assert dg.DefaultScheduleStatus.RUNNING == definition.default_status
    assert ("5 1 * * *", "UTC", "audit") == (
        definition.cron_schedule,
        definition.execution_timezone,
        definition.job_name,
    )
    assert "audit" == job.name


def test_numbers_of_a_night_can_be_plotted(home: Home, instance: dg.DagsterInstance) -> None:
    """Bytes, seconds and days as numbers; a table of what was read; a check that passes."""
    night = Materialized(store_audit, home, instance)

    assert night.result.success
    (entry,) = home.channel()
    (row,) = night.rows("read")
    assert home.store.uri(entry.directory) == row["directory"]
    assert "whole" == row["result"]
    assert row["bytes"] == night.metadata["bytes"] > 1000
    assert (1, 0, 1) == tuple(
        night.metadata[name] for name in ("directories", "damaged", "published_directories")
    )
    for name in ("seconds", "bytes_per_second", "oldest_unread_days"):
        assert isinstance(night.metadata[name], float)
    assert night.checks["intact"].passed
    assert home.store.stat(layout.audit_key(entry.manifest_sha256)) is not None
    # It hands nothing on: there is no value of it for an IO manager to keep.
    assert () == home.store.list("values/")


def test_what_rotted_fails_the_check_and_is_marked(
    home: Home, instance: dg.DagsterInstance
) -> None:
    """Which file, both hashes, and what to do; and `published` refuses until it is whole."""
    (entry,) = home.channel()
    shard = home.store.root / entry.directory / "model.tensors"
    whole = shard.read_bytes()
    shard.write_bytes(flipped(whole))

    night = Materialized(store_audit, home, instance)

    assert night.result.success
    check = night.checks["intact"]
    assert not check.passed
    assert dg.AssetCheckSeverity.ERROR == check.severity
    assert "model.tensors has SHA-256" in str(check.description)
    table: Any = check.metadata["damage"].value
    (record,) = table.records
    assert (MODEL, "v1", "model.tensors") == tuple(
        record.data[name] for name in ("model", "suffix", "file")
    )
    assert "rollback" in str(record.data["what to do"])
    assert any("the manifest says" in line for line in night.log)
    refused = home.run(selection=["published"], launcher=stand_in())
    assert "found damaged" in refused.failures["published"]

    shard.write_bytes(whole)
    assert Materialized(store_audit, home, instance).checks["intact"].passed
    assert home.run(selection=["published"], launcher=stand_in()).success


def test_a_channel_that_rotted_fails_the_check(home: Home, instance: dg.DagsterInstance) -> None:
    """It names everything, and nothing of it is read while it is damaged."""
    home.store.put_bytes(layout.channel_key(MODEL, "v1"), b"{}")
    night = Materialized(store_audit, home, instance)
    assert not night.checks["intact"].passed
    assert "the channel of tiny/llama v1" in str(night.checks["intact"].description)


def test_a_fleet_without_builds_is_intact(home: Home, instance: dg.DagsterInstance) -> None:
    """A first night."""
    empty = Home(home.folder, home.endpoint, root="empty")
    empty.write_catalog({MODEL: {"v1": {}}})
    night = Materialized(store_audit, empty, instance)
    assert night.result.success
    assert night.checks["intact"].passed
    assert [] == night.rows("read")


def test_it_reads_a_bucket(
    built: Home,
    tmp_path: Path,
    s3: LocalS3,
    s3_root: str,
    monkeypatch: pytest.MonkeyPatch,
    instance: dg.DagsterInstance,
) -> None:
    """By the settings and keys of any run."""
    monkeypatch.setenv("S3_ACCESS_KEY_ID", s3.access_key)
    monkeypatch.setenv("S3_SECRET_ACCESS_KEY", s3.secret_key)
    settings = S3Settings(endpoint_url=s3.endpoint, region=REGION)
    built.copy_to(tmp_path / "home", built.endpoint)
    home = Home(tmp_path / "home", built.endpoint, s3_root, settings)
    home.write_catalog({MODEL: {"v1": {}}})
    for key in built.store.list(""):
        home.store.put_file(key, built.store.local_path(key))

    night = Materialized(store_audit, home, instance)

    # What was seen of the channel of one root is not of the other's.
    assert night.checks["intact"].passed, night.checks["intact"].description
    assert 1 == night.metadata["directories"]
