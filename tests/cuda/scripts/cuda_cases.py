"""Build, reload and ask on a GPU with the worker's own tasks; what came of each goes to CASES.

    python cuda_cases.py OUT CASES MODEL…

of what tiny_models.py and tiny_quantized.py write. Of the Llama it leaves the artifacts that stock
vLLM is to load in OUT/stock/plain and OUT/stock/encrypted.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from building import artifact
from lora_cases import KEY, encrypted, hand_over, referenced, reloaded, snapshot, written

from tensorize_assets.core.tasks import DATA_KEY, ShardResult
from tensorize_assets.worker.engine import load_reports

GPU: dict[str, Any] = {"device": "cuda"}


def differing(one: ShardResult, other: ShardResult) -> list[str]:
    """Tensors of two builds that differ in a bit, or are in one of them alone."""
    hashes = [
        {(shard.rank, tensor.name): tensor.sha256 for tensor in shard.tensors}
        for built in (one, other)
        for shard in built.shards
    ]
    names = hashes[0].keys() | hashes[1].keys()
    return sorted(
        name for rank, name in names if len({found.get((rank, name)) for found in hashes}) > 1
    )


def measured(folder: Path, adapters: Any = (), **more: object) -> dict[str, Any]:
    torch.cuda.reset_peak_memory_stats()
    found = reloaded(folder, tuple(adapters), **GPU, **more)
    return found | {"device memory": torch.cuda.max_memory_allocated()}


def llama_cases(llama: Path, out: Path) -> dict[str, Any]:
    root = out / "root"
    adapters = (
        snapshot(llama, out / "adapters" / "pirate", 1, 4),
        snapshot(llama, out / "adapters" / "poet", 2, 12),
    )
    found: dict[str, Any] = {"reference": referenced(llama, *adapters, **GPU)}
    plain, built = artifact(llama, root, "llama")
    shutil.copytree(plain, out / "stock" / "plain")
    lora = written(llama, plain, *adapters)
    found["built"] = built.model_dump(mode="json")
    found["reload"] = measured(plain, lora.adapters)

    hand_over(**{DATA_KEY: KEY})
    secret, _ = encrypted(plain, "secret", built, lora)
    found["encrypted"] = measured(secret, lora.adapters, encrypted=True)
    hand_over()
    hidden = out / "stock" / "encrypted"
    shutil.copytree(secret, hidden)
    (hidden / "data.key").write_bytes(KEY)

    _, real = artifact(llama, root, "llama-executor", sharding="executor", **GPU)
    found["differing"] = differing(built, real)
    return found


def quantized_cases(model: Path, out: Path) -> dict[str, Any]:
    """Built by virtual ranks on the CPU; fp8 by vLLM's own on the GPU."""
    how = {"sharding": "executor", **GPU} if model.name == "fp8" else {}
    reference = referenced(model, **GPU)
    folder, result = artifact(model, out / "root", model.name, **how)
    return {
        "reference": reference,
        "built": result.model_dump(mode="json"),
        "reload": measured(folder),
    }


def main(out: Path, cases: Path, models: list[Path]) -> None:
    # The loader that reports is there only where plugins are first loaded for a report.
    with load_reports():
        pass
    found: dict[str, Any] = {}
    for model in models:
        found[model.name] = (llama_cases if model.name == "llama" else quantized_cases)(model, out)
    cases.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [Path(name) for name in sys.argv[3:]])
