"""Which data key a build is encrypted with: a signed, numbered history, the last of which counts.

A build is assigned a key before its first tensor is written, so that a run which takes up what
another one left finds the same key. A new key is a new build. `seen` is everywhere the folder in
which this home keeps how far it has seen each history; without one, an old history that was put
back is believed, and with it a key that was given up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, cast

from pydantic import Field, JsonValue, model_validator

from tensorize_assets.core import jsonio, layout, signing
from tensorize_assets.core.errors import ConflictError, HistoryError, StoreError
from tensorize_assets.core.seen import Mark, forget, last_mark, marks, note, require_newer
from tensorize_assets.core.store import Store


class KeyChoice(jsonio.Record):
    """One data key, and why it is the build's."""

    number: Annotated[int, Field(ge=1)]
    key_id: jsonio.KeyId
    when: jsonio.Instant
    reason: Literal["first", "rotate"]


class BuildKeys(jsonio.Record):
    """Every data key that a build has had, oldest first; `build_id` is the plaintext build's."""

    format: Literal[1] = 1
    model: jsonio.ModelId
    suffix: jsonio.Suffix
    build_id: jsonio.BuildId
    choices: Annotated[tuple[KeyChoice, ...], Field(min_length=1)]

    @property
    def current(self) -> str:
        """The id of the data key that the build is encrypted with now."""
        return self.choices[-1].key_id

    @model_validator(mode="after")
    def _is_one_history(self) -> BuildKeys:
        numbers = [choice.number for choice in self.choices]
        if numbers != list(range(1, len(numbers) + 1)):
            raise ValueError(f"keys are numbered {numbers}, not 1 to {len(numbers)}")
        ids = [choice.key_id for choice in self.choices]
        if len(set(ids)) != len(ids):
            raise ValueError("a data key is named twice")
        return self


class StoredKeys(NamedTuple):
    """A history as it was read, with the ETag its next change compares."""

    keys: BuildKeys
    etag: str


def read_keys(
    store: Store,
    model: str,
    suffix: str,
    build_id: str,
    trusted: Collection[str] | None,
    seen: Path | None = None,
) -> StoredKeys | None:
    """Return the history of a build's data keys, or None when it has none.

    Raises SignatureError for a signature that is missing, wrong or not by one of the `trusted`
    public keys (None: any), StoreError for a damaged history or that of another build,
    HistoryError for an older one than was seen.
    """
    place = layout.build_key_key(model, suffix, build_id)
    where = store.uri(place)
    mark = last_mark(seen, where)
    found = store.get_bytes(place)
    remedy = f"`tensorize channel accept {model} {suffix}`"
    if found is None:
        require_newer(mark, where, (), remedy)
        return None
    payload = signing.verify("build-key", found.data, trusted, where).payload
    keys = jsonio.load_record(BuildKeys, jsonio.canonical(payload, where), where)
    if (keys.model, keys.suffix, keys.build_id) != (model, suffix, build_id):
        raise StoreError(
            f"{where} is the record of {keys.model} {keys.suffix}, build {keys.build_id}; restore "
            "it"
        )
    choices = cast("list[JsonValue]", payload["choices"])
    require_newer(mark, where, choices, remedy)
    note(seen, where, choices)
    return StoredKeys(keys, found.etag)


def assign(
    store: Store,
    model: str,
    suffix: str,
    build_id: str,
    make: Callable[[], str],
    key: signing.SecretKey,
    trusted: Collection[str] | None,
    seen: Path | None = None,
) -> str:
    """Return the id of the build's data key; of a build without one it is what `make` returns.

    Of several at once, all return the same id.

    Raises as `read_keys` does.
    """
    found = read_keys(store, model, suffix, build_id, trusted, seen)
    if found is not None:
        return found.keys.current
    choice = KeyChoice(number=1, key_id=make(), when=datetime.now(UTC), reason="first")
    keys = BuildKeys(model=model, suffix=suffix, build_id=build_id, choices=(choice,))
    try:
        store.put_bytes(_place(keys), _signed(keys, key), if_absent=True)
    except ConflictError:
        found = read_keys(store, model, suffix, build_id, trusted, seen)
        if found is None:
            raise
        return found.keys.current
    _note(store, keys, seen)
    return keys.current


def rotate(
    store: Store, stored: StoredKeys, key_id: str, key: signing.SecretKey, seen: Path | None = None
) -> BuildKeys:
    """Make `key_id` the build's data key from now on, and return the history.

    Raises ConflictError when another key was chosen since `stored` was read.
    """
    before = stored.keys
    choice = KeyChoice(
        number=len(before.choices) + 1, key_id=key_id, when=datetime.now(UTC), reason="rotate"
    )
    keys = BuildKeys(
        model=before.model,
        suffix=before.suffix,
        build_id=before.build_id,
        choices=(*before.choices, choice),
    )
    store.put_bytes(_place(keys), _signed(keys, key), if_match=stored.etag)
    _note(store, keys, seen)
    return keys


def accept(
    store: Store, model: str, suffix: str, trusted: Collection[str] | None, seen: Path
) -> tuple[Mark, ...]:
    """Believe every history of a model and suffix as it is, also one that is gone.

    Returns what was seen before of those that were refused until now.

    Raises SignatureError and StoreError as `read_keys` does.
    """
    accepted: list[Mark] = []
    for mark in marks(seen):
        build = mark.where.removesuffix(".json")[-12:]
        if not re.fullmatch(r"[0-9a-f]{12}", build):
            continue
        if mark.where != store.uri(layout.build_key_key(model, suffix, build)):
            continue
        try:
            read_keys(store, model, suffix, build, trusted, seen)
        except HistoryError:
            forget(seen, mark.where)
            read_keys(store, model, suffix, build, trusted, seen)
            accepted.append(mark)
    return tuple(accepted)


def _note(store: Store, keys: BuildKeys, seen: Path | None) -> None:
    choices = cast("list[JsonValue]", jsonio.dump_record(keys)["choices"])
    note(seen, store.uri(_place(keys)), choices)


def _place(keys: BuildKeys) -> str:
    return layout.build_key_key(keys.model, keys.suffix, keys.build_id)


def _signed(keys: BuildKeys, key: signing.SecretKey) -> bytes:
    return signing.sign("build-key", jsonio.dump_record(keys), key)
