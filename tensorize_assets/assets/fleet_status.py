"""fleet_status: every model and suffix of the catalog in one table."""

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import dagster as dg
from dagster import AssetPartitionStatus

from tensorize_assets.assets.metadata import table
from tensorize_assets.assets.target import IO_MANAGER, failures
from tensorize_assets.automation.conditions import FLEET
from tensorize_assets.core import fleet
from tensorize_assets.core.catalog import Catalog, from_partition_key
from tensorize_assets.core.fleet import FleetRow, Publication, Reload, State
from tensorize_assets.core.layout import ONESHOT_PARTITION
from tensorize_assets.partitions import MODEL, SUFFIX, model_suffix, partition_key
from tensorize_assets.resources.catalog import CatalogResource

_SNAPSHOT = dg.AssetKey("hf_snapshot")
_RELOAD = dg.AssetKey("reload_check")
_PUBLISHED = dg.AssetKey("published")
_MATERIALIZATION = dg.DagsterEventType.ASSET_MATERIALIZATION
_DATA_VERSION = "dagster/data_version"
# Dagster gives out no more at once.
_EVENTS = 1000


@dg.asset(
    deps=[_PUBLISHED],
    group_name="fleet",
    kinds={"table"},
    code_version="1",
    automation_condition=FLEET,
    freshness_policy=dg.FreshnessPolicy.time_window(
        fail_window=timedelta(days=2), warn_window=timedelta(days=1, hours=2)
    ),
    io_manager_key=IO_MANAGER,
)
def fleet_status(
    context: dg.AssetExecutionContext, tensorize_catalog: CatalogResource
) -> dg.MaterializeResult[Any]:
    """The whole fleet as one table: what is published, how old it is, and what needs a person.

    A row for each pair of the catalog and for each that was published, as its last runs left it;
    the metadata is all that this leaves. A channel that a person moved since shows after the next
    run of its pair, or at once in `tensorize fleet --verify`. States, in the table's order:
    *unpublished*, never; *failed*, its last run did not reach the channel; *held*, a rollback keeps
    the newest build out; *behind*, a run has found another commit than the published one;
    *building*; *current*.
    """
    with failures(context):
        rows = fleet.ordered(read_fleet(context.instance, tensorize_catalog.catalog()))
    now = datetime.now(UTC)
    # Of damage the event log knows nothing; `intact` of store_audit does.
    numbers = fleet.totals(rows, now).model_dump(exclude={"damaged"})
    return dg.MaterializeResult(
        metadata={
            "fleet": table((fleet.cells(row, now) for row in rows), **fleet.COLUMNS),
            **numbers,
        }
    )


class _Said(NamedTuple):
    """What the event log has of each partition, by its key."""

    found: Mapping[str, str]
    published: Mapping[str, Publication]
    reloads: Mapping[str, Reload]
    status: Mapping[str, AssetPartitionStatus | None]


def read_fleet(instance: dg.DagsterInstance, catalog: Catalog) -> list[FleetRow]:
    """A row for each pair of the catalog, and for each other one that was published.

    From the event log alone, in a few queries: to read thousands of channels takes minutes.
    """
    versions = _data_versions(instance, _PUBLISHED)
    published = {key: found for key, text in versions.items() if (found := fleet.read_line(text))}
    keys = {str(partition_key(*pair)): pair for pair in catalog.pairs()}
    for key in versions:
        if key not in keys and (pair := _pair(key)) is not None:
            keys[key] = pair
    said = _Said(
        found=_data_versions(instance, _SNAPSHOT),
        published=published,
        reloads=_later_reloads(instance),
        status=instance.get_status_by_partition(_PUBLISHED, list(keys), model_suffix) or {},
    )
    profiles = {model: entry.profiles for model, entry in catalog.models.items()}
    return [
        _row(said, key, model, suffix, suffix in profiles.get(model, {}))
        for key, (model, suffix) in keys.items()
    ]


def _row(said: _Said, key: str, model: str, suffix: str, in_catalog: bool) -> FleetRow:
    current, found = said.published.get(key), said.found.get(key)
    reload = said.reloads.get(key)
    if reload is None and current is not None:
        reload = Reload(when=current.reloaded, device=current.device, passed=True)
    return FleetRow(
        model=model,
        suffix=suffix,
        state=_state(current, found, said.status.get(key)),
        in_catalog=in_catalog,
        current=current,
        found_commit=found,
        reload=reload,
    )


def _state(
    current: Publication | None, found: str | None, status: AssetPartitionStatus | None
) -> State:
    if current is None:
        return "unpublished"
    if status is AssetPartitionStatus.FAILED:
        return "failed"
    if status is AssetPartitionStatus.IN_PROGRESS:
        return "building"
    if current.held:
        return "held"
    return "current" if found in (None, current.commit) else "behind"


def _pair(key: str) -> tuple[str, str] | None:
    """Model and suffix of a partition; None for the one that one-shot builds run under."""
    parts = model_suffix.get_partition_key_from_str(key).keys_by_dimension
    if parts[SUFFIX] == ONESHOT_PARTITION:
        return None
    return from_partition_key(parts[MODEL]), parts[SUFFIX]


def _data_versions(instance: dg.DagsterInstance, asset: dg.AssetKey) -> dict[str, str]:
    """The data version of each partition's newest materialization."""
    tags = instance.event_log_storage.get_latest_tags_by_partition(
        asset, _MATERIALIZATION, [_DATA_VERSION]
    )
    return {key: found[_DATA_VERSION] for key, found in tags.items()}


def _later_reloads(instance: dg.DagsterInstance) -> dict[str, Reload]:
    """Reloads that came after what was last published, or were never followed by it."""
    published = instance.get_latest_storage_id_by_partition(_PUBLISHED, _MATERIALIZATION)
    reloaded = instance.get_latest_storage_id_by_partition(_RELOAD, _MATERIALIZATION)
    later = [at for key, at in reloaded.items() if at > published.get(key, -1)]
    found: dict[str, Reload] = {}
    for record in _records(instance, later):
        event = record.asset_materialization
        if event is None or event.partition is None:
            continue
        said: dict[str, Any] = {name: value.value for name, value in event.metadata.items()}
        if "reloaded_at" in said:
            found[event.partition] = Reload(
                when=datetime.fromtimestamp(said["reloaded_at"], UTC),
                device=said["device"],
                passed=said["passed"],
            )
    return found


def _records(
    instance: dg.DagsterInstance, storage_ids: Iterable[int]
) -> Iterator[dg.EventLogRecord]:
    ids = list(storage_ids)
    for start in range(0, len(ids), _EVENTS):
        asked = dg.AssetRecordsFilter(asset_key=_RELOAD, storage_ids=ids[start : start + _EVENTS])
        yield from instance.fetch_materializations(asked, limit=_EVENTS).records
