"""Task `self_check`: any tensorizer files, loaded as vLLM's own `deserialize` does, and asked."""

from __future__ import annotations

import os
from contextlib import ExitStack

import vllm

from tensorize_assets.core.s3 import ACCESS_VARIABLE, is_s3
from tensorize_assets.core.scratch import private_folder
from tensorize_assets.core.tasks import Answers, ReloadResult, SelfCheckRequest
from tensorize_assets.vllm_plugin import report
from tensorize_assets.worker import arguments
from tensorize_assets.worker.access import access_of, keyfile
from tensorize_assets.worker.engine import ask, check_device, engine, load_reports, why
from tensorize_assets.worker.session import Progress


def run(request: SelfCheckRequest, progress: Progress) -> ReloadResult:
    """Load, and ask the prompts. A load that fails is a result too, in the loader's own words.

    Raises:
        PreflightError: this host has not the device, or its vLLM not our plugin; or tensorizer has
            no such argument.
        StoreUnavailableError: the store, or the way to it, is in trouble.
        StoreError: the store refuses.
    """
    where = request.tensors.partition("?")[0]
    check_device(request.device, request.tensor_parallel_size, where)
    given = request.settings.get("deserialization_kwargs")
    arguments.check_deserialization(given if isinstance(given, dict) else {}, where)
    answers: Answers | None = None
    error: str | None = None
    with ExitStack() as stack:
        secrets = stack.enter_context(private_folder(in_memory=True))
        settings = {**request.settings, "tensorizer_uri": request.tensors}
        if request.encrypted:
            settings["encryption_keyfile"] = str(keyfile(secrets, where))
        if is_s3(request.tensors):
            # By a file that the environment names: vLLM logs its arguments.
            path = secrets / "s3-access.json"
            access_of(request.s3).write(path)
            os.environ[ACCESS_VARIABLE] = str(path)
        reports = stack.enter_context(load_reports())
        progress.update("starting the engine")
        try:
            with engine(
                request.folder,
                request.tensor_parallel_size,
                request.dtype,
                load_format="tensorizer",
                model_loader_extra_config=settings,
            ) as llm:
                progress.update("asking")
                answers = ask(llm, request.prompts)
        except Exception as failure:  # Whatever stops the engine is the finding, but for the store.
            error, trouble = why(reports, failure)
            if trouble is not None:
                raise trouble(error) from failure
        loads = report.loads(reports)
    return ReloadResult(
        answers=answers,
        loads=loads,
        device_name=loads[0].device_name if loads else report.device_name(),
        vllm_version=vllm.__version__.partition("+")[0],
        error=error,
    )
