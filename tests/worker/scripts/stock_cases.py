"""Load artifacts in stock vLLM, with nothing of this project in the process; writes to CASES.

    python stock_cases.py CASES SAVED SNAPSHOT ARTIFACT [SNAPSHOT ARTIFACT…]

To be run with VLLM_PLUGINS="", so that vLLM takes no plugin. What stock vLLM lacks on a CPU is put
in here: the index of the device, which is 0, and the post-load step, without which the CPU's
linear layers have no kernel (`layer.cpu_linear`); CUDA's need none of it. Between the two, stock
code has loaded the model, and its tensors are looked at.

An artifact with a `data.key` in it is loaded with it. SAVED is where vLLM's own function writes the
first snapshot, encrypted with a key that it makes: `model.tensors`, and `data.key`.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer
from vllm import LLM, SamplingParams
from vllm.model_executor.model_loader import tensorizer as vllm_tensorizer
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.tensorizer_loader import TensorizerLoader
from vllm.model_executor.model_loader.utils import process_weights_after_loading

PROMPTS = ["the quick brown fox", "seven wizards watch from a"]
LOADED: dict[str, list[str]] = {}

stock_load_model = TensorizerLoader.load_model


def load_model(self: Any, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
    model = stock_load_model(self, vllm_config=vllm_config, model_config=model_config)
    LOADED.clear()
    for path, module in model.named_modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                LOADED[f"{path}.{name}"] = described(tensor)
    with torch.no_grad():
        process_weights_after_loading(model, model_config, torch.device("cpu"))
    return model


def described(tensor: torch.Tensor) -> list[str]:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return [str(tensor.dtype), str(list(tensor.shape)), hashlib.sha256(data).hexdigest()]


def save(folder: Path) -> None:
    """Have vLLM write what its default loader loads, before the post-load step empties it."""
    stock_load_weights = DefaultModelLoader.load_weights
    # It would fetch the snapshot's small files from the Hub.
    vllm_tensorizer.serialize_extra_artifacts = lambda *_, **__: None

    def load_weights(self: Any, model: torch.nn.Module, model_config: Any) -> None:
        DefaultModelLoader.load_weights = stock_load_weights
        stock_load_weights(self, model, model_config)
        folder.mkdir()
        (folder / "data.key").write_bytes(EncryptionParams.random().key)
        config = vllm_tensorizer.TensorizerConfig(
            tensorizer_uri=str(folder / "model.tensors"),
            encryption_keyfile=str(folder / "data.key"),
        )
        TensorizerLoader.save_model(model, config, model_config)
        del model.vllm_tensorized_marker

    DefaultModelLoader.load_weights = load_weights


def stored(path: Path, key: bytes | None) -> dict[str, list[str]]:
    """The file's tensors, cast as stock vLLM casts them."""
    encryption = None if key is None else DecryptionParams.from_key(key)
    with TensorDeserializer(
        str(path),
        device="cpu",
        dtype=torch.bfloat16,
        verify_hash=True,
        lazy_load=True,
        encryption=encryption,
    ) as reader:
        found = {name: described(tensor) for _, _, name, tensor in reader.read_tensors()}
    del found[".vllm_tensorized_marker"]
    return found


def tokens(folder: Path, **arguments: Any) -> list[list[int]]:
    llm = LLM(
        model=str(folder),
        dtype="bfloat16",
        distributed_executor_backend="uni",
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=128,
        **arguments,
    )
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    answers = llm.generate(PROMPTS, greedy, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    return [list(answer.outputs[0].token_ids) for answer in answers]


def main(cases: Path, saved: Path, folders: list[Path]) -> None:
    torch.accelerator.current_device_index = lambda: 0
    TensorizerLoader.load_model = load_model
    save(saved)
    found: dict[str, Any] = {}
    sources: dict[Path, list[list[int]]] = {}
    for snapshot, artifact in zip(folders[::2], folders[1::2], strict=True):
        if snapshot not in sources:
            sources[snapshot] = tokens(snapshot)
        uri = str(artifact / "model.tensors")
        keyfile = artifact / "data.key"
        key = keyfile.read_bytes() if keyfile.exists() else None
        extra = {} if key is None else {"encryption_keyfile": str(keyfile)}
        found[artifact.name] = {
            "source": sources[snapshot],
            "artifact": tokens(
                artifact,
                load_format="tensorizer",
                model_loader_extra_config={"tensorizer_uri": uri, "verify_hash": True, **extra},
            ),
            "loaded": dict(LOADED),
            "stored": stored(Path(uri), key),
        }
    found["ours"] = sorted(name for name in sys.modules if name.startswith("tensorize_assets"))
    cases.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [Path(name) for name in sys.argv[3:]])
