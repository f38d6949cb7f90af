"""A new data key for a build that is published encrypted, and how far that has come."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from tensorize_assets.core import build_keys, layout, sealing
from tensorize_assets.core.build import base_id
from tensorize_assets.core.channel import read_channel
from tensorize_assets.core.errors import StoreError
from tensorize_assets.core.manifest import Manifest, read_manifest
from tensorize_assets.core.sealing import PrivateKey, SealingError
from tensorize_assets.core.signing import SecretKey
from tensorize_assets.core.store import Store


class Published(NamedTuple):
    """The encrypted build that a channel names: with `encryption: both`, the one beside it."""

    base_id: str
    build_id: str
    directory: str
    key_id: str
    only: bool


class Rotation(NamedTuple):
    """A change of the data key that was begun; `made` says whether now, or by an earlier call."""

    old: Published
    new_key_id: str
    made: bool


def published(
    store: Store, model: str, suffix: str, trusted: Collection[str] | None, seen: Path | None = None
) -> Published:
    """Return the encrypted build that is published.

    Raises StoreError when nothing is, or it is not encrypted; and as `read_channel` does.
    """
    found = read_channel(store, model, suffix, trusted, seen)
    if found is None:
        raise StoreError(
            f"{model} {suffix}: nothing was published, so there is no data key to change; build it "
            f"with `tensorize build {model} --suffix {suffix}`"
        )
    entry = found.channel.current
    directory = entry.encrypted.directory if entry.encrypted else entry.directory
    stored = read_manifest(store, directory, trusted)
    if stored is None:
        raise StoreError(
            f"{store.uri(layout.manifest_key(directory))} is gone, and the channel of {model} "
            f"{suffix} names it; restore it, or build again"
        )
    manifest: Manifest = stored.manifest
    if manifest.encryption is None:
        raise StoreError(
            f"{model} {suffix}: the published build {manifest.build_id} is not encrypted, and has "
            "no data key to change; set `encryption` in its profile and build it"
        )
    return Published(
        base_id=base_id(manifest.inputs),
        build_id=manifest.build_id,
        directory=directory,
        key_id=manifest.encryption.key_id,
        only=entry.encrypted is None,
    )


def begin(
    store: Store,
    model: str,
    suffix: str,
    *,
    recipients: Mapping[str, str],
    own: PrivateKey,
    key: SecretKey,
    trusted: Collection[str] | None,
    seen: Path | None = None,
) -> Rotation:
    """Make a new data key, sealed to `recipients`, the current one of the published build.

    The build follows, by any run of its chain. Until it is published no other key is made: then
    this returns the one that was, unless somebody could open that one who is no recipient now.

    Raises as `published` does; SealingError when `own` could not open the new key, or the old one
    where the build's tensors are to be had with it only; ConflictError when another one rotates.
    """
    old = published(store, model, suffix, trusted, seen)
    stored = build_keys.read_keys(store, model, suffix, old.base_id, trusted, seen)
    if stored is None:
        raise StoreError(
            f"{store.uri(layout.build_key_key(model, suffix, old.base_id))} is gone, which says "
            f"that build {old.base_id} has data key {old.key_id}; restore it"
        )
    begun = stored.keys.current
    if begun != old.key_id and _opened_by_none_but(store, begun, recipients, trusted):
        return Rotation(old, begun, made=False)
    if own.public_key not in recipients.values():
        raise SealingError(
            f"{model} {suffix}: this home could not open what it encrypts, to reload it; add its "
            f"public key to the catalog's recipients: {own.public_key}"
        )
    if old.only:
        sealing.unseal(store, old.key_id, own, trusted=trusted).wipe()
    made = sealing.new_data_key(store, recipients, key)
    made.data_key.wipe()
    build_keys.rotate(store, stored, made.key_id, key, seen)
    return Rotation(old, made.key_id, made=True)


def _opened_by_none_but(
    store: Store, key_id: str, recipients: Mapping[str, str], trusted: Collection[str] | None
) -> bool:
    """Whether a data key was never sealed to anybody else: who was removed may have kept it."""
    record = sealing.read_record(store, key_id, trusted).record
    ever = {one.public_key for change in record.changes for one in change.added}
    return ever <= set(recipients.values())
