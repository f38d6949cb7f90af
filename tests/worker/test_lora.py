"""References and reloads with LoRA adapters, and of encrypted artifacts, by real engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tensorize_assets.core import compare

pytestmark = pytest.mark.engine

RELOADS = ["reload", "encrypted", "from s3"]


@pytest.fixture(scope="session")
def cases(
    tiny_models: Path, tmp_path_factory: pytest.TempPathFactory, run_script: Any
) -> dict[str, Any]:
    """What came of each of the tasks of lora_cases.py."""
    out = tmp_path_factory.mktemp("lora")
    (out / "work").mkdir()
    run_script("lora_cases.py", tiny_models, out / "work", out / "cases.json")
    return json.loads((out / "cases.json").read_text())


def tokens(answers: dict[str, Any]) -> list[list[int]]:
    return [[one["token"] for one in output["positions"]] for output in answers["outputs"]]


@pytest.mark.parametrize("name", RELOADS)
def test_every_adapter_answers_as_its_source_on_the_source_model(
    cases: dict[str, Any], name: str
) -> None:
    """To the last digit, in the clear and encrypted, from a disk and from S3; in one engine."""
    case = cases[name]
    assert case["error"] is None
    assert cases["reference"]["answers"] == case["answers"]
    assert ["pirate", "poet"] == [*case["adapters"]]
    assert cases["reference"]["adapters"] == case["adapters"]


def test_each_adapter_says_something_else(cases: dict[str, Any]) -> None:
    """Else equal answers would show nothing."""
    case = cases["reload"]
    said = [tokens(case["answers"]), *(tokens(one) for one in case["adapters"].values())]
    assert all(one not in said[:number] for number, one in enumerate(said))
    perplexities = {one["perplexity"] for one in (case["answers"], *case["adapters"].values())}
    assert 3 == len(perplexities)


def test_an_untrained_adapter_changes_not_one_digit(cases: dict[str, Any]) -> None:
    """One adapter, beside the model. What adds zero is told apart from a weak adapter by this."""
    case = cases["idle"]
    assert case["error"] is None
    assert {"idle": case["answers"]} == case["adapters"]


def test_an_adapter_that_does_not_load_is_a_finding_with_its_name(cases: dict[str, Any]) -> None:
    """Its file may be the manifest's, and no whole one."""
    case = cases["cut"]
    assert case["answers"] is None
    assert case["error"].startswith("RuntimeError: adapter poet: /")
    assert "adapters/poet/adapter_model.tensors is damaged, cut short" in case["error"]


def test_an_adapter_that_vllm_refuses_is_a_finding_with_its_name(cases: dict[str, Any]) -> None:
    """Its engine survives to say so."""
    case = cases["refused by vllm"]
    assert case["answers"] is None
    assert case["error"].startswith("RuntimeError: adapter pirate: ")
    assert "is greater than max_lora_rank 1" in case["error"]


def test_adapters_are_held_against_the_manifest_before_anything_starts(
    cases: dict[str, Any],
) -> None:
    """vLLM's own path believes an adapter's file; on a disk nobody else has read it."""
    case = cases["not the manifest's"]
    assert case["answers"] is None
    assert "adapters/poet/adapter_model.tensors has " in case["error"]
    assert "and in the manifest it has" in case["error"]
    assert [] == case["loads"]


@pytest.mark.parametrize("name", ["encrypted", "from s3"])
def test_every_attempt_that_must_fail_does_and_names_the_file(
    cases: dict[str, Any], name: str
) -> None:
    """Nobody believes an encryption whose wrong keys were never tried."""
    tried = {one["attempt"]: one for one in cases[name]["refusals"]}
    assert [*compare.ATTEMPTS] == [*tried]
    assert all(one["refused"] for one in tried.values())
    assert all("/secret/model.tensors" in one["message"] for one in tried.values())
    says = {
        "no key": "is encrypted, and no key was given; name the file of its key as",
        "wrong key": "does not open with this key; it is the key of another build, or",
        "short key": "short-key does not hold a key of 32 bytes",
        "header": "data version 132, which is not supported",
        "metadata": "is damaged, cut short or no tensorizer file",
        "tensor header": "its index and the header of tensor",
        "tensor": "does not open with this key",
        "tag": "does not open with this key",
    }
    for attempt, text in says.items():
        assert text in tried[attempt]["message"]


def test_a_plaintext_artifact_has_nothing_to_refuse(cases: dict[str, Any]) -> None:
    """It loads without a key, as it should."""
    assert [] == cases["reload"]["refusals"]


def test_another_data_key_is_a_finding(cases: dict[str, Any]) -> None:
    """The artifact does not open with the key that its manifest names."""
    case = cases["another data key"]
    assert case["answers"] is None
    assert case["error"].startswith("rank 0: CryptographyError: ")
    assert "/secret/model.tensors does not open with this key" in case["error"]
    assert [] == case["refusals"]


def test_no_data_key_is_no_finding(cases: dict[str, Any]) -> None:
    """It says nothing about the artifact."""
    said = cases["no data key"]["refused"]
    assert said.startswith("tiny/llama v1: vllm/tiny/secret: the worker was given no data key")


@pytest.mark.parametrize("name", [*RELOADS, "another data key", "no data key"])
def test_no_key_is_left_on_the_disk(cases: dict[str, Any], name: str) -> None:
    """vLLM takes a raw key in a file; the file lives as long as the engine."""
    assert [] == cases[name]["left"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("with its key", "loaded"),
        ("without a key", "CryptographyError: {file} is encrypted, and no key was given; "),
        ("keyfile gone", "ValueError: {file} was not opened: the file of its key, "),
        ("key too long", "long-key does not hold a key of 32 bytes; write it with"),
        ("not encrypted", "model.tensors is not encrypted, and a key was given; leave out"),
    ],
)
def test_the_loader_says_what_is_wrong_with_a_key(
    cases: dict[str, Any], name: str, says: str
) -> None:
    """As any engine has it, `vllm serve` too; a newline behind the key is the usual mistake."""
    said = cases["loader"][name]
    file = said.split(": ", 1)[-1].split(" ", 1)[0]
    assert says.format(file=file) in said


def test_a_host_without_libsodium_opens_encrypted_files(tmp_path: Path, run_script: Any) -> None:
    """tensorizer asks the system for it; images of Python alone have none."""
    run_script("no_sodium.py", tmp_path / "said")
    assert json.loads((tmp_path / "said").read_text()) == {"before": False, "same": True}
