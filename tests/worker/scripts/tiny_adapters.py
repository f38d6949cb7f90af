"""Small random LoRA adapters for the models of tiny_models.py, in the form in which peft saves.

    python tiny_adapters.py MODELS FOLDER

writes three for `tiny/llama`: poet, coder (in torch's own format) and dora, which vLLM refuses.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")

Tensors = dict[str, torch.Tensor]


def config(base: str | None, rank: int = 8, **changes: object) -> dict[str, Any]:
    """An adapter_config.json as peft 0.18 writes it."""
    return {
        "alora_invocation_tokens": None,
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": base,
        "bias": "none",
        "corda_config": None,
        "eva_config": None,
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": None,
        "loftq_config": {},
        "lora_alpha": 2 * rank,
        "lora_bias": False,
        "lora_dropout": 0.05,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "peft_type": "LORA",
        "qalora_group_size": 16,
        "r": rank,
        "rank_pattern": {},
        "revision": None,
        "target_modules": sorted(ATTENTION),
        "target_parameters": None,
        "task_type": "CAUSAL_LM",
        "trainable_token_indices": None,
        "use_dora": False,
        "use_qalora": False,
        "use_rslora": False,
        **changes,
    }


def matrices(
    snapshot: Path,
    rank: int = 8,
    targets: tuple[str, ...] = ATTENTION,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Tensors:
    """LoRA matrices for every linear module of a snapshot that is called one of `targets`."""
    torch.manual_seed(seed)
    found: Tensors = {}
    for name, weight in sorted(load_file(snapshot / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        if module != name and module.rpartition(".")[2] in targets:
            rows, columns = weight.shape
            stem = f"base_model.model.{module}"
            # Large enough to change greedy tokens: B starts at zero only in training.
            found[f"{stem}.lora_A.weight"] = (torch.randn(rank, columns) / 16).to(dtype)
            found[f"{stem}.lora_B.weight"] = (torch.randn(rows, rank) / 4).to(dtype)
    return found


def save(
    folder: Path,
    tensors: Tensors,
    fields: Mapping[str, object],
    weights_format: str = "safetensors",
) -> Path:
    """Write both files of an adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(fields, indent=2, sort_keys=True))
    if weights_format == "bin":
        torch.save(tensors, folder / "adapter_model.bin")
    else:
        save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def main(models: Path, folder: Path) -> None:
    llama = models / "llama"
    save(folder / "poet", matrices(llama), config("tiny/llama"))
    larger = matrices(llama, 16, LINEAR, torch.bfloat16, seed=1)
    save(folder / "coder", larger, config("tiny/llama", 16), "bin")
    save(folder / "dora", matrices(llama), config("tiny/llama", use_dora=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
