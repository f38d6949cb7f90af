"""Published builds are read again and hashed, a share each night, so that rot is found in time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from tensorize_assets.core import layout, signing
from tensorize_assets.core.audit_record import (
    AuditRecord,
    Damage,
    read_record,
    remedy,
    write_record,
)
from tensorize_assets.core.builds import Inventory, in_parallel
from tensorize_assets.core.channel import Channel
from tensorize_assets.core.errors import StoreUnavailableError, TensorizeAssetsError
from tensorize_assets.core.store import Store
from tensorize_assets.core.verify import verify_directory

# A directory of another build in its place has as many problems as files.
_MOST_DAMAGE = 100

Say = Callable[[str], None]


class Published(NamedTuple):
    """A directory that a channel's history names, and what its last audit found.

    `since` is when the channel named it last, `bytes` what is listed of it: 0 for one that is gone.
    """

    model: str
    suffix: str
    build_id: str
    directory: str
    manifest_sha256: str
    since: datetime
    current: bool
    bytes: int
    record: AuditRecord | None

    @property
    def damaged(self) -> bool:
        return self.record is not None and bool(self.record.damage)


class Night(NamedTuple):
    """What an audit did. `damaged` is all that is known to be, `unread` what could not be read.

    `bytes` were read and found right, in `seconds`; `total_bytes` is all that is published, and
    `oldest` when the build was last read that was not for longest: published, where it never was.
    """

    records: tuple[AuditRecord, ...]
    damaged: tuple[AuditRecord, ...]
    unread: dict[str, str]
    seconds: float
    total_bytes: int
    directories: int
    oldest: datetime | None

    @property
    def bytes(self) -> int:
        return sum(record.bytes for record in self.records)


def published(
    store: Store, inventory: Inventory, trusted: Collection[str] | None
) -> tuple[Published, ...]:
    """Return every directory that a history names; one that was replaced only if it is there still.

    Raises StoreError where the root cannot be listed.
    """
    named: dict[str, Published] = {}
    for (model, suffix), channel in inventory.channels.items():
        current = _current(channel)
        for entry in channel.entries:
            for build_id, directory, sha256 in entry.manifests():
                found = inventory.directories.get(directory)
                if directory not in current and (found is None or not found.complete):
                    continue
                before = named.get(directory)
                named[directory] = Published(
                    model=model,
                    suffix=suffix,
                    build_id=build_id,
                    directory=directory,
                    manifest_sha256=sha256,
                    since=max(entry.when, before.since) if before else entry.when,
                    current=directory in current or (before is not None and before.current),
                    bytes=found.bytes if found else 0,
                    record=None,
                )
    audited = set(store.list(layout.AUDIT_FOLDER))

    def with_record(one: Published) -> Published:
        if layout.audit_key(one.manifest_sha256) not in audited:
            return one
        try:
            record = read_record(store, one.manifest_sha256, trusted)
        except StoreUnavailableError:
            # As one that was never read: it comes first.
            return one
        return one._replace(record=record)

    return tuple(in_parallel(with_record, named.values()))


def due(
    directories: Sequence[Published], within: timedelta, now: datetime
) -> tuple[Published, ...]:
    """Return what is to be read now, if an audit runs each day and reads each byte once `within`.

    First what is damaged or gone, whatever its size: it may be whole again. Then what was never
    read, current builds before others, and what was read longest ago, until that is the share of a
    day. Whatever would be late is read however much it is.
    """
    begun = min((one.record.when for one in directories if one.record), default=now)
    share = sum(one.bytes for one in directories) / (within / timedelta(days=1))

    def turn(one: Published) -> tuple[bool, bool, datetime]:
        if one.record is None:
            return False, not one.current, one.since
        return True, False, one.record.when

    chosen = [one for one in directories if one.damaged or not one.bytes]
    size = 0
    for one in sorted((one for one in directories if one.bytes and not one.damaged), key=turn):
        if size < share or now - _last(one, begun) >= within:
            chosen.append(one)
            size += one.bytes
    return tuple(chosen)


def audit(
    store: Store,
    key: signing.SecretKey,
    trusted: Collection[str] | None,
    directories: Iterable[Published],
    chosen: Iterable[Published],
    say: Say,
    warn: Say,
) -> Night:
    """Read `chosen` of `directories`, each file once, and record what was found of each.

    A directory whose store is in trouble is left for the next audit. What was recorded stays when
    this is killed.

    Raises what kept the last one from being read, where that was so of all.
    """
    begun = time.monotonic()
    found: dict[str, AuditRecord] = {}
    unread: dict[str, str] = {}
    trouble: TensorizeAssetsError | None = None
    for one in chosen:
        try:
            record = _audit_one(store, key, trusted, one)
        except TensorizeAssetsError as error:
            trouble = error
            unread[one.directory] = str(error)
            warn(
                f"{store.uri(one.directory)} could not be read, and comes first next time: {error}"
            )
            continue
        if record is None:
            say(f"{store.uri(one.directory)} was removed meanwhile")
            continue
        found[one.directory] = record
        if record.damage:
            for damage in record.damage:
                warn(f"{store.uri(one.directory)}: {damage.message}")
            warn(f"{one.model} {one.suffix}, build {one.build_id} is damaged: {remedy(record)}")
        else:
            say(f"{store.uri(one.directory)}: {record.bytes:,} bytes, all as the manifest says")
    if trouble is not None and not found:
        raise trouble
    now = [one._replace(record=found.get(one.directory, one.record)) for one in directories]
    return Night(
        records=tuple(found.values()),
        damaged=tuple(one.record for one in now if one.record is not None and one.damaged),
        unread=unread,
        seconds=time.monotonic() - begun,
        total_bytes=sum(one.bytes for one in now),
        directories=len(now),
        oldest=min((one.record.when if one.record else one.since for one in now), default=None),
    )


def _audit_one(
    store: Store, key: signing.SecretKey, trusted: Collection[str] | None, one: Published
) -> AuditRecord | None:
    """Read one directory and record what was found; None for one that retention has taken."""
    begun = time.monotonic()
    report = verify_directory(store, one.directory, trusted)
    damage = [
        Damage(kind=problem.kind, path=problem.path, message=problem.message)
        for problem in report.problems[:_MOST_DAMAGE]
    ]
    if report.manifest_sha256 not in (None, one.manifest_sha256):
        message = (
            f"{layout.MANIFEST} has SHA-256 {report.manifest_sha256}, the channel says "
            f"{one.manifest_sha256}: another one was put in its place"
        )
        damage.insert(0, Damage(kind="manifest", path=layout.MANIFEST, message=message))
    if damage and not one.current and store.stat(layout.manifest_key(one.directory)) is None:
        return None
    record = AuditRecord(
        model=one.model,
        suffix=one.suffix,
        build_id=one.build_id,
        directory=one.directory,
        manifest_sha256=one.manifest_sha256,
        when=datetime.now(UTC),
        bytes=report.bytes,
        seconds=time.monotonic() - begun,
        damage=tuple(damage),
    )
    write_record(store, key, record)
    return record


def _current(channel: Channel) -> set[str]:
    """The directories that are current for any release of vLLM."""
    versions = {entry.vllm_version for entry in channel.entries}
    entries = (channel.current_for(version) for version in versions)
    return {place for entry in entries if entry for _, place, _ in entry.manifests()}


def _last(one: Published, begun: datetime) -> datetime:
    """When a directory was read last. Of one that never was: from when on it could have been."""
    return one.record.when if one.record else max(one.since, begun)
