"""hf_snapshot: the files of one commit of a Hub repo, downloaded once and verified."""

import time
from collections.abc import Callable
from functools import partial

import dagster as dg

from tensorize_assets.assets.earlier import under_its_keys
from tensorize_assets.assets.target import (
    Target,
    failures,
    set_build,
    target_of,
)
from tensorize_assets.core import build_keys, channel, hub, jsonio, layout, sealing
from tensorize_assets.core.build import BuildInputs, build_id, differences
from tensorize_assets.core.catalog import Catalog, byte_fields, check_tensor_parallel
from tensorize_assets.core.errors import CatalogError, ConflictError, HubError, ManifestError
from tensorize_assets.core.manifest import (
    Manifest,
    SnapshotEntry,
    StoredManifest,
    read_manifest,
)
from tensorize_assets.core.protocol import format_bytes
from tensorize_assets.core.records import AdapterRecord, EncryptedBuild, SnapshotRecord
from tensorize_assets.core.store import Store
from tensorize_assets.partitions import model_suffix
from tensorize_assets.resources.catalog import CatalogResource
from tensorize_assets.resources.hub import HubResource
from tensorize_assets.resources.keyring import KeyringResource
from tensorize_assets.resources.launcher import SubprocessLauncher
from tensorize_assets.resources.store import StoreResource

_SAID_EVERY_S = 10.0


_Find = Callable[[str, str], hub.RevisionListing]


class _Pin(jsonio.Record):
    """The commit that a pinned profile's revision, or an adapter's, had at its first build."""

    revision: str
    commit: jsonio.Commit


@dg.asset(
    partitions_def=model_suffix,
    group_name="tensorized_models",
    kinds={"huggingface"},
    code_version="1",
)
def hf_snapshot(
    context: dg.AssetExecutionContext,
    catalog: CatalogResource,
    artifact_store: StoreResource,
    hub_access: HubResource,
    keyring: KeyringResource,
    launcher: SubprocessLauncher,
) -> dg.MaterializeResult[SnapshotRecord]:
    """The files of one commit, each checked against the Hub's own hash.

    Resolves the profile's revision once; everything later in the run is of this commit. A build
    that is complete already downloads nothing.
    """
    with failures(context):
        target = target_of(context, catalog)
        store = artifact_store.open(target.root)
        access = hub_access.access()
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
                partial(hub.resolve_adapter, access),
            )
            for adapter in target.profile.adapters
        }
        inputs = _inputs(target, listing.commit, adapters, launcher.versions())
        build = build_id(inputs)
        set_build(context, build)
        directory = target.directory(build)
        encrypted = _encrypted(context, store, keyring, catalog.catalog(), target, inputs)
        stored = _stored(store, keyring, target, build, encrypted)
        complete = all(stored.values())
        changed = _what_is_new(context, store, keyring, target, inputs)
        # One variant is enough, also one of an earlier data key: the others are made of it.
        whole = {place: found for place, found in stored.items() if found is not None}
        if encrypted is not None and not whole:
            earlier = next(under_its_keys(store, keyring, target, inputs), None)
            whole = {earlier.directory: earlier.stored} if earlier else {}
        if whole:
            known = next(iter(whole.values()))
            snapshot, adapter_records = _from_manifest(known.manifest, target)
            context.log.info(f"build {build} is complete in {', '.join(map(store.uri, whole))}")
        else:
            problem = check_tensor_parallel(target.profile, hub.fetch_config(access, listing))
            if problem:
                raise HubError(f"{target.model} {target.suffix}: {problem}")
            progress = _progress(context, target)
            snapshot, folder = hub.download(access, target.model, listing, progress)
            context.log.info(f"{target.model} at {listing.commit} is in {folder}")
            adapter_records = tuple(
                AdapterRecord(
                    name=name, snapshot=hub.download(access, found.model, found, progress)[0]
                )
                for name, found in adapters.items()
            )
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
    endpoint = (access.endpoint or "https://huggingface.co").rstrip("/")
    return dg.MaterializeResult(
        value=record,
        data_version=dg.DataVersion(listing.commit),
        metadata={
            "commit": dg.MetadataValue.url(f"{endpoint}/{target.model}/tree/{listing.commit}"),
            "revision": target.profile.revision,
            "build_id": build,
            "files": len(snapshot.files),
            "bytes": sum(file.size for file in snapshot.files),
            "already_complete": complete,
            **{f"adapter {name}": found.commit for name, found in adapters.items()},
            **({"data_key": encrypted.key_id} if encrypted else {}),
            **({"differs_from_published": "\n".join(changed)} if changed else {}),
        },
    )


def _resolve(
    store: Store, target: Target, key: str, repo: str, revision: str, find: _Find
) -> hub.RevisionListing:
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


def _progress(context: dg.AssetExecutionContext, target: Target) -> hub.Progress:
    said_at = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal said_at
        if time.monotonic() - said_at >= _SAID_EVERY_S:
            said_at = time.monotonic()
            context.log.info(
                f"{target.model}: {format_bytes(done)} of {format_bytes(total)} downloaded"
            )

    return progress


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
    recipients = catalog.recipients
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
    if target.profile.encryption == "only" and store.stat(layout.manifest_key(plain)) is not None:
        context.log.warning(
            f"{store.uri(plain)} holds this build in plaintext, from before `encryption: only`; "
            "it stays until it is removed"
        )
    its_own = build_id(inputs.model_copy(update={"data_key": key_id}))
    return EncryptedBuild(
        key_id=key_id, build_id=its_own, directory=target.encrypted_directory(its_own)
    )


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
) -> tuple[hub.Snapshot, tuple[AdapterRecord, ...]]:
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


def _snapshot(repo: str, entry: SnapshotEntry, revision: str) -> hub.Snapshot:
    return hub.Snapshot.model_validate(
        {"model": repo, **jsonio.dump_record(entry), "revision": revision}
    )


def _inputs(
    target: Target,
    commit: str,
    adapters: dict[str, hub.RevisionListing],
    versions: dict[str, str],
) -> BuildInputs:
    return BuildInputs(
        model=target.model,
        commit=commit,
        adapters=tuple((name, found.commit) for name, found in adapters.items()),
        profile=byte_fields(target.profile),
        vllm=versions["vllm"],
        torch=versions["torch"],
        tensorizer=versions["tensorizer"],
    )


def _what_is_new(
    context: dg.AssetExecutionContext,
    store: Store,
    keyring: KeyringResource,
    target: Target,
    inputs: BuildInputs,
) -> tuple[str, ...]:
    """In which inputs this build differs from the one that is published; also in the log."""
    published = channel.read_channel(
        store, target.model, target.suffix, keyring.trusted(), keyring.seen()
    )
    if published is None:
        context.log.info(f"{target.model} {target.suffix}: first build")
        return ()
    current = published.channel.current
    before = read_manifest(store, current.directory, keyring.trusted())
    if before is None:
        context.log.warning(f"the published build {current.build_id} has lost its manifest")
        return ()
    # With `encryption: only` the published build is the encrypted one.
    changed = differences(before.manifest.inputs.model_copy(update={"data_key": None}), inputs)
    if changed:
        context.log.info(f"differs from published build {current.build_id}: " + "; ".join(changed))
    return changed
