"""The task `adapters`: what it stores, what it warns of, and what it refuses without a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

STORED = [
    "vllm/tiny/model/v1-0123456789ab/adapter_config.json",
    "vllm/tiny/model/v1-0123456789ab/adapter_model.tensors",
]
DIRECTORY = "vllm/tiny/model/v1-0123456789ab"


@pytest.fixture(scope="session")
def cases(
    tiny_models: Path, tmp_path_factory: pytest.TempPathFactory, run_script: Any
) -> dict[str, Any]:
    """What came of each of the adapters of adapter_cases.py."""
    out = tmp_path_factory.mktemp("adapters")
    run_script("adapter_cases.py", tiny_models, out / "work", out / "cases.json")
    return json.loads((out / "cases.json").read_text())


@pytest.fixture(scope="session")
def vllms(
    tiny_models: Path, tmp_path_factory: pytest.TempPathFactory, run_script: Any
) -> dict[str, Any]:
    """What vLLM's own code for adapters says, beside ours (adapter_vllm_cases.py)."""
    out = tmp_path_factory.mktemp("adapters-vllm")
    run_script("adapter_vllm_cases.py", tiny_models, out / "work", out / "cases.json")
    return json.loads((out / "cases.json").read_text())


def sha256_of(case: dict[str, Any]) -> str:
    return case["result"]["files"][0]["sha256"]


def warnings(case: dict[str, Any]) -> list[str]:
    return [said for said in case["said"] if said.startswith("warning: ")]


# What is stored


def test_an_adapter_lies_beside_the_model_with_its_config(cases: dict[str, Any]) -> None:
    """vLLM finds both by these names in the directory that it is given."""
    case = cases["one"]
    assert STORED == case["root"]
    assert case["same"]
    assert case["config is the source's"]
    assert [] == warnings(case)


def test_the_result_names_files_tensors_and_rank(cases: dict[str, Any]) -> None:
    """The manifest is made of this."""
    case = cases["one"]
    (entry,) = case["result"]["adapters"]
    assert ("poet", "org/poet", 8) == (entry["name"], entry["repo"], entry["rank"])
    assert "c" * 40 == entry["snapshot"]["commit"]
    assert ("adapter_model.tensors", "adapter_config.json") == (entry["file"], entry["config"])
    assert case["sha256 of files"] == {
        file["path"]: file["sha256"] for file in case["result"]["files"]
    }
    shapes = {tensor["name"]: tensor["shape"] for tensor in entry["tensors"]}
    stem = "base_model.model.model.layers.1.self_attn.k_proj"
    assert ([8, 256], [128, 8]) == (
        shapes[f"{stem}.lora_A.weight"],
        shapes[f"{stem}.lora_B.weight"],
    )
    assert 16 == len(shapes)


def test_the_same_adapter_gives_the_same_file(cases: dict[str, Any]) -> None:
    """A half-finished build is completed by comparing hashes."""
    assert cases["one"]["result"]["files"] == cases["again"]["result"]["files"]


def test_vllm_is_not_imported(cases: dict[str, Any]) -> None:
    """That alone takes ten seconds."""
    assert [] == cases["imported"]


@pytest.mark.parametrize("name", ["bin", "old bin"])
def test_a_bin_adapter_holds_the_same_tensors(cases: dict[str, Any], name: str) -> None:
    """Many repos have nothing else, some since before torch had its zip format."""
    assert cases[name]["same"]


def test_several_adapters_lie_in_folders_of_their_own(cases: dict[str, Any]) -> None:
    """Of any rank, type and targets, also scaled by the root of the rank."""
    case = cases["several"]
    assert [
        f"{DIRECTORY}/adapters/{name}/{file}"
        for name in ("coder", "poet")
        for file in ("adapter_config.json", "adapter_model.tensors")
    ] == case["root"]
    assert [True, True] == case["same"]
    assert [("coder", 16), ("poet", 8)] == [
        (entry["name"], entry["rank"]) for entry in case["result"]["adapters"]
    ]


@pytest.mark.parametrize(
    "name",
    ["opt", "gemma", "qwen2", "embedding", "tied", "turned", "fan_in_fan_out=True", "short names"],
)
def test_an_adapter_that_fits_its_base_is_stored(cases: dict[str, Any], name: str) -> None:
    """Embeddings, an output tied to them, GPT-2's turned matrices, files that name less."""
    assert STORED == cases[name]["root"]
    assert [] == warnings(cases[name])


def test_shards_of_the_build_may_be_in_the_making(cases: dict[str, Any]) -> None:
    """Both assets run at once; a scratch folder of one name would keep one of them out."""
    assert "result" in cases["beside the shards"]


def test_an_adapter_goes_to_s3(cases: dict[str, Any]) -> None:
    """By the same read, and nothing of it stays in scratch."""
    case = cases["s3"]
    assert STORED == case["root"]
    assert [] == case["scratch"]
    assert sha256_of(cases["one"]) == sha256_of(case)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("other name", "names 'unsloth/llama-bnb-4bit' as its base model, and is built for tiny/"),
        ("local path", "names '/home/me/llama' as its base model, and is built for tiny/llama"),
        ("no name", "names no base model, and is built for tiny/llama"),
        ("embeddings left out", "vLLM leaves out the embeddings of the base model that it holds"),
    ],
)
def test_what_may_be_meant_is_stored_with_a_warning(
    cases: dict[str, Any], name: str, says: str
) -> None:
    """Many adapters were trained on a renamed or quantized copy of the model they are for."""
    (said,) = warnings(cases[name])
    assert says in said
    assert STORED == cases[name]["root"]


def test_the_hub_does_not_tell_large_letters_from_small(cases: dict[str, Any]) -> None:
    """Nor does the warning."""
    assert [] == warnings(cases["same name"])


# Encrypted


def test_an_encrypted_adapter_is_readable_with_its_key_alone(cases: dict[str, Any]) -> None:
    """tensorizer opens it, and no plain value stands in the file."""
    case = cases["encrypted"]
    assert STORED == case["root"]
    assert case["same"]
    assert [] == case["readable"]
    assert case["sha256"] == sha256_of(case)


def test_the_same_key_gives_the_same_encrypted_file(cases: dict[str, Any]) -> None:
    """As in the clear."""
    assert sha256_of(cases["encrypted"]) == sha256_of(cases["encrypted again"])


def test_without_the_key_nothing_is_written_in_its_stead(cases: dict[str, Any]) -> None:
    """Least of all plaintext."""
    assert "the worker was given no data key" in cases["no key"]["message"]
    assert [] == cases["no key"]["root"]


# Refused

REFUSED = [
    ("use_dora=True", "it was trained with DoRA (use_dora: True), which vLLM does not serve"),
    ("modules_to_save=['embed_tokens']", "it replaces modules of its base model as a whole"),
    ("trainable_token_indices=[1, 2]", "it trained single tokens of the vocabulary"),
    ("lora_bias=True", "its LoRA matrices have biases"),
    ("layer_replication=[[0, 2], [1, 2]]", "it repeats layers of its base model"),
    ("alora_invocation_tokens=[5]", "it acts only after its invocation tokens"),
    ("use_bdlora={'nblocks': 2}", "its LoRA matrices are block-diagonal"),
    ("use_qalora=True", "it was trained with QALoRA"),
    ("bias=lora_only", "it trained biases (bias: 'lora_only')"),
    ("peft_type=LOHA", "its peft_type is 'LOHA', and vLLM serves LORA alone"),
    ("init_lora_weights=pissa_niter_4", "a base model that 'pissa_niter_4' changed"),
    ("init_lora_weights=loftq", "a base model that 'loftq' changed"),
    ("alpha_pattern={'q_proj': 64}", "modules differ in it (alpha_pattern: {'q_proj': 64})"),
    ("rank_pattern={'q_proj': 64}", "modules differ in it (rank_pattern: {'q_proj': 64})"),
    ("r=0", "its rank r is 0"),
    ("r=513", "its rank r is 513 and its lora_alpha 16; vLLM takes ranks from 1 to 512"),
    ("r=8", "its rank r is '8'"),
    ("r=True", "its rank r is True"),
    ("lora_alpha=None", "its lora_alpha None"),
    ("no r", "adapter_config.json lacks r, without which vLLM loads no adapter"),
    ("no lora_alpha", "adapter_config.json lacks lora_alpha"),
    ("no target_modules", "adapter_config.json lacks target_modules"),
    ("other rank", "have 4 rows and 4 columns, and its config a rank of 8"),
    ("no fit", "have 8 rows and 4 columns, and its config a rank of 8"),
    ("one half", "'model.layers.1.self_attn.q_proj' has one LoRA matrix of two"),
    ("convolution", "has a torch.float32 of shape [8, 256, 1, 1] for a matrix"),
    ("integers", "has a torch.int8 of shape [8, 256] for a matrix"),
    ("empty", "has a torch.float32 of shape [8, 0] for a matrix"),
    ("twice", "it holds a LoRA matrix of 'model.layers.1.self_attn.q_proj' twice"),
    ("nothing", "it holds no LoRA matrix"),
    ("bias tensor", "it holds 1 tensors that are no LoRA matrices"),
    ("whole embeddings", "such as added tokens or whole modules"),
    ("classifier", "'base_model.model.score.weight', which vLLM does not serve"),
    ("added tokens", "is for a vocabulary of 501 tokens, and tiny/llama has 500"),
    ("added embeddings", "'model.embed_tokens' is for a vocabulary of 501 tokens"),
    ("added outputs", "'lm_head' is for a vocabulary of 501 tokens, and tiny/llama has 500"),
    ("added outputs, tied", "'lm_head' is for a vocabulary of 501 tokens, and tiny/qwen2 has 500"),
    ("flat embeddings", "changes a matrix of [500], and tiny/llama's is [500, 256]"),
    ("deeper base", "tiny/llama has no modules 'model.layers.2.self_attn.k_proj', "),
    ("other base", "and tiny/llama's is [128, 256]; it was trained on 'tiny/opt'"),
    ("other shapes", "changes a matrix of [9, 256], and tiny/llama's is [256, 256]"),
    ("many experts", "the index of its 3072 tensors takes 335392 bytes and tensorizer reserves"),
    ("attack", "adapter_model.bin asks to run code, holds other objects than tensors or is dama"),
    ("cut", "adapter_model.safetensors cannot be read (SafetensorError: "),
    ("longer", "adapter_model.safetensors cannot be read (SafetensorError: "),
    ("cut header", "adapter_model.safetensors cannot be read (SafetensorError: "),
    ("no file of tensors", "adapter_model.safetensors cannot be read (SafetensorError: "),
    ("empty file", "adapter_model.safetensors cannot be read (SafetensorError: "),
    ("huge header", "adapter_model.safetensors cannot be read (SafetensorError: "),
    ("lying offsets", "adapter_model.safetensors cannot be read (SafetensorError: "),
    ("lying shape", "adapter_model.safetensors cannot be read (SafetensorError: "),
    ("html bin", "adapter_model.bin asks to run code, holds other objects than tensors or is"),
    ("cut bin", "adapter_model.bin cannot be read (RuntimeError: "),
    ("nested bin", "adapter_model.bin holds other things than names and dense tensors"),
    ("meta bin", "adapter_model.bin holds other things than names and dense tensors"),
    ("sparse bin", "adapter_model.bin holds other things than names and dense tensors"),
    ("negative bin", "adapter_model.bin holds other things than names and dense tensors"),
    ("no json", "adapter_config.json is not a valid JSON document"),
    ("no object", "adapter_config.json is not a JSON object"),
    ("key twice", "key 'r' is given twice"),
]


@pytest.mark.parametrize(("name", "says"), REFUSED)
def test_what_cannot_be_served_is_refused_with_its_reason_and_leaves_nothing(
    cases: dict[str, Any], name: str, says: str
) -> None:
    """Refused for good, in seconds, with the adapter's name and repo; vLLM says it much later."""
    case = cases[name]
    assert "PreflightError" == case["error"]
    assert case["message"].startswith("adapter poet (org/poet@cccccccc): ")
    assert says in case["message"]
    assert [] == case["root"]


@pytest.mark.fault(
    "Bad Hub",
    "lora_adapters: a .bin with a pickle that runs code",
    "refused: it is not run, nothing is stored",
)
def test_a_pickle_that_runs_code_does_not_run(cases: dict[str, Any]) -> None:
    """The attack is seen to work where it is let; and torch's advice to let it is not passed on."""
    case = cases["attack"]
    assert case["works"]
    assert not case["attacked"]
    assert "weights_only" not in case["message"]


def test_one_adapter_that_is_refused_keeps_the_others_from_being_written(
    cases: dict[str, Any],
) -> None:
    """All are looked at first."""
    case = cases["one of two"]
    assert case["message"].startswith("adapter second (org/second@cccccccc): it was trained with")
    assert [] == case["root"]


def test_a_base_that_cannot_be_read_is_named(cases: dict[str, Any]) -> None:
    """It is not the adapter that is damaged."""
    assert cases["broken base"]["message"].startswith(
        "tiny/llama: model.safetensors cannot be read (SafetensorError: "
    )


def test_too_little_scratch_is_told_before_anything_is_written(cases: dict[str, Any]) -> None:
    """With how much is needed, the index included."""
    case = cases["small disk"]
    assert case["message"].startswith("tiny/llama v1: its adapters take 376,832 bytes and the scr")
    assert [] == case["root"]


def test_the_largest_index_that_fits_is_accepted(cases: dict[str, Any]) -> None:
    """To the byte, by tensorizer too."""
    found = cases["index"]["0"]
    assert found["tensors"] == found["read"]
    assert "refused" not in found


def test_one_byte_more_is_refused_by_us_and_by_tensorizer(cases: dict[str, Any]) -> None:
    """tensorizer says so only half-way through."""
    found = cases["index"]["1"]
    assert "Metadata overflow" == found["tensorizer"]
    assert f"the index of its {found['tensors']} tensors takes 262145 bytes" in found["refused"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("damaged scratch", "reads back differently than it was written"),
        ("lost tensor", "holds 15 tensors and the adapter has 16; they differ in base_model."),
    ],
)
def test_what_does_not_read_back_is_not_stored(cases: dict[str, Any], name: str, says: str) -> None:
    """The read that verifies is the one that uploads; the last byte is held back until then."""
    case = cases[name]
    assert "WorkerError" == case["error"]
    assert says in case["message"]
    assert [] == case["root"]


# Held against vLLM


def test_no_thread_of_tensorizer_s_outlives_its_error(cases: dict[str, Any]) -> None:
    """One would go on to write into the next file that gets the descriptor's number."""
    assert [] == cases["threads left"]["names"]


def test_our_largest_rank_is_vllms(vllms: dict[str, Any]) -> None:
    """Every rank up to it has an engine that takes it."""
    assert vllms["our ranks"] == vllms["ranks"]


def test_our_required_fields_are_vllms(vllms: dict[str, Any]) -> None:
    """Without them vLLM fails as it loads the adapter."""
    assert sorted(vllms["required"]) == sorted(vllms["our required"])


def test_names_are_read_as_vllm_reads_them(vllms: dict[str, Any]) -> None:
    """But for what vLLM takes for a matrix of a layer, and is none."""
    names = vllms["names"]
    differ = {name for name, found in names.items() if found["vllm"] != found["ours"]}
    no_matrices = {"base_model.model.score.weight", "base_model.model.classifier.bias"}
    # Up to 0.31.
    bias = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias"
    assert no_matrices == differ - {bias}
    assert [None] * 3 == [names[name]["ours"] for name in (bias, *no_matrices)]
    assert 10 <= sum(found["vllm"] is not None for found in names.values())


def test_vllm_leaves_out_what_we_say_it_leaves_out(vllms: dict[str, Any]) -> None:
    """Silently, and so we say it."""
    found: list[dict[str, Any]] = [*vllms["names"].values()]
    assert [name["left out by vllm"] for name in found] == [
        name["left out by us"] for name in found
    ]
    assert 2 == sum(name["left out by us"] for name in found)


def test_configs_are_refused_where_vllm_refuses_them(vllms: dict[str, Any]) -> None:
    """And taken where it takes them."""
    assert {True, False} == {case["vllm"] for case in vllms["configs"]}
    assert [] == [case["fields"] for case in vllms["configs"] if case["vllm"] != case["ours"]]


@pytest.mark.parametrize("name", ["plain", "bin", "rslora"])
def test_vllm_reads_from_our_file_what_it_reads_from_the_source(
    vllms: dict[str, Any], name: str
) -> None:
    """Encrypted too. Where vLLM has its own file for them, up to 0.31, ours is it to the byte."""
    found = vllms["interop"][name]
    assert 11 == found.pop("layers")
    assert [] == [what for what, holds in found.items() if not holds]
