"""Metadata as Dagster's UI shows it best."""

from collections.abc import Iterable, Mapping

import dagster as dg

Cell = str | int | float | bool | None


def table(rows: Iterable[Mapping[str, Cell]], **columns: str) -> dg.TableMetadataValue:
    """Rows that are alike, as a table.

    `columns` are its columns and their types; without, they are the first row's.
    """
    records = [dg.TableRecord(dict(row)) for row in rows]
    # Without a row Dagster cannot tell the columns.
    named = [dg.TableColumn(name, kind) for name, kind in columns.items()]
    schema = dg.TableSchema(named) if columns or not records else None
    return dg.TableMetadataValue(records, schema)
