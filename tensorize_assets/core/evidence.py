"""Evidence: the signed record of one reload of one manifest, on one device and vLLM version."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, JsonValue, field_validator, model_validator

from tensorize_assets.core import jsonio, layout, signing
from tensorize_assets.core.errors import EvidenceError
from tensorize_assets.core.store import Reader, Store
from tensorize_assets.core.tasks import LoadPath, LoadSource

Device = Literal["cpu", "cuda"]
Measure = Annotated[FiniteFloat, Field(ge=0)]


class CheckOutcome(jsonio.Record):
    """What one check of the reload found."""

    name: str
    passed: bool
    description: str
    metadata: dict[str, JsonValue] = Field(default_factory=dict)


class LoadFigures(jsonio.Record):
    """The load in figures: bytes, seconds, bytes/s, and host memory around it in bytes."""

    bytes: Annotated[int, Field(ge=0)]
    seconds: Measure
    bytes_per_second: Measure
    host_memory_before: Annotated[int, Field(ge=0)]
    host_memory_after: Annotated[int, Field(ge=0)]
    source: LoadSource = "disk"
    part_retries: Annotated[int, Field(ge=0)] = 0
    restarts: Annotated[int, Field(ge=0)] = 0
    path: LoadPath = "direct"


class Evidence(jsonio.Record):
    """One reload. `load` is None only when the artifact did not load, and so did not pass.

    `default_load_seconds` is vLLM's load of the source snapshot, for comparison; `perplexity` is
    None when it was not finite.
    """

    format: Literal[1] = 1
    model: jsonio.ModelId
    suffix: jsonio.Suffix
    build_id: jsonio.BuildId
    manifest_sha256: jsonio.Sha256
    device: Device
    device_name: str
    vllm_version: jsonio.PathPart
    tensor_parallel_size: Annotated[int, Field(ge=1)]
    dtype: str
    passed: bool
    checks: Annotated[tuple[CheckOutcome, ...], Field(min_length=1)]
    perplexity: Measure | None
    load: LoadFigures | None
    default_load_seconds: Measure | None
    prompts_digest: str
    when: jsonio.Instant

    @field_validator("checks")
    @classmethod
    def _unique_names(cls, checks: tuple[CheckOutcome, ...]) -> tuple[CheckOutcome, ...]:
        names = [check.name for check in checks]
        if len(set(names)) != len(names):
            raise ValueError(f"a check is named twice: {', '.join(sorted(names))}")
        return checks

    @model_validator(mode="after")
    def _passes_with_its_checks(self) -> Evidence:
        if self.passed != all(check.passed for check in self.checks):
            raise ValueError(f"passed is {self.passed}, but the checks say otherwise")
        if self.passed and self.load is None:
            raise ValueError("a reload without load figures cannot have passed")
        return self


def encode(evidence: Evidence, key: signing.SecretKey) -> bytes:
    """Return the signed bytes of an evidence."""
    return signing.sign("evidence", jsonio.dump_record(evidence), key)


def decode(data: bytes, trusted: Collection[str] | None, where: str = "the evidence") -> Evidence:
    """Return the evidence in `data`, signed by one of the `trusted` public keys (None: any).

    Raises SignatureError for a signature that is missing, wrong or not trusted, EvidenceError for
    content that no reload check writes.
    """
    payload = signing.verify("evidence", data, trusted, where).payload
    return jsonio.load_record(Evidence, jsonio.canonical(payload, where), where, EvidenceError)


def write_evidence(store: Store, key: signing.SecretKey, evidence: Evidence) -> str:
    """Store an evidence, in place of an earlier one of the same reload, and return its key."""
    place = layout.evidence_key(evidence.manifest_sha256, evidence.device, evidence.vllm_version)
    store.put_bytes(place, encode(evidence, key))
    return place


def read_evidence(
    store: Reader,
    manifest_sha256: str,
    device: str,
    vllm_version: str,
    trusted: Collection[str] | None,
) -> Evidence | None:
    """Return the evidence of one reload, passed or not, or None when there is none.

    Raises SignatureError and EvidenceError as `decode` does, naming the URI, and EvidenceError for
    an evidence that was written for another reload.
    """
    place = layout.evidence_key(manifest_sha256, device, vllm_version)
    found = store.get_bytes(place)
    if found is None:
        return None
    where = store.uri(place)
    evidence = decode(found.data, trusted, where)
    own = layout.evidence_key(evidence.manifest_sha256, evidence.device, evidence.vllm_version)
    if own != place:
        raise EvidenceError(
            f"{where} is the evidence of another reload ({own}); remove it and run the reload "
            "check again"
        )
    return evidence
