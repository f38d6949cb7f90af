"""The task `shard` with its root in S3: one read, two shards in scratch, no half file."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.engine

KEYS = [f"vllm/tiny/big/model-rank-{rank:03d}.tensors" for rank in range(4)]


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory, run_script: Any) -> dict[str, Any]:
    """What came of each run of s3_shard_cases.py."""
    out = tmp_path_factory.mktemp("shard-s3")
    run_script("s3_shard_cases.py", out / "work", out / "cases.json")
    return json.loads((out / "cases.json").read_text())


def hashes(result: dict[str, Any]) -> list[str]:
    return [file["sha256"] for file in result["files"]]


def test_the_objects_are_the_files_that_a_folder_would_hold(cases: dict[str, Any]) -> None:
    """Where a build goes is not part of what it is."""
    plain = cases["plain"]
    assert cases["disk"]["files"] == plain["result"]["files"]
    assert dict(zip(KEYS, hashes(cases["disk"]), strict=True)) == plain["objects"]
    assert [] == plain["uploads"] == plain["scratch"]


def test_a_mirrored_snapshot_is_built_as_one_in_a_folder(cases: dict[str, Any]) -> None:
    """A worker on another machine has nothing but the root."""
    mirrored = cases["mirrored"]
    assert cases["disk"]["files"] == mirrored["result"]["files"]
    assert cases["disk"]["shards"] == mirrored["result"]["shards"]
    assert hashes(cases["disk"]) == [mirrored["objects"][key] for key in KEYS]
    assert any("came from the mirror" in line for line in mirrored["log"])


def test_a_rank_reads_its_own_part_of_a_mirrored_snapshot(cases: dict[str, Any]) -> None:
    """By ranges, each byte of the checkpoint about once over all ranks; the same files come of it.

    The embeddings are most of it, and each rank has its rows of them.
    """
    ranged = cases["ranged"]
    assert cases["disk"]["files"] == ranged["result"]["files"]
    assert cases["disk"]["shards"] == ranged["result"]["shards"]
    assert 0.9 * ranged["size"] <= ranged["result"]["source_bytes"] <= 1.1 * ranged["size"]
    # Only what is small was downloaded.
    assert not any("model.safetensors" in line for line in ranged["log"])


def test_ranks_that_are_built_apart_are_those_of_one_task(cases: dict[str, Any]) -> None:
    """As tasks on other machines, merged in any order."""
    timed = ("seconds", "source_bytes")
    one, apart = (
        {name: value for name, value in cases[case].items() if name not in timed}
        for case in ("disk", "apart")
    )
    assert one == apart


def test_scratch_holds_two_shards_at_most_and_one_is_stored_while_the_next_is_built(
    cases: dict[str, Any],
) -> None:
    """Wall time is the slower of the two, not their sum; room is for two shards, not for all."""
    assert 2 == cases["plain"]["most"]
    # The first has none before it.
    assert [False, True, True, True] == cases["plain"]["overlaps"]


def test_each_byte_of_scratch_is_read_once(cases: dict[str, Any]) -> None:
    """Verified and uploaded by the same read; tensorizer looks at the index before."""
    plain = cases["plain"]
    size = sum(file["size"] for file in plain["result"]["files"])
    index = 4 * (256 * 1024 + 64 * 1024)
    assert size <= plain["read"] <= size + index


def test_the_log_says_how_fast_each_rank_was_stored(cases: dict[str, Any]) -> None:
    """Bytes a second, for the person who asks why a build is slow."""
    lines = [line for line in cases["plain"]["log"] if "verified and stored at" in line]
    assert 4 == len(lines)
    assert all(line.endswith("B/s") for line in lines)


def test_damage_in_scratch_is_found_by_the_upload_and_not_stored(cases: dict[str, Any]) -> None:
    """The multipart upload is completed only when every tensor's hash agrees."""
    damaged = cases["damaged"]
    assert "WorkerError" == damaged["error"]
    assert "reads back differently than it was written" in damaged["message"]
    assert KEYS[:1] == list(damaged["objects"])
    assert [] == damaged["uploads"] == damaged["scratch"]


def test_a_killed_upload_is_aborted_by_the_next_run(cases: dict[str, Any]) -> None:
    """Parts of an upload that nobody completes are paid for, and no listing shows them."""
    killed, again = cases["killed"], cases["again"]
    assert 9 == killed["signal"]
    assert KEYS[:1] == list(killed["objects"])
    assert [f"killed/{KEYS[1]}"] == killed["uploads"]
    assert hashes(cases["disk"]) == hashes(again["result"]) == list(again["objects"].values())
    assert [] == again["uploads"] == again["scratch"]


def test_a_cancelled_run_aborts_its_upload(cases: dict[str, Any]) -> None:
    """SIGTERM is an exception in the worker, which leaves nothing half."""
    cancelled = cases["cancelled"]
    assert 143 == cancelled["exit"]
    assert set(cancelled["objects"]) <= set(KEYS[:2])
    assert [] == cancelled["uploads"] == cancelled["scratch"]
