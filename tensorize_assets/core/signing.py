"""Ed25519 signatures inside the documents they cover, and the key that makes them.

A signed document is a JSON object with a field `signature`. The signature covers the canonical
JSON of everything else, behind the name of the document's type: an evidence can never pass as a
manifest, whoever signed it.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

from nacl.bindings import crypto_core_ed25519_is_valid_point
from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey, VerifyKey
from pydantic import JsonValue, ValidationError

from tensorize_assets.core import jsonio
from tensorize_assets.core.errors import SignatureError
from tensorize_assets.core.private_files import (
    SECRET_BYTES,
    create_private,
    read_private,
    secret_from_text,
)

KEY_VARIABLE = "TENSORIZE_ASSETS_SIGNING_KEY"
"""The environment variable whose value, when not empty, is used instead of the key file's."""

DocumentType = Literal[
    "manifest", "evidence", "channel", "recipients", "seal", "build-key", "audit", "blocks"
]

_FIELD = "signature"


class SecretKey:
    """An Ed25519 signing key that shows itself by its id only."""

    __slots__ = ("_key",)

    def __init__(self, seed: bytes) -> None:
        # PyNaCl's own key object prints its secret; it never leaves this one.
        self._key = SigningKey(seed)

    @property
    def public_key(self) -> str:
        """The public key, base64 of 32 bytes: what others put on their list of trusted keys."""
        return base64.b64encode(bytes(self._key.verify_key)).decode()

    @property
    def key_id(self) -> str:
        return key_id(bytes(self._key.verify_key))

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message).signature

    def write_to(self, descriptor: int) -> None:
        """Write the secret as one line of base64 to an open file, which must be private."""
        os.write(descriptor, base64.b64encode(bytes(self._key)) + b"\n")

    def __repr__(self) -> str:
        return f"SecretKey(key_id={self.key_id!r})"

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError("a SecretKey is not pickled: hand over the path of its file")


class Verified(NamedTuple):
    """The payload of a document whose signature is valid, and whose signature it is."""

    payload: dict[str, JsonValue]
    key_id: str
    public_key: str


class _Signature(jsonio.Record):
    key_id: str
    public_key: str
    signature: str


def generate_signing_key() -> SecretKey:
    """Return a new random key."""
    return SecretKey(os.urandom(SECRET_BYTES))


def key_id(public_key: bytes) -> str:
    """Return the short name of a public key: 16 hex digits of its SHA-256."""
    return hashlib.sha256(public_key).hexdigest()[:16]


def load_or_create_signing_key(path: Path) -> SecretKey:
    """Return the key in TENSORIZE_ASSETS_SIGNING_KEY or at `path`, which is made when absent.

    The text is base64 or hex of 32 bytes. Of several processes that find no file, all return
    the key of the one that made it.

    Raises SignatureError when others may read the file, or when it holds no key.
    """
    if text := os.environ.get(KEY_VARIABLE, "").strip():
        return _key_from_text(text, f"environment variable {KEY_VARIABLE}")
    with _explained(path):
        try:
            return _read_key(path)
        except FileNotFoundError:
            pass
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Another process may make it first.
        with suppress(FileExistsError):
            create_private(path, generate_signing_key().write_to)
        return _read_key(path)


def sign(document_type: DocumentType, payload: Mapping[str, JsonValue], key: SecretKey) -> bytes:
    """Return the canonical JSON of `payload` with its signature.

    Raises StoreError when the payload holds what JSON does not have, or more than is read.
    """
    if _FIELD in payload:
        raise SignatureError(f"the {document_type} has a field {_FIELD!r} already; sign it once")
    signature = _Signature(
        key_id=key.key_id,
        public_key=key.public_key,
        signature=base64.b64encode(key.sign(_message(document_type, payload))).decode(),
    )
    data = jsonio.canonical({**payload, _FIELD: jsonio.dump_record(signature)}, document_type)
    jsonio.require_bounded(data, f"the {document_type}")
    return data


def verify(
    document_type: DocumentType,
    data: bytes,
    trusted: Collection[str] | None,
    where: str = "",
) -> Verified:
    """Return the payload of a signed document.

    `trusted` are the public keys (base64) whose signature is believed; None believes any key, and
    leaves that decision to the caller. `where` names the document in messages.

    Raises SignatureError when the document is unsigned, not canonical JSON, of another type,
    changed since it was signed, or signed by a key that is not trusted.
    """
    where = where or f"the {document_type}"
    document = jsonio.parse(data, where, SignatureError)
    # One content, one byte string: what evidence and channel name by hash has no second form.
    if jsonio.canonical(document, where, SignatureError) != data:
        raise SignatureError(f"{where} is not as it was written; restore it or build it again")
    payload = {name: value for name, value in document.items() if name != _FIELD}
    signature = _read_signature(document.get(_FIELD), where)
    public_key = _public_key(signature.public_key, where)
    try:
        VerifyKey(public_key).verify(
            _message(document_type, payload), _from_base64(signature.signature)
        )
    except (BadSignatureError, ValueError):
        raise SignatureError(
            f"the signature of {where} does not fit its content as a {document_type}: it was "
            "changed, or is a document of another type; restore it or build it again"
        ) from None
    found = key_id(public_key)
    if signature.key_id != found:
        raise SignatureError(
            f"{where} names its key {signature.key_id!r}, but was signed with {found}; restore it"
        )
    if trusted is not None:
        _require_trusted(public_key, trusted, where)
    return Verified(payload, found, signature.public_key)


def _message(document_type: DocumentType, payload: Mapping[str, JsonValue]) -> bytes:
    domain = f"tensorize_assets/{document_type}/1\n".encode()
    return domain + jsonio.canonical(payload, document_type)


def _read_signature(value: JsonValue, where: str) -> _Signature:
    if value is None:
        raise SignatureError(f"{where} is not signed; build it again, or sign it with its key")
    try:
        return _Signature.model_validate(value, strict=True)
    except ValidationError as error:
        problems = jsonio.describe(error)
    raise SignatureError(f"the signature of {where} is damaged: {problems}; restore it")


def _require_trusted(public_key: bytes, trusted: Collection[str], where: str) -> None:
    keys = [_public_key(text, "the list of trusted keys") for text in trusted]
    if public_key not in keys:
        names = ", ".join(sorted(key_id(key) for key in keys)) or "none"
        raise SignatureError(
            f"{where} was signed by key {key_id(public_key)}, which is not trusted here (trusted: "
            f"{names}); add its public key if you know whose it is, else restore the document"
        )


def require_own_trusted(key: SecretKey, trusted: Collection[str]) -> SecretKey:
    """Return this home's key. Raises SignatureError when what it signs would not be believed."""
    if key.public_key not in trusted:
        raise SignatureError(
            f"this home's signing key (id {key.key_id}) is not on the list of trusted keys: what "
            f"it signs, nobody would believe. Add its public key {key.public_key} to `trust` in "
            "the catalog, or use a key that is on it"
        )
    return key


def check_verify_key(text: str) -> str:
    """Return `text` when it is a public signing key: base64 of 32 bytes.

    Raises SignatureError, which does not quote the text: it may be a secret.
    """
    try:
        key = _from_base64(text)
    except ValueError:
        key = b""
    if len(key) != SECRET_BYTES or base64.b64encode(key).decode() != text:
        raise SignatureError(
            f"it is not a public signing key: base64 of {SECRET_BYTES} bytes, as `tensorize keys "
            "public` prints it"
        )
    # Of 16 other values of this size, secrets among them, one passes.
    if not crypto_core_ed25519_is_valid_point(key):
        raise SignatureError(
            "it is another kind of key than a public signing key; write the one that `tensorize "
            "keys public` prints, and change this one if it is a secret"
        )
    return text


def _public_key(text: str, where: str) -> bytes:
    try:
        key = _from_base64(text)
    except ValueError:
        key = b""
    if len(key) != SECRET_BYTES:
        raise SignatureError(
            f"{where} holds {text[:60]!r}, which is not a public key: base64 of "
            f"{SECRET_BYTES} bytes"
        )
    return key


def _from_base64(text: str) -> bytes:
    found = base64.b64decode(text, validate=True)
    # The last character has bits that nobody reads: without this, there are 15 other texts of one
    # signature, and as many other documents that pass for the one that was signed.
    if base64.b64encode(found).decode() != text:
        raise ValueError("base64 with bits that mean nothing")
    return found


def _key_from_text(text: str, where: str) -> SecretKey:
    seed = secret_from_text(text)
    if seed is None:
        # Neither the text nor a cause that could quote it.
        raise SignatureError(
            f"{where} holds no signing key: expected {SECRET_BYTES} bytes as base64 or hex, on one "
            "line; restore it, or remove it to have a new key made"
        )
    return SecretKey(seed)


def _read_key(path: Path) -> SecretKey:
    text = read_private(path, "signing key", SignatureError)
    return _key_from_text(text.strip(), f"file {path}")


@contextmanager
def _explained(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise SignatureError(
            f"cannot use the signing key {path}: {error.strerror}; give this user access to it, "
            f"or set {KEY_VARIABLE}"
        ) from error
