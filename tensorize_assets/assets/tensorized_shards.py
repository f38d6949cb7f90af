"""tensorized_shards: one tensorizer file for each tensor-parallel rank."""

from typing import Any

import dagster as dg

from tensorize_assets.assets.earlier import Earlier, stored_before, under_earlier_key
from tensorize_assets.assets.encrypting import data_key, encrypt_anew
from tensorize_assets.assets.metadata import table
from tensorize_assets.assets.snapshots import Snapshots
from tensorize_assets.assets.target import (
    IO_MANAGER,
    Target,
    failures,
    require_one_build,
    target_of,
)
from tensorize_assets.automation.conditions import FOLLOWS
from tensorize_assets.core.build import BuildInputs
from tensorize_assets.core.errors import BuildMismatchError
from tensorize_assets.core.manifest import Manifest, read_manifest
from tensorize_assets.core.records import EncryptedBuild, ShardsRecord, SnapshotRecord
from tensorize_assets.core.store import Store
from tensorize_assets.core.tasks import HfTensorsRequest, ShardRequest, ShardResult, TensorFile
from tensorize_assets.partitions import model_suffix
from tensorize_assets.resources.catalog import CatalogResource
from tensorize_assets.resources.hub import HubResource
from tensorize_assets.resources.keyring import KeyringResource
from tensorize_assets.resources.launchers.base import Launcher
from tensorize_assets.resources.store import StoreResource


@dg.asset(
    partitions_def=model_suffix,
    group_name="tensorized_models",
    kinds={"vllm", "tensorizer"},
    code_version="1",
    pool="tensorize_worker",
    automation_condition=FOLLOWS,
    io_manager_key=IO_MANAGER,
)
def tensorized_shards(
    context: dg.AssetExecutionContext,
    hf_snapshot: SnapshotRecord,
    tensorize_catalog: CatalogResource,
    tensorize_store: StoreResource,
    tensorize_hub: HubResource,
    tensorize_keyring: KeyringResource,
    tensorize_launcher: Launcher,
) -> dg.MaterializeResult[ShardsRecord]:
    """Each rank's weights in vLLM's layout, as loaded and before any post-load processing.

    `model.tensors`, or `model-rank-000.tensors` and so on, in the build's directory
    `vllm/MODEL/SUFFIX-BUILD/` below the catalog's root. Ranks are built one after another on the
    CPU of one worker; peak memory is one shard. With `sharding: executor` vLLM's own ranks write
    them, all at once, on the profile's `reload_device`. With `format: hf` it is one file with the
    repo's own tensors and names, made without vLLM. With `encryption: only` they are encrypted as
    they are written; where the build is complete under an earlier data key, they are made of that
    one.
    """
    metadata: dict[str, dg.MetadataValue | int | float | str | bool] = {}
    with failures(context):
        target = target_of(context, tensorize_catalog)
        require_one_build(context, target, hf_snapshot)
        store = tensorize_store.open(target.root)
        # None but with `only`: plaintext shards are of no key.
        hidden = hf_snapshot.encrypted if hf_snapshot.encryption == "only" else None
        directory = hidden.directory if hidden else hf_snapshot.directory
        done = read_manifest(store, directory, tensorize_keyring.trusted())
        if done is not None:
            result = _from_manifest(done.manifest)
            context.log.info(f"{store.uri(directory)} is complete: nothing to build")
        elif (
            earlier := stored_before(
                ShardsRecord,
                "tensorized_shards",
                store,
                tensorize_store,
                target,
                hf_snapshot,
                directory,
            )
        ) is not None:
            result = earlier.result
            context.log.info("the shards of an earlier, interrupted run are whole: kept")
        elif (
            hidden is not None
            and (
                old := under_earlier_key(
                    context, store, tensorize_keyring, target, hf_snapshot, hidden
                )
            )
            is not None
        ):
            result, metadata = _with_new_key(
                context,
                target,
                hidden,
                old,
                store,
                tensorize_store,
                tensorize_keyring,
                tensorize_launcher,
            )
        else:
            snapshots = Snapshots.of(
                context,
                target,
                tensorize_catalog,
                tensorize_launcher,
                store,
                tensorize_hub,
                tensorize_keyring,
            )
            handed_over = tensorize_store.hand_over(target.root)
            asked: dict[str, Any] = {
                "model": target.model,
                "suffix": target.suffix,
                "snapshot": snapshots.source(hf_snapshot.snapshot),
                "root": target.root,
                "directory": directory,
                "scratch_dir": tensorize_store.scratch_for(target.root),
                "dtype": target.profile.dtype,
                "serialization_kwargs": target.profile.serialization_kwargs,
                "s3": handed_over.settings,
                "encrypted": hidden is not None,
            }
            request = (
                HfTensorsRequest(**asked)
                if target.profile.format == "hf"
                else ShardRequest(
                    tensor_parallel_size=target.profile.tensor_parallel_size,
                    sharding=target.profile.sharding,
                    device=target.profile.reload_device,
                    **asked,
                )
            )
            with data_key(store, tensorize_keyring, hidden and hidden.key_id) as secrets:
                report = tensorize_launcher.run(
                    context,
                    request,
                    ShardResult,
                    {**handed_over.secrets, **secrets},
                    resources=target.profile.resources,
                )
            result = report.result
            _require_versions(target, hf_snapshot.inputs, result)
            size = sum(file.size for file in result.files)
            metadata = {
                "bytes_per_second": size / max(report.seconds, 1e-3),
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
            "format": target.profile.format,
            "sharding": result.sharding,
            "ranks": len(result.shards),
            "tensors": sum(len(shard.tensors) for shard in result.shards),
            "bytes": sum(file.size for file in result.files),
            "dtype": result.dtype,
            "architecture": result.architecture,
            "stock_vllm_loads_it": result.stock_vllm.loadable,
            "cast_by_stock_vllm": len(result.census.cast_by_stock),
            "cast_with_loss": lossy,
            "tied": dg.MetadataValue.json([list(group.names) for group in result.tied]),
            "dtypes": table(
                {"dtype": name, "tensors": count.tensors, "bytes": count.bytes}
                for name, count in result.census.by_dtype.items()
            ),
            **metadata,
        },
    )


def _require_versions(target: Target, inputs: BuildInputs, result: ShardResult) -> None:
    """Refuse what other versions wrote than the build's id is of.

    Raises:
        BuildMismatchError: the launcher says of its workers what is not so.
    """
    for name in ("vllm", "torch", "tensorizer"):
        found, said = result.versions.get(name, "").partition("+")[0], getattr(inputs, name)
        if found != said:
            raise BuildMismatchError(
                f"{target.model} {target.suffix}: the worker has {name} {found or '(none)'}, and "
                f"this build is of {said}, as the launcher's settings (versions) or what is "
                "installed beside Dagster say; set them to what the workers' image has"
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
        tensor_format=manifest.tensor_format,
        sharding=manifest.sharding,
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
    launcher: Launcher,
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
