"""encrypted_shards: the encrypted variant of a build, made of its plaintext files."""

import dagster as dg

from tensorize_assets.assets.earlier import stored_before
from tensorize_assets.assets.encrypting import encrypt, worker_metadata
from tensorize_assets.assets.target import (
    IO_MANAGER,
    failures,
    require_one_build,
    target_of,
)
from tensorize_assets.automation.conditions import FOLLOWS
from tensorize_assets.core import sealing
from tensorize_assets.core.manifest import Manifest, read_manifest
from tensorize_assets.core.records import (
    AdaptersRecord,
    EncryptedRecord,
    ShardsRecord,
    SnapshotRecord,
)
from tensorize_assets.core.tasks import (
    EncryptResult,
    TensorFile,
)
from tensorize_assets.partitions import model_suffix
from tensorize_assets.resources.catalog import CatalogResource
from tensorize_assets.resources.keyring import KeyringResource
from tensorize_assets.resources.launchers.base import Launcher
from tensorize_assets.resources.store import StoreResource


@dg.asset(
    partitions_def=model_suffix,
    group_name="tensorized_models",
    kinds={"tensorizer"},
    code_version="1",
    pool="tensorize_worker",
    automation_condition=FOLLOWS,
    io_manager_key=IO_MANAGER,
)
def encrypted_shards(
    context: dg.AssetExecutionContext,
    hf_snapshot: SnapshotRecord,
    tensorized_shards: ShardsRecord,
    lora_adapters: AdaptersRecord,
    tensorize_catalog: CatalogResource,
    tensorize_store: StoreResource,
    tensorize_keyring: KeyringResource,
    tensorize_launcher: Launcher,
) -> dg.MaterializeResult[EncryptedRecord]:
    """Every tensor file, the adapters' too, encrypted with the build's data key.

    In a directory of its own, `vllm/MODEL/SUFFIX-BUILD-encrypted/`. Without vLLM and without
    loading the model. A profile that is not encrypted has none; with `encryption: only` the files
    were written encrypted.
    """
    with failures(context):
        target = target_of(context, tensorize_catalog)
        require_one_build(context, target, hf_snapshot, tensorized_shards, lora_adapters)
        store = tensorize_store.open(target.root)
        build = hf_snapshot.encrypted
        result: EncryptResult | None = None
        metadata: dict[str, dg.MetadataValue | int | float | str] = {}
        if build is not None:
            recipients = sealing.recipients_of(store, build.key_id, tensorize_keyring.trusted())
            metadata = {"data_key": build.key_id, "recipients": ", ".join(recipients)}
        if build is None:
            metadata["encryption"] = "not applicable: the profile asks for none"
        elif hf_snapshot.encryption == "only":
            metadata["encryption"] = "the shards were written encrypted"
        elif (
            done := read_manifest(store, build.directory, tensorize_keyring.trusted())
        ) is not None:
            result = _from_manifest(done.manifest)
            context.log.info(f"{store.uri(build.directory)} is complete: nothing to encrypt")
        elif (
            earlier := stored_before(
                EncryptedRecord,
                "encrypted_shards",
                store,
                tensorize_store,
                target,
                hf_snapshot,
                build.directory,
            )
        ) is not None:
            result = earlier.result
            context.log.info("the files that an earlier, interrupted run encrypted are whole: kept")
        else:
            report = encrypt(
                context,
                target,
                build,
                _tensor_files(tensorized_shards, lora_adapters),
                source=tensorized_shards.directory,
                store=store,
                artifact_store=tensorize_store,
                keyring=tensorize_keyring,
                launcher=tensorize_launcher,
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
