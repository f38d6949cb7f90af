"""The plugin's loader, as vLLM's registry hands it out: what it fills, reports and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine


@pytest.fixture(scope="session")
def cases(
    tiny_models: Path, tmp_path_factory: pytest.TempPathFactory, run_script: Any
) -> dict[str, Any]:
    """What came of each of the loads of loader_cases.py."""
    out = tmp_path_factory.mktemp("loader")
    run_script("loader_cases.py", tiny_models, out / "work", out / "cases.json")
    return json.loads((out / "cases.json").read_text())


def test_vllm_hands_out_our_loader_with_the_settings_it_was_given(cases: dict[str, Any]) -> None:
    """vLLM takes the settings flat, and drops a nested `tensorizer_config` without a word."""
    assert "tensorize_assets.vllm_plugin.loader" == cases["llama"]["loader"]
    assert cases["llama"]["verify_hash"]


@pytest.mark.parametrize("name", ["llama", "qwen2", "mamba"])
def test_every_tensor_is_the_sources_own(cases: dict[str, Any], name: str) -> None:
    """Bit by bit what vLLM's default loader reads of the snapshot; Mamba's fp32 is not rounded."""
    case = cases[name]
    assert [] == case["different"]
    assert {"llama": 24, "qwen2": 26, "mamba": 13}[name] == case["tensors"]
    assert ["torch.bfloat16", "torch.float32"] == case["dtypes"]


def test_a_build_that_stock_vllm_would_round_is_among_them(cases: dict[str, Any]) -> None:
    """Else the case above would show nothing."""
    assert cases["mamba"]["stock"] is False


@pytest.mark.parametrize("name", ["llama", "qwen2", "mamba"])
def test_parameters_stay_the_objects_that_vllm_made(cases: dict[str, Any], name: str) -> None:
    """Post-load steps of quantized layers assert their classes and read their attributes."""
    case = cases[name]
    assert case["same objects"]
    assert case["attributes"] == case["attributes after"]
    assert [] == case["training"]


def test_tensors_are_read_to_where_vllm_put_them(cases: dict[str, Any]) -> None:
    """Into other memory, the loading of a large model takes a tenth more of it on a CPU."""
    assert [] == cases["llama"]["moved"]


@pytest.mark.parametrize(("name", "readers"), [("two", 2), ("five", 5)])
def test_as_many_read_as_were_asked_for(cases: dict[str, Any], name: str, readers: int) -> None:
    """Who shares a disk, or a core, asks for few."""
    assert readers == cases[f"{name} readers"]


def test_of_tied_weights_one_is_read(cases: dict[str, Any]) -> None:
    """A fifth of the file of SmolLM2 is its embedding once more."""
    assert 1 == len(cases["tied"]["read"])
    assert cases["tied"]["shared"]


def test_a_closed_file_lets_go_of_its_tensors(cases: dict[str, Any]) -> None:
    """Or the weights that the post-load step replaces stay beside their replacements."""
    assert 0 == cases["kept after closing"]


def test_the_attributes_are_more_than_a_plain_parameters(cases: dict[str, Any]) -> None:
    """tensorizer's own loading would have left a torch Parameter with none of them."""
    attributes = cases["llama"]["attributes"]["model.layers.0.mlp.down_proj.weight"]
    assert "ModelWeightParameter" == attributes["class"]
    assert {"_input_dim", "_output_dim", "tp_rank", "tp_size"} <= attributes.keys()


def test_tied_weights_share_memory_again(cases: dict[str, Any]) -> None:
    """They are stored under both names; untied they would take the memory twice."""
    assert [["lm_head.weight", "model.embed_tokens.weight"]] == cases["qwen2"]["shared"]
    assert [] == cases["llama"]["shared"]


def test_the_post_load_step_runs(cases: dict[str, Any]) -> None:
    """Without it a CPU has no kernels, and quantized layers are wrong on any device."""
    assert {"cpu_linear": True, "training": False} == cases["processed"]


def test_files_that_vllm_did_not_tensorize_are_loaded_too(cases: dict[str, Any]) -> None:
    """Under `tensorizer` our loader is the only one, also for what others have written."""
    assert {"cpu_linear": True} == cases["plain"]


@pytest.mark.parametrize(("name", "rank"), [("qwen2", 0), ("tp2 0", 0), ("tp2 1", 1)])
def test_the_report_has_the_hash_of_every_tensor_of_the_manifest(
    cases: dict[str, Any], name: str, rank: int
) -> None:
    """Computed from the tensors as they stand in the model, not copied from the file."""
    built, load = cases["loads"][name]["built"], cases["loads"][name]["load"]
    expected = {tensor["name"]: tensor["sha256"] for tensor in built["shards"][rank]["tensors"]}
    assert expected == {tensor: value["sha256"] for tensor, value in load["tensors"].items()}
    assert all(value["finite"] for value in load["tensors"].values())
    assert (rank, "cpu") == (load["rank"], load["device"])
    assert [] == load["missing"] == load["unexpected"] == load["on_meta"]
    # The marker is counted too: 8 bytes that are not in the file.
    assert sum(t["size"] for t in built["shards"][rank]["tensors"]) + 8 == load["bytes"]
    assert load["host_memory_before"] > 0
    assert load["seconds"] > 0


def test_without_verify_hash_a_flipped_byte_shows_in_the_report(cases: dict[str, Any]) -> None:
    """tensorizer loads it silently; the hashes of the report do not depend on it."""
    assert "loaded" == cases["silent"]
    built, load = (cases["loads"]["silent"][part] for part in ("built", "load"))
    different = [
        tensor["name"]
        for tensor in built["shards"][0]["tensors"]
        if tensor["sha256"] != load["tensors"][tensor["name"]]["sha256"]
    ]
    assert ["lm_head.weight"] == different


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "other model",
            "llama/model.tensors is not a file of this model at this tensor_parallel_size and "
            "dtype: 2 missing (model.layers.0.self_attn.qkv_proj.bias, "
            "model.layers.1.self_attn.qkv_proj.bias)",
        ),
        (
            "other dtype",
            "16 unexpected (model.embed_tokens.weight (512, 256) torch.float32, and the model's "
            "is (512, 256) torch.bfloat16",
        ),
        (
            "other shape",
            "10 unexpected (model.embed_tokens.weight (256, 256) torch.bfloat16, and the model's "
            "is (512, 256) torch.bfloat16",
        ),
        ("wholly other model", "23 missing (model.embed_tokens.weight, "),
        ("flipped", "model.tensors is damaged: Tensor 'lm_head.weight' failed CRC32 verification"),
        ("cut", "and its tensors end at byte"),
        ("cut in its index", "model.tensors is damaged, cut short or no tensorizer file (error: "),
        ("empty", "model.tensors is damaged, cut short or no tensorizer file (ValueError: Not a"),
        ("no tensorizer file", "(ValueError: Not a tensorizer file); `tensorize verify` compares"),
        ("gone", "No such file or directory"),
        ("not a template", "tensorizer_uri should include a string format template"),
    ],
)
def test_what_does_not_load_names_the_file_and_the_reason(
    cases: dict[str, Any], name: str, says: str
) -> None:
    """And the rank writes it down: vLLM's parent process learns only that a rank failed."""
    case = cases[name]
    kinds = {"flipped": "HashMismatchError", "gone": "FileNotFoundError"}
    assert case["error"].startswith(f"{kinds.get(name, 'ValueError')}: ")
    assert says in case["error"]
    assert case["error"] == case["told"]


def test_a_file_of_another_model_is_reported_with_what_it_lacks(cases: dict[str, Any]) -> None:
    """The check `tensors_complete` reads it there."""
    expected = [f"model.layers.{layer}.self_attn.qkv_proj.bias" for layer in range(2)]
    assert expected == cases["other model"]["load"]["missing"]
    assert 16 == len(cases["other dtype"]["load"]["unexpected"])
    assert [] == cases["other dtype"]["load"]["missing"]


def test_in_production_nothing_is_reported(cases: dict[str, Any]) -> None:
    """No folder is named there: no hashing, no files."""
    production = cases["production"]
    assert "loaded" == production["loaded"]
    assert production["error"].startswith("HashMismatchError: ")
    assert [] == production["reports"]
