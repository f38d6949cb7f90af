"""The worker of a Ray job, whose virtual ranks are Ray tasks of their own on any node.

    python -m tensorize_assets.worker.ray_ranks

It answers as `python -m tensorize_assets.worker` does. Where the launcher left RANKS_FILE, it
writes no shard itself: it starts a task for each rank and waits, a light process on the head node.
A task whose node is lost is started again elsewhere, by Ray.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from tensorize_assets.core import processes, shard_parts
from tensorize_assets.core.errors import (
    PreflightError,
    StoreUnavailableError,
    TensorizeAssetsError,
    WorkerBusyError,
    WorkerError,
    WorkerKilledError,
)
from tensorize_assets.core.launcher_ray import RANKS_FILE, RankTasks
from tensorize_assets.core.protocol import (
    WorkerFailure,
    encode_failure,
    encode_result,
    parse_reply,
)
from tensorize_assets.core.tasks import ShardRequest, ShardResult
from tensorize_assets.vllm_plugin import sodium
from tensorize_assets.worker import __main__ as worker
from tensorize_assets.worker import logs
from tensorize_assets.worker.session import Level, Progress

_POLL_S = 0.25
# What a rank that is told to stop gets for its scratch and its upload, before its process is ended.
_CANCEL_S = 30.0
_MESSAGES = 1000
_RAISED: Mapping[str, type[TensorizeAssetsError]] = {
    "preflight": PreflightError,
    "busy": WorkerBusyError,
    "unavailable": StoreUnavailableError,
}

# The module whose TASKS a rank's process has; tests have their own.
_tasks_of = worker.__name__


def main(tasks_of: str = _tasks_of, **silences: float) -> int:
    """As `worker.__main__.main`, of the TASKS of a module; ranks may be tasks of their own."""
    global _tasks_of
    _tasks_of = tasks_of
    tasks: dict[str, worker.Task] = {**import_module(tasks_of).TASKS}
    if Path(RANKS_FILE).exists():
        tasks["shard"] = worker.Task(ShardRequest, f"{__spec__.name}:run")
    return worker.main(tasks, **silences)


def run(request: ShardRequest, progress: Progress) -> ShardResult:
    """Have each rank built by a Ray task; the first that fails ends the others.

    Raises:
        PreflightError, WorkerBusyError, StoreUnavailableError, WorkerError: as a rank did.
        WorkerKilledError: the process of a rank was lost again and again.
    """
    # Of no other launcher.
    import ray
    from ray.util.queue import Queue
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    how = RankTasks.model_validate_json(Path(RANKS_FILE).read_bytes())
    parts = shard_parts.split(request)
    # By default a task that the kernel or Ray kills for its memory is tried for ever.
    os.environ.setdefault("RAY_task_oom_retries", str(how.max_retries))
    ray.init(logging_level=logging.WARNING)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    said = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})
    # One process a task, which is gone after it: vLLM's state is a process's.
    start = ray.remote(
        num_cpus=how.num_cpus,
        memory=how.memory or 0,
        resources=how.resources,
        max_retries=how.max_retries,
        max_calls=1,
        scheduling_strategy="SPREAD",
    )(rank_task)
    ranks: dict[Any, int] = {}
    for part in parts:
        assert part.ranks is not None
        (rank,) = part.ranks
        # The log monitor puts the name before each line, which the launcher reads the rank from.
        task = start.options(name=f"Worker_TP{rank}")
        ranks[task.remote(_tasks_of, part.model_dump(mode="json"), how.sealed, said)] = rank
    progress.log(f"{len(parts)} ranks wait for nodes, each with {_amounts(how)}")
    results: dict[int, ShardResult] = {}
    pending = list(ranks)
    at_work: set[int] = set()
    try:
        while pending:
            done, pending = ray.wait(pending, timeout=_POLL_S)
            _pass_on(said, progress, at_work)
            for task in done:
                rank = ranks[task]
                results[rank] = _result(f"rank {rank}", task, how, progress)
    finally:
        _end(pending, said, progress, at_work)
    return shard_parts.merge([results[rank] for rank in ranks.values()])


def rank_task(tasks_of: str, payload: Any, sealed: str | None, said: Any) -> dict[str, Any]:
    """A Ray task: build one rank in this process. Returns the message with its result or failure.

    `said` is the queue that takes what it reports, as (rank, message, level); no message says that
    it has cleaned up.
    """
    import ray
    from ray.exceptions import RayError

    rank, ranks = payload["ranks"][0], payload["tensor_parallel_size"]
    name = f"rank {rank}/{ranks}"
    # Of the job's driver, which has the only session.
    for variable in [key for key in os.environ if key.startswith("DAGSTER_PIPES_")]:
        del os.environ[variable]
    processes.forbid_core_dumps()
    sodium.provide()
    logs.set_up()

    def send(message: str, level: Level) -> None:
        text = message if message.startswith("rank ") else f"{name}: {message}"
        # Without a driver there is nobody to tell, and this process is about to end.
        with suppress(RayError):
            said.put_nowait((rank, text, level))

    send(f"{name}: on node {ray.util.get_node_ip_address()}", "info")
    try:
        reply = worker.answer(import_module(tasks_of).TASKS, payload, sealed, Progress(send))
    finally:
        with suppress(RayError):
            said.put_nowait((rank, None, None))
    if isinstance(reply, WorkerFailure):
        return encode_failure(reply)
    return encode_result(reply)


def _pass_on(said: Any, progress: Progress, at_work: set[int]) -> None:
    from ray.exceptions import RayError

    try:
        told = said.get_nowait_batch(min(said.qsize(), _MESSAGES))
    except RayError:
        # Lost with its node: the ranks' work, and what comes of it, goes on without a word.
        at_work.clear()
        return
    for rank, message, level in told:
        if message is None:
            at_work.discard(rank)
        else:
            at_work.add(rank)
            progress.log(message, level)


def _result(name: str, task: Any, how: RankTasks, progress: Progress) -> ShardResult:
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        reply = parse_reply([ray.get(task)], ShardResult)
    except RayTaskError as error:
        # Its process lives: what failed is around the rank's work, such as an import.
        lines = str(error).strip().splitlines()
        progress.log(f"{name}: " + "\n".join(lines), "error")
        raise WorkerError(f"{name}: {lines[-1] if lines else type(error).__name__}") from None
    except RayError as error:
        first = next(iter(str(error).strip().splitlines()), "")
        # The launcher knows by these words that another try may help.
        raise WorkerKilledError(
            f"{name}: Ray lost its process, also after it was started anew up to "
            f"{how.max_retries} times ({type(error).__name__}: {first}). If it was killed for its "
            "memory, give each rank more (`resources: {memory: …}`) or use a larger "
            "tensor_parallel_size"
        ) from None
    if isinstance(reply, WorkerFailure):
        if reply.traceback is not None:
            progress.log(f"{name}: {reply.traceback}", "error")
        raise _RAISED.get(reply.kind, WorkerError)(f"{name}: {reply.message}")
    assert reply is not None
    return reply


def _end(pending: list[Any], said: Any, progress: Progress, at_work: set[int]) -> None:
    """End the tasks that still run: first so that they clean up, then their processes."""
    import ray

    for task in pending:
        ray.cancel(task)
    # A cancelled task counts as done at once, while its process still cleans up.
    deadline = time.monotonic() + _CANCEL_S
    while pending and at_work and time.monotonic() < deadline:
        time.sleep(_POLL_S / 5)
        _pass_on(said, progress, at_work)
    for task in pending:
        ray.cancel(task, force=True)


def _amounts(how: RankTasks) -> str:
    amounts = [f"{how.num_cpus:g} CPU", *(f"{n:g} {name}" for name, n in how.resources.items())]
    if how.memory is not None:
        amounts.append(f"{how.memory:,} bytes of memory")
    return ", ".join(amounts)


if __name__ == "__main__":
    sys.exit(main())
