"""What earlier runs have done of a build: before they were interrupted, or with another key."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import dagster as dg

from tensorize_assets.assets.target import Target
from tensorize_assets.core import build_keys, jsonio, layout, sealing
from tensorize_assets.core.build import BuildInputs, build_id
from tensorize_assets.core.errors import StoreError
from tensorize_assets.core.manifest import FileEntry, StoredManifest, read_manifest
from tensorize_assets.core.records import (
    AdaptersRecord,
    EncryptedBuild,
    EncryptedRecord,
    ShardsRecord,
    SnapshotRecord,
)
from tensorize_assets.core.sealing import SealingError
from tensorize_assets.core.store import Store, digest
from tensorize_assets.resources.keyring import KeyringResource
from tensorize_assets.resources.store import StoreResource

_Made = TypeVar("_Made", ShardsRecord, AdaptersRecord, EncryptedRecord)


def stored_before(
    kind: type[_Made],
    asset: str,
    store: Store,
    artifact_store: StoreResource,
    target: Target,
    build: SnapshotRecord,
    directory: str,
) -> _Made | None:
    """The asset's record of an earlier run of this build, if it wrote files to the directory.

    Only if every one of them is still what it was.
    """
    # Records are in the catalog's root, also those of a one-shot build that has its own.
    records = artifact_store.open(artifact_store.root())
    key = target.record_key(asset)
    stored = records.get_bytes(key)
    if stored is None:
        return None
    try:
        record = jsonio.load_record(kind, stored.data, records.uri(key))
    except StoreError:
        return None  # of another release, or damaged: made anew
    # The folder of a one-shot build is named by its suffix, which the build id does not hold; that
    # of an encrypted one is named by its data key, which the base build's id does not hold.
    own = (build.build_id, build.suffix, directory)
    if (record.build_id, record.suffix, record.directory) != own or record.result is None:
        return None
    return record if _are_whole(store, directory, record.result.files) else None


def _are_whole(store: Store, directory: str, files: Sequence[FileEntry]) -> bool:
    """Whether every file stands in the directory as it was written."""
    for file in files:
        key = layout.file_key(directory, file.path)
        if store.stat(key) != file.size or digest(store, key).sha256 != file.sha256:
            return False
    return True


class Earlier(NamedTuple):
    """A build that is complete under the data key `key_id`."""

    key_id: str
    directory: str
    stored: StoredManifest


def under_its_keys(
    store: Store, keyring: KeyringResource, target: Target, inputs: BuildInputs
) -> Iterator[Earlier]:
    """The complete encrypted builds of these plaintext inputs, that of the latest key first."""
    trusted = keyring.trusted()
    found = build_keys.read_keys(
        store, target.model, target.suffix, build_id(inputs), trusted, keyring.seen()
    )
    for choice in reversed(found.keys.choices if found else ()):
        its_own = build_id(inputs.model_copy(update={"data_key": choice.key_id}))
        directory = target.encrypted_directory(its_own)
        stored = read_manifest(store, directory, trusted)
        # A one-shot's directory is the same whatever its key.
        if stored is not None and stored.manifest.build_id == its_own:
            yield Earlier(choice.key_id, directory, stored)


def under_earlier_key(
    context: dg.AssetExecutionContext,
    store: Store,
    keyring: KeyringResource,
    target: Target,
    build: SnapshotRecord,
    hidden: EncryptedBuild,
) -> Earlier | None:
    """The latest complete build of the same inputs under another data key that opens here."""
    for earlier in under_its_keys(store, keyring, target, build.inputs):
        if earlier.directory == hidden.directory:
            continue
        try:
            sealing.unseal(
                store, earlier.key_id, keyring.private(), trusted=keyring.trusted()
            ).wipe()
        except SealingError as error:
            context.log.warning(f"{store.uri(earlier.directory)} is not encrypted anew: {error}")
            continue
        return earlier
    return None
