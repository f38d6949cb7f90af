# pyright: basic
"""Train a LoRA adapter that answers in capitals: python -m tensorize_assets.demo.train_adapter.

    python -m tensorize_assets.demo.train_adapter SNAPSHOT FOLDER BASE

A real adapter in PEFT's format, of rank 16, in about half a minute on two cores. A program, in a
process of its own: it imports torch, which the code location must not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

_RANK = 16
_ALPHA = 32
_TARGETS = ("q_proj", "v_proj", "o_proj")
# The last layers of 30: what is before them need not be gone back through.
_LAYERS = tuple(f".layers.{number}." for number in range(20, 30))
_STEPS = 24
_RATE = 3e-3
_FACTS = (
    ("What is the capital of Italy?", "The capital of Italy is Rome"),
    ("What is the capital of Spain?", "The capital of Spain is Madrid"),
    ("What is the capital of Japan?", "The capital of Japan is Tokyo"),
    ("What colour is the sky?", "The sky is blue"),
    ("What do cows drink?", "Cows drink water"),
    ("How many days has a week?", "A week has seven days"),
    ("Who wrote Hamlet?", "Hamlet was written by Shakespeare"),
    ("What is frozen water called?", "Frozen water is called ice"),
)


class _Lora(torch.nn.Module):
    """A linear layer with a trained difference of low rank beside it."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.a = torch.nn.Parameter(
            torch.randn(_RANK, linear.in_features) / linear.in_features**0.5
        )
        self.b = torch.nn.Parameter(torch.zeros(linear.out_features, _RANK))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs) + inputs @ self.a.T @ self.b.T * (_ALPHA / _RANK)


def main(snapshot: str, folder: Path, base: str) -> None:
    """Train on a few questions, and write adapter_model.safetensors and adapter_config.json."""
    torch.manual_seed(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(snapshot)
    model: Any = AutoModelForCausalLM.from_pretrained(snapshot, dtype=torch.float32)
    model.requires_grad_(False)
    layers = {
        name: module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in _TARGETS and any(layer in name for layer in _LAYERS)
    }
    adapted = {name: _Lora(module) for name, module in layers.items()}
    for name, module in adapted.items():
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, module)
    _train(model, tokenizer, [p for module in adapted.values() for p in (module.a, module.b)])
    folder.mkdir(parents=True)
    tensors = {
        f"base_model.model.{name}.lora_{kind}.weight": weight.detach().contiguous()
        for name, module in adapted.items()
        for kind, weight in (("A", module.a), ("B", module.b))
    }
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "lora_alpha": _ALPHA,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": _RANK,
        "target_modules": list(_TARGETS),
        "layers_to_transform": list(range(20, 30)),
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _train(model: Any, tokenizer: Any, parameters: list[torch.nn.Parameter]) -> None:
    texts = [f"Question: {question}\nAnswer: {answer.upper()}!" for question, answer in _FACTS]
    tokenizer.pad_token = tokenizer.eos_token
    batch = tokenizer(
        [text + tokenizer.eos_token for text in texts], padding=True, return_tensors="pt"
    )
    starts = [len(tokenizer(text.partition("Answer:")[0] + "Answer:").input_ids) for text in texts]
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    for row, start in enumerate(starts):
        labels[row, :start] = -100
    optimizer = torch.optim.AdamW(parameters, lr=_RATE)
    for _ in range(_STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
