"""How far each history was seen here: an older one that is put back is refused.

A signature says who wrote a history, not that it is the newest one: whoever can write to the store
can put back what was valid once. So each home keeps, in a folder of its own, the last entry that
it saw of each history, and what led to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from pydantic import AwareDatetime, Field, JsonValue

from tensorize_assets.core import jsonio, layout
from tensorize_assets.core.errors import ConflictError, HistoryError, StoreError
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.store import StoredObject


class Mark(jsonio.Record):
    """The last entry seen of the history at the URI `where`; `sha256` is of all up to it."""

    format: Annotated[int, Field(ge=1, le=1)] = 1
    where: str
    number: Annotated[int, Field(ge=1)]
    sha256: jsonio.Sha256
    when: AwareDatetime


def last_mark(folder: Path | None, where: str) -> Mark | None:
    """Return what was seen of the history at `where`; None for nothing yet, or without a folder.

    To be read before the history itself is: another process may move it and note so meanwhile.

    Raises StoreError for a damaged mark.
    """
    if folder is None:
        return None
    found = _read(folder, where)
    return _load(found, folder, where) if found else None


def marks(folder: Path) -> Iterator[Mark]:
    """All that was seen, but for damaged marks: of what they are is not known any more."""
    for key in LocalStore(folder).list(""):
        with suppress(StoreError):
            if found := LocalStore(folder).get_bytes(key):
                yield jsonio.load_record(Mark, found.data, str(folder / key))


def require_newer(mark: Mark | None, where: str, entries: Sequence[JsonValue], remedy: str) -> None:
    """Refuse a history (none: no entries) that is not what was seen, or what it grew to be.

    Raises HistoryError, which ends in `remedy`: what to do when the history is as it is meant to
    be.
    """
    if mark is None:
        return
    seen = f"entry {mark.number} was seen here on {mark.when:%Y-%m-%d %H:%M} UTC"
    if not entries:
        what = f"{where} is gone, but {seen}: it was removed"
    elif len(entries) < mark.number:
        what = f"{where} ends at entry {len(entries)}, but {seen}: an old one was put back"
    elif _digest(entries[: mark.number]) != mark.sha256:
        what = f"{where} is not the history whose {seen}: another one was put in its place"
    else:
        return
    raise HistoryError(f"{what}. Restore it; or if that is meant to be so, {remedy}")


def note(folder: Path | None, where: str, entries: Sequence[JsonValue]) -> None:
    """Keep that a history was seen, unless more of it was.

    Raises StoreError when it cannot be kept.
    """
    if folder is None or not entries:
        return
    number = len(entries)
    mark = Mark(where=where, number=number, sha256=_digest(entries), when=datetime.now(UTC))
    data = jsonio.canonical(jsonio.dump_record(mark), where)
    store = LocalStore(folder)
    while True:
        found = _read(folder, where)
        if found and _load(found, folder, where).number >= number:
            return
        try:
            if found:
                store.put_bytes(layout.seen_key(where), data, if_match=found.etag)
            else:
                store.put_bytes(layout.seen_key(where), data, if_absent=True)
        except ConflictError:
            continue
        return


def forget(folder: Path, where: str) -> Mark | None:
    """Return what was seen of a history, None for a damaged mark too, and keep it no longer."""
    try:
        mark = last_mark(folder, where)
    except StoreError:
        mark = None
    LocalStore(folder).delete(layout.seen_key(where))
    return mark


def _read(folder: Path, where: str) -> StoredObject | None:
    return LocalStore(folder).get_bytes(layout.seen_key(where))


def _load(found: StoredObject, folder: Path, where: str) -> Mark:
    return jsonio.load_record(Mark, found.data, f"{folder / layout.seen_key(where)} ({where})")


def _digest(entries: Sequence[JsonValue]) -> str:
    bare = [_bare(entry) for entry in entries]
    return hashlib.sha256(jsonio.canonical({"entries": bare})).hexdigest()


def _bare(value: JsonValue) -> JsonValue:
    """Leave out what is null: a later release may write fields that this one does not know."""
    if isinstance(value, dict):
        return {name: _bare(part) for name, part in value.items() if part is not None}
    return value
