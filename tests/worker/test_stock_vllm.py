"""An artifact directory loads in stock vLLM, so that a GPU host with plain vLLM can load it.

Stock code runs as it is, with no plugin and nothing of this project in the process. Two things that
it lacks on a CPU are put in: `torch.accelerator.current_device_index()`, which raises without an
accelerator, is 0; and after stock `load_model` the script calls `process_weights_after_loading`,
which stock never calls for tensorizer files and without which a CPU's linear layers have no kernel
at all (`layer.cpu_linear`). On CUDA that step changes nothing in these models. So the tensors are
held equal as stock `load_model` leaves them, and the tokens after that step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

# Untied, and tied with biases.
MODELS = ("llama", "qwen2")
# The Llama, encrypted of plaintext shards, and written encrypted.
ENCRYPTED = ("both", "only")


@pytest.fixture(scope="session")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where stock vLLM's process leaves what it found, and what it wrote."""
    return tmp_path_factory.mktemp("stock")


@pytest.fixture(scope="session")
def cases(
    tiny_models: Path, artifacts: Path, encrypted: Path, out: Path, run_script: Any
) -> dict[str, Any]:
    """What stock vLLM made of two artifacts, of two encrypted ones, and of their sources."""
    path = out / "cases.json"
    folders = [folder / name for name in MODELS for folder in (tiny_models, artifacts)]
    for name in ENCRYPTED:
        folders += [tiny_models / "llama", encrypted / "artifacts" / name]
    variables = {
        "VLLM_PLUGINS": "",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    run_script("stock_cases.py", path, out / "saved", *folders, **variables)
    return json.loads(path.read_text())


def test_nothing_of_this_project_is_in_the_process(cases: dict[str, Any]) -> None:
    """An empty VLLM_PLUGINS names no plugin, where an unset one allows all."""
    assert [] == cases["ours"]


@pytest.mark.parametrize("name", MODELS)
def test_stock_load_model_has_every_tensor_of_the_file(
    cases: dict[str, Any], built: dict[str, Any], name: str
) -> None:
    """Type, shape and bytes, after the cast to the model's type that stock vLLM asks for."""
    case = cases[name]
    assert case["stored"] == case["loaded"]
    names = {tensor["name"] for tensor in built[f"{name}-1"]["shards"][0]["tensors"]}
    assert names == case["loaded"].keys()
    assert built[f"{name}-1"]["stock_vllm"]["loadable"]


@pytest.mark.parametrize("name", ENCRYPTED)
def test_stock_load_model_has_every_tensor_of_an_encrypted_file(
    cases: dict[str, Any], name: str
) -> None:
    """With nothing but the raw key in a file, which is what `tensorize keys unseal` makes."""
    assert cases[name]["stored"] == cases[name]["loaded"] == cases["llama"]["loaded"]


@pytest.mark.parametrize("name", MODELS + ENCRYPTED)
def test_stock_vllm_answers_as_from_the_source(cases: dict[str, Any], name: str) -> None:
    """Greedy tokens of the artifact and of the snapshot, both in stock vLLM."""
    assert 16 == len(cases[name]["source"][0])
    assert cases[name]["source"] == cases[name]["artifact"]


def test_our_loader_loads_what_vllm_has_encrypted(
    cases: dict[str, Any], out: Path, artifacts: Path, run_script: Any
) -> None:
    """Written by vLLM's own function with its own key: nobody has to build anew to come to us."""
    found = out / "ours.json"
    run_script("vllm_encrypted_cases.py", artifacts / "llama", out / "saved", found)
    ours = json.loads(found.read_text())
    assert cases["llama"]["loaded"].keys() == ours["plain"].keys()
    assert ours["plain"] == ours["vLLM's"]
    assert "is encrypted, and no key was given" in ours["no key"]
