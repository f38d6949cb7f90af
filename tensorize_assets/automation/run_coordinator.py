"""Dagster's own queue of runs, which also knows how many GPUs a run takes."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from dagster import DagsterRun, Field, QueuedRunCoordinator, StringSource
from dagster._core.run_coordinator import SubmitRunContext
from dagster._core.storage.tags import MULTIDIMENSIONAL_PARTITION_PREFIX
from dagster._serdes import ConfigurableClassData

from tensorize_assets.core.catalog import from_partition_key, load_catalog
from tensorize_assets.core.errors import CatalogError
from tensorize_assets.core.gpus import GPUS_TAG, gpus_of_run
from tensorize_assets.partitions import MODEL, SUFFIX


class GpuRunCoordinator(QueuedRunCoordinator[Any]):
    """Gives a run the tag `gpus` as it is queued, which `tag_concurrency_limits` count.

    An asset's pool and tags are the same for every partition, and how many GPUs a partition takes
    is its profile's `tensor_parallel_size`. So it is looked up here, where every run comes by that
    is launched by the UI, a sensor, a schedule or a backfill. A run that has the tag keeps it,
    unless it only has its parent's, of which it is a re-execution: the profile may be another now.

    `catalog` is the catalog's file; without it TENSORIZE_CATALOG, or models.yaml in the instance's
    folder. It runs in the webserver and the daemon, which must see that file: without it, or with a
    broken one, runs are queued as they are, and a warning says so.
    """

    def __init__(self, catalog: str | None = None, **queue: Any) -> None:
        super().__init__(**queue)
        self._catalog = catalog

    @classmethod
    def config_type(cls) -> dict[str, Any]:
        inherited: Any = super().config_type()
        return {**inherited, "catalog": Field(StringSource, is_required=False)}

    @classmethod
    def from_config_value(
        cls, inst_data: ConfigurableClassData, config_value: Mapping[str, Any]
    ) -> Self:
        made = super().from_config_value(inst_data, config_value)
        made._catalog = config_value.get("catalog")
        return made

    def submit_run(self, context: SubmitRunContext) -> DagsterRun:
        """As QueuedRunCoordinator's."""
        run = context.dagster_run
        try:
            gpus = self._gpus(run)
            if gpus:
                self._instance.add_run_tags(run.run_id, {GPUS_TAG: str(gpus)})
        except CatalogError as error:
            # The run says it itself, in its first step.
            self._logger.info(f"run {run.run_id} is queued without the tag {GPUS_TAG}: {error}")
        except Exception:
            # A limit is missed, which is better than a run that nobody can start.
            self._logger.exception(f"run {run.run_id} is queued without the tag {GPUS_TAG}")
        return super().submit_run(context)

    def _gpus(self, run: DagsterRun) -> int:
        model, suffix = (
            run.tags.get(f"{MULTIDIMENSIONAL_PARTITION_PREFIX}{name}") for name in (MODEL, SUFFIX)
        )
        if model is None or suffix is None or (GPUS_TAG in run.tags and not self._inherited(run)):
            return 0
        try:
            catalog = load_catalog(self._file())
        except CatalogError as error:
            # So it is with every run, until somebody mounts or mends the file.
            self._logger.warning(f"run {run.run_id} is queued without the tag {GPUS_TAG}: {error}")
            return 0
        profile = catalog.profile(from_partition_key(model), suffix)
        return gpus_of_run(profile, _assets(run))

    def _inherited(self, run: DagsterRun) -> bool:
        """Whether the tag is only its parent's: Dagster copies all tags to what it tries again."""
        parent = self._instance.get_run_by_id(run.parent_run_id) if run.parent_run_id else None
        return parent is not None and parent.tags.get(GPUS_TAG) == run.tags[GPUS_TAG]

    def _file(self) -> Path:
        named = self._catalog or os.environ.get("TENSORIZE_CATALOG")
        return Path(named) if named else Path(self._instance.root_directory) / "models.yaml"


def _assets(run: DagsterRun) -> set[str] | None:
    """The names of the assets of a run; None for all of its job."""
    if run.step_keys_to_execute:
        # Of one that is tried again from where it failed: a step has its asset's name.
        return set(run.step_keys_to_execute)
    if run.asset_selection is None:
        return None
    checked = {check.asset_key for check in run.asset_check_selection or ()}
    return {key.to_user_string() for key in run.asset_selection | checked}
