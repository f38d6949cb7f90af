"""tensorized_shards: one tensorizer file for each tensor-parallel rank."""

import dagster as dg

from tensorize_assets.assets.target import (
    Target,
    failures,
    require_one_build,
    target_of,
)
from tensorize_assets.core import hub, jsonio, layout
from tensorize_assets.core.errors import StoreError
from tensorize_assets.core.manifest import Manifest, read_manifest
from tensorize_assets.core.records import ShardsRecord, SnapshotRecord
from tensorize_assets.core.store import Store, digest
from tensorize_assets.core.tasks import ShardRequest, ShardResult
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

    Ranks are built one after another on the CPU of one worker; peak memory is one shard.
    """
    metadata: dict[str, dg.MetadataValue | int | float | str | bool] = {}
    with failures(context):
        target = target_of(context, catalog)
        require_one_build(context, target, hf_snapshot)
        store = artifact_store.open(target.root)
        done = read_manifest(store, hf_snapshot.directory, keyring.trusted())
        if done is not None:
            result = _from_manifest(done.manifest)
            context.log.info(f"{store.uri(hf_snapshot.directory)} is complete: nothing to build")
        elif (earlier := _stored_before(store, artifact_store, target, hf_snapshot)) is not None:
            result = earlier
            context.log.info("the shards of an earlier, interrupted run are whole: kept")
        else:
            access = hub_access.access()
            folder = hub.ensure_local(access, hf_snapshot.snapshot)
            handed_over = artifact_store.hand_over(target.root)
            report = launcher.run(
                context,
                ShardRequest(
                    model=target.model,
                    suffix=target.suffix,
                    snapshot_dir=str(folder),
                    root=target.root,
                    directory=hf_snapshot.directory,
                    scratch_dir=artifact_store.scratch_for(target.root),
                    tensor_parallel_size=target.profile.tensor_parallel_size,
                    dtype=target.profile.dtype,
                    serialization_kwargs=target.profile.serialization_kwargs,
                    s3=handed_over.settings,
                ),
                ShardResult,
                handed_over.secrets,
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
            directory=hf_snapshot.directory,
            result=result,
        ),
        metadata={
            "directory": dg.PathMetadataValue(store.uri(hf_snapshot.directory)),
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


def _stored_before(
    store: Store, artifact_store: StoreResource, target: Target, build: SnapshotRecord
) -> ShardResult | None:
    """The result of an earlier run of this build, if every file of it is still what it was."""
    # Records are in the catalog's root, also those of a one-shot build that has its own.
    records = artifact_store.open(artifact_store.root())
    key = target.record_key("tensorized_shards")
    stored = records.get_bytes(key)
    if stored is None:
        return None
    try:
        record = jsonio.load_record(ShardsRecord, stored.data, records.uri(key))
    except StoreError:
        return None  # of another release, or damaged: built anew
    # The folder of a one-shot build is named by its suffix, which the build id does not hold.
    if (record.build_id, record.suffix) != (build.build_id, build.suffix):
        return None
    for file in record.result.files:
        path = layout.file_key(build.directory, file.path)
        if store.stat(path) != file.size or digest(store, path).sha256 != file.sha256:
            return None
    return record.result
