"""Files with a repo's own names: written without vLLM, and loaded by its slow path."""

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
    """What hf_cases.py found."""
    out = tmp_path_factory.mktemp("hf")
    run_script("hf_cases.py", tiny_models, out, out / "cases.json")
    return json.loads((out / "cases.json").read_text())


@pytest.fixture(scope="session")
def loading(cases: dict[str, Any]) -> dict[str, Any]:
    """What came of loading them."""
    return cases["loading"]


def test_it_is_made_without_vllm(cases: dict[str, Any]) -> None:
    """It would take ten seconds, and a host that has it."""
    assert not cases["vllm"]


@pytest.mark.parametrize("how", ["same", "split", "hidden", "both"])
def test_every_tensor_is_the_snapshots(cases: dict[str, Any], how: str) -> None:
    """Bit by bit: of one file, of those that an index names, encrypted at once or later."""
    assert cases[how]


def test_what_it_says_of_the_file(cases: dict[str, Any]) -> None:
    """The manifest is made of it."""
    result = cases["result"]
    assert ("bfloat16", "LlamaForCausalLM") == (result["dtype"], result["architecture"])
    assert "hf" == result["tensor_format"]
    assert 21 == len(result["shards"][0]["tensors"]) == cases["hidden tensors"]
    assert result["stock_vllm"]["loadable"]
    assert "slow path" in result["stock_vllm"]["reasons"][0]
    assert result["versions"]["vllm"].startswith("0.")


def test_memory_does_not_grow_with_the_model(cases: dict[str, Any]) -> None:
    """256 MB of tensors are mapped, not read."""
    assert cases["growth"] < 64 << 20


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("bin", "PreflightError: tiny/bin refused: format hf is made of safetensors"),
        ("float32", "what vLLM takes dtype auto for then depends on its device; set dtype"),
        ("no architecture", "config.json names no architecture"),
        ("no key", "WorkerError: tiny/llama refused: the worker was given no data key"),
        (
            "unknown",
            "PreflightError: tiny/llama refused: TensorSerializer of the installed tensorizer "
            "2.10.1 has no argument limit_cpu_concurency; did you mean limit_cpu_concurrency?",
        ),
        ("ours", "argument encryption: keys never stand in a catalog"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(
    cases: dict[str, Any], name: str, says: str
) -> None:
    """Nothing is written, and the message says what to change."""
    assert says in cases["refused"][name]
    assert "refused" not in cases["left"]


def test_arguments_reach_tensorizer(cases: dict[str, Any], loading: dict[str, Any]) -> None:
    """As tensorizer itself has them when it starts: a name that is dropped would not show."""
    assert [1] == cases["limits"]
    assert [3, 2] == loading["readers"]


def test_an_unknown_argument_of_the_installed_tensorizer_is_named(loading: dict[str, Any]) -> None:
    """Whatever a catalog of another release has taken for known."""
    assert (
        "TensorDeserializer of the installed tensorizer 2.10.1 has no argument num_raeders"
        in (loading["unknown"])
    )
    assert "did you mean num_readers?" in loading["unknown"]


def test_it_is_loaded_by_the_slow_path_and_says_so(
    cases: dict[str, Any], loading: dict[str, Any]
) -> None:
    """With the hash of every tensor as it was read, which is what a manifest lists."""
    load = loading["load"]
    assert ("slow", [], []) == (load["path"], load["missing"], load["unexpected"])
    expected = {one["name"]: one["sha256"] for one in cases["result"]["shards"][0]["tensors"]}
    assert expected == {name: one["sha256"] for name, one in load["tensors"].items()}
    assert all(one["finite"] for one in load["tensors"].values())
    assert all("no vLLM marker" in line and "slow path" in line for line in loading["said"])
    assert loading["said"]


def test_a_tensor_that_is_missing_is_named(loading: dict[str, Any]) -> None:
    """vLLM's own slow path leaves whatever was in the memory."""
    assert ["model.norm.weight"] == loading["lacks"]
    assert "is not a file of this model: 1 missing (model.norm.weight)" in loading["missing"]


def test_a_file_of_another_model_or_a_damaged_one_is_said_to_be(loading: dict[str, Any]) -> None:
    """Each for what it is: a damaged file is no other model's."""
    assert "is not a file of this model: load_weights of LlamaForCausalLM" in loading["other"]
    assert "gpt2/model.tensors" in loading["other"]
    assert loading["damaged"].startswith("HashMismatchError: ")
    assert "lacking/model.tensors is damaged" in loading["damaged"]
