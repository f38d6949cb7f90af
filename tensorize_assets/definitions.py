"""What Dagster loads.

Each kind has its place: an asset of the chain in ASSETS, one of the fleet in FLEET_ASSETS, a check
that stands alone in CHECKS, a job in JOBS, a sensor in SENSORS, a schedule in `schedules_of`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import dagster as dg

from tensorize_assets.assets.artifact import artifact
from tensorize_assets.assets.encrypted_shards import encrypted_shards
from tensorize_assets.assets.fleet_status import fleet_status
from tensorize_assets.assets.hf_snapshot import hf_snapshot
from tensorize_assets.assets.lora_adapters import lora_adapters
from tensorize_assets.assets.published import published
from tensorize_assets.assets.reference_outputs import reference_outputs
from tensorize_assets.assets.reload_check import reload_check
from tensorize_assets.assets.target import CHAIN_TAG, EXECUTOR
from tensorize_assets.assets.tensorized_shards import tensorized_shards
from tensorize_assets.automation import audit, partitions, retensorize, retention, revisions
from tensorize_assets.automation.alerts import alerts_sensor
from tensorize_assets.automation.conditions import conditions_sensor
from tensorize_assets.core.catalog import Catalog
from tensorize_assets.core.catalog_automation import Automation
from tensorize_assets.core.errors import CatalogError
from tensorize_assets.io_managers import ManifestIOManager
from tensorize_assets.resources.catalog import CatalogResource
from tensorize_assets.resources.hub import HubResource
from tensorize_assets.resources.keyring import KeyringResource
from tensorize_assets.resources.launchers.base import Launcher
from tensorize_assets.resources.launchers.chosen import LauncherAtFirstUse, chosen
from tensorize_assets.resources.launchers.local import SubprocessLauncher
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
# Of everything that was built: without partitions, and not in the job `build`.
FLEET_ASSETS = (fleet_status, audit.store_audit, retention.store_retention)

# Checks that no asset carries out itself.
CHECKS = (revisions.hub_reachable, revisions.builds_possible)

# Its signature holds types that Dagster leaves open.
build = dg.define_asset_job(  # pyright: ignore[reportUnknownMemberType]
    "build",
    # The sensor says more of the Hub than a step of each build would.
    selection=dg.AssetSelection.assets(*ASSETS)
    - dg.AssetSelection.checks(*(key for check in CHECKS for key in check.check_keys)),
    description="One model and suffix, from its Hub revision to the moved channel.",
    # Of a run that was lost with its machine. Another one may have built since, and replaced the
    # records that the rest would start from; what is complete is skipped anyway.
    tags={"dagster/retry_strategy": "ALL_STEPS", CHAIN_TAG: "true"},
    executor_def=EXECUTOR,
)
JOBS = (build, retensorize.reverify, audit.job, retention.job)

# The keys of a catalog that shape definitions.
_COUNTS_AT_LOAD = ("automation", "owners", "launcher")


def schedules_of(automation: Automation) -> tuple[dg.ScheduleDefinition, ...]:
    """The schedules, at the catalog's times."""
    return (
        retensorize.schedule(automation.retensorize),
        audit.schedule(automation.audit),
        retention.schedule(automation.retention),
    )


_WATCHING = (
    revisions.hf_revision_sensor,
    partitions.catalog_partitions,
    conditions_sensor([*ASSETS, *FLEET_ASSETS]),
)
SENSORS = (
    *_WATCHING,
    alerts_sensor(
        jobs=[job.name for job in JOBS],
        assets=[key for asset in (*ASSETS, *FLEET_ASSETS) for key in asset.keys],
        ticking=[one.name for one in (*_WATCHING, *schedules_of(Automation()))] + ["alerts"],
    ),
)


def home() -> Path:
    """The folder of everything a user edits: DAGSTER_HOME, or `dagster_home` where one stands."""
    return Path(os.environ.get("DAGSTER_HOME") or "dagster_home").absolute()


def build_defs(
    catalog: Path | str | Catalog,
    home: Path | str,
    *,
    group_name: str | None = None,
    sensors: bool = True,
    schedules: bool = True,
    artifact_store: StoreResource | None = None,
    hub: HubResource | None = None,
    launcher: Launcher | None = None,
    loggers: Mapping[str, dg.LoggerDefinition] | None = None,
) -> dg.Definitions:
    """All that this package has for Dagster, to be merged with a project's own definitions.

        defs = dg.Definitions.merge(build_defs("models.yaml", "tensorize_home"), theirs)

    Resources have the prefix `tensorize_`, and assets name them, so that a project's own
    `io_manager` stays what it is; jobs, sensors and schedules have names that a project must not
    have too. A project can have it once: partitions are of the instance.

    Args:
        catalog: a catalog file, which is read anew for each use, or a `Catalog`, whose relative
            paths are relative to `home`.
        home: the folder of keys, of what was seen of each channel, and (unless TENSORIZE_HUB_CACHE
            and TENSORIZE_SCRATCH are set) of the Hub's files and of scratch. Keep it: nobody
            believes what it signed without its signing key, or the catalog's `trust`.
        group_name: the group of all assets, instead of those that they have.
        sensors: whether there are sensors: new commits start builds, assets follow one another,
            failures are reported. Without, assets have no automation conditions either.
        schedules: whether there are schedules.
        artifact_store: one's own, such as `resources.s3.S3StoreResource`.
        hub: one's own; without it HF_ENDPOINT and HF_TOKEN.
        launcher: one's own, instead of the one that the catalog names, such as one for an
            interpreter that has vLLM.
        loggers: for jobs, as in `Definitions`.
    """
    folder = Path(home).absolute()
    if isinstance(catalog, Catalog):
        where = folder / "models.yaml"
        content = catalog.model_dump_json(exclude_unset=True)
        resource = CatalogResource(path=str(where), content=content)
    else:
        resource = CatalogResource(path=str(Path(catalog).absolute()))
    try:
        at_load, broken = _at_load(resource), False
    except (CatalogError, OSError, UnicodeError):
        # The code location loads then too, and the ticks of its sensors say what is wrong.
        at_load, broken = None, True
    automation = at_load.automation if at_load else Automation()

    def with_attributes(spec: dg.AssetSpec) -> dg.AssetSpec:
        # Its signature holds types that Dagster leaves open.
        return spec.replace_attributes(  # pyright: ignore[reportUnknownMemberType]
            group_name=group_name or ...,
            owners=(at_load.owners if at_load else ()) or ...,
            # Dagster's own sensor would follow a condition that is left.
            automation_condition=... if sensors else None,
        )

    return dg.Definitions(
        assets=dg.map_asset_specs(with_attributes, [*ASSETS, *FLEET_ASSETS]),
        asset_checks=CHECKS,
        jobs=JOBS,
        sensors=SENSORS if sensors else (),
        schedules=schedules_of(automation) if schedules else (),
        resources=resources(
            folder,
            catalog=resource,
            artifact_store=artifact_store,
            hub=hub,
            launcher=launcher
            or (LauncherAtFirstUse(catalog=resource) if broken else chosen(at_load)),
        ),
        loggers=loggers,
    )


def resources(
    folder: Path,
    *,
    catalog: CatalogResource | None = None,
    artifact_store: StoreResource | None = None,
    hub: HubResource | None = None,
    launcher: Launcher | None = None,
) -> dict[str, object]:
    """The resources for the catalog, caches and keys in `folder`, or the given ones.

    The environment goes before the folder.
    """
    catalog = catalog or CatalogResource(path=str(catalog_file(folder)))
    artifact_store = artifact_store or StoreResource(
        catalog=catalog, scratch=os.environ.get("TENSORIZE_SCRATCH") or str(folder / "scratch")
    )
    return {
        "tensorize_catalog": catalog,
        "tensorize_store": artifact_store,
        "tensorize_hub": hub
        or HubResource(cache_dir=os.environ.get("TENSORIZE_HUB_CACHE") or str(folder / "hub")),
        "tensorize_keyring": KeyringResource(
            catalog=catalog,
            signing_key=str(folder / "keys" / "signing.key"),
            private_key=str(folder / "keys" / "private.key"),
            seen_folder=str(folder / "seen"),
        ),
        "tensorize_launcher": launcher or SubprocessLauncher(),
        "tensorize_io_manager": ManifestIOManager(store=artifact_store),
    }


def catalog_file(folder: Path) -> Path:
    """The catalog of a Dagster home: TENSORIZE_CATALOG, or `models.yaml` there."""
    return Path(os.environ.get("TENSORIZE_CATALOG") or folder / "models.yaml")


def definitions(
    folder: Path,
    loggers: Mapping[str, dg.LoggerDefinition] | None = None,
    artifact_store: StoreResource | None = None,
) -> dg.Definitions:
    """`build_defs` of a Dagster home, with its own catalog."""
    return build_defs(catalog_file(folder), folder, loggers=loggers, artifact_store=artifact_store)


def _at_load(catalog: CatalogResource) -> Catalog | None:
    """The catalog, for what counts at load; None where it says nothing that does.

    Raises:
        CatalogError, OSError, UnicodeError: it is broken or absent.
    """
    if catalog.content is None:
        text = Path(catalog.path).read_text(encoding="utf-8")
        if not any(key in text for key in _COUNTS_AT_LOAD):
            # A long catalog takes a second to parse, in each process of each step.
            return None
    return catalog.catalog()


# The executor is for what the UI materializes. A project that takes `build_defs` has its own.
defs = dg.Definitions.merge(definitions(home()), dg.Definitions(executor=EXECUTOR))
