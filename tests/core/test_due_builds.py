"""Which builds are requested, once, again, and not at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from tensorize_assets.core import due_builds, wanted
from tensorize_assets.core.build import BuildInputs, build_id
from tensorize_assets.core.catalog import Catalog
from tensorize_assets.core.due_builds import Decided, Pair, RunState
from tensorize_assets.core.errors import SignatureError, StoreError, StoreUnavailableError
from tensorize_assets.core.revisions import Watch
from tensorize_assets.core.wanted import Published

NOW = 1_800_000_000.0
VERSIONS = {"vllm": "0.31.0", "torch": "2.13.0", "tensorizer": "2.10.1"}
MINUTE, HOUR = 60.0, 3600.0


def seen(commit: str, fingerprint: str | None = None) -> Watch:
    return Watch(commit=commit * 40, fingerprint=fingerprint or commit * 16, asked=NOW)


def catalog(**profiles: dict[str, Any]) -> Catalog:
    entries = {suffix: {"reload_device": "cpu", **own} for suffix, own in profiles.items()}
    return Catalog.model_validate(
        {"root": "artifacts", "models": {"org/a": {"profiles": entries or {"v1": {}}}}}
    )


@dataclass
class Fleet:
    """Decisions in a row: what each keeps is where the next begins. Nothing is published."""

    content: Catalog = field(default_factory=lambda: catalog(v1={}))
    watches: dict[str, Watch] = field(default_factory=lambda: {"org/a@main": seen("a")})
    pairs: Mapping[str, Pair] = field(default_factory=dict[str, Pair])
    versions: Mapping[str, str] = field(default_factory=lambda: VERSIONS)
    published: Callable[[str, str], Published | None] = lambda model, suffix: None
    now: float = NOW
    limit: int = 100

    def decide(self, seconds: float = 30.0) -> Decided:
        decided = due_builds.decide(
            self.content,
            self.watches,
            self.pairs,
            lambda: self.versions,
            lambda: self.published,
            self.now,
            self.limit,
            time.monotonic() + seconds,
        )
        self.pairs = decided.pairs
        return decided

    def requested(self) -> list[str]:
        return [request.run_key for request in self.decide().requests]

    def ended(self, state: RunState | None) -> tuple[str, ...]:
        """Let all runs that are under way have this state; None: they are gone."""
        keys = due_builds.under_way(self.pairs).values()
        known: dict[str, RunState] = {} if state is None else dict.fromkeys(keys, state)
        self.pairs, lines = due_builds.follow_up(self.pairs, known, self.now)
        return lines

    def wanted(self, suffix: str = "v1") -> BuildInputs:
        commit = self.watches["org/a@main"].commit or ""
        profile = self.content.profile("org/a", suffix)
        return wanted.inputs("org/a", profile, commit, {}, self.versions)


# What is new


def test_a_pair_that_nobody_has_built_is_requested_once() -> None:
    """Also the next tick asks: it must find that a run was requested."""
    fleet = Fleet(catalog(v1={}, v2={"dtype": "float32"}))
    first = fleet.decide()
    assert [("org/a", "v1", "a" * 40), ("org/a", "v2", "a" * 40)] == [
        (one.model, one.suffix, one.commit) for one in first.requests
    ]
    ids = [build_id(fleet.wanted(suffix)) for suffix in ("v1", "v2")]
    assert [f"org--a|v{n}|{ids[n - 1]}|{NOW:.0f}|1" for n in (1, 2)] == [
        one.run_key for one in first.requests
    ]
    fleet.ended("under way")
    assert [] == fleet.requested()


def test_what_is_published_already_is_not_built_again() -> None:
    """A sensor that has lost its state must not build a thousand models."""
    fleet = Fleet()
    fleet.published = lambda model, suffix: Published("0" * 12, fleet.wanted())
    assert ((), ()) == fleet.decide()[1:3]
    assert {"org--a|v1"} == fleet.pairs.keys()


@pytest.mark.parametrize("changes", [{"commit": "b" * 40}, {"vllm": "0.30.0"}, None])
def test_what_is_published_of_other_inputs_is_built(changes: dict[str, str] | None) -> None:
    """Also where the published build's manifest is gone."""
    fleet = Fleet()
    other = None if changes is None else fleet.wanted().model_copy(update=changes)
    fleet.published = lambda model, suffix: Published("0" * 12, other)
    (request,) = fleet.decide().requests
    assert build_id(fleet.wanted()) in request.run_key


def test_a_channel_that_cannot_be_believed_is_its_runs_matter() -> None:
    """The run fails with the same words, where people look; the others are not held up."""
    fleet = Fleet(catalog(v1={}, v2={}))

    def published(model: str, suffix: str) -> Published | None:
        if suffix == "v1":
            raise SignatureError("signed by a stranger")
        return None

    fleet.published = published
    assert 2 == len(fleet.decide().requests)


@pytest.mark.parametrize("error", [StoreUnavailableError("S3 is away"), StoreError("no such key")])
def test_a_store_that_is_away_is_asked_later(error: StoreError) -> None:
    """Nothing is requested blindly, and nothing forgotten."""
    fleet = Fleet()

    def away(model: str, suffix: str) -> Published | None:
        raise error

    fleet.published = away
    decided = fleet.decide()
    temporary = isinstance(error, StoreUnavailableError)
    why = "what is published cannot be read now: S3 is away" if temporary else None
    assert (why, 0 if temporary else 1) == (decided.store_down, len(decided.requests))
    if temporary:
        fleet.published = lambda model, suffix: None
        assert 1 == len(fleet.decide().requests)


def test_a_store_that_cannot_be_opened_stops_no_moved_build() -> None:
    """Of what moved is known that it is due, without reading the store."""
    fleet = Fleet()
    fleet.decide()
    fleet.ended("succeeded")
    fleet.content, fleet.watches = catalog(v1={}, v2={}), {"org/a@main": seen("b")}

    def closed() -> due_builds.ReadPublished:
        raise StoreError("credentials are half there")

    decided = due_builds.decide(
        fleet.content, fleet.watches, fleet.pairs, lambda: VERSIONS, closed, NOW, 100, 0.0
    )
    assert ["v1"] == [one.suffix for one in decided.requests]
    assert "credentials are half there" in str(decided.store_down)


def test_what_is_not_known_yet_waits() -> None:
    """An adapter that the Hub refuses keeps its pair from a build that would lack it."""
    adapter = {"name": "summarize", "repo": "org/lora"}
    fleet = Fleet(catalog(v1={"adapters": [adapter]}, v2={}))
    assert ["v2"] == [one.suffix for one in fleet.decide().requests]
    fleet.ended("succeeded")
    fleet.watches["adapter org/lora@main"] = seen("c")
    (request,) = fleet.decide().requests
    assert "v1" == request.suffix
    inputs = fleet.wanted().model_copy(update={"adapters": (("summarize", "c" * 40),)})
    assert build_id(inputs) in request.run_key


def test_a_tick_has_its_limit() -> None:
    """What is left is requested by the next ones, in the catalog's order, each once."""
    suffixes = [f"v{number}" for number in range(70)]
    fleet = Fleet(catalog(**{suffix: {} for suffix in suffixes}), limit=30)
    found: list[list[str]] = []
    for _ in range(4):
        found.append([one.suffix for one in fleet.decide().requests])
        fleet.ended("under way")
    assert [30, 30, 10, 0] == [len(one) for one in found]
    assert suffixes == [suffix for one in found for suffix in one]


def test_a_tick_ends_at_its_deadline() -> None:
    """Channels that are read slowly are compared by the next tick."""
    fleet = Fleet(catalog(**{f"v{number}": {} for number in range(70)}))

    gate = threading.Event()

    def slow(model: str, suffix: str) -> Published | None:
        gate.wait()
        return None

    fleet.published = slow
    assert () == fleet.decide(seconds=0).requests
    gate.set()
    fleet.published = lambda model, suffix: None
    assert 70 == len(fleet.decide().requests)


# What moves


def test_each_move_is_a_build_also_back_to_what_it_was() -> None:
    """A → B → A: going back moves the channel, so that it must have a run, and another key."""
    fleet = Fleet()
    keys: list[str] = []
    for commit in "aba":
        fleet.watches = {"org/a@main": seen(commit)}
        keys += fleet.requested()
        fleet.ended("succeeded")
        fleet.now += 1
    builds = [key.split("|")[2] for key in keys]
    assert (3, 3) == (len(keys), len(set(keys)))
    assert builds[0] == builds[2] != builds[1]


def test_a_sensor_that_lost_its_state_uses_no_key_again() -> None:
    """Dagster never starts a second run of a run key: A → B → A would stop at B."""
    fleet = Fleet()
    (first,) = fleet.requested()
    fleet.pairs, fleet.now = {}, NOW + 1
    (second,) = fleet.requested()
    assert first != second


def test_documentation_alone_starts_nothing() -> None:
    """The commit is another one, the fingerprint is not."""
    fleet = Fleet()
    fleet.decide()
    fleet.ended("succeeded")
    fleet.watches = {"org/a@main": seen("b", "a" * 16)}
    assert [] == fleet.requested()


def test_an_adapter_that_moves_is_a_build_of_what_has_it() -> None:
    """And of nothing else."""
    fleet = Fleet(catalog(v1={"adapters": [{"name": "s", "repo": "org/lora"}]}, v2={}))
    fleet.watches["adapter org/lora@main"] = seen("c")
    fleet.decide()
    fleet.ended("succeeded")
    fleet.watches["adapter org/lora@main"] = seen("d")
    assert ["v1"] == [one.suffix for one in fleet.decide().requests]


def test_a_move_is_requested_while_an_older_build_is_under_way() -> None:
    """The queue runs one at a time of a pair; the older one is not waited for."""
    fleet = Fleet()
    fleet.decide()
    fleet.ended("under way")
    fleet.watches = {"org/a@main": seen("b")}
    assert 1 == len(fleet.requested())
    assert 1 == len(due_builds.under_way(fleet.pairs))


@pytest.mark.parametrize(
    ("fields", "requests"),
    [({"revision": "next"}, 1), ({"dtype": "float32"}, 0), ({"prompts": ["Hello"]}, 0)],
)
def test_a_changed_profile(fields: dict[str, Any], requests: int) -> None:
    """Another revision is another thing to follow; the rest is the weekly schedule's business."""
    fleet = Fleet()
    fleet.decide()
    fleet.ended("succeeded")
    fleet.content = catalog(v1=fields)
    fleet.watches["org/a@next"] = seen("b")
    assert requests == len(fleet.requested())


def test_a_pair_that_comes_back_is_new() -> None:
    """Out of the catalog and in again, it is compared with what is published."""
    fleet = Fleet(catalog(v1={}, v2={}))
    fleet.decide()
    fleet.ended("succeeded")
    fleet.content = catalog(v1={})
    assert ([], {"org--a|v1"}) == (fleet.requested(), {*fleet.pairs})
    fleet.content = catalog(v1={}, v2={})
    assert ["v2"] == [one.suffix for one in fleet.decide().requests]


# Pinned


def test_a_pinned_pair_is_built_once() -> None:
    """Its run resolves the revision; the Hub is not asked for it, and its commit is not known."""
    fleet = Fleet(catalog(v1={"track": "pin"}), watches={})
    (request,) = fleet.decide().requests
    assert (None, f"org--a|v1|pinned|{NOW:.0f}|1") == (request.commit, request.run_key)
    fleet.ended("succeeded")
    assert [] == fleet.requested()
    fleet.content = catalog(v1={"track": "pin", "revision": "v1.0"})
    assert 1 == len(fleet.requested())


def test_a_pinned_pair_with_a_channel_stays() -> None:
    """Whatever the pinned build is of."""
    fleet = Fleet(catalog(v1={"track": "pin"}), watches={})
    fleet.published = lambda model, suffix: Published("0" * 12, None)
    assert [] == fleet.requested()


# What fails


def test_a_failed_build_is_tried_again_ever_more_rarely() -> None:
    """Five attempts, each with a key of its own, then not until something moves."""
    fleet = Fleet()
    keys, pauses = fleet.requested(), [0.0]
    for pause in (10 * MINUTE, 20 * MINUTE, 40 * MINUTE, 80 * MINUTE):
        (line,) = fleet.ended("failed")
        assert f"in {pause / MINUTE:.0f} minutes" in line
        fleet.now += pause - 1
        assert [] == fleet.requested()
        fleet.now += 1
        keys += fleet.requested()
        pauses.append(pause)
    (line,) = fleet.ended("failed")
    assert "failed 5 times and is given up" in line
    fleet.now += 1000 * HOUR
    assert [] == fleet.requested()
    assert [f"|{number}" for number in range(1, 6)] == [key[-2:] for key in keys]
    assert 1 == len({key[:-2] for key in keys})
    fleet.watches = {"org/a@main": seen("b")}
    assert ["1"] == [key.rpartition("|")[2] for key in fleet.requested()]


@pytest.mark.parametrize(
    ("state", "said"),
    [("refused", "did not pass its reload check"), ("canceled", "was cancelled")],
)
def test_what_no_retry_changes_is_not_retried(state: RunState, said: str) -> None:
    """A model that answers wrongly would do so again; and who cancels a run means it."""
    fleet = Fleet()
    fleet.decide()
    (line,) = fleet.ended(state)
    assert said in line
    fleet.now += 1000 * HOUR
    assert [] == fleet.requested()
    fleet.watches = {"org/a@main": seen("b", "a" * 16)}  # documentation
    assert [] == fleet.requested()
    fleet.watches = {"org/a@main": seen("b")}
    assert 1 == len(fleet.requested())


@pytest.mark.parametrize("state", ["refused", "canceled", "failed"])
@pytest.mark.parametrize("what", ["profile", "vllm"])
def test_a_cure_is_tried_at_once(state: RunState, what: str) -> None:
    """Who mends the profile after a failed build does not wait for the backoff, or for a week."""
    fleet = Fleet()
    (first,) = fleet.requested()
    fleet.ended(state)
    if what == "profile":
        fleet.content = catalog(v1={"max_perplexity": 9000.0})
    else:
        fleet.versions = {**VERSIONS, "vllm": "0.32.0"}
    (second,) = fleet.requested()
    assert ("1", True) == (second.rpartition("|")[2], first != second)


def test_a_run_that_was_never_started_is_requested_again() -> None:
    """The daemon died between the tick and the run: the same key, which Dagster starts once."""
    fleet = Fleet()
    first = fleet.requested()
    fleet.ended(None)
    assert first == fleet.requested()


def test_a_run_that_is_gone_counts_as_failed() -> None:
    """Somebody deleted it from the UI, with its events; nothing says that it ever succeeded."""
    fleet = Fleet()
    fleet.decide()
    fleet.ended("under way")
    (line,) = fleet.ended(None)
    assert "is gone; attempt 2 of 5 in 10 minutes" in line
    fleet.now += 10 * MINUTE
    assert ["2"] == [key.rpartition("|")[2] for key in fleet.requested()]
