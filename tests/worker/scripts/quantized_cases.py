"""Build quantized models and mixtures of experts, by virtual and by real ranks, and reload them.

    python quantized_cases.py MODELS OUT CASES

MODELS is what tiny_quantized.py writes. One process for all; what came of each goes to CASES.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from building import artifact, request
from engine_cases import referenced, reloaded
from real_matrix import write_all
from shard_cases import attempt, changed
from tiny_quantized import BUILT, REFUSED

from tensorize_assets.worker.engine import load_reports

SIZES = (2, 1)


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__delitem__(f"model.layers.1.{name}")


def row_of_127(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.down_proj.weight"][3] = 127


def main(models: Path, out: Path, cases: Path) -> None:
    # The loader that reports is there only where plugins are first loaded for a report.
    with load_reports():
        pass
    # Before all else: a fork has only one of this process's threads, and torch starts some later.
    # Mixtures of experts first: without one, vLLM makes no group for experts.
    folders = [models / name for name in BUILT]
    for size in SIZES:
        write_all(folders, out / "real", size)
    found: dict[str, Any] = {"references": {name: referenced(models / name) for name in BUILT}}
    found["built"] = {}
    for name in BUILT:
        for size in SIZES:
            folder, result = artifact(
                models / name, out / "root", f"{name}/tp{size}", tensor_parallel_size=size
            )
            same = [
                (folder / file.path).read_bytes()
                == (out / "real" / name / f"tp{size}" / file.path).read_bytes()
                for file in result.files
            ]
            found["built"][f"{name}-{size}"] = result.model_dump(mode="json") | {"same": same}
    found["reloads"] = {
        name: reloaded(out / "root" / "vllm" / "tiny" / name / "tp1") for name in BUILT
    }

    def case(name: str, snapshot: Path, **fields: object) -> None:
        found[name] = attempt(request(snapshot, out / name, "model", **fields))

    snapshots = out / "snapshots"
    for model, part in (
        ("int8", "self_attn.k_proj.weight"),
        ("int4", "self_attn.k_proj.weight_packed"),
        ("awq", "self_attn.q_proj.qweight"),
        ("gptq", "self_attn.v_proj.qzeros"),
        ("mixtral", "block_sparse_moe.experts.2.w3.weight"),
    ):
        case(f"{model} without a part", changed(models / model, snapshots / model, drop(part)))
    case("int8 with a row of 127", changed(models / "int8", snapshots / "row", row_of_127))
    for name in REFUSED:
        case(name, models / name)
    for name in REFUSED:
        case(f"{name} by executor", models / name, sharding="executor")
    cases.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
