"""Task `reference`: what the source snapshot answers, loaded by vLLM's default loader."""

from __future__ import annotations

import vllm

from tensorize_assets.core.tasks import ReferenceRequest, ReferenceResult
from tensorize_assets.worker.engine import ask, check_device, collect, engine, load_reports
from tensorize_assets.worker.session import Progress


def run(request: ReferenceRequest, progress: Progress) -> ReferenceResult:
    """Load and ask.

    Raises:
        PreflightError: this host has not the device asked for, or its vLLM not our plugin.
    """
    check_device(request.device, request.tensor_parallel_size, f"{request.model} {request.suffix}")
    progress.update("starting the engine on the source")
    ranks = request.tensor_parallel_size
    with load_reports() as reports:
        with engine(request.folder, ranks, request.dtype, load_format="auto") as llm:
            progress.update("asking the source")
            answers = ask(llm, request.prompts)
        loads = collect(reports)
    return ReferenceResult(
        answers=answers,
        loads=loads,
        device_name=loads[0].device_name,
        vllm_version=vllm.__version__.partition("+")[0],
    )
