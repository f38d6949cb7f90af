"""What is asked of a real Hub, and what its answers and refusals come to."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tensorize_assets.core import hub as core_hub
from tensorize_assets.core import revisions
from tensorize_assets.core.catalog import Catalog
from tensorize_assets.core.catalog_automation import RevisionWatch
from tensorize_assets.core.hub_access import HubAccess
from tensorize_assets.core.revisions import THE_HUB, Followed, Looked, Watch, followed, look
from tensorize_assets.demo.hub_server import LocalHub

NOW = 1_800_000_000.0
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "README.md": b"A model."}
ADAPTER = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"lora", "README.md": b"x"}
SETTINGS = RevisionWatch(every_seconds=300, alert_after=3)


@pytest.fixture
def access(hub: LocalHub, tmp_path: Path) -> HubAccess:
    return HubAccess(endpoint=hub.endpoint, cache_dir=tmp_path / "cache")


def models(*names: str) -> dict[str, Followed]:
    found = [Followed("model", name, "main") for name in names]
    return {one.name: one for one in found}


def asked(
    access: HubAccess,
    wanted: Mapping[str, Followed],
    before: Looked | None = None,
    now: float = NOW,
    seconds: float = 30.0,
) -> Looked:
    return look(
        access,
        wanted,
        before.watches if before else {},
        before.trouble if before else None,
        SETTINGS,
        now,
        time.monotonic() + seconds,
    )


def profile(**fields: Any) -> dict[str, Any]:
    return {"reload_device": "cpu", **fields}


# What is followed


def test_each_revision_is_followed_once() -> None:
    """Eight suffixes of one model are one request to the Hub, not eight."""
    adapter = {"name": "summarize", "repo": "org/lora"}
    catalog = Catalog.model_validate(
        {
            "root": "artifacts",
            "models": {
                "org/a": {
                    "profiles": {
                        "v1": profile(adapters=[adapter]),
                        "v2": profile(dtype="float32", adapters=[adapter]),
                        "next": profile(revision="next"),
                        "old": profile(revision="v1.0", track="pin"),
                    }
                },
                "org/b": {"profiles": {"v1": profile()}},
            },
        }
    )
    assert ["org/a@main", "adapter org/lora@main", "org/a@next", "org/b@main"] == [
        *followed(catalog)
    ]


def test_a_local_adapter_is_on_no_hub() -> None:
    """`tensorize build --lora-path` takes it from a folder; the Hub would say it does not exist."""
    entry = profile(adapters=[{"name": "mine", "repo": "_local/mine", "revision": "a" * 40}])
    catalog = Catalog.model_validate(
        {"root": "artifacts", "models": {"org/a": {"profiles": {"v1": entry}}}}
    )
    assert ["org/a@main"] == [*followed(catalog)]


# Fingerprints


@pytest.mark.parametrize(
    ("changed", "moves"),
    [
        ({"README.md": b"other"}, False),
        ({"docs/guide.md": b"new"}, False),
        ({"LICENSE": b"new"}, False),
        ({"LICENSE.txt": b"new"}, False),
        ({"NOTICE": b"new"}, False),
        ({"USE_POLICY.md": b"new"}, False),
        ({"training_args.bin": b"not loaded"}, False),
        ({"model.safetensors": b"other"}, True),
        ({"config.json": b"[]"}, True),
        ({"chat_template.jinja": b"new"}, True),
        ({"tokenizer.json": b"new"}, True),
    ],
)
def test_only_what_is_built_of_moves_a_fingerprint(
    hub: LocalHub, access: HubAccess, changed: dict[str, bytes], moves: bool
) -> None:
    """A README edited on a Sunday must not cost a fleet its GPUs."""
    hub.commit("org/a", FILES)
    before = asked(access, models("org/a"))
    commit = hub.commit("org/a", FILES | changed)
    after = asked(access, models("org/a"), before, NOW + 300)
    old, new = before.watches["org/a@main"], after.watches["org/a@main"]
    assert commit == new.commit
    assert moves == (old.fingerprint != new.fingerprint)
    said = [line for line in after.lines if "nothing to build" in line]
    assert (0 if moves else 1) == len(said)


def test_a_file_that_is_renamed_moves_the_fingerprint(hub: LocalHub, access: HubAccess) -> None:
    """The same bytes under another name are loaded as something else."""
    hub.commit("org/a", FILES)
    before = asked(access, models("org/a"))
    hub.commit("org/a", {"generation_config.json": b"{}", "model.safetensors": b"weights"})
    after = asked(access, models("org/a"), before, NOW + 300)
    assert before.watches["org/a@main"].fingerprint != after.watches["org/a@main"].fingerprint


def test_adapters_are_judged_by_their_own_files(hub: LocalHub, access: HubAccess) -> None:
    """An adapter's repo has no model, and its tokenizer is not taken."""
    one = Followed("adapter", "org/lora", "main")
    hub.commit("org/lora", ADAPTER)
    before = asked(access, {one.name: one})
    hub.commit("org/lora", ADAPTER | {"tokenizer.json": b"{}"})
    same = asked(access, {one.name: one}, before, NOW + 300)
    hub.commit("org/lora", ADAPTER | {"adapter_model.safetensors": b"other"})
    other = asked(access, {one.name: one}, same, NOW + 600)
    prints = [found.watches[one.name].fingerprint for found in (before, same, other)]
    assert prints[0] == prints[1] != prints[2]


# When the Hub is asked


def test_one_request_each_and_none_before_it_is_due(hub: LocalHub, access: HubAccess) -> None:
    """A thousand models every five minutes is what a Hub allows, and no more."""
    wanted = models(*(f"org/m{number}" for number in range(12)))
    for one in wanted.values():
        hub.commit(one.repo, FILES)
    first = asked(access, wanted)
    assert (12, 12, ()) == (first.asked, len(hub.requests), first.lines)
    early = asked(access, wanted, first, NOW + 299)
    assert (0, 12, first.watches) == (early.asked, len(hub.requests), early.watches)
    assert 12 == asked(access, wanted, early, NOW + 300).asked


def test_a_hint_makes_its_repo_due(hub: LocalHub, access: HubAccess) -> None:
    """A webhook's word: that repo is asked at once, whatever its interval, and nothing else."""
    wanted = models("org/a", "org/b")
    for one in wanted.values():
        hub.commit(one.repo, FILES)
    first = asked(access, wanted)
    new = hub.commit("org/a", FILES | {"config.json": b"[]"})
    watches = revisions.hinted(first.watches, wanted.values(), {"org/a", "org/stranger"})
    after = asked(access, wanted, first._replace(watches=watches), NOW + 1)
    assert (1, new) == (after.asked, after.watches["org/a@main"].commit)


def test_a_commit_is_asked_for_once(hub: LocalHub, access: HubAccess) -> None:
    """A revision of forty digits does not move."""
    one = Followed("model", "org/a", hub.commit("org/a", FILES))
    first = asked(access, {one.name: one})
    assert (1, 0) == (first.asked, asked(access, {one.name: one}, first, NOW + 1e6).asked)


def test_what_was_not_asked_in_time_comes_first(hub: LocalHub, access: HubAccess) -> None:
    """A tick ends at its deadline; the next one goes on where it stopped."""
    wanted = models("org/a", "org/b")
    for one in wanted.values():
        hub.commit(one.repo, FILES)
    known = asked(access, models("org/a"))
    hub.latency_s = 0.5
    cut = asked(access, wanted, known, NOW + 300, seconds=0)
    assert ("2 revisions were not answered for in time",) == cut.lines
    assert (known.watches["org/a@main"], Watch()) == tuple(cut.watches.values())
    due = revisions._due(wanted, cut.watches, 300, NOW + 301)  # pyright: ignore[reportPrivateUsage]
    assert ["org/b", "org/a"] == [one.repo for one in due]


def test_what_left_the_catalog_is_forgotten(hub: LocalHub, access: HubAccess) -> None:
    """The state is as large as the catalog, whatever stood in it once."""
    for name in ("org/a", "org/b"):
        hub.commit(name, FILES)
    first = asked(access, models("org/a", "org/b"))
    assert ["org/b@main"] == [*asked(access, models("org/b"), first).watches]


# Refusals


@pytest.mark.parametrize(
    ("status", "headers", "said"),
    [
        (401, {}, "refuses the token"),
        (403, {"X-Error-Code": "GatedRepo"}, "is gated"),
        (404, {"X-Error-Code": "RepoNotFound"}, "does not exist"),
        (404, {"X-Error-Code": "RevisionNotFound"}, "has no revision"),
        (429, {}, "answered 429"),
        (500, {}, "answered 500"),
        (418, {}, "answered 418"),
    ],
)
def test_a_refusal_is_its_own_repos_alone(
    hub: LocalHub, access: HubAccess, status: int, headers: dict[str, str], said: str
) -> None:
    """The others are asked as ever; what was known of it stays known; the log says why."""
    wanted = models(*(f"org/m{number}" for number in range(6)))
    for one in wanted.values():
        hub.commit(one.repo, FILES)
    before = asked(access, wanted)
    hub.fail_next("org/m3", status=status, headers=headers)
    after = asked(access, wanted, before, NOW + 300)
    watch = after.watches["org/m3@main"]
    assert (6, None) == (after.asked, after.trouble)
    assert (before.watches["org/m3@main"].commit, 1) == (watch.commit, watch.failures)
    (line,) = after.lines
    assert line.startswith("org/m3@main: ")
    assert said in line
    assert "asked again in 30 s" in line
    assert {0} == {one.failures for name, one in after.watches.items() if name != "org/m3@main"}


def test_refusals_are_backed_off_from(hub: LocalHub, access: HubAccess) -> None:
    """Twice as long each time, up to an hour, and at once as before when it is well again."""
    wanted = models("org/gone")
    looked, now = asked(access, wanted), NOW
    pauses: list[float] = []
    for _ in range(9):
        pauses.append(looked.watches["org/gone@main"].next_try - now)
        assert 0 == asked(access, wanted, looked, now + pauses[-1] - 1).asked
        now += pauses[-1]
        looked = asked(access, wanted, looked, now)
    assert [30, 60, 120, 240, 480, 960, 1920, 3600, 3600] == pauses
    hub.commit("org/gone", FILES)
    well = asked(access, wanted, looked, now + 3600)
    assert ("org/gone@main: can be read again, after 10 failures",) == well.lines
    assert 0 == well.watches["org/gone@main"].failures


@pytest.mark.fault(
    "Bad Hub",
    "revision sensor: 429 with a time to wait",
    "asked again then, and not sooner",
)
def test_the_hub_says_when_it_may_be_asked_again(hub: LocalHub, access: HubAccess) -> None:
    """Retry-After goes before our own pauses, and before hints."""
    wanted = models("org/a")
    hub.commit("org/a", FILES)
    hub.fail_next("org/a", status=429, headers={"Retry-After": "900"})
    first = asked(access, wanted)
    assert "asked again in 900 s" in first.lines[0]
    pressed = revisions.hinted(first.watches, wanted.values(), {"org/a"})
    hinted = first._replace(watches=pressed)
    assert 0 == asked(access, wanted, hinted, NOW + 899).asked
    assert 1 == asked(access, wanted, hinted, NOW + 900).asked


@pytest.mark.fault(
    "Bad Hub",
    "revision sensor: an answer that makes no sense",
    "that revision is backed off from, alone",
)
def test_an_answer_that_makes_no_sense_is_a_refusal(
    hub: LocalHub, access: HubAccess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands between us and the Hub may answer anything; the others are not to suffer."""
    for name in ("org/a", "org/b"):
        hub.commit(name, FILES)
    resolve = core_hub.resolve

    def strange(access: HubAccess, model: str, revision: str, timeout_s: float) -> Any:
        return resolve(access, model, revision, timeout_s) if model == "org/b" else None

    monkeypatch.setattr(core_hub, "resolve", strange)
    looked = asked(access, models("org/a", "org/b"))
    assert [1, 0] == [watch.failures for watch in looked.watches.values()]


# A Hub that is down


@pytest.mark.fault(
    "Bad Hub",
    "revision sensor: a Hub that is down",
    "asked a few times, not once a revision",
)
def test_a_hub_that_is_down_is_asked_few_times(hub: LocalHub, access: HubAccess) -> None:
    """A thousand time limits in a row would be the end of the tick, and no help to the Hub."""
    wanted = models(*(f"org/m{number}" for number in range(40)))
    for one in wanted.values():
        hub.commit(one.repo, FILES)
    known = asked(access, wanted)
    fault = hub.fail_next("/api/models", status=503, times=1000)
    down = asked(access, wanted, known, NOW + 300)
    assert (4, 4) == (fault.hits, down.asked)
    assert known.watches == down.watches
    (line,) = down.lines
    assert line.startswith("the Hub does not answer: ")
    assert "asked again in 10 s, for the 40 revisions that are due" in line
    assert 0 == asked(access, wanted, down, NOW + 309).asked
    worse = asked(access, wanted, down, NOW + 310)
    assert worse.trouble is not None
    assert (2, NOW + 330) == (worse.trouble.failures, worse.trouble.next_try)
    fault.times = fault.hits
    well = asked(access, wanted, worse, NOW + 330)
    assert (40, None) == (well.asked, well.trouble)


def test_a_hub_that_hangs_is_given_up_on(
    hub: LocalHub, access: HubAccess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes connections and says nothing."""
    wanted = models(*(f"org/m{number}" for number in range(10)))
    hub.latency_s = 1.0
    monkeypatch.setattr(revisions, "_TIMEOUT_S", 0.05)
    looked = asked(access, wanted)
    assert looked.trouble is not None
    assert "ReadTimeout" in looked.trouble.reason


def test_what_always_fails_does_not_look_like_a_hub_that_is_down(
    hub: LocalHub, access: HubAccess
) -> None:
    """Four repos whose files time out must not keep the others from being asked."""
    wanted = models(*(f"org/m{number}" for number in range(8)))
    for one in wanted.values():
        hub.commit(one.repo, FILES)
    for number in range(4):
        hub.fail_next(f"org/m{number}", status=504, times=9)
    watches = {f"org/m{n}@main": Watch(failures=2, asked=NOW - 900) for n in range(4)}
    looked = asked(access, wanted, Looked(watches, None, (), 0))
    assert (8, None) == (looked.asked, looked.trouble)
    assert [3, 3, 3, 3, 0, 0, 0, 0] == [watch.failures for watch in looked.watches.values()]


def test_what_is_reported(hub: LocalHub, access: HubAccess) -> None:
    """A hiccup is nothing to wake somebody for; the third in a row is."""
    wanted = models("org/gone")
    looked = asked(access, wanted)
    looked = asked(access, wanted, looked, NOW + 30)
    assert {} == revisions.unreadable(looked.watches, looked.trouble, SETTINGS.alert_after)
    looked = asked(access, wanted, looked, NOW + 90)
    (name, reason), *others = revisions.unreadable(looked.watches, None, 3).items()
    assert ("org/gone@main", []) == (name, others)
    assert "does not exist" in reason
    trouble = revisions.Trouble(failures=3, next_try=NOW, reason="ConnectError")
    assert [THE_HUB, "org/gone@main"] == [*revisions.unreadable(looked.watches, trouble, 3)]


def test_no_token_stands_in_what_is_kept(hub: LocalHub, tmp_path: Path) -> None:
    """Reasons are stored, logged, and sent to whoever is alerted."""
    token = "hf_abcdefghijklmnop"
    access = HubAccess.model_validate(
        {"endpoint": hub.endpoint, "cache_dir": tmp_path, "token": token}
    )
    hub.fail_next("org/a", status=500, headers={"X-Error-Message": f"bad {token}"})
    looked = asked(access, models("org/a"))
    assert token not in repr(looked)
