"""Answers of the shape that vLLM's would have, for a model of one tensor, and deaths on demand.

`STAND_IN_DEATHS` names a folder: a file `TASK-N` in it ends the N-th start of that task. It holds
`KILL` (the worker dies of SIGKILL) or `INT` (whoever waits for the worker is sent SIGINT).
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path

from tensorize_assets.core import layout
from tensorize_assets.core.manifest import (
    DtypeCensus,
    DtypeCount,
    FileEntry,
    ShardEntry,
    StockVllm,
    TensorEntry,
)
from tensorize_assets.core.store import digest
from tensorize_assets.core.tasks import (
    Answers,
    Output,
    RankLoad,
    ReferenceRequest,
    ReferenceResult,
    ReloadRequest,
    ReloadResult,
    ShardRequest,
    ShardResult,
    TensorReport,
    TokenScore,
)
from tensorize_assets.worker.access import store_of
from tensorize_assets.worker.session import Progress

_CONTENT = b"one tensor" * 1000
_SHA256 = hashlib.sha256(_CONTENT).hexdigest()
_VERSIONS = {
    "vllm": "0.31.0",
    "torch": "2.13.0",
    "tensorizer": "2.10.1",
    "tensorize_assets": "0.1.0",
    "python": "3.11.7",
}


def shard(request: ShardRequest, progress: Progress) -> ShardResult:
    _die_if_asked("shard")
    # A name of its own for each: two runs of one build may be here at once.
    scratch = Path(request.scratch_dir) / f"stand-in-{os.getpid()}"
    scratch.parent.mkdir(parents=True, exist_ok=True)
    scratch.write_bytes(_CONTENT)
    name = layout.shard_name(0, 1)
    key = layout.file_key(request.directory, name)
    store_of(request.root, request.s3).put_file(key, scratch, sha256=_SHA256, move=True)
    size = len(_CONTENT)
    tensor = TensorEntry(
        name="w", kind="parameter", dtype="bfloat16", shape=(size // 2,), size=size, sha256=_SHA256
    )
    return ShardResult(
        dtype="bfloat16",
        architecture="StandInForCausalLM",
        files=(FileEntry(path=name, size=size, sha256=_SHA256),),
        shards=(ShardEntry(rank=0, file=name, tensors=(tensor,)),),
        census=DtypeCensus(
            by_dtype={"bfloat16": DtypeCount(tensors=1, bytes=size)}, model_dtype="bfloat16"
        ),
        tied=(),
        stock_vllm=StockVllm(loadable=True),
        versions=_VERSIONS,
        seconds={},
    )


def reference(request: ReferenceRequest, progress: Progress) -> ReferenceResult:
    _die_if_asked("reference")
    return ReferenceResult(
        answers=_answers(request.prompts),
        loads=(_load({}),),
        device_name="stand-in",
        vllm_version="0.31.0",
    )


def reload(request: ReloadRequest, progress: Progress) -> ReloadResult:
    _die_if_asked("reload")
    key = layout.file_key(request.directory, "model.tensors")
    found = digest(store_of(request.root, request.s3), key).sha256
    return ReloadResult(
        answers=_answers(request.prompts),
        loads=(_load({"w": TensorReport(sha256=found, finite=True)}),),
        device_name="stand-in",
        vllm_version="0.31.0",
    )


def _answers(prompts: tuple[str, ...]) -> Answers:
    positions = (TokenScore(token=7, top={7: -0.5, 8: -1.5}),)
    outputs = tuple(Output(prompt=prompt, text=" so", positions=positions) for prompt in prompts)
    return Answers(outputs=outputs, perplexity=12.5, logprobs_finite=True)


def _load(tensors: dict[str, TensorReport]) -> RankLoad:
    return RankLoad(
        rank=0,
        device="cpu",
        device_name="stand-in",
        seconds=0.25,
        bytes=len(_CONTENT),
        host_memory_before=1,
        host_memory_after=2,
        tensors=tensors,
    )


def _die_if_asked(task: str) -> None:
    folder = os.environ.get("STAND_IN_DEATHS")
    if folder is None:
        return
    starts = Path(folder) / f"{task}.starts"
    with starts.open("a") as file:
        file.write("x")
    order = Path(folder) / f"{task}-{starts.stat().st_size}"
    if not order.exists():
        return
    if order.read_text() == "INT":
        os.kill(os.getppid(), signal.SIGINT)
    else:
        # Longer than the launcher's pause between two readings of memory.
        time.sleep(0.6)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)
