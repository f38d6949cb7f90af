"""tensorized_shards: one tensorizer file for each tensor-parallel rank."""

import dagster as dg

from tensorize_assets.assets.earlier import Earlier, stored_before, under_earlier_key
from tensorize_assets.assets.encrypting import data_key, encrypt_anew
from tensorize_assets.assets.target import (
    Target,
    failures,
    require_one_build,
    target_of,
)
from tensorize_assets.core import hub
from tensorize_assets.core.manifest import Manifest, read_manifest
from tensorize_assets.core.records import EncryptedBuild, ShardsRecord, SnapshotRecord
from tensorize_assets.core.store import Store
from tensorize_assets.core.tasks import ShardRequest, ShardResult, TensorFile
from tensorize_assets.partitions import model_suffix
from tensorize_assets.resources.catalog import CatalogResource
from tensorize_assets.resources.hub import HubResource
from tensorize_assets.resources.keyring import KeyringResource
from tensorize_assets.resources.launcher import SubprocessLauncher
from tensorize_assets.resources.store import StoreResource


@dg.asset(
    partitions_def=model_suffix,
    group_name="tensorized_models",
    kinds={"vllm", "tensorizer"},
    code_version="1",
    pool="tensorize_worker",
)
def tensorized_shards(
    context: dg.AssetExecutionContext,
    hf_snapshot: SnapshotRecord,
    catalog: CatalogResource,
    artifact_store: StoreResource,
    hub_access: HubResource,
    keyring: KeyringResource,
    launcher: SubprocessLauncher,
) -> dg.MaterializeResult[ShardsRecord]:
    """Each rank's weights in vLLM's layout, as loaded and before any post-load processing.

    Ranks are built one after another on the CPU of one worker; peak memory is one shard. With
    `encryption: only` they are encrypted as they are written; where the build is complete under an
    earlier data key, they are made of that one.
    """
    metadata: dict[str, dg.MetadataValue | int | float | str | bool] = {}
    with failures(context):
        target = target_of(context, catalog)
        require_one_build(context, target, hf_snapshot)
        store = artifact_store.open(target.root)
        # None but with `only`: plaintext shards are of no key.
        hidden = hf_snapshot.encrypted if hf_snapshot.encryption == "only" else None
        directory = hidden.directory if hidden else hf_snapshot.directory
        done = read_manifest(store, directory, keyring.trusted())
        if done is not None:
            result = _from_manifest(done.manifest)
            context.log.info(f"{store.uri(directory)} is complete: nothing to build")
        elif (
            earlier := stored_before(
                ShardsRecord,
                "tensorized_shards",
                store,
                artifact_store,
                target,
                hf_snapshot,
                directory,
            )
        ) is not None:
            result = earlier.result
            context.log.info("the shards of an earlier, interrupted run are whole: kept")
        elif (
            hidden is not None
            and (old := under_earlier_key(context, store, keyring, target, hf_snapshot, hidden))
            is not None
        ):
            result, metadata = _with_new_key(
                context, target, hidden, old, store, artifact_store, keyring, launcher
            )
        else:
            access = hub_access.access()
            folder = hub.ensure_local(access, hf_snapshot.snapshot)
            handed_over = artifact_store.hand_over(target.root)
            request = ShardRequest(
                model=target.model,
                suffix=target.suffix,
                snapshot_dir=str(folder),
                root=target.root,
                directory=directory,
                scratch_dir=artifact_store.scratch_for(target.root),
                tensor_parallel_size=target.profile.tensor_parallel_size,
                dtype=target.profile.dtype,
                serialization_kwargs=target.profile.serialization_kwargs,
                s3=handed_over.settings,
                encrypted=hidden is not None,
            )
            with data_key(store, keyring, hidden and hidden.key_id) as secrets:
                report = launcher.run(
                    context, request, ShardResult, {**handed_over.secrets, **secrets}
                )
            result = report.result
            metadata = {
                "worker_seconds": report.seconds,
                "worker_peak_memory": report.peak_memory_bytes,
                **{f"seconds_{stage}": took for stage, took in result.seconds.items()},
            }
    lossy = sum(cast.lossy for cast in result.census.cast_by_stock)
    return dg.MaterializeResult(
        value=ShardsRecord(
            model=target.model,
            suffix=target.suffix,
            build_id=hf_snapshot.build_id,
            directory=directory,
            result=result,
        ),
        metadata={
            "directory": dg.PathMetadataValue(store.uri(directory)),
            "encrypted": hidden is not None,
            "ranks": len(result.shards),
            "tensors": sum(len(shard.tensors) for shard in result.shards),
            "bytes": sum(file.size for file in result.files),
            "dtype": result.dtype,
            "architecture": result.architecture,
            "stock_vllm_loads_it": result.stock_vllm.loadable,
            "cast_by_stock_vllm": len(result.census.cast_by_stock),
            "cast_with_loss": lossy,
            "tied": dg.MetadataValue.json([list(group.names) for group in result.tied]),
            "dtypes": dg.MetadataValue.json(
                {name: count.model_dump() for name, count in result.census.by_dtype.items()}
            ),
            **metadata,
        },
    )


def _from_manifest(manifest: Manifest) -> ShardResult:
    names = {shard.file for shard in manifest.shards}
    return ShardResult(
        dtype=manifest.dtype,
        architecture=manifest.architecture,
        files=tuple(file for file in manifest.files if file.path in names),
        shards=manifest.shards,
        census=manifest.dtype_census,
        tied=manifest.tied,
        stock_vllm=manifest.stock_vllm,
        versions=manifest.versions,
        seconds={},
    )


def _with_new_key(
    context: dg.AssetExecutionContext,
    target: Target,
    hidden: EncryptedBuild,
    old: Earlier,
    store: Store,
    artifact_store: StoreResource,
    keyring: KeyringResource,
    launcher: SubprocessLauncher,
) -> tuple[ShardResult, dict[str, dg.MetadataValue | int | float | str | bool]]:
    """Encrypt the shards of an earlier data key with this build's own."""
    manifest = old.stored.manifest
    encrypted, metadata = encrypt_anew(
        context,
        target,
        hidden,
        [TensorFile(path=one.file, tensors=one.tensors) for one in manifest.shards],
        old=old,
        store=store,
        artifact_store=artifact_store,
        keyring=keyring,
        launcher=launcher,
    )
    shards = tuple(
        shard.model_copy(update={"tensors": file.tensors})
        for shard, file in zip(manifest.shards, encrypted.tensors, strict=True)
    )
    result = _from_manifest(manifest).model_copy(
        update={"files": encrypted.files, "shards": shards, "seconds": encrypted.seconds}
    )
    return result, {**metadata}
