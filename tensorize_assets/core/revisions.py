"""Which revisions are followed on the Hub, and what was last heard of each.

A revision's *fingerprint* is a hash of the files that a build is made of, without documentation: a
commit that leaves it as it was starts nothing.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from tensorize_assets.core import hub, jsonio, local_adapter
from tensorize_assets.core.catalog import Catalog, Profile
from tensorize_assets.core.catalog_automation import RevisionWatch
from tensorize_assets.core.errors import HubError, HubUnavailableError
from tensorize_assets.core.hub_access import HubAccess
from tensorize_assets.core.hub_files import RevisionListing
from tensorize_assets.core.printable import printable

# As many connections as the Hub's client keeps open.
_AT_ONCE = 20
# A Hub that is down shows by these; the others are not asked then.
_FEW = 4
# Far below a tick's deadline, so that a Hub that hangs leaves time for the rest of the tick.
_TIMEOUT_S = 10.0

_FIRST_PAUSE_S = 30.0
_LONGEST_PAUSE_S = 3600.0
_FIRST_PAUSE_OF_ALL_S = 10.0
_LONGEST_PAUSE_OF_ALL_S = 300.0
_LONGEST_RETRY_AFTER_S = 86_400.0

_DOCUMENTATION = ("README", "LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
_COMMIT = re.compile("[0-9a-f]{40}")

THE_HUB = "the Hub"
"""What stands in the place of a revision's name when no revision can be read."""

Seconds = Annotated[float, Field(ge=0)]


class Followed(NamedTuple):
    """A revision of a model's or an adapter's repo."""

    kind: Literal["model", "adapter"]
    repo: str
    revision: str

    @property
    def name(self) -> str:
        """What it is called in states and messages."""
        name = f"{self.repo}@{self.revision}"
        return name if self.kind == "model" else f"adapter {name}"


class Watch(jsonio.Record):
    """What was last heard of a revision; times are seconds since 1970.

    `failures` are those in a row, `reason` is the last one's. `not_before`: the Hub wants not to be
    asked sooner.
    """

    commit: jsonio.Commit | None = None
    fingerprint: str | None = None
    asked: Seconds = 0
    next_try: Seconds = 0
    not_before: Seconds = 0
    failures: Annotated[int, Field(ge=0)] = 0
    reason: str | None = None


class Trouble(jsonio.Record):
    """The Hub as a whole does not answer: how often in a row, and when it is tried again."""

    failures: Annotated[int, Field(ge=1)]
    next_try: Seconds
    reason: str


class Looked(NamedTuple):
    """What a look at the Hub gave. `lines` say what is new; `asked` counts requests."""

    watches: dict[str, Watch]
    trouble: Trouble | None
    lines: tuple[str, ...]
    asked: int


class _Heard(NamedTuple):
    commit: str
    fingerprint: str


def followed_by(model: str, profile: Profile) -> tuple[Followed, ...]:
    """The revisions that a profile follows, the model's first; none for a pinned one."""
    if profile.track == "pin":
        return ()
    return (
        Followed("model", model, profile.revision),
        *(
            Followed("adapter", adapter.repo, adapter.revision)
            for adapter in profile.adapters
            if not local_adapter.is_local(adapter.repo)
        ),
    )


def followed(catalog: Catalog) -> dict[str, Followed]:
    """Every revision that a profile of the catalog follows, once, by its name."""
    return {
        one.name: one
        for model, entry in catalog.models.items()
        for profile in entry.profiles.values()
        for one in followed_by(model, profile)
    }


def fingerprint(listing: RevisionListing) -> str:
    """A hash of the paths and contents that a build is made of: 16 hex digits."""
    hasher = hashlib.sha256()
    for path, blob in sorted((file.path, file.blob) for file in listing.files):
        name = path.rpartition("/")[2]
        if not (name.endswith(".md") or name.startswith(_DOCUMENTATION)):
            hasher.update(f"{path}\0{blob}\0".encode(errors="surrogatepass"))
    return hasher.hexdigest()[:16]


def hinted(
    watches: Mapping[str, Watch], wanted: Iterable[Followed], repos: Collection[str]
) -> dict[str, Watch]:
    """The watches, with those of `repos` due at once.

    Not before the Hub allows it, where it has said when.
    """
    now_due = {
        one.name: watches[one.name].model_copy(update={"asked": 0.0, "next_try": 0.0})
        for one in wanted
        if one.repo in repos and one.name in watches
    }
    return {**watches, **now_due}


def look(
    access: HubAccess,
    wanted: Mapping[str, Followed],
    watches: Mapping[str, Watch],
    trouble: Trouble | None,
    settings: RevisionWatch,
    now: float,
    deadline: float,
) -> Looked:
    """Ask the Hub for what is due, one request each, until `deadline` (of time.monotonic()).

    What it refuses is backed off from, alone. What was not asked in time stays due, and comes
    first next time. Watches of what is not `wanted` any more are left out.
    """
    current = {name: watches.get(name, Watch()) for name in wanted}
    if trouble is not None and now < trouble.next_try:
        return Looked(current, trouble, (), 0)
    due = _due(wanted, current, settings.every_seconds, now)
    few, rest = due[:_FEW], due[_FEW:]
    pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="hub")
    try:
        answers = _ask(pool, access, few, deadline)
        if rest and not any(current[one.name].failures for one in few):
            down = [one for one in answers.values() if isinstance(one, HubUnavailableError)]
            if len(down) == len(few):
                trouble = _worse(trouble, down, now)
                line = (
                    f"{THE_HUB} does not answer: {trouble.reason}; asked again in "
                    f"{trouble.next_try - now:.0f} s, for the {len(due)} revisions that are due"
                )
                return Looked(current, trouble, (line,), len(few))
        answers |= _ask(pool, access, rest, deadline)
    finally:
        # A request that hangs ends by its own time limit.
        pool.shutdown(wait=False, cancel_futures=True)
    lines: list[str] = []
    for one, answer in answers.items():
        before = current[one.name]
        if isinstance(answer, HubError):
            after = _refused(before, answer, settings.every_seconds, now)
            pause = max(after.next_try, after.not_before) - now
            lines.append(
                f"{one.name}: {after.reason}; asked again in {pause:.0f} s "
                f"({after.failures} failures in a row)"
            )
        else:
            after = Watch(commit=answer.commit, fingerprint=answer.fingerprint, asked=now)
            lines += _news(one.name, before, after)
        current[one.name] = after
    if len(answers) < len(due):
        lines.append(f"{len(due) - len(answers)} revisions were not answered for in time")
    return Looked(current, None, tuple(lines), len(answers))


def unreadable(
    watches: Mapping[str, Watch], trouble: Trouble | None, alert_after: int
) -> dict[str, str]:
    """Why, of each revision that failed `alert_after` times in a row or more."""
    found = {
        name: watch.reason or ""
        for name, watch in sorted(watches.items())
        if watch.failures >= alert_after
    }
    if trouble is not None and trouble.failures >= alert_after:
        return {THE_HUB: trouble.reason, **found}
    return found


def _due(
    wanted: Mapping[str, Followed], watches: Mapping[str, Watch], every: float, now: float
) -> list[Followed]:
    found = [
        one for name, one in wanted.items() if _is_due(watches[name], one.revision, every, now)
    ]
    # Those that answered last time first, so that what is always refused delays nobody.
    return sorted(found, key=lambda one: (watches[one.name].failures > 0, watches[one.name].asked))


def _is_due(watch: Watch, revision: str, every: float, now: float) -> bool:
    if _COMMIT.fullmatch(revision) and watch.fingerprint is not None:
        return False  # a commit does not move
    return now >= max(watch.next_try or watch.asked + every, watch.not_before)


def _ask(
    pool: ThreadPoolExecutor, access: HubAccess, wanted: Sequence[Followed], deadline: float
) -> dict[Followed, _Heard | HubError]:
    futures = {pool.submit(_one, access, one): one for one in wanted}
    done, _ = wait(futures, timeout=max(0.0, deadline - time.monotonic()))
    return {one: future.result() for future, one in futures.items() if future in done}


def _one(access: HubAccess, wanted: Followed) -> _Heard | HubError:
    find = hub.resolve if wanted.kind == "model" else hub.resolve_adapter
    try:
        listing = find(access, wanted.repo, wanted.revision, _TIMEOUT_S)
        return _Heard(listing.commit, fingerprint(listing))
    except HubError as error:
        return error
    except Exception as error:  # noqa: BLE001 - one strange answer must not stop all others
        return HubError(f"the Hub's answer cannot be used ({type(error).__name__})")


def _refused(watch: Watch, error: HubError, every: float, now: float) -> Watch:
    failures = watch.failures + 1
    longest = max(_LONGEST_PAUSE_S, every)
    after = _retry_after(error)
    return watch.model_copy(
        update={
            "asked": now,
            "next_try": now + min(longest, _FIRST_PAUSE_S * 2.0 ** min(failures - 1, 20)),
            "not_before": now + after if after else 0.0,
            "failures": failures,
            "reason": printable(str(error)),
        }
    )


def _retry_after(error: HubError) -> float:
    said = error.retry_after_s if isinstance(error, HubUnavailableError) else None
    return min(said or 0.0, _LONGEST_RETRY_AFTER_S)


def _worse(trouble: Trouble | None, errors: Sequence[HubError], now: float) -> Trouble:
    failures = trouble.failures + 1 if trouble else 1
    pause = min(_LONGEST_PAUSE_OF_ALL_S, _FIRST_PAUSE_OF_ALL_S * 2.0 ** min(failures - 1, 20))
    return Trouble(
        failures=failures,
        next_try=now + max(pause, *map(_retry_after, errors)),
        reason=printable(str(errors[0])),
    )


def _news(name: str, before: Watch, after: Watch) -> list[str]:
    lines: list[str] = []
    if before.failures:
        lines.append(f"{name}: can be read again, after {before.failures} failures")
    if before.commit not in (None, after.commit) and before.fingerprint == after.fingerprint:
        lines.append(
            f"{name}: commit {after.commit} changes no file that a build is made of (only "
            "documentation, or files that are not loaded); nothing to build"
        )
    return lines
