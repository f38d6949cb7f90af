"""What every launcher does: one request to a worker, wherever it runs, and one result back."""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic

import dagster as dg

from tensorize_assets.core.errors import (
    PreflightError,
    StoreUnavailableError,
    WorkerBusyError,
    WorkerError,
)
from tensorize_assets.core.jsonio import Record
from tensorize_assets.core.protocol import (
    LogLine,
    R,
    WorkerFailure,
    WorkerRequest,
    parse_reply,
    redact,
)
from tensorize_assets.core.rank_resources import RankResources

StepContext = dg.AssetExecutionContext | dg.OpExecutionContext

CRASHES = (
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSEGV,
    signal.SIGTRAP,
)
"""What native code dies of."""

_LAST_ERRORS = 10


class LaunchReport(Record, Generic[R]):
    """A worker's result and what it cost.

    `peak_memory_bytes` is the largest sum of anonymous memory over the worker's processes, or 0
    where the launcher cannot see them; `seconds` is the wall time from start to exit.
    """

    result: R
    peak_memory_bytes: int
    seconds: float


class Launcher(dg.ConfigurableResource[Any]):
    """Runs workers. Which kind it is, is the catalog's `launcher`."""

    shares_disks: ClassVar[bool] = True
    """Whether a worker sees the folders of the Dagster step: the Hub's files, scratch, a root."""

    def run(
        self,
        context: StepContext,
        request: WorkerRequest,
        result_type: type[R],
        secrets: Mapping[str, bytes] | None = None,
        resources: RankResources | None = None,
    ) -> LaunchReport[R]:
        """Run one worker on `request` and wait for its result.

        What it prints and reports goes to the step's log, without secrets. However this ends, no
        process of the worker is left. `secrets` are for `worker.session.secrets()`. `resources`
        are what the profile asks for each rank; what they say beyond the launcher's own settings
        counts.

        An asset that calls this must return or yield `MaterializeResult` (and a result for each
        of its checks): Dagster requires it of every step that opens a Pipes session.

        Raises:
            PreflightError: the worker refuses the request before any work.
            StoreUnavailableError: the worker cannot reach the artifact store; a retry may help.
            WorkerKilledError: it was killed, most often for its memory.
            WorkerError: it failed, crashed, ran too long, or gave no result that fits.
        """
        raise NotImplementedError

    def versions(self) -> dict[str, str]:
        """Return the versions of vllm, torch and tensorizer that its workers have.

        Raises:
            WorkerError: they cannot be found out.
        """
        raise NotImplementedError


def result_of(
    what: str, messages: Sequence[object], result_type: type[R], secrets: Sequence[bytes]
) -> R | WorkerFailure | None:
    """As `protocol.parse_reply`, its error with `what` before it and without secrets."""
    try:
        return parse_reply(messages, result_type)
    except WorkerError as error:
        raise WorkerError(redact(f"{what}: {error}", secrets)) from None


def failed(
    what: str, failure: WorkerFailure, lines: Sequence[LogLine], secrets: Sequence[bytes]
) -> Exception:
    """What a launcher raises for a worker's failure. `lines` are the last that it printed."""
    message = redact(f"{what}: {failure.message}", secrets)
    if failure.kind == "preflight":
        return PreflightError(message)
    if failure.kind == "input":
        return WorkerError(message)
    if failure.kind == "busy":
        return WorkerBusyError(message)
    if failure.kind == "unavailable":
        return StoreUnavailableError(message)
    errors = [line.text for line in lines if line.level >= logging.ERROR]
    if failure.traceback is not None and errors:
        message += "\nLast errors in its log:\n" + "\n".join(errors[-_LAST_ERRORS:])
    return WorkerError(message)


def signal_of(code: int) -> signal.Signals | None:
    """The signal of an exit code: negative, or 128 and more where a shell or handler spoke."""
    try:
        return signal.Signals(-code if code < 0 else code - 128)
    except ValueError:
        return None


def last_lines(lines: Sequence[LogLine]) -> str:
    """The end of a message about a worker that left no result."""
    if not lines:
        return "It printed nothing."
    return "Its last lines:\n" + "\n".join(line.text for line in lines)
