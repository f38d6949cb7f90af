"""How an artifact came to be, for tools that know nothing of this package.

An in-toto statement (https://in-toto.io/Statement/v1) with SLSA provenance
(https://slsa.dev/provenance/v1) in a DSSE envelope (https://github.com/secure-systems-lab/dsse),
signed with the key that signs manifests. It says nothing that the manifest does not, and has no
timestamp: the same manifest and key give the same bytes.
"""

from __future__ import annotations

import base64
from collections.abc import Collection
from typing import Annotated, Literal
from urllib.parse import quote

from nacl.exceptions import BadSignatureError
from nacl.signing import VerifyKey
from pydantic import Field, JsonValue

from tensorize_assets.core import jsonio, layout, signing
from tensorize_assets.core.errors import ManifestError, SignatureError
from tensorize_assets.core.manifest import Manifest, SignedManifest, SnapshotEntry, StoredManifest
from tensorize_assets.core.printable import quoted
from tensorize_assets.core.store import Reader, Store

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:x-tensorize-assets:build:1"

# Whoever can write to the store chooses what is hashed, and how often, before anything is believed.
# A statement about 10,000 files takes 2 MB.
_MAX_BYTES = 8 * 1024 * 1024
_MAX_SIGNATURES = 8


class _Signature(jsonio.Record):
    keyid: str
    sig: str


class Envelope(jsonio.Record):
    """DSSE's JSON form: what is signed, in base64, and who signed it."""

    payload: str
    payloadType: Literal["application/vnd.in-toto+json"]
    signatures: Annotated[tuple[_Signature, ...], Field(min_length=1, max_length=_MAX_SIGNATURES)]


def statement(manifest: Manifest, sha256: str, key_id: str) -> dict[str, JsonValue]:
    """Return the statement about a manifest, whose bytes have the SHA-256 `sha256`.

    `key_id` is of the key that signs it: it stands for the home that built.
    """
    internal: dict[str, JsonValue] = {
        "build_id": manifest.build_id,
        "sharding": manifest.sharding,
        "tensor_parallel_size": manifest.tensor_parallel_size,
        "dtype": manifest.dtype,
        "architecture": manifest.architecture,
    }
    dependencies = _snapshot(manifest.model, manifest.snapshot)
    for adapter in manifest.adapters:
        dependencies += _snapshot(adapter.repo, adapter.snapshot)
    if manifest.encryption is not None:
        internal["encryption"] = jsonio.dump_record(manifest.encryption)
        if manifest.encryption.plaintext is not None:
            digest: JsonValue = {"sha256": manifest.encryption.plaintext}
            dependencies.append({"name": f"plaintext {layout.MANIFEST}", "digest": digest})
    return {
        "_type": STATEMENT_TYPE,
        "subject": _subjects(manifest, sha256),
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "model": manifest.model,
                    "suffix": manifest.suffix,
                    "revision": manifest.snapshot.revision,
                    "commit": manifest.snapshot.commit,
                    "profile": manifest.profile,
                    "adapters": [
                        {
                            "name": adapter.name,
                            "repo": adapter.repo,
                            "revision": adapter.snapshot.revision,
                            "commit": adapter.snapshot.commit,
                        }
                        for adapter in manifest.adapters
                    ],
                },
                "internalParameters": internal,
                "resolvedDependencies": dependencies,
            },
            "runDetails": {
                "builder": {
                    "id": f"urn:x-tensorize-assets:builder:{key_id}",
                    "version": dict(manifest.versions),
                }
            },
        },
    }


def encode(manifest: Manifest, sha256: str, key: signing.SecretKey) -> bytes:
    """Return the signed envelope about a manifest: the same for the same manifest and key."""
    payload = jsonio.canonical(statement(manifest, sha256, key.key_id), "the provenance")
    signature = key.sign(pre_authentication_encoding(payload))
    return jsonio.canonical(
        {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"keyid": key.key_id, "sig": base64.b64encode(signature).decode()}],
        }
    )


def write(
    store: Store,
    directory: str,
    stored: StoredManifest,
    key: signing.SecretKey,
    trusted: Collection[str],
) -> str:
    """Store the provenance of an artifact directory beside its manifest, and return its key.

    One that is there and is right stays as it is.
    """
    place = layout.provenance_key(directory)
    try:
        there = check(store, directory, stored, trusted)
    except (SignatureError, ManifestError):
        there = False
    if not there:
        store.put_bytes(place, encode(stored.manifest, stored.sha256, key))
    return place


def check(
    store: Reader,
    directory: str,
    stored: StoredManifest | SignedManifest,
    trusted: Collection[str],
) -> bool:
    """Say whether an artifact directory has provenance, which then is right.

    Raises SignatureError when it is not signed by one of the `trusted` public keys (base64),
    ManifestError when it is of another artifact.
    """
    place = layout.provenance_key(directory)
    found = store.get_bytes(place)
    if found is None:
        return False
    verify(found.data, stored, trusted, store.uri(place))
    return True


def verify(
    data: bytes,
    stored: StoredManifest | SignedManifest,
    trusted: Collection[str],
    where: str = "the provenance",
) -> None:
    """Hold an envelope against a manifest. Raises as `check` does."""
    if len(data) > _MAX_BYTES:
        raise SignatureError(
            f"{where} has {len(data)} bytes, and provenance ends at {_MAX_BYTES}; restore it, or "
            "remove it"
        )
    envelope = jsonio.load_record(Envelope, data, where, SignatureError)
    payload = _decoded(envelope.payload)
    keys = _by_id(trusted)
    if payload is None or not any(
        _is_signed(payload, signature.sig, keys[signature.keyid])
        for signature in envelope.signatures
        if signature.keyid in keys
    ):
        names = ", ".join(sorted(quoted(signature.keyid) for signature in envelope.signatures))
        raise SignatureError(
            f"{where} was changed, or is not signed by a key that is trusted here (it names {names}"
            "); restore it, or remove it"
        )
    said = jsonio.parse(payload, where, ManifestError)
    expected = {
        "_type": STATEMENT_TYPE,
        "subject": _subjects(stored.manifest, stored.sha256),
        "predicateType": PREDICATE_TYPE,
    }
    # Not the rest of it: another release may say more.
    if {name: said.get(name) for name in expected} != expected:
        raise ManifestError(
            f"{where} is the provenance of other files than the manifest's; restore it, or remove "
            "it"
        )


def pre_authentication_encoding(payload: bytes) -> bytes:
    """Return what a DSSE signature signs."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def _subjects(manifest: Manifest, sha256: str) -> list[JsonValue]:
    files = [(layout.MANIFEST, sha256), *((file.path, file.sha256) for file in manifest.files)]
    return [{"name": path, "digest": {"sha256": digest}} for path, digest in files]


def _snapshot(repo: str, snapshot: SnapshotEntry) -> list[JsonValue]:
    """A repo of the Hub at a commit, and the files of it that were used."""
    uri = f"pkg:huggingface/{quote(repo)}@{snapshot.commit}"
    found: list[JsonValue] = [{"name": repo, "uri": uri, "digest": {"gitCommit": snapshot.commit}}]
    for file in snapshot.files:
        digest: JsonValue = {"sha256": file.sha256}
        found.append({"name": file.path, "uri": f"{uri}#{quote(file.path)}", "digest": digest})
    return found


def _by_id(keys: Collection[str]) -> dict[str, VerifyKey]:
    found = [base64.b64decode(signing.check_verify_key(key)) for key in keys]
    return {signing.key_id(key): VerifyKey(key) for key in found}


def _is_signed(payload: bytes, signature: str, key: VerifyKey) -> bool:
    raw = _decoded(signature)
    if raw is None:
        return False
    try:
        key.verify(pre_authentication_encoding(payload), raw)
    except (BadSignatureError, ValueError):
        return False
    return True


def _decoded(text: str) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return None
