"""artifact: config and tokenizer files beside the shards, and the manifest, last."""

from pathlib import PurePosixPath

import dagster as dg

from tensorize_assets.assets.target import (
    failures,
    require_one_build,
    target_of,
)
from tensorize_assets.core import hub, layout
from tensorize_assets.core.errors import ConflictError, ManifestError
from tensorize_assets.core.manifest import (
    FileEntry,
    Manifest,
    SnapshotEntry,
    encode,
    manifest_sha256,
    read_manifest,
)
from tensorize_assets.core.records import (
    ArtifactPlace,
    ArtifactRecord,
    ShardsRecord,
    SnapshotRecord,
)
from tensorize_assets.core.store import Store
from tensorize_assets.partitions import model_suffix
from tensorize_assets.resources.catalog import CatalogResource
from tensorize_assets.resources.hub import HubResource
from tensorize_assets.resources.keyring import KeyringResource
from tensorize_assets.resources.store import StoreResource

_WEIGHTS = (".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json")


@dg.asset(
    partitions_def=model_suffix,
    group_name="tensorized_models",
    kinds={"json"},
    code_version="1",
)
def artifact(
    context: dg.AssetExecutionContext,
    hf_snapshot: SnapshotRecord,
    tensorized_shards: ShardsRecord,
    catalog: CatalogResource,
    artifact_store: StoreResource,
    hub_access: HubResource,
    keyring: KeyringResource,
) -> dg.MaterializeResult[ArtifactRecord]:
    """A directory that vLLM loads, sealed by a signed manifest.

    Without its manifest a directory does not exist for any reader; with it, it never changes.
    """
    with failures(context):
        target = target_of(context, catalog)
        require_one_build(context, target, hf_snapshot, tensorized_shards)
        store = artifact_store.open(target.root)
        done = read_manifest(store, hf_snapshot.directory, keyring.trusted())
        if done is not None:
            manifest, sha256 = done
        else:
            folder = hub.ensure_local(hub_access.access(), hf_snapshot.snapshot)
            files = _companions(hf_snapshot.snapshot)
            for file in files:
                key = layout.file_key(hf_snapshot.directory, file.path)
                store.put_file(key, folder / file.path, sha256=file.sha256)
            manifest = _manifest(hf_snapshot, tensorized_shards, files)
            _require_shards(store, hf_snapshot, tensorized_shards)
            sha256 = _seal(store, keyring, hf_snapshot.directory, manifest)
    return dg.MaterializeResult(
        value=ArtifactRecord(
            model=target.model,
            suffix=target.suffix,
            build_id=hf_snapshot.build_id,
            variants=(
                ArtifactPlace(
                    build_id=hf_snapshot.build_id,
                    directory=hf_snapshot.directory,
                    manifest_sha256=sha256,
                    encrypted=False,
                ),
            ),
        ),
        data_version=dg.DataVersion(sha256),
        metadata={
            "directory": dg.PathMetadataValue(store.uri(hf_snapshot.directory)),
            "manifest_sha256": sha256,
            "files": len(manifest.files),
            "bytes": sum(file.size for file in manifest.files),
        },
    )


def _companions(snapshot: hub.Snapshot) -> tuple[FileEntry, ...]:
    """Everything of the snapshot but its weights; `manifest.json` is our own name."""
    return tuple(
        FileEntry(path=file.path, size=file.size, sha256=file.sha256)
        for file in snapshot.files
        if not file.path.endswith(_WEIGHTS)
        and file.path != layout.MANIFEST
        and PurePosixPath(file.path).name != ".gitattributes"
    )


def _manifest(
    build: SnapshotRecord, shards: ShardsRecord, companions: tuple[FileEntry, ...]
) -> Manifest:
    result = shards.result
    return Manifest(
        model=build.model,
        suffix=build.suffix,
        build_id=build.build_id,
        inputs=build.inputs,
        snapshot=SnapshotEntry(
            revision=build.snapshot.revision,
            commit=build.snapshot.commit,
            files=tuple(
                FileEntry(path=file.path, size=file.size, sha256=file.sha256)
                for file in build.snapshot.files
            ),
            weights_format=build.snapshot.weights_format,
        ),
        profile=build.profile,
        sharding="virtual",
        tensor_parallel_size=len(result.shards),
        dtype=result.dtype,
        architecture=result.architecture,
        dtype_census=result.census,
        stock_vllm=result.stock_vllm,
        tied=result.tied,
        versions=result.versions,
        files=companions + result.files,
        shards=result.shards,
    )


def _require_shards(store: Store, build: SnapshotRecord, shards: ShardsRecord) -> None:
    for file in shards.result.files:
        key = layout.file_key(build.directory, file.path)
        if store.stat(key) != file.size:
            raise ManifestError(
                f"{store.uri(key)} is gone or has another size than the worker wrote "
                f"({file.size:,} bytes); materialize tensorized_shards again"
            )


def _seal(store: Store, keyring: KeyringResource, directory: str, manifest: Manifest) -> str:
    """Write the manifest if there is none. Of two runs of one build the first one's stands."""
    data = encode(manifest, keyring.key())
    try:
        store.put_bytes(layout.manifest_key(directory), data, if_absent=True)
        return manifest_sha256(data)
    except ConflictError:
        stored = read_manifest(store, directory, keyring.trusted())
        if stored is None or stored.manifest.build_id != manifest.build_id:
            raise
        if stored.manifest.files != manifest.files:
            raise ManifestError(
                f"{store.uri(directory)} was completed by another run with other bytes for the "
                "same build; compare the two runs' tool versions and report it"
            ) from None
        return stored.sha256
