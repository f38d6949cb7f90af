"""Tensorize MODEL at TP into OUT with vLLM's own function: python vllms.py MODEL OUT TP.

As in vLLM's examples/features/tensorize_vllm_model.py. MODEL is a repo id: the function fetches the
tokenizer files from the Hub by that name, also where the model is on disk. On a CPU it stores
weights after the post-load step, so its files are not compared.
"""

import os
import sys

os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import tensorizer

if __name__ == "__main__":
    model, out, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    name = "model.tensors" if size == 1 else "model-rank-%03d.tensors"
    if size > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    arguments = EngineArgs(
        model=model,
        tensor_parallel_size=size,
        enforce_eager=True,
        max_model_len=1024,
        kv_cache_memory_bytes=256 << 20,
    )
    tensorizer.tensorize_vllm_model(
        arguments, tensorizer.TensorizerConfig(tensorizer_uri=f"{out}/{name}")
    )
