"""The task `encrypt`: whole files or none, with little memory, and without vLLM."""

from __future__ import annotations

import json
from typing import Any

import pytest

FILES = [
    "model-rank-000.tensors",
    "model-rank-001.tensors",
    "adapters/one/adapter_model.tensors",
]
DIRECTORY = "vllm/m/v1-hidden-encrypted"
LEFT = sorted(f"{DIRECTORY}/{name}" for name in FILES)


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory, run_script: Any) -> dict[str, Any]:
    """What came of each run of encrypt_task_cases.py."""
    out = tmp_path_factory.mktemp("encrypt")
    run_script("encrypt_task_cases.py", out / "work", out / "cases.json")
    return json.loads((out / "cases.json").read_text())


@pytest.fixture(scope="session")
def disk(cases: dict[str, Any]) -> dict[str, Any]:
    """Two ranks' shards and an adapter, from a folder to a folder."""
    return cases["on_disk"]


@pytest.fixture(scope="session")
def s3(cases: dict[str, Any]) -> dict[str, Any]:
    """The same within a bucket."""
    return cases["in_s3"]


def test_every_file_is_encrypted_and_tensorizer_reads_it(disk: dict[str, Any]) -> None:
    """Adapters too, which vLLM leaves in the clear."""
    whole = disk["whole"]
    assert FILES == [file["path"] for file in whole["result"]["files"]]
    assert [True, True, True] == whole["loads"]


def test_the_result_names_what_is_in_the_files(disk: dict[str, Any]) -> None:
    """The manifest is made of it: sizes and hashes, and tensors as in the plaintext."""
    result = disk["whole"]["result"]
    for file in result["files"]:
        found = disk["whole"]["digests"][file["path"]]
        assert {"path": file["path"], **found} == file
    for plain, hidden in zip(disk["whole"]["plain"], result["tensors"], strict=True):
        assert plain["path"] == hidden["path"]
        for one, two in zip(plain["tensors"], hidden["tensors"], strict=True):
            assert one["sha256"] != two["sha256"]
            assert one == {**two, "sha256": one["sha256"]}


def test_several_files_are_encrypted_at_once(disk: dict[str, Any]) -> None:
    """As many as there are cores; one file is hashed by two threads, and no faster than these."""
    assert min(2, disk["whole"]["cores"]) <= disk["whole"]["at once"]


def test_the_log_says_how_fast(disk: dict[str, Any]) -> None:
    """Bytes a second of each file, for the person who asks why a build is slow."""
    assert 3 == len(disk["whole"]["log"]) - sum("left behind" in x for x in disk["whole"]["log"])
    assert all(line.endswith(("B/s", "left behind")) for line in disk["whole"]["log"])


def test_the_same_files_give_the_same_bytes(disk: dict[str, Any]) -> None:
    """Of two runs of a build the first one's manifest stands, so the second may change nothing."""
    assert disk["again"]


def test_a_killed_run_leaves_no_file_and_nothing_that_the_next_does_not_sweep(
    disk: dict[str, Any],
) -> None:
    """SIGKILL in the midst of a tensor that waits in scratch."""
    killed = disk["killed"]
    assert {"signal": 9, "halves": True, "second": None, "scratch": True} == killed
    whole = disk["whole"]
    assert (LEFT, [], []) == (whole["root"], whole["scratch"], whole["halves"])


def test_encrypted_files_get_another_key(disk: dict[str, Any]) -> None:
    """Their tensors' hashes stay, which is how it is known that they are the same."""
    assert {"tensors": True, "other bytes": True, "loads": [True] * 3} == disk["anew"]


@pytest.mark.parametrize(
    ("case", "error", "says"),
    [
        ("other", "WorkerError", "is not the file that was to be encrypted: tensor '.w0'"),
        ("no key", "WorkerError", "m v1: the worker was given no data key"),
        ("short key", "WorkerError", "the data key has 31 bytes, and 32 are needed"),
        ("wrong old key", "WorkerError", "chunk 0 of tensor '.w0' was changed, or encrypted with"),
        ("encrypted already", "WorkerError", "is encrypted already; encrypt the plaintext"),
        ("gone", "StoreError", "gone.tensors does not exist"),
    ],
)
def test_what_cannot_be_encrypted_is_told_and_leaves_nothing(
    disk: dict[str, Any], case: str, error: str, says: str
) -> None:
    """No file in its place, no half of one, nothing in scratch; nor of another file beside it."""
    found = disk[case]
    assert (error, [], [], []) == (
        found["error"],
        found["stored"],
        found["halves"],
        found["scratch"],
    )
    assert says in found["message"]


def test_two_workers_do_not_write_one_directory(disk: dict[str, Any]) -> None:
    """The second is told to come again, and finds it complete."""
    assert "WorkerBusyError" == disk["busy"]["error"]


def test_an_object_is_encrypted_to_an_object_reading_each_byte_once(s3: dict[str, Any]) -> None:
    """Streamed: no plaintext lies in scratch, which may be another disk with other readers."""
    whole = s3["whole"]
    assert whole["as on a disk"]
    read, size = whole["read"]
    assert size == read
    assert (LEFT, [], 0) == (whole["root"], whole["scratch"], whole["uploads"])


def test_an_object_that_is_another_one_aborts_its_upload(s3: dict[str, Any]) -> None:
    """Of an upload that is not completed nothing is seen, and everything is paid for."""
    other = s3["other"]
    assert "is not the file that was to be encrypted" in other["message"]
    assert ([], 0) == (other["stored"], other["uploads"])


def test_memory_is_bounded_with_four_files_at_once(cases: dict[str, Any]) -> None:
    """Nor are torch, vLLM and tensorizer there, of which the first alone takes 200 MiB."""
    found = cases["memory"]
    assert found["size"] > 900 << 20
    assert found["peak"] < 300 << 20
    assert [] == found["heavy"]


def test_memory_is_bounded_with_an_upload(s3: dict[str, Any]) -> None:
    """Which has 144 MiB of parts on their way."""
    assert s3["alone"]["peak"] < 300 << 20
    assert [] == s3["alone"]["heavy"]


def test_no_key_is_told(cases: dict[str, Any]) -> None:
    """In no message, result or line of the log."""
    assert [] == cases["secrets"]
