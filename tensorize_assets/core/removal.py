"""Removes what a plan of `retention` says, in the reverse of the order in which it was published.

The manifests of some directories go first, then, after a moment, their channels are read once more:
whoever publishes one of them at that very time either finds its manifest gone, or has it put back.
Only then do files go, and evidence last. Killed in between, a directory without a manifest is left,
and the next plan has it removed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tensorize_assets.core import layout, mirror
from tensorize_assets.core.builds import Pair, in_parallel
from tensorize_assets.core.channel import Channel, read_channel
from tensorize_assets.core.errors import (
    ConflictError,
    StoreError,
    StoreUnavailableError,
    TensorizeAssetsError,
)
from tensorize_assets.core.manifest import manifest_sha256
from tensorize_assets.core.retention import Busy, Item, Plan, needed
from tensorize_assets.core.seen import forget
from tensorize_assets.core.store import ListedObject, Store

Say = Callable[[str], None]

# Their manifests are held in memory meanwhile.
_AT_ONCE = 32
# A publisher looks for the manifest and moves the channel in two requests, one after the other, and
# the second may be sent again by the client; what lands later still, `publish` finds out itself.
_SETTLE_S = 30.0
# What a plan has go because of builds that go.
_OF_BUILDS = ("data key", "reference", "snapshot", "snapshot files")
# What a build that is there again has use for, and does not write anew.
_TAKEN_UP = ("data key", "evidence", "audit")


class Removal(NamedTuple):
    """What was removed, what the plan wanted to remove and why it stays, and the bytes freed."""

    removed: tuple[Item, ...]
    spared: dict[str, str]
    bytes: int


class _Work(NamedTuple):
    """What removing takes."""

    store: Store
    plan: Plan
    planned: frozenset[ListedObject]
    trusted: Collection[str] | None
    seen: Path | None
    busy: Callable[[], Busy]
    say: Say
    spared: dict[str, str]

    def spare(self, item: Item, why: str) -> None:
        self.spared[item.where] = why
        self.say(f"{self.store.uri(item.where)} stays: {why}")


class _Retired(NamedTuple):
    """A build whose manifest was removed; `data` is the manifest."""

    item: Item
    data: bytes


def remove(
    store: Store,
    plan: Plan,
    *,
    trusted: Collection[str] | None,
    busy: Callable[[], Busy],
    say: Say,
    seen: Path | None = None,
    settle_s: float | None = None,
) -> Removal:
    """Remove what goes by the plan, unless it is needed by now.

    `busy` tells what runs are under way of at the moment it is called. `settle_s` is the time in
    seconds for which manifests are gone before their files are; None is half a minute.

    Raises StoreUnavailableError at the end for what the store did not do because it was in trouble:
    the next plan has it. Raises StoreError at once for what the store refuses.
    """
    planned = frozenset(found for item in plan.items for found in item.objects)
    work = _Work(store, plan, planned, trusted, seen, busy, say, {})
    settle_s = _SETTLE_S if settle_s is None else settle_s
    removed: list[Item] = []
    trouble: list[StoreUnavailableError] = []
    builds = [item for item in plan.going if item.kind == "build"]
    # An encrypted variant was made after the build that it is of.
    builds.sort(key=lambda item: not item.where.endswith(layout.ENCRYPTED_ENDING))
    for start in range(0, len(builds), _AT_ONCE):
        for item in _remove_builds(work, builds[start : start + _AT_ONCE], settle_s, trouble):
            removed.append(item)
            say(f"removed {store.uri(item.where)} ({item.bytes:,} bytes): {item.reason}")
    as_planned = len(removed) == len(builds)
    for item in plan.going:
        if item.kind == "build":
            continue
        try:
            # Asked for each: runs begin while others are removed.
            pairs, commits = busy()
            if item.pair in pairs or layout.commit_in(item.where) in commits:
                work.spare(item, "a run of it is under way")
            elif item.kind in _OF_BUILDS and not as_planned:
                work.spare(item, "not every build went that was to go")
            elif item.kind == "snapshot files":
                gone = _remove_snapshot_files(work, item)
                if gone is not None:
                    removed.append(gone)
                    say(f"removed {len(gone.objects)} files ({gone.bytes:,} bytes) of {item.where}")
            elif _is_as_planned(work, item):
                _remove_rest(work, item)
                removed.append(item)
                say(f"removed {store.uri(item.where)} ({item.bytes:,} bytes): {item.reason}")
        except StoreUnavailableError as error:
            trouble.append(error)
    _sweep(work, trouble)
    if trouble:
        raise StoreUnavailableError(
            f"{len(trouble)} of {len(plan.going)} could not be removed, the first because: "
            f"{trouble[0]}; they are in the next plan again"
        )
    return Removal(tuple(removed), work.spared, sum(item.bytes for item in removed))


def _remove_builds(
    work: _Work, items: Sequence[Item], settle_s: float, trouble: list[StoreUnavailableError]
) -> Iterator[Item]:
    """Remove some directories, all manifests first; yield each that is gone."""
    pairs = work.busy().pairs
    retired: list[_Retired] = []
    try:
        for item in items:
            try:
                why = "a run of it is under way" if item.pair in pairs else _why_needed(work, item)
                data = None if why else _retire(work, item)
            except StoreUnavailableError as error:
                trouble.append(error)
                continue
            if why:
                work.spare(item, why)
            elif data is not None:
                retired.append(_Retired(item, data))
        if retired:
            time.sleep(settle_s)
        while retired:
            item, data = retired[-1]
            # Asked before its channel is read: a run that ends in between has moved it by then.
            under_way = item.pair in work.busy().pairs
            why = _why_needed(work, item)
            if why is None and under_way and _is_unchanged(work, item):
                why = "a run of it is under way"
            if why:
                _put_back(work, item, data)
                why = f"{why}; its manifest, removed meanwhile, is there again"
            elif under_way:
                # Its files may be other bytes by now, of which the old manifest is wrong.
                why = "a run of it is under way, which writes it again"
            elif work.store.stat(layout.manifest_key(item.where)) is not None:
                why = "it was built again"
            retired.pop()
            if why:
                work.spare(item, why)
                continue
            try:
                _remove_files(work, item)
            except StoreUnavailableError as error:
                trouble.append(error)
                continue
            yield item
    except BaseException:
        # Of these no file is gone yet: they are whole again.
        for item, data in retired:
            with suppress(TensorizeAssetsError):
                _put_back(work, item, data)
        raise


def _why_needed(work: _Work, item: Item) -> str | None:
    """What a directory is needed for as channels are now, or None."""
    pairs: set[Pair] = set()
    if item.pair is not None:
        pairs = {item.pair, *(pair for pair in work.plan.channels if pair[0] == item.pair[0])}
    channels: dict[Pair, Channel] = {}
    for pair in pairs:
        try:
            found = read_channel(work.store, *pair, work.trusted, work.seen)
        except TensorizeAssetsError as error:
            return f"a channel of its model cannot be read: {error}"
        if found is not None:
            channels[pair] = found.channel
    return needed(channels, work.plan.keep).get(item.where)


def _retire(work: _Work, item: Item) -> bytes | None:
    """Remove a build's manifest and return it; None where it is not the planned one any more."""
    key = layout.manifest_key(item.where)
    found = work.store.get_bytes(key)
    if found is None or manifest_sha256(found.data) != item.manifest_sha256:
        work.spare(item, "its manifest was removed or replaced since the plan was made")
        return None
    work.store.delete(key)
    return found.data


def _put_back(work: _Work, item: Item, data: bytes) -> None:
    key = layout.manifest_key(item.where)
    try:
        # Whoever was first has written the same: of one build there is one manifest.
        with suppress(ConflictError):
            work.store.put_bytes(key, data, if_absent=True)
    except StoreUnavailableError as error:
        raise StoreError(
            f"{work.store.uri(key)} was removed, is needed and could not be put back: {error}; "
            "materialize its partition from hf_snapshot on, which writes it again"
        ) from error


def _remove_files(work: _Work, item: Item) -> None:
    """Remove the rest of a directory, its data key if that was given up, and its evidence."""
    store = work.store
    for key_id in item.key_ids:
        _remove_data_key(store, key_id)
    _delete(store, f"{item.where}/")
    if item.manifest_sha256 is None or store.stat(layout.manifest_key(item.where)) is not None:
        return
    _delete(store, layout.evidence_folder(item.manifest_sha256))
    store.delete(layout.audit_key(item.manifest_sha256))


def _is_unchanged(work: _Work, item: Item) -> bool:
    """Whether nothing was written to a directory since the plan was made."""
    return work.planned.issuperset(work.store.listing(f"{item.where}/"))


def _is_as_planned(work: _Work, item: Item) -> bool:
    """Whether nothing of it was written since the plan was made; else it is spared."""
    now = work.store.listing(f"{item.where}/" if item.kind == "unfinished" else item.where)
    if not set(now) <= set(item.objects):
        work.spare(item, "it was written to since the plan was made")
        return False
    if item.kind in _TAKEN_UP and item.pair is not None and _was_built(work, item.pair):
        work.spare(item, "a build of its suffix was written since the plan was made")
        return False
    return True


def _was_built(work: _Work, pair: Pair) -> bool:
    """Whether anything was written to a directory of a suffix since the plan was made."""
    folder = f"{layout.model_folder(pair[0])}/"
    oneshots = (layout.oneshot_dir(*pair), layout.oneshot_encrypted_dir(*pair))
    for found in work.store.listing(folder):
        directory, _, below = found.key.removeprefix(folder).partition("/")
        name = layout.build_name(directory)
        of_pair = f"{folder}{directory}" in oneshots or (
            name is not None and name.suffix == pair[1]
        )
        if below and of_pair and found not in work.planned:
            return True
    return False


def _remove_rest(work: _Work, item: Item) -> None:
    """Remove what is no complete build."""
    if item.kind == "unfinished":
        _remove_files(work, item)
    elif item.kind == "evidence" or item.where.endswith("/"):
        _delete(work.store, item.where)
    elif item.kind == "data key":
        # The build's record last: while it stands, the rest is found again.
        for key_id in item.key_ids:
            _remove_data_key(work.store, key_id)
        if work.seen is not None:
            forget(work.seen, work.store.uri(item.where))
        work.store.delete(item.where)
    else:
        work.store.delete(item.where)


def _remove_snapshot_files(work: _Work, item: Item) -> Item | None:
    """Remove mirrored files that no list names by now; return those that went.

    Whoever mirrors a commit that has them holds a lease meanwhile, and looks for them once more
    when its list stands.
    """
    repo = item.where.removeprefix(layout.SNAPSHOTS_FOLDER).removesuffix("/files/")
    there = work.store.listing(layout.snapshots_of(repo))
    used = mirror.files_in_use(work.store, repo, there)
    if used is None:
        work.spare(item, "its repo is being mirrored, or a list of what is mirrored is unreadable")
        return None
    # A file that was sent again since is of somebody.
    unchanged = set(item.objects).intersection(there)
    going = tuple(found for found in item.objects if found in unchanged and found.key not in used)
    if not going:
        work.spare(item, "its files are in use by now")
        return None
    for _ in in_parallel(work.store.delete, [found.key for found in going]):
        pass
    return item._replace(objects=going)


def _remove_data_key(store: Store, key_id: str) -> None:
    # Without this record there is no such key for any reader.
    store.delete(layout.key_record_key(key_id))
    _delete(store, layout.seals_folder(key_id))


def _delete(store: Store, prefix: str) -> None:
    """Remove every object under `prefix`, which ends in a slash, and the folder that is left."""
    for _ in in_parallel(store.delete, store.list(prefix)):
        pass
    folder = store.local_path(prefix.rstrip("/"))
    if folder is not None:
        _remove_empty(folder)


def _remove_empty(folder: Path) -> None:
    """Remove a folder of a disk and those in it, as far as nothing is in them."""
    # What is not empty stays, and so does what another process is about to write to.
    with suppress(OSError):
        for below in folder.iterdir():
            if below.is_dir() and not below.is_symlink():
                _remove_empty(below)
        folder.rmdir()


def _sweep(work: _Work, trouble: list[StoreUnavailableError]) -> None:
    """Remove what killed writers left half-written that long ago."""
    age_s = time.time() - work.plan.cutoff.timestamp()
    try:
        folders = (layout.ARTIFACTS_FOLDER, layout.SNAPSHOTS_FOLDER)
        count = sum(work.store.sweep(folder, age_s) for folder in folders)
    except StoreUnavailableError as error:
        trouble.append(error)
        return
    if count:
        work.say(f"removed {count} half-written uploads")
