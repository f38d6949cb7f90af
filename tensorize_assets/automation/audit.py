"""The audit: a share of what is published is read again and hashed, each night."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg

from tensorize_assets.assets.metadata import Cell, table
from tensorize_assets.assets.target import IO_MANAGER, failures
from tensorize_assets.core import audit as audits
from tensorize_assets.core import builds
from tensorize_assets.core.audit import Night
from tensorize_assets.core.audit_record import AuditRecord, remedy
from tensorize_assets.core.builds import Pair
from tensorize_assets.core.catalog_automation import Audit
from tensorize_assets.core.fleet import minute
from tensorize_assets.core.store import Store
from tensorize_assets.resources.catalog import CatalogResource
from tensorize_assets.resources.keyring import KeyringResource
from tensorize_assets.resources.store import StoreResource

_KEY = dg.AssetKey("store_audit")
INTACT = "intact"
_MAX_ROWS = 500
_DAMAGE = ("model", "suffix", "directory", "file", "found", "when", "what to do")


@dg.asset(
    key=_KEY,
    group_name="fleet",
    kinds={"table"},
    code_version="1",
    check_specs=[
        dg.AssetCheckSpec(
            INTACT,
            asset=_KEY,
            description="Everything published that was read is as its manifest says, and every "
            "channel of the catalog can be read.",
        )
    ],
    io_manager_key=IO_MANAGER,
)
def store_audit(
    context: dg.AssetExecutionContext,
    tensorize_catalog: CatalogResource,
    tensorize_store: StoreResource,
    tensorize_keyring: KeyringResource,
) -> Iterator[dg.MaterializeResult[Any]]:
    """A share of what channels name, read and hashed, so that all of it is within some days.

    What is damaged is marked: it is neither published nor served until an audit finds it whole.
    """
    with failures(context):
        found = tensorize_catalog.catalog()
        within = timedelta(days=found.automation.audit.within_days)
        store, trusted = tensorize_store.open(tensorize_catalog.root()), tensorize_keyring.trusted()
        inventory = builds.take_inventory(store, found.pairs(), trusted, tensorize_keyring.seen())
        directories = audits.published(store, inventory, trusted)
        night = audits.audit(
            store,
            tensorize_keyring.key(),
            trusted,
            directories,
            audits.due(directories, within, datetime.now(UTC)),
            context.log.info,
            context.log.error,
        )
        pairs = set(found.pairs())
        unread = {pair: why for pair, why in inventory.unread.items() if pair in pairs}
        for (model, suffix), why in inventory.unread.items():
            context.log.warning(f"the channel of {model} {suffix} cannot be read: {why}")
    yield dg.MaterializeResult(
        asset_key=_KEY,
        metadata={
            "read": _read(store, night),
            "directories": len(night.records),
            "bytes": night.bytes,
            "seconds": night.seconds,
            "bytes_per_second": night.bytes / night.seconds if night.seconds else 0.0,
            "damaged": len(night.damaged),
            "could_not_be_read": len(night.unread),
            "published_directories": night.directories,
            "published_bytes": night.total_bytes,
            "oldest_unread_days": _days_since(night.oldest),
        },
        check_results=[_intact(store, night.damaged, unread)],
    )


job = dg.define_asset_job(  # pyright: ignore[reportUnknownMemberType]
    "audit",
    selection=dg.AssetSelection.assets(store_audit),
    description="A share of what is published, read again and hashed.",
)


def schedule(rules: Audit) -> dg.ScheduleDefinition:
    """Runs the job as the catalog says."""
    return dg.ScheduleDefinition(
        name="audit_schedule",
        job=job,
        cron_schedule=rules.cron,
        execution_timezone="UTC",
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description="Reads a share of what is published again (catalog: automation.audit).",
    )


def _intact(
    store: Store, damaged: Sequence[AuditRecord], unread: dict[Pair, str]
) -> dg.AssetCheckResult:
    rows = [
        {
            "model": record.model,
            "suffix": record.suffix,
            "directory": store.uri(record.directory),
            "file": damage.path,
            "found": damage.message,
            "when": minute(record.when),
            "what to do": remedy(record),
        }
        for record in damaged
        for damage in record.damage
    ]
    rows += [
        {
            "model": model,
            "suffix": suffix,
            "directory": "",
            "file": "its channel",
            "found": why,
            "when": minute(datetime.now(UTC)),
            "what to do": "see what was found",
        }
        for (model, suffix), why in unread.items()
    ]
    said = [f"{record.model} {record.suffix}: {record.damage[0].message}" for record in damaged]
    said += [f"the channel of {model} {suffix}: {why}" for (model, suffix), why in unread.items()]
    more = f"; and {len(said) - 3} more" if len(said) > 3 else ""
    return dg.AssetCheckResult(
        asset_key=_KEY,
        check_name=INTACT,
        passed=not said,
        severity=dg.AssetCheckSeverity.ERROR,
        description="; ".join(said[:3]) + more if said else "nothing that was read is damaged",
        metadata={"damage": table(rows[:_MAX_ROWS], **dict.fromkeys(_DAMAGE, "string"))},
    )


def _read(store: Store, night: Night) -> dg.MetadataValue:
    # What is wrong is not cut off.
    read = [
        _row(store, one.directory, one.bytes, one.seconds, [found.message for found in one.damage])
        for one in sorted(night.records, key=lambda record: not record.damage)
    ]
    unread = [_row(store, place, 0, 0.0, [why]) for place, why in night.unread.items()]
    kinds = {"directory": "string", "bytes": "int", "seconds": "float", "result": "string"}
    return table([*read, *unread][:_MAX_ROWS], **kinds)


def _row(
    store: Store, directory: str, size: int, seconds: float, wrong: Sequence[str]
) -> dict[str, Cell]:
    return {
        "directory": store.uri(directory),
        "bytes": size,
        "seconds": round(seconds, 3),
        "result": wrong[0] if wrong else "whole",
    }


def _days_since(when: datetime | None) -> float:
    return (datetime.now(UTC) - when) / timedelta(days=1) if when else 0.0
