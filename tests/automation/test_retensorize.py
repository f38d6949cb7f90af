"""Builds are made again when their profile or tools changed; and reloaded again on request."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import dagster as dg
import pytest
from chain_home import MODEL, Home, stand_in, weights
from dagster._core.instance import InstanceRef
from ticks import Log
from upkeep import published_home

from tensorize_assets import partitions
from tensorize_assets.automation import retensorize
from tensorize_assets.automation.retensorize import reverify, schedule
from tensorize_assets.core import layout, sealing
from tensorize_assets.core.catalog_automation import Automation
from tensorize_assets.core.errors import StoreUnavailableError
from tensorize_assets.core.evidence import read_evidence
from tensorize_assets.core.store import Store
from tensorize_assets.definitions import ASSETS, CHECKS, build
from tensorize_assets.demo.hub_server import LocalHub
from tensorize_assets.resources.launchers import local
from tensorize_assets.resources.store import StoreResource

REPO = Path(__file__).parents[2]
SUNDAY = datetime(2026, 11, 29, 3, 0, tzinfo=UTC)


@pytest.fixture(scope="module")
def built(
    tmp_path_factory: pytest.TempPathFactory, tiny_models: Path
) -> Iterator[tuple[Home, LocalHub]]:
    with published_home(tmp_path_factory.mktemp("retensorize"), tiny_models) as made:
        yield made


@pytest.fixture
def hub(built: tuple[Home, LocalHub]) -> LocalHub:
    return built[1]


@pytest.fixture
def home(built: tuple[Home, LocalHub], tmp_path: Path) -> Home:
    """A home of one's own with one published build."""
    return built[0].copy_to(tmp_path / "home", built[1].endpoint)


class Tick(NamedTuple):
    """What a tick asked for, why it did not, and what it said."""

    requests: list[dg.RunRequest]
    skipped: str | None
    log: list[str]


def tick(home: Home, instance: dg.DagsterInstance) -> Tick:
    definition = schedule(Automation().retensorize)
    resources = home.resources(stand_in())
    definitions = dg.Definitions(
        assets=ASSETS,
        asset_checks=CHECKS,
        jobs=[build],
        schedules=[definition],
        resources=resources,
    )
    log = Log()
    with dg.build_schedule_context(
        instance=instance,
        scheduled_execution_time=SUNDAY,
        resources={key: resources[key] for key in definition.required_resource_keys},
        repository_def=definitions.get_repository_def(),
    ) as context:
        context._logger = log  # pyright: ignore[reportAttributeAccessIssue]
        data: Any = definition.evaluate_tick(context)
    return Tick(list(data.run_requests or ()), data.skip_message, log.lines)


def test_it_runs_weekly_by_itself() -> None:
    """With only `make ui` running."""
    definition = schedule(Automation().retensorize)
    assert dg.DefaultScheduleStatus.RUNNING == definition.default_status
    assert ("0 3 * * 0", "UTC", "build") == (
        definition.cron_schedule,
        definition.execution_timezone,
        definition.job_name,
    )


def test_what_would_be_the_same_is_left_alone(home: Home, instance: dg.DagsterInstance) -> None:
    """A fleet in which nothing changed starts nothing, each week."""
    found = tick(home, instance)
    assert [] == found.requests
    assert "none was published with another profile" in str(found.skipped)
    assert [] == found.log


def test_a_changed_profile_is_built_again(home: Home, instance: dg.DagsterInstance) -> None:
    """One run, tagged, that can be told from that of another week; after it there is none."""
    (before,) = home.channel()
    home.write_catalog({MODEL: {"v1": {"dtype": "float32"}}})

    found = tick(home, instance)

    (request,) = found.requests
    assert "2026-11-29" in str(request.run_key)
    assert (MODEL, "v1", before.commit) == tuple(
        request.tags[f"tensorize_assets/{name}"] for name in ("model", "suffix", "commit")
    )
    assert "tiny--llama|v1" == request.tags["dagster/partition"]
    (line,) = found.log
    assert before.build_id in line
    assert "dtype: auto → float32" in line

    run = home.run(launcher=stand_in())
    assert {} == run.failures
    assert run.build_id in str(request.run_key)
    assert [] == tick(home, instance).requests


def test_other_versions_of_the_tools_build_again(
    home: Home, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM loads no shards of another release for certain."""
    installed = {"vllm": "0.32.0", "torch": "2.13.0", "tensorizer": "2.10.1"}
    monkeypatch.setattr(local, "_installed", lambda: installed)

    found = tick(home, instance)

    assert 1 == len(found.requests)
    assert "vllm version: 0.31.0 → 0.32.0" in found.log[0]


def test_encryption_is_part_of_what_was_published(home: Home, instance: dg.DagsterInstance) -> None:
    """It is in no build id of the plaintext build."""
    own = sealing.generate_private_key(home.folder / "keys" / "private.key").public_key
    for encryption, before in (("both", "none"), ("only", "both"), ("none", "only")):
        home.write_catalog({MODEL: {"v1": {"encryption": encryption}}}, recipients={"home": own})
        found = tick(home, instance)
        assert f"encryption: {before} → {encryption}" in found.log[0]
        assert {} == home.run(launcher=stand_in()).failures
        assert [] == tick(home, instance).requests


def test_adapters_are_compared_at_the_published_commits(
    home: Home, instance: dg.DagsterInstance, hub: LocalHub
) -> None:
    """A new commit of one is the sensor's business; another list of them is the profile's."""
    config = {"peft_type": "LORA", "base_model_name_or_path": MODEL, "r": 8}
    files: dict[str, bytes | Path] = {
        "adapter_config.json": json.dumps({**config, "target_modules": ["q"]}).encode(),
        "adapter_model.safetensors": weights(b"poet"),
    }
    hub.commit("tiny/poet", files)
    poet = {"name": "poet", "repo": "tiny/poet", "revision": "main"}
    home.write_catalog({MODEL: {"v1": {"adapters": [poet]}}})
    assert "adapter poet: (absent) → tiny/poet" in tick(home, instance).log[0]
    assert {} == home.run(launcher=stand_in()).failures
    hub.commit("tiny/poet", {**files, "README.md": b"better"})
    assert [] == tick(home, instance).requests
    home.write_catalog({MODEL: {"v1": {"adapters": [{**poet, "repo": "tiny/other"}]}}})
    assert "adapter poet: tiny/poet → tiny/other" in tick(home, instance).log[0]


def test_what_was_never_published_is_the_sensors(home: Home, instance: dg.DagsterInstance) -> None:
    """It is built when it is seen first, not a week later."""
    home.write_catalog({MODEL: {"v1": {}, "v2": {}}})
    assert [] == tick(home, instance).requests


def test_a_manifest_that_is_gone_is_built_again(home: Home, instance: dg.DagsterInstance) -> None:
    """Seen where the manifest is read: of a build that differs anyway, or may."""
    (entry,) = home.channel()
    home.store.delete(layout.manifest_key(entry.directory))
    home.write_catalog({MODEL: {"v1": {"dtype": "float32"}}})
    assert "its manifest is gone" in tick(home, instance).log[0]


def test_a_broken_catalog_skips_and_says_where(home: Home, instance: dg.DagsterInstance) -> None:
    """The tick is where a person looks."""
    path = home.folder / "models.yaml"
    path.write_text(path.read_text().replace("reload_device: cpu", "reload_device: tpu"))
    skipped = tick(home, instance).skipped
    assert f"{path}:" in str(skipped)
    assert "reload_device" in str(skipped)


def test_a_channel_that_cannot_be_read_does_not_keep_others(
    home: Home, instance: dg.DagsterInstance
) -> None:
    """One damaged object in a fleet."""
    home.write_catalog({MODEL: {"v1": {"dtype": "float32"}, "v2": {}}})
    home.store.put_bytes(layout.channel_key(MODEL, "v2"), b"{}")
    found = tick(home, instance)
    assert 1 == len(found.requests)
    assert any("v2" in line and "is not as it was written" in line for line in found.log)


def test_channels_that_cannot_be_read_fail_the_tick(
    home: Home, instance: dg.DagsterInstance
) -> None:
    """Dagster has a failed tick again, and people are told; a skipped one looks as if all was well.

    Nothing that is due is kept back by it: then the tick requests that.
    """
    home.store.put_bytes(layout.channel_key(MODEL, "v1"), b"{}")
    with pytest.raises(dg.DagsterError) as caught:
        tick(home, instance)
    said = str(caught.value.__cause__)
    assert said.startswith("1 of 1 pairs could not be compared")
    assert f"the first: {MODEL} v1: " in said


def test_a_store_that_is_away_fails_the_tick(
    home: Home, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schedule comes once a week: what passes in a minute must not cost one."""

    def away(resource: StoreResource, root: str) -> Store:
        raise StoreUnavailableError("S3 is away")

    monkeypatch.setattr(StoreResource, "open", away)
    with pytest.raises(dg.DagsterError) as caught:
        tick(home, instance)
    assert "S3 is away" == str(caught.value.__cause__)


@pytest.mark.parametrize("settings", ["dagster_home", "tensorize_assets/demo"])
def test_a_schedule_that_failed_is_tried_again(settings: str, tmp_path: Path) -> None:
    """Dagster's own default is never. (deploy/ has the same settings; a test there compares.)"""
    shutil.copy(REPO / settings / "dagster.yaml", tmp_path)
    with dg.DagsterInstance.from_ref(InstanceRef.from_dir(str(tmp_path))) as instance:
        scheduler: Any = instance.scheduler
        assert 3 == scheduler.max_tick_retries


def test_a_tick_ends_before_dagster_ends_it(
    home: Home, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What there was no time for is counted, and is not the same next time."""
    monkeypatch.setattr(retensorize, "_BUDGET_S", -1.0)
    home.write_catalog({MODEL: {"v1": {"dtype": "float32"}}})
    found = tick(home, instance)
    assert [] == found.requests
    assert "1 of 1 pairs: there was no time" in found.log[0]


def test_reverify_reloads_again(home: Home, instance: dg.DagsterInstance) -> None:
    """Evidence that stands keeps `build` from it; after a driver's update one wants to know."""
    (entry,) = home.channel()

    def evidence() -> Any:
        return read_evidence(home.store, entry.manifest_sha256, "cpu", "0.31.0", home.trusted)

    before = evidence()
    definitions = dg.Definitions(
        assets=ASSETS, jobs=[reverify], resources=home.resources(stand_in())
    )
    partitions.add_pairs(instance, [MODEL], ["v1"])
    result = definitions.resolve_job_def("reverify").execute_in_process(
        partition_key=partitions.partition_key(MODEL, "v1"),
        instance=instance,
        raise_on_error=False,
    )

    assert result.success
    assert evidence().when > before.when
    assert (entry,) == home.channel()
