"""hf_snapshot: the files of one commit of a Hub repo, downloaded once and verified."""

import time

import dagster as dg

from tensorize_assets.assets.target import (
    Target,
    failures,
    set_build,
    target_of,
)
from tensorize_assets.core import channel, hub, jsonio, layout
from tensorize_assets.core.build import BuildInputs, build_id, differences
from tensorize_assets.core.catalog import byte_fields, check_tensor_parallel
from tensorize_assets.core.errors import ConflictError, HubError, ManifestError
from tensorize_assets.core.manifest import StoredManifest, read_manifest
from tensorize_assets.core.protocol import format_bytes
from tensorize_assets.core.records import SnapshotRecord
from tensorize_assets.core.store import Store
from tensorize_assets.partitions import model_suffix
from tensorize_assets.resources.catalog import CatalogResource
from tensorize_assets.resources.hub import HubResource
from tensorize_assets.resources.keyring import KeyringResource
from tensorize_assets.resources.launcher import SubprocessLauncher
from tensorize_assets.resources.store import StoreResource

_SAID_EVERY_S = 10.0


class _Pin(jsonio.Record):
    """The commit that a pinned profile's revision had at its first build."""

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
        listing = _resolve(store, access, target)
        inputs = _inputs(target, listing.commit, launcher.versions())
        build = build_id(inputs)
        set_build(context, build)
        directory = target.directory(build)
        done = read_manifest(store, directory, keyring.trusted())
        _require_free(target, directory, build, done)
        changed = _what_is_new(context, store, keyring, target, inputs)
        if done is not None:
            snapshot = hub.Snapshot.model_validate(
                {
                    "model": target.model,
                    **jsonio.dump_record(done.manifest.snapshot),
                    "revision": target.profile.revision,
                }
            )
            context.log.info(f"build {build} is complete in {store.uri(directory)}")
        else:
            problem = check_tensor_parallel(target.profile, hub.fetch_config(access, listing))
            if problem:
                raise HubError(f"{target.model} {target.suffix}: {problem}")
            progress = _progress(context, target)
            snapshot, folder = hub.download(access, target.model, listing, progress)
            context.log.info(f"{target.model} at {listing.commit} is in {folder}")
    record = SnapshotRecord(
        model=target.model,
        suffix=target.suffix,
        build_id=build,
        inputs=inputs,
        profile=target.profile.model_dump(mode="json"),
        directory=directory,
        snapshot=snapshot,
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
            "already_complete": done is not None,
            **({"differs_from_published": "\n".join(changed)} if changed else {}),
        },
    )


def _resolve(store: Store, access: hub.HubAccess, target: Target) -> hub.RevisionListing:
    """The profile's revision as it is now, or the commit that it is pinned to."""
    profile = target.profile
    if profile.track == "follow":
        return hub.resolve(access, target.model, profile.revision)
    pinned = _pinned(store, target)
    if pinned is None:
        listing = hub.resolve(access, target.model, profile.revision)
        pinned = _pin(store, target, listing.commit)
        if pinned == listing.commit:
            return listing
    listing = hub.resolve(access, target.model, pinned)
    # What was asked for stays on record: the same build has the same manifest on every run.
    return listing.model_copy(update={"revision": profile.revision})


def _pinned(store: Store, target: Target) -> str | None:
    key = layout.pin_key(target.model, target.suffix, target.profile.revision)
    stored = store.get_bytes(key)
    return stored and jsonio.load_record(_Pin, stored.data, store.uri(key)).commit


def _pin(store: Store, target: Target, commit: str) -> str:
    """Pin the revision to `commit` and return the commit that it is pinned to."""
    key = layout.pin_key(target.model, target.suffix, target.profile.revision)
    pin = _Pin(revision=target.profile.revision, commit=commit)
    try:
        store.put_bytes(key, jsonio.canonical(jsonio.dump_record(pin)), if_absent=True)
    except ConflictError:
        # A run beside this one was first, perhaps with another commit.
        return _pinned(store, target) or commit
    return commit


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


def _inputs(target: Target, commit: str, versions: dict[str, str]) -> BuildInputs:
    return BuildInputs(
        model=target.model,
        commit=commit,
        profile=byte_fields(target.profile),
        vllm=versions["vllm"],
        torch=versions["torch"],
        tensorizer=versions["tensorizer"],
    )


def _require_free(target: Target, directory: str, build: str, done: StoredManifest | None) -> None:
    """A one-shot's directory is named by its user: refuse one that holds another build."""
    if done is not None and done.manifest.build_id != build:
        raise ManifestError(
            f"{directory} holds build {done.manifest.build_id} and a directory is written once; "
            f"this is build {build} of {target.model}: choose another --suffix"
        )


def _what_is_new(
    context: dg.AssetExecutionContext,
    store: Store,
    keyring: KeyringResource,
    target: Target,
    inputs: BuildInputs,
) -> tuple[str, ...]:
    """In which inputs this build differs from the one that is published; also in the log."""
    published = channel.read_channel(store, target.model, target.suffix, keyring.trusted())
    if published is None:
        context.log.info(f"{target.model} {target.suffix}: first build")
        return ()
    current = published.channel.current
    before = read_manifest(store, current.directory, keyring.trusted())
    if before is None:
        context.log.warning(f"the published build {current.build_id} has lost its manifest")
        return ()
    changed = differences(before.manifest.inputs, inputs)
    if changed:
        context.log.info(f"differs from published build {current.build_id}: " + "; ".join(changed))
    return changed
