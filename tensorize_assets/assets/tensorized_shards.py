"""tensorized_shards: one tensorizer file for each tensor-parallel rank."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple

import dagster as dg

from tensorize_assets.assets.encrypted_shards import encrypt, files_are_whole, worker_metadata
from tensorize_assets.assets.target import (
    Target,
    failures,
    require_one_build,
    target_of,
)
from tensorize_assets.core import build_keys, hub, jsonio, sealing
from tensorize_assets.core.build import build_id
from tensorize_assets.core.errors import StoreError
from tensorize_assets.core.manifest import Manifest, ShardEntry, read_manifest
from tensorize_assets.core.records import EncryptedBuild, ShardsRecord, SnapshotRecord
from tensorize_assets.core.sealing import SealingError
from tensorize_assets.core.store import Store
from tensorize_assets.core.tasks import DATA_KEY, ShardRequest, ShardResult, TensorFile
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
            earlier := _stored_before(store, artifact_store, target, hf_snapshot, directory)
        ) is not None:
            result = earlier
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
            with data_key(store, keyring, hidden) as secrets:
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


def _stored_before(
    store: Store,
    artifact_store: StoreResource,
    target: Target,
    build: SnapshotRecord,
    directory: str,
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
    # The folder of a one-shot build is named by its suffix, which the build id does not hold; that
    # of an encrypted one is named by its data key, which the base build's id does not hold.
    own = (build.build_id, build.suffix, directory)
    if (record.build_id, record.suffix, record.directory) != own:
        return None
    return record.result if files_are_whole(store, directory, record.result.files) else None


@contextmanager
def data_key(
    store: Store, keyring: KeyringResource, hidden: EncryptedBuild | None
) -> Generator[dict[str, bytes]]:
    """The secrets of a worker that writes encrypted shards; none for plaintext ones."""
    if hidden is None:
        yield {}
        return
    with sealing.unseal(
        store, hidden.key_id, keyring.private(), trusted=keyring.trusted()
    ) as data_key:
        yield {DATA_KEY: data_key.reveal()}


class Earlier(NamedTuple):
    """The same build, complete under the data key `key_id`."""

    key_id: str
    directory: str
    manifest: Manifest


def under_earlier_key(
    context: dg.AssetExecutionContext,
    store: Store,
    keyring: KeyringResource,
    target: Target,
    build: SnapshotRecord,
    hidden: EncryptedBuild,
) -> Earlier | None:
    """The latest complete build of the same inputs under another data key of its history."""
    trusted = keyring.trusted()
    stored = build_keys.read_keys(store, target.model, target.suffix, build.build_id, trusted)
    for choice in reversed(stored.keys.choices if stored else ()):
        its_own = build_id(build.inputs.model_copy(update={"data_key": choice.key_id}))
        directory = target.encrypted_directory(its_own)
        if choice.key_id == hidden.key_id or directory == hidden.directory:
            continue
        found = read_manifest(store, directory, trusted)
        if found is None or found.manifest.build_id != its_own:
            continue
        try:
            sealing.unseal(store, choice.key_id, keyring.private(), trusted=trusted).wipe()
        except SealingError as error:
            context.log.warning(f"{store.uri(directory)} is not encrypted anew: {error}")
            continue
        return Earlier(choice.key_id, directory, found.manifest)
    return None


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
    context.log.info(
        f"{store.uri(old.directory)} is complete under data key {old.key_id}: encrypted anew with "
        f"{hidden.key_id}, not sharded again"
    )
    with sealing.unseal(store, old.key_id, keyring.private(), trusted=keyring.trusted()) as old_key:
        report = encrypt(
            context,
            target,
            hidden,
            [TensorFile(path=one.file, tensors=one.tensors) for one in old.manifest.shards],
            source=old.directory,
            store=store,
            artifact_store=artifact_store,
            keyring=keyring,
            launcher=launcher,
            old_key=old_key,
        )
    shards = tuple(
        ShardEntry(rank=rank, file=file.path, tensors=file.tensors)
        for rank, file in enumerate(report.result.tensors)
    )
    result = _from_manifest(old.manifest).model_copy(
        update={"files": report.result.files, "shards": shards, "seconds": report.result.seconds}
    )
    return result, {"encrypted_anew_from": old.directory, **worker_metadata(report)}
