"""Data keys: one random key a build, stored only sealed to the people who may open it.

Each recipient has an X25519 key pair. A seal is the data key encrypted to one public key; who is
sealed to is a signed, numbered history, changed by compare-and-swap. Neither is in the artifact:
adding or removing a recipient touches no tensor.

Anyone can seal to a public key, so seals are signed too: whoever can write to the store, but has
no trusted signing key, cannot put a data key that they know in place of a build's own.

Key material is kept in buffers that are overwritten after use where Python lets it: PyNaCl takes
and returns `bytes`, which live until their memory is used again.
"""

from __future__ import annotations

import base64
import os
import random
import secrets
import stat
import time
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from nacl import public
from nacl.exceptions import CryptoError
from pydantic import (
    AfterValidator,
    Field,
    WithJsonSchema,
    model_validator,
)

from tensorize_assets.core import jsonio, layout, signing
from tensorize_assets.core.errors import (
    ConflictError,
    SignatureError,
    StoreError,
    TensorizeAssetsError,
)
from tensorize_assets.core.private_files import (
    SECRET_BYTES,
    create_private,
    read_private,
    secret_from_text,
)
from tensorize_assets.core.store import Reader, Store

PRIVATE_KEY_VARIABLE = "TENSORIZE_ASSETS_PRIVATE_KEY"
"""The environment variable that holds a private key where there is no file of one."""

PRIVATE_KEY_PREFIX = "X25519-PRIVATE-KEY:"
"""How a private key starts when written as text, so that nobody takes it for a public one."""

DATA_KEY_BYTES = 32

# At least one writer wins each round, so this many may change one key's recipients at once.
_ATTEMPTS = 64
_LONGEST_PAUSE_S = 0.5

# Points of the curve are numbers below this; above, a second text would name the same key.
_FIELD_PRIME = 2**255 - 19


class SealingError(TensorizeAssetsError):
    """A data key, a private key or a list of recipients is not what it should be."""


class DataKey:
    """The key that a build's tensors are encrypted with; in a `with`, wiped at its end."""

    __slots__ = ("_buffer",)

    def __init__(self, key: bytes | bytearray | memoryview) -> None:
        self._buffer = bytearray(key)
        if len(self._buffer) != DATA_KEY_BYTES:
            raise SealingError(
                f"a data key has {DATA_KEY_BYTES} bytes, not {len(self._buffer)}; use the one of "
                "`unseal`"
            )

    def reveal(self) -> bytes:
        """Return a copy of the key, which nothing wipes: keep it no longer than the call it is for.

        Raises SealingError when the key was wiped.
        """
        return bytes(self._alive())

    def write_to(self, descriptor: int) -> None:
        """Write the raw key to an open file, which must be private."""
        os.write(descriptor, self._alive())

    def wipe(self) -> None:
        """Overwrite the key and forget it."""
        self._buffer[:] = bytes(len(self._buffer))
        # Empty, so that it is not taken for a key of zeros.
        self._buffer = bytearray()

    def _alive(self) -> bytearray:
        # Zeros would encrypt as well as a key, and nobody would notice.
        if not self._buffer:
            raise SealingError("this data key was wiped; unseal it again")
        return self._buffer

    def __enter__(self) -> DataKey:
        return self

    def __exit__(self, *_: object) -> None:
        self.wipe()

    def __del__(self) -> None:
        self.wipe()

    def __repr__(self) -> str:
        return "DataKey(…)" if self._buffer else "DataKey(wiped)"

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError("a DataKey is neither pickled nor copied: unseal it where it is needed")


class PrivateKey:
    """An X25519 private key that shows itself by its public key only."""

    __slots__ = ("_key",)

    def __init__(self, secret: bytes) -> None:
        # PyNaCl's own key object prints its secret; it never leaves this one.
        self._key = public.PrivateKey(secret)

    @property
    def public_key(self) -> str:
        """The public key, base64 of 32 bytes: what stands in the catalog's `recipients`."""
        return base64.b64encode(bytes(self._key.public_key)).decode()

    def open(self, sealed: bytes) -> bytes | None:
        """Return what was sealed to this key, or None when it was not, or was changed."""
        try:
            return public.SealedBox(self._key).decrypt(sealed)
        except CryptoError:
            return None

    def write_to(self, descriptor: int) -> None:
        """Write the key as text to an open file, which must be private."""
        secret = base64.b64encode(bytes(self._key)).decode()
        text = f"# public key: {self.public_key}\n{PRIVATE_KEY_PREFIX}{secret}\n"
        os.write(descriptor, text.encode())

    def __repr__(self) -> str:
        return f"PrivateKey(public_key={self.public_key!r})"

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError("a PrivateKey is not pickled: hand over the path of its file")


def check_public_key(text: str) -> str:
    """Return `text` when something can be sealed to it: base64 of an X25519 public key.

    Raises SealingError, which does not quote the text: it may be a private key.
    """
    if text.strip().upper().startswith(PRIVATE_KEY_PREFIX):
        raise SealingError(
            "a private key was given as a public one: whoever saw it can open what is sealed to "
            "it; make a new pair with `tensorize keys generate`"
        )
    try:
        key = base64.b64decode(text, validate=True)
    except ValueError:
        key = b""
    # One text for one key: what is compared and removed has no second form.
    if (
        len(key) != SECRET_BYTES
        or base64.b64encode(key).decode() != text
        or int.from_bytes(key, "little") >= _FIELD_PRIME
    ):
        raise SealingError(
            f"it is not a public key: base64 of {SECRET_BYTES} bytes, as `tensorize keys generate` "
            "prints it"
        )
    if _seal(text, b"") is None:
        raise SealingError("it is a point of the curve that anyone can open, and no public key")
    return text


def _checked(text: str) -> str:
    try:
        return check_public_key(text)
    except SealingError as error:
        raise ValueError(str(error)) from None


KEY_PATTERN = "^[A-Za-z0-9+/]{43}=$"
"""How a public key of 32 bytes reads: base64."""

PublicKey = Annotated[
    str, AfterValidator(_checked), WithJsonSchema({"type": "string", "pattern": KEY_PATTERN})
]


class Recipient(jsonio.Record):
    """Someone a data key is sealed to."""

    name: jsonio.PathPart
    public_key: PublicKey


class RecipientChange(jsonio.Record):
    """One change of who a data key is sealed to."""

    number: Annotated[int, Field(ge=1)]
    when: jsonio.Instant
    added: tuple[Recipient, ...]
    removed: tuple[Recipient, ...]
    note: Literal["who was removed may have kept the data key: rotate it"] | None


class KeyRecord(jsonio.Record):
    """The history of a data key's recipients, oldest change first."""

    format: Literal[1] = 1
    key_id: jsonio.KeyId
    changes: Annotated[tuple[RecipientChange, ...], Field(min_length=1)]

    @property
    def recipients(self) -> dict[str, str]:
        """The public key of everyone who can open the data key, by name, sorted."""
        current: dict[str, str] = {}
        for change in self.changes:
            for recipient in change.removed:
                del current[recipient.name]
            current.update({recipient.name: recipient.public_key for recipient in change.added})
        return dict(sorted(current.items()))

    @property
    def former(self) -> tuple[Recipient, ...]:
        """Those who could open the data key once, and may have kept it."""
        current = set(self.recipients.values())
        removed = [recipient for change in self.changes for recipient in change.removed]
        return tuple(dict.fromkeys(one for one in removed if one.public_key not in current))

    @model_validator(mode="after")
    def _is_one_history(self) -> KeyRecord:
        numbers = [change.number for change in self.changes]
        if numbers != list(range(1, len(numbers) + 1)):
            raise ValueError(f"changes are numbered {numbers}, not 1 to {len(numbers)}")
        current: dict[str, str] = {}
        for change in self.changes:
            if bool(change.removed) != bool(change.note):
                raise ValueError(f"change {change.number} has the note of a removal, or lacks it")
            for recipient in change.removed:
                if current.pop(recipient.name, None) != recipient.public_key:
                    raise ValueError(f"change {change.number} removes who was no recipient")
            for recipient in change.added:
                if recipient.name in current or recipient.public_key in current.values():
                    raise ValueError(f"change {change.number} adds a recipient twice")
                current[recipient.name] = recipient.public_key
            if not current:
                raise ValueError(f"change {change.number} leaves nobody who can open the key")
        return self


class StoredRecord(NamedTuple):
    """A record as it was read, with the ETag its next change compares."""

    record: KeyRecord
    etag: str


class NewDataKey(NamedTuple):
    """A data key that was just made, and its name."""

    key_id: str
    data_key: DataKey


class _SealedKey(jsonio.Record):
    format: Literal[1] = 1
    key_id: jsonio.KeyId
    recipient: Recipient
    sealed: str


# Private keys


def generate_private_key(path: Path) -> PrivateKey:
    """Make a new private key in a file of mode 0600 and return it.

    Raises SealingError when there is something at `path`, or it cannot be written.
    """
    key = PrivateKey(os.urandom(SECRET_BYTES))
    with _file_errors("make the folder", path.parent):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _file_errors("make the private key", path):
        create_private(path, key.write_to)
    return key


def load_private_key(path: Path | None = None, *, mounted: bool = False) -> PrivateKey:
    """Return the private key at `path`, or else in TENSORIZE_ASSETS_PRIVATE_KEY.

    The text is that of `generate_private_key`, or base64 or hex of 32 bytes. Lines that start
    with # do not count. `mounted` as for `read_private`.

    Raises SealingError when others can read the file, when it holds no key, or when there is
    neither file nor variable.
    """
    if path is not None:
        try:
            with _file_errors("read the private key", path):
                text = read_private(path, "private key", SealingError, mounted=mounted)
        except SealingError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            raise SealingError(
                f"there is no private key {path}; give its path, or make a pair with `tensorize "
                "keys generate` and put its public key among the catalog's `recipients`"
            ) from None
        return _key_from_text(text, f"file {path}")
    if text := os.environ.get(PRIVATE_KEY_VARIABLE, "").strip():
        return _key_from_text(text, f"environment variable {PRIVATE_KEY_VARIABLE}")
    raise SealingError(
        f"there is no private key: give the path of its file, or set {PRIVATE_KEY_VARIABLE}"
    )


def require_keyfile(path: Path) -> None:
    """Raises SealingError unless the file holds a raw key, and nobody else can open it."""
    with _file_errors("read the keyfile", path):
        status = path.stat()
    # First: of a folder or a device nobody should change the mode.
    if not stat.S_ISREG(status.st_mode) or status.st_size != DATA_KEY_BYTES:
        raise SealingError(
            f"the keyfile {path} is no file of {DATA_KEY_BYTES} bytes: write it with `tensorize "
            "keys unseal`, and nothing behind the key"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise SealingError(
            f"the keyfile {path} is open to other users (mode {mode:04o}): run `chmod 600 {path}`, "
            "or rotate the key if one of them may have read it"
        )


def write_keyfile(data_key: DataKey, path: Path) -> None:
    """Write the raw key to a new file of mode 0600, as vLLM's `encryption_keyfile` wants it.

    Raises SealingError when there is something at `path`, or it cannot be written.
    """
    with _file_errors("write the keyfile", path):
        create_private(path, data_key.write_to)


# Data keys


def new_data_key(
    store: Store,
    recipients: Mapping[str, str],
    signing_key: signing.SecretKey,
    *,
    when: datetime | None = None,
) -> NewDataKey:
    """Make a data key, seal it to `recipients` (public key by name) and return it with its id.

    The record of its recipients is written last: without it there is no such key.

    Raises SealingError when there are no recipients, or one is wrong; StoreError from the store.
    """
    key_id = secrets.token_hex(8)
    wanted = _check_recipients(recipients)
    record = KeyRecord(key_id=key_id, changes=(_change(1, {}, wanted, when),))
    data_key = DataKey(os.urandom(DATA_KEY_BYTES))
    try:
        for name in wanted:
            _put_seal(store, record, name, data_key, signing_key)
        data = signing.sign("recipients", jsonio.dump_record(record), signing_key)
        store.put_bytes(layout.key_record_key(key_id), data, if_absent=True)
    except BaseException:
        data_key.wipe()
        raise
    return NewDataKey(key_id, data_key)


def unseal(
    store: Reader, key_id: str, private_key: PrivateKey, *, trusted: Collection[str] | None
) -> DataKey:
    """Return the data key `key_id`, opened with a recipient's private key.

    `trusted` are the public signing keys (base64) that are believed; None believes any.

    Raises SealingError, naming who can still open the data key, when this private key cannot;
    SignatureError for a record that is unsigned, changed or signed by a key that is not trusted;
    StoreError for one that is damaged.
    """
    record = read_record(store, key_id, trusted).record
    name = _name_of(record, private_key)
    where = store.uri(layout.seal_key(key_id, name))
    found = store.get_bytes(layout.seal_key(key_id, name))
    why = f"{where} does not exist"
    if found is not None:
        try:
            seal = _read_seal(record, name, found.data, where, trusted)
        except (SealingError, SignatureError, StoreError) as error:
            why = str(error)
        else:
            data_key = _open(seal, private_key)
            if data_key is not None:
                return data_key
            why = f"{where} is not the key it should be, or is sealed to another public key"
    raise SealingError(
        f"data key {key_id} cannot be opened by {name}: {why}; {who_can_open(record, but=name)}"
    )


def reseal(
    store: Store,
    key_id: str,
    private_key: PrivateKey,
    recipients: Mapping[str, str],
    signing_key: signing.SecretKey,
    *,
    trusted: Collection[str] | None,
    when: datetime | None = None,
) -> KeyRecord:
    """Seal the data key to just `recipients` (public key by name) and return its record.

    Of two that do this at once both are in the history, and the later one's recipients stay. Run
    again after it was killed, it completes what is missing. Who is removed may have kept the
    data key: only a new one, in a new build, shuts them out.

    Raises as `unseal` does, SealingError for wrong recipients, ConflictError when others kept
    changing them.
    """
    wanted = _check_recipients(recipients)
    return _reseal(store, key_id, private_key, lambda _: wanted, signing_key, trusted, when)


def amend(
    store: Store,
    key_id: str,
    private_key: PrivateKey,
    signing_key: signing.SecretKey,
    *,
    add: Mapping[str, str],
    remove: Collection[str],
    trusted: Collection[str] | None,
    when: datetime | None = None,
) -> KeyRecord:
    """Seal the data key also to `add`, no longer to the names in `remove`, and return its record.

    A name in `add` that is a recipient already gets the new public key. Of two that do this at
    once, what both ask for is done.

    Raises as `reseal` does, and SealingError when nobody ever had one of the names to remove.
    """

    if both := sorted(set(add) & set(remove)):
        raise SealingError(f"{', '.join(both)}: to be added and removed; ask for one of the two")

    def amended(record: KeyRecord) -> dict[str, str]:
        current = record.recipients
        # Whom another one removed meanwhile is no mistake.
        ever = {one.name for change in record.changes for one in change.added}
        if strangers := sorted(set(remove) - ever):
            raise SealingError(
                f"data key {key_id} was never sealed to {', '.join(strangers)}; its recipients "
                f"are {', '.join(current)}"
            )
        kept = {name: key for name, key in current.items() if name not in remove}
        return _check_recipients({**kept, **add})

    return _reseal(store, key_id, private_key, amended, signing_key, trusted, when)


def read_record(store: Reader, key_id: str, trusted: Collection[str] | None) -> StoredRecord:
    """Return the history of a data key's recipients.

    Raises SealingError when there is no such key, SignatureError for a signature that is missing,
    wrong or not trusted, StoreError for a damaged history or that of another key.
    """
    place = layout.key_record_key(key_id)
    where = store.uri(place)
    found = store.get_bytes(place)
    if found is None:
        raise SealingError(
            f"there is no data key {key_id}: {where} does not exist; `tensorize keys list` names "
            "those there are"
        )
    payload = signing.verify("recipients", found.data, trusted, where).payload
    record = jsonio.load_record(KeyRecord, jsonio.canonical(payload, where), where)
    if record.key_id != key_id:
        raise StoreError(f"{where} is the record of data key {record.key_id}; restore it")
    return StoredRecord(record, found.etag)


def recipients_of(store: Store, key_id: str, trusted: Collection[str] | None) -> dict[str, str]:
    """Return the public key of everyone a data key is sealed to, by name. As `read_record`."""
    return read_record(store, key_id, trusted).record.recipients


def key_ids(store: Store) -> tuple[str, ...]:
    """Return the ids of all data keys of a store, sorted."""
    names = (key.removeprefix(layout.KEYS_FOLDER) for key in store.list(layout.KEYS_FOLDER))
    return tuple(
        name.removesuffix(".json") for name in names if name.endswith(".json") and "/" not in name
    )


def who_can_open(record: KeyRecord, but: str = "") -> str:
    """Return a sentence that says which recipients can open a data key, `but` left out."""
    names = ", ".join(name for name in record.recipients if name != but)
    if not names:
        return "nobody else can open it: restore it, or encrypt the build again with a new key"
    return f"these can still open it, and seal it again with `tensorize keys reseal`: {names}"


# Changing who can open a key


def _reseal(
    store: Store,
    key_id: str,
    private_key: PrivateKey,
    to_be: Callable[[KeyRecord], dict[str, str]],
    signing_key: signing.SecretKey,
    trusted: Collection[str] | None,
    when: datetime | None,
) -> KeyRecord:
    if trusted is not None and signing_key.public_key not in trusted:
        # Said before it is written: afterwards nobody here would believe the record.
        raise SealingError(
            f"signing key {signing_key.key_id} is not trusted here, and so cannot change who "
            f"opens data key {key_id}; sign with a trusted key, or add this one's public key"
        )
    with unseal(store, key_id, private_key, trusted=trusted) as data_key:
        # The record first: nobody gets a seal that it does not tell of.
        stored = _record_change(store, key_id, private_key, to_be, signing_key, trusted, when)
        return _settle(store, stored, data_key, signing_key, trusted)


def _record_change(
    store: Store,
    key_id: str,
    private_key: PrivateKey,
    to_be: Callable[[KeyRecord], dict[str, str]],
    signing_key: signing.SecretKey,
    trusted: Collection[str] | None,
    when: datetime | None,
) -> StoredRecord:
    """Add what `to_be` makes of the recipients as they are; again when another was first."""
    place = layout.key_record_key(key_id)
    for attempt in range(_ATTEMPTS):
        found = read_record(store, key_id, trusted)
        # Whom another one removed meanwhile has no say any more.
        _name_of(found.record, private_key)
        current = found.record.recipients
        wanted = to_be(found.record)
        if private_key.public_key not in wanted.values():
            # The one key that is known to open it: nobody may have the others' private halves.
            raise SealingError(
                f"data key {key_id}: whoever changes its recipients stays one of them, or a wrong "
                "public key would lose it for good; let another recipient remove this one "
                f"({_name_of(found.record, private_key)})"
            )
        if wanted == current:
            return found
        changes = found.record.changes
        change = _change(len(changes) + 1, current, wanted, when)
        record = KeyRecord(key_id=key_id, changes=(*changes, change))
        data = signing.sign("recipients", jsonio.dump_record(record), signing_key)
        try:
            return StoredRecord(record, store.put_bytes(place, data, if_match=found.etag))
        except ConflictError:
            _pause(attempt)
    raise _kept_changing(store, key_id)


def _settle(
    store: Store,
    stored: StoredRecord,
    data_key: DataKey,
    signing_key: signing.SecretKey,
    trusted: Collection[str] | None,
) -> KeyRecord:
    """Make the seals those of the record, and return it.

    Seals do not compare and swap with the record. So whoever changed any looks at the record
    again: the last of several to be done has made them those of the last record.
    """
    for _ in range(_ATTEMPTS):
        record = stored.record
        wanted = {layout.seal_key(record.key_id, name): name for name in record.recipients}
        for key, name in wanted.items():
            if not _is_sealed(store, record, name, trusted):
                _put_seal(store, record, name, data_key, signing_key, store_key=key)
        for key in store.list(layout.seals_folder(record.key_id)):
            if key not in wanted:
                store.delete(key)
        again = read_record(store, record.key_id, trusted)
        if again.etag == stored.etag:
            return record
        stored = again
    raise _kept_changing(store, stored.record.key_id)


def _change(
    number: int, current: Mapping[str, str], wanted: Mapping[str, str], when: datetime | None
) -> RecipientChange:
    def beyond(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[Recipient, ...]:
        return tuple(
            Recipient(name=name, public_key=key)
            for name, key in sorted(one.items())
            if other.get(name) != key
        )

    removed = beyond(current, wanted)
    return RecipientChange(
        number=number,
        when=when or datetime.now(UTC),
        added=beyond(wanted, current),
        removed=removed,
        note="who was removed may have kept the data key: rotate it" if removed else None,
    )


def _check_recipients(recipients: Mapping[str, str]) -> dict[str, str]:
    """Return the recipients sorted. Raises SealingError for what nobody can be sealed to."""
    if not recipients:
        raise SealingError(
            "there are no recipients: nobody could open the data key; add one to `recipients`, as "
            "`name: public key`"
        )
    by_key: dict[str, str] = {}
    for name, key in sorted(recipients.items()):
        try:
            layout.check_part(name, "recipient")
            check_public_key(key)
        except (StoreError, SealingError) as error:
            wrong = str(error)
        else:
            if key in by_key:
                raise SealingError(
                    f"recipients {by_key[key]} and {name} have one public key: removing one of "
                    "them would shut nobody out; keep one name for it"
                )
            by_key[key] = name
            continue
        raise SealingError(f"recipient {name!r}: {wrong}")
    return {name: key for key, name in by_key.items()}


def _name_of(record: KeyRecord, private_key: PrivateKey) -> str:
    """Return which recipient has this private key. Raises SealingError when none has."""
    own = private_key.public_key
    for name, key in record.recipients.items():
        if key == own:
            return name
    why = "is none of its recipients"
    for change in record.changes:
        if any(one.public_key == own for one in change.removed):
            why = f"was removed from its recipients ({change.when:%Y-%m-%d %H:%M} UTC)"
    raise SealingError(
        f"this private key does not open data key {record.key_id}: its public key {own} {why}; "
        f"{who_can_open(record)}"
    )


def _pause(attempt: int) -> None:
    # Random, so that writers that lost together do not meet again.
    time.sleep(random.uniform(0, min(0.01 * 2**attempt, _LONGEST_PAUSE_S)))


def _kept_changing(store: Store, key_id: str) -> ConflictError:
    return ConflictError(
        f"{store.uri(layout.key_record_key(key_id))} was changed by others {_ATTEMPTS} times in a "
        "row; run this again"
    )


# Seals


def _binding(key_id: str, name: str) -> bytes:
    """What stands before the data key inside its seal."""
    return f"tensorize_assets/data-key/1\n{key_id}\n{name}\n".encode()


def _seal(public_key: str, message: bytes) -> bytes | None:
    """Seal to a public key; None when it is a point that gives no secret."""
    try:
        return public.SealedBox(public.PublicKey(base64.b64decode(public_key))).encrypt(message)
    except CryptoError:
        return None


def _put_seal(
    store: Store,
    record: KeyRecord,
    name: str,
    data_key: DataKey,
    signing_key: signing.SecretKey,
    store_key: str | None = None,
) -> None:
    recipient = Recipient(name=name, public_key=record.recipients[name])
    sealed = _seal(recipient.public_key, _binding(record.key_id, name) + data_key.reveal())
    if sealed is None:
        raise SealingError(f"recipient {name!r}: nothing can be sealed to its public key")
    document = _SealedKey(
        key_id=record.key_id, recipient=recipient, sealed=base64.b64encode(sealed).decode()
    )
    data = signing.sign("seal", jsonio.dump_record(document), signing_key)
    store.put_bytes(store_key or layout.seal_key(record.key_id, name), data)


def _read_seal(
    record: KeyRecord, name: str, data: bytes, where: str, trusted: Collection[str] | None
) -> _SealedKey:
    """Return a signed seal that says it is this recipient's of this key."""
    payload = signing.verify("seal", data, trusted, where).payload
    seal = jsonio.load_record(_SealedKey, jsonio.canonical(payload, where), where)
    if seal.key_id != record.key_id:
        raise SealingError(f"{where} is the seal of data key {seal.key_id}")
    if seal.recipient != Recipient(name=name, public_key=record.recipients[name]):
        raise SealingError(f"{where} is the seal of {seal.recipient.name} with another public key")
    return seal


def _is_sealed(store: Store, record: KeyRecord, name: str, trusted: Collection[str] | None) -> bool:
    key = layout.seal_key(record.key_id, name)
    found = store.get_bytes(key)
    if found is None:
        return False
    try:
        _read_seal(record, name, found.data, store.uri(key), trusted)
    except (SealingError, SignatureError, StoreError):
        return False
    return True


def _open(seal: _SealedKey, private_key: PrivateKey) -> DataKey | None:
    """Return the data key in a seal, or None when there is another thing in it."""
    try:
        sealed = base64.b64decode(seal.sealed, validate=True)
    except ValueError:
        return None
    opened = private_key.open(sealed)
    binding = _binding(seal.key_id, seal.recipient.name)
    if opened is None or not opened.startswith(binding):
        return None
    if len(opened) != len(binding) + DATA_KEY_BYTES:
        return None
    return DataKey(memoryview(opened)[len(binding) :])


# Files


def _key_from_text(text: str, where: str) -> PrivateKey:
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    secret = (
        secret_from_text(lines[0].removeprefix(PRIVATE_KEY_PREFIX)) if len(lines) == 1 else None
    )
    if secret is None:
        # Neither the text nor a cause that could quote it.
        raise SealingError(
            f"{where} holds no private key: expected what `tensorize keys generate` writes, or "
            f"{SECRET_BYTES} bytes as base64 or hex on one line; restore it"
        )
    return PrivateKey(secret)


@contextmanager
def _file_errors(action: str, path: Path) -> Generator[None]:
    try:
        yield
    except FileExistsError:
        raise SealingError(
            f"cannot {action} {path}: there is something of that name, and keys are never "
            "overwritten; choose another path, or move it away"
        ) from None
    except OSError as error:
        raise SealingError(
            f"cannot {action} {path}: {error.strerror}; give this user access to it, or choose "
            "another path"
        ) from error
