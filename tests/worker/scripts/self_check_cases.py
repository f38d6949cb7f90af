"""Write what tests of `tensorize build` and `tensorize reload` start from, below OUT.

    python self_check_cases.py MODELS OUT

`snapshot`: a Llama whose answers are nearly even over 400 tokens, so that its perplexity passes for
a first build's. `adapter`: a LoRA adapter of it. `theirs/NAME`: what vLLM's own function makes of
it, as it stands before the post-load step, which on some CPUs leaves nothing to save: `secret` at
TP=1, encrypted with `theirs.key`; `ranks` at TP=2. Without an engine.
"""

import json
import shutil
import sys
from pathlib import Path

import tiny_adapters
from safetensors.torch import load_file, save_file
from tensorizer import EncryptionParams
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader import tensorizer as vllm_tensorizer
from vllm.model_executor.model_loader.tensorizer_loader import TensorizerLoader

from tensorize_assets.worker import model_builder
from tensorize_assets.worker.virtual_ranks import virtual_rank

_TOKENS = 400


def snapshot(source: Path, folder: Path) -> None:
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:_TOKENS].clone()
    tensors["lm_head.weight"] *= 0.05
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": _TOKENS}))


def theirs(source: Path, folder: Path, size: int, keyfile: Path | None = None) -> None:
    # It would fetch the snapshot's small files from the Hub.
    vllm_tensorizer.serialize_extra_artifacts = lambda *_, **__: None
    folder.mkdir(parents=True)
    name = "model.tensors" if size == 1 else "model-rank-%03d.tensors"
    for rank in range(size):
        config = model_builder.configure(str(source), size, "bfloat16")
        with virtual_rank(rank, size):
            model = model_builder.construct(config)
            model_builder.load_weights(config, model, lambda _tensors, _bytes: None)
            settings = vllm_tensorizer.TensorizerConfig(
                tensorizer_uri=str(folder / name),
                encryption_keyfile=str(keyfile) if keyfile else None,
            )
            with set_current_vllm_config(config):
                TensorizerLoader.save_model(model, settings, config.model_config)


def main(models: Path, out: Path) -> None:
    own = out / "snapshot"
    snapshot(models / "llama", own)
    adapter = tiny_adapters.matrices(own)
    tiny_adapters.save(out / "adapter", adapter, tiny_adapters.config("tiny/llama"))
    keyfile = out / "theirs.key"
    keyfile.write_bytes(EncryptionParams.random().key)
    theirs(own, out / "theirs" / "secret", 1, keyfile)
    theirs(own, out / "theirs" / "ranks", 2)
    small = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(own, out / "theirs" / "secret", ignore=small, dirs_exist_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
