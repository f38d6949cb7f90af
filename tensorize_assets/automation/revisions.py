"""hf_revision_sensor: a new commit on the Hub starts a build of each suffix that follows it."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import dagster as dg
from pydantic import Field

from tensorize_assets.assets.hf_snapshot import hf_snapshot
from tensorize_assets.assets.metadata import table
from tensorize_assets.assets.target import COMMIT_TAG, MODEL_TAG, SUFFIX_TAG
from tensorize_assets.automation import sensor_state
from tensorize_assets.core import due_builds, jsonio, revisions, wanted
from tensorize_assets.core.due_builds import Decided, Pair, RunState
from tensorize_assets.core.errors import CatalogError, StoreError, WorkerError
from tensorize_assets.core.revisions import THE_HUB, Looked, Trouble, Watch
from tensorize_assets.partitions import add_requests, partition_key
from tensorize_assets.resources.catalog import CatalogResource
from tensorize_assets.resources.hub import HubResource
from tensorize_assets.resources.keyring import KeyringResource
from tensorize_assets.resources.launchers.base import Launcher
from tensorize_assets.resources.store import StoreResource

REACHABLE = "hub_reachable"
POSSIBLE = "builds_possible"

# Dagster ends a tick at 60 s.
_ASK_S = 25.0
_COMPARE_S = 35.0
_REQUESTS_A_TICK = 100
_STORE_PAUSE_S = 60.0
# What stops all builds may be a catalog that somebody is just writing, or a store that starts anew.
_STOPPED_S = 600.0
_HINTS_A_TICK = 1000
_KEYS_A_QUERY = 200
_LINES = 100
_LISTED = 10

_RUN_KEY_TAG = "dagster/run_key"
# The error of a step whose blocking check did not pass.
_CHECK_FAILED = "DagsterAssetCheckFailedError"
# The check that fails where the engine did not start, for whatever reason.
_LOADS = "artifact_loads"
_OF_INTEREST = {dg.DagsterEventType.STEP_FAILURE, dg.DagsterEventType.ASSET_CHECK_EVALUATION}
_REACHABLE_MEANS = "Every revision that a profile follows can be read on the Hub."
_POSSIBLE_MEANS = (
    "Nothing has kept builds from being requested for ten minutes: the catalog, the versions of "
    "vLLM, torch and tensorizer, and what is published can be read."
)


class Stop(jsonio.Record):
    """What keeps builds from being requested, and since when (seconds since 1970)."""

    since: float
    reason: str


class State(jsonio.Record):
    """What the sensor knows. `hints`: the storage id of the last observation it has read.

    `reported` are the revisions that the check has named last; None before its first evaluation.
    `store_pause`: until then (seconds since 1970) the store is not read. `possible` is what the
    check of that name has said last; None before its first evaluation.
    """

    format: Literal[1] = 1
    watches: dict[str, Watch] = Field(default={})
    trouble: Trouble | None = None
    pairs: dict[str, Pair] = Field(default={})
    hints: int = 0
    reported: tuple[str, ...] | None = None
    store_pause: float = 0
    stop: Stop | None = None
    possible: bool | None = None


# Its signature holds types that Dagster leaves open.
@dg.sensor(  # pyright: ignore[reportUnknownMemberType]
    name="hf_revision_sensor",
    job_name="build",
    minimum_interval_seconds=5,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Asks the Hub for every revision that a profile follows, models' and adapters', "
    "each as often as the catalog says or when a webhook points to it, and requests a build of "
    "each suffix whose files have changed. Failed builds are requested again, ever more rarely.",
)
def hf_revision_sensor(
    context: dg.SensorEvaluationContext,
    tensorize_catalog: CatalogResource,
    tensorize_store: StoreResource,
    tensorize_hub: HubResource,
    tensorize_keyring: KeyringResource,
    tensorize_launcher: Launcher,
) -> dg.SensorResult:
    """One look at the Hub, and what follows from it. Says nothing where nothing has changed."""
    now, started = time.time(), time.monotonic()
    lines: list[str] = []
    cursor, before = _load(context, lines)
    try:
        content = tensorize_catalog.catalog()
    except CatalogError as error:
        reason = f"the catalog has mistakes, nothing is asked or built:\n{error}"
        after, verdicts = _judged(before, reason, now)
        if after != before:
            cursor = sensor_state.save(context.instance, _place(context), cursor, after)
        _say(context, lines)
        return dg.SensorResult(skip_reason=reason, cursor=cursor, asset_events=verdicts)
    wanted_now = revisions.followed(content)

    hinted, hints = _hints(context.instance, before)
    looked = revisions.look(
        tensorize_hub.access(),
        wanted_now,
        revisions.hinted(before.watches, wanted_now.values(), hinted),
        before.trouble,
        content.automation.revisions,
        now,
        started + _ASK_S,
    )
    lines += looked.lines

    runs = _runs(context.instance, due_builds.under_way(before.pairs))
    pairs, said = due_builds.follow_up(before.pairs, runs, now)
    lines += said

    def open_store() -> due_builds.ReadPublished:
        store = tensorize_store.open(tensorize_store.root())
        return partial(
            wanted.published,
            store,
            trusted=tensorize_keyring.trusted(),
            seen=tensorize_keyring.seen(),
        )

    store_is_read = now >= before.store_pause
    try:
        decided = due_builds.decide(
            content,
            looked.watches,
            pairs,
            tensorize_launcher.versions,
            open_store if store_is_read else None,
            now,
            _REQUESTS_A_TICK,
            started + _COMPARE_S,
        )
    except WorkerError as error:
        reason = f"no build can be requested: {error}"
        decided = Decided(pairs, (), (reason,))
    else:
        # A store that is left alone for a while is no better for it.
        reason = decided.store_down if store_is_read or not before.stop else before.stop.reason
    lines += decided.lines

    failing = revisions.unreadable(
        looked.watches, looked.trouble, content.automation.revisions.alert_after
    )
    news = _evaluation(failing, before, looked)
    after, verdicts = _judged(
        State(
            watches=looked.watches,
            trouble=looked.trouble,
            pairs=decided.pairs,
            hints=hints,
            reported=tuple(failing) if news else before.reported,
            store_pause=now + _STORE_PAUSE_S if decided.store_down else before.store_pause,
            stop=before.stop,
            possible=before.possible,
        ),
        reason,
        now,
    )
    if after != before:
        cursor = sensor_state.save(context.instance, _place(context), cursor, after)
    _say(context, lines)
    return dg.SensorResult(
        run_requests=[_run_request(request) for request in decided.requests],
        skip_reason=None
        if decided.requests
        else f"{len(wanted_now)} revisions are followed, {looked.asked} were asked for; no new "
        f"build" + (f"; {len(failing)} cannot be read" if failing else ""),
        cursor=cursor,
        dynamic_partitions_requests=add_requests(
            context.instance,
            [request.model for request in decided.requests],
            [request.suffix for request in decided.requests],
        ),
        asset_events=[*([news] if news else []), *verdicts],
    )


@dg.asset_check(asset=hf_snapshot, name=REACHABLE, description=_REACHABLE_MEANS)
def hub_reachable(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
    """What `hf_revision_sensor` found last; asks nothing, so that runs may hold it at no cost.

    One status for all partitions: a Hub that is down would be thousands of failures otherwise.
    """
    state = _latest(context)
    if state is None or state.reported is None:
        return dg.AssetCheckResult(
            passed=True, description="hf_revision_sensor has not asked the Hub yet"
        )
    failing = {
        name: state.trouble.reason
        if name == THE_HUB and state.trouble
        else state.watches.get(name, Watch()).reason or ""
        for name in state.reported
    }
    return dg.AssetCheckResult(
        passed=not failing,
        description=_description(failing, len(state.watches)),
        metadata=_table(failing, state.watches),
    )


@dg.asset_check(asset=hf_snapshot, name=POSSIBLE, description=_POSSIBLE_MEANS)
def builds_possible(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
    """What `hf_revision_sensor` found last; reads nothing else, so that runs may hold it."""
    state = _latest(context)
    if state is None or state.possible is None:
        return dg.AssetCheckResult(passed=True, description="hf_revision_sensor has not run yet")
    stop = None if state.possible else state.stop
    return dg.AssetCheckResult(passed=stop is None, description=_why(stop), metadata=_since(stop))


def _latest(context: dg.AssetCheckExecutionContext) -> State | None:
    """The state of the sensor in this code location; None where it has none that can be read."""
    origin = context.run.remote_job_origin
    place = origin.repository_origin.get_label() if origin else ""
    try:
        return sensor_state.latest(context.instance, f"revisions/{place}", State)
    except StoreError:
        return None


def _load(context: dg.SensorEvaluationContext, lines: list[str]) -> tuple[str | None, State]:
    """The cursor and the state it points to; without one, a new state, that has read all hints."""
    try:
        state = sensor_state.load(context.instance, _place(context), context.cursor, State)
        if state is not None:
            return context.cursor, state
    except StoreError as error:
        lines.append(f"begun afresh, every pair is compared with what is published: {error}")
    newest = context.instance.fetch_observations(hf_snapshot.key, limit=1).records
    return None, State(hints=newest[0].storage_id if newest else 0)


def _place(context: dg.SensorEvaluationContext) -> str:
    """Where the state stands: several code locations may share an instance."""
    origin = context.code_location_origin
    return f"revisions/{context.repository_name}@{origin.location_name}" if origin else "revisions/"


def _hints(instance: dg.DagsterInstance, state: State) -> tuple[set[str], int]:
    """The repos that something pointed to since, and the storage id of the last such word."""
    found = instance.fetch_observations(
        dg.AssetRecordsFilter(asset_key=hf_snapshot.key, after_storage_id=state.hints),
        limit=_HINTS_A_TICK,
        ascending=True,
    ).records
    repos: set[str] = set()
    for record in found:
        observation = record.asset_observation
        repo = observation.metadata.get("repo") if observation else None
        if repo is not None and isinstance(repo.value, str):
            repos.add(repo.value)
    return repos, found[-1].storage_id if found else state.hints


def _runs(instance: dg.DagsterInstance, run_keys: Mapping[str, str]) -> dict[str, RunState]:
    """How the newest run of each key stands; a key without a run is left out."""
    keys = list(run_keys.values())
    found: dict[str, RunState] = {}
    for at in range(0, len(keys), _KEYS_A_QUERY):
        chunk = keys[at : at + _KEYS_A_QUERY]
        # The newest first: a run that was started again keeps the key.
        for run in instance.get_runs(dg.RunsFilter(tags={_RUN_KEY_TAG: chunk})):
            key = run.tags[_RUN_KEY_TAG]
            if key not in found:
                found[key] = _state(instance, run)
    return found


def _state(instance: dg.DagsterInstance, run: dg.DagsterRun) -> RunState:
    if not run.is_finished or run.is_complete_and_waiting_to_retry:
        return "under way"
    if run.is_success:
        return "succeeded"
    if run.status is dg.DagsterRunStatus.CANCELED:
        return "canceled"
    refused = False
    loaded = True
    for entry in instance.all_logs(run.run_id, of_type=_OF_INTEREST):
        event = entry.dagster_event
        if event is None:
            continue
        if event.event_type == dg.DagsterEventType.STEP_FAILURE:
            error = event.step_failure_data.error
            refused = refused or (error is not None and error.cls_name == _CHECK_FAILED)
        elif event.asset_check_evaluation_data.check_name == _LOADS:
            loaded = event.asset_check_evaluation_data.passed
    # Where nothing was loaded, nothing was compared: a device that was full may do the next time.
    return "refused" if refused and loaded else "failed"


def _run_request(request: due_builds.Request) -> dg.RunRequest:
    return dg.RunRequest(
        run_key=request.run_key,
        partition_key=partition_key(request.model, request.suffix),
        tags={
            MODEL_TAG: request.model,
            SUFFIX_TAG: request.suffix,
            **({COMMIT_TAG: request.commit} if request.commit else {}),
        },
    )


def _evaluation(
    failing: Mapping[str, str], before: State, looked: Looked
) -> dg.AssetCheckEvaluation | None:
    """The check's new result, when other revisions fail than it has named last."""
    if before.reported is None and not looked.asked:
        return None
    if before.reported == tuple(failing):
        return None
    return dg.AssetCheckEvaluation(
        asset_key=hf_snapshot.key,
        check_name=REACHABLE,
        passed=not failing,
        description=_description(failing, len(looked.watches)),
        metadata=_table(failing, looked.watches),
        blocking=False,
    )


def _judged(
    state: State, reason: str | None, now: float
) -> tuple[State, list[dg.AssetCheckEvaluation]]:
    """The state after a tick that `reason` kept from requesting builds, and what the check says.

    It says nothing as long as its answer is the same, and fails only after ten minutes.
    """
    since = state.stop.since if state.stop else now
    stop = None if reason is None else Stop(since=since, reason=reason)
    possible = state.possible
    if stop is None:
        possible = True
    elif now - stop.since >= _STOPPED_S:
        possible = False
    after = state.model_copy(update={"stop": stop, "possible": possible})
    if possible is None or possible == state.possible:
        return after, []
    evaluation = dg.AssetCheckEvaluation(
        asset_key=hf_snapshot.key,
        check_name=POSSIBLE,
        passed=possible,
        description=_why(stop),
        metadata=_since(stop),
        blocking=False,
    )
    return after, [evaluation]


def _why(stop: Stop | None) -> str:
    return stop.reason if stop else "the catalog, the tools and the store can be read"


def _since(stop: Stop | None) -> dict[str, dg.MetadataValue]:
    return {"since": dg.MetadataValue.timestamp(stop.since)} if stop else {}


def _description(failing: Mapping[str, str], count: int) -> str:
    if not failing:
        return f"all {count} followed revisions can be read"
    listed = "; ".join(f"{name}: {reason}" for name, reason in list(failing.items())[:_LISTED])
    more = f"; and {len(failing) - _LISTED} more" if len(failing) > _LISTED else ""
    return f"{len(failing)} of {count} followed revisions cannot be read:\n{listed}{more}"


def _table(failing: Mapping[str, str], watches: Mapping[str, Watch]) -> dict[str, dg.MetadataValue]:
    rows = [
        {
            "revision": name,
            "failures in a row": watches[name].failures if name in watches else 0,
            "last known commit": watches[name].commit or "" if name in watches else "",
            "reason": reason,
        }
        for name, reason in list(failing.items())[:_LINES]
    ]
    return {"failing": table(rows)} if rows else {}


def _say(context: dg.SensorEvaluationContext, lines: Sequence[str]) -> None:
    # Opening the log writes a file: where there is nothing to say, it stays closed.
    for line in lines[:_LINES]:
        context.log.info(line)
    if len(lines) > _LINES:
        context.log.info(f"and {len(lines) - _LINES} more lines like these")
