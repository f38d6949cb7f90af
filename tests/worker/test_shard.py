"""The task `shard`: what it says of what it wrote, and what it refuses without a trace."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

MODELS = ("gemma", "gpt2", "gpt_neox", "llama", "opt", "qwen2")


@pytest.fixture(scope="session")
def cases(
    tiny_models: Path, tmp_path_factory: pytest.TempPathFactory, run_script: Any
) -> dict[str, Any]:
    """What came of each of the snapshots of shard_cases.py."""
    out = tmp_path_factory.mktemp("shard")
    run_script("shard_cases.py", tiny_models, out / "work", out / "cases.json")
    return json.loads((out / "cases.json").read_text())


def stored(found: dict[str, Any]) -> list[str]:
    """What is in the root, without the store's own locks."""
    return [name for name in found["root"] if not name.startswith(".tmp-")]


def sha256_of(case: dict[str, Any]) -> str:
    return case["result"]["files"][0]["sha256"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_result_names_what_tensorizer_reads_in_the_files(
    built: dict[str, Any], formats: dict[str, Any], virtual: Path, name: str, size: int
) -> None:
    """Names, kinds, types, shapes, sizes and hashes of every tensor; sizes and hashes of files."""
    result = built[f"{name}-{size}"]
    folder = virtual / "vllm" / "tiny" / name / f"tp{size}"
    assert size == len(result["shards"]) == len(result["files"])
    for rank, (shard, file) in enumerate(zip(result["shards"], result["files"], strict=True)):
        path = folder / shard["file"]
        data = path.read_bytes()
        expected = {
            "path": "model.tensors" if size == 1 else f"model-rank-{rank:03d}.tensors",
            "size": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        assert expected == file
        assert (rank, file["path"]) == (shard["rank"], shard["file"])
        assert formats["shards"][str(path)] == shard["tensors"]


def test_fp32_scales_are_named_as_cast_by_stock_vllm_and_not_lossy(built: dict[str, Any]) -> None:
    """vLLM keeps four of them in each attention layer, all 1.0."""
    result = built["llama-2"]
    scales = ("_k_scale", "_v_scale", "_q_scale", "_prob_scale")
    expected = {
        (f"model.layers.{layer}.self_attn.attn.{scale}", rank, "float32", "bfloat16", False)
        for layer in range(2)
        for scale in scales
        for rank in range(2)
    }
    assert expected == {
        (cast["name"], cast["rank"], cast["from_dtype"], cast["to_dtype"], cast["lossy"])
        for cast in result["census"]["cast_by_stock"]
    }
    assert {"tensors": 16, "bytes": 64} == result["census"]["by_dtype"]["float32"]
    assert {"loadable": True, "reasons": []} == result["stock_vllm"]


@pytest.mark.parametrize(
    ("name", "embedding"),
    [
        ("gemma", "model.embed_tokens.weight"),
        ("gpt2", "transformer.wte.weight"),
        ("opt", "model.decoder.embed_tokens.weight"),
        ("qwen2", "model.embed_tokens.weight"),
    ],
)
def test_tied_embeddings_are_stated(built: dict[str, Any], name: str, embedding: str) -> None:
    """tensorizer stores them twice and unties them; our loader must know."""
    expected = [{"names": ["lm_head.weight", embedding], "stored_once": False}]
    for size in (1, 2, 4):
        assert expected == built[f"{name}-{size}"]["tied"]


def test_untied_models_have_no_tied_groups(built: dict[str, Any]) -> None:
    """A group that is none would tie weights that differ."""
    assert [] == built["llama-1"]["tied"] == built["gpt_neox-1"]["tied"]


def test_versions_and_seconds_are_told(built: dict[str, Any]) -> None:
    """Versions are part of the build; seconds say where the time went."""
    result = built["llama-1"]
    assert {"vllm", "torch", "tensorizer", "tensorize_assets", "python"} == set(result["versions"])
    stages = {"configure", "load", "census", "write", "store"}
    assert stages == set(result["seconds"])


def test_auto_is_the_models_own_dtype(cases: dict[str, Any]) -> None:
    """`auto` in a profile and the type it resolves to are the same bytes."""
    assert "bfloat16" == cases["auto"]["result"]["dtype"]
    assert sha256_of(cases["plain"]) == sha256_of(cases["auto"])


def test_a_wider_dtype_casts_nothing_in_stock_vllm(cases: dict[str, Any]) -> None:
    """At float32 the scales are of the model's own type."""
    result = cases["float32"]["result"]
    assert "float32" == result["dtype"] == result["census"]["model_dtype"]
    assert [] == result["census"]["cast_by_stock"]
    assert sha256_of(cases["plain"]) != sha256_of(cases["float32"])


def test_serialization_arguments_reach_tensorizer_and_change_no_byte(cases: dict[str, Any]) -> None:
    """`limit_cpu_concurrency` is about the host, not about the build."""
    assert sha256_of(cases["plain"]) == sha256_of(cases["one thread"])


def test_a_lossy_cast_keeps_stock_vllm_from_the_build(cases: dict[str, Any]) -> None:
    """Mamba's A is float32 in a bfloat16 model; stock vLLM would round it without a word."""
    lossy = cases["lossy"]["result"]
    name = "backbone.layers.1.mixer.A"
    assert [name] == [c["name"] for c in lossy["census"]["cast_by_stock"] if c["lossy"]]
    reason = f"stock vLLM casts 1 tensors to bfloat16 and loses values, first {name} (float32)"
    assert {"loadable": False, "reasons": [reason]} == lossy["stock_vllm"]


def test_a_cast_that_loses_nothing_does_not(cases: dict[str, Any]) -> None:
    """The same model, with values that bfloat16 has too."""
    kept = cases["lossless"]["result"]
    assert 2 == len(kept["census"]["cast_by_stock"])
    assert {"loadable": True, "reasons": []} == kept["stock_vllm"]


def test_bin_snapshots_give_the_same_file_as_safetensors(cases: dict[str, Any]) -> None:
    """Where a repo has nothing else; the format of the source is not in the build."""
    assert sha256_of(cases["plain"]) == sha256_of(cases["bin"])


@pytest.mark.fault(
    "Bad Hub",
    "shard: a .bin with a pickle that runs code",
    "refused: it is not run, nothing is stored",
)
def test_a_pickle_that_runs_code_is_refused_and_does_not_run(cases: dict[str, Any]) -> None:
    """`.bin` files are pickles; the attack is seen to work where it is let."""
    case = cases["attack"]
    assert case["works"]
    assert not case["attacked"]
    assert "PreflightError" == case["error"]
    assert "asks to run code or holds other objects than tensors" in case["message"]
    assert "weights_only" in case["message"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "unknown",
            "does not accept tiny/unknown unknown at tensor_parallel_size=1, dtype=bfloat16: "
            "The checkpoint you are trying to load has model type `nobody`",
        ),
        ("no config", "Invalid repository ID or local directory specified"),
        (
            "heads",
            "does not accept tiny/llama heads at tensor_parallel_size=3, dtype=bfloat16: "
            "Total number of attention heads (8) must be divisible by tensor parallel size (3)",
        ),
        ("deep", "tiny/deep deep, rank 0 of 1: the index of its 4004 tensors takes"),
        ("scratch", "tiny/llama scratch, rank 0 of 2: the shards take"),
        ("attack", "tiny/attack attack, rank 0 of 1: vLLM's own weight loader refuses"),
        ("narrow norm", "vLLM's own weight loader refuses this snapshot (AssertionError: "),
        ("cut", "vLLM's own weight loader refuses this snapshot (SafetensorError: "),
        ("no mlp.down_proj", "has no values, or not all, for model.layers.1.mlp.down_proj.weight"),
        (
            "no self_attn.k_proj",
            "has no values, or not all, for model.layers.1.self_attn.qkv_proj.weight",
        ),
        ("no input_layernorm", "Following weights were not initialized from checkpoint"),
    ],
)
def test_what_cannot_be_built_is_refused_with_its_reason_and_leaves_nothing(
    cases: dict[str, Any], name: str, says: str
) -> None:
    """Refused for good: a retry, or another host, would only delay the message."""
    case = cases[name]
    assert "PreflightError" == case["error"]
    assert says in case["message"]
    assert [] == case["root"]
    assert [] == case["scratch"]


def test_nan_in_the_source_is_built_and_left_to_the_reloads_checks(cases: dict[str, Any]) -> None:
    """It is what the source holds; memory that the snapshot never filled is not."""
    assert sha256_of(cases["plain"]) != sha256_of(cases["nan"])


def test_a_second_worker_of_a_build_is_refused_until_the_first_is_gone(
    cases: dict[str, Any],
) -> None:
    """Two would write one file."""
    case = cases["held"]
    assert "WorkerBusyError" == case["error"]
    assert case["message"].startswith("another worker is building vllm/tiny/held")
    assert "wait for it, then run again" in case["message"]
    assert [] == case["root"]
    assert sha256_of(cases["plain"]) == sha256_of(cases["released"])


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("killed loading 0", []),
        ("killed storing 0", []),
        ("killed storing 1", ["vllm/tiny/llama/model-rank-000.tensors"]),
    ],
)
def test_a_killed_worker_leaves_no_half_file_and_the_next_one_completes(
    cases: dict[str, Any], built: dict[str, Any], name: str, whole: list[str]
) -> None:
    """SIGKILL gives no chance to clean up: only whole files are ever in the root."""
    case = cases[name]
    assert 9 == case["signal"]
    assert whole == stored(case)
    assert case["scratch"]
    again = case["again"]
    assert built["llama-2"]["files"] == again["result"]["files"]
    assert [f"vllm/tiny/llama/model-rank-{rank:03d}.tensors" for rank in (0, 1)] == stored(again)
    assert [] == again["scratch"]
