"""The tasks `reference` and `reload`, with real engines on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

# How NaN and infinities cross as JSON.
NOT_FINITE = -1e30


@pytest.fixture(scope="session")
def cases(
    tiny_models: Path, tmp_path_factory: pytest.TempPathFactory, run_script: Any
) -> dict[str, Any]:
    """What came of each of the tasks of engine_cases.py."""
    out = tmp_path_factory.mktemp("engine")
    # As a user may have set it for a server: without us.
    variables = {"VLLM_PLUGINS": "lora_filesystem_resolver"}
    run_script("engine_cases.py", tiny_models, out / "work", out / "cases.json", **variables)
    return json.loads((out / "cases.json").read_text())


def hashes(load: dict[str, Any]) -> dict[str, str]:
    return {name: tensor["sha256"] for name, tensor in load["tensors"].items()}


def built_hashes(shard: dict[str, Any]) -> dict[str, str]:
    return {tensor["name"]: tensor["sha256"] for tensor in shard["tensors"]}


def test_the_artifact_answers_as_its_source(cases: dict[str, Any]) -> None:
    """To the last digit: the same weights, kernels and prompts."""
    assert cases["reload"]["error"] is None
    assert cases["reference"]["answers"] == cases["reload"]["answers"]


def test_answers_are_greedy_tokens_with_their_best_and_a_perplexity(cases: dict[str, Any]) -> None:
    """Sixteen positions a prompt; the token is the one of the largest log-probability."""
    answers = cases["reference"]["answers"]
    assert answers["logprobs_finite"]
    # A random model knows nothing: near the 500 words of its vocabulary.
    assert 300 < answers["perplexity"] < 1500
    assert ["the quick brown fox", "seven wizards watch from a"] == [
        output["prompt"] for output in answers["outputs"]
    ]
    for output in answers["outputs"]:
        assert 16 == len(output["positions"])
        for position in output["positions"]:
            assert 5 <= len(position["top"])
            assert str(position["token"]) == max(position["top"], key=position["top"].__getitem__)


def test_the_reference_is_timed_by_the_default_loader(cases: dict[str, Any]) -> None:
    """It stands beside the artifact's load in the report; tensors are not hashed there."""
    [load] = cases["reference"]["loads"]
    assert {} == load["tensors"]
    assert load["bytes"] > 0
    assert load["seconds"] > 0
    assert "cpu" == load["device"]


def test_every_tensor_of_the_reload_has_the_manifests_hash(cases: dict[str, Any]) -> None:
    """The exact test, where tokens are only likely to differ."""
    [load] = cases["reload"]["loads"]
    [shard] = cases["built"]["shards"]
    assert built_hashes(shard) == hashes(load)


def test_two_real_ranks_load_and_report_theirs(cases: dict[str, Any]) -> None:
    """Each in a process of its own, from its own file."""
    case = cases["reload at 2"]
    assert case["error"] is None
    assert case["answers"]["logprobs_finite"]
    assert [0, 1] == [load["rank"] for load in case["loads"]]
    expected = [built_hashes(shard) for shard in cases["built at 2"]["shards"]]
    assert expected == [hashes(load) for load in case["loads"]]
    assert 0 == case["processes left"]


@pytest.mark.parametrize("name", ["flipped", "flipped, unchecked"])
def test_a_flipped_byte_is_a_hash_mismatch(cases: dict[str, Any], name: str) -> None:
    """`verify_hash` is on, also where the profile's arguments say otherwise."""
    case = cases[name]
    assert case["answers"] is None
    assert case["error"].startswith("rank 0: HashMismatchError: ")
    assert "Tensor 'lm_head.weight' failed" in case["error"]
    assert [f"error: the artifact does not load: {case['error']}"] == case["said"]


def test_the_rank_that_fails_is_named_with_its_reason(cases: dict[str, Any]) -> None:
    """vLLM itself says only that a worker's initialization failed; and its ranks are ended."""
    case = cases["flipped at 2"]
    assert case["answers"] is None
    assert case["error"].startswith("rank 1: HashMismatchError: ")
    assert "model-rank-001.tensors is damaged" in case["error"]
    assert 0 == case["processes left"]


def test_a_cut_file_is_a_finding(cases: dict[str, Any]) -> None:
    """Not a crash of the worker: the checks report it."""
    assert cases["cut"]["error"].startswith("rank 0: ValueError: ")
    assert "damaged, cut short or no tensorizer file" in cases["cut"]["error"]
    assert [] == cases["cut"]["loads"]


def test_a_config_that_vllm_does_not_accept_is_a_finding(cases: dict[str, Any]) -> None:
    """The directory is more than its tensors."""
    assert "does not accept this model" in cases["no config"]["error"]
    assert cases["no config"]["answers"] is None
    assert cases["no config"]["device_name"]


@pytest.mark.parametrize("name", ["broken reference", "broken reload"])
def test_answers_of_nan_cross_as_json_and_say_so(cases: dict[str, Any], name: str) -> None:
    """JSON has no NaN; the result must come through for the checks to fail it."""
    answers = cases[name]["answers"]
    assert answers["logprobs_finite"] is False
    assert 1e300 == answers["perplexity"]
    top = answers["outputs"][0]["positions"][0]["top"]
    assert {NOT_FINITE} == set(top.values())


def test_nan_in_a_weight_is_found_in_the_weight(cases: dict[str, Any]) -> None:
    """A broken source equals its own broken copy, so equality alone would pass it."""
    [load] = cases["broken reload"]["loads"]
    assert ["model.norm.weight"] == [
        name for name, tensor in load["tensors"].items() if not tensor["finite"]
    ]


def test_a_model_with_many_keys_and_values_has_room_for_them(cases: dict[str, Any]) -> None:
    """A 7B without grouped heads needs 512 MiB for 1,024 tokens; vLLM refuses to have less."""
    assert 16 == len(cases["large"]["answers"]["outputs"][0]["positions"])


@pytest.mark.parametrize("task", ["reference", "reload"])
def test_cuda_on_a_host_without_is_refused(cases: dict[str, Any], task: str) -> None:
    """People decide what proof they ask for; a CPU is not taken instead."""
    message = cases["no cuda"][task]
    assert message.startswith("tiny/model v1: reload_device is cuda with tensor_parallel_size=1")
    assert "this host has 0 CUDA devices" in message
    assert "set reload_device: cpu in the profile" in message


def test_a_vllm_that_does_not_find_the_plugin_is_told_apart(cases: dict[str, Any]) -> None:
    """Stock vLLM would fail on a CPU over its device, and report no hash anywhere."""
    assert cases["no plugin"].startswith("vLLM does not find the plugin of tensorize_assets")
    assert "install the package in the worker's environment" in cases["no plugin"]
