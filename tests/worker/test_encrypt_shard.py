"""A shard is encrypted as tensorizer would, and nobody reads it without the key, or damaged.

What tensorizer itself does not see is caught by the hash of the whole file, which the signed
manifest holds: each attack here says who sees it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

DAMAGED = " is not as tensorizer wrote it, and was not encrypted: "

# With and without tensorizer's `verify_hash`, which vLLM leaves off.
REFUSED = {
    "magic": "ValueError",
    "version": "InvalidVersionError",
    "flag": "CryptographyError",
    "a tensor more": "ValueError",
    "name in the index": "ValueError",
    "offset in the index": "UnicodeDecodeError",
    "header size": "AssertionError",
    "header name": "ValueError",
    "nonce": "CryptographyError",
    "MAC": "CryptographyError",
    "second MAC": "CryptographyError",
    "ciphertext": "CryptographyError",
    "second chunk": "CryptographyError",
    "cut in the last tensor": "CryptographyError",
    "cut by a chunk": "error",
    "data of two tensors exchanged": "CryptographyError",
    "chunks exchanged": "CryptographyError",
    "chunks exchanged with MACs": "CryptographyError",
}
# Not seen without `verify_hash`: other tensors, or the same from another file.
VERIFIED = {
    "header module": "same",
    "header kind": "same",
    "header hash": "same",
    "tensors exchanged with nonce and MAC": "other",
    "tensors exchanged with hashes too": "other",
}
# Not seen by tensorizer at all. A tensor is missing, or reads as zeros.
UNSEEN = {
    "a tensor fewer": "other",
    "header size beyond the file": "other",
    # The rest give the tensors that were encrypted, from a file that is not the signed one.
    "size of data": "same",
    "kind in the index": "same",
    "shape in the index": "same",
    "unused index": "same",
    "chunk size": "same",
    "end": "same",
    "cut at the end": "same",
    "longer": "same",
    "another encryption of it": "same",
    "a tensor of another encryption": "same",
}


@pytest.fixture(scope="session")
def found(
    tmp_path_factory: pytest.TempPathFactory, run_script: Callable[..., None]
) -> dict[str, Any]:
    """What encrypt_cases.py found."""
    out = tmp_path_factory.mktemp("encrypted")
    run_script("encrypt_cases.py", out / "files", out / "cases.json")
    return json.loads((out / "cases.json").read_text())


@pytest.fixture(scope="session")
def equality(found: dict[str, Any]) -> dict[str, Any]:
    """A shard with every type and every size of a chunk, encrypted by us and by tensorizer."""
    return found["equality"]


def test_tensorizer_reads_every_tensor_with_the_key(equality: dict[str, Any]) -> None:
    """With every hash verified, as a mapping and, as vLLM does, into a module."""
    assert equality["loads"]
    assert equality["loads into a module"]


def test_all_but_nonces_and_ciphertext_is_what_tensorizer_writes(equality: dict[str, Any]) -> None:
    """Byte for byte, so that no reader can tell whose file it is, however it was made."""
    theirs, *ours = equality["layout"]
    assert [theirs] * 4 == ours


def test_the_size_is_known_before_the_first_byte(equality: dict[str, Any]) -> None:
    """A store wants it: an upload in parts is planned by it."""
    known, written, stored = equality["size"]
    assert known == written
    assert known == stored


def test_tensors_are_described_as_in_the_plaintext(equality: dict[str, Any]) -> None:
    """The manifest of the encrypted artifact is made of this."""
    assert equality["originals"] == equality["described"]
    assert len(equality["described"]) == 16


def test_hashes_are_readable_without_a_key(equality: dict[str, Any]) -> None:
    """And are others than in the plaintext, since a header is hashed with its tensor."""
    assert equality["stored hashes"] == equality["hashes"]
    assert equality["hashes of originals"].keys() == equality["hashes"].keys()
    assert not set(equality["hashes of originals"].values()) & set(equality["hashes"].values())


def test_the_marker_stays(equality: dict[str, Any]) -> None:
    """vLLM would take the file for a Hugging Face model without it."""
    assert equality["marker"]
    assert equality["marker is known"]


def test_no_nonce_comes_twice(equality: dict[str, Any]) -> None:
    """Two chunks under one nonce and key give away both: of a file, with this key and another."""
    nonces, different = equality["nonces"]
    assert nonces > 100
    assert nonces == different


def test_a_file_is_encrypted_to_the_same_bytes_again(equality: dict[str, Any]) -> None:
    """Of two runs of a build, or one after it was killed, none writes what the other does not.

    Also from one thread, with less memory.
    """
    assert equality["again"]


def test_a_file_gets_another_key_without_its_plaintext(equality: dict[str, Any]) -> None:
    """As if it had been written with that key: what rotating a key is."""
    assert {"loads": True, "tensors": True, "as written": True} == equality["changed key"]


def test_a_module_is_written_encrypted(equality: dict[str, Any]) -> None:
    """For builds whose plaintext is never written; read back by tensorizer's own parser."""
    assert {"loads": True, "tensors": True, "handed on": True} == equality["direct"]


def test_the_key_is_not_in_the_file(equality: dict[str, Any]) -> None:
    """It is 32 bytes between structures that are written by hand."""
    assert not equality["key in file"]


def test_a_tensor_without_elements_is_encrypted(found: dict[str, Any]) -> None:
    """tensorizer reads it, though its own writer stops at one."""
    assert found["empties"] == {"loads": True, "direct": True, "tensorizer": "TypeError"}


def test_every_version_of_the_format_gets_the_one_that_knows_encryption(
    found: dict[str, Any],
) -> None:
    """By what is in it, a file has version 1, 2 or 4; adapters, state dicts, have no marker."""
    assert {"numpy": [1, 3], "opaque": [2, 3], "marked": [4, 4]} == found["versions"]


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("none", "CryptographyError: Tensor is encrypted, but decryption was not requested"),
        ("wrong", "CryptographyError: Tensor decryption failed"),
        ("short", "ValueError: Invalid decryption key length"),
        ("plain with key", "CryptographyError: Tensor decryption was requested, but the file"),
    ],
)
def test_it_is_not_read_without_the_key(found: dict[str, Any], key: str, says: str) -> None:
    """The reason to encrypt."""
    assert found["keys"][key].startswith(says)


def test_a_key_of_another_length_is_refused_before_anything_is_read(found: dict[str, Any]) -> None:
    """A passphrase or half a file of a key would encrypt under something nobody meant."""
    assert [
        f"{found['keys']['plain']} was not encrypted: the data key has {size} bytes, and 32 are "
        "needed; give the whole key, as it was made"
        for size in (31, 33, 0, 16)
    ] == found["keys"]["ours"]


def test_the_key_is_in_no_message(found: dict[str, Any]) -> None:
    """Not when it is refused, nor in a traceback from below it, nor in what is handed out."""
    assert DAMAGED in found["keys"]["refused"]
    assert [] == found["keys"]["shows the key"]


def test_every_attack_is_listed(found: dict[str, Any]) -> None:
    """With who sees it."""
    assert found["attacks"].keys() == REFUSED.keys() | VERIFIED.keys() | UNSEEN.keys()


@pytest.mark.parametrize(("attack", "error"), REFUSED.items())
def test_tensorizer_refuses(found: dict[str, Any], attack: str, error: str) -> None:
    """Whether or not hashes are verified."""
    for answer in found["attacks"][attack].values():
        assert error == answer.partition(":")[0]


@pytest.mark.parametrize(("attack", "unverified"), VERIFIED.items())
def test_tensorizer_refuses_only_with_hashes(
    found: dict[str, Any], attack: str, unverified: str
) -> None:
    """Each tensor is authentic on its own; its name and place are in its hash alone."""
    answers = found["attacks"][attack]
    assert "HashMismatchError" == answers["verified"].partition(":")[0]
    assert unverified == answers["not verified"]


@pytest.mark.parametrize(("attack", "reads_as"), UNSEEN.items())
def test_only_the_hash_of_the_file_sees(found: dict[str, Any], attack: str, reads_as: str) -> None:
    """tensorizer reads them without a word. If it refuses one day, it moves up in these lists."""
    assert {"verified": reads_as, "not verified": reads_as} == found["attacks"][attack]


def test_no_other_flipped_bit_changes_a_tensor_unseen(found: dict[str, Any]) -> None:
    """One in each byte of the file, hashes verified. One in a header's size may lead behind it.

    What is read there says that the tensor has no data, and tensorizer makes zeros, for which it
    verifies nothing: nor for vLLM's marker, which is such a tensor.
    """
    silent = found["every_flip"]["silent"]
    assert found["every_flip"]["flipped"] > 900
    assert 0 == silent["other"]
    assert silent["other, in the size of a header"] > 0
    assert 1 >= silent["other, marker"]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("data", "tensor '.a' has SHA-256 "),
        ("index", "its index and the header of tensor 'oa' disagree"),
        ("header", "its index and the header of tensor '.a' disagree"),
        ("longer", "it has 262685 bytes, and 262684 by its index"),
        ("cut", "it has 262664 bytes, and 262684 by its index"),
        ("cut while read", "it ends inside tensor '.w'"),
        ("empty", "it is no tensorizer file"),
        ("not tensorizer's", "it is no tensorizer file"),
    ],
)
def test_a_damaged_plaintext_is_not_encrypted(
    found: dict[str, Any], damage: str, says: str
) -> None:
    """Encrypted, with a new hash over it, no one could tell the damage any more."""
    answer = found["plain_damage"][damage]
    assert DAMAGED + says in answer
    assert "make the file again" in answer


def test_no_flipped_byte_of_a_plaintext_is_encrypted(found: dict[str, Any]) -> None:
    """`same`: four CRCs, beside which there are SHA-256, and 8 bytes that have no meaning."""
    assert {"WorkerError", "same"} == found["plain_damage"]["flips"].keys()
    assert 4 * 4 + 8 == found["plain_damage"]["flips"]["same"]
    assert ["WorkerError"] == found["plain_damage"]["cuts"]


def test_an_encrypted_file_is_not_encrypted_again(found: dict[str, Any]) -> None:
    """Its MACs would be taken for damage, with the wrong advice."""
    assert "is encrypted already" in found["plain_damage"]["encrypted already"]


def test_another_file_in_the_plaintexts_place_is_refused(found: dict[str, Any]) -> None:
    """Its own hashes are right; only those that were taken when ours was written tell."""
    alone, with_expected = found["plain_damage"]["put in its place"]
    assert "other" == alone
    assert "is not the file that was to be encrypted: tensor '.a' is another one" in with_expected


def test_tensors_that_are_missing_or_too_many_are_refused(found: dict[str, Any]) -> None:
    """And the tensors as they were written are not."""
    damage = found["plain_damage"]
    assert "same" == damage["expected"]
    assert "tensor 'more' is another one" in damage["expected more"]
    assert "tensor '.a' is another one" in damage["expected less"]


def test_a_plaintext_with_an_old_key_is_refused(found: dict[str, Any]) -> None:
    """Whoever gives one believes that nobody could read the file."""
    assert "is not encrypted, and there is a key" in found["plain_damage"]["not encrypted"]


def test_no_flipped_byte_of_an_encrypted_file_is_encrypted_anew(found: dict[str, Any]) -> None:
    """`same`: the CRC of vLLM's marker, and 8 bytes that have no meaning.

    Reading back what was written is as strict, but for bytes that are in no tensor.
    """
    hidden = found["hidden_damage"]
    assert ["same", "same"] == hidden["whole"]
    assert {"WorkerError", "same"} == hidden["flips"]["anew"].keys()
    assert 4 + 8 == hidden["flips"]["anew"]["same"]
    assert {"WorkerError", "same"} == hidden["flips"]["read"].keys()
    assert ["WorkerError"] == hidden["cuts"]


def test_tensors_that_were_exchanged_are_not_encrypted_anew(found: dict[str, Any]) -> None:
    """Each is authentic, with its nonce and MAC: only the hash over its name tells."""
    for answer in found["hidden_damage"]["exchanged"]:
        assert "tensor '.a' has SHA-256 " in answer


def test_the_old_key_must_be_the_files(found: dict[str, Any]) -> None:
    """A wrong one would make noise of it, under a new MAC."""
    hidden = found["hidden_damage"]
    for answer in hidden["wrong key"]:
        assert "chunk 0 of tensor '.a' was changed" in answer
    assert "is encrypted already" in hidden["no key"]
    assert "the data key has 31 bytes" in hidden["short key"]


def test_another_encrypted_file_in_its_place_is_refused(found: dict[str, Any]) -> None:
    """One of the same key has right MACs and hashes; the manifest's tensors tell."""
    assert "other" == found["hidden_damage"]["put in its place"]
    assert "is not the file that was to be encrypted" in found["hidden_damage"]["another"]


def test_the_plaintext_is_read_once(found: dict[str, Any]) -> None:
    """From a disk that is slower than a core, each read counts."""
    resources = found["resources"]
    assert resources["yielded"] > resources["file"]
    assert resources["read"] < 1.001 * resources["file"]


def test_nothing_is_left_of_what_waited_in_scratch(found: dict[str, Any]) -> None:
    """Also by one who stops in the middle; no thread goes on either."""
    assert ["big.tensors"] == found["resources"]["left"]
    assert [] == found["resources"]["threads"]


def test_a_full_disk_is_told_as_such(found: dict[str, Any]) -> None:
    """Tensors that do not fit into memory need room there."""
    assert "was not encrypted: File too large" in found["resources"]["full"]
    assert "its largest tensor must fit there" in found["resources"]["full"]


def test_memory_does_not_grow_with_the_shard(found: dict[str, Any]) -> None:
    """The whole process: without torch it stays under 300 MiB, and chunks are no larger than 2."""
    assert not found["memory"]["torch"]
    assert found["memory"]["size"] > 390 << 20
    assert found["memory"]["peak"] < 300 << 20
    assert 2 << 20 == found["resources"]["largest chunk"]
