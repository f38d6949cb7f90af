"""Quantized models and mixtures of experts: built by virtual ranks, reloaded on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

MODELS = ("mixtral", "qwen_moe", "int8", "int4", "awq", "gptq")


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory, run_script: Any) -> dict[str, Any]:
    """What came of each of the models of tiny_quantized.py."""
    out = tmp_path_factory.mktemp("quantized")
    script = Path(__file__).parent / "scripts" / "tiny_quantized.py"
    subprocess.run([sys.executable, script, out / "models"], check=True, capture_output=True)
    run_script("quantized_cases.py", out / "models", out / "work", out / "cases.json")
    return json.loads((out / "cases.json").read_text())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [1, 2])
def test_a_virtual_rank_writes_the_file_of_a_real_one(
    cases: dict[str, Any], name: str, size: int
) -> None:
    """Experts and packed integers are sliced as vLLM's own ranks, with the same loader, slice."""
    built = cases["built"][f"{name}-{size}"]
    assert [True] * size == built["same"]
    assert size == len({file["sha256"] for file in built["files"]})


@pytest.mark.parametrize("name", MODELS)
def test_the_artifact_answers_as_its_source(cases: dict[str, Any], name: str) -> None:
    """To the last digit, through the post-load step, which packs the weights for this processor."""
    assert cases["reloads"][name]["error"] is None
    assert cases["references"][name]["answers"] == cases["reloads"][name]["answers"]


@pytest.mark.parametrize("name", MODELS)
def test_models_answer_differently(cases: dict[str, Any], name: str) -> None:
    """Equal answers would mean nothing if every one of these random models gave the same."""
    answers = {other: cases["references"][other]["answers"]["outputs"] for other in MODELS}
    assert answers[name] not in [answers[other] for other in MODELS if other != name]
    assert cases["references"][name]["answers"]["logprobs_finite"]


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_of_the_reload_has_the_hash_of_the_build(
    cases: dict[str, Any], name: str
) -> None:
    """Integers come back as integers: nothing is cast to the model's type."""
    [load] = cases["reloads"][name]["loads"]
    [shard] = cases["built"][f"{name}-1"]["shards"]
    expected = {tensor["name"]: tensor["sha256"] for tensor in shard["tensors"]}
    assert expected == {name: tensor["sha256"] for name, tensor in load["tensors"].items()}


@pytest.mark.parametrize(
    ("name", "dtype"), [("int8", "int8"), ("int4", "int32"), ("awq", "int32"), ("gptq", "int32")]
)
def test_quantized_tensors_are_stored_as_they_are(
    cases: dict[str, Any], name: str, dtype: str
) -> None:
    """And what stock vLLM would do to them is known before anybody tries."""
    result = cases["built"][f"{name}-1"]
    assert dtype in result["census"]["by_dtype"]
    assert not result["stock_vllm"]["loadable"]
    step, cast = result["stock_vllm"]["reasons"]
    assert "need the post-load step (vllm#55198)" in step
    assert "and loses values" in cast


@pytest.mark.parametrize("name", ["mixtral", "qwen_moe"])
def test_stock_vllm_is_said_not_to_load_experts(cases: dict[str, Any], name: str) -> None:
    """It loads them, and asks a kernel that was never set up."""
    reason = "a mixture of experts' kernels need the post-load step (vllm#55198)"
    expected = {"loadable": False, "reasons": [reason]}
    assert expected == cases["built"][f"{name}-1"]["stock_vllm"]


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("int8", "self_attn.qkv_proj.weight"),
        ("int4", "self_attn.qkv_proj.weight_packed"),
        ("awq", "self_attn.qkv_proj.qweight"),
        ("gptq", "self_attn.qkv_proj.qzeros"),
        ("mixtral", "block_sparse_moe.experts.routed_experts.w13_weight"),
    ],
)
def test_integers_that_the_snapshot_lacks_are_noticed(
    cases: dict[str, Any], name: str, parameter: str
) -> None:
    """vLLM takes a fused layer for loaded with one of its parts; the rest would be any memory."""
    case = cases[f"{name} without a part"]
    assert "PreflightError" == case["error"]
    assert f"has no values, or not all, for model.layers.1.{parameter};" in case["message"]
    assert [] == case["root"] == case["scratch"]


def test_integers_that_look_unfilled_are_not_refused(cases: dict[str, Any]) -> None:
    """A row of the largest integer is what the source holds."""
    assert "result" in cases["int8 with a row of 127"]


def test_what_a_cpu_lacks_kernels_for_is_refused_with_the_way_out(cases: dict[str, Any]) -> None:
    """vLLM constructs fp8 layers on a CPU and fails as they are asked; others it refuses itself."""
    fp8, gptq8 = cases["fp8"], cases["gptq8"]
    assert "PreflightError" == fp8["error"] == gptq8["error"]
    assert "weights of type float8_e4m3fn (first model.layers." in fp8["message"]
    assert "need executor mode on a GPU" in fp8["message"]
    assert "the installed vLLM cannot construct this model here (ValueError: " in gptq8["message"]
    for case in (fp8, gptq8):
        assert "sharding: executor and reload_device: cuda" in case["message"]
        assert [] == case["root"] == case["scratch"]


def test_executor_mode_writes_fp8(cases: dict[str, Any]) -> None:
    """A CPU's ranks load and store it too; what they cannot is answer."""
    result = cases["fp8 by executor"]["result"]
    assert "executor" == result["sharding"]
    assert {"tensors": 8, "bytes": 589824} == result["census"]["by_dtype"]["float8_e4m3fn"]
    assert not result["stock_vllm"]["loadable"]


def test_executor_mode_on_a_cpu_does_not_advise_executor_mode(cases: dict[str, Any]) -> None:
    """There vLLM's refusal is final for this device."""
    message = cases["gptq8 by executor"]["message"]
    assert "the installed vLLM cannot construct this model here (ValueError: " in message
    assert message.endswith(
        "Choose another tensor_parallel_size, or a device that vLLM supports it on"
    )
