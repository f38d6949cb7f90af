"""What only a GPU can show: `pytest -m cuda -s`, on a host with vLLM's CUDA build and a GPU.

Deselected elsewhere. Load rates and memory are printed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# On models that are tiny, it is mostly vLLM's start that takes: some 20 s for each of 20 engines.
pytestmark = [pytest.mark.cuda, pytest.mark.engine, pytest.mark.timeout(1800)]

_SCRIPTS = Path(__file__).parent / "scripts"
QUANTIZED = ("mixtral", "qwen_moe", "int8", "int4", "awq", "gptq")


@pytest.fixture(scope="session")
def out(gpu: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where cuda_cases.py leaves what it found, and what stock vLLM is to load."""
    return tmp_path_factory.mktemp("cuda")


@pytest.fixture(scope="session")
def cases(out: Path, tiny_models: Path, run_script: Any) -> dict[str, Any]:
    """What came of each model of cuda_cases.py."""
    script = Path(__file__).parents[1] / "worker" / "scripts" / "tiny_quantized.py"
    subprocess.run([sys.executable, script, out / "quantized"], check=True, capture_output=True)
    cases: dict[str, Any] = {}
    # A few engines a process: 20 to 30 s each.
    for names in (QUANTIZED[:3], QUANTIZED[3:], ("fp8",), ("llama",)):
        folder = tiny_models if "llama" in names else out / "quantized"
        found = out / "cases.json"
        models = [folder / name for name in names]
        run_script(_SCRIPTS / "cuda_cases.py", out / "work", found, *models)
        cases |= json.loads(found.read_text())
    for name, case in cases.items():
        _print(name, case["reload"])
    _print("llama, encrypted", cases["llama"]["encrypted"])
    return cases


@pytest.fixture(scope="session")
def stock(cases: dict[str, Any], out: Path, tiny_models: Path, run_script: Any) -> dict[str, Any]:
    """What stock vLLM made of the Llama, of its artifact and of the encrypted one."""
    folder = out / "work" / "stock"
    variables = {"VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    run_script(
        _SCRIPTS / "cuda_stock_cases.py",
        out / "stock.json",
        tiny_models / "llama",
        folder / "plain",
        folder / "encrypted",
        **variables,
    )
    found = json.loads((out / "stock.json").read_text())
    for name in ("source", "plain", "encrypted"):
        case = found[name]
        print(f"stock, {name}: {case['seconds']:.1f} s to start, {case['memory']:,} bytes of GPU")
    return found


def _print(name: str, reload: dict[str, Any]) -> None:
    for load in reload["loads"]:
        rate = load["bytes"] / max(load["seconds"], 1e-3) / 1e6
        print(
            f"{name}: {load['bytes']:,} bytes in {load['seconds']:.2f} s, {rate:,.0f} MB/s, "
            f"{load['host_memory_after'] - load['host_memory_before']:,} bytes of host memory, "
            f"{reload['device memory']:,} of GPU memory at most, {load['device_name']}"
        )


def hashes(tensors: Any) -> dict[str, str]:
    return {tensor["name"]: tensor["sha256"] for tensor in tensors}


@pytest.mark.parametrize("name", ["plain", "encrypted"])
def test_an_artifact_made_on_the_cpu_answers_in_stock_vllm_as_its_source(
    stock: dict[str, Any], name: str
) -> None:
    """Nothing but vLLM and tensorizer in the process."""
    assert [] == stock["ours"]
    assert 16 == len(stock["source"]["tokens"][0])
    assert stock["source"]["tokens"] == stock[name]["tokens"]


@pytest.mark.parametrize("name", ["reload", "encrypted"])
def test_through_our_loader_it_answers_as_its_source(cases: dict[str, Any], name: str) -> None:
    """Tokens; log-probabilities of a GPU need not be the same to the last digit."""
    reference, reload = cases["llama"]["reference"], cases["llama"][name]
    assert reload["error"] is None
    assert tokens(reference["answers"]) == tokens(reload["answers"])
    [load] = reload["loads"]
    assert "cuda" == load["device"]
    assert "compute capability" in load["device_name"]


@pytest.mark.parametrize("name", ["reload", "encrypted"])
@pytest.mark.parametrize("adapter", ["pirate", "poet"])
def test_adapters_answer_as_on_the_source(cases: dict[str, Any], name: str, adapter: str) -> None:
    """And otherwise than the model without one."""
    reference, reload = cases["llama"]["reference"], cases["llama"][name]
    assert tokens(reference["adapters"][adapter]) == tokens(reload["adapters"][adapter])
    assert tokens(reference["answers"]) != tokens(reference["adapters"][adapter])


def test_parameters_are_the_same_from_ranks_on_the_cpu_and_on_the_gpu(
    cases: dict[str, Any],
) -> None:
    """Buffers that are computed (rotary embeddings) may differ in their last bits."""
    kinds = {
        tensor["name"]: tensor["kind"]
        for shard in cases["llama"]["built"]["shards"]
        for tensor in shard["tensors"]
    }
    assert [] == [name for name in cases["llama"]["differing"] if kinds.get(name) != "buffer"]


@pytest.mark.parametrize("name", [*QUANTIZED, "fp8"])
def test_quantized_models_and_experts_answer_as_their_source(
    cases: dict[str, Any], name: str
) -> None:
    """Built by virtual ranks, and fp8 by vLLM's own; packed for this GPU after the reload."""
    case = cases[name]
    assert case["reload"]["error"] is None
    [load] = case["reload"]["loads"]
    [shard] = case["built"]["shards"]
    expected = hashes(shard["tensors"])
    assert expected == {key: tensor["sha256"] for key, tensor in load["tensors"].items()}
    assert tokens(case["reference"]["answers"]) == tokens(case["reload"]["answers"])


def test_fp8_is_stored_as_fp8(cases: dict[str, Any]) -> None:
    """By executor mode, since a CPU build has no kernels for it."""
    built = cases["fp8"]["built"]
    assert "executor" == built["sharding"]
    assert "float8_e4m3fn" in built["census"]["by_dtype"]
    assert not built["stock_vllm"]["loadable"]


def tokens(answers: dict[str, Any]) -> list[list[int]]:
    return [
        [position["token"] for position in output["positions"]] for output in answers["outputs"]
    ]
