"""`tensorize fleet`: every model and suffix in one table."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from tensorize_assets.cli_common import (
    FAILED,
    Json,
    PublicKeys,
    catalog_path,
    err,
    errors,
    home_and_catalog,
    open_place,
    out,
    print_json,
    seen_folder,
    trusted_keys,
)
from tensorize_assets.core import fleet as fleets
from tensorize_assets.core.builds import in_parallel
from tensorize_assets.core.catalog import Catalog, resolve_root
from tensorize_assets.core.errors import CatalogError
from tensorize_assets.core.fleet import FleetRow
from tensorize_assets.core.protocol import format_bytes

_OUTCOMES = {True: "passed", False: "failed"}
_STYLES = {"current": "green", "building": "cyan", "behind": "yellow", "held": "yellow"}


def fleet(
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Read each channel itself; some minutes for thousands."),
    ] = False,
    public_key: PublicKeys = None,
    as_json: Json = False,
) -> None:
    """The whole fleet as one table: what is published, how old it is, what needs a person.

    As the last run of each pair left it, which Dagster's event log has. What a person moved since
    shows with --verify, which believes each --public-key, and ends with 1 where something is
    damaged. The asset fleet_status has the same table in the UI.
    """
    from tensorize_assets import running
    from tensorize_assets.assets.fleet_status import read_fleet

    with errors():
        if public_key and not verify:
            raise CatalogError("--public-key says who is believed; it goes with --verify")
        home, catalog = home_and_catalog()
        with running.open_instance(home) as instance:
            rows = read_fleet(instance, catalog)
        if verify:
            rows = _verified(catalog, rows, trusted_keys(public_key))
        rows = fleets.ordered(rows)
    now = datetime.now(UTC)
    totals = fleets.totals(rows, now)
    problems = [row for row in rows if row.problem]
    if as_json:
        print_json(
            {
                "verified": verify,
                "totals": totals.model_dump(),
                "fleet": [{**row.model_dump(mode="json"), "behind": row.behind} for row in rows],
            }
        )
    else:
        out.print(_table(rows, now))
        for row in problems:
            err.print(f"{row.model} {row.suffix}: {row.problem}", markup=False, highlight=False)
        if not all(row.in_catalog for row in rows):
            out.print("* not in the catalog")
        numbers = totals.model_dump(exclude={"oldest_reload_seconds"})
        counts = (f"{value:,} {name}" for name, value in numbers.items() if value)
        out.print(", ".join(counts), markup=False, highlight=False)
    if problems:
        raise typer.Exit(FAILED)


def _verified(catalog: Catalog, rows: list[FleetRow], trusted: tuple[str, ...]) -> list[FleetRow]:
    store = open_place(resolve_root(catalog, catalog_path()))
    look = partial(fleets.verified, store, trusted=trusted, seen=seen_folder())
    return list(in_parallel(look, rows))


def _table(rows: list[FleetRow], now: datetime) -> Table:
    """The columns that a terminal has room for; what is long is cut, and whole in --json."""
    names = ("state", "entry", "build", "commit", "age", "reloaded", "on", "size", "encryption")
    table = Table(title="fleet", box=SIMPLE_HEAD, padding=(0, 1))
    for name in ("model", "suffix"):
        table.add_column(name, overflow="fold")
    for name in (*names, "signed by"):
        table.add_column(name, no_wrap=True)
    for row in rows:
        cells = [row.model, row.suffix, row.state if row.in_catalog else f"{row.state}*"]
        if (current := row.current) is not None:
            cells += [
                str(current.entry),
                current.build,
                current.commit[:7],
                f"{(now - current.published).days} d",
                f"{row.reload.when:%Y-%m-%d} {_OUTCOMES[row.reload.passed]}" if row.reload else "",
                row.reload.device if row.reload else "",
                format_bytes(current.bytes),
                current.encryption,
                current.signed_by[:8],
            ]
        table.add_row(*cells, style=_STYLES.get(row.state, "red"))
    return table
