"""Runs each worker as a job of a Ray cluster."""

# No `annotations` of __future__: Dagster reads those of a resource's fields as they are.

import json
import os
import re
import shlex
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import dagster as dg
from dagster_pipes import (
    PipesContextData,
    PipesDefaultContextLoader,
    PipesParams,
)
from dagster_ray import PipesRayJobClient
from pydantic import Field
from ray.job_submission import JobStatus, JobSubmissionClient

from tensorize_assets.core import handover
from tensorize_assets.core.errors import (
    ClusterUnavailableError,
    PreflightError,
    WorkerError,
    WorkerKilledError,
)
from tensorize_assets.core.gpus import gpus_of, ranks_of
from tensorize_assets.core.launcher_ray import RANKS_FILE, RankTasks, RaySettings
from tensorize_assets.core.protocol import (
    REQUEST_EXTRA,
    SEALED_EXTRA,
    LogLine,
    R,
    WorkerFailure,
    WorkerRequest,
    describe_request,
    redact,
)
from tensorize_assets.core.rank_resources import RankResources, bytes_of
from tensorize_assets.core.s3 import is_s3
from tensorize_assets.core.scratch import private_folder
from tensorize_assets.core.tasks import ShardRequest
from tensorize_assets.resources.launchers.base import (
    CRASHES,
    Launcher,
    LaunchReport,
    StepContext,
    failed,
    last_lines,
    result_of,
    signal_of,
)
from tensorize_assets.resources.launchers.local import versions_of
from tensorize_assets.resources.launchers.ray_control import (
    POLL_S,
    PREFIX,
    STEP,
    STOP_S,
    Job,
    Over,
    first_line,
    step_of,
)
from tensorize_assets.resources.launchers.ray_log import JobLog

_REQUEST_FILE = "request.json"
# As worker/ray_ranks.py begins it: of a rank whose node or process Ray has lost too often.
_LOST_RANK = re.compile(r"rank \d+: Ray lost its process")
_DEFAULT_CPUS = 1.0


class RayLauncher(Launcher):
    """Runs workers as Ray jobs: one for each request.

    A worker that computes or writes alone is the job's own process, for which Ray reserves what it
    asks for on some node. A job of virtual ranks only waits, on the head node, for a Ray task a
    rank.
    """

    settings: dg.ResourceDependency[RaySettings]
    module: str = Field(
        default="tensorize_assets.worker.ray_ranks",
        description="Module that a job runs (`python -m`). Another one is of use only to wrap the "
        "worker.",
    )
    leave_s: float = Field(
        default=60.0,
        description="Seconds that a worker which has answered gets to leave: an engine that hangs "
        "in its shutdown never does.",
    )

    @property
    def shares_disks(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the settings say that the nodes see the folders of the Dagster step."""
        return self.settings.shared_disks

    def run(
        self,
        context: StepContext,
        request: WorkerRequest,
        result_type: type[R],
        secrets: Mapping[str, bytes] | None = None,
        resources: RankResources | None = None,
    ) -> LaunchReport[R]:
        """As `Launcher.run`. No process of the job is left; `peak_memory_bytes` is 0.

        Raises:
            ClusterUnavailableError: the cluster does not answer, or no node of it is large enough;
                a retry may help.
        """
        settings, what = self.settings, describe_request(request)
        hidden = tuple((secrets or {}).values())
        asked = (resources or RankResources()).over(settings.resources)
        root = getattr(request, "root", None)
        if root is not None and not is_s3(root) and not settings.shared_disks:
            raise PreflightError(
                f"{what}: the root {root} is a folder, which the nodes of a Ray cluster do not "
                "see: use an s3:// root, or set shared_disks of launchers.ray if they do"
            )
        sealed = _sealed(what, secrets, settings)
        if "scratch_dir" in type(request).model_fields:
            request = request.model_copy(update={"scratch_dir": settings.scratch})
        amounts = _amounts(request, asked)
        name = f"{PREFIX}{request.task.replace('_', '-')}-{os.urandom(6).hex()}"
        job = Job(settings, self.leave_s, what, name)
        job.sweep(context)
        job.require_room(amounts)
        extras: dict[str, Any] = {REQUEST_EXTRA: request.model_dump(mode="json")}
        start = time.monotonic()
        with private_folder() as place:
            # Apart from the lock: Ray takes all of it to the cluster.
            folder = place / "job"
            folder.mkdir()
            reserved: dict[str, Any] = {}
            if isinstance(request, ShardRequest) and request.sharding == "virtual":
                (folder / RANKS_FILE).write_text(_rank_tasks(settings, amounts, sealed))
            else:
                reserved = _reserved(amounts)
                if sealed is not None:
                    extras[SEALED_EXTRA] = sealed
            log = JobLog(context.log, job, hidden)
            pipes = _Pipes(job, _RequestFile(folder), log)
            try:
                pipes.run(
                    context=context,
                    extras=extras,
                    submit_job_params=cast(
                        "Any",
                        {
                            "submission_id": job.id,
                            "entrypoint": self._entrypoint(),
                            "metadata": {STEP: step_of(context)},
                            "runtime_env": {
                                "working_dir": str(folder),
                                "env_vars": _environment(settings),
                            },
                            **reserved,
                        },
                    ),
                )
            except (dg.DagsterExecutionInterruptedError, KeyboardInterrupt):
                # How Dagster cancels a step: it raises in the thread that waits.
                context.log.warning(f"{what}: cancelled; Ray job {job.id} is stopped")
                raise
            except (Over, RuntimeError):
                # The latter is how dagster-ray says that a job failed; why is told below.
                pass
        seconds = time.monotonic() - start
        place = f"{what}: Ray job {job.id}"
        reply = result_of(what, log.replies, result_type, hidden)
        if isinstance(reply, WorkerFailure):
            if reply.traceback is not None:
                context.log.error(redact(reply.traceback, hidden))
            if reply.kind == "failed" and _LOST_RANK.match(reply.message):
                raise WorkerKilledError(redact(f"{what}: {reply.message}", hidden))
            raise failed(what, reply, list(log.lines), hidden)
        if reply is None:
            raise _no_reply(place, job, list(log.lines), hidden)
        if job.status is not JobStatus.SUCCEEDED:
            context.log.warning(
                f"{place} gave its result and then did not leave cleanly; the result counts"
            )
        return LaunchReport(result=reply, peak_memory_bytes=0, seconds=round(seconds, 3))

    def versions(self) -> dict[str, str]:
        """Return the versions in the settings, or else those installed beside Dagster.

        Raises:
            WorkerError: there are neither.
        """
        return versions_of(self.settings.versions, "on the Ray cluster's nodes", "launchers.ray")

    def _entrypoint(self) -> str:
        grace = f"{self.settings.terminate_grace_s:g}"
        command = [self.settings.python, "-m", "tensorize_assets.worker.ray_job"]
        return f"exec {shlex.join([*command, self.module, grace])}"


class _Pipes(PipesRayJobClient):
    """PipesRayJobClient with our own client."""

    def __init__(self, job: Job, request: "_RequestFile", log: JobLog) -> None:
        super().__init__(
            context_injector=request,
            message_reader=log,
            # The end of the session stops the job, whatever ended it.
            forward_termination=False,
            poll_interval=POLL_S,
        )
        self._job = job

    @cached_property
    def client(self) -> JobSubmissionClient:
        return self._job


class _RequestFile(dg.PipesContextInjector):
    """Hands the request over in a file of the job's working directory.

    Linux takes no variable of more than 128 KiB, less than the tensor list of a large model; and a
    job's variables show in the dashboard.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def inject_context(self, context_data: PipesContextData) -> Generator[PipesParams]:
        (self._folder / _REQUEST_FILE).write_text(json.dumps(context_data))
        yield {PipesDefaultContextLoader.FILE_PATH_KEY: _REQUEST_FILE}

    def no_messages_debug_text(self) -> str:
        return "The request is a file of the Ray job's working directory."


def _sealed(what: str, secrets: Mapping[str, bytes] | None, settings: RaySettings) -> str | None:
    if not secrets:
        return None
    if settings.worker_public_key is None:
        raise PreflightError(
            f"{what} needs secrets ({', '.join(secrets)}), and a node gets them sealed only: make "
            "a pair with `tensorize keys generate`, put the private key on every node, name its "
            "file there in TENSORIZE_WORKER_KEY_FILE, and set worker_public_key of launchers.ray. "
            "Nodes that have a role for the bucket need no keys of it"
        )
    return handover.seal(secrets, settings.worker_public_key)


def _amounts(request: WorkerRequest, asked: RankResources) -> dict[str, float]:
    """What the worker of `request`, or each rank that is a task, takes of a node, in Ray's words.

    The ranks of one engine are on one node.
    """
    ranks = ranks_of(request)
    amounts = {"CPU": (asked.cpu or _DEFAULT_CPUS) * ranks}
    if asked.memory is not None:
        amounts["memory"] = float(bytes_of(asked.memory) * ranks)
    if gpus := gpus_of(request):
        amounts["GPU"] = float(gpus)
    return {**amounts, **{name: count * ranks for name, count in asked.custom.items()}}


def _reserved(amounts: Mapping[str, float]) -> dict[str, Any]:
    """`amounts` as parameters of a job, whose own process gets them."""
    rest = dict(amounts)
    found: dict[str, Any] = {"entrypoint_num_cpus": rest.pop("CPU")}
    if "GPU" in rest:
        found["entrypoint_num_gpus"] = rest.pop("GPU")
    if "memory" in rest:
        found["entrypoint_memory"] = int(rest.pop("memory"))
    return {**found, "entrypoint_resources": rest} if rest else found


def _rank_tasks(settings: RaySettings, amounts: Mapping[str, float], sealed: str | None) -> str:
    rest = dict(amounts)
    memory = rest.pop("memory", None)
    return RankTasks(
        num_cpus=rest.pop("CPU"),
        memory=None if memory is None else int(memory),
        resources=rest,
        max_retries=settings.max_retries,
        sealed=sealed,
    ).model_dump_json()


def _environment(settings: RaySettings) -> dict[str, str]:
    return {
        "NO_COLOR": "1",
        # A crash in native code prints where Python was.
        "PYTHONFAULTHANDLER": "1",
        # Lines of ranks come whole and all of them, not as "[repeated 3x across cluster]".
        "RAY_DEDUP_LOGS": "0",
        "RAY_COLOR_PREFIX": "0",
        # The worker's own patience with its processes ends before Ray's.
        "RAY_JOB_STOP_WAIT_TIME_S": str(int(settings.terminate_grace_s + STOP_S / 2)),
        # On the disk that is meant for such; a temporary folder may be small, or memory.
        "TENSORIZE_SNAPSHOT_CACHE": f"{settings.scratch}/snapshots",
        **settings.env,
    }


def _no_reply(
    place: str, job: Job, lines: Sequence[LogLine], secrets: Sequence[bytes]
) -> WorkerError:
    details, printed = job.details(), last_lines(lines)
    message = redact(first_line(details.message) if details and details.message else "", secrets)
    code = details.driver_exit_code if details else None
    if job.too_long:
        return WorkerError(
            f"{place} ran, or waited for free resources, longer than timeout_s of launchers.ray "
            f"and was ended; raise it if the work takes longer. {printed}"
        )
    if details is None:
        return WorkerKilledError(f"{place} left no result, and nobody knows of it. {printed}")
    if details.status is JobStatus.STOPPED:
        return WorkerKilledError(f"{place} was stopped by somebody else. {printed}")
    if code is None:
        if details.error_type == "JOB_SUPERVISOR_ACTOR_START_TIMEOUT":
            return ClusterUnavailableError(
                f"{place}: no node had room for it in the time that the cluster gives a job "
                f"(RAY_JOB_START_TIMEOUT_SECONDS on its head): {message}"
            )
        return WorkerKilledError(
            f"{place} was lost and left no result: {message} Most likely its node is gone, or a "
            f"process of Ray's on it was killed. {printed}"
        )
    number = signal_of(code)
    if number is None:
        return WorkerError(f"{place} left with exit code {code} and no result. {printed}")
    if number in CRASHES:
        return WorkerError(f"{place} crashed in native code ({number.name}). {printed}")
    return WorkerKilledError(
        f"{place} was killed ({number.name}) and left no result: most likely for its memory, of "
        "which launchers.ray or the profile can ask for more (`resources`), or by somebody. "
        f"{printed}"
    )
