"""What crosses between orchestration and a worker: a request, a result or failure, log lines.

The request goes as the Pipes extra `request`; `{"result": …}` or `{"failure": …}` comes back as
one custom Pipes message. What the worker's libraries print is read line by line.
"""

from __future__ import annotations

import base64
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple, TypeVar, cast

from pydantic import JsonValue, ValidationError

from tensorize_assets.core.errors import WorkerError
from tensorize_assets.core.jsonio import Record, describe

PROTOCOL_VERSION: Final = 1
"""Goes up when a request or a result changes its meaning or fields; apart from the package's."""

REQUEST_EXTRA: Final = "request"
SEALED_EXTRA: Final = "sealed"
"""The Pipes extra with the worker's secrets, as `handover.seal` makes it."""
PARENT_VARIABLE: Final = "TENSORIZE_ASSETS_PARENT_PID"
"""The process without which the worker has nobody to work for."""
LAUNCH_VARIABLE: Final = "TENSORIZE_ASSETS_LAUNCH"
"""Inherited by every process of one launch, so that none is lost when its parent dies."""
SECRETS_VARIABLE: Final = "TENSORIZE_ASSETS_SECRETS_FD"
"""The inherited descriptor from which the worker reads its secrets, once."""


class WorkerRequest(Record):
    """Base of what orchestration asks for. `task` names the function that answers."""

    protocol: int = PROTOCOL_VERSION
    # Every subclass makes it a Literal, which type checkers refuse where the base says str.
    task: Any


class WorkerResult(Record):
    """Base of what a task gives back."""


class WorkerFailure(Record):
    """Why there is no result.

    `preflight`: refused before any work; `input`: the request cannot be understood; `busy`: another
    worker is at it; `unavailable`: the store, or the way to it, is in trouble; `failed`: the work
    went wrong. Only what nobody foresaw carries a traceback.
    """

    kind: Literal["preflight", "input", "busy", "unavailable", "failed"]
    message: str
    traceback: str | None = None


R = TypeVar("R", bound=WorkerResult)


def describe_request(request: WorkerRequest) -> str:
    """Return what a message calls the work: its task and, where it has them, model and suffix."""
    subject = [str(getattr(request, name, "")) for name in ("model", "suffix")]
    return " ".join([request.task, *filter(None, subject)])


def parse_request(payload: object, tasks: Mapping[str, type[WorkerRequest]]) -> WorkerRequest:
    """Return the request in `payload`.

    Raises WorkerError for another protocol version (before looking at anything else, since
    fields differ between versions), an unknown task, and every wrong field.
    """
    if not isinstance(payload, dict):
        raise WorkerError(
            f"the worker was handed no request (expected an object, got {type(payload).__name__})"
        )
    fields = cast("dict[str, object]", payload)
    if fields.get("protocol") != PROTOCOL_VERSION:
        raise WorkerError(
            f"the worker speaks protocol {PROTOCOL_VERSION} and was asked in protocol "
            f"{fields.get('protocol')!r}: install the same version of tensorize_assets for Dagster "
            "and for the launcher's `python`"
        )
    task = fields.get("task")
    if not isinstance(task, str) or task not in tasks:
        raise WorkerError(f"the worker has no task {task!r}; it has {', '.join(sorted(tasks))}")
    try:
        return tasks[task].model_validate(fields)
    except ValidationError as error:
        raise WorkerError(f"the request for task {task!r} is wrong: {describe(error)}") from None


def encode_result(result: WorkerResult) -> dict[str, JsonValue]:
    """Return the message that carries `result`."""
    return {"result": result.model_dump(mode="json")}


def encode_failure(failure: WorkerFailure) -> dict[str, JsonValue]:
    """Return the message that carries `failure`."""
    return {"failure": failure.model_dump(mode="json")}


def parse_reply(messages: Sequence[object], result_type: type[R]) -> R | WorkerFailure | None:
    """Return what a worker answered, None if it did not.

    Raises WorkerError for more than one answer, an answer that is neither, and wrong fields.
    """
    if not messages:
        return None
    if len(messages) != 1 or not isinstance(messages[0], dict):
        raise WorkerError(
            f"the worker sent {len(messages)} messages where one result or failure is due; only "
            "its own entry point may report"
        )
    reply = cast("dict[str, object]", messages[0])
    kind, fields = next(iter(reply.items()), ("", None))
    try:
        if kind == "result":
            return result_type.model_validate(fields)
        if kind == "failure":
            return WorkerFailure.model_validate(fields)
    except ValidationError as error:
        name = result_type.__name__ if kind == "result" else "failure"
        raise WorkerError(
            f"the worker's {name} is wrong: {describe(error)}; install the same version of "
            "tensorize_assets for Dagster and for the launcher's `python`"
        ) from None
    raise WorkerError(f"the worker sent {kind!r} where a result or failure is due")


class LogLine(NamedTuple):
    """A line that a worker printed. `level` is the one it has in Dagster's log."""

    level: int
    text: str


# vLLM's and our own lines: "(Worker_TP1 pid=123) INFO 11-29 14:00:00 [file.py:12] message".
_SOURCE = re.compile(r"\((?P<name>[^()\s]+) pid=\d+\) ?")
_RANK = re.compile(r"TP(\d+)")
_LEVEL = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b[\s:]\s*(?:\d\d-\d\d \d\d:\d\d:\d\d )?")
_PYTHON_WARNING = re.compile(r"\S+:\d+: \w*Warning: ")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TRACEBACK = "Traceback (most recent call last):"
# A load is hundreds of lines that matter only when something goes wrong: one level down.
_LEVELS = {
    "DEBUG": logging.DEBUG,
    "INFO": logging.DEBUG,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "CRITICAL": logging.ERROR,
}


def read_line(line: str, in_traceback: set[str]) -> LogLine:
    """Return a printed line with its level, and `rank N: ` before it where the line says so.

    `in_traceback` is kept by the caller for one stream: the sources that are printing one.
    """
    text = _COLOUR.sub("", line).rstrip()
    prefix = _SOURCE.match(text)
    source = prefix["name"] if prefix else ""
    text = text[prefix.end() :] if prefix else text
    level, text = _level(text, source, in_traceback)
    rank = _RANK.search(source)
    return LogLine(level, f"rank {rank[1]}: {text}" if rank else text)


def _level(text: str, source: str, in_traceback: set[str]) -> tuple[int, str]:
    """The line's level, and the line without the level and time that Dagster's log has anyway."""
    if text.startswith(_TRACEBACK):
        in_traceback.add(source)
        return logging.ERROR, text
    if source in in_traceback:
        # Frames are indented; the first line that is not names the exception and ends it.
        if text and not text[0].isspace():
            in_traceback.discard(source)
        return logging.ERROR, text
    named = _LEVEL.match(text)
    if named:
        return _LEVELS[named[1]], text[named.end() :]
    return (logging.WARNING if _PYTHON_WARNING.match(text) else logging.DEBUG), text


_HIDDEN = "***"
_SHORTEST_SECRET = 4
_SECRET_PATTERNS = (
    # Hub tokens.
    re.compile(r"()\b(?:hf|api_org)_[A-Za-z0-9]{20,}"),
    # What signs a URL (AWS v4 and v2, Google, Azure), or is handed on in one.
    re.compile(
        r"(?i)([?&](?:X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)|Signature"
        r"|AWSAccessKeyId|sig|token)=)[^&\s'\"<>]+"
    ),
    # User and password in a URL.
    re.compile(r"(?i)(\b[a-z][a-z0-9+.-]*://)[^/\s@'\"]+(?=@)"),
    re.compile(r"(?i)(\bauthorization['\"]?\s*[:=]\s*['\"]?(?:bearer |basic )?)[^\s'\",}]+"),
    # As configurations print it: vLLM logs its arguments.
    re.compile(
        r"(?i)(secret_?(?:access_?)?key['\"]?\s*[:=]\s*|session_?token['\"]?\s*[:=]\s*)"
        r"['\"]?[^\s'\",})]+"
    ),
)


def redact(text: str, secrets: Sequence[bytes] = ()) -> str:
    """Return `text` without `secrets` (as text, hex or base64) and what looks like a secret."""
    for spelling in sorted({s for secret in secrets for s in _spellings(secret)}, key=len)[::-1]:
        text = text.replace(spelling, _HIDDEN)
    for pattern in _SECRET_PATTERNS:
        text = pattern.sub(rf"\g<1>{_HIDDEN}", text)
    return text


def _spellings(secret: bytes) -> set[str]:
    found = {secret.hex(), secret.hex().upper(), repr(secret)[2:-1]}
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        # Unpadded, it also matches the padded form.
        found.add(encode(secret).decode().rstrip("="))
    with suppress(UnicodeDecodeError):
        # A key file has several lines, and is printed as such.
        found.update(secret.decode().splitlines())
    return {spelling for spelling in found if len(spelling) >= _SHORTEST_SECRET}


def format_bytes(count: float) -> str:
    """Return `count` bytes in decimal units, as disks and links are labelled: `310 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.1f} {unit}" if unit == "GB" and count < 100 else f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
