"""Load, with the plugin's loader, a file that vLLM has encrypted; writes what it has to CASES.

    python vllm_encrypted_cases.py ARTIFACT SAVED CASES

ARTIFACT is ours, in plaintext, of the snapshot that SAVED is of. Without an engine.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from loader_cases import configure, failure
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader import get_model_loader

from tensorize_assets.worker import model_builder
from tensorize_assets.worker.module_tensors import module_tensors
from tensorize_assets.worker.virtual_ranks import virtual_rank


def tensors(folder: Path, uri: Path, **settings: str) -> dict[str, str]:
    """Every tensor of the model as it is filled from the file at `uri`."""
    config = configure(folder, uri, **settings)
    with virtual_rank(0, 1):
        model = model_builder.construct(config)
        loader = get_model_loader(config.load_config)
        with set_current_vllm_config(config):
            loader.load_weights(model, config.model_config)
    return {
        name: hashlib.sha256(tensor.detach().reshape(-1).view(torch.uint8).numpy()).hexdigest()
        for name, _, tensor in module_tensors(model)
    }


def main(folder: Path, saved: Path, cases: Path) -> None:
    theirs = saved / "model.tensors"
    found = {
        "plain": tensors(folder, folder / "model.tensors"),
        "vLLM's": tensors(folder, theirs, encryption_keyfile=str(saved / "data.key")),
        "no key": failure(folder, theirs),
    }
    cases.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
