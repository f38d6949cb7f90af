"""The reload check and our loader, reading from a real S3 server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

TASKS = ["s3", "s3 at 2", "presigned", "public", "cut", "dead in the middle", "dead", "nowhere"]
FINDINGS = ["gone", "replaced in the middle", "other config", "no config"]


@pytest.fixture(scope="session")
def cases(
    tiny_models: Path, tmp_path_factory: pytest.TempPathFactory, run_script: Any
) -> dict[str, Any]:
    """What came of each of the loads of s3_cases.py."""
    out = tmp_path_factory.mktemp("reload-s3")
    (out / "work").mkdir()
    run_script("s3_cases.py", tiny_models, out / "work", out / "cases.json")
    return json.loads((out / "cases.json").read_text())


def hashes(load: dict[str, Any]) -> dict[str, str]:
    return {name: tensor["sha256"] for name, tensor in load["tensors"].items()}


def built(cases: dict[str, Any], name: str) -> list[dict[str, str]]:
    return [
        {tensor["name"]: tensor["sha256"] for tensor in shard["tensors"]}
        for shard in cases["built"][name]["shards"]
    ]


@pytest.mark.parametrize(
    ("name", "shards", "source"),
    [
        ("s3", "one", "s3"),
        ("s3 at 2", "two", "s3"),
        ("presigned", "one", "presigned_url"),
        ("public", "one", "public_url"),
    ],
)
def test_an_artifact_is_streamed_and_answers(
    cases: dict[str, Any], name: str, shards: str, source: str
) -> None:
    """Every rank's tensors are the manifest's, and the evidence can say where they came from."""
    case = cases[name]
    assert case["error"] is None
    assert case["answers"]["logprobs_finite"]
    assert built(cases, shards) == [hashes(load) for load in case["loads"]]
    told = [(load["source"], load["part_retries"], load["restarts"]) for load in case["loads"]]
    assert [(source, 0, 0)] * len(built(cases, shards)) == told


@pytest.mark.parametrize("name", TASKS)
def test_no_process_shows_a_key_or_a_signature(cases: dict[str, Any], name: str) -> None:
    """Not in its arguments, not in its environment; tensorizer's curl shows a signed URL."""
    assert [] == cases[name]["leaks"]
    assert cases[name]["seen"] > 0


def test_ranks_of_their_own_were_looked_at(cases: dict[str, Any]) -> None:
    """They are told by name of a file how S3 is reached, so a key would have been seen there.

    The launcher started them, in a step that has the keys in its own environment.
    """
    assert cases["s3 at 2"]["told"] >= 2


def test_the_log_shows_neither(cases: dict[str, Any]) -> None:
    """vLLM logs its arguments."""
    assert cases["log"]["lines"] > 100
    assert [] == cases["log"]["leaks"]


@pytest.mark.parametrize("name", [*TASKS, *FINDINGS, "refused", "no bucket for it"])
def test_nothing_of_the_access_is_left(cases: dict[str, Any], name: str) -> None:
    """The file with the keys lives as long as the engine."""
    assert [] == cases[name]["left"]
    assert cases[name]["variable"] is None


def test_connections_cut_in_the_middle_are_counted(cases: dict[str, Any]) -> None:
    """The load goes on where it was, and says what it had to ask for again."""
    [load] = cases["cut"]["loads"]
    assert cases["cut"]["error"] is None
    assert built(cases, "one") == [hashes(load)]
    assert (2, 0) == (load["part_retries"], load["restarts"])


@pytest.mark.parametrize("name", ["dead in the middle", "dead"])
def test_a_store_that_is_gone_is_no_finding_about_the_artifact(
    cases: dict[str, Any], name: str
) -> None:
    """It would stand as failed evidence, where only another try is due."""
    raised = cases[name]["raised"]
    assert raised.startswith("StoreUnavailableError: ")
    assert "vllm/tiny/llama/" in raised
    assert "is the server up" in raised


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("refused", "the secret key does not belong to the access key"),
        ("no bucket for it", "make the bucket, or correct `root`"),
        ("nowhere", "/elsewhere/vllm/tiny/llama/model.tensors does not exist (404)"),
    ],
)
def test_wrong_keys_and_a_wrong_url_are_no_finding_either(
    cases: dict[str, Any], name: str, says: str
) -> None:
    """They would fail an artifact that is whole, over an earlier proof that it is."""
    raised = cases[name]["raised"]
    assert raised.startswith("StoreError: ")
    assert says in raised


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gone", "llama/model.tensors does not exist; rank 0: StoreError: cannot get s3://"),
        ("replaced in the middle", "llama/model.tensors was replaced while it was loaded; rank 0"),
        ("other config", "llama/config.json has 2 bytes with SHA-256 "),
        ("no config", "llama/config.json does not exist, and the manifest names it"),
    ],
)
def test_a_file_that_is_gone_or_another_is_a_finding(
    cases: dict[str, Any], name: str, says: str
) -> None:
    """Nobody can serve it: that has to stand as evidence."""
    case = cases[name]
    assert case["answers"] is None
    assert case["error"].startswith("s3://artifacts/team a/100%25d/vllm/tiny/")
    assert says in case["error"]


@pytest.mark.parametrize(
    "name", ["whole", "four readers", "vllm's own settings", "tensorizer's own settings"]
)
def test_the_loader_finds_its_access(cases: dict[str, Any], name: str) -> None:
    """In the file named by the environment, or as users of vLLM's and tensorizer's settings do."""
    assert "loaded" == cases[name]["error"]
    assert built(cases, "one") == [hashes(cases[name]["load"])]


def test_a_stream_that_breaks_for_good_is_begun_again(cases: dict[str, Any]) -> None:
    """And nothing of the first beginning is left in the model."""
    case = cases["begun again"]
    assert "loaded" == case["error"]
    assert 1 == case["load"]["restarts"]
    assert built(cases, "one") == [hashes(case["load"])]


def test_a_store_that_is_busy_at_first_is_asked_again(cases: dict[str, Any]) -> None:
    """One reset at the first look must not end an engine."""
    case = cases["not there at first"]
    assert "loaded" == case["error"]
    assert 0 == case["load"]["restarts"]
    assert built(cases, "one") == [hashes(case["load"])]


def test_a_url_whose_time_is_over_is_signed_anew(cases: dict[str, Any]) -> None:
    """A load may take longer than a signature, or a session token, lives."""
    case = cases["signed for too short"]
    assert "loaded" == case["error"]
    assert ("presigned_url", 0) == (case["load"]["source"], case["load"]["restarts"])
    assert built(cases, "one") == [hashes(case["load"])]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("looking for the file", "cannot get s3://artifacts/whole.tensors at http://127.0.0.1:"),
        ("reading from the beginning", "reading s3://artifacts/whole.tensors "),
    ],
)
def test_the_log_says_what_is_tried_again(cases: dict[str, Any], what: str, says: str) -> None:
    """A load that is slow for its store's sake looks like one that hangs."""
    lines = [line for line in cases["log"]["again"] if what in line and says in line]
    assert lines
    assert f"rank 0: {what} again in " in lines[0]
    assert " s, try 2 of 3: " in lines[0]


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("flipped", "HashMismatchError", "s3://artifacts/flipped.tensors is damaged"),
        ("truncated", "ValueError", "and its tensors end at byte"),
        ("empty", "ValueError", "s3://artifacts/empty.tensors is damaged, cut short or no"),
        ("missing", "StoreError", "s3://artifacts/missing.tensors"),
        ("missing, presigned", "StoreError", "s3://artifacts/missing.tensors"),
        ("no bucket", "StoreError", "make the bucket"),
        ("replaced", "StoreError", "s3://artifacts/replaced.tensors was replaced while"),
        ("replaced between", "StoreError", "s3://artifacts/again.tensors was replaced while"),
        ("wrong key", "StoreError", "the secret key does not belong to the access key"),
        ("wrong key, presigned", "StoreError", "the secret key does not belong to the access key"),
        ("not there at all", "StoreUnavailableError", "is the server up"),
        ("unknown scheme", "StoreError", "gs:// is not read"),
        ("no http server", "StoreUnavailableError", "http://127.0.0.1:1/model.tensors failed"),
    ],
)
def test_what_does_not_load_says_why(
    cases: dict[str, Any], name: str, kind: str, says: str
) -> None:
    """And the rank writes it down; no message holds a signature."""
    case = cases[name]
    assert case["error"].startswith(f"{kind}: ")
    assert says in case["error"]
    told = case["told"]
    assert case["error"] == f"{told['kind']}: {told['message']}"
    assert (kind == "StoreUnavailableError") == told["store_unavailable"]
    assert kind.startswith("Store") == told["store"]
    assert "ignature=" not in case["error"]
