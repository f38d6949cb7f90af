"""vLLM's own construction and loading of one rank, without an engine around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.utils.torch_utils import set_default_torch_dtype

from tensorize_assets.core.errors import PreflightError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def configure(folder: str, tensor_parallel_size: int, dtype: Any) -> VllmConfig:
    """vLLM's configuration of the model in `folder`; `dtype` as in the catalog.

    Raises:
        PreflightError: this vLLM refuses the model, in its own words.
    """
    try:
        return EngineArgs(
            model=folder,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            enforce_eager=True,
            # Ranks are built in this process; "mp" only keeps vLLM from asking for more.
            distributed_executor_backend="uni" if tensor_parallel_size == 1 else "mp",
        ).create_engine_config()
    except (ValueError, RuntimeError, NotImplementedError, OSError, KeyError) as error:
        raise PreflightError(
            f"the installed vLLM does not accept this model at "
            f"tensor_parallel_size={tensor_parallel_size}, dtype={dtype}: {_first_lines(error)}"
        ) from error


def construct(config: VllmConfig) -> torch.nn.Module:
    """The model's modules on the CPU, weights not loaded: memory is reserved but untouched.

    Not on the meta device: vLLM keeps some modules (rotary embeddings) for the next model of the
    process, which would get theirs without values.
    """
    # Layers register themselves here by name, and refuse a name that is taken.
    config.compilation_config.static_forward_context.clear()
    config.compilation_config.static_all_moe_layers.clear()
    with _building(config):
        return get_model_loader(config.load_config).create_model(config, config.model_config)


def load_weights(config: VllmConfig, model: torch.nn.Module) -> None:
    """Read the snapshot's weights into `model`, and stop before any post-load processing.

    Post-load processing packs weights for the processor at hand (on AVX-512 and AMX it even
    leaves `weight` empty), so what comes after it is neither portable nor complete.
    """
    with _building(config), torch.no_grad():
        get_model_loader(config.load_config).load_weights(model, config.model_config)


@contextmanager
def _building(config: VllmConfig) -> Iterator[None]:
    with (
        set_current_vllm_config(config),
        set_default_torch_dtype(config.model_config.dtype),
        torch.device("cpu"),
    ):
        yield


def _first_lines(error: BaseException) -> str:
    return " ".join(str(error).split())[:600]
