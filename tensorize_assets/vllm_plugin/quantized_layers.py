"""Which layers of a GPTQ or AWQ model are quantized, told from its tensorizer file.

Where the model's config does not list them, vLLM looks into the safetensors files beside it. An
artifact has none, so that it would take every layer of a GPTQ model for plain, and every one of an
AWQ model for quantized.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig

_QUANTIZED = ".qweight"


def needs_names(quant_config: Any) -> bool:
    """Whether vLLM has found nothing about which layers are quantized."""
    if isinstance(quant_config, AutoGPTQConfig):
        return not quant_config.modules_in_block_to_quantize
    return isinstance(quant_config, AutoAWQConfig) and not quant_config.modules_to_not_convert


def tell(quant_config: Any, names: Collection[str], fused: Mapping[str, Sequence[str]]) -> None:
    """Set what `needs_names` misses, by the names of all tensors of the file.

    `fused` are the model's fused layers and their parts, which vLLM asks for in their place.
    """
    quantized = {name.removesuffix(_QUANTIZED) for name in names if name.endswith(_QUANTIZED)}
    if isinstance(quant_config, AutoGPTQConfig):
        quant_config.modules_in_block_to_quantize = list(_parts(quantized, fused))
    else:
        weights = {name.removesuffix(".weight") for name in names if name.endswith(".weight")}
        quant_config.modules_to_not_convert = list(_parts(weights - quantized, fused))


def _parts(modules: Collection[str], fused: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for module in sorted(modules):
        parent, dot, name = module.rpartition(".")
        for part in fused.get(name, (name,)):
            yield f"{parent}{dot}{part}"
