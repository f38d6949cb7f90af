"""Task `reload`: an artifact loaded as it will be served, its tensors hashed, its answers had."""

from __future__ import annotations

import vllm

from tensorize_assets.core import layout
from tensorize_assets.core.tasks import Answers, ReloadRequest, ReloadResult
from tensorize_assets.vllm_plugin import report
from tensorize_assets.worker.engine import (
    ask,
    check_device,
    collect,
    engine,
    load_failures,
    load_reports,
)
from tensorize_assets.worker.session import Progress


def run(request: ReloadRequest, progress: Progress) -> ReloadResult:
    """Load with `verify_hash` and ask. A load that fails is a result too: the checks report it.

    Raises:
        PreflightError: this host has not the device asked for, or its vLLM not our plugin.
    """
    ranks = request.tensor_parallel_size
    check_device(request.device, ranks, f"{request.model} {request.suffix}")
    # Flat: vLLM builds its own "tensorizer_config" of these, and drops one that it is given.
    settings = {
        "tensorizer_uri": f"{request.folder}/{layout.tensorizer_uri_name(ranks)}",
        # In both: what is set here goes before `verify_hash` itself.
        "deserialization_kwargs": {**request.deserialization_kwargs, "verify_hash": True},
        "verify_hash": True,
    }
    answers: Answers | None = None
    error: str | None = None
    progress.update("starting the engine on the artifact")
    with load_reports() as reports:
        try:
            with engine(
                request.folder,
                ranks,
                request.dtype,
                load_format="tensorizer",
                model_loader_extra_config=settings,
            ) as llm:
                progress.update("asking the artifact")
                answers = ask(llm, request.prompts)
        except Exception as failure:  # noqa: BLE001 - whatever stops the engine is the finding
            error = load_failures(reports) or f"{type(failure).__name__}: {failure}"
            progress.log(f"the artifact does not load: {error}", "error")
        loads = collect(reports)
    return ReloadResult(
        answers=answers,
        loads=loads,
        device_name=loads[0].device_name if loads else report.device_name(),
        vllm_version=vllm.__version__.partition("+")[0],
        error=error,
    )
