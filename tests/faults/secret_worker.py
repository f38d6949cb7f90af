"""The real worker, which shards, writes adapters and encrypts; its engines are stood in for."""

from __future__ import annotations

import atexit
import json
import resource
import sys
from pathlib import Path

from stand_in import tasks as stand_in

from tensorize_assets.core import layout
from tensorize_assets.core.tasks import (
    ReferenceRequest,
    ReloadRequest,
    ReloadResult,
    TensorReport,
)
from tensorize_assets.worker.__main__ import TASKS, Task, main
from tensorize_assets.worker.access import store_of
from tensorize_assets.worker.session import Progress


def reload(request: ReloadRequest, progress: Progress) -> ReloadResult:
    """What a reload would say in which all was as the manifest has it."""
    progress.log(f"asked to open {request.directory}")
    key = layout.manifest_key(request.directory)
    found = store_of(request.root, request.s3).get_bytes(key)
    assert found is not None
    tensors = {
        tensor["name"]: TensorReport(sha256=tensor["sha256"], finite=True)
        for shard in json.loads(found.data)["shards"]
        for tensor in shard["tensors"]
    }
    return ReloadResult(
        answers=stand_in._answers(request.prompts),
        adapters={
            one.name: stand_in._answers(request.prompts, one.name) for one in request.adapters
        },
        refusals=stand_in._refusals(),
        loads=(stand_in._load(tensors),),
        device_name="stand-in",
        vllm_version="0.31.0",
    )


def _say_what_a_crash_would_leave() -> None:
    limit = resource.getrlimit(resource.RLIMIT_CORE)
    held = Path("/proc/self/coredump_filter").read_text().strip()
    print(f"at its end, core dumps: {limit}, {held}", flush=True)


if __name__ == "__main__":
    atexit.register(_say_what_a_crash_would_leave)
    sys.exit(
        main(
            {
                **TASKS,
                "reference": Task(ReferenceRequest, "stand_in.tasks:reference"),
                "reload": Task(ReloadRequest, "secret_worker:reload"),
            }
        )
    )
