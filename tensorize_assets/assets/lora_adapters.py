"""lora_adapters: the LoRA adapters of a profile as tensorizer files, with their configs."""

import hashlib

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
from tensorize_assets.core import layout
from tensorize_assets.core.errors import ManifestError
from tensorize_assets.core.manifest import (
    FileEntry,
    Manifest,
    read_manifest,
)
from tensorize_assets.core.records import (
    AdaptersRecord,
    EncryptedBuild,
    SnapshotRecord,
)
from tensorize_assets.core.store import Store
from tensorize_assets.core.tasks import (
    AdaptersRequest,
    AdaptersResult,
    TensorFile,
)
from tensorize_assets.partitions import model_suffix
from tensorize_assets.resources.catalog import CatalogResource
from tensorize_assets.resources.hub import HubResource
from tensorize_assets.resources.keyring import KeyringResource
from tensorize_assets.resources.launchers.base import Launcher
from tensorize_assets.resources.store import StoreResource

Metadata = dict[str, dg.MetadataValue | int | float | str | bool]


@dg.asset(
    partitions_def=model_suffix,
    group_name="tensorized_models",
    kinds={"tensorizer"},
    code_version="1",
    pool="tensorize_worker",
    automation_condition=FOLLOWS,
    io_manager_key=IO_MANAGER,
)
def lora_adapters(
    context: dg.AssetExecutionContext,
    hf_snapshot: SnapshotRecord,
    tensorize_catalog: CatalogResource,
    tensorize_store: StoreResource,
    tensorize_hub: HubResource,
    tensorize_keyring: KeyringResource,
    tensorize_launcher: Launcher,
) -> dg.MaterializeResult[AdaptersRecord]:
    """Each adapter's tensors, as they are in its repo, and its adapter_config.json.

    In the build's directory: beside the model when there is one, in `adapters/NAME/` when there are
    several; held against the base model first. A profile without adapters has none. With
    `encryption: only` they are encrypted as they are written.
    """
    metadata: Metadata = {}
    with failures(context):
        target = target_of(context, tensorize_catalog)
        require_one_build(context, target, hf_snapshot)
        store = tensorize_store.open(target.root)
        # None but with `only`: plaintext adapters are of no key.
        hidden = hf_snapshot.encrypted if hf_snapshot.encryption == "only" else None
        directory = hidden.directory if hidden else hf_snapshot.directory
        result: AdaptersResult | None
        if not hf_snapshot.adapters:
            result = None
            metadata["adapters"] = "not applicable: the profile lists none"
        elif (done := read_manifest(store, directory, tensorize_keyring.trusted())) is not None:
            result = _from_manifest(done.manifest)
            context.log.info(f"{store.uri(directory)} is complete: nothing to build")
        elif (
            earlier := stored_before(
                AdaptersRecord,
                "lora_adapters",
                store,
                tensorize_store,
                target,
                hf_snapshot,
                directory,
            )
        ) is not None:
            result = earlier.result
            context.log.info("the adapters of an earlier, interrupted run are whole: kept")
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
            request = AdaptersRequest(
                model=target.model,
                suffix=target.suffix,
                base=snapshots.source(hf_snapshot.snapshot),
                adapters=tuple(map(snapshots.adapter, hf_snapshot.adapters)),
                root=target.root,
                directory=directory,
                scratch_dir=tensorize_store.scratch_for(target.root),
                s3=handed_over.settings,
                encrypted=hidden is not None,
            )
            with data_key(store, tensorize_keyring, hidden and hidden.key_id) as secrets:
                report = tensorize_launcher.run(
                    context,
                    request,
                    AdaptersResult,
                    {**handed_over.secrets, **secrets},
                    resources=target.profile.resources,
                )
            result = report.result
            metadata = {
                "worker_seconds": report.seconds,
                "worker_peak_memory": report.peak_memory_bytes,
                **{f"seconds_{stage}": took for stage, took in result.seconds.items()},
            }
        if result is not None:
            metadata["adapters"] = _table(result)
            metadata["bytes"] = sum(file.size for file in result.files)
    return dg.MaterializeResult(
        value=AdaptersRecord(
            model=target.model,
            suffix=target.suffix,
            build_id=hf_snapshot.build_id,
            directory=directory,
            result=result,
        ),
        metadata={
            "directory": dg.PathMetadataValue(store.uri(directory)),
            "encrypted": hidden is not None,
            **metadata,
        },
    )


def _from_manifest(manifest: Manifest) -> AdaptersResult:
    names = {name for adapter in manifest.adapters for name in (adapter.file, adapter.config)}
    return AdaptersResult(
        adapters=manifest.adapters,
        files=tuple(file for file in manifest.files if file.path in names),
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
) -> tuple[AdaptersResult, Metadata]:
    """Encrypt the adapters of an earlier data key with this build's own."""
    manifest = old.stored.manifest
    adapters = manifest.adapters
    encrypted, metadata = encrypt_anew(
        context,
        target,
        hidden,
        [TensorFile(path=one.file, tensors=one.tensors) for one in adapters],
        old=old,
        store=store,
        artifact_store=artifact_store,
        keyring=keyring,
        launcher=launcher,
    )
    configs = {file.path: file for file in manifest.files}
    for adapter in adapters:
        _copy(store, old.directory, hidden.directory, configs[adapter.config])
    result = AdaptersResult(
        adapters=tuple(
            adapter.model_copy(update={"tensors": file.tensors})
            for adapter, file in zip(adapters, encrypted.tensors, strict=True)
        ),
        files=(*encrypted.files, *(configs[adapter.config] for adapter in adapters)),
        seconds=encrypted.seconds,
    )
    return result, {**metadata}


def _copy(store: Store, source: str, directory: str, file: FileEntry) -> None:
    key = layout.file_key(source, file.path)
    found = store.get_bytes(key)
    if found is None or hashlib.sha256(found.data).hexdigest() != file.sha256:
        raise ManifestError(
            f"{store.uri(key)} is gone or is not what its manifest says; restore it, or remove "
            f"{store.uri(layout.manifest_key(source))} so that the build is made anew"
        )
    store.put_bytes(layout.file_key(directory, file.path), found.data)


def _table(result: AdaptersResult) -> dg.TableMetadataValue:
    sizes = {file.path: file.size for file in result.files}
    return table(
        {
            "name": adapter.name,
            "repo": adapter.repo,
            "commit": adapter.snapshot.commit,
            "rank": adapter.rank,
            "tensors": len(adapter.tensors),
            "bytes": sizes[adapter.file],
        }
        for adapter in result.adapters
    )
