"""The in-toto statement beside a manifest, as others read it and as we do."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import SSlibKey  # pyright: ignore[reportPrivateImportUsage]

from tensorize_assets.core import jsonio, layout, provenance, signing
from tensorize_assets.core import manifest as manifests
from tensorize_assets.core.build import BuildInputs, build_id
from tensorize_assets.core.errors import ManifestError, SignatureError
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.manifest import Manifest, StoredManifest

KEY = signing.SecretKey(bytes(range(32)))
STRANGER = signing.SecretKey(bytes(range(1, 33)))
TRUSTED = {KEY.public_key}
GOLDEN = (Path(__file__).parent / "golden" / "manifest.json").read_bytes()
MANIFEST = manifests.decode(GOLDEN, TRUSTED)
STORED = StoredManifest(MANIFEST, manifests.manifest_sha256(GOLDEN))
DIRECTORY = layout.artifact_dir(MANIFEST.model, MANIFEST.suffix, MANIFEST.build_id)
DATA = provenance.encode(MANIFEST, STORED.sha256, KEY)


def sslib_key(key: signing.SecretKey) -> SSlibKey:
    """A public key as securesystemslib has it."""
    public = base64.b64decode(key.public_key).hex()
    return SSlibKey(key.key_id, "ed25519", "ed25519", {"public": public})


def _message(module: Any, name: str) -> Any:
    """An empty message of a generated module, which has no types."""
    return getattr(module, name)()


def encrypted_with_an_adapter() -> Manifest:
    """The golden build with an adapter, encrypted from its plaintext build."""
    commit = "c" * 40
    fields = jsonio.dump_record(MANIFEST)
    inputs = BuildInputs.model_validate(
        {**MANIFEST.inputs.model_dump(), "adapters": (("a", commit),), "data_key": "0" * 16}
    )
    added: list[Any] = [
        {"path": name, "size": 1, "sha256": "e" * 64}
        for name in (layout.ADAPTER_TENSORS, layout.ADAPTER_CONFIG)
    ]
    files: Any = fields["files"]
    adapter = {
        "name": "a",
        "repo": "org/lora",
        "snapshot": {
            "revision": "v2",
            "commit": commit,
            "files": [{"path": "adapter_model.safetensors", "size": 9, "sha256": "d" * 64}],
            "weights_format": "safetensors",
        },
        "rank": 8,
        "file": layout.ADAPTER_TENSORS,
        "config": layout.ADAPTER_CONFIG,
        "tensors": [],
    }
    return Manifest.model_validate_json(
        json.dumps(
            {
                **fields,
                "inputs": jsonio.dump_record(inputs),
                "build_id": build_id(inputs),
                "files": [*files, *added],
                "adapters": [adapter],
                "encryption": {"key_id": "0" * 16, "plaintext": STORED.sha256},
            }
        )
    )


def test_public_libraries_verify_and_read_it() -> None:
    """Nobody needs this package to know who built what of what."""
    manifest = encrypted_with_an_adapter()
    sha256 = manifests.manifest_sha256(manifests.encode(manifest, KEY))
    envelope = Envelope.from_dict(json.loads(provenance.encode(manifest, sha256, KEY)))
    assert "application/vnd.in-toto+json" == envelope.payload_type
    assert {KEY.key_id} == set(envelope.verify([sslib_key(KEY)], 1))
    with pytest.raises(VerificationError):
        envelope.verify([sslib_key(STRANGER)], 1)

    parsed = json_format.Parse(envelope.payload, _message(statement_pb2, "Statement"))
    Statement.copy_from_pb(parsed).validate()
    assert "https://slsa.dev/provenance/v1" == parsed.predicate_type
    expected = {file.path: file.sha256 for file in manifest.files} | {"manifest.json": sha256}
    assert expected == {one.name: one.digest["sha256"] for one in parsed.subject}

    # Refuses a field that the predicate does not have.
    predicate = json_format.ParseDict(
        json_format.MessageToDict(parsed.predicate),
        _message(provenance_pb2, "Provenance"),
    )
    definition = predicate.build_definition
    outside = json_format.MessageToDict(definition.external_parameters)
    assert (manifest.model, manifest.snapshot.commit) == (outside["model"], outside["commit"])
    assert manifest.profile == outside["profile"]
    assert [{"name": "a", "repo": "org/lora", "revision": "v2", "commit": "c" * 40}] == (
        outside["adapters"]
    )
    commit = manifest.snapshot.commit
    assert [
        ("org/tiny-é", f"pkg:huggingface/org/tiny-%C3%A9@{commit}", {"gitCommit": commit}),
        *(
            (
                file.path,
                f"pkg:huggingface/org/tiny-%C3%A9@{commit}#{file.path}",
                {"sha256": file.sha256},
            )
            for file in manifest.snapshot.files
        ),
        ("org/lora", f"pkg:huggingface/org/lora@{'c' * 40}", {"gitCommit": "c" * 40}),
        (
            "adapter_model.safetensors",
            f"pkg:huggingface/org/lora@{'c' * 40}#adapter_model.safetensors",
            {"sha256": "d" * 64},
        ),
        ("plaintext manifest.json", "", {"sha256": STORED.sha256}),
    ] == [(one.name, one.uri, dict(one.digest)) for one in definition.resolved_dependencies]
    builder = predicate.run_details.builder
    assert builder.id.endswith(KEY.key_id)
    assert manifest.versions == dict(builder.version)


def test_the_same_manifest_and_key_give_the_same_bytes() -> None:
    """A run that takes up where another was killed must find nothing to change."""
    assert DATA == provenance.encode(MANIFEST, STORED.sha256, KEY)
    provenance.verify(DATA, STORED, TRUSTED)


def test_it_is_written_once_and_mended(tmp_path: Path) -> None:
    """Right, it stays, also when a trusted home of another key wrote it; wrong, it is replaced."""
    store = LocalStore(tmp_path)
    assert not provenance.check(store, DIRECTORY, STORED, TRUSTED)
    key = provenance.write(store, DIRECTORY, STORED, KEY, TRUSTED)
    assert f"{DIRECTORY}/provenance.dsse.json" == key

    def stored() -> bytes:
        found = store.get_bytes(key)
        assert found
        return found.data

    assert DATA == stored()
    assert provenance.check(store, DIRECTORY, STORED, TRUSTED)
    both = {KEY.public_key, STRANGER.public_key}
    provenance.write(store, DIRECTORY, STORED, STRANGER, both)
    assert DATA == stored()
    for wrong in (b"", provenance.encode(MANIFEST, STORED.sha256, STRANGER)):
        store.put_bytes(key, wrong)
        provenance.write(store, DIRECTORY, STORED, KEY, TRUSTED)
        assert DATA == stored()


def changed(**fields: Any) -> bytes:
    return json.dumps({**json.loads(DATA), **fields}).encode()


def resigned(change: Callable[[dict[str, Any]], object]) -> bytes:
    """A statement that was changed, and signed by us."""
    payload = json.loads(base64.b64decode(json.loads(DATA)["payload"]))
    change(payload)
    text = json.dumps(payload).encode()
    signature = base64.b64encode(KEY.sign(provenance.pre_authentication_encoding(text))).decode()
    return changed(
        payload=base64.b64encode(text).decode(),
        signatures=[{"keyid": KEY.key_id, "sig": signature}],
    )


SIGNATURE = json.loads(DATA)["signatures"][0]["sig"]


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        (b"{}", SignatureError, "is not a valid Envelope"),
        (b"\xff", SignatureError, "not a valid JSON document"),
        (changed(payload=base64.b64encode(b"{}").decode()), SignatureError, "was changed"),
        (changed(payload="no base64"), SignatureError, "was changed"),
        (changed(payloadType="application/json"), SignatureError, "payloadType"),
        (changed(signatures=[]), SignatureError, "signatures"),
        (
            changed(signatures=[{"keyid": KEY.key_id, "sig": SIGNATURE[:-4]}]),
            SignatureError,
            "was changed",
        ),
        (
            provenance.encode(MANIFEST, STORED.sha256, STRANGER),
            SignatureError,
            f"not signed by a key that is trusted here .it names '{STRANGER.key_id}'",
        ),
        (provenance.encode(MANIFEST, "0" * 64, KEY), ManifestError, "of other files"),
        (resigned(lambda said: said["subject"].pop()), ManifestError, "of other files"),
        (resigned(lambda said: said.update(_type="x")), ManifestError, "of other files"),
        (resigned(lambda said: said.update(predicateType="x")), ManifestError, "of other files"),
    ],
)
def test_a_wrong_one_is_refused(data: bytes, error: type[Exception], said: str) -> None:
    """Whoever trusts it trusts it about these files."""
    with pytest.raises(error, match=said):
        provenance.verify(data, STORED, TRUSTED)


def test_what_a_later_release_says_more_is_no_mistake() -> None:
    """Only what it is about must be known."""
    provenance.verify(resigned(lambda said: said["predicate"].update(more=1)), STORED, TRUSTED)


def test_a_signature_is_tried_with_the_key_that_it_names_alone() -> None:
    """Anybody can write many, about megabytes, and each try hashes all of them."""
    trusted = [STRANGER.public_key, KEY.public_key]
    ours = {"keyid": KEY.key_id, "sig": SIGNATURE}
    strange = {"keyid": "\x1b]0;x\n" + "k" * 1000, "sig": SIGNATURE}
    provenance.verify(changed(signatures=[strange, ours]), STORED, trusted)
    with pytest.raises(SignatureError, match="was changed") as caught:
        provenance.verify(changed(signatures=[strange]), STORED, trusted)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (changed(signatures=[{"keyid": KEY.key_id, "sig": SIGNATURE}] * 9), "signatures"),
        (DATA + b" " * 8 * 1024 * 1024, "provenance ends at 8388608"),
    ],
    ids=["signatures", "bytes"],
)
def test_what_is_hashed_before_it_is_believed_is_bounded(data: bytes, said: str) -> None:
    """Who writes to the store must not keep a reader busy."""
    with pytest.raises(SignatureError, match=said):
        provenance.verify(data, STORED, [KEY.public_key])
