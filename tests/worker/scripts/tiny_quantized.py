"""Write small random quantized models and mixtures of experts, each a snapshot, into a folder.

    python tiny_quantized.py FOLDER

As tiny_models.py, whose Llama the quantized ones are: nothing can be downloaded, and what quantizes
a model in earnest needs other packages. So each linear layer gets random integers and scales, in
the layout of its format; `mixtral` and `qwen_moe` have experts.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import _LLAMA_LIKE, CONFIGS, tokenizer
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

_GROUP = 32
_PACKED = 8  # of 4 bits in an int32
# Left as they are in the formats of which vLLM looks into the file to see which are.
_PLAIN = (
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.1.mlp.gate_proj.weight",
    "model.layers.1.mlp.up_proj.weight",
)

Tensors = dict[str, torch.Tensor]

EXPERTS = {
    "mixtral": MixtralConfig(**_LLAMA_LIKE, num_local_experts=4, num_experts_per_tok=2),
    "qwen_moe": Qwen3MoeConfig(
        **_LLAMA_LIKE,
        head_dim=32,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        norm_topk_prob=True,
    ),
}


def _bits(*shape: int) -> torch.Tensor:
    """Eight random 4-bit integers in each element."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def _scales(*shape: int, of: float, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """As large as gives weights of about the size that a random model starts with."""
    return ((torch.rand(shape) + 0.5) * 0.02 / of).to(dtype)


def int8(rows: int, columns: int) -> Tensors:
    weight = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    return {"weight": weight, "weight_scale": _scales(rows, 1, of=73, dtype=torch.float32)}


def int4(rows: int, columns: int) -> Tensors:
    return {
        "weight_packed": _bits(rows, columns // _PACKED),
        "weight_scale": _scales(rows, columns // _GROUP, of=4.6),
        "weight_shape": torch.tensor([rows, columns]),
    }


def awq(rows: int, columns: int) -> Tensors:
    return {
        "qweight": _bits(columns, rows // _PACKED),
        "qzeros": torch.full((columns // _GROUP, rows // _PACKED), -0x77777778, dtype=torch.int32),
        "scales": _scales(columns // _GROUP, rows, of=4.6),
    }


def gptq(rows: int, columns: int) -> Tensors:
    return {
        "qweight": _bits(columns // _PACKED, rows),
        "qzeros": torch.full((columns // _GROUP, rows // _PACKED), 0x77777777, dtype=torch.int32),
        "scales": _scales(columns // _GROUP, rows, of=4.6),
        "g_idx": torch.arange(columns, dtype=torch.int32) // _GROUP,
    }


def fp8(rows: int, columns: int) -> Tensors:
    weight = (torch.randn(rows, columns) * 100).to(torch.float8_e4m3fn)
    return {"weight": weight, "weight_scale": _scales(of=100, dtype=torch.float32)}


def gptq8(rows: int, columns: int) -> Tensors:
    return {
        "qweight": _bits(columns // 4, rows),
        "qzeros": torch.full((columns // _GROUP, rows // 4), 0x7F7F7F7F, dtype=torch.int32),
        "scales": _scales(columns // _GROUP, rows, of=73),
        "g_idx": torch.arange(columns, dtype=torch.int32) // _GROUP,
    }


def _compressed(format: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> Any:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True}
_FOUR_BITS = {"bits": 4, "group_size": _GROUP}
_PER_TOKEN = _INT8 | {"strategy": "token", "dynamic": True}
QUANTIZED: dict[str, tuple[Callable[[int, int], Tensors], dict[str, Any]]] = {
    "int8": (
        int8,
        _compressed("int-quantized", _INT8, _PER_TOKEN),
    ),
    "int4": (int4, _compressed("pack-quantized", _INT4 | {"group_size": _GROUP}, None)),
    "awq": (awq, {"quant_method": "awq", **_FOUR_BITS, "zero_point": True, "version": "gemm"}),
    "gptq": (gptq, {"quant_method": "gptq", **_FOUR_BITS, "desc_act": False, "sym": True}),
    "fp8": (fp8, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "gptq8": (
        gptq8,
        {"quant_method": "gptq", **_FOUR_BITS, "bits": 8, "desc_act": False, "sym": True},
    ),
}
BUILT = (*EXPERTS, "int8", "int4", "awq", "gptq")
# In vLLM 0.31 and 0.32, on whatever CPU.
REFUSED = ("fp8", "gptq8")


def random_model(config: Any, folder: Path) -> None:
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 2
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def quantized(source: Path, folder: Path, name: str) -> None:
    """A copy of `source` with random quantized weights in its linear layers, but the head."""
    make, settings = QUANTIZED[name]
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors: Tensors = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        plain = name in ("awq", "gptq") and key in _PLAIN
        if key.endswith("_proj.weight") and not plain:
            stem = key.removesuffix("weight")
            tensors |= {stem + part: value for part, value in make(*tensor.shape).items()}
        else:
            tensors[key] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": settings}
    path.write_text(json.dumps(config))


def main(folder: Path) -> None:
    torch.manual_seed(100)
    for name, config in EXPERTS.items():
        random_model(config, folder / name)
    source = folder / ".llama"
    random_model(CONFIGS["llama"], source)
    for name in QUANTIZED:
        quantized(source, folder / name, name)
    shutil.rmtree(source)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
