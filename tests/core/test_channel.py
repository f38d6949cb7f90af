from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tensorize_assets.core import channel as channels
from tensorize_assets.core import jsonio, layout, signing
from tensorize_assets.core.channel import Channel
from tensorize_assets.core.errors import ConflictError, SignatureError, StoreError
from tensorize_assets.core.evidence import Device
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.s3 import S3Access
from tensorize_assets.core.store import Store, open_store

KEY = signing.SecretKey(bytes(range(32)))
TRUSTED = {KEY.public_key}
MODEL, SUFFIX = "org/tiny", "v1"
A, B, C = "a" * 12, "b" * 12, "c" * 12
WHEN = datetime(2025, 11, 29, 15, 0, tzinfo=UTC)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


@pytest.fixture
def remote(s3_root: str, s3_access: S3Access) -> Store:
    return open_store(s3_root, s3_access)


def publish(
    store: Store,
    build: str,
    *,
    vllm: str = "0.31.0",
    device: Device = "cpu",
    manifest_sha256: str | None = None,
) -> Channel:
    return channels.append(
        store,
        KEY,
        MODEL,
        SUFFIX,
        build_id=build,
        directory=layout.artifact_dir(MODEL, SUFFIX, build),
        manifest_sha256=manifest_sha256 or (build * 6)[:64],
        commit=(build * 4)[:40],
        vllm_version=vllm,
        device=device,
        trusted=TRUSTED,
        when=WHEN,
    )


def roll_back(store: LocalStore, to: str | None = None) -> Channel:
    return channels.rollback(store, KEY, MODEL, SUFFIX, to, trusted=TRUSTED, when=WHEN)


def read(store: Store) -> Channel:
    found = channels.read_channel(store, MODEL, SUFFIX, TRUSTED)
    assert found
    return found.channel


def history(channel: Channel) -> str:
    return "".join(entry.build_id[0] for entry in channel.entries)


def test_the_first_publication_makes_the_channel(store: LocalStore) -> None:
    """An entry names everything a reader needs to verify the build it points to."""
    assert channels.read_channel(store, MODEL, SUFFIX, TRUSTED) is None
    channel = publish(store, A)
    assert channel == read(store)
    entry = channel.current
    assert (1, A, "publish", WHEN) == (entry.number, entry.build_id, entry.reason, entry.when)
    assert f"vllm/org/tiny/v1-{A}" == entry.directory
    assert f"evidence/{(A * 6)[:64]}/cpu-0.31.0.json" == entry.evidence_key


def test_a_publication_is_added_to_the_history(store: LocalStore) -> None:
    """Nothing that was ever current is forgotten."""
    for build in (A, B, A, C):
        publish(store, build)
    assert "abac" == history(read(store))
    assert [1, 2, 3, 4] == [entry.number for entry in read(store).entries]
    assert C == read(store).current.build_id


def test_publishing_the_current_build_again_does_nothing(store: LocalStore) -> None:
    """A finished chain that runs again must not write at all."""
    publish(store, A)
    before = store.get_bytes(layout.channel_key(MODEL, SUFFIX))
    assert "a" == history(publish(store, A))
    assert before == store.get_bytes(layout.channel_key(MODEL, SUFFIX))


def test_each_vllm_version_has_its_own_current_build(store: LocalStore) -> None:
    """A server of an older vLLM must not be handed a build that only a newer one was tried on."""
    publish(store, A, vllm="0.31.0")
    publish(store, A, vllm="0.32.0")
    publish(store, B, vllm="0.32.0")
    channel = read(store)
    assert [A, B] == [
        entry.build_id
        for version in ("0.31.0", "0.32.0")
        if (entry := channel.current_for(version))
    ]
    assert channel.current_for("0.30.0") is None
    assert "aab" == history(publish(store, A, vllm="0.31.0"))


def test_two_devices_that_publish_in_turn_do_not_lengthen_the_history(store: LocalStore) -> None:
    """Each device's evidence is noted once for as long as the build stays current."""
    for _ in range(3):
        publish(store, A, device="cpu")
        publish(store, A, device="cuda")
    assert ["cpu", "cuda"] == [entry.device for entry in read(store).entries]


def test_a_build_that_was_current_for_this_device_before_another_moves_again(
    store: LocalStore,
) -> None:
    """The last entry of this device alone does not say what is current."""
    publish(store, A, device="cuda")
    publish(store, B, device="cpu")
    assert "aba" == history(publish(store, A, device="cuda"))


def test_the_same_build_with_another_manifest_is_a_move(store: LocalStore) -> None:
    """Signed again with a new key, a build has a new manifest hash, which readers compare."""
    publish(store, A)
    assert "aa" == history(publish(store, A, manifest_sha256="0" * 64))


def test_a_rollback_is_a_new_entry_that_names_the_build_before(store: LocalStore) -> None:
    """History only grows, so that what was served when stays known."""
    for build in (A, A, B, C):
        publish(store, build)
    channel = roll_back(store)
    assert "abcb" == history(channel)
    assert ("rollback", B) == (channel.current.reason, channel.current.build_id)
    assert (
        channel.entries[1].model_copy(update={"number": 4, "reason": "rollback"}) == channel.current
    )
    # The build before is then the one rolled back from.
    assert "abcbc" == history(roll_back(store))


def test_a_rollback_to_a_named_build(store: LocalStore) -> None:
    """People skip more than one bad build."""
    for build in (A, B, C):
        publish(store, build)
    assert "abca" == history(roll_back(store, A))


def test_a_rollback_moves_every_vllm_version_that_has_evidence(store: LocalStore) -> None:
    """A bad build must not stay current for the servers of the other version."""
    for build in (A, B):
        for version in ("0.31.0", "0.32.0"):
            publish(store, build, vllm=version)
    publish(store, B, vllm="0.33.0")
    channel = roll_back(store)
    assert "aabbbaa" == history(channel)
    for version, expected in (("0.31.0", A), ("0.32.0", A), ("0.33.0", B)):
        entry = channel.current_for(version)
        assert entry
        assert expected == entry.build_id


def test_a_rollback_goes_back_within_a_release_of_vllm(store: LocalStore) -> None:
    """The build of the other release is current beside it, and not the one before."""
    publish(store, A)
    publish(store, B)
    publish(store, C, vllm="0.32.0")
    channel = roll_back(store)
    assert "abca" == history(channel)
    assert "0.31.0" == channel.current.vllm_version


def test_what_a_rollback_would_do_can_be_verified_first(store: LocalStore) -> None:
    """A build that was deleted since must be noticed before it is made current."""
    for build in (A, B):
        publish(store, build)
    planned = channels.rollback_target(store, MODEL, SUFFIX, trusted=TRUSTED)
    assert "ab" == history(read(store))
    assert [(3, A, "rollback")] == [
        (entry.number, entry.build_id, entry.reason) for entry in planned
    ]
    (added,) = roll_back(store, planned[0].build_id).entries[2:]
    assert planned[0].model_copy(update={"when": WHEN}) == added


@pytest.mark.parametrize(
    ("published", "to", "message"),
    [
        ("", None, "has no channel"),
        (A[0], None, "no earlier build to roll back to"),
        (A[0], C, "build cccccccccccc was never published"),
        ("ab", B, "build bbbbbbbbbbbb of org/tiny v1 is current already"),
    ],
)
def test_a_rollback_that_cannot_be_says_what_can(
    store: LocalStore, published: str, to: str | None, message: str
) -> None:
    """The history in the message is what people choose from."""
    for letter in published:
        publish(store, letter * 12)
    with pytest.raises(StoreError, match=message) as caught:
        roll_back(store, to)
    for number, letter in enumerate(published, start=1):
        line = f"{number}. {letter * 12} (publish, vLLM 0.31.0, cpu, 2025-11-29 15:00 UTC)"
        assert line in str(caught.value)


def in_processes(count: int, work: Callable[[int], object]) -> None:
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(count)

    def run(number: int) -> None:
        barrier.wait()
        work(number)

    processes = [fork.Process(target=run, args=(number,)) for number in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [0] * count == [process.exitcode for process in processes]


@pytest.mark.fault(
    "Race", "8 processes publish 3 builds each to one channel", "all in the history, in their order"
)
@pytest.mark.parametrize("root", ["disk", "s3"])
def test_8_publishers_racing_all_end_in_the_history(
    request: pytest.FixtureRequest, root: str
) -> None:
    """A lost entry is a build that was served and that nobody can find again."""
    store: Store = request.getfixturevalue("store" if root == "disk" else "remote")
    builds = [[f"{number:x}{step:x}" * 6 for step in range(3)] for number in range(8)]

    def publish_all(number: int) -> None:
        for build in builds[number]:
            publish(store, build)

    in_processes(8, publish_all)
    channel = read(store)
    assert list(range(1, 25)) == [entry.number for entry in channel.entries]
    found = [entry.build_id for entry in channel.entries]
    assert sorted(build for row in builds for build in row) == sorted(found)
    for row in builds:
        assert row == [build for build in found if build in row]


@dataclass(frozen=True)
class OvertakenStore(LocalStore):
    """A store in which others move the channel just before each of the first moves lands."""

    others: list[Callable[[], Channel]]

    def put_bytes(
        self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None
    ) -> str:
        if self.others:
            self.others.pop(0)()
        return super().put_bytes(key, data, if_absent=if_absent, if_match=if_match)


@pytest.mark.fault("Race", "a publisher is overtaken, twice", "reads again; all in the history")
def test_a_publisher_that_is_overtaken_reads_again(store: LocalStore) -> None:
    """Also when the other one makes the channel, and more than once."""
    others = [lambda: publish(store, A), lambda: publish(store, B)]
    assert "abc" == history(publish(OvertakenStore(store.root, others), C))


def test_what_forbids_a_move_is_asked_of_the_history_that_is_added_to(store: LocalStore) -> None:
    """A rollback between a publisher's look and its move must not be undone by it."""
    publish(store, A)
    seen: list[int] = []

    def rolled_back(channel: Channel) -> bool:
        seen.append(len(channel.entries))
        return True

    moved = channels.append(
        store,
        KEY,
        MODEL,
        SUFFIX,
        build_id=B,
        directory=layout.artifact_dir(MODEL, SUFFIX, B),
        manifest_sha256="b" * 64,
        commit="c" * 40,
        vllm_version="0.31.0",
        device="cpu",
        trusted=None,
        unless=rolled_back,
    )

    assert [1] == seen
    assert A == moved.current.build_id


@pytest.mark.fault("Race", "a rollback is overtaken by the same rollback", "moved once")
def test_a_rollback_that_is_overtaken_by_the_same_one_moves_once(store: LocalStore) -> None:
    """Decided anew after the lost race, "the build before" would undo the first rollback."""
    publish(store, A)
    publish(store, B)
    overtaken = OvertakenStore(store.root, [lambda: roll_back(store)])
    assert "aba" == history(roll_back(overtaken))
    assert "aba" == history(read(store))


@pytest.mark.fault("Race", "others never stop moving the channel", "one error: run it again")
def test_a_channel_that_others_never_stop_moving_is_given_up(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run must end, with a message that says to try again."""
    monkeypatch.setattr(channels, "_LONGEST_PAUSE_S", 0.0)
    builds = (A, B)
    others = [lambda build=builds[step % 2]: publish(store, build) for step in range(1000)]
    with pytest.raises(ConflictError, match="was moved by others"):
        publish(OvertakenStore(store.root, others), C)


def tampered(store: LocalStore, change: Callable[[dict[str, jsonio.JsonValue]], object]) -> None:
    """Replace the channel by a validly signed one that this package would not write."""
    payload = jsonio.dump_record(read(store))
    change(payload)
    key = layout.channel_key(MODEL, SUFFIX)
    store.put_bytes(key, signing.sign("channel", payload, KEY))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda payload: payload["entries"].pop(0), r"entries are numbered \[2, 3\], not 1 to 2"),
        (lambda payload: payload["entries"].pop(1), r"entries are numbered \[1, 3\], not 1 to 2"),
        (lambda payload: payload["entries"].reverse(), r"entries are numbered \[3, 2, 1\]"),
        (lambda payload: payload["entries"].clear(), "at least 1 item"),
        (lambda payload: payload["entries"][2].update(build_id=C), "back to a build never publ"),
        (lambda payload: payload["entries"][0].update(device="cuda"), "evidence_key is"),
        (lambda payload: payload["entries"][0].update(directory="../../x"), "directory: "),
        (lambda payload: payload["entries"][0].update(directory="vllm/o/x"), "names vllm/o/x, out"),
        (lambda payload: payload.update(suffix="v2"), "is the channel of org/tiny v2, not of"),
    ],
)
def test_a_history_that_is_not_one_is_refused(
    store: LocalStore, change: Callable[[dict[str, jsonio.JsonValue]], object], message: str
) -> None:
    """A publisher must not go on from a history with a hole in it."""
    publish(store, A)
    publish(store, B)
    roll_back(store)
    tampered(store, change)
    with pytest.raises(StoreError, match=message):
        read(store)
    with pytest.raises(StoreError, match=message):
        publish(store, C)


def test_a_channel_by_an_unknown_key_is_neither_believed_nor_continued(store: LocalStore) -> None:
    """Signing on would lend the own signature to a stranger's entries."""
    publish(store, A)
    for act in (
        lambda: channels.read_channel(store, MODEL, SUFFIX, ()),
        lambda: channels.rollback(store, KEY, MODEL, SUFFIX, trusted=()),
    ):
        with pytest.raises(SignatureError, match=r"v1\.json was signed by key .* not trusted"):
            act()
