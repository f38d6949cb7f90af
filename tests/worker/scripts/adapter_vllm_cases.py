"""Hold our adapters against vLLM's own code for them, without an engine; findings go to CASES.

python adapter_vllm_cases.py MODELS OUT CASES
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import torch
from adapter_cases import EMBED, KEY, LLAMA, held, request, same, snapshot
from safetensors.torch import load_file
from tiny_adapters import ATTENTION, LINEAR, config, matrices, save
from vllm.config.lora import LoRAConfig, MaxLoRARanks
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import is_base_embedding_weights, parse_fine_tuned_lora_name
from vllm.model_executor.model_loader import tensorizer as vllm_tensorizer

from tensorize_assets.core.errors import PreflightError
from tensorize_assets.core.manifest import TensorEntry
from tensorize_assets.core.releases import LORA_RANKS
from tensorize_assets.core.store import open_store
from tensorize_assets.core.tasks import DATA_KEY, AdaptersRequest, AdaptersResult
from tensorize_assets.vllm_plugin.adapters import unpack
from tensorize_assets.worker import adapter_preflight, adapters, session
from tensorize_assets.worker.read_back import read_back
from tensorize_assets.worker.session import Progress

FILE = "adapter_model.tensors"
STEM = "base_model.model.model.layers.0.self_attn.q_proj"
NAMES = (
    f"{STEM}.lora_A.weight",
    f"{STEM}.lora_B.weight",
    "model.layers.0.mlp.up_proj.lora_A.weight",
    "language_model.base_model.model.layers.0.q.lora_B.weight",
    "base_model.model.base_model.model.q.lora_A.weight",
    "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight",
    f"{EMBED}.lora_embedding_A",
    f"{EMBED}.lora_embedding_B",
    "lora_embedding_A",
    "base_model.model.lm_head.lora_A.weight",
    f"{EMBED}.weight",
    f"{EMBED}.base_layer.weight",
    "base_model.model.lm_head.base_layer.weight",
    "base_model.model.wte.base_layer.weight",
    f"{STEM}.lora_magnitude_vector",
    f"{STEM}.lora_A.default.weight",
    f"{EMBED}.token_adapter.trainable_tokens_delta",
    f"{STEM}.lora_E",
    f"{STEM}.weight",
    "weight",
    "lora_A.weight",
    # What vLLM takes and we do not: a bias for a matrix, and classifiers of models that judge.
    f"{STEM}.lora_B.bias",
    "base_model.model.score.weight",
    "base_model.model.classifier.bias",
)
FIELDS: tuple[dict[str, Any], ...] = (
    {},
    {"use_rslora": True},
    {"r": 512},
    {"target_modules": "all-linear"},
    {"alpha_pattern": {"q_proj": 16}, "rank_pattern": {"q_proj": 8}},
    {"modules_to_save": ["lm_head"]},
    {"use_dora": True},
    {"bias": "all"},
    {"r": 0},
    {"r": -8},
    {"r": 513},
    {"init_lora_weights": "gaussian"},
)
if hasattr(PEFTHelper, "get_rank_and_scaling"):
    # From 0.32 on vLLM looks at these too.
    FIELDS += (
        {"lora_bias": True},
        {"layer_replication": [[0, 2], [1, 2]]},
        {"alora_invocation_tokens": [5]},
        {"use_bdlora": {"nblocks": 2}},
        {"use_qalora": True},
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "loftq"},
    )


def vllm_on_name(name: str) -> tuple[str, bool] | None:
    try:
        return parse_fine_tuned_lora_name(name)
    except ValueError:
        return None


def accepts(check: Any, fields: dict[str, Any]) -> bool:
    try:
        check(fields)
    except (PreflightError, ValueError):
        return False
    return True


def vllm_on_config(fields: dict[str, Any]) -> None:
    PEFTHelper.from_dict(fields).validate_legal(LoRAConfig(max_lora_rank=512))


# Gone with 0.32, and with it `tensorizer_config_dict`.
tensorize_lora_adapter = getattr(vllm_tensorizer, "tensorize_lora_adapter", None)


def loaded(folder: Path, **tensorizer: Any) -> dict[str, tuple[Any, Any, float]]:
    """The matrices that vLLM's own loading path has in memory, and their scaling."""
    more = {"tensorizer_config_dict": tensorizer} if tensorizer else {}
    helper = PEFTHelper.from_local_dir(str(folder), 512, **more)
    model = LoRAModel.from_local_checkpoint(
        str(folder),
        {*LINEAR, "lm_head"},
        helper,
        lora_model_id=1,
        device="cpu",
        dtype=torch.bfloat16,
        model_vocab_size=500,
        **more,
    )
    return {
        name: (layer.lora_a, layer.lora_b, layer.scaling) for name, layer in model.loras.items()
    }


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name][0], other[name][0])
        and torch.equal(one[name][1], other[name][1])
        and one[name][2] == other[name][2]
        for name in one
    )


def entries(path: Path) -> list[TensorEntry]:
    found: list[TensorEntry] = []
    for _ in read_back(path, found, needs_marker=False):
        pass
    return found


def unpacked(asked: AdaptersRequest, result: AdaptersResult, key: str | None, place: Path) -> Any:
    """What vLLM reads of what its server, and the reload check, are given of an artifact."""
    [adapter] = result.adapters
    store = open_store(asked.root)
    return loaded(unpack(store, asked.directory, adapter, result.files, key, place))


def main(models: Path, out: Path, cases: Path) -> None:
    llama = models / "llama"
    found: dict[str, Any] = {
        "ranks": get_args(MaxLoRARanks),
        "required": [
            field.name
            for field in dataclasses.fields(PEFTHelper)
            if field.default is field.default_factory is dataclasses.MISSING
        ],
        "our required": adapter_preflight._REQUIRED,
        "our ranks": LORA_RANKS,
        "names": {
            name: {
                "vllm": vllm_on_name(name),
                "ours": adapter_preflight.module_of(name),
                "left out by vllm": is_base_embedding_weights(name),
                "left out by us": adapter_preflight.is_left_out(name),
            }
            for name in NAMES
        },
        "configs": [
            {
                "fields": fields,
                "vllm": accepts(vllm_on_config, config(LLAMA) | fields),
                "ours": accepts(
                    lambda given: adapter_preflight._check_config(given, "x"),
                    config(LLAMA) | fields,
                ),
            }
            for fields in FIELDS
        ],
        "interop": {},
    }
    for name, weights_format, dtype, fields in (
        ("plain", "safetensors", torch.float32, config(LLAMA)),
        ("bin", "bin", torch.bfloat16, config(LLAMA)),
        ("rslora", "safetensors", torch.float16, config(LLAMA, use_rslora=True)),
    ):
        folder = out / name
        tensors = matrices(llama, targets=(*ATTENTION, "down_proj", "lm_head"), dtype=dtype)
        # Of adapters that train them, peft saves the embeddings too, in the order of its modules.
        tensors[f"{EMBED}.base_layer.weight"] = torch.randn(500, 256).to(dtype)
        save(folder, tensors, fields, weights_format)
        asked = request(llama, out / f"{name} by us", snapshot(folder, name, weights_format))
        plain = adapters.run(asked, Progress.silent())
        ours = Path(asked.root) / asked.directory
        with patch.object(session, "secrets", lambda: {DATA_KEY: KEY}):
            hidden = asked.model_copy(update={"directory": "hidden", "encrypted": True})
            secret = adapters.run(hidden, Progress.silent())
        keyfile = out / f"{name}.key"
        keyfile.write_bytes(KEY)
        expected = loaded(folder)
        place = out / f"{name} unpacked"
        place.mkdir()
        found["interop"][name] = {
            "layers": len(expected),
            "vllm reads what we unpack": equal(expected, unpacked(asked, plain, None, place)),
            "vllm reads what we decrypt": equal(
                expected, unpacked(hidden, secret, str(keyfile), place)
            ),
            "source": same(tensors, held(ours / FILE)),
        }
        if tensorize_lora_adapter is not None:
            theirs = out / f"{name} by vllm"
            tensorize_lora_adapter(
                str(folder), vllm_tensorizer.TensorizerConfig(tensorizer_dir=str(theirs))
            )
            encrypted = str(Path(asked.root) / "hidden")
            [entry] = plain.adapters
            found["interop"][name] |= {
                "same bytes": (theirs / FILE).read_bytes() == (ours / FILE).read_bytes(),
                "same config": json.loads((theirs / "adapter_config.json").read_bytes())
                == json.loads((ours / "adapter_config.json").read_bytes()),
                "vllm reads ours": equal(expected, loaded(ours, tensorizer_dir=str(ours))),
                "vllm reads ours encrypted": equal(
                    expected,
                    loaded(
                        Path(encrypted),
                        tensorizer_dir=encrypted,
                        encryption_keyfile=str(keyfile),
                        verify_hash=True,
                    ),
                ),
                "we read vllm's": entries(theirs / FILE) == list(entry.tensors),
                "same tensors": same(held(theirs / FILE), held(ours / FILE)),
            }
        if weights_format == "safetensors":
            source = load_file(folder / "adapter_model.safetensors")
            found["interop"][name]["source"] = same(source, held(ours / FILE))
    cases.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
