"""Nobody has a hand on it: commits are built, compared and published, or kept out; and it is seen.

One story, told once: a person's build in the browser, the sensor switched on, then
commits that are good, broken and shuffled. The tests hold what was seen at its stations.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from live_fleet import PARTITION, Fleet, bump, changed, waited_for
from playwright.sync_api import Page, expect

from tensorize_assets.core.channel import ChannelEntry
from tensorize_assets.core.compare import CHECKS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2400)]

_BUILD_S = 900.0
_LAYERS = re.compile(r"model\.layers\.(\d+)\.")


class Station(NamedTuple):
    """After one commit: its run, the channel, what the page said, how many builds there were."""

    commit: str
    run: dict[str, Any]
    channel: tuple[ChannelEntry, ...]
    seen: str
    builds: int = 0


@pytest.fixture(scope="module")
def by_hand(fleet: Fleet, page: Page, picture: Callable[[str], None]) -> Station:
    """A person materializes one partition, and follows the run to its end."""
    waited_for(lambda: _has_partitions(fleet), 120, "the catalog's partitions")
    page.goto(f"{fleet.url}/locations/tensorize_assets.definitions/jobs/build")
    page.get_by_role("button", name="Materialize all").click()
    every = page.get_by_role("button", name="All", exact=True)
    for number in range(2):
        every.nth(number).click()
    page.get_by_role("button", name=re.compile("Launch 1 run|Launch run")).click()
    run = waited_for(lambda: next(iter(fleet.runs()), None), 60, "the run")
    page.goto(f"{fleet.url}/runs/{run['id']}")
    expect(page.get_by_text("Success", exact=True).first).to_be_visible(timeout=_BUILD_S * 1000)
    picture("run")
    page.goto(f"{fleet.url}/assets/reload_check?view=checks")
    expect(page.get_by_text("values_finite").first).to_be_visible()
    expect(page.get_by_text("Succeeded")).to_have_count(len(CHECKS))
    picture("checks")
    seen = page.inner_text("body")
    ended = next(one for one in fleet.runs() if one["id"] == run["id"])
    return Station(ended["tags"]["tensorize_assets/commit"], ended, fleet.channel(), seen)


@pytest.fixture(scope="module")
def switched_on(
    fleet: Fleet, page: Page, picture: Callable[[str], None], by_hand: Station
) -> Station:
    """The sensor is switched on in the browser; it finds nothing that is not published."""
    assert by_hand.channel
    before = _asked(fleet)
    page.goto(f"{fleet.url}/locations/tensorize_assets.definitions/sensors/hf_revision_sensor")
    page.locator("label").filter(has=page.locator("input[type=checkbox]")).first.click()
    # When it asks for the second time, its first tick is over.
    waited_for(lambda: _asked(fleet) >= before + 2 or None, 120, "the sensor's looks at the Hub")
    page.goto(f"{fleet.url}/automation")
    expect(page.get_by_text("hf_revision_sensor").first).to_be_visible()
    picture("automation")
    builds = sum(run["jobName"] == "build" for run in fleet.runs())
    return Station(by_hand.commit, {}, fleet.channel(), page.inner_text("body"), builds)


@pytest.fixture(scope="module")
def good(
    fleet: Fleet,
    page: Page,
    picture: Callable[[str], None],
    snapshot: Path,
    tmp_path_factory: pytest.TempPathFactory,
    switched_on: Station,
) -> Station:
    """A commit that changes one weight a little is pushed."""
    assert switched_on.channel
    folder = changed(
        snapshot / "model.safetensors",
        lambda header, data: bump(header, data, "model.norm.weight"),
        tmp_path_factory.mktemp("good") / "push",
    )
    commit = fleet.push(folder)
    waited_for(lambda: _moved_to(fleet, commit), _BUILD_S, "the channel's move")
    run = waited_for(lambda: fleet.run_of(commit), 60, "the run's end")
    page.goto(f"{fleet.url}/assets/published?view=partitions&partition={PARTITION}")
    expect(page.get_by_text(commit[:12]).first).to_be_visible()
    picture("published")
    return Station(commit, run, fleet.channel(), page.inner_text("body"))


@pytest.fixture(scope="module")
def broken(
    fleet: Fleet,
    page: Page,
    picture: Callable[[str], None],
    snapshot: Path,
    tmp_path_factory: pytest.TempPathFactory,
    good: Station,
) -> Station:
    """A commit with one weight that is not a number."""
    assert good.channel
    name = "model.layers.5.mlp.up_proj.weight"
    folder = changed(
        snapshot / "model.safetensors",
        lambda header, data: bump(header, data, name, 0x7FC0),
        tmp_path_factory.mktemp("broken") / "push",
    )
    return _kept_out(fleet, page, picture, folder, "broken", "values_finite")


@pytest.fixture(scope="module")
def shuffled(
    fleet: Fleet,
    page: Page,
    picture: Callable[[str], None],
    snapshot: Path,
    tmp_path_factory: pytest.TempPathFactory,
    broken: Station,
) -> Station:
    """A commit whose layers stand in the wrong order: it loads, and answers as its source does."""
    assert broken.channel
    folder = changed(
        snapshot / "model.safetensors", _reversed, tmp_path_factory.mktemp("shuffled") / "push"
    )
    return _kept_out(fleet, page, picture, folder, "shuffled", "perplexity_sane")


@pytest.fixture(scope="module")
def table(fleet: Fleet, page: Page, picture: Callable[[str], None], shuffled: Station) -> str:
    """The fleet's table, as the UI shows it after somebody asked for it."""
    assert shuffled.channel
    before = _newest(fleet, "fleet_status")
    page.goto(f"{fleet.url}/assets/fleet_status?view=overview")
    page.get_by_role("button", name="Materialize").first.click()
    waited_for(lambda: _newest(fleet, "fleet_status") != before or None, 180, "fleet_status")
    page.goto(f"{fleet.url}/assets/fleet_status?view=events")
    expect(page.get_by_text(shuffled.channel[-1].build_id).first).to_be_visible()
    picture("fleet")
    return page.inner_text("body")


def test_a_partition_is_materialized_from_the_browser(by_hand: Station) -> None:
    """Of the whole chain, to the channel's first entry."""
    assert "SUCCESS" == by_hand.run["status"]
    assert [by_hand.commit] == [entry.commit for entry in by_hand.channel]


def test_every_check_is_on_the_page(fleet: Fleet, by_hand: Station) -> None:
    """With its name and its outcome, where a person looks for what speaks for a build."""
    assert not [name for name in CHECKS if name not in by_hand.seen]
    assert set() == fleet.refused(by_hand.run["id"])
    assert len(CHECKS) == by_hand.seen.count("Succeeded")


def test_what_is_published_is_not_built_again(switched_on: Station) -> None:
    """A sensor that starts with no memory of a fleet of thousands must not build them all."""
    assert (1, 1) == (len(switched_on.channel), switched_on.builds)


def test_a_commit_is_built_and_published_with_no_hand_on_it(
    by_hand: Station, good: Station
) -> None:
    """The page of the published asset shows the new commit."""
    assert "hf_revision_sensor" == good.run["tags"]["dagster/sensor_name"]
    assert [by_hand.commit, good.commit] == [entry.commit for entry in good.channel]
    assert good.commit in good.seen


def test_a_weight_that_is_not_a_number_does_not_move_the_channel(
    fleet: Fleet, good: Station, broken: Station
) -> None:
    """Tokens and hashes are the source's: only the values and the perplexity tell."""
    assert "FAILURE" == broken.run["status"]
    assert {"values_finite", "perplexity_sane"} == fleet.refused(broken.run["id"])
    assert good.channel == broken.channel
    assert "model.layers.5.mlp.up_proj" in broken.seen.replace("gate_up_proj", "up_proj")


def test_shuffled_layers_do_not_move_the_channel(
    fleet: Fleet, good: Station, shuffled: Station
) -> None:
    """Everything is equal to the source, which is no good: only its perplexity tells."""
    assert "FAILURE" == shuffled.run["status"]
    assert {"perplexity_sane"} == fleet.refused(shuffled.run["id"])
    assert good.channel == shuffled.channel
    said = re.search(r"(\S+), at most (\S+) \(10% above the published build's\)", shuffled.seen)
    assert said is not None, shuffled.seen
    assert float(said[1]) > float(said[2])


def test_the_fleets_table_says_what_became_of_it(good: Station, table: str) -> None:
    """Served is the good build; the newest commit was kept out."""
    assert good.channel[-1].build_id in table
    assert re.search(r"SmolLM2-135M-Instruct\s+v1\s+failed\s", table)


def _kept_out(
    fleet: Fleet,
    page: Page,
    picture: Callable[[str], None],
    folder: Path,
    name: str,
    check: str,
) -> Station:
    commit = fleet.push(folder)
    run = waited_for(lambda: fleet.run_of(commit), _BUILD_S, f"the run of the {name} commit")
    page.goto(
        f"{fleet.url}/assets/reload_check?view=checks&checkDetail={check}&partition={PARTITION}"
    )
    expect(page.get_by_text(check).first).to_be_visible()
    picture(name)
    return Station(commit, run, fleet.channel(), page.inner_text("body"))


def _reversed(header: dict[str, Any], _: bytearray) -> None:
    layers = 1 + max(int(match[1]) for name in header if (match := _LAYERS.match(name)))
    before = dict(header)
    for name, entry in before.items():
        if match := _LAYERS.match(name):
            other = name.replace(match[0], f"model.layers.{layers - 1 - int(match[1])}.", 1)
            header[other] = entry


def _moved_to(fleet: Fleet, commit: str) -> bool | None:
    entries = fleet.channel()
    return True if entries and entries[-1].commit == commit else None


def _has_partitions(fleet: Fleet) -> bool | None:
    found = fleet.ask(
        "query($key: AssetKeyInput!) {assetNodeOrError(assetKey: $key) "
        "{... on AssetNode {partitionKeysByDimension {partitionKeys}}}}",
        key={"path": ["published"]},
    )
    dimensions = found["assetNodeOrError"]["partitionKeysByDimension"]
    return all(dimension["partitionKeys"] for dimension in dimensions) or None


def _asked(fleet: Fleet) -> int:
    """How often the Hub was asked where the branch is."""
    return len(fleet.hub.requests_for("/revision/main"))


def _newest(fleet: Fleet, asset: str) -> str | None:
    """The run of an asset's newest materialization."""
    found = fleet.ask(
        "query($key: AssetKeyInput!) {assetOrError(assetKey: $key) "
        "{... on Asset {assetMaterializations(limit: 1) {runId}}}}",
        key={"path": [asset]},
    )
    made = found["assetOrError"].get("assetMaterializations")
    return made[0]["runId"] if made else None
