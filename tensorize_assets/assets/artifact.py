"""artifact: config and tokenizer files beside the tensors, and the manifest, last."""

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

import dagster as dg

from tensorize_assets.assets.snapshots import snapshot_entry
from tensorize_assets.assets.target import (
    IO_MANAGER,
    failures,
    require_one_build,
    target_of,
)
from tensorize_assets.automation.conditions import FOLLOWS
from tensorize_assets.core import hub, layout, mirror, mirroring, provenance
from tensorize_assets.core.errors import (
    BuildMismatchError,
    ConflictError,
    HubError,
    ManifestError,
)
from tensorize_assets.core.hub_access import HubAccess
from tensorize_assets.core.hub_files import Snapshot
from tensorize_assets.core.manifest import (
    AdapterEntry,
    EncryptionEntry,
    FileEntry,
    Manifest,
    ShardEntry,
    StoredManifest,
    encode,
    manifest_sha256,
    read_manifest,
)
from tensorize_assets.core.records import (
    AdaptersRecord,
    ArtifactPlace,
    ArtifactRecord,
    EncryptedBuild,
    EncryptedRecord,
    ShardsRecord,
    SnapshotRecord,
)
from tensorize_assets.core.store import CHUNK_BYTES, Store, explained
from tensorize_assets.partitions import model_suffix
from tensorize_assets.resources.catalog import CatalogResource
from tensorize_assets.resources.hub import HubResource
from tensorize_assets.resources.keyring import KeyringResource
from tensorize_assets.resources.store import StoreResource

_WEIGHTS = (".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json")
# What is written to every directory, by no worker.
_OURS = (layout.MANIFEST, layout.PROVENANCE)


class _Contents(NamedTuple):
    """What workers have written for one directory; `files` are all of it."""

    shards: tuple[ShardEntry, ...]
    adapters: tuple[AdapterEntry, ...]
    files: tuple[FileEntry, ...]


class _Work(NamedTuple):
    """What sealing a directory takes."""

    store: Store
    keyring: KeyringResource
    access: HubAccess
    build: SnapshotRecord
    shards: ShardsRecord


class _Sealed(NamedTuple):
    """A directory and its manifest."""

    place: ArtifactPlace
    manifest: Manifest


@dg.asset(
    partitions_def=model_suffix,
    group_name="tensorized_models",
    kinds={"json"},
    code_version="1",
    automation_condition=FOLLOWS,
    io_manager_key=IO_MANAGER,
)
def artifact(
    context: dg.AssetExecutionContext,
    hf_snapshot: SnapshotRecord,
    tensorized_shards: ShardsRecord,
    lora_adapters: AdaptersRecord,
    encrypted_shards: EncryptedRecord,
    tensorize_catalog: CatalogResource,
    tensorize_store: StoreResource,
    tensorize_hub: HubResource,
    tensorize_keyring: KeyringResource,
) -> dg.MaterializeResult[ArtifactRecord]:
    """A directory that vLLM loads, sealed by a signed manifest; with `encryption: both`, two.

    `vllm/MODEL/SUFFIX-BUILD/` below the catalog's root gets config and tokenizer files beside the
    tensors, and, when all of them are there, `manifest.json`; then `provenance.dsse.json`, which
    names the manifest.

    Without its manifest a directory does not exist for any reader; with it, it never changes.
    """
    with failures(context):
        target = target_of(context, tensorize_catalog)
        records = (hf_snapshot, tensorized_shards, lora_adapters, encrypted_shards)
        require_one_build(context, target, *records)
        store = tensorize_store.open(target.root)
        work = _Work(
            store, tensorize_keyring, tensorize_hub.access(), hf_snapshot, tensorized_shards
        )
        written = _written(tensorized_shards, lora_adapters)
        hidden = hf_snapshot.encrypted
        sealed: list[_Sealed] = []
        if hidden is None or hf_snapshot.encryption != "only":
            _require_place(hf_snapshot.directory, tensorized_shards, lora_adapters)
            sealed.append(_complete(work, written, None))
            if hidden is not None:
                _require_place(hidden.directory, encrypted_shards)
                derived = _derived(written, encrypted_shards)
                sealed.append(_complete(work, derived, hidden, sealed[0].place))
        else:
            _require_place(hidden.directory, tensorized_shards, lora_adapters)
            sealed.append(_complete(work, written, hidden))
    places = tuple(one.place for one in sealed)
    return dg.MaterializeResult(
        value=ArtifactRecord(
            model=target.model,
            suffix=target.suffix,
            build_id=hf_snapshot.build_id,
            variants=places,
        ),
        data_version=dg.DataVersion("+".join(place.manifest_sha256 for place in places)),
        metadata={
            "encryption": hf_snapshot.encryption,
            "adapters": ", ".join(adapter.name for adapter in written.adapters) or "none",
            **_metadata(store, sealed[0], ""),
            **(_metadata(store, sealed[1], "encrypted_") if sealed[1:] else {}),
        },
    )


def _metadata(store: Store, sealed: _Sealed, kind: str) -> dict[str, dg.MetadataValue | str | int]:
    place, manifest = sealed
    return {
        f"{kind}directory": dg.PathMetadataValue(store.uri(place.directory)),
        f"{kind}manifest_sha256": place.manifest_sha256,
        f"{kind}files": len(manifest.files),
        f"{kind}bytes": sum(file.size for file in manifest.files),
    }


def _written(shards: ShardsRecord, adapters: AdaptersRecord) -> _Contents:
    found = adapters.result
    return _Contents(
        shards=shards.result.shards,
        adapters=found.adapters if found else (),
        files=shards.result.files + (found.files if found else ()),
    )


def _derived(written: _Contents, encrypted: EncryptedRecord) -> _Contents:
    """The same tensors, in encrypted files; what is no tensor file is the same."""
    result = encrypted.result
    if result is None:
        raise BuildMismatchError(
            f"{encrypted.model} {encrypted.suffix}: nothing was encrypted when encrypted_shards "
            "ran, and the profile asks for it; materialize this partition from hf_snapshot on"
        )
    tensors = {file.path: file.tensors for file in result.tensors}
    ours = {file.path for file in result.files}
    return _Contents(
        shards=tuple(
            shard.model_copy(update={"tensors": tensors[shard.file]}) for shard in written.shards
        ),
        adapters=tuple(
            adapter.model_copy(update={"tensors": tensors[adapter.file]})
            for adapter in written.adapters
        ),
        files=result.files + tuple(file for file in written.files if file.path not in ours),
    )


def _require_place(
    directory: str, *records: ShardsRecord | AdaptersRecord | EncryptedRecord
) -> None:
    for record in records:
        if record.directory != directory:
            raise BuildMismatchError(
                f"{record.model} {record.suffix}: a {type(record).__name__} is of "
                f"{record.directory}, and the build goes to {directory}: its data key is another "
                "now. Materialize this partition from hf_snapshot on"
            )


def _complete(
    work: _Work,
    contents: _Contents,
    hidden: EncryptedBuild | None,
    plaintext: ArtifactPlace | None = None,
) -> _Sealed:
    """Put what is missing beside the tensors, and seal the directory if it is not.

    `hidden` is the encrypted build that it is of; `plaintext` the one that was made of.
    """
    store, build = work.store, work.build
    directory = hidden.directory if hidden else build.directory
    stored = read_manifest(store, directory, work.keyring.trusted())
    if stored is None:
        companions = _companions(build.snapshot)
        _require_apart(build, companions, contents.files)
        if plaintext is None:
            _put_companions(work, companions, directory)
        else:
            configs = {adapter.config for adapter in contents.adapters}
            for file in (*companions, *(file for file in contents.files if file.path in configs)):
                _copy(store, file, plaintext.directory, directory)
        _require_files(store, directory, contents.files)
        manifest = _manifest(work, contents, companions, hidden, plaintext)
        stored = _seal(store, work.keyring, directory, manifest)
    provenance.write(store, directory, stored, work.keyring.key(), work.keyring.trusted())
    place = ArtifactPlace(
        build_id=stored.manifest.build_id,
        directory=directory,
        manifest_sha256=stored.sha256,
        encrypted=hidden is not None,
    )
    return _Sealed(place, stored.manifest)


def _companions(snapshot: Snapshot) -> tuple[FileEntry, ...]:
    """Everything of the snapshot but its weights, and but names that are our own."""
    return tuple(
        FileEntry(path=file.path, size=file.size, sha256=file.sha256)
        for file in snapshot.files
        if not file.path.endswith(_WEIGHTS)
        and file.path not in _OURS
        and PurePosixPath(file.path).name != ".gitattributes"
    )


def _require_apart(
    build: SnapshotRecord, companions: tuple[FileEntry, ...], files: tuple[FileEntry, ...]
) -> None:
    """Refuse a repo with files where the build's own go, an adapter's for instance."""
    ours = [f"{file.path}/" for file in files]
    both = [
        file.path
        for file in companions
        if any(own.startswith(f"{file.path}/") or f"{file.path}/".startswith(own) for own in ours)
    ]
    if both:
        raise HubError(
            f"{build.model}@{build.snapshot.commit} brings files of its own where those of this "
            f"build go ({', '.join(both)}), and vLLM would take one for the other; build from a "
            "repo without them"
        )


def _put_companions(work: _Work, companions: tuple[FileEntry, ...], directory: str) -> None:
    """From this machine's cache or the mirror; where both lack them, downloaded without weights."""
    store, access, snapshot = work.store, work.access, work.build.snapshot
    model, commit = snapshot.model, snapshot.commit
    folder = hub.local_path(access, snapshot)
    held = folder is None and mirror.holds(store, model, commit, mirroring.entries_of(snapshot))
    if held and not mirror.missing(store, model, companions):
        for file in companions:
            key = layout.file_key(directory, file.path)
            content = mirror.chunks(store, model, file)
            store.put_stream(key, content, size=file.size, sha256=file.sha256)
        return
    if folder is None:
        names = {file.path for file in companions}
        listing = hub.resolve(access, model, commit)
        small = tuple(file for file in listing.files if file.path in names)
        listing = listing.model_copy(update={"files": small})
        folder = hub.download(access, model, listing)[1]
    for file in companions:
        key = layout.file_key(directory, file.path)
        store.put_file(key, folder / file.path, sha256=file.sha256)


def _copy(store: Store, file: FileEntry, source: str, directory: str) -> None:
    key = layout.file_key(source, file.path)

    def chunks() -> Iterator[bytes]:
        with store.open_read(key) as stream, explained("read", store.uri(key)):
            while chunk := stream.read(CHUNK_BYTES):
                yield chunk

    place = layout.file_key(directory, file.path)
    store.put_stream(place, chunks(), size=file.size, sha256=file.sha256)


def _manifest(
    work: _Work,
    contents: _Contents,
    companions: tuple[FileEntry, ...],
    hidden: EncryptedBuild | None,
    plaintext: ArtifactPlace | None,
) -> Manifest:
    build, result = work.build, work.shards.result
    return Manifest(
        model=build.model,
        suffix=build.suffix,
        build_id=hidden.build_id if hidden else build.build_id,
        inputs=build.inputs.model_copy(update={"data_key": hidden.key_id if hidden else None}),
        snapshot=snapshot_entry(build.snapshot),
        profile=build.profile,
        sharding=result.sharding,
        tensor_parallel_size=len(contents.shards),
        dtype=result.dtype,
        architecture=result.architecture,
        dtype_census=result.census,
        stock_vllm=result.stock_vllm,
        tied=result.tied,
        versions=result.versions,
        files=companions + contents.files,
        shards=contents.shards,
        adapters=contents.adapters,
        tensor_format=result.tensor_format,
        encryption=EncryptionEntry(
            key_id=hidden.key_id, plaintext=plaintext.manifest_sha256 if plaintext else None
        )
        if hidden
        else None,
    )


def _require_files(store: Store, directory: str, files: tuple[FileEntry, ...]) -> None:
    for file in files:
        key = layout.file_key(directory, file.path)
        if store.stat(key) != file.size:
            raise ManifestError(
                f"{store.uri(key)} is gone or has another size than the worker wrote "
                f"({file.size:,} bytes); materialize tensorized_shards and what follows it again"
            )


def _seal(
    store: Store, keyring: KeyringResource, directory: str, manifest: Manifest
) -> StoredManifest:
    """Write the manifest if there is none. Of two runs of one build the first one's stands."""
    data = encode(manifest, keyring.key())
    try:
        store.put_bytes(layout.manifest_key(directory), data, if_absent=True)
        return StoredManifest(manifest, manifest_sha256(data))
    except ConflictError:
        stored = read_manifest(store, directory, keyring.trusted())
        if stored is None or stored.manifest.build_id != manifest.build_id:
            raise
        if stored.manifest.files != manifest.files:
            raise ManifestError(
                f"{store.uri(directory)} was completed by another run with other bytes for the "
                "same build; compare the two runs' tool versions and report it"
            ) from None
        return stored
