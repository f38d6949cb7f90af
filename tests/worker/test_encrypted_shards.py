"""With `encryption: only` no file ever holds a plaintext tensor, at whatever moment one looks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

SHARDS = ["vllm/tiny/llama/model-rank-000.tensors", "vllm/tiny/llama/model-rank-001.tensors"]


@pytest.fixture(scope="session")
def cases(encrypted: Path) -> dict[str, Any]:
    """What came of each run of encrypted_shard_cases.py."""
    return json.loads((encrypted.parent / "cases.json").read_text())


def stored(case: dict[str, Any]) -> list[str]:
    """What is in the root, without the store's own locks."""
    return [name for name in case["root"] if not name.startswith(".tmp-")]


def test_no_file_shows_a_tensor(cases: dict[str, Any]) -> None:
    """Bytes of every tensor of the snapshot, looked for in everything below root and scratch.

    And in each write to any file, of what is written over a moment later. The same search finds
    all of them where shards are written in plaintext.
    """
    assert SHARDS == stored(cases["only"])
    assert [] == cases["only"]["shown"] == cases["only"]["written"]
    assert cases["tensors"] == cases["plain"]["shown"] == cases["plain"]["written"]


def test_nothing_is_written_elsewhere(cases: dict[str, Any]) -> None:
    """Every file that the process opened to write, temporary ones too."""
    assert ["model-rank-000.tensors", "model-rank-001.tensors"] == [
        Path(name).name for name in cases["only"]["opened"]
    ]
    assert [] == cases["only"]["opened elsewhere"]


@pytest.mark.parametrize("stage", ["loading 0", "writing 0", "storing 0", "writing 1", "storing 1"])
def test_no_file_of_a_killed_run_shows_a_tensor(cases: dict[str, Any], stage: str) -> None:
    """SIGKILL while a rank is loaded, written, read back and stored."""
    killed = cases["killed"][f"True {stage}"]
    assert 9 == killed["signal"]
    assert [] == killed["shown"]
    assert (stage != "loading 0") == any(".tensors" in name for name in killed["written"])


def test_the_search_finds_tensors_of_a_killed_run_in_plaintext(cases: dict[str, Any]) -> None:
    """Otherwise the test above would pass for a search that finds nothing."""
    assert cases["tensors"] == cases["killed"]["False storing 0"]["shown"]


def test_shards_written_encrypted_have_the_tensors_of_those_that_were_encrypted(
    cases: dict[str, Any],
) -> None:
    """Names, kinds, types, shapes, sizes and hashes: by two ways the same encrypted build."""
    only = cases["only"]["result"]
    for shard, file in zip(only["shards"], cases["both"]["tensors"], strict=True):
        assert (shard["file"], shard["tensors"]) == (file["path"], file["tensors"])
    sizes = [file["size"] for file in only["files"]]
    assert sizes == [file["size"] for file in cases["both"]["files"]]
    plain = cases["plain"]["result"]
    for field in ("dtype", "architecture", "census", "tied", "stock_vllm", "versions"):
        assert plain[field] == only[field]


def test_a_build_is_written_to_the_same_bytes_again(cases: dict[str, Any]) -> None:
    """As plaintext shards are: half a build is completed, and two runs do not contradict."""
    assert cases["again"]


def test_a_new_key_gives_the_shards_that_it_would_have_given(cases: dict[str, Any]) -> None:
    """Encrypted anew, without loading the model: the very bytes of a build with that key."""
    assert {"tensors": True, "encrypted anew": True} == cases["new key"]


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("flipped", "model-rank-000.tensors reads back differently than it was written: chunk 0 "),
        ("other rank", "model-rank-000.tensors holds other tensors than were encrypted into it"),
        ("no key", "tiny/llama llama: the worker was given no data key"),
        ("short key", "the data key has 30 bytes, and 32 are needed"),
    ],
)
def test_what_is_not_right_is_not_stored(cases: dict[str, Any], case: str, says: str) -> None:
    """Damage on the scratch disk, another rank's whole file, and no key to speak of."""
    assert "WorkerError" == cases[case]["error"]
    assert says in cases[case]["message"]
    assert [] == stored(cases[case]) == cases[case]["scratch"]
