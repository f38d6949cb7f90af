"""Task `reference`: what the source snapshot answers, loaded by vLLM's default loader."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import vllm
from vllm.lora.request import LoRARequest

from tensorize_assets.core import layout
from tensorize_assets.core.tasks import ReferenceRequest, ReferenceResult
from tensorize_assets.vllm_plugin import report
from tensorize_assets.worker import snapshots
from tensorize_assets.worker.engine import (
    ask,
    ask_with,
    check_device,
    engine,
    load_reports,
    lora_arguments,
)
from tensorize_assets.worker.session import Progress


def run(request: ReferenceRequest, progress: Progress) -> ReferenceResult:
    """Load and ask, first without an adapter, then with each.

    Raises:
        PreflightError: this host has not the device asked for, or its vLLM not our plugin, or an
            adapter is none that vLLM takes.
    """
    where = f"{request.model} {request.suffix}"
    check_device(request.device, request.tensor_parallel_size, where)
    place = partial(snapshots.local_folder, root=request.root, s3=request.s3, progress=progress)
    adapters = {adapter.name: place(adapter.source) for adapter in request.adapters}
    lora = lora_arguments([_rank(folder) for folder in adapters.values()], where)
    source = place(request.snapshot)
    progress.update("starting the engine on the source")
    ranks = request.tensor_parallel_size
    with load_reports() as reports:
        with engine(str(source), ranks, request.dtype, load_format="auto", **lora) as llm:
            progress.update("asking the source")
            answers = ask(llm, request.prompts)
            answers_with = ask_with(
                llm,
                request.prompts,
                (
                    LoRARequest(name, number, str(folder))
                    for number, (name, folder) in enumerate(adapters.items(), 1)
                ),
            )
        loads = report.loads(reports)
    return ReferenceResult(
        answers=answers,
        adapters=answers_with,
        loads=loads,
        device_name=loads[0].device_name,
        vllm_version=vllm.__version__.partition("+")[0],
    )


def _rank(adapter: Path) -> int:
    config = json.loads((adapter / layout.ADAPTER_CONFIG).read_bytes())
    # Some modules may have a larger one of their own.
    return max([int(config["r"]), *(config.get("rank_pattern") or {}).values()])
