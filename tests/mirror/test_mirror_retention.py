"""What of the mirror goes: snapshots of no build, and files of no snapshot."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from small_builds import MODEL, SUFFIX, TRUSTED, build, put
from wrapped_store import wrapped

from tensorize_assets.core import layout, lease, mirror
from tensorize_assets.core.catalog_automation import Retention
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.manifest import FileEntry
from tensorize_assets.core.mirror import SnapshotList
from tensorize_assets.core.removal import Removal, remove
from tensorize_assets.core.retention import Busy, Plan, plan
from tensorize_assets.core.store import Store

NOBODY = Busy()
DAY = timedelta(days=1)


def mirrored(store: Store, folder: Path, commit: str, *contents: bytes, repo: str = MODEL) -> None:
    """Mirror files of these contents at a commit."""
    folder.mkdir(exist_ok=True)
    entries: list[FileEntry] = []
    for number, content in enumerate(contents):
        (folder / f"{number}.json").write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        entries.append(FileEntry(path=f"{number}.json", size=len(content), sha256=sha256))
    found = SnapshotList(
        model=repo, commit=commit, weights_format="safetensors", files=tuple(entries)
    )
    mirror.upload(store, found, folder)


def key_of(content: bytes, repo: str = MODEL) -> str:
    return layout.snapshot_file_key(repo, hashlib.sha256(content).hexdigest())


def planned(store: Store, *, busy: Busy = NOBODY, after: timedelta = 100 * DAY) -> Plan:
    now = datetime.now(UTC) + after
    pairs = [(MODEL, SUFFIX)]
    return plan(store, pairs, Retention(keep=1, days=14), (), TRUSTED, now=now, busy=busy)


def removed(
    store: Store, made: Plan, busy: Callable[[], Busy] = lambda: NOBODY
) -> tuple[Removal, list[str]]:
    said: list[str] = []
    report = remove(store, made, trusted=TRUSTED, busy=busy, say=said.append, settle_s=0)
    return report, said


def going(made: Plan) -> dict[str, str]:
    return {
        item.where: item.reason
        for item in made.going
        if item.where.startswith(layout.SNAPSHOTS_FOLDER)
    }


def mirror_keys(store: Store) -> set[str]:
    return set(store.list(layout.SNAPSHOTS_FOLDER))


def test_snapshots_of_no_build_go_with_their_own_files(store: Store, tmp_path: Path) -> None:
    """What they share with one that stays stays; the report comes first, and removes nothing."""
    made = build(store, "a", adapters={"poet": 8})
    put(made)
    used, unused, adapter = made.manifest.inputs.commit, "e" * 40, "c" * 40
    mirrored(store, tmp_path / "hub", used, b"shared", b"used")
    mirrored(store, tmp_path / "hub", unused, b"shared", b"unused")
    mirrored(store, tmp_path / "hub", adapter, b"shared", b"matrices", repo="org/poet")
    assert adapter in {commit for _, commit in made.manifest.inputs.adapters}
    before = mirror_keys(store)

    found = planned(store)

    files = f"{layout.snapshots_of(MODEL)}files/"
    assert {
        layout.snapshot_folder(MODEL, unused): f"no build of commit {unused[:12]} is left",
        files: "no mirrored snapshot has these files",
    } == going(found)
    assert before == mirror_keys(store)
    report, said = removed(store, found)
    assert {layout.snapshot_key(MODEL, unused), key_of(b"unused")} == before - mirror_keys(store)
    assert {} == report.spared
    assert found.bytes == report.bytes
    assert f"removed 1 files (6 bytes) of {files}" in said
    assert {} == going(planned(store))


def test_files_that_an_upload_left_go_when_they_are_old(store: Store, tmp_path: Path) -> None:
    """A killed run may come again, and needs them then."""
    put(build(store, "a"))
    store.put_bytes(key_of(b"left"), b"left")
    assert {} == going(planned(store, after=13 * DAY))
    assert [f"{layout.snapshots_of(MODEL)}files/"] == list(going(planned(store)))


def aged(store: LocalStore, *keys: str) -> None:
    """Have objects written twenty days ago."""
    then = (datetime.now(UTC) - 20 * DAY).timestamp()
    for key in keys:
        os.utime(store.root / key, times=(then, then))


@pytest.mark.parametrize("moment", ["planned", "removed"])
@pytest.mark.parametrize("what", ["lease", "list", "sent again", "damaged list"])
def test_what_is_being_mirrored_stays(tmp_path: Path, moment: str, what: str) -> None:
    """Files that no list names yet may be just those that a run has found there."""
    store = LocalStore(tmp_path / "root")
    put(build(store, "a"))
    store.put_bytes(key_of(b"left"), b"left")
    aged(store, key_of(b"left"))

    def mirror_it() -> None:
        held = lease.Lease(owner="host-a, process 7", token="x", beat=3)
        if what == "lease":
            key = layout.snapshot_lease_key(MODEL, "e" * 40)
            store.put_bytes(key, held.model_dump_json().encode())
        elif what == "list":
            mirrored(store, tmp_path / "hub", "e" * 40, b"left")
        elif what == "sent again":
            store.put_bytes(key_of(b"left"), b"left")
        else:
            store.put_bytes(layout.snapshot_key(MODEL, "e" * 40), b"?")

    if moment == "planned":
        mirror_it()
        assert {} == going(planned(store, after=0 * DAY))
        return
    made = planned(store, after=0 * DAY)
    assert [f"{layout.snapshots_of(MODEL)}files/"] == list(going(made))
    mirror_it()
    report, _ = removed(store, made)
    assert [f"{layout.snapshots_of(MODEL)}files/"] == list(report.spared)
    assert store.stat(key_of(b"left")) is not None


@pytest.mark.parametrize("lease_is", ["free", "left by a dead run"])
def test_a_lease_of_nobody_keeps_nothing(tmp_path: Path, lease_is: str) -> None:
    """Leases stay where they were, and are of nobody then."""
    store = LocalStore(tmp_path / "root")
    put(build(store, "a"))
    store.put_bytes(key_of(b"left"), b"left")
    held = lease.Lease(owner="host-a", token="x", beat=3, free=lease_is == "free")
    key = layout.snapshot_lease_key(MODEL, "e" * 40)
    store.put_bytes(key, held.model_dump_json().encode())
    aged(store, key_of(b"left"), *([key] if lease_is != "free" else []))
    files = f"{layout.snapshots_of(MODEL)}files/"
    made = planned(store, after=0 * DAY)
    assert files in going(made)
    removed(store, made)
    assert store.stat(key_of(b"left")) is None


def test_a_commit_of_a_run_stays(tmp_path: Path) -> None:
    """Of its model or of its adapters: nothing is built of it yet."""
    store = LocalStore(tmp_path / "root")
    put(build(store, "a"))
    mirrored(store, tmp_path / "hub", "e" * 40, b"weights")
    busy = Busy(commits=frozenset(["e" * 40]))
    assert {} == going(planned(store, busy=busy))
    made = planned(store)
    report, _ = removed(store, made, busy=lambda: busy)
    assert layout.snapshot_folder(MODEL, "e" * 40) in report.spared
    # Its list is there, and names them.
    assert f"{layout.snapshots_of(MODEL)}files/" in report.spared
    assert store.stat(key_of(b"weights")) == 7


def test_a_removal_that_was_killed_leaves_what_the_next_one_finds(tmp_path: Path) -> None:
    """Lists go before files, so that no list names what is gone."""
    store = LocalStore(tmp_path / "root")
    put(build(store, "a"))
    mirrored(store, tmp_path / "hub", "e" * 40, b"one", b"two")

    def stops(method: str, key: str) -> None:
        if method == "delete" and "/files/" in key:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        removed(wrapped(store, stops), planned(store))
    assert mirror.read_list(store, MODEL, "e" * 40) is None
    made = planned(store)
    assert [f"{layout.snapshots_of(MODEL)}files/"] == list(going(made))
    removed(store, made)
    assert set() == mirror_keys(store)
