from __future__ import annotations

import base64
import copy
import json
import multiprocessing
import os
import pickle
from pathlib import Path

import pytest
from nacl.signing import SigningKey

from tensorize_assets.core import jsonio, signing
from tensorize_assets.core.errors import SignatureError
from tensorize_assets.core.signing import KEY_VARIABLE, SecretKey

SEED = bytes(range(32))
KEY = SecretKey(SEED)
OTHER = SecretKey(bytes(32))
PAYLOAD: dict[str, jsonio.JsonValue] = {"model": "gpt2", "files": [{"path": "a", "size": 1}]}


@pytest.fixture(autouse=True)
def no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def resigned(document: dict[str, object]) -> bytes:
    return jsonio.canonical(document)  # pyright: ignore[reportArgumentType]


def test_a_signed_document_gives_its_payload_and_its_signer() -> None:
    """What is read after verification is exactly what was signed."""
    data = signing.sign("manifest", PAYLOAD, KEY)
    expected = signing.Verified(PAYLOAD, KEY.key_id, KEY.public_key)
    assert expected == signing.verify("manifest", data, {KEY.public_key})
    assert expected == signing.verify("manifest", data, None)


def test_a_signature_can_be_checked_with_nothing_but_ed25519_and_json() -> None:
    """Others verify artifacts without this package; the format is a promise."""
    document = json.loads(signing.sign("manifest", PAYLOAD, KEY))
    signature = document.pop("signature")
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    message = b"tensorize_assets/manifest/1\n" + text.encode() + b"\n"
    SigningKey(SEED).verify_key.verify(message, base64.b64decode(signature["signature"]))
    assert base64.b64encode(bytes(SigningKey(SEED).verify_key)).decode() == signature["public_key"]


def test_every_changed_byte_is_seen() -> None:
    """Tampering with one byte anywhere, the signature block included, must not pass."""
    data = signing.sign("manifest", PAYLOAD, KEY)
    for index in range(len(data)):
        changed = bytearray(data)
        changed[index] ^= 1
        with pytest.raises(SignatureError):
            signing.verify("manifest", bytes(changed), None)


@pytest.mark.parametrize("used_as", ["evidence", "channel"])
def test_a_document_never_passes_as_another_type(used_as: signing.DocumentType) -> None:
    """The reload check's key must not be able to speak for the builder by renaming a file."""
    data = signing.sign("manifest", PAYLOAD, KEY)
    with pytest.raises(SignatureError, match=f"does not fit its content as a {used_as}"):
        signing.verify(used_as, data, {KEY.public_key})


def test_a_valid_signature_by_an_unknown_key_is_refused_with_both_ids() -> None:
    """Anyone can make a key and sign; the list of trusted keys is what decides."""
    data = signing.sign("manifest", PAYLOAD, OTHER)
    with pytest.raises(SignatureError, match=f"{OTHER.key_id}.*trusted: {KEY.key_id}"):
        signing.verify("manifest", data, {KEY.public_key}, "root/manifest.json")
    with pytest.raises(SignatureError, match="trusted: none"):
        signing.verify("manifest", data, ())


def test_a_trusted_key_beside_a_foreign_signature_does_not_help() -> None:
    """Naming the trusted key while another one signed is the first thing to try."""
    document = json.loads(signing.sign("manifest", PAYLOAD, OTHER))
    document["signature"]["public_key"] = KEY.public_key
    document["signature"]["key_id"] = KEY.key_id
    with pytest.raises(SignatureError, match="does not fit its content"):
        signing.verify("manifest", resigned(document), {KEY.public_key})


def test_a_key_id_that_is_not_the_keys_is_refused() -> None:
    """People read the id, not the key."""
    document = json.loads(signing.sign("manifest", PAYLOAD, OTHER))
    document["signature"]["key_id"] = KEY.key_id
    with pytest.raises(SignatureError, match=f"but was signed with {OTHER.key_id}"):
        signing.verify("manifest", resigned(document), None)


@pytest.mark.parametrize(
    ("signature", "message"),
    [
        (None, "is not signed"),
        ("none", "is damaged"),
        ({"key_id": "x", "public_key": "", "signature": ""}, "is not a public key"),
        ({"key_id": "x", "public_key": KEY.public_key}, "is damaged: signature: Field required"),
        ({"key_id": "x", "public_key": KEY.public_key, "signature": "%"}, "does not fit"),
        ({"key_id": "x", "public_key": KEY.public_key, "signature": "AAAA"}, "does not fit"),
        # The neutral element of the curve: with it as a key, one signature fits any message.
        (
            {
                "key_id": "x",
                "public_key": base64.b64encode(b"\x01" + bytes(31)).decode(),
                "signature": base64.b64encode(b"\x01" + bytes(63)).decode(),
            },
            "does not fit",
        ),
    ],
)
def test_malformed_signatures_are_refused(signature: object, message: str) -> None:
    """Each must end in one message, not in an error of the library below."""
    document = {**PAYLOAD, "signature": signature}
    with pytest.raises(SignatureError, match=message):
        signing.verify("manifest", resigned(document), None, "root/manifest.json")


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"[]", b'{"a":"\\ud800","signature":null}', b'{"a":1,"a":1}']
)
def test_what_is_no_document_at_all_is_refused(data: bytes) -> None:
    """Readers catch one kind of error for a manifest they cannot believe."""
    with pytest.raises(SignatureError, match=r"root/manifest\.json"):
        signing.verify("manifest", data, None, "root/manifest.json")


def test_a_second_form_of_the_same_document_is_refused() -> None:
    """Evidence names a manifest by its hash: reformatted, it would be another manifest."""
    data = json.dumps(json.loads(signing.sign("manifest", PAYLOAD, KEY)), indent=1).encode()
    with pytest.raises(SignatureError, match="is not as it was written"):
        signing.verify("manifest", data, None)


def test_a_document_is_signed_once() -> None:
    """A payload with its own `signature` could not be told from the outer one."""
    with pytest.raises(SignatureError, match="has a field 'signature' already"):
        signing.sign("manifest", {"signature": {}}, KEY)


def test_a_malformed_trusted_key_is_named() -> None:
    """A typing error in the list must not read as an untrusted manifest."""
    data = signing.sign("manifest", PAYLOAD, KEY)
    with pytest.raises(SignatureError, match="the list of trusted keys holds 'ed25519:x'"):
        signing.verify("manifest", data, ["ed25519:x"])


def test_a_key_is_made_once_and_private(tmp_path: Path) -> None:
    """The same store must be signed with the same key by every later run."""
    path = tmp_path / "keys/signing.key"
    key = signing.load_or_create_signing_key(path)
    assert 0o600 == path.stat().st_mode & 0o777
    assert key.public_key == signing.load_or_create_signing_key(path).public_key
    assert ["signing.key"] == os.listdir(path.parent)
    assert 32 == len(base64.b64decode(path.read_text()))


@pytest.mark.fault(
    "Secrets", "a signing key that other users can open", "refused, with the command that mends it"
)
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_key_that_others_can_reach_is_refused_with_the_command(tmp_path: Path, mode: int) -> None:
    """Whoever read it can sign anything; a silent chmod would hide that."""
    path = tmp_path / "signing.key"
    signing.load_or_create_signing_key(path)
    path.chmod(mode)
    with pytest.raises(SignatureError, match=f"chmod 600 {path}"):
        signing.load_or_create_signing_key(path)


@pytest.mark.parametrize("text", [SEED.hex(), base64.b64encode(SEED).decode(), f" {SEED.hex()}\n"])
def test_a_key_is_read_as_hex_or_base64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Secret stores hand out either; the variable wins over the file."""
    path = tmp_path / "signing.key"
    path.touch(0o600)
    path.write_text(text)
    assert KEY.public_key == signing.load_or_create_signing_key(path).public_key
    path.write_text(bytes(32).hex())
    monkeypatch.setenv(KEY_VARIABLE, text)
    assert KEY.public_key == signing.load_or_create_signing_key(path).public_key
    monkeypatch.setenv(KEY_VARIABLE, "")
    assert OTHER.public_key == signing.load_or_create_signing_key(path).public_key


@pytest.mark.parametrize("text", ["", "s3cret", "z" * 64, "s3cret" * 1000, "é"])
def test_a_damaged_key_is_refused_without_quoting_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Half a key in a log is half a secret."""
    path = tmp_path / "signing.key"
    path.touch(0o600)
    path.write_text(text)
    with pytest.raises(SignatureError, match=f"file {path} holds no signing key") as caught:
        signing.load_or_create_signing_key(path)
    assert caught.value.__cause__ is None
    assert not text or text not in str(caught.value)
    if text:
        monkeypatch.setenv(KEY_VARIABLE, text)
        with pytest.raises(SignatureError, match=f"variable {KEY_VARIABLE} holds no") as caught:
            signing.load_or_create_signing_key(path)
        assert text not in str(caught.value)


def test_a_key_path_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    """An OSError would not name the way out."""
    (tmp_path / "file").touch()
    with pytest.raises(SignatureError, match=f"set {KEY_VARIABLE}"):
        signing.load_or_create_signing_key(tmp_path / "file/signing.key")


def test_processes_that_find_no_key_agree_on_one(tmp_path: Path) -> None:
    """Two first runs at once would otherwise sign with keys of which one is lost."""
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(8)

    def load(number: int) -> None:
        barrier.wait()
        key = signing.load_or_create_signing_key(tmp_path / "keys/signing.key")
        (tmp_path / f"id-{number}").write_text(key.key_id)

    processes = [fork.Process(target=load, args=(number,)) for number in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    ids = [(tmp_path / f"id-{number}").read_text() for number in range(8)]
    assert [ids[0]] * 8 == ids
    assert ["signing.key"] == os.listdir(tmp_path / "keys")


def test_a_key_does_not_show_its_secret() -> None:
    """Keys end in tracebacks, logs and configuration dumps by accident."""
    secrets = [SEED.hex(), base64.b64encode(SEED).decode(), repr(SEED)[2:-1]]
    for shown in (repr(KEY), str(KEY), f"{KEY}", f"{[KEY]}"):
        assert f"SecretKey(key_id='{KEY.key_id}')" in shown
        assert not any(secret in shown for secret in secrets)
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="is not pickled"):
            copied(KEY)
