from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from pydantic import ValidationError

from tensorize_assets.core import evidence as evidences
from tensorize_assets.core import jsonio, layout, signing
from tensorize_assets.core.errors import EvidenceError, SignatureError, StoreError
from tensorize_assets.core.evidence import CheckOutcome, Evidence, LoadFigures
from tensorize_assets.core.local_store import LocalStore

KEY = signing.SecretKey(bytes(range(32)))
SHA = "a" * 64
TOKENS = CheckOutcome(
    name="tokens", passed=True, description="equal", metadata={"prompts": 4, "tokens": [1, 2]}
)
HASHES = CheckOutcome(name="hashes", passed=True, description="272 of 272")
EVIDENCE = Evidence(
    model="org/tiny",
    suffix="v1",
    build_id="0123456789ab",
    manifest_sha256=SHA,
    device="cpu",
    device_name="AMD EPYC",
    vllm_version="0.31.0",
    tensor_parallel_size=1,
    dtype="bfloat16",
    passed=True,
    checks=(TOKENS, HASHES),
    perplexity=12.5,
    load=LoadFigures(
        bytes=270_000_000,
        seconds=0.5,
        bytes_per_second=540_000_000,
        host_memory_before=1,
        host_memory_after=2,
    ),
    default_load_seconds=1.25,
    prompts_digest="ff00",
    when=datetime(2025, 11, 29, 15, 0, tzinfo=UTC),
)


def changed(**fields: object) -> Evidence:
    return Evidence.model_validate({**EVIDENCE.model_dump(), **fields})


def read(store: LocalStore) -> Evidence | None:
    return evidences.read_evidence(store, SHA, "cpu", "0.31.0", {KEY.public_key})


def test_evidence_comes_back_as_it_was_written(tmp_path: Path) -> None:
    """Publishing believes this file and nothing else."""
    store = LocalStore(tmp_path)
    assert read(store) is None
    key = evidences.write_evidence(store, KEY, EVIDENCE)
    assert f"evidence/{SHA}/cpu-0.31.0.json" == key
    assert EVIDENCE == read(store)


def test_a_later_reload_replaces_an_earlier_one(tmp_path: Path) -> None:
    """A reload that fails today must outweigh one that passed yesterday."""
    store = LocalStore(tmp_path)
    evidences.write_evidence(store, KEY, EVIDENCE)
    failed = changed(passed=False, checks=[TOKENS.model_copy(update={"passed": False})])
    evidences.write_evidence(store, KEY, failed)
    assert failed == read(store)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"checks": [TOKENS, HASHES.model_copy(update={"passed": False})]}, "checks say otherwise"),
        ({"passed": False}, "checks say otherwise"),
        ({"checks": []}, "at least 1 item"),
        ({"checks": [TOKENS, TOKENS]}, "a check is named twice"),
        ({"load": None}, "cannot have passed"),
        ({"perplexity": float("nan")}, "perplexity"),
        ({"perplexity": -1.0}, "perplexity"),
        ({"device": "tpu"}, "device"),
        ({"vllm_version": "../../x"}, "vllm_version"),
        ({"when": datetime(2025, 1, 1)}, "when"),
    ],
)
def test_evidence_that_contradicts_itself_is_no_evidence(
    fields: dict[str, object], message: str
) -> None:
    """No check, a failed check, or no load at all must never read as passed."""
    with pytest.raises(ValidationError, match=message):
        changed(**fields)


def test_contradicting_evidence_is_refused_when_read_too(tmp_path: Path) -> None:
    """A signed file need not have been written by this code."""
    store = LocalStore(tmp_path)
    place = layout.evidence_key(SHA, "cpu", "0.31.0")
    payload = {**jsonio.dump_record(EVIDENCE), "checks": []}
    store.put_bytes(place, signing.sign("evidence", payload, KEY))
    with pytest.raises(EvidenceError, match=f"{store.root / place} is not a valid Evidence"):
        read(store)


def test_a_reload_that_could_not_load_is_recorded(tmp_path: Path) -> None:
    """Such a failure has no figures, and must still stand in the way of publishing."""
    store = LocalStore(tmp_path)
    failed = CheckOutcome(name="loaded", passed=False, description="vLLM refused the file")
    evidence = changed(passed=False, checks=[failed], load=None, perplexity=None)
    evidences.write_evidence(store, KEY, evidence)
    assert evidence == read(store)


def test_evidence_of_another_reload_is_refused(tmp_path: Path) -> None:
    """Passing evidence of one build, copied to another's place, is the cheapest forgery."""
    store = LocalStore(tmp_path)
    other = changed(manifest_sha256="b" * 64)
    store.put_bytes(layout.evidence_key(SHA, "cpu", "0.31.0"), evidences.encode(other, KEY))
    with pytest.raises(EvidenceError, match="is the evidence of another reload"):
        read(store)


def test_evidence_by_an_unknown_key_is_refused(tmp_path: Path) -> None:
    """Write access to the store is not the right to vouch for a build."""
    store = LocalStore(tmp_path)
    evidences.write_evidence(store, signing.generate_signing_key(), EVIDENCE)
    with pytest.raises(SignatureError, match="not trusted"):
        read(store)


def test_time_is_kept_in_utc() -> None:
    """Hosts in different zones write one history."""
    local = EVIDENCE.when.astimezone(timezone(timedelta(hours=2)))
    evidence = changed(when=local)
    assert b'"when":"2025-11-29T15:00:00Z"' in evidences.encode(evidence, KEY)
    assert EVIDENCE == evidences.decode(evidences.encode(evidence, KEY), None)


def test_metadata_that_json_does_not_have_is_named() -> None:
    """A model with broken weights computes NaN; the message must say where it was put."""
    check = TOKENS.model_copy(update={"metadata": {"worst": float("nan")}})
    broken = EVIDENCE.model_copy(update={"checks": (check,)})
    with pytest.raises(StoreError, match=r"checks\[0\]\.metadata\.worst is NaN"):
        evidences.encode(broken, KEY)
