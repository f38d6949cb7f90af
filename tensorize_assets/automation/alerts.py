"""The sensor that tells people what failed: runs, asset checks, and sensors and schedules.

Each tick reads what ended since the one before. What is open, and what is still to be told, is
kept, so that a webhook that is down, or a daemon that was, loses nothing.
"""

import os
import time
from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import dagster as dg

# These have no public name in Dagster 1.13, but the instance's methods take and give them.
from dagster._core.scheduler.instigation import InstigatorState, InstigatorType, TickStatus
from dagster._core.storage.tags import PARTITION_NAME_TAG, WILL_RETRY_TAG
from pydantic import Field

from tensorize_assets.automation import sensor_state
from tensorize_assets.core import alerts
from tensorize_assets.core.alerts import Answer, Book, Failure, Outcome
from tensorize_assets.core.catalog import from_partition_key
from tensorize_assets.core.errors import CatalogError, StoreError
from tensorize_assets.core.jsonio import Record
from tensorize_assets.core.secret_settings import ALERT_WEBHOOK

NAME = "alerts"
INTERVAL_S = 30

# Runs are asked for by the time of their last change, which hosts write by clocks of their own.
_OVERLAP_S = 300.0
_MICROSECOND = 1e-6
# Dagster ends a tick after 60 s, and with it what it would have noted.
_READ_UNTIL_S = 20.0
_SEND_UNTIL_S = 40.0
_PAGE = 200
_RUNLESS = ""
_NO_WEBHOOK = f"no alert webhook is configured: set {ALERT_WEBHOOK}, or {ALERT_WEBHOOK}_FILE"

_ENDED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE]
_OF_RUNS = {
    dg.DagsterEventType.ASSET_CHECK_EVALUATION,
    dg.DagsterEventType.STEP_FAILURE,
    dg.DagsterEventType.STEP_SUCCESS,
    dg.DagsterEventType.RUN_FAILURE,
}


class _State(Record):
    """What the sensor knows. Times are in seconds since 1970.

    `born`: what ended before is not told. `runs`: runs that changed before it have been read.
    `ended`: all that ended before it have been read, and of those after it the ones in `recent`,
    with the time they ended. `event`: the last event without a run. `ticks`: of each sensor and
    schedule, by its selector, the last failed tick. `wait_until`: the webhook asked for a pause.
    """

    format: Literal[1] = 1
    born: float
    runs: float
    ended: float
    recent: dict[str, float] = Field(default={})
    event: str
    ticks: dict[str, float] = Field(default={})
    wait_until: float = 0.0
    book: Book = Book()


class _Watched(NamedTuple):
    """What is told of. `location`: that of this sensor; None where Dagster does not say."""

    jobs: frozenset[str]
    assets: frozenset[dg.AssetKey]
    ticking: frozenset[str]
    location: str | None


def alerts_sensor(
    jobs: Collection[str], assets: Collection[dg.AssetKey], ticking: Collection[str]
) -> dg.SensorDefinition:
    """The sensor `alerts`, over runs of these jobs or assets, and these sensors and schedules."""

    # Its signature holds types that Dagster leaves open.
    @dg.sensor(  # pyright: ignore[reportUnknownMemberType]
        name=NAME,
        minimum_interval_seconds=INTERVAL_S,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Sends failures of runs, asset checks, sensors and schedules to the webhook in "
        f"{ALERT_WEBHOOK}, once per cause, and says when they are over.",
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        url = alerts.webhook_url(os.environ)
        if url is None:
            return dg.SkipReason(_NO_WEBHOOK)
        began = time.monotonic()
        now = time.time()
        cursor, state = _load(context, now)
        watched = _Watched(
            frozenset(jobs), frozenset(assets), frozenset(ticking), _location(context)
        )
        state = _read(context.instance, state, watched, now, began)
        state, answer = _send(url, state, now, began)
        if not answer.accepted:
            # No error: the tick would fail, and what was accepted before would be sent again.
            context.log.warning(answer.said)
        cursor = sensor_state.save(context.instance, _place(context), cursor, state)
        return dg.SensorResult(cursor=cursor, skip_reason=answer.said)

    return sensor


def _load(context: dg.SensorEvaluationContext, now: float) -> tuple[str | None, _State]:
    """The cursor and the state it points to; without one, a state that is born now."""
    try:
        state = sensor_state.load(context.instance, _place(context), context.cursor, _State)
        if state is not None:
            return context.cursor, state
    except StoreError as error:
        context.log.warning(f"{error}; begun afresh: what failed before is not told again")
    last = context.instance.get_records_for_run(_RUNLESS, limit=1, ascending=False)
    return None, _State(born=now, runs=now, ended=now, event=last.cursor)


def _location(context: dg.SensorEvaluationContext) -> str | None:
    origin = context.code_location_origin
    return origin.location_name if origin else None


def _place(context: dg.SensorEvaluationContext) -> str:
    # Several code locations with this sensor may share an instance.
    return f"alerts/{context.repository_name or ''}@{_location(context) or ''}"


def _read(
    instance: dg.DagsterInstance, state: _State, watched: _Watched, now: float, began: float
) -> _State:
    """The state with everything in its book that ended since the last tick."""
    causes = dict(state.book.causes)
    alerts.forget_old(causes, now)
    missed = state.book.missed
    recent = dict(state.recent)
    after, more = state.runs, True
    while more and time.monotonic() - began < _READ_UNTIL_S:
        page = instance.get_run_records(
            dg.RunsFilter(statuses=_ENDED, updated_after=datetime.fromtimestamp(after, UTC)),
            limit=_PAGE,
            order_by="update_timestamp",
            ascending=True,
        )
        for record in page:
            run = record.dagster_run
            ended = record.end_time or record.update_timestamp.timestamp()
            # An old run changes too, when somebody tags it.
            old = ended < state.ended
            if old or run.run_id in recent or not _is_watched(run, watched):
                continue
            recent[run.run_id] = ended
            missed += alerts.note(causes, _of_run(instance, run), now)
        more = len(page) == _PAGE
        # Runs of one microsecond may be on two pages, and no page is read twice.
        last = page[-1].update_timestamp.timestamp() if page else now
        after = last if last - _MICROSECOND <= after else last - _MICROSECOND
    recently = max(state.born, now - _OVERLAP_S)
    runs = after if more else recently
    # A run that was tagged later is on a later page than one that ended after it.
    all_ended = state.ended if more else recently
    checks = instance.get_records_for_run(
        _RUNLESS, state.event, dg.DagsterEventType.ASSET_CHECK_EVALUATION, _PAGE
    )
    for record in checks.records:
        found = record.event_log_entry.asset_check_evaluation
        if found is not None and found.asset_key in watched.assets:
            outcome = _of_checks([found], _check_page(found))
            missed += alerts.note(causes, outcome, now)
    ticks = dict(state.ticks)
    for ticking in instance.all_instigator_state():
        location = ticking.selector.location_name
        if ticking.name in watched.ticking and watched.location in (None, location):
            seen = ticks.get(ticking.selector_id, state.born)
            for at, outcome in _of_ticks(instance, ticking, seen):
                ticks[ticking.selector_id] = at
                missed += alerts.note(causes, outcome, now)
    return state.model_copy(
        update={
            "runs": runs,
            "ended": all_ended,
            "recent": {key: ended for key, ended in recent.items() if ended >= all_ended},
            "event": checks.cursor,
            "ticks": ticks,
            "book": Book(causes=causes, missed=missed),
        }
    )


def _is_watched(run: dg.DagsterRun, watched: _Watched) -> bool:
    if run.tags.get(WILL_RETRY_TAG) == "true":
        # Dagster starts it anew: how that one ends is what counts.
        return False
    # `tensorize build` runs in no code location.
    origin = run.remote_job_origin
    location = origin.repository_origin.code_location_origin.location_name if origin else None
    if watched.location and location not in (None, watched.location):
        return False
    chosen = {*(run.asset_selection or ()), *(c.asset_key for c in run.asset_check_selection or ())}
    return run.job_name in watched.jobs or not watched.assets.isdisjoint(chosen)


def _of_run(instance: dg.DagsterInstance, run: dg.DagsterRun) -> Outcome:
    """What failed and passed in a run that has ended."""
    subject = _subject(run.tags.get(PARTITION_NAME_TAG))
    page = f"/runs/{run.run_id}"
    checks: dict[tuple[dg.AssetCheckKey, str | None], tuple[str | None, Any]] = {}
    failed_steps: dict[str, str] = {}
    passed = {("run", subject, run.job_name)}
    error = ""
    for record in instance.get_records_for_run(run.run_id, of_type=_OF_RUNS).records:
        event = record.event_log_entry.dagster_event
        if event is None:
            continue
        if event.event_type == dg.DagsterEventType.ASSET_CHECK_EVALUATION:
            found = event.asset_check_evaluation_data
            # Of a step that was tried again the last attempt counts.
            checks[found.asset_check_key, found.partition] = (event.step_key, found)
        elif event.event_type == dg.DagsterEventType.STEP_FAILURE:
            failed_steps[str(event.step_key)] = _step_error(event)
        elif event.event_type == dg.DagsterEventType.STEP_SUCCESS:
            passed.add(("step", subject, str(event.step_key)))
        else:
            # None where it is Dagster that says a run is lost.
            data: Any = event.event_specific_data
            error = _innermost(data.error) if data and data.error else event.message or ""
    of_checks = _of_checks([found for _, found in checks.values()], page)
    # A step fails because its checks did, or its checks say why it could not be checked.
    explained = {step for step, found in checks.values() if not found.passed}
    failures = [
        Failure("step", subject, step, said, page)
        for step, said in failed_steps.items()
        if step not in explained
    ]
    if run.status == dg.DagsterRunStatus.SUCCESS:
        return Outcome([*of_checks.failures, *failures], of_checks.passed | passed)
    if not failed_steps:
        failures.append(Failure("run", subject, run.job_name, error, page))
    return Outcome([*of_checks.failures, *failures], of_checks.passed)


def _of_checks(evaluations: Sequence[Any], page: str) -> Outcome:
    """What failed and passed of these; a check without a partition has one status for all."""
    named = [
        (found, _subject(found.partition), f"{found.asset_key.to_user_string()}.{found.check_name}")
        for found in evaluations
    ]
    return Outcome(
        [
            Failure("check", subject, name, found.description or "", page)
            for found, subject, name in named
            if not found.passed
        ],
        {("check", subject, name) for found, subject, name in named if found.passed},
    )


def _of_ticks(
    instance: dg.DagsterInstance, state: InstigatorState, seen: float
) -> Iterator[tuple[float, Outcome]]:
    """Each tick that failed after `seen`, with its time; and whether it has been well since."""
    place = (state.instigator_origin_id, state.selector_id)
    kind = "schedule" if state.instigator_type == InstigatorType.SCHEDULE else "sensor"
    name = ("tick", "", f"{kind} {state.name}")
    # The newest of them: a sensor that has failed for a day has thousands.
    failed = instance.get_ticks(*place, after=seen, limit=_PAGE, statuses=[TickStatus.FAILURE])
    for tick in reversed(failed):
        seen = max(seen, tick.timestamp)
        error = _innermost(tick.error) if tick.error else ""
        yield seen, Outcome([Failure(*name, error, _ticks_page(state, kind))], set())
    well = [TickStatus.SUCCESS, TickStatus.SKIPPED]
    # A schedule's retry is the same tick, at the same time.
    if instance.get_ticks(*place, after=seen - 0.001, limit=1, statuses=well):
        yield seen, Outcome([], {name})


def _send(url: str, state: _State, now: float, began: float) -> tuple[_State, Answer]:
    """Send what is due, until the webhook refuses; the answer is of the whole."""
    if now < state.wait_until:
        seconds = state.wait_until - now
        return state, Answer(False, f"the alert webhook wants no message for {seconds:.0f} s more")
    book = state.book
    messages = alerts.due(book, alerts.ui_url(os.environ), now)
    for number, message in enumerate(messages):
        if time.monotonic() - began > _SEND_UNTIL_S:
            answer = Answer(False, "is slow")
        else:
            answer = alerts.send(url, message.body)
        if not answer.accepted:
            left = f"{len(messages) - number} messages wait, {number} were sent"
            state = state.model_copy(update={"wait_until": now + answer.wait_s, "book": book})
            return state, Answer(False, f"the alert webhook {answer.said}; {left}")
        book = alerts.told(book, message, now)
    still = sum(not cause.solved for cause in book.causes.values())
    said = f"{len(messages)} messages sent; {still} causes are open"
    return state.model_copy(update={"book": book}), Answer(True, said)


def _subject(partition: str | None) -> str:
    """`facebook/opt-125m v1` of `facebook--opt-125m|v1`; another partition as it is."""
    model, _, suffix = (partition or "").partition("|")
    try:
        return f"{from_partition_key(model)} {suffix}" if suffix else model
    except CatalogError:
        return partition or ""


def _step_error(event: dg.DagsterEvent) -> str:
    data = event.step_failure_data
    if data.user_failure_data is not None and data.user_failure_data.description:
        return data.user_failure_data.description
    return _innermost(data.error) if data.error else event.message or ""


def _innermost(error: Any) -> str:
    """What was raised, and not what Dagster made of it."""
    while error.cause is not None:
        error = error.cause
    return str(error.message)


def _check_page(found: Any) -> str:
    asset = "/".join(quote(part, safe="") for part in found.asset_key.path)
    return f"/assets/{asset}?view=checks&checkDetail={quote(found.check_name, safe='')}"


def _ticks_page(state: InstigatorState, kind: str) -> str:
    place = state.selector
    # As the UI writes it: the name that Dagster gives to the only repository is left out.
    location = place.location_name
    if place.repository_name != "__repository__":
        location = f"{place.repository_name}@{location}"
    return f"/locations/{quote(location, safe='')}/{kind}s/{quote(state.name, safe='')}"
