"""Brings a commit of the Hub into the mirror, once, whoever asks for it at the same time.

What a snapshot's files are is known from the Hub, also where nothing is downloaded from it: of
large files it declares the SHA-256, and of small ones the Git hash, against which those in the
mirror are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

from pydantic import JsonValue

from tensorize_assets.core import hub, hub_config, layout, lease, local_adapter, mirror
from tensorize_assets.core.errors import HubError, StoreError
from tensorize_assets.core.hub_access import HubAccess
from tensorize_assets.core.hub_download import Progress
from tensorize_assets.core.hub_files import HubFile, RevisionListing, Snapshot, SnapshotFile
from tensorize_assets.core.manifest import FileEntry
from tensorize_assets.core.protocol import format_bytes
from tensorize_assets.core.signing import SecretKey
from tensorize_assets.core.store import Hasher, Store

Say = Callable[[str], None]
Check = Callable[[dict[str, JsonValue]], None]


class Mirrored(NamedTuple):
    """A snapshot in the mirror. `downloaded`: from the Hub, by this call.

    Bytes that this call sent to the mirror, and bytes that were there before it.
    """

    snapshot: Snapshot
    downloaded: bool
    sent_bytes: int
    kept_bytes: int


class Work(NamedTuple):
    """What bringing snapshots into a mirror takes.

    `progress(model, "downloaded")` returns what is told the bytes that are. `key` signs what lets
    parts of files be read.
    """

    store: Store
    access: HubAccess
    say: Say
    progress: Callable[[str, str], Progress]
    key: SecretKey | None = None
    lease_expiry_s: float = lease.EXPIRY_S
    lease_beat_s: float = lease.BEAT_S


def bring(work: Work, listing: RevisionListing, check: Check | None = None) -> Mirrored:
    """Have the files of a listing in the mirror, and return them as they were checked.

    Where they are there, nothing is downloaded. Where another run is at it, on this machine or
    another, it is waited for. `check` is given the model's config.json before anything large comes;
    what it raises passes through.

    Raises as `hub.download`, `hub.check_contents` and `mirror.upload` do.
    """
    found = _found(work, listing, check)
    if found is not None:
        return found
    model, commit = listing.model, listing.commit
    key = layout.snapshot_lease_key(model, commit)
    what = f"mirroring {model} at {commit[:12]}"
    with lease.held(
        work.store,
        key,
        what,
        work.say,
        expiry_s=work.lease_expiry_s,
        beat_s=work.lease_beat_s,
    ):
        found = _found(work, listing, check)
        if found is not None:
            return found
        if check is not None:
            check(hub.fetch_config(work.access, listing))
        snapshot, folder = hub.download(
            work.access, model, listing, work.progress(model, "downloaded")
        )
        hub.check_contents(work.access, listing, folder)
        sent = mirror.upload(
            work.store, as_list(snapshot), folder, work.progress(model, "mirrored"), work.key
        )
    work.say(
        f"{model} at {commit} is in the mirror: {format_bytes(sent.sent_bytes)} sent, "
        f"{format_bytes(sent.kept_bytes)} were there"
    )
    return Mirrored(snapshot, True, *sent)


def find(work: Work, listing: RevisionListing) -> Snapshot | None:
    """Return the snapshot of a listing if the mirror has it whole; None where it has not.

    Small files are read, and held against the Hub's hashes; of large ones it is looked whether
    they are there. A small one that is damaged is removed from the mirror.
    """
    model, commit = listing.model, listing.commit
    known = mirror.read_list(work.store, model, commit)
    if known is None:
        return None
    entries = {file.path: file for file in known.files}
    chosen: list[FileEntry] = []
    for file in listing.files:
        entry = entries.get(file.path)
        if entry is None or entry.size != file.size:
            return None
        if file.lfs_sha256 not in (None, entry.sha256):
            return None
        chosen.append(entry)
    absent = mirror.missing(work.store, model, chosen)
    if absent:
        work.say(f"the mirror has lost {len(absent)} files of {model}, first {absent[0].path}")
        return None
    if work.key is not None and mirror.without_blocks(work.store, model, chosen):
        work.say(f"the mirror has lost what lets parts of {model}'s files be read")
        return None
    for file, entry in zip(listing.files, chosen, strict=True):
        if file.lfs_sha256 is None and not _is_declared(work.store, model, file, entry):
            key = layout.snapshot_file_key(model, entry.sha256)
            work.say(f"{work.store.uri(key)} is not {file.path} of {model}: removed")
            work.store.delete(key)
            return None
    return Snapshot(
        model=model,
        revision=listing.revision,
        commit=commit,
        files=tuple(
            SnapshotFile(path=file.path, size=file.size, sha256=file.sha256)
            for file in sorted(chosen, key=lambda file: file.path)
        ),
        weights_format=listing.weights_format,
    )


def resolve_adapter(work: Work, repo: str, revision: str) -> RevisionListing:
    """As `hub.resolve_adapter`, or of a local adapter, which the mirror may have alone.

    Raises HubError where it is gone from this machine and was never mirrored.
    """
    if not local_adapter.is_local(repo):
        return hub.resolve_adapter(work.access, repo, revision)
    try:
        return local_adapter.resolve(work.access, repo, revision)
    except HubError:
        known = mirror.read_list(work.store, repo, revision)
        # Its commit is a hash of its files' hashes, so that the list needs no other proof.
        if known is None or local_adapter.commit_of(known.files) != revision:
            raise
        return local_adapter.listing_of(repo, revision, known.files)


def as_list(snapshot: Snapshot) -> mirror.SnapshotList:
    """A snapshot as the mirror lists it."""
    return mirror.SnapshotList(
        model=snapshot.model,
        commit=snapshot.commit,
        weights_format=snapshot.weights_format,
        files=entries_of(snapshot),
    )


def entries_of(snapshot: Snapshot) -> tuple[FileEntry, ...]:
    """A snapshot's files as manifests and the mirror have them."""
    return tuple(
        FileEntry(path=file.path, size=file.size, sha256=file.sha256) for file in snapshot.files
    )


def read_config(store: Store, snapshot: Snapshot) -> dict[str, JsonValue]:
    """Return config.json of a mirrored snapshot.

    Raises HubError when it has none; StoreError when what is there is another file.
    """
    entry = next((file for file in entries_of(snapshot) if file.path == "config.json"), None)
    if entry is None:
        raise HubError(
            f"{snapshot.model}@{snapshot.commit} has no config.json: the repo is not in the layout "
            "of transformers, and vLLM could not load it"
        )
    data = b"".join(mirror.chunks(store, snapshot.model, entry))
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        key = layout.snapshot_file_key(snapshot.model, entry.sha256)
        raise StoreError(
            f"{store.uri(key)} is damaged; remove it and materialize hf_snapshot again"
        )
    return hub_config.parse_config(data, f"config.json of {snapshot.model}@{snapshot.commit}")


def _found(work: Work, listing: RevisionListing, check: Check | None) -> Mirrored | None:
    snapshot = find(work, listing)
    if snapshot is None:
        return None
    if check is not None:
        check(read_config(work.store, snapshot))
    work.say(f"{listing.model} at {listing.commit} is in the mirror: nothing is downloaded")
    return Mirrored(snapshot, False, 0, sum(file.size for file in snapshot.files))


def _is_declared(store: Store, model: str, file: HubFile, entry: FileEntry) -> bool:
    """Whether the object has both hashes: the one that the list says, and the Hub's."""
    git = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    hasher = Hasher()
    for chunk in mirror.chunks(store, model, entry):
        hasher.update(chunk)
        git.update(chunk)
    return (hasher.digest().sha256, git.hexdigest()) == (entry.sha256, file.git_blob_id)
