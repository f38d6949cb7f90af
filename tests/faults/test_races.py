"""Races: two runs, publishers, retention, rollbacks, the sensor and the webhook, at any moment."""

from __future__ import annotations

import asyncio
import multiprocessing
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import httpx
import pytest
from chain_home import Home, stand_in, weights
from small_builds import KEY, MODEL, SUFFIX, TRUSTED, Build, build, put
from wrapped_store import wrapped

sys.path.insert(0, str(Path(__file__).parents[1] / "automation"))

from ticks import Clock, Ticker

from tensorize_assets import webhook
from tensorize_assets.automation import revisions
from tensorize_assets.automation.revisions import hf_revision_sensor
from tensorize_assets.core import channel as channels
from tensorize_assets.core import layout
from tensorize_assets.core import revisions as core_revisions
from tensorize_assets.core.catalog_automation import Retention
from tensorize_assets.core.channel import Channel
from tensorize_assets.core.errors import TensorizeAssetsError
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.publish import roll_back
from tensorize_assets.core.removal import remove
from tensorize_assets.core.retention import Busy, Plan, plan
from tensorize_assets.core.s3 import S3Access, S3Settings
from tensorize_assets.core.store import Store, open_store
from tensorize_assets.core.verify import verify_directory
from tensorize_assets.demo.hub_server import LocalHub
from tensorize_assets.demo.s3_server import REGION, LocalS3

FORK = multiprocessing.get_context("fork")
PAIR = (MODEL, SUFFIX)
FILES = {"config.json": b"{}", "model.safetensors": weights(b"small")}
EVERY_S = 300.0


@pytest.fixture(params=["disk", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A root on a disk, and one in S3."""
    if request.param == "disk":
        return LocalStore(tmp_path / "root")
    access: S3Access = request.getfixturevalue("s3_access")
    return open_store(request.getfixturevalue("s3_root"), access)


@pytest.fixture
def disk(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "root")


def history(store: Store) -> Channel:
    found = channels.read_channel(store, *PAIR, TRUSTED)
    assert found is not None
    return found.channel


def commits(store: Store) -> str:
    """The letter of each entry's commit, in capitals where it is a rollback."""
    return "".join(
        entry.commit[0].upper() if entry.reason == "rollback" else entry.commit[0]
        for entry in history(store).entries
    )


# One channel


@pytest.mark.fault(
    "Race", "50 processes move one channel at once", "one linear history, no entry lost"
)
def test_50_moves_at_once_are_50_entries_of_one_history(store: Store, tmp_path: Path) -> None:
    """Of one home: what each has seen of the history is theirs together."""
    put(build(store, "a"))
    seen = tmp_path / "seen"
    barrier = FORK.Barrier(50)

    def move(number: int) -> None:
        barrier.wait()
        name = f"{number:012x}"
        channels.append(
            store,
            KEY,
            *PAIR,
            build_id=name,
            directory=layout.artifact_dir(*PAIR, name),
            manifest_sha256=f"{number:064x}",
            commit=f"{number:040x}",
            vllm_version="0.31.0",
            device="cpu",
            trusted=TRUSTED,
            seen=seen,
        )

    processes = [FORK.Process(target=move, args=(number,)) for number in range(50)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [0] * 50 == [process.exitcode for process in processes]
    first, *others = history(store).entries
    assert list(range(2, 52)) == [entry.number for entry in others]
    assert {f"{number:012x}" for number in range(50)} == {entry.build_id for entry in others}
    # What was seen of it is all of it: an older one that is put back now is refused.
    assert channels.read_channel(store, *PAIR, TRUSTED, seen)
    assert "a" * 40 == first.commit


# At every moment of another's work


Move = Callable[[Store], object]


def at_each_moment(
    store: LocalStore, folder: Path, work: Move, meanwhile: Move
) -> Iterator[tuple[LocalStore, BaseException | None, BaseException | None]]:
    """Do `work` in a copy of the store, while `meanwhile` is done whole before its n-th call.

    Yields the copy, and what each raised, for every n until the work makes fewer calls than that.
    """
    for number in range(1, 1000):
        copy = LocalStore(folder / str(number))
        shutil.copytree(store.root, copy.root)
        other = _AtCall(number, lambda copy=copy: _raised(meanwhile, copy))
        error = _raised(work, wrapped(copy, other))
        if other.calls < number:
            return
        yield copy, error, other.raised
    raise AssertionError("the work does not end")


class _AtCall:
    """Acts before one of the calls to a store, and keeps what that raised."""

    def __init__(self, number: int, act: Callable[[], BaseException | None]) -> None:
        self.calls = 0
        self.raised: BaseException | None = None
        self._number = number
        self._act = act
        self._lock = threading.Lock()

    def __call__(self, method: str, key: str) -> None:
        with self._lock:
            self.calls += 1
            if self.calls == self._number:
                self.raised = self._act()


def _raised(work: Move, store: Any) -> BaseException | None:
    try:
        work(store)
    except TensorizeAssetsError as error:
        return error
    return None


def retention(store: Store) -> Plan:
    """What goes of three builds if one is kept, in a hundred days."""
    return plan(
        store,
        [PAIR],
        Retention(keep=1, days=14),
        (),
        TRUSTED,
        now=datetime.now(UTC) + timedelta(days=100),
        busy=Busy(),
    )


def publishing(made: Build) -> Move:
    return lambda store: put(made._replace(store=store))


def going_back(made: Build) -> Move:
    return lambda store: roll_back(
        store, KEY, TRUSTED, model=MODEL, suffix=SUFFIX, to_build_id=made.manifest.build_id
    )


def removing(made: Plan) -> Move:
    return lambda store: remove(
        store, made, trusted=TRUSTED, busy=lambda: Busy(), say=lambda _: None, settle_s=0
    )


@pytest.mark.parametrize(
    ("how", "other"),
    [
        pytest.param(
            how,
            other,
            marks=pytest.mark.fault(
                "Race",
                f"{how} while retention removes the build: {other}",
                "the channel names what is whole, or whoever moved it is told that it is gone",
            ),
        )
        for how in ("publish", "rollback")
        for other in ("all of it before each call to the store", "all of that before each of its")
    ],
)
def test_retention_and_a_move_meet_at_any_moment(
    disk: LocalStore, tmp_path: Path, how: str, other: str
) -> None:
    """Each of them whole, before any call of the other."""
    first, _, _ = (build(disk, letter) for letter in "abc")
    for letter in "abc":
        put(build(disk, letter))
    made = retention(disk)
    assert first.directory in {item.where for item in made.going}
    move = publishing(first) if how == "publish" else going_back(first)
    pair = (move, removing(made))
    work, meanwhile = pair if other.startswith("all of it") else reversed(pair)
    count = 0
    for copy, *errors in at_each_moment(disk, tmp_path / "copies", work, meanwhile):
        count += 1
        refused, failed = errors if work is move else reversed(errors)
        assert failed is None
        current = history(copy).current
        whole = verify_directory(copy, current.directory, TRUSTED).ok
        if current.directory == first.directory:
            assert whole or "now names" in str(refused)
        else:
            assert whole
            assert refused is not None
        assert [1, 2, 3, 4][: len(history(copy).entries)] == [
            entry.number for entry in history(copy).entries
        ]
    assert count > 5


@pytest.mark.fault(
    "Race", "publish while a rollback takes that build out, at each call", "the rollback stands"
)
def test_a_publish_undoes_no_rollback_of_any_moment(disk: LocalStore, tmp_path: Path) -> None:
    """A schedule publishes the current build anew at the moment at which a person goes back."""
    first, second = build(disk, "a"), build(disk, "b")
    put(first)
    put(second)
    count = 0
    for copy, *errors in at_each_moment(
        disk, tmp_path / "copies", publishing(second), going_back(first)
    ):
        count += 1
        assert [None, None] == errors
        assert "abA" == commits(copy)
    assert count > 5


@pytest.mark.fault(
    "Race", "rollback while another build is published, at each call", "both are in the history"
)
def test_a_rollback_and_a_new_build_are_both_in_the_history(
    disk: LocalStore, tmp_path: Path
) -> None:
    """Who came last is current; nobody's move is lost, and a named build stays the one named."""
    first, second, third = (build(disk, letter) for letter in "abc")
    put(first)
    put(second)
    found: set[str] = set()
    for copy, *errors in at_each_moment(
        disk, tmp_path / "copies", going_back(first), publishing(third)
    ):
        assert [None, None] == errors
        found.add(commits(copy))
    # The same, seen from the other.
    for copy, *errors in at_each_moment(
        disk, tmp_path / "others", publishing(third), going_back(first)
    ):
        assert [None, None] == errors
        found.add(commits(copy))
    assert {"abcA", "abAc"} == found


# Two runs of one partition


@pytest.fixture(params=["disk", "s3"])
def home(
    request: pytest.FixtureRequest, tmp_path: Path, hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> Home:
    """A home in which nothing was built, with a root of either kind."""
    hub.commit("org/a", FILES)
    made = Home(tmp_path / "home", hub.endpoint)
    if request.param == "s3":
        s3: LocalS3 = request.getfixturevalue("s3")
        monkeypatch.setenv("S3_ACCESS_KEY_ID", s3.access_key)
        monkeypatch.setenv("S3_SECRET_ACCESS_KEY", s3.secret_key)
        settings = S3Settings(endpoint_url=s3.endpoint, region=REGION)
        root: str = request.getfixturevalue("s3_root")
        made = Home(made.folder, hub.endpoint, root, settings)
    made.write_catalog({"org/a": {"v1": {}}})
    return made


@pytest.mark.fault(
    "Race", "two runs of one partition, from the first step on", "both end well, published once"
)
def test_two_runs_of_one_partition_publish_once(home: Home) -> None:
    """With a run's own workers and scratch each; whoever is second finds it done."""
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda _: home.run("org/a", launcher=stand_in()), range(2)))
    assert [{}, {}] == [run.failures for run in runs]
    (entry,) = home.channel("org/a")
    assert {entry.build_id} == {run.build_id for run in runs}
    assert verify_directory(home.store, entry.directory, home.trusted).ok
    names = [key for key in home.store.list("vllm/") if key.endswith(layout.MANIFEST)]
    assert [layout.manifest_key(entry.directory)] == names


# One commit, told twice


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    (tmp_path / "instance").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "instance")) as made:
        yield made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(revisions, "time", made)
    return made


@pytest.fixture
def deliver(tmp_path: Path, instance: dg.DagsterInstance) -> Iterator[Callable[[str, str], object]]:
    """Has the Hub's webhook, which runs, be told that `org/a` moved from one commit to another."""

    def report(repo: str, commit: str | None) -> None:
        metadata = {"repo": repo, "source": "webhook", "commit": commit or ""}
        instance.report_runless_asset_event(dg.AssetObservation("hf_snapshot", metadata=metadata))

    secret = "0123456789abcdef-the-secret"
    app = webhook.webhook_app(secret, tmp_path / "home" / "models.yaml", report)
    server = webhook.webhook_server(app)
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/hub"
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()

    def post(old: str, new: str) -> object:
        content = {
            "event": {"action": "update", "scope": "repo.content"},
            "repo": {"type": "model", "name": "org/a", "headSha": new},
            "updatedRefs": [{"ref": "refs/heads/main", "oldSha": old, "newSha": new}],
        }
        headers = {"X-Webhook-Secret": secret}
        with httpx.Client(timeout=20, trust_env=False) as client:
            answer = client.post(url, json=content, headers=headers)
        assert answer.status_code in (200, 202)
        return answer

    yield post
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(
            moment,
            marks=pytest.mark.fault(
                "Race", f"sensor and webhook for one commit: the delivery comes {moment}", "one run"
            ),
        )
        for moment in ("before the tick", "before the Hub is asked", "after it", "after the tick")
    ],
)
def test_a_commit_that_is_told_twice_is_built_once(
    tmp_path: Path,
    hub: LocalHub,
    instance: dg.DagsterInstance,
    clock: Clock,
    deliver: Callable[[str, str], object],
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    """The interval is over just then; the Hub sends what it says to 8 connections at once."""
    first = hub.commit("org/a", FILES)
    home = Home(tmp_path / "home", hub.endpoint)
    home.write_catalog({"org/a": {"v1": {}}})
    sensor = Ticker(home, instance, hf_revision_sensor)
    sensor.end(sensor.tick())
    sensor.tick()
    second = hub.commit("org/a", {**FILES, "config.json": b"{} "})
    clock.now += EVERY_S

    def tell() -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: deliver(first, second), range(8)))

    look = core_revisions.look

    def looked(*args: Any) -> Any:
        monkeypatch.setattr(core_revisions, "look", look)
        if moment == "before the Hub is asked":
            tell()
        found = look(*args)
        if moment == "after it":
            tell()
        return found

    if moment == "before the tick":
        tell()
    monkeypatch.setattr(core_revisions, "look", looked)
    ticks = [sensor.tick()]
    if moment == "after the tick":
        tell()
    for pause in (5, 5, EVERY_S):
        clock.now += pause
        ticks.append(sensor.tick())
    assert [second] == [commit for tick in ticks for commit in tick.commits]
    assert 2 == len(instance.get_runs())
    told = instance.fetch_observations(dg.AssetKey("hf_snapshot"), limit=100).records
    assert 1 == len(told)
