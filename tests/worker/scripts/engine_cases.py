"""Run the tasks `reference` and `reload` on small models; what came of each goes to CASES.

    python engine_cases.py MODELS OUT CASES

One process for all, where each task has one of its own in production: importing vLLM takes 10 s,
an engine on these models 4 s. References come first: in production the process that makes one
builds nothing before.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from building import artifact
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from tensorize_assets.core import processes
from tensorize_assets.core.errors import PreflightError
from tensorize_assets.core.tasks import (
    ReferenceRequest,
    ReferenceResult,
    ReloadRequest,
    ReloadResult,
)
from tensorize_assets.worker import reference, reload
from tensorize_assets.worker.session import Progress

PROMPTS = ("the quick brown fox", "seven wizards watch from a")


def fields(**changes: object) -> dict[str, object]:
    known: dict[str, object] = {
        "model": "tiny/model",
        "suffix": "v1",
        "tensor_parallel_size": 1,
        "dtype": "bfloat16",
        "device": "cpu",
        "prompts": PROMPTS,
    }
    return known | changes


def referenced(folder: Path) -> dict[str, Any]:
    request = ReferenceRequest.model_validate(fields(snapshot=str(folder)))
    result = reference.run(request, Progress.silent())
    return crossed(result, ReferenceResult)


def reloaded(folder: Path, **changes: object) -> dict[str, Any]:
    said: list[str] = []
    progress = Progress(lambda message, level: said.append(f"{level}: {message}"))
    where = {"root": str(folder.parent), "directory": folder.name, "companions": ()}
    result = reload.run(ReloadRequest.model_validate(fields(**where, **changes)), progress)
    # vLLM kills a rank that still waits for a failed one, and does not see it die.
    deadline = time.monotonic() + 5
    while (left := ranks()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return crossed(result, ReloadResult) | {"said": said, "processes left": len(left)}


def ranks() -> list[psutil.Process]:
    """What this process has started and what still lives, but for multiprocessing's own helper."""
    return [
        child
        for child in processes.descendants(psutil.Process())
        if processes.is_alive(child) and "resource_tracker" not in " ".join(child.cmdline())
    ]


def crossed(result: Any, kind: Any) -> dict[str, Any]:
    """The result as it crosses to Dagster: as JSON, which has no NaN."""
    text = json.dumps(result.model_dump(mode="json"), allow_nan=False)
    assert kind.model_validate_json(text) == result
    return json.loads(text)


def refused(
    task: Callable[..., Any], request: type[Any], device: str = "cuda", **where: object
) -> str:
    try:
        task(request.model_validate(fields(device=device, **where)), Progress.silent())
    except PreflightError as error:
        return str(error)
    return "done"


def without_plugin(folder: Path) -> str:
    """What the task says, in another process, where vLLM does not find the plugin."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.environ["VLLM_PLUGINS"] = "others"
        said = refused(reference.run, ReferenceRequest, "cpu", snapshot=str(folder))
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with open(reading) as pipe:
        return pipe.read()


def damaged(folder: Path, name: str, file: str, change: Callable[[bytes], bytes]) -> Path:
    copy = folder.parent / name
    shutil.copytree(folder, copy)
    path = copy / file
    path.write_bytes(change(path.read_bytes()))
    return copy


def flip(data: bytes) -> bytes:
    # In the last tensor of a Llama: the head.
    changed = bytearray(data)
    changed[-50_000] ^= 1
    return bytes(changed)


def broken(source: Path, folder: Path) -> Path:
    """A snapshot in which one value of the last norm is not a number, and so every answer."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def greedy_of_memory(models: Path, folder: Path) -> Path:
    """A small model of which 1,024 tokens need more than 256 MiB of keys and values, as of a 7B."""
    config = LlamaConfig(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
        max_position_embeddings=2048,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(models / "llama" / name, folder)
    return folder


def main(models: Path, out: Path, cases: Path) -> None:
    root = out / "root"
    # First of all: a fork has only one of this process's threads, and torch starts some later.
    found: dict[str, Any] = {"no plugin": without_plugin(models / "llama")}
    found |= {
        "reference": referenced(models / "llama"),
        "broken reference": referenced(broken(models / "llama", out / "broken")),
        "large": referenced(greedy_of_memory(models, out / "large")),
        "no cuda": {
            "reference": refused(reference.run, ReferenceRequest, snapshot=str(models / "llama")),
            "reload": refused(
                reload.run, ReloadRequest, root=str(models), directory="llama", companions=()
            ),
        },
    }
    folder, built = artifact(models / "llama", root, "llama")
    found["built"] = built.model_dump(mode="json")
    found["reload"] = reloaded(folder)
    flipped = damaged(folder, "flipped", "model.tensors", flip)
    found["flipped"] = reloaded(flipped)
    unchecked = {"verify_hash": False, "num_readers": 2}
    found["flipped, unchecked"] = reloaded(flipped, deserialization_kwargs=unchecked)
    found["cut"] = reloaded(damaged(folder, "cut", "model.tensors", lambda data: data[:300]))
    found["no config"] = reloaded(damaged(folder, "torn", "config.json", lambda _: b"{}"))
    nan, built = artifact(out / "broken", root, "nan")
    found["broken reload"] = reloaded(nan)

    folder, built = artifact(models / "llama", root, "tp2", tensor_parallel_size=2)
    found["built at 2"] = built.model_dump(mode="json")
    found["reload at 2"] = reloaded(folder, tensor_parallel_size=2)
    flipped = damaged(folder, "flipped2", "model-rank-001.tensors", flip)
    found["flipped at 2"] = reloaded(flipped, tensor_parallel_size=2)
    cases.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
