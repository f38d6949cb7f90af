"""Failures as messages to a Slack-compatible webhook: once per cause, and again when it is over.

What failed is noted in a book of open causes, and the book says which messages are due. A message
that was accepted is ticked off there; one that was not stays due, so that nothing is lost and
nothing is said twice. What is over is kept for an hour: what comes and goes is no news each time.
The webhook's URL is a secret: it is in no error, no log and no message.
"""

from __future__ import annotations

import hashlib
import http.client
import ipaddress
import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import Field

from tensorize_assets.core.errors import CatalogError
from tensorize_assets.core.jsonio import Record
from tensorize_assets.core.printable import printable
from tensorize_assets.core.retry_after import retry_after
from tensorize_assets.core.secret_settings import ALERT_WEBHOOK, secret_setting

DEFAULT_UI = "http://127.0.0.1:3000"
UI_VARIABLE = "DAGSTER_WEBSERVER_URL"

MESSAGES_AT_ONCE = 20
"""Failures that are told one by one at a time; of the rest it is told how many there are."""

MOST_CAUSES = 1000
"""Causes that are kept at most: what is open is in the sensor's cursor."""

# Not quite a day: what fails each night is told each night.
REMIND_AFTER_S = 23 * 60 * 60.0
QUIET_S = 60 * 60.0
"""What fails again this soon after it was over is no news, as long as it does not go on so long."""

_FORGET_AFTER_S = 30 * 24 * 60 * 60.0
_TIMEOUT_S = 5.0
_MAX_WAIT_S = 60 * 60.0
_MAX_ERROR = 400
# Slack refuses a section of more than 3,000 characters.
_MAX_TEXT = 2900
_LISTED = 15

# Names, ids, versions, sizes and times: every word with a digit in it.
_CHANGING = re.compile(r"[\w.:+-]*\d[\w.:+-]*")

Kind = Literal["step", "run", "check", "tick"]


class Failure(NamedTuple):
    """Something that failed just now.

    `subject` is whose it is, such as `facebook/opt-125m v1`, and may be empty; `what` is the step,
    the job, the check (`asset.check`) or the sensor; `link` a page of the UI, by its path.
    """

    kind: Kind
    subject: str
    what: str
    error: str
    link: str


class Outcome(NamedTuple):
    """What failed in something that ended; and the (kind, subject, what) that are well by it."""

    failures: Sequence[Failure]
    passed: Set[tuple[str, str, str]]


class Cause(Record):
    """What is wrong, from its first failure until an hour after it is over and that was told.

    Times are in seconds since 1970. `count` is how often it failed since the last message of it;
    `told` is when its failure was told, None as long as it was not. `solved`: it is over. `over`:
    when it was over last, where the last message said that it is; None otherwise.
    """

    kind: Kind
    subject: str
    what: str
    error: str
    link: str
    last: float
    count: int = Field(ge=0)
    told: float | None = None
    solved: bool = False
    over: float | None = None


class Book(Record):
    """Every cause, by its key; `missed` is how many more there were than it holds."""

    causes: dict[str, Cause] = Field(default={}, max_length=MOST_CAUSES)
    missed: int = Field(default=0, ge=0)


class Message(NamedTuple):
    """A message to send, the keys of the causes that it tells of, and how many more it counts."""

    body: Mapping[str, Any]
    keys: tuple[str, ...]
    missed: int = 0


class Answer(NamedTuple):
    """Whether a message was accepted; if not, why, and how many seconds to wait before another."""

    accepted: bool
    said: str
    wait_s: float = 0.0


def webhook_url(environ: Mapping[str, str]) -> str | None:
    """Return the webhook's URL from the environment, None when none is set.

    Raises CatalogError, which does not quote it, for one that is neither https nor http to this
    machine, or that holds a user or blanks.
    """
    url = secret_setting(ALERT_WEBHOOK, environ)
    if url is None:
        return None
    wrong = CatalogError(
        f"{ALERT_WEBHOOK} must be an https:// URL (http:// only to this machine) without user, "
        "password and blanks; it is not shown here, since it is a secret"
    )
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise wrong from None
    if not host or not url.isascii() or not url.isprintable() or " " in url or "@" in parts.netloc:
        raise wrong
    if parts.scheme != "https" and not (parts.scheme == "http" and _is_loopback(host)):
        raise wrong
    return url


def ui_url(environ: Mapping[str, str]) -> str:
    """Return where people open the UI, without a slash at the end."""
    return (environ.get(UI_VARIABLE, "").strip() or DEFAULT_UI).rstrip("/")


def cause_key(failure: Failure) -> str:
    """Return the name of the failure's cause: the same for the next failure of the same kind.

    Of the error counts its first line, without words that have digits in them.
    """
    first = next(iter(failure.error.strip().splitlines()), "")[:_MAX_ERROR]
    parts = (failure.kind, failure.subject, failure.what, _CHANGING.sub("#", first))
    return hashlib.sha256("\n".join(parts).encode(errors="replace")).hexdigest()[:16]


def note(causes: dict[str, Cause], outcome: Outcome, now: float) -> int:
    """Note what passed among `causes`, then what failed; return how many found no place there."""
    for key, cause in causes.items():
        if (cause.kind, cause.subject, cause.what) in outcome.passed and not cause.solved:
            over = None if cause.over is None else now
            causes[key] = cause.model_copy(update={"solved": True, "over": over})
    return sum(not _note_failure(causes, failure, now) for failure in outcome.failures)


def due(book: Book, ui: str, now: float) -> list[Message]:
    """Return the messages to send now, in order; each is to be ticked off with `told`.

    Causes that one page of the UI shows are one message.
    """
    pages: dict[str, list[str]] = {}
    for key, cause in book.causes.items():
        if _is_due(cause, now):
            pages.setdefault(cause.link, []).append(key)
    groups = list(pages.values())
    messages = [
        _message(_failure_text([book.causes[key] for key in keys], ui), keys)
        for keys in groups[:MESSAGES_AT_ONCE]
    ]
    rest = [key for keys in groups[MESSAGES_AT_ONCE:] for key in keys]
    if rest or book.missed:
        causes = [book.causes[key] for key in rest]
        text = _more_text(len(groups[MESSAGES_AT_ONCE:]) + book.missed, causes, ui)
        messages.append(_message(text, rest, book.missed))
    over = [key for key, cause in book.causes.items() if _is_over(cause)]
    if over:
        messages.append(_message(_over_text([book.causes[key] for key in over]), over))
    return messages


def told(book: Book, message: Message, now: float) -> Book:
    """Tick off a message that was accepted."""
    causes = dict(book.causes)
    for key in message.keys:
        cause = causes[key]
        # The reminder counts from when the failure was told, and not from when it was over.
        at = cause.told if _is_over(cause) else now
        over = now if cause.solved else None
        causes[key] = cause.model_copy(update={"told": at, "count": 0, "over": over})
    return Book(causes=causes, missed=book.missed - message.missed)


def forget_old(causes: dict[str, Cause], now: float) -> None:
    """Drop what has been over for an hour, if that was told.

    And what was told and has not failed for 30 days, such as of removed models.
    """
    for key in [
        key
        for key, cause in causes.items()
        if (cause.solved and cause.over is not None and now - cause.over >= QUIET_S)
        or (cause.told is not None and now - cause.last > _FORGET_AFTER_S)
    ]:
        del causes[key]


def send(url: str, body: Mapping[str, Any]) -> Answer:
    """Post one message. Redirects are not followed, and nothing is raised.

    Uses the standard library's client: httpx and urllib3 log URLs, and this one is a secret.
    """
    handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
    if url.startswith("http:"):
        # To this machine, whatever proxy the environment names.
        handlers.append(urllib.request.ProxyHandler({}))
    opener = urllib.request.build_opener(*handlers)
    try:
        request = urllib.request.Request(
            url,
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "User-Agent": "tensorize_assets"},
            method="POST",
        )
        with opener.open(request, timeout=_TIMEOUT_S):
            return Answer(True, "accepted")
    except urllib.error.HTTPError as error:
        with error:
            return _refused(error.code, error.headers.get("Retry-After"))
    except urllib.error.URLError as error:
        return Answer(False, f"cannot be reached: {_reason(error.reason)}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Answer(False, f"cannot be reached: {_reason(error)}")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The place that a redirect names would learn what failed here."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _refused(status: int, wanted: str | None) -> Answer:
    if 300 <= status < 400:
        said = f"answered {status}, a redirect, which is not followed: set the final URL"
    elif status == http.client.TOO_MANY_REQUESTS:
        said = "answered 429: too many messages"
    elif status >= 500:
        said = f"answered {status}: it is in trouble"
    else:
        said = f"answered {status}: it refuses the message; see whether the URL is still valid"
    return Answer(False, said, min(retry_after(wanted) or 0.0, _MAX_WAIT_S))


def _reason(error: object) -> str:
    # Never the whole message: some of the standard library's quote the URL.
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid ({error.verify_message})"
    if isinstance(error, TimeoutError):
        return f"no answer within {_TIMEOUT_S:.0f} s"
    said = error.strerror if isinstance(error, OSError) else None
    return said or type(error).__name__


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _note_failure(causes: dict[str, Cause], failure: Failure, now: float) -> bool:
    key = cause_key(failure)
    known = causes.get(key)
    if known is None and len(causes) >= MOST_CAUSES and not _make_place(causes):
        return False
    causes[key] = Cause(
        kind=failure.kind,
        subject=failure.subject,
        what=failure.what,
        error=_one_line(failure.error),
        link=failure.link,
        last=now,
        count=known.count + 1 if known else 1,
        told=known.told if known else None,
        over=known.over if known else None,
    )
    return True


def _is_due(cause: Cause, now: float) -> bool:
    """Whether its failure is to be told, for the first time or again."""
    if cause.told is None:
        return True
    if not cause.count or _is_over(cause):
        return False
    # The last message said that it is over, and it no longer is.
    lasts = not cause.solved and cause.over is not None and now - cause.over >= QUIET_S
    return lasts or cause.last - cause.told >= REMIND_AFTER_S


def _is_over(cause: Cause) -> bool:
    """Whether it is still to be told that it is over."""
    return cause.solved and cause.told is not None and cause.over is None


def _make_place(causes: dict[str, Cause]) -> bool:
    """Drop the cause that was told of and has been quiet longest, if any was told of."""
    known = [(cause.last, key) for key, cause in causes.items() if cause.told is not None]
    if not known:
        return False
    del causes[min(known)[1]]
    return True


def _one_line(text: str) -> str:
    line = printable(" ".join(text.split())).encode(errors="replace").decode()
    return line if len(line) <= _MAX_ERROR else f"{line[: _MAX_ERROR - 1]}…"


def _escaped(text: str) -> str:
    """Slack reads these three as the start of an entity, a link or a mention."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


_STEP = (
    "Nothing was published by this run. Do what the message says; the build is tried again by "
    "itself, or re-execute the run from its failure."
)
_JOB = "Do what the message says, then launch the job again; its schedule does so too."
_CHECK = (
    "The channel has not moved: what was published is still served. The page shows what was "
    "compared. Other weights need a new commit on the Hub, which builds by itself."
)
_CHECKS = {
    "hub_reachable": "See to the repo's name, its access (`HF_TOKEN`) and the way to the Hub. It "
    "is asked again by itself.",
    "builds_possible": "No commit is built until it is mended; then all that is due is built.",
    "intact": "The job's log names the files. Restore them from a copy, go back with `tensorize "
    "rollback`, or build again.",
}
_TICK = "The page shows the whole error. It is tried again at the next tick."


def _advice(cause: Cause) -> str:
    if cause.kind == "tick":
        return _TICK
    if cause.kind == "check":
        return _CHECKS.get(cause.what.rpartition(".")[2], _CHECK)
    return _STEP if cause.subject else _JOB


def _title(cause: Cause) -> str:
    if cause.kind == "tick":
        return f"{cause.what[:1].upper()}{cause.what[1:]} failed"
    what = "Check failed" if cause.kind == "check" else "Run failed"
    return f"{what}: {cause.subject or cause.what}"


def _failure_text(causes: list[Cause], ui: str) -> str:
    first = next((cause for cause in causes if cause.kind != "check"), causes[0])
    lines = [f"*{_escaped(_title(first))}*"]
    # Checks that fail for one reason, such as a worker that died, are one line.
    errors: dict[tuple[Kind, str], list[Cause]] = {}
    for cause in causes:
        errors.setdefault((cause.kind, cause.error), []).append(cause)
    for (kind, error), alike in errors.items():
        names = ", ".join(cause.what for cause in alike)
        word = {"step": "step ", "run": "job ", "check": "check ", "tick": ""}[kind]
        often = max(cause.count for cause in alike)
        again = any(cause.told is not None for cause in alike)
        still = "again" if any(cause.over is not None for cause in alike) else "still so"
        notes = [
            *([f"{still}, {_times(often)} since the last message"] if again else []),
            *([_times(often)] if often > 1 and not again else []),
            *(["over by now"] if all(cause.solved for cause in alike) else []),
        ]
        note = f" ({'; '.join(notes)})" if notes else ""
        lines.append(f"• {word}{_escaped(names)}{note}: {_escaped(error) or 'no message'}")
    label = "the page in Dagster"
    if first.link.startswith("/runs/"):
        label = f"run {first.link.removeprefix('/runs/')[:8]}"
    lines.append(f"{_link(ui, first.link, label)}: {_advice(first)}")
    return _cut("\n".join(lines[:-1]), lines[-1])


def _more_text(count: int, causes: list[Cause], ui: str) -> str:
    subjects = list(dict.fromkeys(cause.subject or cause.what for cause in causes))
    named = ", ".join(subjects[:_LISTED]) + (", …" if len(subjects) > _LISTED else "")
    line = f"*And {count} more failures*" + (f": {_escaped(named)}" if named else "")
    return _cut(line, _link(ui, "/runs", "all runs"))


def _over_text(causes: list[Cause]) -> str:
    names = list(dict.fromkeys(f"{cause.subject} {cause.what}".strip() for cause in causes))
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return _cut(f"*Recovered*: {_escaped(', '.join(names[:_LISTED]))}{more}", "")


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _link(ui: str, path: str, label: str) -> str:
    # Of the user's own settings, but a `>` or `|` would end the link.
    url = re.sub(r"[<>|\s]", "", f"{ui}{path}").replace("&", "&amp;")
    return f"<{url}|{label}>"


def _cut(text: str, last: str) -> str:
    most = _MAX_TEXT - len(last)
    if len(text) > most:
        # Not in the midst of an escaped character.
        text = re.sub(r"&\w{0,3}$", "", text[:most]) + "…"
    return f"{text}\n{last}" if last else text


def _message(text: str, keys: list[str], missed: int = 0) -> Message:
    # `text` is what a notification shows, and all that some servers of this format read.
    section = {"type": "section", "text": {"type": "mrkdwn", "text": text, "verbatim": True}}
    return Message({"text": text, "blocks": [section]}, tuple(keys), missed)
