"""What the last audit of a build found: a small signed record, by the manifest's hash."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from tensorize_assets.core import jsonio, layout, signing
from tensorize_assets.core.errors import (
    ManifestError,
    SignatureError,
    StoreError,
    StoreUnavailableError,
)
from tensorize_assets.core.store import Reader, Store


class Damage(jsonio.Record):
    """One thing that is wrong: a kind of `verify.Problem`, the file, what was found."""

    kind: str
    path: str
    message: str


class AuditRecord(jsonio.Record):
    """When a directory was read, and what was wrong with it; `bytes` were as the manifest says."""

    format: Literal[1] = 1
    model: jsonio.ModelId
    suffix: jsonio.Suffix
    build_id: jsonio.BuildId
    directory: jsonio.RelativePath
    manifest_sha256: jsonio.Sha256
    when: jsonio.Instant
    bytes: Annotated[int, Field(ge=0)]
    seconds: Annotated[FiniteFloat, Field(ge=0)]
    damage: tuple[Damage, ...] = ()


def write_record(store: Store, key: signing.SecretKey, record: AuditRecord) -> None:
    """Store a record in place of that of an earlier audit."""
    data = signing.sign("audit", jsonio.dump_record(record), key)
    store.put_bytes(layout.audit_key(record.manifest_sha256), data)


def read_record(
    store: Reader, manifest_sha256: str, trusted: Collection[str] | None
) -> AuditRecord | None:
    """Return the record of a manifest; None where there is none that is believed.

    Raises StoreUnavailableError.
    """
    place = layout.audit_key(manifest_sha256)
    try:
        found = store.get_bytes(place)
        if found is None:
            return None
        where = store.uri(place)
        payload = signing.verify("audit", found.data, trusted, where).payload
        record = jsonio.load_record(AuditRecord, jsonio.canonical(payload, where), where)
    except StoreUnavailableError:
        raise
    except (SignatureError, StoreError):
        # Also where it may not be asked for: who reads builds need not be allowed to read audits.
        return None
    return record if record.manifest_sha256 == manifest_sha256 else None


def require_undamaged(
    store: Reader, directory: str, manifest_sha256: str, trusted: Collection[str] | None
) -> None:
    """Raises ManifestError for a build that the last audit found damaged."""
    record = read_record(store, manifest_sha256, trusted)
    if record is None or not record.damage:
        return
    first, *others = record.damage
    raise ManifestError(
        f"{store.uri(directory)} was found damaged on {record.when:%Y-%m-%d %H:%M} UTC: "
        f"{first.message}{f' (and {len(others)} more)' if others else ''}; {remedy(record)}"
    )


def remedy(record: AuditRecord) -> str:
    """What to do about a damaged build."""
    where = f"{record.model} {record.suffix}"
    return (
        f"serve another with `tensorize rollback {where}`; restore the file from a copy, or remove "
        f"the directory and build it again; then `tensorize audit {where}` lifts the mark"
    )
