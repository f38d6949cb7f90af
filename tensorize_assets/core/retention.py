"""What of a root nobody needs any more: the plan, which `removal` carries out.

Of each channel the newest builds stay, what is current for any vLLM, and what a rollback would go
back to. Nothing goes that is younger than the rules say, that a channel of another suffix names,
that is protected by its id, or of which a run is under way. One-shot builds, and whatever is
neither in the catalog nor has a channel, are listed and never removed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal, NamedTuple

from tensorize_assets.core import layout, mirror
from tensorize_assets.core.audit_record import read_record
from tensorize_assets.core.build import base_id
from tensorize_assets.core.build_keys import BuildKeys, read_keys
from tensorize_assets.core.builds import Directory, Inventory, Pair, in_parallel, take_inventory
from tensorize_assets.core.catalog_automation import Retention
from tensorize_assets.core.channel import Channel, ChannelEntry, next_rollback
from tensorize_assets.core.errors import TensorizeAssetsError
from tensorize_assets.core.evidence import decode as decode_evidence
from tensorize_assets.core.manifest import Manifest, StoredManifest, read_manifest
from tensorize_assets.core.store import ListedObject, Store

Kind = Literal[
    "build",
    "unfinished",
    "unknown",
    "data key",
    "evidence",
    "audit",
    "reference",
    "snapshot",
    "snapshot files",
]
_SMALL: Sequence[tuple[Kind, str]] = (
    ("evidence", layout.EVIDENCE_FOLDER),
    ("audit", layout.AUDIT_FOLDER),
    ("reference", layout.REFERENCES_FOLDER),
    ("snapshot", layout.SNAPSHOTS_FOLDER),
)

_Small = dict[Kind, dict[str, tuple[ListedObject, ...]]]


class Busy(NamedTuple):
    """What runs that are under way or queued are of."""

    pairs: frozenset[Pair] = frozenset()
    commits: frozenset[str] = frozenset()


class Item(NamedTuple):
    """One thing of the plan: `where` is a directory, a prefix or a key of the root.

    Of a complete build that goes, `manifest_sha256` is that of its manifest. `key_ids` are the
    data keys that go: with an encrypted build, the one that another has taken the place of.
    """

    kind: Kind
    where: str
    pair: Pair | None
    objects: tuple[ListedObject, ...]
    keep: bool
    reason: str
    manifest_sha256: str | None = None
    key_ids: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(found.size for found in self.objects)

    @property
    def newest(self) -> float:
        """When the last of it was written, in seconds of the epoch."""
        return max((found.modified for found in self.objects), default=0.0)


class Plan(NamedTuple):
    """What stays and what goes, and why. Of small things only those that go are in it.

    `unread` says of each channel that could not be read why; nothing of its model goes.
    """

    items: tuple[Item, ...]
    keep: int
    cutoff: datetime
    channels: frozenset[Pair]
    unread: dict[Pair, str]

    @property
    def going(self) -> tuple[Item, ...]:
        return tuple(item for item in self.items if not item.keep)

    @property
    def bytes(self) -> int:
        """What removing it frees."""
        return sum(item.bytes for item in self.going)


class _Root(NamedTuple):
    """What a plan is made from."""

    store: Store
    inventory: Inventory
    unread: dict[str, str]
    small: _Small
    keys: tuple[ListedObject, ...]
    trusted: Collection[str] | None
    seen: Path | None
    busy: Busy
    protect: frozenset[str]
    days: int
    cutoff: datetime

    @property
    def oldest_kept(self) -> float:
        return self.cutoff.timestamp()


def plan(
    store: Store,
    pairs: Iterable[Pair],
    rules: Retention,
    protect: Iterable[str],
    trusted: Collection[str] | None,
    *,
    now: datetime,
    busy: Busy,
    seen: Path | None = None,
) -> Plan:
    """Return what of a root stays and what goes; changes nothing.

    `pairs` are those of the catalog, `busy` what runs are under way of. Reads each channel, and the
    manifests of what may go.

    Raises StoreError where the root cannot be listed.
    """
    wanted = tuple(pairs)
    cutoff = now - timedelta(days=rules.days)
    # Before the artifacts: evidence of a build that is completed meanwhile is not of a lost one.
    small: _Small = {kind: _grouped(kind, store.listing(folder)) for kind, folder in _SMALL}
    keys = store.listing(layout.KEYS_FOLDER)
    inventory = take_inventory(store, wanted, trusted, seen)
    root = _Root(
        store=store,
        inventory=inventory,
        unread={model: why for (model, _), why in inventory.unread.items()},
        small=small,
        keys=keys,
        trusted=trusted,
        seen=seen,
        busy=busy,
        protect=frozenset(protect),
        days=rules.days,
        cutoff=cutoff,
    )
    known = {*wanted, *inventory.channels}
    items = [*_directories(root, known, rules.keep), *_strays(inventory)]
    kept = {item.where: item for item in items if item.keep}
    items += _evidence_of_none(root, kept, {item.manifest_sha256 for item in items})
    unused = list(_of_no_commit(root, kept))
    items += unused
    items += _snapshot_files(root, {item.where for item in unused if item.kind == "snapshot"})
    items += _data_keys(root, known, kept)
    return Plan(
        items=tuple(items),
        keep=rules.keep,
        cutoff=cutoff,
        channels=frozenset(inventory.channels),
        unread=inventory.unread,
    )


def needed(channels: Mapping[Pair, Channel], keep: int) -> dict[str, str]:
    """Return the directories that channels need, and what for; `keep` as in the catalog."""
    found: dict[str, str] = {}
    for (_, suffix), channel in channels.items():
        for entry, why in _needed_entries(channel, keep):
            for _, directory, _ in entry.manifests():
                found.setdefault(directory, why)
        for entry in channel.entries:
            for _, directory, _ in entry.manifests():
                name = layout.build_name(directory)
                if name is None or name.suffix != suffix:
                    found.setdefault(directory, f"the channel of {suffix} names it")
    return found


def _needed_entries(channel: Channel, keep: int) -> Iterator[tuple[ChannelEntry, str]]:
    for version in dict.fromkeys(entry.vllm_version for entry in channel.entries):
        if current := channel.current_for(version):
            yield current, f"current for vLLM {version}"
    for entry in next_rollback(channel):
        yield entry, "a rollback goes back to it"
    newest = list(dict.fromkeys(entry.build_id for entry in reversed(channel.entries)))[:keep]
    # The last entry of each: an encrypted variant under an earlier data key is not gone back to.
    last = {(entry.build_id, entry.vllm_version): entry for entry in channel.entries}
    for (build_id, _), entry in last.items():
        if build_id in newest:
            yield entry, f"one of the newest {keep} builds of its channel"


# Directories


def _directories(root: _Root, known: set[Pair], keep: int) -> Iterator[Item]:
    """Every artifact directory. The manifest of one that may go has the last word."""
    channels = root.inventory.channels
    wanted = needed(channels, keep)
    named = {
        directory: entry.when
        for channel in channels.values()
        for entry in channel.entries
        for _, directory, _ in entry.manifests()
    }
    may_go: list[Directory] = []
    for directory in root.inventory.directories.values():
        why = _stays(root, directory, known, wanted, named)
        if why is None and directory.complete:
            may_go.append(directory)
        elif why is None:
            yield _item(directory, "unfinished", False, "it was never finished: no manifest")
        else:
            yield _item(directory, *why)

    def read(directory: Directory) -> StoredManifest | str:
        try:
            stored = read_manifest(root.store, directory.directory, root.trusted)
        except TensorizeAssetsError as error:
            return str(error)
        return stored or "its manifest is gone since it was listed"

    for directory, stored in zip(may_go, in_parallel(read, may_go), strict=True):
        if isinstance(stored, str):
            yield _item(directory, "unknown", True, stored)
        else:
            yield _of_manifest(root, directory, stored, named.get(directory.directory), keep)


def _stays(
    root: _Root,
    directory: Directory,
    known: set[Pair],
    wanted: Mapping[str, str],
    named: Mapping[str, datetime],
) -> tuple[Kind, bool, str] | None:
    """Why a directory stays, as far as that is known without its manifest."""
    model, name = directory.model, directory.name
    kind: Kind = "build" if directory.complete else "unfinished"
    if name is None:
        return "unknown", True, "no build of a profile: a one-shot build, or none of ours"
    pair = model, name.suffix
    unread = root.unread.get(model)
    when = named.get(directory.directory)
    why: str | None = None
    if unread is not None:
        why = f"a channel of its model cannot be read: {unread}"
    elif pair not in known:
        return "unknown", True, "its suffix is neither in the catalog nor has it a channel"
    elif pair in root.busy.pairs:
        why = "a run of it is under way"
    elif directory.directory in wanted:
        why = wanted[directory.directory]
    elif name.build_id in root.protect:
        why = "protected"
    elif directory.newest >= root.oldest_kept or (when and when >= root.cutoff):
        why = _younger(root)
    return (kind, True, why) if why else None


def _of_manifest(
    root: _Root, directory: Directory, stored: StoredManifest, when: datetime | None, keep: int
) -> Item:
    manifest = stored.manifest
    place = layout.encrypted_dir if manifest.encryption else layout.artifact_dir
    if directory.directory != place(manifest.model, manifest.suffix, manifest.build_id):
        return _item(directory, "unknown", True, "a one-shot build")
    if base_id(manifest.inputs) in root.protect:
        return _item(directory, "build", True, "protected")
    evidence = root.small["evidence"].get(layout.evidence_folder(stored.sha256), ())
    if any(found.modified >= root.oldest_kept for found in evidence):
        return _item(directory, "build", True, _younger(root))
    if when is not None:
        reason = f"not among the newest {keep} builds of its channel"
    else:
        reason = "it was never published" if evidence else "it was never reloaded"
    audits = root.small["audit"].get(layout.audit_key(stored.sha256), ())
    return Item(
        kind="build",
        where=directory.directory,
        pair=(manifest.model, manifest.suffix),
        objects=(*directory.objects, *evidence, *audits),
        keep=False,
        reason=reason,
        manifest_sha256=stored.sha256,
        key_ids=_given_up(root, manifest),
    )


def _given_up(root: _Root, manifest: Manifest) -> tuple[str, ...]:
    """The data key of an encrypted build, where another has taken its place."""
    key_id = manifest.inputs.data_key
    if key_id is None:
        return ()
    keys = _keys_of(root, manifest.model, manifest.suffix, base_id(manifest.inputs))
    earlier = [choice.key_id for choice in keys.choices[:-1]] if keys else []
    return (key_id,) if key_id in earlier else ()


def _item(directory: Directory, kind: Kind, keep: bool, reason: str) -> Item:
    pair = (directory.model, directory.name.suffix) if directory.name else None
    return Item(kind, directory.directory, pair, directory.objects, keep, reason)


def _younger(root: _Root) -> str:
    return f"younger than {root.days} days"


def _strays(inventory: Inventory) -> Iterator[Item]:
    """What lies below `vllm/` and is of no model that is known, by its first two folders."""
    folders: dict[str, list[ListedObject]] = {}
    for found in inventory.strays:
        folders.setdefault("/".join(found.key.split("/")[:3]), []).append(found)
    for folder, objects in folders.items():
        reason = "of no model of the catalog, nor of one that was built here"
        yield Item("unknown", folder, None, tuple(objects), True, reason)


# What belongs to directories


def _grouped(kind: Kind, listing: Iterable[ListedObject]) -> dict[str, tuple[ListedObject, ...]]:
    """Evidence by its manifest's folder, what is mirrored by its commit's or the files'; other
    things each by itself."""
    groups: dict[str, list[ListedObject]] = {}
    for found in listing:
        where = found.key
        if kind == "evidence" or (kind == "snapshot" and layout.mirrored(found.key)):
            where = found.key[: found.key.rfind("/") + 1]
        groups.setdefault(where, []).append(found)
    return {where: tuple(objects) for where, objects in groups.items()}


def _evidence_of_none(
    root: _Root, kept: Mapping[str, Item], going: Collection[str | None]
) -> Iterator[Item]:
    """Evidence and audit records whose manifest is gone, by what they say of themselves.

    Those of manifests that are `going` go with them.
    """
    named = {
        sha256
        for channel in root.inventory.channels.values()
        for entry in channel.entries
        for _, directory, sha256 in entry.manifests()
        if directory in kept
    }
    strays = {found.key for found in root.inventory.strays}

    def stands(place: str) -> bool:
        return place in kept or layout.manifest_key(place) in strays

    def places(kind: Kind, where: str) -> tuple[Pair, Collection[str]] | None:
        """Of what it is, and where the manifest would be; None for a record not believed."""
        sha256 = layout.manifest_sha256_in(where)
        if kind == "audit":
            record = read_record(root.store, sha256, root.trusted)
            return record and ((record.model, record.suffix), (record.directory,))
        key = root.small["evidence"][where][0].key
        found = root.store.get_bytes(key)
        if found is None:
            return None
        evidence = decode_evidence(found.data, root.trusted, root.store.uri(key))
        pair = evidence.model, evidence.suffix
        return pair, (
            layout.artifact_dir(*pair, evidence.build_id),
            layout.encrypted_dir(*pair, evidence.build_id),
            layout.oneshot_dir(*pair),
            layout.oneshot_encrypted_dir(*pair),
        )

    def of_none(one: tuple[Kind, str]) -> Pair | None:
        try:
            found = places(*one)
        except TensorizeAssetsError:
            return None
        return found[0] if found and not any(map(stands, found[1])) else None

    kinds: tuple[Kind, Kind] = ("evidence", "audit")
    asked: list[tuple[Kind, str]] = [
        (kind, where)
        for kind in kinds
        for where, objects in root.small[kind].items()
        if _is_old(root, objects)
        and (sha256 := layout.manifest_sha256_in(where)) not in named
        and sha256 not in going
    ]
    for (kind, where), pair in zip(asked, in_parallel(of_none, asked), strict=True):
        if pair is not None and pair not in root.busy.pairs:
            yield Item(kind, where, pair, root.small[kind][where], False, "of no build any more")


def _of_no_commit(root: _Root, kept: Mapping[str, Item]) -> Iterator[Item]:
    """Snapshots and answers of source models at commits that no directory is made of any more.

    None where it is not known what a directory is made of.
    """
    if root.unread:
        return
    commits = set(root.busy.commits)
    read: set[str] = set()
    for channel in root.inventory.channels.values():
        for entry in channel.entries:
            places = [directory for _, directory, _ in entry.manifests() if directory in kept]
            read.update(places)
            commits.update([entry.commit] if places else ())
    kinds: tuple[Kind, Kind] = ("reference", "snapshot")
    unused: list[tuple[Kind, str, str]] = [
        (kind, where, commit)
        for kind in kinds
        for where, objects in root.small[kind].items()
        if (commit := layout.commit_in(where)) and commit not in commits and _is_old(root, objects)
    ]
    if not unused:
        return
    # A channel does not say of which commits adapters are.
    if any(kind == "snapshot" for kind, _, _ in unused):
        read.clear()
    asked = [
        place
        for place, directory in root.inventory.directories.items()
        if place in kept and place not in read and directory.complete
    ]
    for stored in in_parallel(lambda place: _manifest(root, place), asked):
        if stored is None:
            return
        inputs = stored.manifest.inputs
        commits |= {inputs.commit, *(commit for _, commit in inputs.adapters)}
    for kind, where, commit in unused:
        if commit not in commits:
            reason = f"no build of commit {commit[:12]} is left"
            yield Item(kind, where, None, root.small[kind][where], False, reason)


def _snapshot_files(root: _Root, going: Collection[str]) -> Iterator[Item]:
    """Mirrored files that no list names but those that are `going`; of each repo in one item.

    None of a repo that is being mirrored, or has a list that cannot be read.
    """
    commits: dict[str, list[ListedObject]] = {}
    files: dict[str, tuple[ListedObject, ...]] = {}
    for where, objects in root.small["snapshot"].items():
        of = layout.mirrored(objects[0].key)
        if of is None:
            continue
        if of.commit is None:
            files[of.repo] = objects
        elif where not in going:
            commits.setdefault(of.repo, []).extend(objects)
    old = {
        repo: tuple(found for found in objects if _is_old(root, (found,)))
        for repo, objects in files.items()
    }
    asked = [repo for repo, objects in old.items() if objects]

    def needed(repo: str) -> frozenset[str] | None:
        return mirror.files_in_use(root.store, repo, commits.get(repo, ()))

    for repo, used in zip(asked, in_parallel(needed, asked), strict=True):
        unused = tuple(found for found in old[repo] if used is not None and found.key not in used)
        if unused:
            where = f"{layout.snapshots_of(repo)}files/"
            reason = "no mirrored snapshot has these files"
            yield Item("snapshot files", where, None, unused, False, reason)


def _data_keys(root: _Root, known: set[Pair], kept: Mapping[str, Item]) -> Iterator[Item]:
    """Data keys whose builds are all gone, with the record that they were the build's.

    A record of more than one key stays: without it, an old one that is put back would bring a key
    into use again that was given up.
    """
    alone: dict[Pair, list[tuple[str, ListedObject]]] = {}
    for found in root.keys:
        place = layout.pair_of(found.key, layout.BUILD_KEYS_FOLDER)
        name = place and layout.build_name(place[1])
        if place is None or name is None or not _is_old(root, (found,)):
            continue
        pair = place[0], name.suffix
        plain = layout.artifact_dir(*pair, name.build_id)
        if pair in known and pair not in root.busy.pairs and plain not in kept:
            alone.setdefault(pair, []).append((name.build_id, found))
    # Whose base is known: it is kept with it, and has a directory of its own.
    beside = {
        entry.encrypted.directory
        for channel in root.inventory.channels.values()
        for entry in channel.entries
        if entry.encrypted and entry.directory in kept
    }
    for pair, records in alone.items():
        hidden = [
            place
            for place, item in kept.items()
            if item.pair == pair and place.endswith(layout.ENCRYPTED_ENDING) and place not in beside
        ]
        oneshots = (layout.oneshot_dir(*pair), layout.oneshot_encrypted_dir(*pair))
        # A one-shot may have the suffix of a profile that is no more, and then a key of its own.
        if pair[0] in root.unread or any(place in kept for place in oneshots):
            continue
        # As many directories as records: each has its own.
        if len(records) <= len(hidden):
            continue
        stored = [_manifest(root, place) for place in hidden]
        whole = [one.manifest.inputs for one in stored if one is not None]
        if len(whole) < len(stored):
            continue
        alive = {base_id(inputs) for inputs in whole} | root.protect
        for build_id, record in records:
            keys = None if build_id in alive else _keys_of(root, *pair, build_id)
            if keys is None or len(keys.choices) > 1:
                continue
            own = (layout.seals_folder(keys.current), layout.key_record_key(keys.current))
            objects = (record, *(found for found in root.keys if found.key.startswith(own)))
            reason = f"its build {build_id} is gone"
            yield Item(
                "data key", record.key, pair, objects, False, reason, key_ids=(keys.current,)
            )


def _manifest(root: _Root, directory: str) -> StoredManifest | None:
    try:
        return read_manifest(root.store, directory, root.trusted)
    except TensorizeAssetsError:
        return None


def _keys_of(root: _Root, model: str, suffix: str, base: str) -> BuildKeys | None:
    try:
        found = read_keys(root.store, model, suffix, base, root.trusted, root.seen)
    except TensorizeAssetsError:
        return None
    return found and found.keys


def _is_old(root: _Root, objects: Iterable[ListedObject]) -> bool:
    return all(found.modified < root.oldest_kept for found in objects)
