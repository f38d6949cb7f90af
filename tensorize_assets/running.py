"""Runs of the `build` job in this process, in the instance that the UI shows."""

from __future__ import annotations

import logging
import os
import re
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._core.storage.tags import MAX_RETRIES_TAG

from tensorize_assets import partitions
from tensorize_assets.assets.target import ONESHOT_TAG, Oneshot
from tensorize_assets.automation import run_lock
from tensorize_assets.core.catalog import Catalog
from tensorize_assets.core.errors import CatalogError, TensorizeAssetsError
from tensorize_assets.core.layout import ONESHOT_PARTITION
from tensorize_assets.core.protocol import R, WorkerRequest
from tensorize_assets.definitions import definitions
from tensorize_assets.resources.launchers.local import SubprocessLauncher


@dg.logger
def plain_logger(_: dg.InitLoggerContext) -> logging.Logger:
    """What assets and workers log, and how each step goes: a line each, on stderr."""
    logger = logging.Logger("tensorize", logging.DEBUG)
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_worth_a_line)
    handler.setFormatter(_Line())
    logger.addHandler(handler)
    return logger


def _event(record: logging.LogRecord) -> dg.DagsterEvent | None:
    return getattr(record, "dagster_meta", {}).get("dagster_event")


# What vLLM says in a worker, and Dagster of its pipe: in the UI, and too much for a terminal.
_OF_LIBRARIES = re.compile(r"(rank \d+: )?\[(\w+\.py:\d+|pipes)\] ")


def _message(record: logging.LogRecord) -> str:
    meta = getattr(record, "dagster_meta", {})
    return str(meta.get("orig_message") or record.getMessage())


def _worth_a_line(record: logging.LogRecord) -> bool:
    event = _event(record)
    if event is None:
        if record.levelno < logging.ERROR and _OF_LIBRARIES.match(_message(record)):
            return False
        return record.levelno >= logging.INFO
    # A failure is told once, at the end; steps that it keeps from running are not news.
    return event.event_type in (
        dg.DagsterEventType.STEP_START,
        dg.DagsterEventType.STEP_SUCCESS,
        dg.DagsterEventType.STEP_UP_FOR_RETRY,
    )


class _Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        meta = getattr(record, "dagster_meta", {})
        step = meta.get("step_key") or "run"
        event = _event(record)
        if event is not None and event.event_type is dg.DagsterEventType.STEP_UP_FOR_RETRY:
            retry = event.step_retry_data
            return (
                f"{step:<18} trying again in {retry.seconds_to_wait:.0f} s: {_reason(retry.error)}"
            )
        level = "" if record.levelno <= logging.INFO else f"{record.levelname}: "
        return f"{step:<18} {level}{_message(record)}"


def _reason(error: Any) -> str:
    """The first line of the innermost cause: what was raised, not what Dagster made of it."""
    while error is not None and error.cause is not None:
        error = error.cause
    return str(error.message).strip().splitlines()[0] if error is not None else "unknown"


def open_instance(home: Path) -> dg.DagsterInstance:
    """The Dagster instance in `home`, the one that the UI shows when it is started there.

    Raises:
        CatalogError: the folder is not a Dagster home.
    """
    if not (home / "dagster.yaml").is_file():
        raise CatalogError(
            f"{home} has no dagster.yaml; run in the folder that holds dagster_home, or set "
            "DAGSTER_HOME to it"
        )
    os.environ["DAGSTER_HOME"] = str(home)
    return dg.DagsterInstance.get()


def build_pair(
    instance: dg.DagsterInstance, home: Path, catalog: Catalog, model: str, suffix: str
) -> dg.ExecuteInProcessResult:
    """Run the whole chain for one pair of the catalog. The result says whether it succeeded."""
    partitions.add_catalog(instance, catalog)
    return _execute(instance, home, model, suffix, {})


def build_oneshot(
    instance: dg.DagsterInstance, home: Path, model: str, oneshot: Oneshot
) -> dg.ExecuteInProcessResult:
    """Run the whole chain for a profile that is in no catalog."""
    partitions.add_oneshot(instance, model)
    tags = {ONESHOT_TAG: oneshot.model_dump_json()}
    return _execute(instance, home, model, ONESHOT_PARTITION, tags)


def _execute(
    instance: dg.DagsterInstance, home: Path, model: str, suffix: str, tags: dict[str, str]
) -> dg.ExecuteInProcessResult:
    job = definitions(home, loggers={"console": plain_logger}).resolve_job_def("build")
    run_id = str(uuid.uuid4())
    # Else Dagster says that it will try a lost run again, which it cannot, and nobody is told.
    tags = {MAX_RETRIES_TAG: "0", **tags}
    with run_lock.held(instance, run_id):
        return job.execute_in_process(
            instance=instance,
            run_id=run_id,
            partition_key=partitions.partition_key(model, suffix),
            tags=tags,
            # Without it Dagster takes its own console logger, which prints every event.
            run_config={"loggers": {"console": {}}},
            raise_on_error=False,
        )


def run_worker(request: WorkerRequest, result_type: type[R], secrets: Mapping[str, bytes]) -> R:
    """Run one worker for a command: of no home, and in no history. Raises as the launcher does."""
    found: list[R] = []
    failed: list[TensorizeAssetsError] = []

    def run(context: dg.OpExecutionContext) -> None:
        try:
            found.append(SubprocessLauncher().run(context, request, result_type, secrets).result)
        except TensorizeAssetsError as error:
            # As an exception it would come back in Dagster's words.
            failed.append(error)

    # Dagster reads a signature's types, which here are text.
    run.__annotations__.clear()
    worker = dg.op(name="worker")(run)
    job = dg.JobDefinition(
        name="worker",
        graph_def=dg.GraphDefinition(name="worker", node_defs=[worker]),
        logger_defs={"console": plain_logger},
    )
    # Its settings are a plain dict to Dagster.
    with dg.DagsterInstance.ephemeral() as instance:  # pyright: ignore[reportUnknownMemberType]
        job.execute_in_process(instance=instance, run_config={"loggers": {"console": {}}})
    if failed:
        raise failed[0]
    return found[0]


def report(result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    """What a finished run made, or why it did not: for the terminal and for `--json`."""
    steps = {
        event.step_key: event.event_specific_data for event in result.get_step_failure_events()
    }
    checks = [
        {
            "check": evaluation.check_name,
            "passed": evaluation.passed,
            "description": evaluation.description,
        }
        for evaluation in result.get_asset_check_evaluations()
    ]
    report: dict[str, Any] = {
        "run_id": result.run_id,
        "success": result.success,
        "checks": checks,
        "errors": [
            # A step that fails by its blocking checks: they say it themselves, below.
            *(f"{step}: {_why(data)}" for step, data in steps.items() if not _by_checks(data)),
            *(f"{c['check']}: {c['description']}" for c in checks if not c["passed"]),
        ],
    }
    for event in result.get_asset_materialization_events():
        materialization = event.step_materialization_data.materialization
        values = {
            name: value.value
            for name, value in materialization.metadata.items()
            if not isinstance(value, dg.MarkdownMetadataValue)
        }
        report[materialization.asset_key.to_user_string()] = {
            name: value for name, value in values.items() if isinstance(value, (str, int, float))
        }
    if "published" in report:
        report["directory"] = report["published"]["directory"]
    # Also a run that was asked for less than the whole chain has published nothing.
    report["success"] = result.success and "published" in report
    return report


def _by_checks(data: Any) -> bool:
    return data.error is not None and data.error.cls_name == "DagsterAssetCheckFailedError"


def _why(data: Any) -> str:
    failure = data.user_failure_data
    if failure is not None and failure.description:
        return str(failure.description)
    return _reason(data.error)
