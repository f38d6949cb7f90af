"""vLLM's own construction and loading of one rank, without an engine around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.deterministic
from pydantic import ValidationError
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.utils.torch_utils import set_default_torch_dtype

from tensorize_assets.core.errors import PreflightError
from tensorize_assets.core.jsonio import describe

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def configure(
    folder: str, tensor_parallel_size: int, dtype: Any, where: str = "this model"
) -> VllmConfig:
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
    except (
        ValueError,
        RuntimeError,
        NotImplementedError,
        OSError,
        KeyError,
        TypeError,
        AttributeError,
        AssertionError,
        ImportError,
    ) as error:
        raise PreflightError(
            f"the installed vLLM does not accept {where} at "
            f"tensor_parallel_size={tensor_parallel_size}, dtype={dtype}: {_reasons(error)}"
        ) from error


def construct(config: VllmConfig) -> torch.nn.Module:
    """The model's modules on the CPU, weights not loaded.

    Not on the meta device: vLLM keeps some modules (rotary embeddings) for the next model of the
    process, which would get theirs without values.
    """
    # Layers register themselves here by name, and refuse a name that is taken.
    config.compilation_config.static_forward_context.clear()
    config.compilation_config.static_all_moe_layers.clear()
    with _building(config), _empty_is_nan():
        return get_model_loader(config.load_config).create_model(config, config.model_config)


def load_weights(
    config: VllmConfig,
    model: torch.nn.Module,
    read: Callable[[int, int], None],
    where: str = "this model",
) -> None:
    """Read the snapshot's weights into `model`, and stop before any post-load processing.

    `read` gets the number of checkpoint tensors and bytes handed to the model so far.

    Post-load processing packs weights for the processor at hand (on AVX-512 and AMX it even
    leaves `weight` empty), so what comes after it is neither portable nor complete.

    Raises:
        PreflightError: the snapshot lacks weights of the model. vLLM itself does not notice: it
            takes linear layers for loaded, and a q, k and v for loaded with one of them.
    """
    loader: Any = get_model_loader(config.load_config)
    weights = loader.get_all_weights

    def counted(*arguments: Any) -> Iterator[tuple[str, torch.Tensor]]:
        size = 0
        for number, (name, tensor) in enumerate(weights(*arguments), start=1):
            yield name, tensor
            size += tensor.numel() * tensor.element_size()
            read(number, size)

    loader.get_all_weights = counted
    with _building(config), torch.no_grad():
        loader.load_weights(model, config.model_config)
        unfilled = [name for name, parameter in model.named_parameters() if _has_nan(parameter)]
        # A broken source may itself hold NaN. Then it is built, and the reload's checks say so.
        if unfilled and not any(
            _has_nan(tensor) for _, tensor in weights(config.model_config, model)
        ):
            more = f" and {len(unfilled) - 5} more" if len(unfilled) > 5 else ""
            raise PreflightError(
                f"{where}: the snapshot has no values, or not all, for "
                f"{', '.join(unfilled[:5])}{more}; its repo is incomplete at this commit, choose "
                "another revision"
            )


@contextmanager
def _building(config: VllmConfig) -> Iterator[None]:
    with (
        set_current_vllm_config(config),
        set_default_torch_dtype(config.model_config.dtype),
        torch.device("cpu"),
    ):
        yield


@contextmanager
def _empty_is_nan() -> Iterator[None]:
    """Memory that is allocated and not filled holds NaN, for floating-point types."""
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    # A property of the module's class, which pyright does not see.
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


# Elements looked at in one go: what says which of them are NaN takes a byte for each.
_AT_ONCE = 16 << 20


def _has_nan(tensor: torch.Tensor) -> bool:
    # NaN survives a sum, which needs no memory; so does a difference of infinities.
    if not tensor.is_floating_point() or not bool(tensor.sum().isnan()):
        return False
    return any(bool(part.isnan().any()) for part in tensor.flatten().split(_AT_ONCE))


def _reasons(error: BaseException) -> str:
    text = describe(error) if isinstance(error, ValidationError) else str(error)
    return " ".join(text.split()).removeprefix("as a whole: ")[:600]
