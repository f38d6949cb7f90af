"""Executor mode: vLLM's own ranks write their files, and end together when one of them does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

# Rank 1 does it, while rank 0 would go on for ten minutes.
FAILING = ("one fails", "one is killed", "one fails before it loads", "one does not come")


@pytest.fixture(scope="session")
def cases(
    tiny_models: Path, tmp_path_factory: pytest.TempPathFactory, run_script: Any
) -> dict[str, Any]:
    """What came of each run of executor_cases.py."""
    out = tmp_path_factory.mktemp("executor")
    run_script("executor_cases.py", tiny_models, out / "work", out / "cases.json")
    return json.loads((out / "cases.json").read_text())


@pytest.mark.parametrize(("name", "size"), [("one", 1), ("two", 2)])
def test_ranks_write_what_virtual_ranks_do(cases: dict[str, Any], name: str, size: int) -> None:
    """The same record of the same bytes, but for how they were made and how long it took.

    That it is so for every architecture, test_byte_identity and test_quantized show.
    """
    executor, virtual = cases[name]["result"], cases[f"virtual {name}"]["result"]
    assert size == len(executor["files"])
    assert ("executor", "virtual") == (executor.pop("sharding"), virtual.pop("sharding"))
    stages = {"configure", "start", "load", "census", "write", "store"}
    assert stages == set(executor.pop("seconds")) == {"start", *virtual.pop("seconds")}
    assert virtual == executor


def test_ranks_tell_how_far_they_are(cases: dict[str, Any]) -> None:
    """Until they are there, that they are awaited; then what all of them have done."""
    said = "\n".join(cases["encrypted"]["said"])
    assert "starting vLLM's ranks" in said
    assert "2 of 2 ranks" in said
    for rank in (0, 1):
        assert f"rank {rank}/2: 24 tensors" in said


@pytest.mark.parametrize("name", FAILING)
def test_a_rank_that_fails_ends_the_others_within_seconds(cases: dict[str, Any], name: str) -> None:
    """And leaves neither processes nor files."""
    case = cases[name]
    assert "WorkerError" == case["error"]
    assert case["seconds"] < 10
    assert 0 == case["processes left"]
    assert [] == case["root"] == case["scratch"]
    assert not case["variable"]


@pytest.mark.parametrize("name", ["one fails", "one fails before it loads"])
def test_the_error_begins_with_the_rank_and_its_own_traceback(
    cases: dict[str, Any], name: str
) -> None:
    """vLLM says that a process failed, and to see its log."""
    message = cases[name]["message"]
    first, second, *_, last = message.strip().splitlines()
    assert "tiny/llama llama: rank 1 of 2 failed: ZeroDivisionError: made to fail" == first
    assert "Traceback (most recent call last):" == second
    assert "ZeroDivisionError: made to fail" == last


def test_a_killed_rank_is_named_with_its_signal(cases: dict[str, Any]) -> None:
    """Nobody but the kernel says why; most often it is the memory."""
    message = cases["one is killed"]["message"]
    assert message.startswith("tiny/llama llama: rank 1 of 2 was killed by SIGKILL before its file")
    assert "memory is full" in message


def test_ranks_that_do_not_meet_are_ended(cases: dict[str, Any]) -> None:
    """vLLM would wait for ever for a rank that hangs on the way to the others."""
    message = cases["one does not come"]["message"]
    assert "vLLM's 2 ranks did not find one another within 4 s and were ended" in message


def test_the_only_rank_fails_as_one_of_several(cases: dict[str, Any]) -> None:
    """It is in the worker's own process."""
    message = cases["the only one fails"]["message"]
    assert message.startswith("tiny/llama llama: rank 0 of 1 failed: ZeroDivisionError: made to")
    assert "Traceback (most recent call last):" in message


def test_room_is_needed_for_all_ranks_at_once(cases: dict[str, Any]) -> None:
    """Virtual ranks need it for two of them."""
    case = cases["scratch"]
    assert "PreflightError" == case["error"]
    needed = 2 * cases["bytes of a rank"] + 2 * 256 * 1024
    assert case["message"].startswith(f"tiny/llama llama: the shards take {needed:,} bytes")


def test_an_incomplete_snapshot_is_refused_by_its_rank(cases: dict[str, Any]) -> None:
    """The same checks are made as of virtual ranks."""
    case = cases["incomplete"]
    assert "PreflightError" == case["error"]
    assert "has no values, or not all, for model.layers.1.self_attn.qkv_proj" in case["message"]


def test_cuda_on_a_host_without_is_refused_before_anything_starts(cases: dict[str, Any]) -> None:
    """The ranks are where the artifact is to be reloaded."""
    case = cases["no cuda"]
    assert "PreflightError" == case["error"]
    assert "reload_device is cuda with tensor_parallel_size=2" in case["message"]
    assert case["seconds"] < 1


def test_an_encrypted_build_has_the_tensors_of_the_plain_one(cases: dict[str, Any]) -> None:
    """Of ranks that are started as in production, and find our plugin by its entry point."""
    assert "result" in cases["encrypted"], cases["encrypted"]
    assert cases["encrypted"]["tensors"]
    plain = {file["sha256"] for file in cases["two"]["result"]["files"]}
    assert plain.isdisjoint(file["sha256"] for file in cases["encrypted"]["result"]["files"])


def test_the_key_reaches_the_ranks_by_a_private_file_alone(cases: dict[str, Any]) -> None:
    """Neither their arguments nor their environment, which other processes can read, show it."""
    seen = cases["encrypted"]["seen"]
    assert seen["looked at"] >= 2
    assert [] == seen["secrets"]
    assert ["600"] == seen["modes"]
