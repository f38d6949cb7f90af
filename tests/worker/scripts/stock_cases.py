"""Load artifacts in stock vLLM, with nothing of this project in the process; writes to CASES.

    python stock_cases.py CASES SNAPSHOT ARTIFACT [SNAPSHOT ARTIFACT…]

To be run with VLLM_PLUGINS="", so that vLLM takes no plugin. What stock vLLM lacks on a CPU is put
in here: the index of the device, which is 0, and the post-load step, without which the CPU's
linear layers have no kernel (`layer.cpu_linear`); CUDA's need none of it. Between the two, stock
code has loaded the model, and its tensors are looked at.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from tensorizer import TensorDeserializer
from vllm import LLM, SamplingParams
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


def stored(path: Path) -> dict[str, list[str]]:
    """The file's tensors, cast as stock vLLM casts them."""
    with TensorDeserializer(
        str(path), device="cpu", dtype=torch.bfloat16, verify_hash=True, lazy_load=True
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


def main(cases: Path, folders: list[Path]) -> None:
    torch.accelerator.current_device_index = lambda: 0
    TensorizerLoader.load_model = load_model
    found: dict[str, Any] = {}
    for snapshot, artifact in zip(folders[::2], folders[1::2], strict=True):
        uri = str(artifact / "model.tensors")
        found[snapshot.name] = {
            "source": tokens(snapshot),
            "artifact": tokens(
                artifact,
                load_format="tensorizer",
                model_loader_extra_config={"tensorizer_uri": uri, "verify_hash": True},
            ),
            "loaded": dict(LOADED),
            "stored": stored(Path(uri)),
        }
    found["ours"] = sorted(name for name in sys.modules if name.startswith("tensorize_assets"))
    cases.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
