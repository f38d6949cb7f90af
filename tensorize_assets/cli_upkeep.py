"""`tensorize audit` and `tensorize retention`: what the schedules do, now and at a terminal."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from tensorize_assets.cli_common import (
    FAILED,
    Json,
    catalog_path,
    err,
    errors,
    home_and_catalog,
    open_place,
    out,
    print_json,
    required_key,
    say,
    seen_folder,
    trusted_keys,
)
from tensorize_assets.core import audit as audits
from tensorize_assets.core import builds
from tensorize_assets.core.audit import Night
from tensorize_assets.core.audit_record import remedy
from tensorize_assets.core.catalog import resolve_root
from tensorize_assets.core.errors import CatalogError
from tensorize_assets.core.removal import Removal, remove
from tensorize_assets.core.retention import Plan, plan
from tensorize_assets.core.store import Store


def audit(
    model: Annotated[
        str | None, typer.Argument(help="Hub repo id: only its builds, and all of them.")
    ] = None,
    suffix: Annotated[str | None, typer.Argument(help="Only those of this suffix.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All that is published, not the share of a day.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Read what is published again, hash it, and mark what is damaged.

    Without arguments it is the share of a day, as the nightly audit reads it. A damaged build is
    neither published nor served until an audit finds it whole.
    """
    with errors():
        home, catalog = home_and_catalog()
        trusted = trusted_keys(None)
        key = required_key(trusted)
        store = open_place(resolve_root(catalog, catalog_path(home)))
        inventory = builds.take_inventory(store, catalog.pairs(), trusted, seen_folder())
        directories = audits.published(store, inventory, trusted)
        if model is not None:
            chosen = tuple(
                one for one in directories if one.model == model and suffix in (None, one.suffix)
            )
            if not chosen:
                raise CatalogError(
                    f"nothing of {model}{f' {suffix}' if suffix else ''} is published; see to the "
                    "names"
                )
        elif everything:
            chosen = directories
        else:
            within = timedelta(days=catalog.automation.audit.within_days)
            chosen = audits.due(directories, within, datetime.now(UTC))
        night = audits.audit(store, key, trusted, directories, chosen, say, say)
    unread = {f"{model} {suffix}": why for (model, suffix), why in sorted(inventory.unread.items())}
    if as_json:
        print_json(_night_fields(store, night, unread))
    else:
        _show_night(store, night, unread)
    if night.damaged or night.unread or unread:
        raise typer.Exit(FAILED)


def retention(
    delete: Annotated[
        bool, typer.Option("--delete", help="Remove what goes. Without it nothing is.")
    ] = False,
    as_json: Json = False,
) -> None:
    """What of the root nobody needs any more, by the rules of the catalog.

    `automation.retention` says how many builds of each channel stay, and how long everything does;
    `automation.protect` names builds that stay. One-shot builds are never removed.
    """
    # Dagster knows which runs are under way.
    from tensorize_assets import running
    from tensorize_assets.automation.retention import busy

    with errors():
        home, catalog = home_and_catalog()
        trusted, seen = trusted_keys(None), seen_folder()
        store = open_place(resolve_root(catalog, catalog_path(home)))
        with running.open_instance(home) as instance:
            made = plan(
                store,
                catalog.pairs(),
                catalog.automation.retention,
                catalog.automation.protect,
                trusted,
                now=datetime.now(UTC),
                busy=busy(instance),
                seen=seen,
            )
            removal = None
            if delete:
                removal = remove(
                    store, made, trusted=trusted, busy=lambda: busy(instance), say=say, seen=seen
                )
    if as_json:
        print_json(_plan_fields(store, made, removal))
    else:
        _show_plan(store, made, removal)


def _night_fields(store: Store, night: Night, unread: dict[str, str]) -> dict[str, object]:
    return {
        "audited": [record.model_dump(mode="json") for record in night.records],
        "damaged": [
            {**record.model_dump(mode="json"), "remedy": remedy(record)} for record in night.damaged
        ],
        "could_not_be_read": {store.uri(place): why for place, why in night.unread.items()},
        "unread_channels": unread,
        "bytes": night.bytes,
        "seconds": night.seconds,
        "published_bytes": night.total_bytes,
        "published_directories": night.directories,
        "oldest": night.oldest,
    }


def _show_night(store: Store, night: Night, unread: dict[str, str]) -> None:
    for channel, why in unread.items():
        err.print(f"the channel of {channel} cannot be read: {why}", markup=False)
    for record in night.damaged:
        err.print(f"damaged: {store.uri(record.directory)}: {remedy(record)}", markup=False)
    out.print(
        f"{len(night.records)} of {night.directories} published directories read, "
        f"{night.bytes:,} of {night.total_bytes:,} bytes, in {night.seconds:.1f} s: "
        f"{len(night.damaged)} damaged",
        markup=False,
    )


def _plan_fields(store: Store, made: Plan, removal: Removal | None) -> dict[str, object]:
    return {
        "items": [
            {
                "what": item.kind,
                "where": store.uri(item.where),
                "bytes": item.bytes,
                "stays": item.keep,
                "reason": item.reason,
            }
            for item in made.items
        ],
        "going_bytes": made.bytes,
        "unread_channels": {
            f"{model} {suffix}": why for (model, suffix), why in made.unread.items()
        },
        "removed": [store.uri(item.where) for item in removal.removed] if removal else [],
        "removed_bytes": removal.bytes if removal else 0,
        "spared": {store.uri(where): why for where, why in removal.spared.items()}
        if removal
        else {},
    }


def _show_plan(store: Store, made: Plan, removal: Removal | None) -> None:
    table = Table(title=store.uri("").rstrip("/"))
    for name in ("", "what", "bytes", "where", "reason"):
        table.add_column(
            name,
            no_wrap=name in ("", "what", "bytes"),
            justify="right" if name == "bytes" else "left",
        )
    for item in sorted(made.items, key=lambda item: (item.keep, item.where)):
        table.add_row(
            "stays" if item.keep else "goes",
            item.kind,
            f"{item.bytes:,}",
            escape(item.where),
            escape(item.reason),
            style="dim" if item.keep else None,
        )
    out.print(table)
    for (model, suffix), why in made.unread.items():
        err.print(f"nothing of {model} goes: channel {suffix}: {why}", markup=False)
    if removal is not None:
        out.print(f"{len(removal.removed)} removed, {removal.bytes:,} bytes freed")
    elif made.going:
        out.print(
            f"{len(made.going)} would go, {made.bytes:,} bytes; nothing was removed: give --delete"
        )
    else:
        out.print("nothing goes")
