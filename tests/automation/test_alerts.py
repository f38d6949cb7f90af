"""The sensor that tells what failed: real runs in a real instance, told to a real receiver."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.remote_origin import (
    RegisteredCodeLocationOrigin,
    RemoteInstigatorOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.scheduler.instigation import (
    InstigatorState,
    InstigatorStatus,
    InstigatorTick,
    ScheduleInstigatorData,
    SensorInstigatorData,
    TickData,
    TickStatus,
)
from dagster_shared.error import SerializableErrorInfo

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

from alert_receiver import Receiver
from postgres import postgres

from tensorize_assets import partitions
from tensorize_assets.automation import alerts as automation_alerts
from tensorize_assets.automation.alerts import alerts_sensor
from tensorize_assets.core.secret_settings import ALERT_WEBHOOK

MODEL, OTHER = "org/m", "org/other"
REPOSITORY = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("fleet"), "__repository__")
WEEKLY = InstigatorState(
    RemoteInstigatorOrigin(REPOSITORY, "retensorize_schedule"),
    InstigatorType.SCHEDULE,
    InstigatorStatus.DECLARED_IN_CODE,
    ScheduleInstigatorData("0 3 * * 0"),
)
HUB = InstigatorState(
    RemoteInstigatorOrigin(REPOSITORY, "hf_revision_sensor"),
    InstigatorType.SENSOR,
    InstigatorStatus.DECLARED_IN_CODE,
    SensorInstigatorData(min_interval=5),
)

# What the next runs do, by the name of a step or a check: an error, or a failing description.
PLAN: dict[str, str] = {}


@dg.asset(partitions_def=partitions.model_suffix)
def shards() -> None:
    if said := PLAN.get("shards"):
        raise dg.Failure(said, allow_retries=False)


with warnings.catch_warnings():
    # As in assets/reload_check.py.
    warnings.simplefilter("ignore", dg.PreviewWarning)
    CHECKS = [
        dg.AssetCheckSpec(
            name, asset="reload", blocking=True, partitions_def=partitions.model_suffix
        )
        for name in ("loads", "equal")
    ]


@dg.asset(partitions_def=partitions.model_suffix, deps=[shards], check_specs=CHECKS)
def reload() -> Iterator[Any]:
    results = [
        dg.AssetCheckResult(
            check_name=name, passed=name not in PLAN, description=PLAN.get(name, "well")
        )
        for name in ("loads", "equal")
    ]
    if said := PLAN.get("reload"):
        yield from results
        raise ValueError(said)
    yield dg.MaterializeResult(check_results=results)


@dg.asset(check_specs=[dg.AssetCheckSpec("intact", asset="audit")])
def audit() -> Iterator[Any]:
    yield dg.MaterializeResult(
        check_results=[
            dg.AssetCheckResult(passed="intact" not in PLAN, description=PLAN.get("intact"))
        ]
    )


@dg.asset
def foreign() -> None:
    raise ValueError("somebody else's")


DEFS = dg.Definitions(
    assets=[shards, reload, audit, foreign],
    jobs=[
        dg.define_asset_job("build", [shards, reload]),
        dg.define_asset_job("audit_job", [audit]),
        dg.define_asset_job("foreign_job", [foreign]),
    ],
)
SENSOR = alerts_sensor(
    jobs=["build", "audit_job"],
    assets=[shards.key, reload.key, audit.key],
    ticking=["hf_revision_sensor", "retensorize_schedule"],
)


@dataclass
class Fleet:
    """An instance, its alerts and where they go."""

    instance: dg.DagsterInstance
    receiver: Receiver
    cursor: str | None = None
    said: str = ""
    run_ids: list[str] = field(default_factory=list[str])

    def run(self, job: str = "build", model: str = MODEL, **options: Any) -> dg.DagsterRun:
        key = partitions.partition_key(model, "v1") if job == "build" else None
        result = DEFS.resolve_job_def(job).execute_in_process(
            instance=self.instance, partition_key=key, raise_on_error=False, **options
        )
        self.run_ids.append(result.run_id)
        run = self.instance.get_run_by_id(result.run_id)
        assert run is not None
        return run

    def tick(self) -> list[str]:
        """What one tick of the sensor sends."""
        before = len(self.receiver.messages)
        context = dg.build_sensor_context(instance=self.instance, cursor=self.cursor)
        result: Any = SENSOR(context)
        if isinstance(result, dg.SkipReason):
            self.said = str(result.skip_message)
        else:
            self.cursor = result.cursor
            self.said = str(result.skip_reason.skip_message)
        return self.receiver.texts[before:]


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dg.DagsterInstance]:
    """One for all: its files take seconds to make, and each test's sensor begins afresh."""
    folder = str(tmp_path_factory.mktemp("instance"))
    settings = {"telemetry": {"enabled": False}}
    with dg.DagsterInstance.local_temp(folder, overrides=settings) as opened:
        partitions.add_pairs(opened, [MODEL, OTHER], ["v1"])
        yield opened


@pytest.fixture
def on_postgres(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """A fleet whose instance is in Postgres."""
    PLAN.clear()
    with Receiver() as receiver, postgres(tmp_path / "postgres") as server:
        settings = {
            "telemetry": {"enabled": False},
            "storage": {"postgres": {"postgres_url": server.url}},
        }
        with dg.DagsterInstance.local_temp(str(tmp_path), overrides=settings) as opened:
            monkeypatch.setenv(ALERT_WEBHOOK, receiver.url)
            partitions.add_pairs(opened, [MODEL, OTHER], ["v1"])
            yield Fleet(opened, receiver)


@pytest.fixture
def fleet(instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.delenv("DAGSTER_WEBSERVER_URL", raising=False)
    PLAN.clear()
    with Receiver() as receiver:
        monkeypatch.setenv(ALERT_WEBHOOK, receiver.url)
        yield Fleet(instance, receiver)


@pytest.fixture
def born(fleet: Fleet) -> Fleet:
    """A fleet whose alerts have had their first tick."""
    assert [] == fleet.tick()
    return fleet


def test_without_a_webhook_nothing_is_read(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most homes have none; their daemon must not pay for it every 30 s."""
    monkeypatch.delenv(ALERT_WEBHOOK)
    assert [] == fleet.tick()
    assert f"no alert webhook is configured: set {ALERT_WEBHOOK}" in fleet.said
    assert fleet.cursor is None


def test_a_first_start_does_not_send_the_history(fleet: Fleet) -> None:
    """Whoever sets a webhook has read the UI before."""
    PLAN.update(shards="old", intact="old")
    fleet.run()
    fleet.run("audit_job")
    assert [] == fleet.tick() == fleet.tick()
    # Somebody tags the old run: that is no news of it either.
    fleet.instance.add_run_tags(fleet.run_ids[0], {"seen": "yes"})
    assert [] == fleet.tick()


def test_a_failed_build_is_told_once_until_it_is_solved(born: Fleet) -> None:
    """With the pair, the step, its own message and the way to the run."""
    PLAN["shards"] = "org/m: no space left on 3 disks; free some"
    run = born.run()
    (text,) = born.tick()
    assert text.startswith("*Run failed: org/m v1*\n• step shards: org/m: no space left on 3 disks")
    assert f"<http://127.0.0.1:3000/runs/{run.run_id}|run {run.run_id[:8]}>" in text
    assert [] == born.tick()
    PLAN["shards"] = "org/m: no space left on 4 disks; free some"
    born.run()
    assert [] == born.tick()
    PLAN.clear()
    born.run(model=OTHER)
    assert [] == born.tick()
    born.run()
    assert ["*Recovered*: org/m v1 shards"] == born.tick()
    PLAN["shards"] = "org/m: no space left on 5 disks; free some"
    born.run()
    # It was over for less than an hour.
    assert [] == born.tick()


def test_a_failed_blocking_check_is_the_cause_and_not_its_step(born: Fleet) -> None:
    """Dagster fails the step and the run for it: three failures, one message."""
    PLAN.update(loads="the worker died", equal="the worker died")
    born.run()
    (text,) = born.tick()
    assert text.splitlines()[:2] == [
        "*Check failed: org/m v1*",
        "• check reload.loads, reload.equal: the worker died",
    ]
    assert "The channel has not moved" in text
    PLAN.clear()
    born.run()
    assert ["*Recovered*: org/m v1 reload.loads, org/m v1 reload.equal"] == born.tick()


def test_it_is_the_same_on_postgres(on_postgres: Fleet) -> None:
    """Its events are in one table, and not in a file for each run."""
    assert [] == on_postgres.tick()
    PLAN.update(loads="too slow", intact="damaged")
    on_postgres.run()
    on_postgres.run("audit_job")
    on_postgres.instance.report_runless_asset_event(unreachable(False))
    assert 3 == len(on_postgres.tick())
    PLAN.clear()
    on_postgres.run()
    on_postgres.instance.report_runless_asset_event(unreachable(True))
    assert ["*Recovered*: org/m v1 reload.loads, shards.hub_reachable"] == on_postgres.tick()
    assert [] == on_postgres.tick()


def unreachable(passed: bool) -> dg.AssetCheckEvaluation:
    """What the revision sensor reports; it belongs to no run."""
    return dg.AssetCheckEvaluation(
        asset_key=shards.key,
        check_name="hub_reachable",
        passed=passed,
        description="org/m: 401",
        metadata={},
        blocking=False,
    )


def test_a_step_that_says_why_its_checks_failed_is_told_by_them(born: Fleet) -> None:
    """reload_check answers each check with the error that it then raises."""
    PLAN.update(reload="no such adapter", loads="no such adapter")
    born.run()
    (text,) = born.tick()
    assert 1 == text.count("no such adapter")


def test_a_failed_check_of_a_good_run_is_told(born: Fleet) -> None:
    """The audit goes on past what rotted: its run succeeds."""
    PLAN["intact"] = "2 of 120 builds are damaged"
    run = born.run("audit_job")
    assert dg.DagsterRunStatus.SUCCESS == run.status
    (text,) = born.tick()
    assert text.startswith("*Check failed: audit.intact*\n• check audit.intact: 2 of 120 builds")
    assert "tensorize rollback" in text


def test_a_check_that_a_sensor_reports_is_told_and_its_pass_too(born: Fleet) -> None:
    """hub_reachable belongs to no run; its page is linked."""
    born.instance.report_runless_asset_event(unreachable(False))
    (text,) = born.tick()
    assert "check shards.hub_reachable: org/m: 401" in text
    page = "assets/shards?view=checks&amp;checkDetail=hub_reachable"
    assert f"<http://127.0.0.1:3000/{page}|the page in Dagster>" in text
    assert "HF_TOKEN" in text
    born.instance.report_runless_asset_event(unreachable(True))
    assert ["*Recovered*: shards.hub_reachable"] == born.tick()


def test_a_run_that_no_step_failed_is_told_with_its_jobs_name(born: Fleet) -> None:
    """A run that could not be launched, or whose process died."""
    key = str(partitions.partition_key(MODEL, "v1"))
    run = born.instance.create_run_for_job(
        DEFS.resolve_job_def("build"), tags={"dagster/partition": key}
    )
    born.instance.report_run_failed(run, "its process is gone")
    (text,) = born.tick()
    assert "• job build: its process is gone" in text
    born.run()
    assert ["*Recovered*: org/m v1 build"] == born.tick()


def test_a_run_that_dagster_will_start_anew_is_not_told(born: Fleet) -> None:
    """A lost machine: what counts is how the next run ends."""
    PLAN["shards"] = "lost"
    born.run(tags={"dagster/will_retry": "true"})
    assert [] == born.tick()
    born.run(tags={"dagster/will_retry": "false"})
    assert 1 == len(born.tick())


def test_runs_of_others_are_not_told(born: Fleet) -> None:
    """The instance may have other projects, whose people have alerts of their own."""
    born.run("foreign_job")
    assert [] == born.tick()


def test_a_run_of_our_assets_from_the_ui_is_told(born: Fleet) -> None:
    """It is a run of Dagster's own job, and says which assets."""
    PLAN["shards"] = "refused"
    key = partitions.partition_key(MODEL, "v1")
    job = DEFS.resolve_implicit_global_asset_job_def()
    job.execute_in_process(
        instance=born.instance,
        partition_key=key,
        asset_selection=[shards.key],
        raise_on_error=False,
    )
    (text,) = born.tick()
    assert "step shards: refused" in text


def hub_tick(
    instance: dg.DagsterInstance,
    status: TickStatus,
    said: str | None = None,
    state: InstigatorState = HUB,
) -> InstigatorTick:
    """A tick of the revision sensor, or of another `state`, as the daemon stores it."""
    if instance.get_instigator_state(state.instigator_origin_id, state.selector_id) is None:
        instance.add_instigator_state(state)
    inner = SerializableErrorInfo(f"RuntimeError: {said}\n", [], "RuntimeError")
    return instance.create_tick(
        TickData(
            instigator_origin_id=state.instigator_origin_id,
            selector_id=state.selector_id,
            instigator_name=state.name,
            instigator_type=state.instigator_type,
            status=status,
            timestamp=time.time(),
            error=SerializableErrorInfo("wrapped", [], "Wrapper", inner) if said else None,
        )
    )


def test_a_failed_tick_is_told_and_its_recovery(born: Fleet) -> None:
    """A sensor that fails finds no new commits, and no run shows it."""
    hub_tick(born.instance, TickStatus.SKIPPED)
    assert [] == born.tick()
    hub_tick(born.instance, TickStatus.FAILURE, "no such catalog")
    (text,) = born.tick()
    assert text.startswith(
        "*Sensor hf_revision_sensor failed*\n• sensor hf_revision_sensor: RuntimeError: no such"
    )
    assert "<http://127.0.0.1:3000/locations/fleet/sensors/hf_revision_sensor|" in text
    hub_tick(born.instance, TickStatus.STARTED)
    assert [] == born.tick()
    hub_tick(born.instance, TickStatus.FAILURE, "no such catalog")
    assert [] == born.tick()
    hub_tick(born.instance, TickStatus.SKIPPED)
    assert ["*Recovered*: sensor hf_revision_sensor"] == born.tick()
    assert [] == born.tick()


def test_a_schedule_whose_retry_succeeds_is_told_as_over(born: Fleet) -> None:
    """Dagster's retry is the same tick, and the next one may be a week away."""
    tick = hub_tick(born.instance, TickStatus.FAILURE, "the store is away", WEEKLY)
    (text,) = born.tick()
    assert "/locations/fleet/schedules/retensorize_schedule|" in text
    born.instance.update_tick(tick.with_status(TickStatus.SKIPPED, error=None))
    assert ["*Recovered*: schedule retensorize_schedule"] == born.tick()


def test_a_sensor_that_fails_every_other_tick_is_told_once(born: Fleet) -> None:
    """Failure and recovery are read together: that was a message for each tick of the alerts."""
    sent: list[str] = []
    for _ in range(10):
        hub_tick(born.instance, TickStatus.FAILURE, "the Hub is slow")
        hub_tick(born.instance, TickStatus.SKIPPED)
        sent += born.tick()
    (text,) = sent
    assert "sensor hf_revision_sensor (over by now): RuntimeError: the Hub is slow" in text
    assert "0 causes are open" in born.said


def test_a_webhook_that_is_down_loses_nothing_and_gets_nothing_twice(born: Fleet) -> None:
    """Of three messages the second is refused: it and the third come with the next tick."""
    PLAN["shards"] = "refused"
    born.run()
    born.run(model=OTHER)
    PLAN["intact"] = "damaged"
    born.run("audit_job")
    born.receiver.answers.extend([(200, {}), (503, {})])
    (first,) = born.tick()
    assert "the alert webhook answered 503: it is in trouble; 2 messages wait, 1 were" in born.said
    rest = born.tick()
    assert 2 == len(rest)
    assert 3 == len({first, *rest})
    assert [] == born.tick()


def test_a_webhook_that_asks_for_a_pause_gets_one(
    born: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slack cuts off who goes on after 429."""
    PLAN["shards"] = "refused"
    born.run()
    born.receiver.answers.append((429, {"Retry-After": "120"}))
    assert [] == born.tick()
    assert [] == born.tick()
    assert "wants no message for 1" in born.said
    assert 1 == len(born.receiver.paths)
    later = SimpleNamespace(time=lambda: time.time() + 121, monotonic=time.monotonic)
    monkeypatch.setattr(automation_alerts, "time", later)
    assert 1 == len(born.tick())


def test_a_tick_that_is_lost_sends_again_what_it_sent(born: Fleet) -> None:
    """Dagster kept its cursor: rather twice than never."""
    PLAN["shards"] = "refused"
    born.run()
    before = born.cursor
    assert 1 == len(born.tick())
    born.cursor = before
    assert 1 == len(born.tick())


def test_a_damaged_cursor_begins_afresh(born: Fleet) -> None:
    """And says so; what fails from then on is told."""
    PLAN["shards"] = "refused"
    born.run()
    for cursor in ("{}", "no json", '{"format":1,"writing":77}'):
        born.cursor = cursor
        assert [] == born.tick()
    born.run()
    assert 1 == len(born.tick())


def test_many_runs_are_read_page_by_page_and_tick_by_tick(
    born: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a night without a daemon there are many, and Dagster ends a tick after 60 s."""
    PLAN["intact"] = "damaged"
    born.run("audit_job")
    born.run("audit_job")
    PLAN["shards"] = "refused"
    born.run()
    monkeypatch.setattr(automation_alerts, "_PAGE", 2)
    before = born.cursor
    assert 2 == len(born.tick())
    born.cursor = before
    # Of the next tick the first page has taken too long.
    clock = iter([0.0, 0.0, 21.0])
    slow = SimpleNamespace(time=time.time, monotonic=lambda: next(clock, 0.0))
    monkeypatch.setattr(automation_alerts, "time", slow)
    (first,) = born.tick()
    assert "damaged" in first
    (second,) = born.tick()
    assert "refused" in second
    assert [] == born.tick()


def test_a_run_that_was_tagged_during_a_backlog_is_told(
    born: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changed last but ended first, so that it is read when later ones have been."""
    PLAN["shards"] = "refused"
    run = born.run()
    PLAN["intact"] = "damaged"
    born.run("audit_job")
    born.run("audit_job")
    born.instance.add_run_tags(run.run_id, {"seen": "yes"})
    monkeypatch.setattr(automation_alerts, "_PAGE", 2)
    clock = iter([0.0, 0.0, 21.0])
    slow = SimpleNamespace(time=time.time, monotonic=lambda: next(clock, 0.0))
    monkeypatch.setattr(automation_alerts, "time", slow)
    (first,) = born.tick()
    assert "damaged" in first
    (second,) = born.tick()
    assert "refused" in second


def test_the_ui_of_the_links_is_the_users(born: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that people's browsers reach."""
    monkeypatch.setenv("DAGSTER_WEBSERVER_URL", "https://dagster.example.com/prod/")
    PLAN["shards"] = "refused"
    run = born.run()
    (text,) = born.tick()
    assert f"<https://dagster.example.com/prod/runs/{run.run_id}|" in text


def test_a_wrong_url_fails_the_tick_without_quoting_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A skipped tick would look like alerts that are well."""
    monkeypatch.setenv(ALERT_WEBHOOK, "http://hooks.example.com/a-secret")
    with pytest.raises(Exception, match="must be an https:// URL") as caught:
        fleet.tick()
    assert "a-secret" not in str(caught.value)
