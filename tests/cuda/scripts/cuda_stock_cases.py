"""Load an artifact, plain and encrypted, in stock vLLM on a GPU; what came of it goes to CASES.

    python cuda_stock_cases.py CASES SNAPSHOT ARTIFACT [ARTIFACT…]

To be run with VLLM_PLUGINS="", so that nothing of this project is in the process. Stock vLLM as it
is: unlike on a CPU (stock_cases.py), nothing is put in. An artifact with a `data.key` in it is
loaded with it.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams

PROMPTS = ["the quick brown fox", "seven wizards watch from a"]


def answered(folder: Path, **arguments: Any) -> dict[str, Any]:
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    llm = LLM(
        model=str(folder),
        dtype="bfloat16",
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=128,
        **arguments,
    )
    seconds = time.perf_counter() - start
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    answers = llm.generate(PROMPTS, greedy, use_tqdm=False)
    memory = torch.cuda.max_memory_allocated()
    llm.llm_engine.engine_core.shutdown()
    return {
        "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
        "seconds": seconds,
        "memory": memory,
    }


def main(cases: Path, snapshot: Path, artifacts: list[Path]) -> None:
    found: dict[str, Any] = {"source": answered(snapshot)}
    for artifact in artifacts:
        settings: dict[str, Any] = {
            "tensorizer_uri": str(artifact / "model.tensors"),
            "verify_hash": True,
        }
        if (artifact / "data.key").exists():
            settings["encryption_keyfile"] = str(artifact / "data.key")
        found[artifact.name] = answered(
            artifact, load_format="tensorizer", model_loader_extra_config=settings
        )
    found["ours"] = sorted(name for name in sys.modules if name.startswith("tensorize_assets"))
    cases.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [Path(name) for name in sys.argv[3:]])
