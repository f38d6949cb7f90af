"""The revision sensor, tick by tick, against a real Hub and a real instance."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from chain_home import NO_WORKER, Home, stand_in, weights
from ticks import FILES, RUN_KEY_TAG, Clock, Tick, Ticker

from tensorize_assets.automation import sensor_state
from tensorize_assets.automation.revisions import (
    State,
    builds_possible,
    hf_revision_sensor,
    hub_reachable,
)
from tensorize_assets.core import compare
from tensorize_assets.core.errors import StoreError
from tensorize_assets.demo.hub_server import LocalHub
from tensorize_assets.resources.launchers.local import SubprocessLauncher

MakeTicker = Callable[[dg.SensorDefinition], Ticker]
EVERY_S = 300.0


@pytest.fixture
def sensor(ticker: MakeTicker) -> Ticker:
    return ticker(hf_revision_sensor)


def report(instance: dg.DagsterInstance, **metadata: str) -> None:
    """What `tensorize webhook` reports."""
    instance.report_runless_asset_event(dg.AssetObservation("hf_snapshot", metadata=metadata))


def state_of(sensor: Ticker) -> State:
    found = sensor_state.load(sensor.instance, "revisions/", sensor.cursor, State)
    assert found is not None
    return found


# Requests


def test_a_new_catalog_is_built(sensor: Ticker, hub: LocalHub) -> None:
    """One run a suffix, with the tags that it is found and limited by, and its partitions."""
    commit = hub.commit("org/a", FILES | {"config.json": b"{} "})
    first = sensor.tick()
    assert ["org--a|v1", "org--a|v2"] == first.pairs
    tags = first.data.run_requests[0].tags
    found = [tags[f"tensorize_assets/{name}"] for name in ("model", "suffix")]
    assert ["org/a", "v1"] == found
    assert [commit, commit] == first.commits
    added = [request.partition_keys for request in first.data.dynamic_partitions_requests]
    assert [["org--a"], ["v1", "v2"]] == added
    said = {check.check_name: check.passed for check in first.checks}
    assert {"hub_reachable": True, "builds_possible": True} == said


def test_a_tick_in_which_nothing_changed_emits_nothing(
    sensor: Ticker, hub: LocalHub, clock: Clock
) -> None:
    """Twelve a minute: each event would be a row for ever, and each log a file."""
    first = sensor.tick()
    sensor.tick()
    cursor = sensor.cursor
    clock.now += 5
    assert sensor.tick().nothing
    assert (cursor, 1) == (sensor.cursor, len(hub.requests))
    sensor.end(first)
    clock.now += EVERY_S
    asked = sensor.tick()
    assert asked.nothing
    assert 2 == len(hub.requests)
    assert "1 revisions are followed, 1 were asked for; no new build" == asked.data.skip_message


def test_the_cursor_stays_small(sensor: Ticker, small_home: Home, hub: LocalHub) -> None:
    """Dagster copies it into the row of every tick, 17,000 times a day."""
    names = [f"org/m{number}" for number in range(50)]
    for name in names:
        hub.commit(name, FILES)
    small_home.write_catalog({name: {"v1": {}} for name in names})
    sensor.tick()
    assert len(sensor.cursor or "") < 100


def test_a_commit_starts_a_build_of_each_suffix(
    sensor: Ticker, hub: LocalHub, clock: Clock
) -> None:
    """Of two commits within one interval only the newest is built."""
    sensor.end(sensor.tick())
    hub.commit("org/a", FILES | {"model.safetensors": b"first"})
    second = hub.commit("org/a", FILES | {"model.safetensors": b"second"})
    clock.now += EVERY_S - 1
    assert [] == sensor.tick().pairs
    clock.now += 1
    moved = sensor.tick()
    assert (["org--a|v1", "org--a|v2"], [second] * 2) == (moved.pairs, moved.commits)
    assert not moved.data.dynamic_partitions_requests
    assert f"org--a|v1: what it follows has moved: build {moved.keys[0].split('|')[2]}" in " ".join(
        moved.log
    )


def test_documentation_starts_nothing_and_the_log_says_so(
    sensor: Ticker, hub: LocalHub, clock: Clock
) -> None:
    """A person who pushed and waits wants to know why."""
    sensor.end(sensor.tick())
    commit = hub.commit("org/a", FILES | {"README.md": b"Better words."})
    clock.now += EVERY_S
    tick = sensor.tick()
    assert [] == tick.pairs
    (line,) = tick.log
    assert f"org/a@main: commit {commit} changes no file" in line


def test_a_webhook_goes_before_the_interval(
    sensor: Ticker, hub: LocalHub, instance: dg.DagsterInstance, clock: Clock
) -> None:
    """A new revision starts within seconds; each hint counts once, others' events do not."""
    report(instance, repo="org/a", source="webhook")
    sensor.end(sensor.tick())
    clock.now += 5
    sensor.tick()
    assert 1 == len(hub.requests)
    commit = hub.commit("org/a", FILES | {"config.json": b"[]"})
    report(instance, something="else")
    report(instance, repo="org/a", source="webhook")
    clock.now += 5
    tick = sensor.tick()
    assert [commit] * 2 == tick.commits
    clock.now += 5
    sensor.tick()
    assert 2 == len(hub.requests)


def test_a_catalog_with_mistakes_stops_nothing_for_good(
    sensor: Ticker, small_home: Home, clock: Clock
) -> None:
    """It is named with its line; what the sensor knows stays."""
    sensor.end(sensor.tick())
    sensor.tick()
    good = (small_home.folder / "models.yaml").read_text()
    before = state_of(sensor)
    (small_home.folder / "models.yaml").write_text(good.replace("float32", "float23"))
    clock.now += EVERY_S
    broken = sensor.tick()
    assert "models.yaml:" in broken.data.skip_message
    assert "float23" in broken.data.skip_message
    assert before == state_of(sensor).model_copy(update={"stop": None})
    (small_home.folder / "models.yaml").write_text(good)
    assert sensor.tick().nothing


def test_without_vllm_nothing_is_requested_or_forgotten(
    small_home: Home, instance: dg.DagsterInstance, clock: Clock, tmp_path: Path
) -> None:
    """The versions are part of a build; the log says what is missing."""
    launcher = SubprocessLauncher(python=str(tmp_path / "no-such-python"))
    sensor = Ticker(small_home, instance, hf_revision_sensor, launcher=launcher)
    tick = sensor.tick()
    assert [] == tick.pairs
    assert any("no build can be requested" in line for line in tick.log)
    healed = Ticker(small_home, instance, hf_revision_sensor, cursor=sensor.cursor)
    assert ["org--a|v1", "org--a|v2"] == healed.tick().pairs


# Runs


@pytest.mark.parametrize(
    ("status", "again"),
    [
        (dg.DagsterRunStatus.SUCCESS, False),
        (dg.DagsterRunStatus.STARTED, False),
        (dg.DagsterRunStatus.FAILURE, True),
        (dg.DagsterRunStatus.CANCELED, False),
    ],
)
def test_failed_builds_are_requested_again(
    sensor: Ticker, clock: Clock, status: dg.DagsterRunStatus, again: bool
) -> None:
    """After ten minutes, by a key of its own: Dagster starts no key twice."""
    first = sensor.tick()
    sensor.end(first, status)
    clock.now += 5
    assert [] == sensor.tick().keys
    clock.now += 600
    second = sensor.tick().keys
    assert ([f"{key[:-1]}2" for key in first.keys] if again else []) == second


def test_the_newest_run_of_a_key_counts(sensor: Ticker, clock: Clock) -> None:
    """Dagster's own retries, and a person's, keep the key of the run that failed."""
    first = sensor.tick()
    key = first.keys[0]
    sensor.end(first, dg.DagsterRunStatus.SUCCESS)
    sensor.add_run(key, status=dg.DagsterRunStatus.FAILURE)
    sensor.add_run(key, {"dagster/retry_number": "1"}, dg.DagsterRunStatus.SUCCESS)
    sensor.tick()
    clock.now += 1000
    assert [] == sensor.tick().keys


def test_a_run_that_dagster_will_start_again_is_under_way(sensor: Ticker, clock: Clock) -> None:
    """Its machine was taken away; between the two runs there is only the failed one."""
    first = sensor.tick(start=False)
    for key in first.keys:
        sensor.add_run(key, {"dagster/will_retry": "true"}, dg.DagsterRunStatus.FAILURE)
    sensor.tick()
    clock.now += 1000
    assert [] == sensor.tick().keys


def run_that_fails(failing: tuple[str, ...], requests: Tick, instance: dg.DagsterInstance) -> None:
    """Runs of what a tick requested, whose reload does not pass these checks."""
    names = ("artifact_loads", "token_ids_equal")

    @dg.asset(
        key="reload_check",
        check_specs=[
            dg.AssetCheckSpec(name, asset="reload_check", blocking=True) for name in names
        ],
    )
    def reload_check() -> dg.MaterializeResult:
        results = [
            dg.AssetCheckResult(passed=name not in failing, check_name=name) for name in names
        ]
        return dg.MaterializeResult(check_results=results)

    for key in requests.keys:
        tags = {RUN_KEY_TAG: key}
        dg.materialize([reload_check], instance=instance, tags=tags, raise_on_error=False)


def test_a_build_whose_reload_did_not_compare_is_not_built_again(
    sensor: Ticker, instance: dg.DagsterInstance, clock: Clock
) -> None:
    """It would not the next time; the log says so, and a new commit is built."""
    run_that_fails(("token_ids_equal",), sensor.tick(start=False), instance)
    tick = sensor.tick()
    assert [True, True] == ["did not pass its reload check" in line for line in tick.log]
    clock.now += 1e6
    assert [] == sensor.tick().keys


def test_a_build_that_was_not_loaded_is_built_again(
    sensor: Ticker, instance: dg.DagsterInstance, clock: Clock
) -> None:
    """A device that another process has filled fails every check, and may be free the next time."""
    assert "artifact_loads" in compare.CHECKS
    first = sensor.tick(start=False)
    run_that_fails(("artifact_loads", "token_ids_equal"), first, instance)
    tick = sensor.tick()
    assert [True, True] == ["attempt 2 of 5 in 10 minutes" in line for line in tick.log]
    clock.now += 600
    assert [f"{key[:-1]}2" for key in first.keys] == sensor.tick().keys


def test_requests_that_dagster_lost_are_made_again(sensor: Ticker) -> None:
    """The sensor was stopped between its tick and the runs: the same keys, which start once."""
    first = sensor.tick(start=False)
    assert first.keys == sensor.tick().keys


def test_a_tick_that_dagster_has_not_kept_did_nothing(sensor: Ticker, clock: Clock) -> None:
    """Killed after the state was written and before the cursor was: all is decided again."""
    sensor.end(sensor.tick())
    sensor.tick()
    cursor = sensor.cursor
    clock.now += EVERY_S
    sensor.tick()
    sensor.cursor = cursor
    clock.now += 5
    again = sensor.tick()
    assert () == again.log
    assert "1 were asked for" in again.data.skip_message


@pytest.mark.parametrize(
    "cursor",
    [
        "garbage",
        '{"format":2,"writing":1,"slot":1,"token":"a"}',
        '{"format":1,"writing":7,"slot":1,"token":"a"}',
        '{"org/a": "main"}',
    ],
)
def test_a_foreign_cursor_starts_afresh(sensor: Ticker, cursor: str) -> None:
    """Nothing is lost: what is not published is built, what is published is compared."""
    sensor.cursor = cursor
    tick = sensor.tick()
    assert any(line.startswith("begun afresh") for line in tick.log)
    assert ["org--a|v1", "org--a|v2"] == tick.pairs


# The Hub's refusals


def test_a_refusal_is_reported_after_some_and_taken_back(
    sensor: Ticker, hub: LocalHub, instance: dg.DagsterInstance, clock: Clock
) -> None:
    """One evaluation when it begins and one when it ends, whatever the number of ticks."""
    sensor.end(sensor.tick())
    fault = hub.fail_next("org/a", status=404, headers={"X-Error-Code": "RepoNotFound"}, times=3)
    checks: list[Any] = []
    clock.now += EVERY_S
    for pause in (0, 30, 60, 120):
        clock.now += pause
        tick = sensor.tick()
        assert 1 == len(tick.log)
        assert tick.log[0].startswith("org/a@main: ")
        checks.append([(one.passed, one.description) for one in tick.checks])
        assert sensor.tick().nothing
    assert 3 == fault.hits
    assert [[], []] == checks[:2]
    ((failed, reason),), ((recovered, _),) = checks[2:]
    assert (False, True) == (failed, recovered)
    assert "1 of 1 followed revisions cannot be read:\norg/a@main: " in reason
    (record,) = instance.event_log_storage.get_asset_check_execution_history(
        dg.AssetCheckKey(dg.AssetKey("hf_snapshot"), "hub_reachable"), limit=1
    )
    assert "SUCCEEDED" == record.status.value


def test_a_hub_that_is_down_is_one_report(
    sensor: Ticker, small_home: Home, hub: LocalHub, clock: Clock
) -> None:
    """Not one a model: a thousand alerts say less."""
    names = [f"org/m{number}" for number in range(20)]
    for name in names:
        hub.commit(name, FILES)
    small_home.write_catalog({name: {"v1": {}} for name in names})
    sensor.end(sensor.tick())
    hub.fail_next("/api/models", status=503, times=1000)
    clock.now += EVERY_S
    found: list[Any] = []
    for pause in (0, 10, 20):
        clock.now += pause
        found += sensor.tick().checks
    (check,) = found
    assert check.description.startswith("1 of 20 followed revisions cannot be read:\nthe Hub: ")


def test_the_check_by_hand_says_what_the_sensor_found(
    sensor: Ticker, hub: LocalHub, instance: dg.DagsterInstance, clock: Clock
) -> None:
    """The UI runs it with every materialization of the asset: it asks the Hub nothing."""
    job = dg.define_asset_job("by_hand", dg.AssetSelection.checks(*hub_reachable.check_keys))
    definitions = dg.Definitions(
        assets=sensor.definitions.assets,
        asset_checks=[hub_reachable],
        jobs=[job],
        resources=sensor.resources,
    )

    def by_hand() -> tuple[bool, str | None]:
        result = definitions.resolve_job_def("by_hand").execute_in_process(instance=instance)
        (evaluation,) = result.get_asset_check_evaluations()
        return evaluation.passed, evaluation.description

    assert (True, "hf_revision_sensor has not asked the Hub yet") == by_hand()
    sensor.end(sensor.tick())
    assert (True, "all 1 followed revisions can be read") == by_hand()
    hub.fail_next("org/a", status=500, times=3)
    for pause in (EVERY_S, 30, 60):
        clock.now += pause
        sensor.tick()
    asked = len(hub.requests)
    passed, said = by_hand()
    assert (False, asked) == (passed, len(hub.requests))
    assert "org/a@main: " in str(said)


# What stops all builds


def vllm_is_gone(home: Home) -> str:
    (home.folder / "python").unlink()
    return "no build can be requested: "


def catalog_has_mistakes(home: Home) -> str:
    path = home.folder / "models.yaml"
    path.write_text(path.read_text().replace("float32", "float23"))
    return "the catalog has mistakes, nothing is asked or built:"


def store_cannot_be_read(home: Home) -> str:
    (home.folder / "keys" / "signing.key").chmod(0o644)
    return "what is published cannot be read now: "


def mended(home: Home) -> None:
    python = home.folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    path = home.folder / "models.yaml"
    path.write_text(path.read_text().replace("float23", "float32"))
    key = home.folder / "keys" / "signing.key"
    if key.exists():
        key.chmod(0o600)
    assert home.trusted  # makes the key


@pytest.mark.parametrize("stopped", [vllm_is_gone, catalog_has_mistakes, store_cannot_be_read])
def test_what_stops_all_builds_is_told_after_a_while_and_taken_back(
    small_home: Home,
    instance: dg.DagsterInstance,
    clock: Clock,
    stopped: Callable[[Home], str],
) -> None:
    """A fleet that builds nothing any more looks as one in which nothing moves."""
    small_home.write_catalog({"org/a": {"v1": {"dtype": "float32"}}})
    mended(small_home)
    reason = stopped(small_home)
    launcher = SubprocessLauncher(python=str(small_home.folder / "python"))
    sensor = Ticker(small_home, instance, hf_revision_sensor, launcher=launcher)

    def verdicts(pause: float) -> list[tuple[bool, str]]:
        clock.now += pause
        tick = sensor.tick()
        assert [] == tick.pairs
        return [
            (one.passed, one.description)
            for one in tick.checks
            if one.check_name == "builds_possible"
        ]

    assert [] == [said for pause in (0, 5, 55, 60, 479) for said in verdicts(pause)]
    ((passed, said),) = verdicts(61)
    assert (False, True) == (passed, said.startswith(reason))
    assert [] == [said for pause in (5, 60, 600) for said in verdicts(pause)]
    mended(small_home)
    clock.now += 60
    tick = sensor.tick()
    assert ["org--a|v1"] == tick.pairs
    assert ("builds_possible", True) in [(one.check_name, one.passed) for one in tick.checks]


def test_a_short_stop_is_not_told(
    small_home: Home, instance: dg.DagsterInstance, clock: Clock
) -> None:
    """Each starts its ten minutes anew: somebody is writing the catalog."""
    sensor = Ticker(small_home, instance, hf_revision_sensor)
    assert [True, True] == [one.passed for one in sensor.tick().checks]
    for _ in range(3):
        catalog_has_mistakes(small_home)
        clock.now += 5
        assert [] == sensor.tick().checks
        clock.now += 400
        assert [] == sensor.tick().checks
        mended(small_home)
        assert [] == sensor.tick().checks


def test_a_stop_by_hand(sensor: Ticker, small_home: Home, clock: Clock) -> None:
    """The check that a person runs in the UI says what the sensor found."""
    job = dg.define_asset_job("by_hand", dg.AssetSelection.checks(*builds_possible.check_keys))
    definitions = dg.Definitions(
        assets=sensor.definitions.assets,
        asset_checks=[builds_possible],
        jobs=[job],
        resources=sensor.resources,
    )

    def by_hand() -> tuple[bool, str]:
        result = definitions.resolve_job_def("by_hand").execute_in_process(instance=sensor.instance)
        (evaluation,) = result.get_asset_check_evaluations()
        return evaluation.passed, str(evaluation.description)

    assert (True, "hf_revision_sensor has not run yet") == by_hand()
    sensor.tick()
    assert (True, "the catalog, the tools and the store can be read") == by_hand()
    catalog_has_mistakes(small_home)
    sensor.tick()
    clock.now += 599
    sensor.tick()
    mended(small_home)  # or the run itself would fail
    assert by_hand()[0]
    catalog_has_mistakes(small_home)
    clock.now += 1
    sensor.tick()
    mended(small_home)
    passed, said = by_hand()
    assert (False, True) == (passed, "float23" in said)


# The state


def test_the_state_is_what_the_cursor_points_to(instance: dg.DagsterInstance) -> None:
    """Each writing spares the one before, which a lost cursor still points to."""
    first = sensor_state.save(instance, "here", None, State(hints=1))
    second = sensor_state.save(instance, "here", first, State(hints=2))
    found = [sensor_state.load(instance, "here", cursor, State) for cursor in (first, second)]
    assert [State(hints=1), State(hints=2)] == found
    cursor = sensor_state.save(instance, "here", second, State(hints=3))
    assert State(hints=2) == sensor_state.load(instance, "here", second, State)
    for _ in range(3):
        cursor = sensor_state.save(instance, "here", cursor, State(hints=3))
    with pytest.raises(StoreError, match=r"writing 1\) is gone"):
        sensor_state.load(instance, "here", first, State)
    assert State(hints=3) == sensor_state.latest(instance, "here", State)
    assert sensor_state.latest(instance, "elsewhere", State) is None


@pytest.mark.parametrize("late", ["before it", "after it", "both", "long after it"])
def test_a_tick_that_dagster_gave_up_writes_over_no_newer_one(
    instance: dg.DagsterInstance, late: str
) -> None:
    """It hung for over a minute, and ends beside the tick after it: that one's requests count."""

    def save(cursor: str | None, hints: int) -> str:
        return sensor_state.save(instance, "here", cursor, State(hints=hints))

    first = save(None, 1)
    if late in ("before it", "both"):
        save(first, 99)
    committed = save(first, 2)
    for hints in range(3, 9) if late == "long after it" else ():
        committed = save(committed, hints)
    before = sensor_state.load(instance, "here", committed, State)
    if late != "before it":
        save(first, 99)
    assert before == sensor_state.load(instance, "here", committed, State)
    assert State(hints=9) == sensor_state.load(instance, "here", save(committed, 9), State)


def test_a_reset_state_is_the_latest(instance: dg.DagsterInstance) -> None:
    """Somebody emptied the cursor in the UI, to begin afresh."""
    cursor = None
    for hints in range(1, 4):
        cursor = sensor_state.save(instance, "here", cursor, State(hints=hints))
    assert sensor_state.load(instance, "here", None, State) is None
    sensor_state.save(instance, "here", None, State(hints=9))
    assert State(hints=9) == sensor_state.latest(instance, "here", State)


# The whole way


def test_commits_move_the_channel(
    small_home: Home, hub: LocalHub, instance: dg.DagsterInstance, clock: Clock
) -> None:
    """What is published starts nothing; a commit is built; going back builds nothing."""
    home = small_home
    home.write_catalog({"org/a": {"v1": {}}})
    assert {} == home.run("org/a", "v1", instance=instance, launcher=stand_in()).failures
    first = home.channel("org/a")[-1].commit
    sensor = Ticker(home, instance, hf_revision_sensor)
    assert [] == sensor.tick().pairs
    second = hub.commit("org/a", FILES | {"model.safetensors": weights(b"better")})
    for launcher in (stand_in(), NO_WORKER):
        clock.now += EVERY_S
        tick = sensor.tick(start=False)
        (request,) = tick.data.run_requests
        tags = {**request.tags, RUN_KEY_TAG: request.run_key}
        run = home.run("org/a", "v1", instance=instance, launcher=launcher, tags=tags)
        assert {} == run.failures
        assert request.run_key.split("|")[2] == run.build_id
        hub.move("org/a", "main", first)
    assert [first, second, first] == [entry.commit for entry in home.channel("org/a")]
    sensor.tick()
    clock.now += EVERY_S
    assert sensor.tick().nothing
