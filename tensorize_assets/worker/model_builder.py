"""vLLM's own construction and loading of one rank, without an engine around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.deterministic
from pydantic import ValidationError
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.utils.torch_utils import set_default_torch_dtype

from tensorize_assets.core.errors import PreflightError
from tensorize_assets.core.jsonio import describe

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_CPU = torch.device("cpu")


def configure(
    folder: str,
    tensor_parallel_size: int,
    dtype: Any,
    where: str = "this model",
    **arguments: Any,
) -> VllmConfig:
    """vLLM's configuration of the model in `folder`; `dtype` as in the catalog.

    `arguments` are more of vLLM's own.

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
            **arguments,
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
        reasons = _reasons(error)
        if "trust_remote_code" in reasons:
            # Their advice is to run it.
            reasons = (
                "its config.json asks for Python code of a repo (auto_map), and such code is never "
                "run. Choose another repo or revision, or a vLLM that has the model itself"
            )
        raise PreflightError(
            f"the installed vLLM does not accept {where} at "
            f"tensor_parallel_size={tensor_parallel_size}, dtype={dtype}: {reasons}"
        ) from error


def construct(config: VllmConfig, device: torch.device = _CPU) -> torch.nn.Module:
    """The model's modules on `device`, weights not loaded.

    Not on the meta device: vLLM keeps some modules (rotary embeddings) for the next model of the
    process, which would get theirs without values.
    """
    # Layers register themselves here by name, and refuse a name that is taken.
    config.compilation_config.static_forward_context.clear()
    config.compilation_config.static_all_moe_layers.clear()
    with _building(config, device), _empty_is_marked():
        return _loader(config).create_model(config, config.model_config)


def load_weights(
    config: VllmConfig,
    model: torch.nn.Module,
    read: Callable[[int, int], None],
    where: str = "this model",
    device: torch.device = _CPU,
) -> None:
    """Read the snapshot's weights into `model`, and stop before any post-load processing.

    `read` gets the number of checkpoint tensors and bytes handed to the model so far.

    Post-load processing packs weights for the processor at hand (on AVX-512 and AMX it even
    leaves `weight` empty), so what comes after it is neither portable nor complete.

    Raises:
        PreflightError: the snapshot lacks weights of the model. vLLM itself does not notice: it
            takes linear layers for loaded, and a q, k and v for loaded with one of them.
    """
    loader: Any = _loader(config)
    weights = loader.get_all_weights

    def counted(*arguments: Any) -> Iterator[tuple[str, torch.Tensor]]:
        size = 0
        for number, (name, tensor) in enumerate(weights(*arguments), start=1):
            yield name, tensor
            size += tensor.numel() * tensor.element_size()
            read(number, size)

    loader.get_all_weights = counted
    with _building(config, device), torch.no_grad():
        loader.load_weights(model, config.model_config)
        unfilled = [name for name, parameter in model.named_parameters() if _is_marked(parameter)]
        # A broken source may itself hold such values. Then it is built, and the reload's checks
        # say so.
        if unfilled and not any(
            _is_marked(tensor) for _, tensor in weights(config.model_config, model)
        ):
            more = f" and {len(unfilled) - 5} more" if len(unfilled) > 5 else ""
            raise PreflightError(
                f"{where}: the snapshot has no values, or not all, for "
                f"{', '.join(unfilled[:5])}{more}; its repo is incomplete at this commit, choose "
                "another revision"
            )


def _loader(config: VllmConfig) -> DefaultModelLoader:
    # Not by the configuration's own format, which in executor mode is ours.
    settings = replace(config.load_config, load_format="auto", model_loader_extra_config={})
    return DefaultModelLoader(settings)


@contextmanager
def _building(config: VllmConfig, device: torch.device) -> Iterator[None]:
    with (
        set_current_vllm_config(config),
        set_default_torch_dtype(config.model_config.dtype),
        device,
    ):
        yield


@contextmanager
def _empty_is_marked() -> Iterator[None]:
    """Memory that is allocated and not filled holds NaN, or an integer type's largest value."""
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


# PyTorch compares no others, and no model of vLLM's has them.
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
# A byte of a quantized weight often has its type's largest value; a whole row of them is none.
_SHORTEST_ROW = 16


def _is_marked(tensor: torch.Tensor) -> bool:
    """Whether some of it is as `_empty_is_marked` left it."""
    if tensor.is_floating_point():
        return _has_nan(tensor)
    if tensor.dtype not in _INTEGERS or not tensor.numel():
        return False
    largest = torch.iinfo(tensor.dtype).max
    if tensor.itemsize > 1:
        return int(tensor.max()) == largest
    # What is not filled are whole rows of some dimension: a projection, an expert.
    return any(
        size >= _SHORTEST_ROW and int(tensor.amin(dim).max()) == largest
        for dim, size in enumerate(tensor.shape)
    )


def _has_nan(tensor: torch.Tensor) -> bool:
    if tensor.itemsize == 1:
        # These types have neither sums nor comparisons.
        return any(bool(part.float().isnan().any()) for part in tensor.flatten().split(_AT_ONCE))
    # NaN survives a sum, which needs no memory; so does a difference of infinities.
    if not bool(tensor.sum().isnan()):
        return False
    return any(bool(part.isnan().any()) for part in tensor.flatten().split(_AT_ONCE))


def _reasons(error: BaseException) -> str:
    text = describe(error) if isinstance(error, ValidationError) else str(error)
    return " ".join(text.split()).removeprefix("as a whole: ")[:600]
