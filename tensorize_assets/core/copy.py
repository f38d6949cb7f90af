"""Copies a build between stores: verified on arrival, resumed where it stopped, manifest last."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from tensorize_assets.core import layout, provenance
from tensorize_assets.core.errors import (
    ConflictError,
    EvidenceError,
    ManifestError,
    StoreError,
    StoreUnavailableError,
)
from tensorize_assets.core.evidence import decode
from tensorize_assets.core.http_folder import HttpFolder
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.manifest import (
    FileEntry,
    Manifest,
    SignedManifest,
    manifest_sha256,
    places,
    read_placed,
)
from tensorize_assets.core.store import CHUNK_BYTES, Reader, Store, digest

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
    source: Store | HttpFolder,
    directory: str,
    target: Store,
    trusted: Collection[str] | None,
    say: Say,
) -> CopyReport:
    """Copy the artifact in `directory` of `source` to the same key of `target`.

    Its evidence and its provenance go along.

    Every byte is hashed between the stores, or, where the object store copies by itself, read once
    at its destination. The manifest comes last, so that a copy that was interrupted does not exist
    for any reader; run again, it keeps what has the right hash.

    `trusted` are the public keys whose signatures are believed; None believes any.

    Raises:
        ManifestError: there is no artifact at the source, or another one at the destination.
        SignatureError: manifest, evidence or provenance is not signed by a key that is believed.
        EvidenceError: what lies there as evidence is none of this build.
        StoreError: a file is not what the manifest says, at either side; or both are one place.
    """
    if is_same_place(source, target):
        raise StoreError(f"{source.uri(directory)} lies at the target already; copy elsewhere")
    found = read_placed(source, directory, trusted)
    if found is None:
        raise ManifestError(
            f"{source.uri(directory)} has no {layout.MANIFEST}: it is no finished artifact"
        )
    manifest_key = layout.manifest_key(directory)
    there = target.get_bytes(manifest_key)
    data = source.get_bytes(manifest_key)
    # What was verified is what is copied.
    if data is None or manifest_sha256(data.data) != found.sha256:
        raise ManifestError(f"{source.uri(manifest_key)} was replaced while it was read")
    if there is not None and there.data != data.data:
        raise ManifestError(
            f"{target.uri(directory)} holds another artifact, and a directory is written once; "
            "remove it, or copy to another root"
        )
    for file in found.manifest.files:
        key = layout.file_key(directory, file.path)
        size = source.stat(key)
        if size != file.size:
            raise StoreError(
                f"{source.uri(key)} has {'no' if size is None else f'{size:,}'} bytes, and its "
                f"manifest says {file.size:,}: nothing was copied; `tensorize verify` names every "
                "such file"
            )
    copied = copied_bytes = kept = server_side = 0
    for file in found.manifest.files:
        key = layout.file_key(directory, file.path)
        if is_there(target, key, file):
            kept += 1
            say(f"{file.path}: there already")
            continue
        if _copy_within(source, target, key, file):
            server_side += 1
        else:
            copy_file(source, key, target, key, file)
        copied += 1
        copied_bytes += file.size
        say(f"{file.path}: {file.size:,} bytes")
    # Before the manifest, so that what is complete can be published.
    evidence = _copy_evidence(source, target, found, trusted)
    _copy_provenance(source, directory, target, found, trusted)
    if there is None:
        try:
            target.put_bytes(manifest_key, data.data, if_absent=True)
        except ConflictError:
            there = target.get_bytes(manifest_key)
            # Another copy of the same build may have been first.
            if there is None or there.data != data.data:
                raise ManifestError(
                    f"{target.uri(directory)} was completed with another artifact meanwhile"
                ) from None
    return CopyReport(directory, found.sha256, copied, copied_bytes, kept, server_side, evidence)


def is_same_place(source: Reader, target: Store) -> bool:
    """Say whether a file that is removed at the target would be gone at the source too."""
    if not isinstance(source, LocalStore) or not isinstance(target, LocalStore):
        return source == target
    return source.root.resolve() == target.root.resolve()


def is_there(target: Reader, key: str, file: FileEntry) -> bool:
    """Say whether just this file is there."""
    return target.stat(key) == file.size and digest(target, key).sha256 == file.sha256


def copy_file(source: Reader, source_key: str, target: Store, key: str, file: FileEntry) -> None:
    """Copy one file through this process. Raises StoreError when it is not what `file` says."""
    try:
        chunks = _chunks(source, source_key)
        target.put_stream(key, chunks, size=file.size, sha256=file.sha256)
    except StoreUnavailableError:
        raise
    except StoreError as error:
        raise StoreError(f"cannot copy {source.uri(source_key)}: {error}") from error


def _copy_within(source: Reader, target: Store, key: str, file: FileEntry) -> bool:
    """Have the store copy one file by itself; returns False where it cannot."""
    if not target.copy(key, key, source=source):
        return False
    if not is_there(target, key, file):
        target.delete(key)
        raise StoreError(
            f"{source.uri(key)} is not what its manifest says (copied and hashed at "
            f"{target.uri(key)}, and removed there); `tensorize verify` names every such file"
        )
    return True


def _chunks(source: Reader, key: str) -> Iterator[bytes]:
    with source.open_read(key) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk


def _copy_provenance(
    source: Reader,
    directory: str,
    target: Store,
    found: SignedManifest,
    trusted: Collection[str] | None,
) -> None:
    key = layout.provenance_key(directory)
    stored = source.get_bytes(key)
    if stored is None:
        return
    believed = (found.public_key,) if trusted is None else trusted
    provenance.verify(stored.data, found, believed, source.uri(key))
    target.put_bytes(key, stored.data)


def _copy_evidence(
    source: Store | HttpFolder,
    target: Store,
    found: SignedManifest,
    trusted: Collection[str] | None,
) -> int:
    """Evidence is of a manifest, wherever it lies: with it the copy can be published."""
    if isinstance(source, HttpFolder):
        # Not listed there, and published with no other.
        version = found.manifest.inputs.vllm
        keys = [layout.evidence_key(found.sha256, device, version) for device in ("cpu", "cuda")]
    else:
        keys = source.list(layout.evidence_folder(found.sha256))
    copied = 0
    for key in keys:
        stored = source.get_bytes(key)
        if stored is None:
            continue
        evidence = decode(stored.data, trusted, source.uri(key))
        if evidence.manifest_sha256 != found.sha256:
            raise EvidenceError(f"{source.uri(key)} is the evidence of another build; remove it")
        there = target.get_bytes(key)
        if there is None or there.data != stored.data:
            target.put_bytes(key, stored.data)
        copied += 1
    return copied


def directory_of(manifest: Manifest, path: str) -> str:
    """The key of an artifact directory that lies at `path`, a path or URI that ends in it.

    Raises ManifestError where the end of `path` is not the place of such a manifest.
    """
    allowed = places(manifest)
    for key in allowed:
        if path.rstrip("/").endswith(f"/{key}"):
            return key
    raise ManifestError(
        f"{path} holds build {manifest.build_id} of {manifest.model} {manifest.suffix}, whose "
        f"place is ROOT/{allowed[0]}; name it there"
    )
