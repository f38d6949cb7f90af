"""encrypted_shards: the encrypted variant of a build, made of its plaintext files."""

from collections.abc import Sequence

import dagster as dg

from tensorize_assets.assets.target import (
    Target,
    failures,
    require_one_build,
    target_of,
)
from tensorize_assets.core import jsonio, layout, sealing
from tensorize_assets.core.errors import StoreError
from tensorize_assets.core.manifest import FileEntry, Manifest, read_manifest
from tensorize_assets.core.records import (
    AdaptersRecord,
    EncryptedBuild,
    EncryptedRecord,
    ShardsRecord,
    SnapshotRecord,
)
from tensorize_assets.core.store import Store, digest
from tensorize_assets.core.tasks import (
    DATA_KEY,
    OLD_DATA_KEY,
    EncryptRequest,
    EncryptResult,
    TensorFile,
)
from tensorize_assets.partitions import model_suffix
from tensorize_assets.resources.catalog import CatalogResource
from tensorize_assets.resources.keyring import KeyringResource
from tensorize_assets.resources.launcher import LaunchReport, SubprocessLauncher
from tensorize_assets.resources.store import StoreResource


@dg.asset(
    partitions_def=model_suffix,
    group_name="tensorized_models",
    kinds={"tensorizer"},
    code_version="1",
    pool="tensorize_worker",
)
def encrypted_shards(
    context: dg.AssetExecutionContext,
    hf_snapshot: SnapshotRecord,
    tensorized_shards: ShardsRecord,
    lora_adapters: AdaptersRecord,
    catalog: CatalogResource,
    artifact_store: StoreResource,
    keyring: KeyringResource,
    launcher: SubprocessLauncher,
) -> dg.MaterializeResult[EncryptedRecord]:
    """Every tensor file, the adapters' too, encrypted with the build's data key.

    Without vLLM and without loading the model. A profile that is not encrypted has none; with
    `encryption: only` the files were written encrypted.
    """
    with failures(context):
        target = target_of(context, catalog)
        require_one_build(context, target, hf_snapshot, tensorized_shards, lora_adapters)
        store = artifact_store.open(target.root)
        build = hf_snapshot.encrypted
        result: EncryptResult | None = None
        metadata: dict[str, dg.MetadataValue | int | float | str] = {}
        if build is not None:
            recipients = sealing.recipients_of(store, build.key_id, keyring.trusted())
            metadata = {"data_key": build.key_id, "recipients": ", ".join(recipients)}
        if build is None:
            metadata["encryption"] = "not applicable: the profile asks for none"
        elif hf_snapshot.encryption == "only":
            metadata["encryption"] = "the shards were written encrypted"
        elif (done := read_manifest(store, build.directory, keyring.trusted())) is not None:
            result = _from_manifest(done.manifest)
            context.log.info(f"{store.uri(build.directory)} is complete: nothing to encrypt")
        elif (earlier := _stored_before(store, artifact_store, target, hf_snapshot)) is not None:
            result = earlier
            context.log.info("the files that an earlier, interrupted run encrypted are whole: kept")
        else:
            report = encrypt(
                context,
                target,
                build,
                _tensor_files(tensorized_shards, lora_adapters),
                source=tensorized_shards.directory,
                store=store,
                artifact_store=artifact_store,
                keyring=keyring,
                launcher=launcher,
            )
            result = report.result
            metadata |= worker_metadata(report)
        if result is not None:
            metadata |= {
                "files": len(result.files),
                "bytes": sum(file.size for file in result.files),
            }
        if build is not None:
            metadata["directory"] = dg.PathMetadataValue(store.uri(build.directory))
    return dg.MaterializeResult(
        value=EncryptedRecord(
            model=target.model,
            suffix=target.suffix,
            build_id=hf_snapshot.build_id,
            directory=build.directory if build else None,
            result=result,
        ),
        metadata=metadata,
    )


def encrypt(
    context: dg.AssetExecutionContext,
    target: Target,
    build: EncryptedBuild,
    files: Sequence[TensorFile],
    *,
    source: str,
    store: Store,
    artifact_store: StoreResource,
    keyring: KeyringResource,
    launcher: SubprocessLauncher,
    old_key: sealing.DataKey | None = None,
) -> LaunchReport[EncryptResult]:
    """Have a worker encrypt `files` of the directory `source` into that of `build`.

    With `old_key` they are encrypted already. Raises as `SubprocessLauncher.run` and
    `sealing.unseal`.
    """
    handed_over = artifact_store.hand_over(target.root)
    with sealing.unseal(
        store, build.key_id, keyring.private(), trusted=keyring.trusted()
    ) as data_key:
        secrets = {**handed_over.secrets, DATA_KEY: data_key.reveal()}
        if old_key is not None:
            secrets[OLD_DATA_KEY] = old_key.reveal()
        return launcher.run(
            context,
            EncryptRequest(
                model=target.model,
                suffix=target.suffix,
                root=target.root,
                source=source,
                directory=build.directory,
                files=tuple(files),
                scratch_dir=artifact_store.scratch_for(target.root),
                s3=handed_over.settings,
            ),
            EncryptResult,
            secrets,
        )


def worker_metadata(report: LaunchReport[EncryptResult]) -> dict[str, int | float | str]:
    """What the encrypting worker took, and its rate."""
    seconds = report.result.seconds["encrypt"]
    size = sum(file.size for file in report.result.files)
    return {
        "worker_seconds": report.seconds,
        "worker_peak_memory": report.peak_memory_bytes,
        "seconds_encrypt": seconds,
        "bytes_per_second": round(size / max(seconds, 1e-3)),
    }


def files_are_whole(store: Store, directory: str, files: Sequence[FileEntry]) -> bool:
    """Whether every file stands in the directory as it was written."""
    for file in files:
        key = layout.file_key(directory, file.path)
        if store.stat(key) != file.size or digest(store, key).sha256 != file.sha256:
            return False
    return True


def _tensor_files(shards: ShardsRecord, adapters: AdaptersRecord) -> list[TensorFile]:
    files = [TensorFile(path=shard.file, tensors=shard.tensors) for shard in shards.result.shards]
    found = adapters.result.adapters if adapters.result else ()
    return [*files, *(TensorFile(path=one.file, tensors=one.tensors) for one in found)]


def _from_manifest(manifest: Manifest) -> EncryptResult:
    names = set(manifest.tensor_files)
    return EncryptResult(
        files=tuple(file for file in manifest.files if file.path in names),
        tensors=(
            *(TensorFile(path=one.file, tensors=one.tensors) for one in manifest.shards),
            *(TensorFile(path=one.file, tensors=one.tensors) for one in manifest.adapters),
        ),
        seconds={},
    )


def _stored_before(
    store: Store, artifact_store: StoreResource, target: Target, build: SnapshotRecord
) -> EncryptResult | None:
    """The result of an earlier run of this build and key, if its files are still what they were."""
    # Records are in the catalog's root, also those of a one-shot build that has its own.
    records = artifact_store.open(artifact_store.root())
    key = target.record_key("encrypted_shards")
    stored = records.get_bytes(key)
    if stored is None or build.encrypted is None:
        return None
    try:
        record = jsonio.load_record(EncryptedRecord, stored.data, records.uri(key))
    except StoreError:
        return None  # of another release, or damaged: encrypted anew
    # A one-shot's directory is named by its suffix, and any other by its data key too.
    own = (build.build_id, build.suffix, build.encrypted.directory)
    if (record.build_id, record.suffix, record.directory) != own or record.result is None:
        return None
    whole = files_are_whole(store, build.encrypted.directory, record.result.files)
    return record.result if whole else None
