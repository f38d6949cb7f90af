"""hf_snapshot: the files of one commit of a Hub repo, downloaded once and verified."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import dagster as dg
from pydantic import JsonValue

from tensorize_assets.assets.earlier import under_its_keys
from tensorize_assets.assets.snapshots import Snapshots
from tensorize_assets.assets.target import (
    IO_MANAGER,
    Target,
    commit_url,
    failures,
    set_build,
    target_of,
)
from tensorize_assets.core import (
    build_keys,
    hub,
    jsonio,
    layout,
    local_adapter,
    mirroring,
    sealing,
    wanted,
)
from tensorize_assets.core.build import BuildInputs, build_id, differences
from tensorize_assets.core.catalog import Catalog, check_tensor_parallel
from tensorize_assets.core.errors import CatalogError, ConflictError, HubError, ManifestError
from tensorize_assets.core.hub_access import HubAccess
from tensorize_assets.core.hub_files import RevisionListing, Snapshot
from tensorize_assets.core.manifest import (
    Manifest,
    SnapshotEntry,
    StoredManifest,
    read_manifest,
)
from tensorize_assets.core.records import AdapterRecord, EncryptedBuild, SnapshotRecord
from tensorize_assets.core.store import Store
from tensorize_assets.partitions import model_suffix
from tensorize_assets.resources.catalog import CatalogResource
from tensorize_assets.resources.hub import HubResource
from tensorize_assets.resources.keyring import KeyringResource
from tensorize_assets.resources.launchers.base import Launcher
from tensorize_assets.resources.store import StoreResource

_Find = Callable[[str, str], RevisionListing]


class _Pin(jsonio.Record):
    """The commit that a pinned profile's revision, or an adapter's, had at its first build."""

    revision: str
    commit: jsonio.Commit


@dg.asset(
    partitions_def=model_suffix,
    group_name="tensorized_models",
    kinds={"huggingface"},
    code_version="1",
    io_manager_key=IO_MANAGER,
)
def hf_snapshot(
    context: dg.AssetExecutionContext,
    tensorize_catalog: CatalogResource,
    tensorize_store: StoreResource,
    tensorize_hub: HubResource,
    tensorize_keyring: KeyringResource,
    tensorize_launcher: Launcher,
) -> dg.MaterializeResult[SnapshotRecord]:
    """The files of one commit, each checked against the Hub's own hash.

    They lie in the home's Hub cache, in the layout of the Hub's own, and where workers run on other
    machines in `snapshots/` below the catalog's root; what is there is not downloaded. Resolves the
    profile's revision once; everything later in the run is of this commit. A build that is complete
    already downloads nothing.
    """
    with failures(context):
        target = target_of(context, tensorize_catalog)
        store = tensorize_store.open(target.root)
        snapshots = Snapshots.of(
            context,
            target,
            tensorize_catalog,
            tensorize_launcher,
            store,
            tensorize_hub,
            tensorize_keyring,
        )
        access = snapshots.access
        place = (target.model, target.suffix)
        revision = target.profile.revision
        listing = _resolve(
            store,
            target,
            layout.pin_key(*place, revision),
            target.model,
            revision,
            partial(hub.resolve, access),
        )
        adapters = {
            adapter.name: _resolve(
                store,
                target,
                layout.adapter_pin_key(*place, adapter.repo, adapter.revision),
                adapter.repo,
                adapter.revision,
                partial(mirroring.resolve_adapter, snapshots.work),
            )
            for adapter in target.profile.adapters
        }
        inputs = wanted.inputs(
            target.model,
            target.profile,
            listing.commit,
            {name: found.commit for name, found in adapters.items()},
            tensorize_launcher.versions(),
        )
        build = build_id(inputs)
        set_build(context, target, build, listing.commit, [one.commit for one in adapters.values()])
        directory = target.directory(build)
        encrypted = _encrypted(
            context, store, tensorize_keyring, tensorize_catalog.catalog(), target, inputs
        )
        stored = _stored(store, tensorize_keyring, target, build, encrypted)
        complete = all(stored.values())
        taken: _Taken | None = None
        changed = _what_is_new(context, store, tensorize_keyring, target, inputs)
        # One variant is enough, also one of an earlier data key: the others are made of it.
        whole = {place: found for place, found in stored.items() if found is not None}
        if encrypted is not None and not whole:
            earlier = next(under_its_keys(store, tensorize_keyring, target, inputs), None)
            whole = {earlier.directory: earlier.stored} if earlier else {}
        if whole:
            known = next(iter(whole.values()))
            snapshot, adapter_records = _from_manifest(known.manifest, target)
            context.log.info(f"build {build} is complete in {', '.join(map(store.uri, whole))}")
        else:
            taken = _take(snapshots, listing, adapters)
            snapshot, adapter_records = taken.snapshot, taken.adapters
    record = SnapshotRecord(
        model=target.model,
        suffix=target.suffix,
        build_id=build,
        inputs=inputs,
        profile=target.profile.model_dump(mode="json"),
        directory=directory,
        snapshot=snapshot,
        adapters=adapter_records,
        encryption=target.profile.encryption,
        encrypted=encrypted,
    )
    return dg.MaterializeResult(
        value=record,
        data_version=dg.DataVersion(listing.commit),
        metadata={
            "commit": dg.MetadataValue.url(commit_url(access, target.model, listing.commit)),
            "revision": target.profile.revision,
            "build_id": build,
            "files": len(snapshot.files),
            "bytes": sum(file.size for file in snapshot.files),
            "already_complete": complete,
            **(taken.metadata if taken else {}),
            **{f"adapter {name}": _adapter(access, found) for name, found in adapters.items()},
            **({"data_key": encrypted.key_id} if encrypted else {}),
            **({"differs_from_published": "\n".join(changed)} if changed else {}),
        },
    )


def _adapter(access: HubAccess, found: RevisionListing) -> dg.MetadataValue:
    """The commit of an adapter; a link where a Hub has it."""
    if local_adapter.is_local(found.model):
        return dg.MetadataValue.text(found.commit)
    return dg.MetadataValue.url(commit_url(access, found.model, found.commit))


def _resolve(
    store: Store, target: Target, key: str, repo: str, revision: str, find: _Find
) -> RevisionListing:
    """A revision as it is now, or the commit that it is pinned to at `key`."""
    if target.profile.track == "follow":
        return find(repo, revision)
    pinned = _pinned(store, key)
    if pinned is None:
        listing = find(repo, revision)
        pinned = _pin(store, key, _Pin(revision=revision, commit=listing.commit))
        if pinned == listing.commit:
            return listing
    listing = find(repo, pinned)
    # What was asked for stays on record: the same build has the same manifest on every run.
    return listing.model_copy(update={"revision": revision})


def _pinned(store: Store, key: str) -> str | None:
    stored = store.get_bytes(key)
    return stored and jsonio.load_record(_Pin, stored.data, store.uri(key)).commit


def _pin(store: Store, key: str, pin: _Pin) -> str:
    """Write a pin if there is none, and return the commit that is pinned."""
    try:
        store.put_bytes(key, jsonio.canonical(jsonio.dump_record(pin)), if_absent=True)
    except ConflictError:
        # A run beside this one was first, perhaps with another commit.
        return _pinned(store, key) or pin.commit
    return pin.commit


class _Taken(NamedTuple):
    """What was brought to where workers read it."""

    snapshot: Snapshot
    adapters: tuple[AdapterRecord, ...]
    metadata: dict[str, bool | int | float]


def _take(
    snapshots: Snapshots,
    listing: RevisionListing,
    adapters: Mapping[str, RevisionListing],
) -> _Taken:
    target, access = snapshots.target, snapshots.access
    # Before anything is downloaded, also what is not the model's.
    snapshots.require_allowed([listing.model, *(found.model for found in adapters.values())])
    mirrored: list[mirroring.Mirrored] = []
    downloaded = False

    def check(config: Mapping[str, JsonValue]) -> None:
        problem = check_tensor_parallel(target.profile, config)
        if problem:
            raise HubError(f"{target.model} {target.suffix}: {problem}")

    def take(found: RevisionListing, check: mirroring.Check | None = None) -> Snapshot:
        nonlocal downloaded
        if snapshots.are_mirrored(found.model):
            mirrored.append(mirroring.bring(snapshots.work, found, check))
            downloaded |= mirrored[-1].downloaded
            return mirrored[-1].snapshot
        if check is not None:
            check(hub.fetch_config(access, found))
        progress = snapshots.progress(found.model, "downloaded")
        snapshot, folder = hub.download(access, found.model, found, progress)
        hub.check_contents(access, found, folder)
        downloaded = True
        snapshots.context.log.info(f"{found.model} at {found.commit} is in {folder}")
        return snapshot

    began = time.monotonic()
    snapshot = take(listing, check)
    records = tuple(
        AdapterRecord(name=name, snapshot=take(found)) for name, found in adapters.items()
    )
    took = time.monotonic() - began
    metadata: dict[str, bool | int | float] = {"mirrored": bool(mirrored)}
    if downloaded:
        metadata["download_seconds"] = took
    if mirrored:
        metadata["mirror_bytes_sent"] = sum(one.sent_bytes for one in mirrored)
        metadata["mirror_bytes_kept"] = sum(one.kept_bytes for one in mirrored)
    return _Taken(snapshot, records, metadata)


def _encrypted(
    context: dg.AssetExecutionContext,
    store: Store,
    keyring: KeyringResource,
    catalog: Catalog,
    target: Target,
    inputs: BuildInputs,
) -> EncryptedBuild | None:
    """The build's encrypted variant: its data key is made here, or found, and sealed.

    It is sealed to just those whom the catalog names: who came or went since it was made is put
    right. Without this home among them nothing could be reloaded.
    """
    if target.profile.encryption == "none":
        return None
    own = keyring.private()
    recipients = dict(catalog.recipients)
    if target.keyfile and own.public_key not in recipients.values():
        # Who has asked for the key in a file is to have it.
        recipients[_free_name(recipients)] = own.public_key
    if own.public_key not in recipients.values():
        raise CatalogError(
            f"{target.model} {target.suffix}: this home could not open what it encrypts, to reload "
            f"it; add its public key to the catalog's recipients: {own.public_key}"
        )
    key, trusted = keyring.key(), keyring.trusted()
    build = build_id(inputs)

    def make() -> str:
        made = sealing.new_data_key(store, recipients, key)
        made.data_key.wipe()
        return made.key_id

    key_id = build_keys.assign(
        store, target.model, target.suffix, build, make, key, trusted, keyring.seen()
    )
    before = sealing.recipients_of(store, key_id, trusted)
    # Also where the record has them already: a run that was killed here may have left seals undone.
    sealing.reseal(store, key_id, own, recipients, key, trusted=trusted)
    if before != dict(sorted(recipients.items())):
        context.log.info(
            f"data key {key_id} was sealed to {', '.join(before)}, and is now, as the catalog "
            f"says, to {', '.join(sorted(recipients))}"
        )
    plain = target.directory(build)
    its_own = build_id(inputs.model_copy(update={"data_key": key_id}))
    hidden = target.encrypted_directory(its_own)
    if (
        target.profile.encryption == "only"
        and hidden != plain
        and store.stat(layout.manifest_key(plain)) is not None
    ):
        context.log.warning(
            f"{store.uri(plain)} holds this build in plaintext, from before `encryption: only`; "
            "it stays until it is removed"
        )
    return EncryptedBuild(key_id=key_id, build_id=its_own, directory=hidden)


def _free_name(recipients: Mapping[str, str]) -> str:
    name = "this-home"
    while name in recipients:
        name += "-"
    return name


def _stored(
    store: Store,
    keyring: KeyringResource,
    target: Target,
    build: str,
    encrypted: EncryptedBuild | None,
) -> dict[str, StoredManifest | None]:
    """The manifest of each variant that the profile asks for, by its directory.

    Raises ManifestError for a one-shot's directory, named by its user, that holds another build.
    """
    places = {} if target.profile.encryption == "only" else {target.directory(build): build}
    if encrypted is not None:
        places[encrypted.directory] = encrypted.build_id
    found = {place: read_manifest(store, place, keyring.trusted()) for place in places}
    for directory, stored in found.items():
        if stored is not None and stored.manifest.build_id != places[directory]:
            raise ManifestError(
                f"{directory} holds build {stored.manifest.build_id} and a directory is written "
                f"once; this is build {places[directory]} of {target.model}: choose another "
                "--suffix"
            )
    return found


def _from_manifest(
    manifest: Manifest, target: Target
) -> tuple[Snapshot, tuple[AdapterRecord, ...]]:
    """What was downloaded when the build was made; nothing of it is needed again."""
    snapshot = _snapshot(target.model, manifest.snapshot, target.profile.revision)
    wanted = {adapter.name: adapter.revision for adapter in target.profile.adapters}
    adapters = tuple(
        AdapterRecord(
            name=adapter.name,
            snapshot=_snapshot(adapter.repo, adapter.snapshot, wanted[adapter.name]),
        )
        for adapter in manifest.adapters
    )
    return snapshot, adapters


def _snapshot(repo: str, entry: SnapshotEntry, revision: str) -> Snapshot:
    return Snapshot.model_validate(
        {"model": repo, **jsonio.dump_record(entry), "revision": revision}
    )


def _what_is_new(
    context: dg.AssetExecutionContext,
    store: Store,
    keyring: KeyringResource,
    target: Target,
    inputs: BuildInputs,
) -> tuple[str, ...]:
    """In which inputs this build differs from the one that is published; also in the log."""
    current = wanted.published(
        store, target.model, target.suffix, keyring.trusted(), keyring.seen()
    )
    if current is None:
        context.log.info(f"{target.model} {target.suffix}: first build")
        return ()
    if current.inputs is None:
        context.log.warning(f"the published build {current.build_id} has lost its manifest")
        return ()
    changed = differences(current.inputs, inputs)
    if changed:
        context.log.info(f"differs from published build {current.build_id}: " + "; ".join(changed))
    return changed
