"""Where a worker starts: one request in, one result or failure out, both through Dagster Pipes."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

from dagster_pipes import (
    DAGSTER_PIPES_CONTEXT_ENV_VAR,
    DAGSTER_PIPES_MESSAGES_ENV_VAR,
    open_dagster_pipes,
)

from tensorize_assets.core import processes
from tensorize_assets.core.errors import (
    PreflightError,
    StoreUnavailableError,
    TensorizeAssetsError,
    WorkerBusyError,
    WorkerError,
)
from tensorize_assets.core.protocol import (
    REQUEST_EXTRA,
    SEALED_EXTRA,
    WorkerFailure,
    WorkerRequest,
    WorkerResult,
    encode_failure,
    encode_result,
    parse_request,
)
from tensorize_assets.core.releases import installed, require_supported
from tensorize_assets.core.store import advice
from tensorize_assets.core.tasks import (
    AdaptersRequest,
    EncryptRequest,
    HfTensorsRequest,
    ReferenceRequest,
    ReloadRequest,
    SelfCheckRequest,
    ShardRequest,
)
from tensorize_assets.vllm_plugin import sodium
from tensorize_assets.worker import logs, session
from tensorize_assets.worker.session import Level, Progress


class Task(NamedTuple):
    """What a task is asked with, and the `module:function` that answers.

    The function is imported after the request is understood: vLLM alone takes 10 seconds. A
    request names a task, never a function, so that it cannot run anything else.
    """

    request: type[WorkerRequest]
    function: str


TASKS: Mapping[str, Task] = {
    "shard": Task(ShardRequest, "tensorize_assets.worker.shard:run"),
    "hf_tensors": Task(HfTensorsRequest, "tensorize_assets.worker.hf_tensors:run"),
    "adapters": Task(AdaptersRequest, "tensorize_assets.worker.adapters:run"),
    "encrypt": Task(EncryptRequest, "tensorize_assets.worker.encrypt:run"),
    "reference": Task(ReferenceRequest, "tensorize_assets.worker.reference:run"),
    "reload": Task(ReloadRequest, "tensorize_assets.worker.reload:run"),
    "self_check": Task(SelfCheckRequest, "tensorize_assets.worker.self_check:run"),
}


def main(
    tasks: Mapping[str, Task] = TASKS,
    *,
    shortest_gap_s: float = 5.0,
    longest_silence_s: float = 10.0,
) -> int:
    """Answer the request that Pipes holds; returns the exit code: 0 with a result, 1 without.

    Progress is reported as `session.Progress` does with these two, in seconds.
    """
    if DAGSTER_PIPES_CONTEXT_ENV_VAR not in os.environ:
        print(
            "a worker is started by Dagster, which hands it a request; to build a model, run "
            "`tensorize build MODEL`",
            file=sys.stderr,
        )
        return 2
    signal.signal(signal.SIGTERM, _leave)
    # It would hold the keys.
    processes.forbid_core_dumps()
    session.end_with_parent()
    session.secrets()
    sodium.provide()
    logs.set_up()
    with open_dagster_pipes() as pipes:
        # Ranks are children, inherit the environment, and would open and close this session too.
        for name in (DAGSTER_PIPES_CONTEXT_ENV_VAR, DAGSTER_PIPES_MESSAGES_ENV_VAR):
            os.environ.pop(name, None)

        def send(message: str, level: Level) -> None:
            pipes.log.log(logging.getLevelNamesMapping()[level.upper()], message)

        progress = Progress(
            send, shortest_gap_s=shortest_gap_s, longest_silence_s=longest_silence_s
        )
        reply = answer(
            tasks, pipes.extras.get(REQUEST_EXTRA), pipes.extras.get(SEALED_EXTRA), progress
        )
        if isinstance(reply, WorkerFailure):
            pipes.report_custom_message(encode_failure(reply))
            return 1
        pipes.report_custom_message(encode_result(reply))
        return 0


def answer(
    tasks: Mapping[str, Task], payload: object, sealed: str | None, progress: Progress
) -> WorkerResult | WorkerFailure:
    """Do what `payload` asks for. Raises nothing but what ends a process."""
    try:
        request = parse_request(payload, {name: task.request for name, task in tasks.items()})
        if sealed is not None:
            session.unseal(sealed)
    except WorkerError as error:
        return WorkerFailure(kind="input", message=str(error))
    try:
        with progress:
            vllm = installed()
            if vllm is not None:
                require_supported(vllm.release)
            progress.update(f"starting task {request.task}")
            return _function(tasks[request.task].function)(request, progress)
    except PreflightError as error:
        return WorkerFailure(kind="preflight", message=str(error))
    except WorkerBusyError as error:
        return WorkerFailure(kind="busy", message=str(error))
    except StoreUnavailableError as error:
        return WorkerFailure(kind="unavailable", message=str(error))
    except TensorizeAssetsError as error:
        return WorkerFailure(kind="failed", message=str(error))
    except Exception as error:  # noqa: BLE001 - whatever a library raises is reported as such
        message = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.filename is not None:
            message = f"{error.filename}: {error.strerror}; {advice(error)}"
        return WorkerFailure(
            kind="failed",
            message=message,
            traceback=traceback.format_exc(),
        )


def _function(named: str) -> Any:
    """Import `module:function`."""
    module, _, function = named.partition(":")
    # vLLM's import makes millions of objects that stay, and each collection would look at them
    # all: a third of its time.
    gc.disable()
    try:
        return getattr(import_module(module), function)
    finally:
        gc.enable()
        gc.freeze()


def _leave(*_: object) -> NoReturn:
    # As an exception, SIGTERM lets the task remove its scratch files.
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
