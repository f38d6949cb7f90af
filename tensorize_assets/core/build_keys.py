"""Which data key a build is encrypted with: a signed, numbered history, the last of which counts.

A build is assigned a key before its first tensor is written, so that a run which takes up what
another one left finds the same key. A new key is a new build.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import UTC, datetime
from typing import Annotated, Literal, NamedTuple

from pydantic import AwareDatetime, Field, field_validator, model_validator

from tensorize_assets.core import jsonio, layout, signing
from tensorize_assets.core.errors import ConflictError, StoreError
from tensorize_assets.core.store import Store


class KeyChoice(jsonio.Record):
    """One data key, and why it is the build's."""

    number: Annotated[int, Field(ge=1)]
    key_id: jsonio.KeyId
    when: AwareDatetime
    reason: Literal["first", "rotate"]

    @field_validator("when")
    @classmethod
    def _in_utc(cls, when: datetime) -> datetime:
        return when.astimezone(UTC)


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
    store: Store, model: str, suffix: str, build_id: str, trusted: Collection[str] | None
) -> StoredKeys | None:
    """Return the history of a build's data keys, or None when it has none.

    Raises SignatureError for a signature that is missing, wrong or not by one of the `trusted`
    public keys (None: any), StoreError for a damaged history or that of another build.
    """
    place = layout.build_key_key(model, suffix, build_id)
    found = store.get_bytes(place)
    if found is None:
        return None
    where = store.uri(place)
    payload = signing.verify("build-key", found.data, trusted, where).payload
    keys = jsonio.load_record(BuildKeys, jsonio.canonical(payload, where), where)
    if (keys.model, keys.suffix, keys.build_id) != (model, suffix, build_id):
        raise StoreError(
            f"{where} is the record of {keys.model} {keys.suffix}, build {keys.build_id}; restore "
            "it"
        )
    return StoredKeys(keys, found.etag)


def assign(
    store: Store,
    model: str,
    suffix: str,
    build_id: str,
    make: Callable[[], str],
    key: signing.SecretKey,
    trusted: Collection[str] | None,
) -> str:
    """Return the id of the build's data key; of a build without one it is what `make` returns.

    Of several at once, all return the same id.

    Raises as `read_keys` does.
    """
    found = read_keys(store, model, suffix, build_id, trusted)
    if found is not None:
        return found.keys.current
    choice = KeyChoice(number=1, key_id=make(), when=datetime.now(UTC), reason="first")
    keys = BuildKeys(model=model, suffix=suffix, build_id=build_id, choices=(choice,))
    try:
        store.put_bytes(_place(keys), _signed(keys, key), if_absent=True)
    except ConflictError:
        found = read_keys(store, model, suffix, build_id, trusted)
        if found is None:
            raise
        return found.keys.current
    return keys.current


def rotate(store: Store, stored: StoredKeys, key_id: str, key: signing.SecretKey) -> BuildKeys:
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
    return keys


def _place(keys: BuildKeys) -> str:
    return layout.build_key_key(keys.model, keys.suffix, keys.build_id)


def _signed(keys: BuildKeys, key: signing.SecretKey) -> bytes:
    return signing.sign("build-key", jsonio.dump_record(keys), key)
