"""Retention: what of the root nobody needs any more, in a report, and removed if asked."""

from collections import Counter
from datetime import UTC, datetime
from typing import Any

import dagster as dg

# It has no public name.
from dagster._core.storage.dagster_run import NOT_FINISHED_STATUSES
from pydantic import Field

from tensorize_assets.assets.metadata import table
from tensorize_assets.assets.target import (
    ADAPTER_COMMITS_TAG,
    COMMIT_TAG,
    IO_MANAGER,
    failures,
)
from tensorize_assets.core.catalog import from_partition_key
from tensorize_assets.core.catalog_automation import Retention
from tensorize_assets.core.errors import CatalogError
from tensorize_assets.core.fleet import minute
from tensorize_assets.core.removal import remove
from tensorize_assets.core.retention import Busy, Plan, plan
from tensorize_assets.core.store import Store
from tensorize_assets.partitions import MODEL, SUFFIX
from tensorize_assets.resources.catalog import CatalogResource
from tensorize_assets.resources.keyring import KeyringResource
from tensorize_assets.resources.store import StoreResource

_PARTITION_TAG = "dagster/partition"
# More rows make the event, which the UI loads whole, too large.
_MAX_ROWS = 500


class RetentionConfig(dg.Config):
    """Whether to remove."""

    delete: bool | None = Field(
        default=None,
        description="true: remove what the plan says. false: only report. Default: the catalog's "
        "`automation.retention.delete`.",
    )


@dg.asset(group_name="fleet", kinds={"table"}, code_version="1", io_manager_key=IO_MANAGER)
def store_retention(
    context: dg.AssetExecutionContext,
    config: RetentionConfig,
    tensorize_catalog: CatalogResource,
    tensorize_store: StoreResource,
    tensorize_keyring: KeyringResource,
) -> dg.MaterializeResult[Any]:
    """What of the root stays, what goes, and why; it is removed if the catalog or the run says so.

    The newest builds of each channel stay, what is current, what a rollback goes back to, what is
    protected, and everything young. One-shot builds are never removed.
    """
    with failures(context):
        found = tensorize_catalog.catalog()
        rules, root = found.automation.retention, tensorize_catalog.root()
        store, trusted = tensorize_store.open(root), tensorize_keyring.trusted()
        made = plan(
            store,
            found.pairs(),
            rules,
            found.automation.protect,
            trusted,
            now=datetime.now(UTC),
            busy=busy(context.instance),
            seen=tensorize_keyring.seen(),
        )
        for (model, suffix), why in made.unread.items():
            context.log.warning(f"nothing of {model} is removed: channel {suffix}: {why}")
        wanted = rules.delete if config.delete is None else config.delete
        removal = None
        if wanted:
            removal = remove(
                store,
                made,
                trusted=trusted,
                busy=lambda: busy(context.instance),
                say=context.log.info,
                seen=tensorize_keyring.seen(),
            )
        else:
            context.log.info(
                f"{len(made.going)} would be removed, {made.bytes:,} bytes; nothing was: set "
                "`automation.retention.delete: true` in the catalog, or `delete: true` for this run"
            )
    return dg.MaterializeResult(
        metadata={
            "going": _going(store, made),
            "summary": _summary(made),
            "going_count": len(made.going),
            "going_bytes": made.bytes,
            "removed_count": len(removal.removed) if removal else 0,
            "removed_bytes": removal.bytes if removal else 0,
            "spared_count": len(removal.spared) if removal else 0,
            "total_bytes": sum(item.bytes for item in made.items),
            "unread_channels": len(made.unread),
            "deleted": wanted,
        },
    )


job = dg.define_asset_job(  # pyright: ignore[reportUnknownMemberType]
    "retention",
    selection=dg.AssetSelection.assets(store_retention),
    description="What of the root nobody needs any more: a report, and its removal if asked for.",
)


def schedule(rules: Retention) -> dg.ScheduleDefinition:
    """Runs the job as the catalog says."""
    return dg.ScheduleDefinition(
        name="retention_schedule",
        job=job,
        cron_schedule=rules.cron,
        execution_timezone="UTC",
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description="Looks for what of the root can go (catalog: automation.retention).",
    )


def busy(instance: dg.DagsterInstance) -> Busy:
    """What the instance's runs that are queued or under way are of."""
    runs = instance.get_runs(filters=dg.RunsFilter(statuses=NOT_FINISHED_STATUSES))
    pairs: set[tuple[str, str]] = set()
    commits: set[str] = set()
    for run in runs:
        model = run.tags.get(f"{_PARTITION_TAG}/{MODEL}")
        suffix = run.tags.get(f"{_PARTITION_TAG}/{SUFFIX}")
        if model is None or suffix is None:
            continue
        try:
            pairs.add((from_partition_key(model), suffix))
        except CatalogError:
            continue  # a job of another project
        commits.add(run.tags.get(COMMIT_TAG, ""))
        commits.update(run.tags.get(ADAPTER_COMMITS_TAG, "").split(" "))
    return Busy(frozenset(pairs), frozenset(commits - {""}))


def _going(store: Store, made: Plan) -> dg.MetadataValue:
    largest = sorted(made.going, key=lambda item: -item.bytes)[:_MAX_ROWS]
    rows = (
        {
            "what": item.kind,
            "where": store.uri(item.where),
            "bytes": item.bytes,
            "written": minute(datetime.fromtimestamp(item.newest, UTC)),
            "reason": item.reason,
        }
        for item in largest
    )
    return table(
        rows, what="string", where="string", bytes="int", written="string", reason="string"
    )


def _summary(made: Plan) -> dg.MetadataValue:
    """How many stay and go for which reason, and their bytes."""
    counts: Counter[tuple[bool, str, str]] = Counter()
    sizes: Counter[tuple[bool, str, str]] = Counter()
    for item in made.items:
        # What stands behind a colon is of one directory.
        group = item.keep, item.kind, item.reason.partition(":")[0]
        counts[group] += 1
        sizes[group] += item.bytes
    rows = (
        {
            "stays": keep,
            "what": kind,
            "reason": reason,
            "count": count,
            "bytes": sizes[keep, kind, reason],
        }
        for (keep, kind, reason), count in sorted(counts.items())
    )
    return table(rows, stays="bool", what="string", reason="string", count="int", bytes="int")
