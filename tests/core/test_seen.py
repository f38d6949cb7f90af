"""What was valid once and is put back: caught by what this home has seen."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tensorize_assets.core import channel as channels
from tensorize_assets.core import jsonio, layout, seen, signing
from tensorize_assets.core.channel import Channel
from tensorize_assets.core.errors import HistoryError, StoreError
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
