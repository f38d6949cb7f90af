"""A sensor's state that is too large for its cursor.

Dagster copies the cursor into the row of every tick: 200 KB every five seconds are 25 GB a week. So
the state stands in the instance's key-value table, and the cursor says which writing of it counts.
A tick that dies before Dagster has its cursor did nothing.

Nor did one that Dagster has given up: it runs on, and may write beside the tick after it. There are
four slots. Each writing takes the oldest that its own cursor does not point to, and so spares what
a newer one has written; by its token no other writing is taken for it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import NamedTuple

import dagster as dg
from pydantic import Field

from tensorize_assets.core import jsonio
from tensorize_assets.core.errors import StoreError

_SLOTS = 4


class _Pointer(jsonio.Record):
    format: int = Field(default=1, ge=1, le=1)
    writing: int = Field(ge=1)
    slot: int = Field(ge=0, lt=_SLOTS)
    token: str


class _Writing(NamedTuple):
    number: int
    token: str
    state: str


def load(
    instance: dg.DagsterInstance, place: str, cursor: str | None, kind: type[jsonio.R]
) -> jsonio.R | None:
    """The state that a cursor points to; None without a cursor.

    Raises StoreError for a cursor of something else, and a state that is gone or damaged.
    """
    if not cursor:
        return None
    pointer = jsonio.load_record(_Pointer, cursor.encode(), "the cursor")
    found = _read(instance, place, [pointer.slot]).get(pointer.slot)
    if found is None or (found.number, found.token) != (pointer.writing, pointer.token):
        raise StoreError(f"the state that the cursor points to (writing {pointer.writing}) is gone")
    return jsonio.load_record(kind, found.state.encode(), "the state")


def save(instance: dg.DagsterInstance, place: str, cursor: str | None, state: jsonio.Record) -> str:
    """Write the state beside the one that `cursor` points to; return the cursor that points to it.

    `cursor` is one that `load` took, or None.
    """
    before = jsonio.load_record(_Pointer, cursor.encode(), "the cursor") if cursor else None
    found = _read(instance, place, range(_SLOTS))
    numbers = {slot: found[slot].number if slot in found else 0 for slot in range(_SLOTS)}
    # What a sensor left that was reset is not the newest any more.
    writing = 1 + (before.writing if before else max(numbers.values()))
    if before:
        numbers.pop(before.slot)
    slot = min(numbers, key=numbers.__getitem__)
    pointer = _Pointer(writing=writing, slot=slot, token=secrets.token_hex(8))
    text = state.model_dump_json(exclude_defaults=True)
    instance.daemon_cursor_storage.set_cursor_values(
        {_key(place, slot): f"{writing} {pointer.token}\n{text}"}
    )
    return pointer.model_dump_json()


def latest(instance: dg.DagsterInstance, place: str, kind: type[jsonio.R]) -> jsonio.R | None:
    """The newest state there is, for whoever has no cursor. Raises StoreError for a damaged one."""
    found = _read(instance, place, range(_SLOTS)).values()
    newest = max(found, key=lambda writing: writing.number, default=None)
    return jsonio.load_record(kind, newest.state.encode(), "the state") if newest else None


def _read(instance: dg.DagsterInstance, place: str, slots: Iterable[int]) -> dict[int, _Writing]:
    keys = {_key(place, slot): slot for slot in slots}
    found: dict[int, _Writing] = {}
    for key, text in instance.daemon_cursor_storage.get_cursor_values({*keys}).items():
        header, _, state = text.partition("\n")
        number, _, token = header.partition(" ")
        if number.isdecimal():
            found[keys[key]] = _Writing(int(number), token, state)
    return found


def _key(place: str, slot: int) -> str:
    return f"tensorize_assets/{place}/{slot}"
