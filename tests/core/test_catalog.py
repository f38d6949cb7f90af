"""The catalog's models, names and tensor-parallel rules."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import random
import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from pydantic import ValidationError

from tensorize_assets.core import catalog
from tensorize_assets.core.catalog import (
    DEFAULT_PROMPTS,
    Catalog,
    Profile,
    byte_fields,
    check_tensor_parallel,
    from_partition_key,
    load_catalog,
    to_partition_key,
)
from tensorize_assets.core.errors import CatalogError

REPOSITORY = Path(__file__).parents[2]
SHIPPED = REPOSITORY / "dagster_home" / "models.yaml"


def _profile(**fields: Any) -> Profile:
    return Profile.model_validate({"reload_device": "cpu", **fields})


def _catalog(models: dict[str, Any]) -> Catalog:
    return Catalog.model_validate({"root": "artifacts", "models": models})


def _pairs() -> Catalog:
    cpu = {"reload_device": "cpu"}
    return _catalog(
        {
            "facebook/opt-125m": {"profiles": {"v1": cpu, "v1-tp2": cpu}},
            "gpt2": {"profiles": {"v1": cpu}},
        }
    )


def test_a_profile_needs_only_the_reload_device() -> None:
    """Every other field has the default that the documentation names."""
    expected = {
        "revision": "main",
        "track": "follow",
        "tensor_parallel_size": 1,
        "dtype": "auto",
        "format": "vllm",
        "sharding": "virtual",
        "resources": None,
        "reload_device": "cpu",
        "adapters": (),
        "encryption": "none",
        "serialization_kwargs": {},
        "deserialization_kwargs": {},
        "prompts": DEFAULT_PROMPTS,
        "max_perplexity": 500.0,
        "perplexity_tolerance": 0.10,
    }
    assert expected == _profile().model_dump()


def test_every_field_is_described() -> None:
    """The UI and the editor's schema show these texts; an empty one helps nobody."""
    models = (Catalog, catalog.ModelEntry, Profile)
    fields = [(m.__name__, name, f) for m in models for name, f in m.model_fields.items()]
    assert [(model, name) for model, name, f in fields if not f.description] == []


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"tensor_parallel_size": 0}, ("tensor_parallel_size",)),
        ({"tensor_parallel_size": True}, ("tensor_parallel_size",)),
        ({"tensor_parallel_size": "2"}, ("tensor_parallel_size",)),
        ({"tensor_parallel_size": 10**6}, ("tensor_parallel_size",)),
        ({"dtype": "bf16"}, ("dtype",)),
        ({"track": "latest"}, ("track",)),
        ({"format": "gguf"}, ("format",)),
        ({"format": "hf", "tensor_parallel_size": 2}, ("tensor_parallel_size",)),
        ({"reload_device": "cuda:0"}, ("reload_device",)),
        ({"revision": "a b"}, ("revision",)),
        ({"revision": ""}, ("revision",)),
        ({"revision": "../x"}, ("revision",)),
        ({"prompts": []}, ("prompts",)),
        ({"prompts": ["x", " "]}, ("prompts", 1)),
        ({"prompts": "x"}, ("prompts",)),
        ({"max_perplexity": 1}, ("max_perplexity",)),
        ({"max_perplexity": float("inf")}, ("max_perplexity",)),
        ({"perplexity_tolerance": 0}, ("perplexity_tolerance",)),
        ({"perplexity_tolerance": float("nan")}, ("perplexity_tolerance",)),
        ({"deserialization_kwargs": {"device": "cpu"}}, ("deserialization_kwargs", "device")),
        ({"serialization_kwargs": {"file_obj": "x"}}, ("serialization_kwargs", "file_obj")),
        ({"adapters": [{"name": "a"}]}, ("adapters", 0, "repo")),
        ({"adaptors": []}, ("adaptors",)),
    ],
)
def test_a_mistake_in_a_profile_names_its_field(
    fields: dict[str, Any], where: tuple[str | int, ...]
) -> None:
    """A profile is also made from command-line options, where there is no line to point at."""
    with pytest.raises(ValidationError) as caught:
        _profile(**fields)
    assert [where] == [error["loc"] for error in caught.value.errors()]


def test_a_profile_cannot_be_changed() -> None:
    """Its fields go into a build id: a change after that would name the wrong build."""
    profile = _profile()
    with pytest.raises(ValidationError):
        profile.dtype = "float16"  # pyright: ignore[reportAttributeAccessIssue]


def test_values_of_refused_arguments_are_not_shown() -> None:
    """Somebody who puts a key into the catalog must not find it in a log as well."""
    with pytest.raises(ValidationError) as caught:
        _profile(deserialization_kwargs={"encryption": "hunter2"})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("class_name", "known", "refused", "vllm_only"),
    [
        (
            "TensorSerializer",
            catalog.SERIALIZATION_ARGUMENTS,
            catalog.REFUSED_SERIALIZATION_ARGUMENTS,
            set[str](),
        ),
        (
            "TensorDeserializer",
            catalog.DESERIALIZATION_ARGUMENTS,
            catalog.REFUSED_DESERIALIZATION_ARGUMENTS,
            {"mode"},
        ),
    ],
)
def test_arguments_are_those_of_the_installed_tensorizer(
    class_name: str, known: dict[str, str], refused: dict[str, str], vllm_only: set[str]
) -> None:
    """core holds a copy, because it must not import tensorizer; a copy goes stale."""
    tensorizer = pytest.importorskip("tensorizer")
    parameters = inspect.signature(getattr(tensorizer, class_name)).parameters
    assert set(parameters) == (known.keys() | refused.keys()) - vllm_only
    assert set() == known.keys() & refused.keys()


def test_arguments_that_vllm_refuses_are_refused() -> None:
    """vLLM would refuse them when the artifact is reloaded: after all the work."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vllm is not installed")
    # Read, not imported: importing vLLM takes ten seconds.
    source = Path(spec.origin).parent / "model_executor/model_loader/tensorizer_loader.py"
    blacklisted = next(
        ast.literal_eval(node.value)
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "BLACKLISTED_TENSORIZER_ARGS"
    )
    refused = {
        name
        for name, reason in catalog.REFUSED_DESERIALIZATION_ARGUMENTS.items()
        if reason.startswith("vLLM decides")
    }
    assert blacklisted == refused


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ("facebook/opt-125m", "facebook--opt-125m"),
        ("gpt2", "gpt2"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB--SmolLM2-135M-Instruct"),
        ("a_b/c.d-e", "a_b--c.d-e"),
    ],
)
def test_a_partition_key_gives_the_model_back(model: str, key: str) -> None:
    """The partition key is all that an asset has to find its model again."""
    assert key == to_partition_key(model)
    assert model == from_partition_key(key)


@pytest.mark.parametrize("model", ["", "a--b", "a/b/c", "a/", "-a/b", "a|b", "a b", "a/b\n", "é"])
def test_what_is_no_repo_id_has_no_partition_key(model: str) -> None:
    """`a--b` would come back as `a/b`: another model."""
    with pytest.raises(CatalogError, match="is not a Hub repo id"):
        to_partition_key(model)


@pytest.mark.parametrize("key", ["", "a--b--c", "a--", "--a", "a/b--c"])
def test_what_is_no_partition_key_has_no_model(key: str) -> None:
    """Dagster's partition keys can also be added by hand, in the UI."""
    with pytest.raises(CatalogError, match="is not a Hub repo id"):
        from_partition_key(key)


def test_repo_ids_are_those_that_huggingface_hub_accepts() -> None:
    """The rule is copied (their module is slow to import), so it is held against theirs."""

    def accepts(model: str) -> bool:
        try:
            validate_repo_id(model)
        except HFValidationError:
            return False
        return True

    pieces = ["a", "B7", "_", "-", ".", "/", ".git", " ", "\n", "é", "x" * 94, "org/name", "|"]
    chosen = random.Random(2)
    ids = ["".join(chosen.choices(pieces, k=chosen.randint(0, 6))) for _ in range(5000)]
    different = [m for m in ids if accepts(m) != (_partition_key_or_none(m) is not None)]
    assert different == []
    assert 300 < sum(map(accepts, ids)) < 4700


def _partition_key_or_none(model: str) -> str | None:
    try:
        return to_partition_key(model)
    except CatalogError:
        return None


def test_pairs_come_in_the_files_order() -> None:
    """Partitions and tables should read as the file does."""
    expected = [("facebook/opt-125m", "v1"), ("facebook/opt-125m", "v1-tp2"), ("gpt2", "v1")]
    assert expected == list(_pairs().pairs())


def test_a_pair_has_its_profile() -> None:
    """The lookup every asset starts with."""
    pairs = _pairs()
    assert pairs.models["gpt2"].profiles["v1"] is pairs.profile("gpt2", "v1")


@pytest.mark.parametrize(
    ("model", "suffix", "words"),
    [
        ("facebook/opt-125m", "v2", ["facebook/opt-125m", "v2", "v1, v1-tp2"]),
        ("facebook/opt-125", "v1", ["facebook/opt-125 ", "v1", "facebook/opt-125m"]),
        ("zzz", "v1", ["zzz", "facebook/opt-125m, gpt2"]),
    ],
)
def test_a_pair_that_is_not_there_names_what_is(model: str, suffix: str, words: list[str]) -> None:
    """Most missing pairs are typing mistakes."""
    with pytest.raises(CatalogError) as caught:
        _pairs().profile(model, suffix)
    assert [word for word in words if word not in str(caught.value)] == []


def test_only_fields_that_change_bytes_go_into_the_build() -> None:
    """Another prompt or reader count must not build terabytes again."""
    plain = _profile()
    other = _profile(
        revision="v2",
        track="pin",
        reload_device="cuda",
        deserialization_kwargs={"num_readers": 4},
        prompts=["x"],
        max_perplexity=20.0,
        perplexity_tolerance=0.5,
    )
    assert byte_fields(plain) == byte_fields(other)


def test_the_first_format_is_in_no_build_id() -> None:
    """Builds from before there was a second keep their ids, and are not made again."""
    assert {"dtype", "serialization_kwargs", "tensor_parallel_size"} == byte_fields(
        _profile()
    ).keys()


@pytest.mark.parametrize(
    "fields",
    [
        {"tensor_parallel_size": 2},
        {"dtype": "float16"},
        {"serialization_kwargs": {"limit_cpu_concurrency": 1}},
        {"format": "hf"},
    ],
)
def test_each_field_that_changes_bytes_goes_into_the_build(fields: dict[str, Any]) -> None:
    """A build id that leaves one out would call two different artifacts the same."""
    assert {**byte_fields(_profile()), **fields} == byte_fields(_profile(**fields))


LLAMA = {"num_attention_heads": 9, "num_key_value_heads": 3}


@pytest.mark.parametrize(
    ("config", "works"),
    [
        (LLAMA, [1, 3, 9]),
        ({"num_attention_heads": 12}, [1, 2, 3, 4, 6, 12]),
        ({"num_attention_heads": 12, "num_key_value_heads": None}, [1, 2, 3, 4, 6, 12]),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, [1, 2, 4, 12]),
        ({"num_attention_heads": 8, "num_key_value_heads": 1}, [1, 2, 4, 8]),
        ({"n_head": 12}, [1, 2, 3, 4, 6, 12]),
        ({"n_heads": 4}, [1, 2, 4]),
        ({"num_heads": 6}, [1, 2, 3, 6]),
        ({"text_config": {"num_attention_heads": 4}, "num_attention_heads": 9}, [1, 2, 4]),
        ({"text_config": {"hidden_size": 4}, "num_attention_heads": 9}, [1, 3, 9]),
        # Multi-head latent attention shares one compressed KV head with every rank.
        ({"num_attention_heads": 8, "num_key_value_heads": 3, "kv_lora_rank": 4}, [1, 2, 4, 8]),
    ],
)
def test_sizes_that_work_are_named(config: dict[str, Any], works: list[int]) -> None:
    """The sizes are vLLM's own rule; the message saves the reader the arithmetic."""
    messages = {
        n: check_tensor_parallel(_profile(tensor_parallel_size=n), config) for n in range(1, 20)
    }
    assert works == [n for n, message in messages.items() if message is None]
    remedy = f"sizes that work: {', '.join(map(str, works))}"
    assert [m for m in messages.values() if m is not None and not m.endswith(remedy)] == []


@pytest.mark.parametrize(
    ("size", "config", "words"),
    [
        (2, LLAMA, "size 2 does not divide the model's 9 attention heads (num_attention_heads"),
        (2, {"n_head": 9}, "(n_head in config.json)"),
        (
            3,
            {"num_attention_heads": 12, "num_kv_heads": 4},
            "neither divides the model's 4 KV heads (num_kv_heads in config.json)",
        ),
    ],
)
def test_a_size_that_does_not_fit_says_what_it_was_held_against(
    size: int, config: dict[str, Any], words: str
) -> None:
    """Attention heads and KV heads are different numbers, and either may be the obstacle."""
    assert words in str(check_tensor_parallel(_profile(tensor_parallel_size=size), config))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_attention_heads": None},
        {"num_attention_heads": "9"},
        {"num_attention_heads": 0},
        {"num_attention_heads": True},
        {"num_attention_heads": 10**30},
        {"text_config": [1]},
    ],
)
def test_a_config_that_names_no_heads_is_left_to_vllm(config: dict[str, Any]) -> None:
    """config.json is somebody else's file; guessing would refuse models that work."""
    assert check_tensor_parallel(_profile(tensor_parallel_size=7), config) is None


def test_the_shipped_catalog_loads() -> None:
    """It is the first thing a new user runs."""
    model = "HuggingFaceTB/SmolLM2-135M-Instruct"
    shipped = load_catalog(SHIPPED)
    one, three = shipped.profile(model, "v1"), shipped.profile(model, "v1-tp3")
    assert shipped.root == "artifacts"
    assert [(model, "v1"), (model, "v1-tp3")] == list(shipped.pairs())
    assert (one.dtype, one.reload_device, one.tensor_parallel_size) == ("bfloat16", "cpu", 1)
    assert one.model_copy(update={"tensor_parallel_size": 3}) == three
    assert check_tensor_parallel(three, LLAMA) is None


def test_the_first_of_merged_mappings_wins(tmp_path: Path) -> None:
    """YAML's own rule for `<<: [a, b]`; the profile's own keys win over both."""
    file = tmp_path / "models.yaml"
    file.write_text(
        "root: artifacts\nmodels:\n  a/b:\n    profiles:\n"
        "      v1: &a {reload_device: cpu, track: pin, revision: a}\n"
        "      v2: &b {reload_device: cuda, dtype: float16, revision: b}\n"
        "      v3: {<<: [*a, *b], revision: c}\n"
    )
    profile = load_catalog(file).profile("a/b", "v3")
    expected = _profile(reload_device="cpu", track="pin", dtype="float16", revision="c")
    assert expected == profile


def test_an_edit_is_seen_at_once(tmp_path: Path) -> None:
    """A file is not read twice as it is, also not one with mistakes, and each edit is read."""
    file = tmp_path / "models.yaml"
    good = "root: artifacts\nmodels: {a/b: {profiles: {v1: {reload_device: cpu}}}}\n"
    file.write_text(good)
    first = load_catalog(file)
    assert load_catalog(file) is first
    file.write_text(good.replace("v1", "v2"))
    assert [("a/b", "v2")] == [*load_catalog(file).pairs()]
    file.write_text(good.replace("cpu", "gpu"))
    for _ in range(2):
        with pytest.raises(CatalogError, match="reload_device"):
            load_catalog(file)
    file.write_text(good)
    assert first == load_catalog(file)
    file.unlink()
    with pytest.raises(CatalogError):
        load_catalog(file)


def test_load_catalog_raises_every_problem_one_a_line(tmp_path: Path) -> None:
    """Editors and CI jump to FILE:LINE."""
    file = tmp_path / "models.yaml"
    file.write_text(
        "root: gs://a\nmodels:\n  a/b:\n    profiles:\n"
        "      v1: {reload_device: cpu}\n      v 2: {reload_device: cpu}\n"
    )
    with pytest.raises(CatalogError) as caught:
        load_catalog(file)
    expected = (
        f"{file}:1: root: is a URL that is not s3://; write s3://bucket/prefix, or a folder\n"
        f"{file}:6: models.a/b.profiles.v 2: a suffix cannot contain ' '; "
        "use letters, digits, . _ -"
    )
    assert expected == str(caught.value)


def _chain(first: str, link: str) -> str:
    """Twelve lines, each naming the one before nine times: 9**12 values."""
    lines = [f"k0: &k0 {first}"]
    for n in range(1, 13):
        lines.append(f"k{n}: &k{n} " + link % ", ".join([f"*k{n - 1}"] * 9))
    return "\n".join(lines)


@pytest.mark.parametrize(
    "content",
    [
        _chain("[x]", "[%s]"),
        _chain("{x: 1}", "{<<: [%s]}"),
        "[" * 200_000,
        "? " * 100_000,
        "root: 1" + ":5" * 100_000,
    ],
    ids=["laughs", "merged laughs", "brackets", "keys", "base 60"],
)
def test_a_file_made_to_hang_is_refused_quickly(tmp_path: Path, content: str) -> None:
    """The catalog is read wherever Dagster loads its definitions: it must never hang that."""
    file = tmp_path / "models.yaml"
    file.write_text(content)
    started = time.monotonic()
    with pytest.raises(CatalogError):
        load_catalog(file)
    assert time.monotonic() - started < 5


def test_random_damage_never_raises_anything_but_a_catalog_error(tmp_path: Path) -> None:
    """Whoever loads the catalog handles one exception, and prints its message."""
    pieces = [
        *("\t", "\n", "  ", "\r", "\x85", "\u2028", "\ufeff", "\0", "\x1b", "é"),
        *("[", "]", "{", "}", ",", ": ", "- ", "? ", "#", "'", '"', "|\n", "@", "%YAML 9\n"),
        *("&a ", "*a", "*v1", "<<: ", "=", "~", "no", ".inf", "-.nan", "1e400", "1:30:99"),
        *("!!python/object:os.system ", "!!int ", "!!float ", "!!bool ", "!!null ", "!!set "),
        *("!!binary ", "!!timestamp ", "!e! ", "!<x> ", "2024-99-99", "0x_", "0b_"),
        *("9" * 5000, "0x" + "f" * 5000, r'"\uD800"', r'"\UFFFFFFFF"', "---\n", "...\n"),
        *("root:", "models:", "profiles:\n", "v1:", "'[key]': ", "prompts: "),
        *("serialization_kwargs: ", "tensor_parallel_size: ", "max_perplexity: "),
    ]
    chosen = random.Random(2)
    file = tmp_path / "models.yaml"
    refused = 0
    for _ in range(400):
        content = chosen.choice([SHIPPED.read_text(), SHIPPED.read_text(), ""])
        for _ in range(chosen.choice([1, 1, 2, 5, 20])):
            start = chosen.randint(0, len(content))
            end = start + chosen.choice([0, 0, 5])
            content = content[:start] + chosen.choice(pieces) + content[end:]
        file.write_bytes(content.encode())
        message = _refusal(file)
        refused += message is not None
        lines = message.split("\n") if message else []
        assert [line for line in lines if not line.startswith(str(file))] == []
        assert [line for line in lines if not line.isprintable()] == []
    assert 200 < refused < 400


def _refusal(file: Path) -> str | None:
    try:
        load_catalog(file)
    except CatalogError as error:
        return str(error)
    return None


@pytest.mark.parametrize("seed", range(3))
def test_random_bytes_never_raise_anything_but_a_catalog_error(tmp_path: Path, seed: int) -> None:
    """Somebody will name a model's weights as the catalog."""
    file = tmp_path / "models.yaml"
    for size in (1, 3, 10, 100, 1000):
        file.write_bytes(random.Random(f"{seed}-{size}").randbytes(size))
        with pytest.raises(CatalogError):
            load_catalog(file)
