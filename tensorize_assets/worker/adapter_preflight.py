"""Refuse LoRA adapters that vLLM would refuse, or would serve as something else than they are.

vLLM alone takes 10 seconds to import, so its rules are copied here, each with its source; a test
holds them equal to those of the installed release.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import TypeGuard

import torch
from pydantic import JsonValue
from safetensors.torch import load_file

from tensorize_assets.core import jsonio, layout
from tensorize_assets.core.errors import PreflightError
from tensorize_assets.core.releases import LORA_RANKS
from tensorize_assets.core.tasks import AdapterSnapshot
from tensorize_assets.worker import preflight

Shape = tuple[int, ...]
Warn = Callable[[str], None]

# The fields without a default of vLLM's `PEFTHelper` (vllm/lora/peft_helper.py).
_REQUIRED = ("r", "lora_alpha", "target_modules")
# Fields of peft's LoraConfig that change what an adapter does. vLLM refuses `use_dora`, and
# `modules_to_save` for every model that generates (`LoRAModelManager._validate_modules_to_save`,
# vllm/lora/model_manager.py); the others it looks at from 0.32 on, and before answers differently.
_UNSUPPORTED = {
    "use_dora": "it was trained with DoRA",
    "modules_to_save": "it replaces modules of its base model as a whole",
    "trainable_token_indices": "it trained single tokens of the vocabulary",
    "lora_bias": "its LoRA matrices have biases",
    "layer_replication": "it repeats layers of its base model",
    "alora_invocation_tokens": "it acts only after its invocation tokens (activated LoRA)",
    "use_bdlora": "its LoRA matrices are block-diagonal",
    "use_qalora": "it was trained with QALoRA",
}
# As it sets up others, such as PiSSA and LoftQ, peft changes the base model's weights, and does so
# again when it loads such an adapter; vLLM does not. An adapter that was converted when it was
# saved says `true` instead.
_LEAVE_THE_BASE = ("gaussian", "eva", "orthogonal", "mica")

_PREFIX = "base_model.model."
_BASE_LAYER = "base_layer"
_SHOWN = 5
_MERGE = "merge it into the model and build that"


@dataclass(frozen=True)
class Base:
    """The model that adapters are for, by its modules and the shapes of their matrices.

    A key is the end of a module's name, from the layer's number on, or its last part outside of
    the layers: what stands before differs between a repo's files and the code that an adapter was
    trained with. No shape: the module's weights are quantized, or it is a group of modules.
    """

    model: str
    modules: Mapping[str, frozenset[Shape]]


@dataclass(frozen=True)
class Adapter:
    """An adapter that was found in order: its tensors, on the CPU, and its config as it was."""

    source: AdapterSnapshot
    where: str
    config: bytes
    rank: int
    size: int
    tensors: dict[str, torch.Tensor]


def read_base(folder: Path, model: str) -> Base:
    """Read what adapters are held against; of a snapshot's weights only names and shapes.

    Raises:
        PreflightError: a file of it is no file of tensors.
    """
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    modules: dict[str, frozenset[Shape]] = {}
    for file in files:
        for name, tensor in _tensors(file, model).items():
            path = name.split(".")[:-1]
            plain = name.endswith(".weight") and tensor.ndim == 2 and tensor.is_floating_point()
            end = _end(path)
            shapes = frozenset([tuple(tensor.shape)] if plain else [])
            modules[end] = modules.get(end, frozenset()) | shapes
            while path := path[:-1]:
                modules.setdefault(_end(path), frozenset())
    # Where it is tied to the embeddings, the output layer is not among a repo's tensors.
    outside = (shapes for end, shapes in modules.items() if "." not in end)
    modules.setdefault("lm_head", frozenset[Shape]().union(*outside))
    return Base(model, modules)


def check(source: AdapterSnapshot, folder: Path, base: Base, warn: Warn) -> Adapter:
    """Hold an adapter against vLLM's rules, tensorizer's format and the model that it is for.

    `folder` has its files. `warn` is told what is odd and may be meant so.

    Raises:
        PreflightError: names the adapter, its repo, what is wrong and what to do.
    """
    where = f"adapter {source.name} ({source.repo}@{source.snapshot.commit[:8]})"
    config = (folder / layout.ADAPTER_CONFIG).read_bytes()
    fields = jsonio.parse(config, f"{where}: {layout.ADAPTER_CONFIG}", PreflightError)
    rank = _check_config(fields, where)
    tensors = _tensors(folder / f"adapter_model.{source.snapshot.weights_format}", where)
    size = preflight.check_format(tensors.items(), where, _MERGE)
    _check_tensors(tensors, rank, fields, base, where, warn)
    named = fields.get("base_model_name_or_path")
    if str(named).casefold() != base.model.casefold():
        # Copies have other names, quantized ones too, and local paths say nothing: shapes decide.
        said = f"names {_short(named)} as its base model" if named else "names no base model"
        warn(
            f"{where} {said}, and is built for {base.model}, which its tensors fit: make sure that "
            "it was trained on this model or on a copy of it"
        )
    return Adapter(source, where, config, rank, size, tensors)


def module_of(name: str) -> tuple[str, bool] | None:
    """Return the module that a LoRA tensor is of, and whether it is its A; None for any other.

    As `parse_fine_tuned_lora_name` (vllm/lora/utils.py), which also takes a bias for a matrix.
    """
    parts = name.replace(_PREFIX, "").split(".") if name.startswith(_PREFIX) else name.split(".")
    if parts[-1] in ("lora_embedding_A", "lora_embedding_B"):
        return ".".join(parts[:-1]), parts[-1] == "lora_embedding_A"
    if parts[-1] == "weight" and parts[-2:-1] in (["lora_A"], ["lora_B"]):
        return ".".join(parts[:-2]), parts[-2] == "lora_A"
    return None


def is_left_out(name: str) -> bool:
    """Whether vLLM passes a tensor over as it loads (`is_base_embedding_weights`, vllm/lora)."""
    return name.endswith((".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight"))


def _check_config(config: Mapping[str, JsonValue], where: str) -> int:
    """Return the rank."""
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise PreflightError(
            f"{where}: its peft_type is {_short(kind)}, and vLLM serves LORA alone; {_MERGE}, or "
            "choose another adapter"
        )
    if missing := [field for field in _REQUIRED if field not in config]:
        raise PreflightError(
            f"{where}: {layout.ADAPTER_CONFIG} lacks {', '.join(missing)}, without which vLLM "
            "loads no adapter; choose a repo, or a revision, that peft saved as a whole"
        )
    rank, alpha = config["r"], config["lora_alpha"]
    if (
        not _is_number(rank, int)
        or not 0 < rank <= LORA_RANKS[-1]
        or not _is_number(alpha, int | float)
    ):
        raise PreflightError(
            f"{where}: its rank r is {_short(rank)} and its lora_alpha {_short(alpha)}; vLLM takes "
            f"ranks from 1 to {LORA_RANKS[-1]} and numbers. Train it with such a rank, or {_MERGE}"
        )
    for field, why in _UNSUPPORTED.items():
        if config.get(field):
            raise _unsupported(where, f"{why} ({field}: {_short(config[field])})")
    if config.get("bias", "none") != "none":
        raise _unsupported(where, f"it trained biases (bias: {_short(config['bias'])})")
    weights = config.get("init_lora_weights")
    if isinstance(weights, str) and weights.lower() not in _LEAVE_THE_BASE:
        raise PreflightError(
            f"{where}: it belongs to a base model that {_short(weights)} "
            "changed, which vLLM does not do; save it again as a plain LoRA, with peft's "
            "save_pretrained(…, path_initial_model_for_weight_conversion=…)"
        )
    for field, own in (("rank_pattern", rank), ("alpha_pattern", alpha)):
        pattern = config.get(field) or {}
        if not isinstance(pattern, dict) or any(value != own for value in pattern.values()):
            raise _unsupported(where, f"modules differ in it ({field}: {_short(pattern)})")
    return rank


def _check_tensors(
    tensors: Mapping[str, torch.Tensor],
    rank: int,
    config: Mapping[str, JsonValue],
    base: Base,
    where: str,
    warn: Warn,
) -> None:
    trained_on = f"it was trained on {_short(config.get('base_model_name_or_path'))}"
    left_out = [name for name in tensors if is_left_out(name)]
    found = {name: module_of(name) for name in tensors if not is_left_out(name)}
    if foreign := [name for name, module in found.items() if module is None]:
        raise _unsupported(
            where,
            f"it holds {len(foreign)} tensors that are no LoRA matrices, such as added tokens or "
            f"whole modules: {_some(foreign)}",
        )
    for name in left_out:
        shape = tuple(tensors[name].shape)
        _check_shape(shape, name.removesuffix(".weight"), base, where, trained_on)
    if left_out:
        warn(
            f"{where}: vLLM leaves out the embeddings of the base model that it holds "
            f"({_some(left_out)}); if training changed them, outputs differ from peft's"
        )
    pairs: dict[str, dict[bool, str]] = {}
    for name, (module, is_a) in ((name, place) for name, place in found.items() if place):
        if pairs.setdefault(module, {}).setdefault(is_a, name) != name:
            raise _damaged(where, f"it holds a LoRA matrix of {module!r} twice")
    if not pairs:
        raise _damaged(where, "it holds no LoRA matrix")
    if unknown := [module for module in pairs if _end_of(module) not in base.modules]:
        raise PreflightError(
            f"{where}: {base.model} has no modules {_some(unknown)}, which it changes; "
            f"{trained_on}: choose an adapter of this model, or the model that it is for"
        )
    turned = bool(config.get("fan_in_fan_out"))
    for module, names in pairs.items():
        if len(names) != 2:
            raise _damaged(where, f"{module!r} has one LoRA matrix of two")
        a, b = tensors[names[True]], tensors[names[False]]
        _check_pair(a, b, module, rank, where)
        shape = (b.shape[0], a.shape[1])
        # Old configs say `fan_in_fan_out` of layers that are not turned, too.
        other_way = turned and shape[::-1] in base.modules[_end_of(module)]
        if other_way or "lora_embedding_A" in names[True]:
            shape = shape[::-1]
        _check_shape(shape, module, base, where, trained_on)


def _check_pair(a: torch.Tensor, b: torch.Tensor, module: str, rank: int, where: str) -> None:
    for tensor in (a, b):
        if tensor.ndim != 2 or not tensor.numel() or not tensor.is_floating_point():
            raise _unsupported(
                where, f"{module!r} has a {tensor.dtype} of shape {list(tensor.shape)} for a matrix"
            )
    held = a.shape[0]
    # Those of all experts of a layer may be one matrix.
    whole = held % rank == 0 if ".experts" in module else held == rank
    if not whole or held != b.shape[1]:
        raise _damaged(
            where,
            f"the LoRA matrices of {module!r} have {held} rows and {b.shape[1]} columns, and its "
            f"config a rank of {rank}",
        )


def _check_shape(shape: Shape, module: str, base: Base, where: str, trained_on: str) -> None:
    end = _end_of(module)
    shapes = base.modules.get(end)
    if not shapes or shape in shapes:
        return
    theirs = min(shapes)
    if "." not in end and shape[1:] == theirs[1:]:
        raise PreflightError(
            f"{where}: its {module!r} is for a vocabulary of {shape[0]} tokens, and {base.model} "
            f"has {theirs[0]}; vLLM takes no adapter that adds tokens: {_MERGE}"
        )
    raise PreflightError(
        f"{where}: its {module!r} changes a matrix of {list(shape)}, and {base.model}'s is "
        f"{list(theirs)}; {trained_on}: choose an adapter of this model, or the model that it is "
        "for"
    )


def _end_of(module: str) -> str:
    return _end(module.removesuffix(f".{_BASE_LAYER}").split("."))


def _end(path: list[str]) -> str:
    number = next((at for at, part in enumerate(path) if part.isdigit()), len(path))
    return ".".join(path[max(number - 1, 0) :])


# Reading


def _tensors(path: Path, where: str) -> dict[str, torch.Tensor]:
    """The tensors of a file, mapped into memory: nothing is read of them before it is used.

    In the order in which vLLM's `tensorize_lora_adapter` writes them.
    """
    with _readable(path, where):
        if path.suffix == ".safetensors":
            return load_file(path)
        found: object = _unpickled(path)
    if not isinstance(found, dict) or not all(
        isinstance(name, str)
        and isinstance(tensor, torch.Tensor)
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        # Negative or conjugate only by a mark, which no file of tensors can hold.
        and not (tensor.is_neg() or tensor.is_conj())
        for name, tensor in found.items()
    ):
        raise PreflightError(
            f"{where}: {path.name} holds other things than names and dense tensors; choose another "
            "repo or revision"
        )
    return found


def _unpickled(path: Path) -> object:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap can only be used" not in str(error):
            raise
    # A file of torch before 1.6.
    return torch.load(path, map_location="cpu", weights_only=True)


@contextmanager
def _readable(path: Path, where: str) -> Iterator[None]:
    try:
        yield
    except pickle.UnpicklingError as error:
        # Not torch's own words: they advise to read the file nevertheless.
        raise PreflightError(
            f"{where}: {path.name} asks to run code, holds other objects than tensors or is "
            "damaged, and is not read. Use a repo, or a revision, with safetensors"
        ) from error
    except Exception as error:  # Damage stops these parsers anywhere.
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
        raise PreflightError(
            f"{where}: {path.name} cannot be read ({said}); choose another repo or revision"
        ) from error


# Words


def _unsupported(where: str, what: str) -> PreflightError:
    return PreflightError(
        f"{where}: {what}, which vLLM does not serve; {_MERGE}, or train it without"
    )


def _damaged(where: str, what: str) -> PreflightError:
    return PreflightError(
        f"{where}: {what}: it is damaged or no adapter of peft's; choose another repo or revision"
    )


def _is_number(value: JsonValue, kind: type | UnionType) -> TypeGuard[int]:
    return isinstance(value, kind) and not isinstance(value, bool)


def _some(names: list[str]) -> str:
    return ", ".join(map(_short, names[:_SHOWN])) + (" …" if len(names) > _SHOWN else "")


def _short(value: JsonValue) -> str:
    return repr(value)[:120]
