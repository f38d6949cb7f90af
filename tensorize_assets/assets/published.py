"""published: the channel moves to a build that has evidence."""

import dagster as dg
from pydantic import Field

from tensorize_assets.assets.target import (
    IO_MANAGER,
    commit_url,
    failures,
    require_one_build,
    target_of,
)
from tensorize_assets.automation.conditions import FOLLOWS
from tensorize_assets.core import fleet, layout
from tensorize_assets.core.channel import EncryptedVariant
from tensorize_assets.core.publish import publish
from tensorize_assets.core.records import ArtifactRecord, PublishedRecord, ReloadRecord
from tensorize_assets.partitions import model_suffix
from tensorize_assets.resources.catalog import CatalogResource
from tensorize_assets.resources.hub import HubResource
from tensorize_assets.resources.keyring import KeyringResource
from tensorize_assets.resources.store import StoreResource


class PublishConfig(dg.Config):
    """How to publish."""

    republish: bool = Field(
        default=False,
        description="Publish also a build that a rollback took out of service.",
    )


@dg.asset(
    partitions_def=model_suffix,
    group_name="tensorized_models",
    kinds={"json"},
    code_version="1",
    automation_condition=FOLLOWS,
    io_manager_key=IO_MANAGER,
)
def published(
    context: dg.AssetExecutionContext,
    config: PublishConfig,
    artifact: ArtifactRecord,
    reload_check: ReloadRecord,
    tensorize_catalog: CatalogResource,
    tensorize_store: StoreResource,
    tensorize_hub: HubResource,
    tensorize_keyring: KeyringResource,
) -> dg.MaterializeResult[PublishedRecord]:
    """The channel's newest entry. Believes the manifest and the evidence, not Dagster's state.

    The channel is `vllm/MODEL/SUFFIX.json` below the catalog's root: a signed, numbered history of
    which build is current. Whoever serves the model begins there (`tensorize serve`).
    """
    with failures(context):
        target = target_of(context, tensorize_catalog)
        require_one_build(context, target, artifact, reload_check)
        store = tensorize_store.open(target.root)
        first, *others = artifact.variants
        entry = publish(
            store,
            tensorize_keyring.key(),
            tensorize_keyring.trusted(),
            model=target.model,
            suffix=target.suffix,
            build_id=first.build_id,
            directory=first.directory,
            device=target.profile.reload_device,
            encrypted=next(
                (
                    EncryptedVariant(
                        build_id=other.build_id,
                        directory=other.directory,
                        manifest_sha256=other.manifest_sha256,
                    )
                    for other in others
                ),
                None,
            ),
            republish=config.republish,
            seen=tensorize_keyring.seen(),
        )
        key = layout.channel_key(target.model, target.suffix)
        held = entry.build_id != first.build_id
        found, _ = fleet.look_up(store, entry, tensorize_keyring.trusted(), held=held)
        url = commit_url(tensorize_hub.access(), target.model, entry.commit)
    if held:
        context.log.warning(
            f"not published: a rollback took build {first.build_id} out of service; to publish "
            "it again, materialize this asset with `republish: true`"
        )
    context.log.info(f"{store.uri(key)} is at entry {entry.number}: build {entry.build_id}")
    return dg.MaterializeResult(
        value=PublishedRecord(
            model=target.model,
            suffix=target.suffix,
            build_id=artifact.build_id,
            channel=key,
            number=entry.number,
        ),
        data_version=dg.DataVersion(fleet.line(found)),
        metadata={
            "channel": dg.PathMetadataValue(store.uri(key)),
            "held_by_rollback": held,
            "entry": entry.number,
            "build_id": entry.build_id,
            "commit": entry.commit,
            "hub": dg.MetadataValue.url(url),
            "directory": dg.PathMetadataValue(store.uri(entry.directory)),
            **(
                {"encrypted": dg.PathMetadataValue(store.uri(entry.encrypted.directory))}
                if entry.encrypted
                else {}
            ),
            "device": entry.device,
            "vllm_version": entry.vllm_version,
            "published_at": dg.MetadataValue.timestamp(entry.when),
            "reloaded_at": dg.MetadataValue.timestamp(found.reloaded),
            "bytes": found.bytes,
            "encryption": found.encryption,
            "signed_by": found.signed_by,
        },
    )
