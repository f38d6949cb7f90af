"""What was valid once and is put back: caught by what this home has seen."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tensorize_assets.core import build_keys, jsonio, layout, seen, signing
from tensorize_assets.core import channel as channels
from tensorize_assets.core.channel import Channel
from tensorize_assets.core.errors import HistoryError, SignatureError, StoreError
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.store import Store, StoredObject

KEY = signing.SecretKey(bytes(range(32)))
TRUSTED = {KEY.public_key}
MODEL, SUFFIX = "org/tiny", "v1"
PLACE = layout.channel_key(MODEL, SUFFIX)
A, B, C, D = "a" * 12, "b" * 12, "c" * 12, "d" * 12


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "root")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where this home keeps what it saw."""
    return tmp_path / "home" / "seen"


def publish(store: Store, build: str, folder: Path | None = None) -> Channel:
    return channels.append(
        store,
        KEY,
        MODEL,
        SUFFIX,
        build_id=build,
        directory=layout.artifact_dir(MODEL, SUFFIX, build),
        manifest_sha256=(build * 6)[:64],
        commit=(build * 4)[:40],
        vllm_version="0.31.0",
        device="cpu",
        trusted=TRUSTED,
        seen=folder,
    )


def read(store: Store, folder: Path | None) -> str:
    found = channels.read_channel(store, MODEL, SUFFIX, TRUSTED, folder)
    return "".join(entry.build_id[0] for entry in found.channel.entries) if found else ""


def data(store: Store) -> bytes:
    found = store.get_bytes(PLACE)
    assert found
    return found.data


def forked(store: LocalStore, *builds: str) -> bytes:
    """A valid channel that another home wrote."""
    other = LocalStore(store.root.parent / "other")
    for build in builds:
        publish(other, build)
    return data(other)


def put_back(store: LocalStore, old: bytes | None) -> None:
    if old is None:
        store.delete(PLACE)
    else:
        store.put_bytes(PLACE, old)


def old_one(store: LocalStore, old: bytes) -> bytes:
    return old


def nothing(store: LocalStore, old: bytes) -> None:
    return None


def another_of_the_same_length(store: LocalStore, old: bytes) -> bytes:
    return forked(store, A, B, D)


def another_that_is_longer(store: LocalStore, old: bytes) -> bytes:
    # Somebody published to an old channel that was put back: what came after it is gone.
    return forked(store, A, B, D, A, C)


ATTACKS: list[tuple[Callable[[LocalStore, bytes], bytes | None], str]] = [
    (old_one, "ends at entry 2, but entry 3 was seen here on 2.* UTC: an old one was put back"),
    (nothing, "is gone, but entry 3 was seen here"),
    (another_of_the_same_length, "is not the history whose entry 3 was seen here"),
    (another_that_is_longer, "is not the history whose entry 3 was seen here"),
]


@pytest.mark.parametrize(("attack", "said"), ATTACKS, ids=[a.__name__ for a, _ in ATTACKS])
def test_a_channel_that_is_not_the_one_seen_is_refused(
    store: LocalStore,
    folder: Path,
    attack: Callable[[LocalStore, bytes], bytes | None],
    said: str,
) -> None:
    """Its signature is good. It is neither read nor moved, and the message says what to do."""
    publish(store, A, folder)
    publish(store, B, folder)
    old = data(store)
    publish(store, C, folder)
    put_back(store, attack(store, old))
    before = store.get_bytes(PLACE)
    for act in (
        lambda: read(store, folder),
        lambda: publish(store, D, folder),
        lambda: channels.rollback(store, KEY, MODEL, SUFFIX, trusted=TRUSTED, seen=folder),
    ):
        with pytest.raises(HistoryError, match=said) as caught:
            act()
        assert store.uri(PLACE) in str(caught.value)
        assert (
            "Restore it; or if that is meant to be so, `tensorize channel accept org/tiny v1`"
            in (str(caught.value))
        )
    assert before == store.get_bytes(PLACE)
    # A home that has seen nothing believes any signed history, and then no older one.
    assert read(store, folder.parent / "other") == read(store, None)


def test_what_others_added_is_seen_by_reading(store: LocalStore, folder: Path) -> None:
    """Another home publishes; what this one then has seen is theirs."""
    publish(store, A, folder)
    publish(store, B)
    old = data(store)
    publish(store, C)
    assert "abc" == read(store, folder)
    put_back(store, old)
    with pytest.raises(HistoryError, match="entry 3 was seen"):
        read(store, folder)


def test_each_channel_is_seen_apart(store: LocalStore, folder: Path, tmp_path: Path) -> None:
    """The same model and suffix in another root is another channel."""
    publish(store, A, folder)
    publish(store, B, folder)
    other = LocalStore(tmp_path / "elsewhere")
    publish(other, A, folder)
    assert ("ab", "a") == (read(store, folder), read(other, folder))


def test_accepting_forgets_what_was_seen(store: LocalStore, folder: Path) -> None:
    """A store that was restored from a backup must not be unusable."""
    publish(store, A, folder)
    old = data(store)
    publish(store, B, folder)
    put_back(store, old)
    before = seen.forget(folder, store.uri(PLACE))
    assert before
    assert (store.uri(PLACE), 2) == (before.where, before.number)
    assert "a" == read(store, folder)
    assert "ac" == "".join(e.build_id[0] for e in publish(store, C, folder).entries)
    assert seen.forget(folder, "elsewhere") is None


@dataclass(frozen=True)
class SlowStore(LocalStore):
    """A store whose answer was on its way while another process of this home moved the channel."""

    meanwhile: list[Callable[[], object]]

    def get_bytes(self, key: str) -> StoredObject | None:
        found = super().get_bytes(key)
        if self.meanwhile:
            self.meanwhile.pop()()
        return found


def test_a_move_during_a_read_is_no_attack(store: LocalStore, folder: Path) -> None:
    """The reader holds what it read against what had been seen before it asked."""
    publish(store, A, folder)
    slow = SlowStore(store.root, [lambda: publish(store, B, folder)])
    assert "a" == read(slow, folder)
    # And has not lowered the mark.
    mark = seen.last_mark(folder, store.uri(PLACE))
    assert mark
    assert 2 == mark.number
    assert "ab" == read(store, folder)


def test_processes_that_publish_at_once_are_no_attack(store: LocalStore, folder: Path) -> None:
    """Dagster runs each step in a process of its own."""
    fork = multiprocessing.get_context("fork")

    def work(number: int) -> None:
        for step in range(4):
            publish(store, f"{number}{step}" * 6, folder)

    processes = [fork.Process(target=work, args=(number,)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [0] * 4 == [process.exitcode for process in processes]
    assert 16 == len(read(store, folder))
    mark = seen.last_mark(folder, store.uri(PLACE))
    assert mark
    assert 16 == mark.number


def test_a_field_that_a_release_added_is_no_attack(store: LocalStore, folder: Path) -> None:
    """A later release writes old entries again, with fields that are null in them."""
    publish(store, A)
    payload = jsonio.parse(data(store), "")
    del payload["signature"]
    entries = payload["entries"]
    assert isinstance(entries, list)
    assert isinstance(entries[0], dict)
    assert entries[0].pop("encrypted") is None
    store.put_bytes(PLACE, signing.sign("channel", payload, KEY))
    assert "a" == read(store, folder)
    publish(store, B)
    assert "encrypted" in str(jsonio.parse(data(store), "")["entries"])
    assert "ab" == read(store, folder)


def test_a_damaged_mark_is_named(store: LocalStore, folder: Path) -> None:
    """Believing nothing was seen would let anyone who can damage it put back a channel."""
    publish(store, A, folder)
    (mark,) = folder.glob("*.json")
    mark.write_text("{}")
    with pytest.raises(StoreError, match="is not a valid Mark") as caught:
        read(store, folder)
    assert str(mark) in str(caught.value)
    # Accepted, it is gone.
    assert seen.forget(folder, store.uri(PLACE)) is None
    read(store, folder)


# The data keys of a build


KEYS = layout.build_key_key(MODEL, SUFFIX, A)


def rotated(store: Store, key_id: str, folder: Path | None = None) -> bytes:
    """Make it the build's data key, and return the history that had another one."""
    before = build_keys.read_keys(store, MODEL, SUFFIX, A, TRUSTED, folder)
    old = store.get_bytes(KEYS)
    assert before
    assert old
    build_keys.rotate(store, before, key_id, KEY, folder)
    return old.data


def current_key(store: Store, folder: Path | None) -> str:
    return build_keys.assign(store, MODEL, SUFFIX, A, lambda: "1" * 16, KEY, TRUSTED, seen=folder)


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        (False, "ends at entry 1, but entry 2 was seen here on 2.* UTC: an old one was put back"),
        (True, "is gone, but entry 2 was seen here"),
    ],
    ids=["put back", "removed"],
)
def test_a_data_key_that_was_given_up_does_not_come_back(
    store: LocalStore, folder: Path, gone: bool, said: str
) -> None:
    """Who was shut out by the change would open all that is built from then on."""
    assert "1" * 16 == current_key(store, folder)
    old = rotated(store, "2" * 16, folder)
    store.delete(KEYS)
    if not gone:
        store.put_bytes(KEYS, old)
    for act in (
        lambda: current_key(store, folder),
        lambda: build_keys.read_keys(store, MODEL, SUFFIX, A, TRUSTED, folder),
    ):
        with pytest.raises(HistoryError, match=said) as caught:
            act()
        assert store.uri(KEYS) in str(caught.value)
        assert "`tensorize channel accept org/tiny v1`" in str(caught.value)
    assert gone == (store.get_bytes(KEYS) is None)


def test_a_key_is_seen_by_who_made_it_and_by_who_reads_it(store: LocalStore, folder: Path) -> None:
    """Each of them may be the last one here that looks before the attack."""
    current_key(store, folder)
    where = store.uri(KEYS)
    seen_first = seen.last_mark(folder, where)
    rotated(store, "2" * 16)
    assert "2" * 16 == current_key(store, folder)
    seen_then = seen.last_mark(folder, where)
    assert (seen_first and seen_first.number, seen_then and seen_then.number) == (1, 2)


def test_accepting_a_channel_accepts_its_data_keys(
    store: LocalStore, folder: Path, tmp_path: Path
) -> None:
    """Those of this model and suffix in this store, gone or put back, and no others."""
    current_key(store, folder)
    old = rotated(store, "2" * 16, folder)
    store.put_bytes(KEYS, old)
    others: list[tuple[LocalStore, str, str, str]] = [
        (store, MODEL, SUFFIX, B),
        (store, MODEL, "v1-x", A),
        (LocalStore(tmp_path / "elsewhere"), MODEL, SUFFIX, A),
    ]
    for place, model, suffix, build in others:
        build_keys.assign(place, model, suffix, build, lambda: "3" * 16, KEY, TRUSTED, folder)
        place.delete(layout.build_key_key(model, suffix, build))
    accepted = build_keys.accept(store, MODEL, SUFFIX, TRUSTED, folder)
    gone = store.uri(layout.build_key_key(MODEL, SUFFIX, B))
    assert {(store.uri(KEYS), 2), (gone, 1)} == {(mark.where, mark.number) for mark in accepted}
    assert "1" * 16 == current_key(store, folder)
    assert build_keys.read_keys(store, MODEL, SUFFIX, B, TRUSTED, folder) is None
    for place, model, suffix, build in others[1:]:
        with pytest.raises(HistoryError, match="is gone"):
            build_keys.read_keys(place, model, suffix, build, TRUSTED, folder)
    assert () == build_keys.accept(store, MODEL, SUFFIX, TRUSTED, folder)


def test_a_strangers_data_keys_are_not_accepted(store: LocalStore, folder: Path) -> None:
    """Accepting believes an older history of ours, not one by somebody else."""
    current_key(store, folder)
    rotated(store, "2" * 16, folder)
    store.delete(KEYS)
    stranger = signing.SecretKey(bytes(range(1, 33)))
    build_keys.assign(store, MODEL, SUFFIX, A, lambda: "4" * 16, stranger, None)
    with pytest.raises(SignatureError):
        build_keys.accept(store, MODEL, SUFFIX, TRUSTED, folder)
    mark = seen.last_mark(folder, store.uri(KEYS))
    assert mark
    assert 2 == mark.number
