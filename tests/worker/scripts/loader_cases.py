"""Load artifacts with the plugin's loader, without an engine; what came of each goes to CASES.

    python loader_cases.py MODELS OUT CASES

vLLM finds the loader by its own registry. Ranks are virtual: nothing is computed with the models.
"""

import json
import os
import shutil
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from building import artifact
from tensorizer import TensorSerializer
from transformers import AutoModelForCausalLM, MambaConfig
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader

from tensorize_assets.core import layout
from tensorize_assets.vllm_plugin import report, streams
from tensorize_assets.worker import model_builder
from tensorize_assets.worker.module_tensors import module_tensors
from tensorize_assets.worker.virtual_ranks import virtual_rank


def configure(folder: Path, uri: Path, size: int = 1, **settings: Any) -> VllmConfig:
    """vLLM's configuration to load the file at `uri` as the model in `folder`."""
    settings = {"tensorizer_uri": str(uri), "verify_hash": True} | settings
    return EngineArgs(
        model=str(folder),
        tensor_parallel_size=size,
        dtype="bfloat16",
        enforce_eager=True,
        distributed_executor_backend="uni" if size == 1 else "mp",
        load_format="tensorizer",
        model_loader_extra_config=settings,
    ).create_engine_config()


def loaded(folder: Path, uri: Path | None = None, rank: int = 0, size: int = 1, **settings: Any):
    """The model as an engine gets it, post-load step included."""
    uri = uri or folder / layout.tensorizer_uri_name(size)
    config = configure(folder, uri, size, **settings)
    with virtual_rank(rank, size), set_current_vllm_config(config):
        loader = get_model_loader(config.load_config)
        return loader.load_model(vllm_config=config, model_config=config.model_config)


def failure(folder: Path, uri: Path | None = None, **settings: Any) -> str:
    try:
        loaded(folder, uri, **settings)
    except Exception as error:  # noqa: BLE001 - a test reads which it was
        return f"{type(error).__name__}: {error}"
    return "loaded"


def reported(folder: Path, name: str) -> Any:
    """What the load left in the report's folder, which is empty afterwards."""
    path = folder / name
    text = path.read_text() if path.exists() else None
    path.unlink(missing_ok=True)
    return text


def attributes(parameter: torch.nn.Parameter) -> dict[str, str]:
    """What vLLM has attached to a parameter, and what it is."""
    known = {name: type(value).__name__ for name, value in vars(parameter).items()}
    return known | {"class": type(parameter).__name__}


def filling(snapshot: Path, folder: Path) -> dict[str, Any]:
    """What becomes of a constructed model's own objects when it is filled."""
    source = model_builder.configure(str(snapshot), 1, "bfloat16")
    config = configure(folder, folder / "model.tensors")
    with virtual_rank(0, 1):
        expected = model_builder.construct(source)
        model_builder.load_weights(source, expected, lambda _tensors, _bytes: None)
        model = model_builder.construct(config)
        before = dict(model.named_parameters(remove_duplicate=False))
        kept = {name: attributes(parameter) for name, parameter in before.items()}
        places = {name: parameter.data_ptr() for name, parameter in before.items()}
        loader = get_model_loader(config.load_config)
        with set_current_vllm_config(config):
            loader.load_weights(model, config.model_config)
    after = dict(model.named_parameters(remove_duplicate=False))
    tensors = {name: tensor for name, _, tensor in module_tensors(model)}
    wanted = {name: tensor for name, _, tensor in module_tensors(expected)}
    pointers: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        pointers.setdefault(tensor.data_ptr(), []).append(name)
    return {
        "loader": type(loader).__module__,
        "verify_hash": loader.tensorizer_config.verify_hash,
        "same objects": before.keys() == after.keys()
        and all(after[name] is before[name] for name in after),
        "moved": [name for name in after if after[name].data_ptr() != places[name]],
        "attributes": kept,
        "attributes after": {name: attributes(parameter) for name, parameter in after.items()},
        "different": sorted(
            name
            for name in wanted.keys() | tensors.keys()
            if name not in wanted
            or name not in tensors
            or wanted[name].dtype != tensors[name].dtype
            or not torch.equal(wanted[name], tensors[name])
        ),
        "tensors": len(tensors),
        "shared": [sorted(names) for names in pointers.values() if len(names) > 1],
        "training": [name for name, parameter in after.items() if parameter.requires_grad],
        "dtypes": sorted({str(tensor.dtype) for tensor in tensors.values()}),
    }


@contextmanager
def watched() -> Iterator[dict[str, Any]]:
    """What is read to where it shall stand, and by how many."""
    found: dict[str, Any] = {"runs": 0, "read": []}
    run, one = streams.Deserializer._read_run, streams.Deserializer._read_one

    def counted(*arguments: Any) -> None:
        found["runs"] += 1
        run(*arguments)

    def named(self: Any, stream: Any, entry: Any, room: memoryview) -> None:
        found["read"].append(str(entry.name.normalize_()))
        one(self, stream, entry, room)

    with (
        patch.object(streams.Deserializer, "_read_run", counted),
        patch.object(streams.Deserializer, "_read_one", named),
    ):
        yield found


def kept_after_closing(uri: Path) -> int:
    """How many tensors a closed deserializer still holds of those it has handed out."""
    module = torch.nn.Module()
    handed_out: list[weakref.ref[Any]] = []
    module.register_parameter = module.register_buffer = (  # type: ignore[method-assign]
        lambda _, tensor: handed_out.append(weakref.ref(tensor))
    )
    with streams.find(str(uri), {}).deserializer("cpu", {}) as deserializer:
        paths = {name.rpartition(".")[0]: module for name in deserializer}
        module.named_modules = paths.items  # type: ignore[method-assign]
        deserializer.load_into_module(module)
        assert handed_out
    return sum(tensor() is not None for tensor in handed_out)


def damaged(folder: Path, name: str, change: Any) -> Path:
    """A copy of an artifact whose file is another."""
    copy = folder.parent / name
    shutil.copytree(folder, copy)
    path = copy / "model.tensors"
    path.write_bytes(change(path.read_bytes()))
    return copy


def flip(data: bytes) -> bytes:
    # In the middle of the last tensor of a Llama: the head, 500 rows of 256.
    changed = bytearray(data)
    changed[-100_000] ^= 1
    return bytes(changed)


def main(models: Path, out: Path, cases: Path) -> None:
    reports = out / "reports"
    reports.mkdir(parents=True)
    os.environ[report.FOLDER_VARIABLE] = str(reports)
    root = out / "root"
    llama, llama_built = artifact(models / "llama", root, "llama")
    qwen2, qwen2_built = artifact(models / "qwen2", root, "qwen2")
    halves, halves_built = artifact(models / "llama", root, "tp2", tensor_parallel_size=2)
    wide, _ = artifact(models / "llama", root, "float32", dtype="float32")
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=500, hidden_size=64, state_size=4, num_hidden_layers=1, time_step_rank=4
    )
    mamba = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    mamba.get_parameter("backbone.layers.0.mixer.A_log").data += torch.randn(128, 4) / 100
    mamba.save_pretrained(out / "mamba")
    mixed, mixed_built = artifact(out / "mamba", root, "mamba")

    found: dict[str, Any] = {
        "llama": filling(models / "llama", llama),
        "qwen2": filling(models / "qwen2", qwen2),
        "mamba": filling(out / "mamba", mixed) | {"stock": mixed_built.stock_vllm.loadable},
    }
    for path in reports.iterdir():
        path.unlink()

    model = loaded(qwen2)
    down = model.model.layers[0].mlp.down_proj
    found["processed"] = {"cpu_linear": hasattr(down, "cpu_linear"), "training": model.training}
    loads: dict[str, Any] = {"qwen2": (qwen2_built, reported(reports, "rank-000.json"))}
    for rank in (0, 1):
        loaded(halves, rank=rank, size=2)
        loads[f"tp2 {rank}"] = (halves_built, reported(reports, f"rank-{rank:03d}.json"))
    silent = damaged(llama, "silent", flip)
    found["silent"] = failure(silent, verify_hash=False)
    loads["silent"] = (llama_built, reported(reports, "rank-000.json"))
    found["loads"] = {
        name: {"built": built.model_dump(mode="json"), "load": json.loads(load)}
        for name, (built, load) in loads.items()
    }

    def errors(name: str, folder: Path, uri: Path | None = None, **settings: Any) -> None:
        found[name] = {"error": failure(folder, uri, **settings)}
        told = json.loads(reported(reports, "failure-000.json") or "null")
        found[name]["told"] = told and f"{told['kind']}: {told['message']}"
        found[name]["load"] = json.loads(reported(reports, "rank-000.json") or "null")

    errors("other model", qwen2, llama / "model.tensors")
    errors("other dtype", llama, wide / "model.tensors")
    errors("other shape", llama, halves / "model-rank-000.tensors")
    errors("wholly other model", llama, mixed / "model.tensors")
    errors("flipped", damaged(llama, "flipped", flip))
    errors("cut", damaged(llama, "cut", lambda data: data[:-1000]))
    errors("cut in its index", damaged(llama, "cut early", lambda data: data[:300]))
    errors("empty", damaged(llama, "empty", lambda _: b""))
    errors("no tensorizer file", damaged(llama, "other", lambda _: b"PK\x03\x04" * 100))
    errors("gone", llama, llama / "nothing.tensors")
    errors("not a template", halves, halves / "model-rank-000.tensors", size=2)

    plain = damaged(llama, "plain", lambda _: b"")
    source = AutoModelForCausalLM.from_pretrained(models / "llama", dtype=torch.bfloat16)
    serializer = TensorSerializer(str(plain / "model.tensors"))
    serializer.write_module(source, include_non_persistent_buffers=False)
    serializer.close()
    model = loaded(plain)
    found["plain"] = {"cpu_linear": hasattr(model.model.layers[0].mlp.down_proj, "cpu_linear")}

    del os.environ[report.FOLDER_VARIABLE]
    for path in reports.iterdir():
        path.unlink()
    found["production"] = {
        "loaded": failure(llama),
        "error": failure(silent),
        "reports": [path.name for path in reports.iterdir()],
    }
    for name, settings in {"two": {"num_readers": 2}, "five": {"num_readers": 5}}.items():
        with watched() as seen:
            failure(llama, **settings)
        found[f"{name} readers"] = seen["runs"]
    with watched() as seen:
        tied = loaded(qwen2, verify_hash=False)
    found["tied"] = {
        "read": [name for name in seen["read"] if name.startswith(("lm_head", "model.embed"))],
        "shared": tied.lm_head.weight.data_ptr() == tied.model.embed_tokens.weight.data_ptr(),
    }
    found["kept after closing"] = kept_after_closing(llama / "model.tensors")
    cases.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
