"""What Dagster loads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import dagster as dg

from tensorize_assets.assets.artifact import artifact
from tensorize_assets.assets.encrypted_shards import encrypted_shards
from tensorize_assets.assets.hf_snapshot import hf_snapshot
from tensorize_assets.assets.lora_adapters import lora_adapters
from tensorize_assets.assets.published import published
from tensorize_assets.assets.reference_outputs import reference_outputs
from tensorize_assets.assets.reload_check import reload_check
from tensorize_assets.assets.tensorized_shards import tensorized_shards
from tensorize_assets.io_managers import ManifestIOManager
from tensorize_assets.resources.catalog import CatalogResource
from tensorize_assets.resources.hub import HubResource
from tensorize_assets.resources.keyring import KeyringResource
from tensorize_assets.resources.launcher import SubprocessLauncher
from tensorize_assets.resources.store import StoreResource

ASSETS = (
    hf_snapshot,
    tensorized_shards,
    lora_adapters,
    encrypted_shards,
    artifact,
    reference_outputs,
    reload_check,
    published,
)

# Its signature holds types that Dagster leaves open.
build = dg.define_asset_job(  # pyright: ignore[reportUnknownMemberType]
    "build",
    selection=dg.AssetSelection.assets(*ASSETS),
    description="One model and suffix, from its Hub revision to the moved channel.",
)


def home() -> Path:
    """The folder of everything a user edits: DAGSTER_HOME, or `dagster_home` where one stands."""
    return Path(os.environ.get("DAGSTER_HOME") or "dagster_home").absolute()


def resources(folder: Path, artifact_store: StoreResource | None = None) -> dict[str, object]:
    """The resources for a catalog, cache and key in `folder`; the environment goes before them.

    `artifact_store` is a store of one's own, such as `resources.s3.S3StoreResource`.
    """
    catalog = CatalogResource(
        path=os.environ.get("TENSORIZE_CATALOG") or str(folder / "models.yaml")
    )
    artifact_store = artifact_store or StoreResource(
        catalog=catalog, scratch=os.environ.get("TENSORIZE_SCRATCH") or str(folder / "scratch")
    )
    return {
        "catalog": catalog,
        "artifact_store": artifact_store,
        "hub_access": HubResource(
            cache_dir=os.environ.get("TENSORIZE_HUB_CACHE") or str(folder / "hub")
        ),
        "keyring": KeyringResource(
            catalog=catalog,
            signing_key=str(folder / "keys" / "signing.key"),
            private_key=str(folder / "keys" / "private.key"),
            seen_folder=str(folder / "seen"),
        ),
        "launcher": SubprocessLauncher(),
        "io_manager": ManifestIOManager(store=artifact_store),
    }


def definitions(
    folder: Path,
    loggers: Mapping[str, dg.LoggerDefinition] | None = None,
    artifact_store: StoreResource | None = None,
) -> dg.Definitions:
    """Assets and jobs over a catalog, cache and key in `folder`."""
    return dg.Definitions(
        assets=ASSETS,
        jobs=[build],
        resources=resources(folder, artifact_store),
        loggers=loggers,
    )


defs = definitions(home())
