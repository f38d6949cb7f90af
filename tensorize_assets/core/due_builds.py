"""Which builds are due: of what moved on the Hub, of what is new, and of what failed.

Of each (model, suffix) it is kept for which fingerprints a run was requested last. Where they
differ from what was heard since, one is due; where the run failed, another attempt after a while.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from tensorize_assets.core import jsonio, local_adapter
from tensorize_assets.core import wanted as builds
from tensorize_assets.core.build import build_id
from tensorize_assets.core.catalog import Catalog, Profile, to_partition_key
from tensorize_assets.core.errors import StoreUnavailableError, TensorizeAssetsError
from tensorize_assets.core.revisions import Followed, Watch, followed_by

_ATTEMPTS = 5
_FIRST_PAUSE_S = 600.0
_LONGEST_PAUSE_S = 6 * 3600.0
_CHANNELS_AT_ONCE = 16

_PINNED = "pinned"
_UNTIL = "it is requested again when the model, an adapter or the profile changes"

Versions = Callable[[], Mapping[str, str]]
"""Gives the versions of vllm, torch and tensorizer."""
ReadPublished = Callable[[str, str], builds.Published | None]
"""Gives what a model's suffix has published."""

RunState = Literal["under way", "succeeded", "failed", "refused", "canceled"]
"""How a run stands. Refused: its reload compared otherwise than it must, which no retry changes."""


class Attempt(jsonio.Record):
    """The run that was requested last of a pair, until one succeeds.

    `made_of` is a hash of the profile and the tools. `found`: the run was seen. `next_try` (seconds
    since 1970): it failed, and is due again then. `stopped`: it is not, until something changes.
    """

    build_id: str
    made_of: str
    number: Annotated[int, Field(ge=1)] = 1
    found: bool = False
    next_try: Annotated[float, Field(ge=0)] | None = None
    stopped: bool = False


class Pair(jsonio.Record):
    """What was decided last of a model and suffix.

    `inputs` is a hash of what it follows. `observation` grows with each change of that, by the
    clock, so that no run key is ever used twice, also by a sensor that has lost its state.
    """

    inputs: str
    observation: Annotated[int, Field(ge=0)]
    attempt: Attempt | None = None


class Request(NamedTuple):
    """A run to request. `commit` is the model's; None for a pinned one, which its run resolves."""

    model: str
    suffix: str
    commit: str | None
    run_key: str


class Decided(NamedTuple):
    """What is to be requested, and what to keep when it was.

    `store_down`: why what is published could not be read; it is better left alone for a while.
    """

    pairs: dict[str, Pair]
    requests: tuple[Request, ...]
    lines: tuple[str, ...]
    store_down: str | None = None


class _Candidate(NamedTuple):
    model: str
    suffix: str
    profile: Profile
    inputs: str
    before: Pair | None

    @property
    def key(self) -> str:
        return pair_key(self.model, self.suffix)


def pair_key(model: str, suffix: str) -> str:
    """What a pair is called in states: its partition's key."""
    return f"{to_partition_key(model)}|{suffix}"


def under_way(pairs: Mapping[str, Pair]) -> dict[str, str]:
    """The run key of each pair whose last attempt is not known to have ended."""
    return {
        key: _run_key(key, pair.observation, pair.attempt)
        for key, pair in pairs.items()
        if pair.attempt and not pair.attempt.stopped and pair.attempt.next_try is None
    }


def follow_up(
    pairs: Mapping[str, Pair], runs: Mapping[str, RunState], now: float
) -> tuple[dict[str, Pair], tuple[str, ...]]:
    """The pairs after what became of their runs, by run key, and a line for each that failed."""
    after = dict(pairs)
    lines: list[str] = []
    for key, run_key in under_way(pairs).items():
        pair = pairs[key]
        attempt = pair.attempt
        state = runs.get(run_key)
        if attempt is None or (state is None and not attempt.found):
            continue  # whoever was to start it died before: `decide` asks for the same run again
        if state == "succeeded":
            after[key] = pair.model_copy(update={"attempt": None})
        elif state == "under way":
            if not attempt.found:
                after[key] = _with(pair, attempt, found=True)
        elif state in ("refused", "canceled"):
            after[key] = _with(pair, attempt, found=True, stopped=True)
            how = "did not pass its reload check" if state == "refused" else "was cancelled"
            lines.append(f"{key}: build {attempt.build_id} {how}; {_UNTIL}")
        elif attempt.number >= _ATTEMPTS:
            after[key] = _with(pair, attempt, found=True, stopped=True)
            lines.append(
                f"{key}: build {attempt.build_id} failed {attempt.number} times and is given up; "
                f"{_UNTIL}"
            )
        else:
            pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (attempt.number - 1))
            after[key] = _with(pair, attempt, found=True, next_try=now + pause)
            how = "is gone" if state is None else "failed"
            lines.append(
                f"{key}: the run of build {attempt.build_id} {how}; attempt {attempt.number + 1} "
                f"of {_ATTEMPTS} in {pause / 60:.0f} minutes"
            )
    return after, tuple(lines)


def decide(
    catalog: Catalog,
    watches: Mapping[str, Watch],
    pairs: Mapping[str, Pair],
    versions: Versions,
    open_store: Callable[[], ReadPublished] | None,
    now: float,
    limit: int,
    deadline: float,
) -> Decided:
    """The builds that are due, `limit` at most: what moved, then what failed, then what is new.

    What is new is compared with what is published, until `deadline` (of time.monotonic()); with
    `open_store` None it waits. What was not come to stays due. Pairs that are not in the catalog
    any more are left out.

    Raises whatever `versions` raises. `open_store`, which is called where something is new, and
    what it returns may raise TensorizeAssetsError.
    """
    versions = functools.cache(versions)
    after: dict[str, Pair] = {}
    moved: list[_Candidate] = []
    again: list[_Candidate] = []
    new: list[_Candidate] = []
    for model, suffix in catalog.pairs():
        profile = catalog.profile(model, suffix)
        key = pair_key(model, suffix)
        before = pairs.get(key)
        if before is not None:
            after[key] = before
        inputs = _inputs(model, profile, watches)
        if inputs is None:
            continue  # nothing was heard yet of one of its repos
        candidate = _Candidate(model, suffix, profile, inputs, before)
        if before is None:
            new.append(candidate)
        elif before.inputs != inputs:
            moved.append(candidate)
        elif before.attempt is not None:
            again.append(candidate)
    requests: list[Request] = []
    lines: list[str] = []
    store_down: str | None = None

    def request(one: _Candidate, why: str, again: Attempt | None = None) -> None:
        commit, build = _build(one, watches, versions())
        if one.before is not None and again is not None:
            observation = one.before.observation
            attempt = again
        else:
            observation = max(int(now), one.before.observation + 1 if one.before else 0)
            attempt = Attempt(build_id=build, made_of=_made_of(one.profile, versions()))
        after[one.key] = Pair(inputs=one.inputs, observation=observation, attempt=attempt)
        run_key = _run_key(one.key, observation, attempt)
        requests.append(Request(one.model, one.suffix, commit, run_key))
        what = f"of commit {commit}" if commit else "of the pinned revision"
        lines.append(f"{one.key}: {why}: build {attempt.build_id} {what} requested")

    for one in moved:
        if len(requests) < limit:
            request(one, "what it follows has moved")
    for one in again:
        if len(requests) >= limit or one.before is None or one.before.attempt is None:
            continue
        last = one.before.attempt
        if not last.stopped and last.next_try is None:
            if not last.found:
                request(one, "the run was never started", last)
        elif last.made_of != _made_of(one.profile, versions()):
            request(one, "its profile, or a tool, changed since it failed")
        elif last.next_try is not None and now >= last.next_try:
            number = last.number + 1
            following = last.model_copy(update={"number": number, "found": False, "next_try": None})
            request(one, f"attempt {number} of {_ATTEMPTS}", following)
    if open_store is not None and new and len(requests) < limit:
        for one, found in _read(new, open_store, deadline):
            if one is None or isinstance(found, StoreUnavailableError):
                store_down = f"what is published cannot be read now: {found}"
                lines.append(store_down)
                break
            if len(requests) >= limit:
                break
            if found is None:
                request(one, "nothing is published")
            elif isinstance(found, TensorizeAssetsError):
                # Its run will say the same, where a person looks for it.
                request(one, f"what is published cannot be used ({found})")
            elif _is_of(found, one, watches, versions):
                after[one.key] = Pair(inputs=one.inputs, observation=int(now))
            else:
                request(one, f"published is build {found.build_id}, of other inputs")
    return Decided(after, tuple(requests), tuple(lines), store_down)


def _with(pair: Pair, attempt: Attempt, **changes: object) -> Pair:
    return pair.model_copy(update={"attempt": attempt.model_copy(update=changes)})


def _run_key(key: str, observation: int, attempt: Attempt) -> str:
    return f"{key}|{attempt.build_id}|{observation}|{attempt.number}"


def _inputs(model: str, profile: Profile, watches: Mapping[str, Watch]) -> str | None:
    """A hash of all that decides which commits a build is of; None while part is unknown."""
    adapters = sorted((a.name, a.repo, a.revision) for a in profile.adapters)
    if profile.track == "pin":
        return f"{_PINNED} {_hash([profile.revision, adapters])}"
    known: list[tuple[str, str]] = []
    for one, name in _roles(model, profile):
        watch = watches.get(one.name)
        if watch is None or watch.fingerprint is None:
            return None
        known.append((name, watch.fingerprint))
    local = [adapter for adapter in adapters if local_adapter.is_local(adapter[1])]
    return _hash([sorted(known), local])


def _roles(model: str, profile: Profile) -> Iterator[tuple[Followed, str]]:
    """What the profile follows, and as what: the name of an adapter, nothing for the model."""
    names = [a.name for a in profile.adapters if not local_adapter.is_local(a.repo)]
    yield from zip(followed_by(model, profile), ["", *names], strict=True)


def _build(
    one: _Candidate, watches: Mapping[str, Watch], versions: Mapping[str, str]
) -> tuple[str | None, str]:
    """The model's commit, and the id of the build of it and of its adapters' commits."""
    if one.profile.track == "pin":
        return None, _PINNED
    commits = {
        name: watches[role.name].commit or "" for role, name in _roles(one.model, one.profile)
    }
    local = {a.name: a.revision for a in one.profile.adapters if local_adapter.is_local(a.repo)}
    commit = commits.pop("")
    made_of = builds.inputs(one.model, one.profile, commit, {**commits, **local}, versions)
    return commit, build_id(made_of)


def _is_of(
    found: builds.Published, one: _Candidate, watches: Mapping[str, Watch], versions: Versions
) -> bool:
    """Whether what is published is what would be built now."""
    if one.profile.track == "pin":
        return True  # built once; a changed profile is the schedule's business
    if found.inputs is None:
        return False
    return build_id(found.inputs) == _build(one, watches, versions())[1]


def _read(
    new: Sequence[_Candidate], open_store: Callable[[], ReadPublished], deadline: float
) -> Iterator[tuple[_Candidate | None, builds.Published | TensorizeAssetsError | None]]:
    """What each has published, in order, a batch of them at once, until the deadline.

    No candidate beside an error: the store cannot be opened.
    """
    try:
        published = open_store()
    except TensorizeAssetsError as error:
        yield None, error
        return

    def read(one: _Candidate) -> builds.Published | TensorizeAssetsError | None:
        try:
            return published(one.model, one.suffix)
        except TensorizeAssetsError as error:
            return error

    pool = ThreadPoolExecutor(_CHANNELS_AT_ONCE, thread_name_prefix="channels")
    try:
        for at in range(0, len(new), 2 * _CHANNELS_AT_ONCE):
            batch = new[at : at + 2 * _CHANNELS_AT_ONCE]
            futures = [pool.submit(read, one) for one in batch]
            _, late = wait(futures, timeout=max(0.0, deadline - time.monotonic()))
            for one, future in zip(batch, futures, strict=True):
                if future not in late:
                    yield one, future.result()
            if late:
                return
    finally:
        # A store that hangs ends by its own time limit.
        pool.shutdown(wait=False, cancel_futures=True)


def _made_of(profile: Profile, versions: Mapping[str, str]) -> str:
    return _hash([profile.model_dump(mode="json"), dict(versions)])


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
