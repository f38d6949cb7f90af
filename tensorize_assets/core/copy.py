"""Copies a build between stores: verified on arrival, resumed where it stopped, manifest last."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from tensorize_assets.core import layout
from tensorize_assets.core.errors import (
    ConflictError,
    ManifestError,
    StoreError,
    StoreUnavailableError,
)
from tensorize_assets.core.manifest import FileEntry, Manifest, StoredManifest, read_manifest
from tensorize_assets.core.store import CHUNK_BYTES, Store, digest

Say = Callable[[str], None]


class CopyReport(NamedTuple):
    """What a copy did. Bytes of artifact files; `kept` were there already, with the right hash."""

    directory: str
    manifest_sha256: str
    copied: int
    copied_bytes: int
    kept: int
    server_side: int
    evidence: int


def copy_build(
    source: Store, directory: str, target: Store, trusted: Collection[str] | None, say: Say
) -> CopyReport:
    """Copy the artifact in `directory` of `source`, with its evidence, to the same key of `target`.

    Every byte is hashed between the stores, or, where the object store copies by itself, read once
    at its destination. The manifest comes last, so that a copy that was interrupted does not exist
    for any reader; run again, it keeps what has the right hash.

    `trusted` are the public keys whose manifests are believed; None believes any.

    Raises:
        ManifestError: there is no artifact at the source, or another one at the destination.
        StoreError: a file is not what the manifest says, at either side.
    """
    found = read_manifest(source, directory, trusted)
    if found is None:
        raise ManifestError(
            f"{source.uri(directory)} has no {layout.MANIFEST}: it is no finished artifact"
        )
    there = target.get_bytes(layout.manifest_key(directory))
    manifest_key = layout.manifest_key(directory)
    data = source.get_bytes(manifest_key)
    if data is None:
        raise ManifestError(f"{source.uri(directory)} was removed while it was read")
    if there is not None and there.data != data.data:
        raise ManifestError(
            f"{target.uri(directory)} holds another artifact, and a directory is written once; "
            "remove it, or copy to another root"
        )
    copied = copied_bytes = kept = server_side = 0
    for file in found.manifest.files:
        key = layout.file_key(directory, file.path)
        if _is_there(target, key, file):
            kept += 1
            say(f"{file.path}: there already")
            continue
        if _copy_file(source, target, key, file):
            server_side += 1
        copied += 1
        copied_bytes += file.size
        say(f"{file.path}: {file.size:,} bytes")
    if there is None:
        try:
            target.put_bytes(manifest_key, data.data, if_absent=True)
        except ConflictError:
            raise ManifestError(
                f"{target.uri(directory)} was completed by somebody else meanwhile; run again to "
                "compare"
            ) from None
    evidence = _copy_evidence(source, target, found)
    return CopyReport(directory, found.sha256, copied, copied_bytes, kept, server_side, evidence)


def _is_there(target: Store, key: str, file: FileEntry) -> bool:
    return target.stat(key) == file.size and digest(target, key).sha256 == file.sha256


def _copy_file(source: Store, target: Store, key: str, file: FileEntry) -> bool:
    """Copy one file; returns whether the store did it by itself."""
    if not target.copy(key, key, source=source):
        try:
            target.put_stream(key, _chunks(source, key), size=file.size, sha256=file.sha256)
        except StoreUnavailableError:
            raise
        except StoreError as error:
            raise StoreError(f"cannot copy {source.uri(key)}: {error}") from error
        return False
    if not _is_there(target, key, file):
        target.delete(key)
        raise StoreError(
            f"{source.uri(key)} is not what its manifest says (copied and hashed at "
            f"{target.uri(key)}, and removed there); `tensorize verify` names every such file"
        )
    return True


def _chunks(source: Store, key: str) -> Iterator[bytes]:
    with source.open_read(key) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk


def _copy_evidence(source: Store, target: Store, found: StoredManifest) -> int:
    """Evidence is of a manifest, wherever it lies: with it the copy can be published."""
    keys = source.list(layout.evidence_folder(found.sha256))
    for key in keys:
        stored = source.get_bytes(key)
        if stored is not None and target.stat(key) is None:
            target.put_bytes(key, stored.data)
    return len(keys)


def directory_of(manifest: Manifest, path: str) -> str:
    """The key of an artifact directory that lies at `path`, a path or URI that ends in it.

    Raises ManifestError where the end of `path` is not the place of such a manifest.
    """
    for key in (
        layout.artifact_dir(manifest.model, manifest.suffix, manifest.build_id),
        layout.oneshot_dir(manifest.model, manifest.suffix),
    ):
        if path.rstrip("/").endswith(f"/{key}"):
            return key
    raise ManifestError(
        f"{path} holds build {manifest.build_id} of {manifest.model} {manifest.suffix}, whose "
        f"place is ROOT/{layout.artifact_dir(manifest.model, manifest.suffix, manifest.build_id)}; "
        "name it there"
    )
