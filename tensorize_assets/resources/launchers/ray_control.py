"""Control of one Ray job: from before it is submitted until nothing of it is left."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

import dagster as dg
import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from tensorize_assets.core.errors import (
    ClusterUnavailableError,
    PreflightError,
    WorkerError,
    WorkerKilledError,
)
from tensorize_assets.core.launcher_ray import RaySettings
from tensorize_assets.core.protocol import format_bytes
from tensorize_assets.resources.launchers.base import StepContext

POLL_S = 0.5
_REQUEST_S = 30.0
# How long the dashboard may be away while a job runs, such as for a restart of the head's process.
_PATIENCE_S = 120.0
# What Ray takes to see that a job's processes are gone, beyond their own time.
STOP_S = 20.0
# How often the end of a job asks again of a dashboard that does not answer, with longer pauses.
_END_TRIES = 5
# Of what a server in trouble says, in characters.
_SAID = 300
# What Ray itself answers of a job that it does not take or know.
_REFUSED = (requests.codes.bad_request, requests.codes.not_found)
PREFIX = "tensorize-"
# What a job says of whose it is; the first is dagster-ray's own.
RUN, STEP = "dagster/run-id", "tensorize/step"


class Over(Exception):
    """Leaves PipesRayJobClient, which waits without end: the job has had its time."""


class Job(JobSubmissionClient):
    """Ray's client, for one job: from before it is submitted until nothing of it is left."""

    def __init__(self, settings: RaySettings, leave_s: float, what: str, name: str) -> None:
        self.id = name
        self.started = False
        self.status: JobStatus | None = None
        self.too_long = False
        self.answered = False
        self._settings = settings
        self._leave_s = leave_s
        self._what = what
        self._patience_s = 0.0
        # The status of the last answer, which is not in what JobSubmissionClient raises.
        self._code = 0
        self._deadline = time.monotonic() + settings.timeout_s
        try:
            # Its signature leaves types open, as those below.
            super().__init__(settings.address)  # pyright: ignore[reportUnknownMemberType]
        except (requests.RequestException, RuntimeError, ValueError, KeyError) as error:
            raise ClusterUnavailableError(
                f"{what}: what answers at {settings.address} is no dashboard of Ray "
                f"({type(error).__name__}: {first_line(error)}): correct `address` of launchers.ray"
            ) from error

    def _do_request(self, method: str, endpoint: str, **arguments: Any) -> requests.Response:
        """As JobSubmissionClient's, which waits for ever, and for no dashboard that is away.

        Raises:
            ClusterUnavailableError: nobody answers, or with a trouble of the server's own (5xx).
        """
        arguments.setdefault("timeout", _REQUEST_S)
        deadline = time.monotonic() + (self._patience_s if method == "GET" else 0)
        while True:
            try:
                response = cast(
                    "requests.Response",
                    super()._do_request(  # pyright: ignore[reportUnknownMemberType]
                        method, endpoint, **arguments
                    ),
                )
                self._code = response.status_code
                if self._code < 500:
                    return response
                if time.monotonic() > deadline:
                    # A proxy's page, or a traceback, whose last line says what it is.
                    said = (response.text.strip().splitlines() or [""])[-1][:_SAID]
                    raise ClusterUnavailableError(
                        f"{self._what}: the Ray cluster at {self._settings.address} is in trouble "
                        f"(HTTP {self._code}: {said}). It may pass; look at its head"
                    )
            except AuthenticationError as error:
                raise PreflightError(
                    f"{self._what}: the Ray cluster at {self._settings.address} wants a token: set "
                    f"RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH for Dagster ({first_line(error)})"
                ) from None
            except requests.RequestException as error:
                if time.monotonic() > deadline:
                    raise ClusterUnavailableError(
                        f"{self._what}: the Ray cluster at {self._settings.address} does not "
                        f"answer ({type(error).__name__}): start it, or correct `address` of "
                        "launchers.ray"
                    ) from error
            time.sleep(POLL_S)

    def require_room(self, amounts: Mapping[str, float]) -> None:
        """Refuse what no node can ever hold.

        Raises:
            ClusterUnavailableError: says what was asked for and what the nodes have.
        """
        if self._settings.autoscaling:
            return
        response = self._do_request("GET", "/api/v0/nodes?limit=10000&timeout=20&detail=False")
        if response.status_code != requests.codes.ok:
            raise ClusterUnavailableError(
                f"{self._what}: the Ray cluster at {self._settings.address} does not say what "
                f"nodes it has (HTTP {response.status_code}): look at its head"
            )
        found = response.json()["data"]["result"]["result"]
        nodes = {
            node["node_ip"]: {name: node["resources_total"].get(name, 0.0) for name in amounts}
            for node in found
            if node["state"] == "ALIVE"
        }
        if any(all(has[name] >= n for name, n in amounts.items()) for has in nodes.values()):
            return
        have = "; ".join(f"{ip} has {spelled(has)}" for ip, has in nodes.items())
        raise ClusterUnavailableError(
            f"{self._what}: no node of the Ray cluster at {self._settings.address} can hold "
            f"{spelled(amounts)}, which one rank or worker asks for: {have}. Ask for less "
            "(`resources` of the profile or of launchers.ray, or a larger tensor_parallel_size), "
            "add a node, or set `autoscaling` of launchers.ray if nodes come when they are needed"
        )

    def sweep(self, context: StepContext) -> None:
        """Stop jobs that nobody waits for: their Dagster process was killed."""
        with suppress(RuntimeError, ClusterUnavailableError):
            for job in self.list_jobs():
                name, of = job.submission_id or "", job.metadata or {}
                run_id = of.get(RUN)
                if job.status.is_terminal() or not name.startswith(PREFIX) or run_id is None:
                    continue
                if run_id == context.run_id:
                    # A step does one thing at a time, so that it is an earlier attempt's.
                    lost = of.get(STEP) == step_of(context)
                else:
                    run = context.instance.get_run_by_id(run_id)
                    lost = run is not None and run.is_finished
                if lost:
                    context.log.warning(
                        f"stopping Ray job {name} of run {run_id}: its launcher is gone"
                    )
                    self.stop_job(name)

    def submit_job(self, **parameters: Any) -> str:
        """As JobSubmissionClient's."""
        # From here on it may run, also where the answer is lost or the step is cancelled.
        self.started = True
        self._patience_s = _PATIENCE_S
        try:
            return super().submit_job(**parameters)
        except RuntimeError as error:
            # Any other answer may be that of a proxy, behind which the job was taken.
            self.started = self._code not in _REFUSED
            raise WorkerError(
                f"{self._what}: the Ray cluster at {self._settings.address} takes no job: {error}"
            ) from error

    def get_job_status(self, job_id: str) -> JobStatus:
        """As JobSubmissionClient's. Raises Over once the job has had its time."""
        try:
            self.status = super().get_job_status(job_id)
        except RuntimeError as error:
            if self._code not in _REFUSED:
                raise ClusterUnavailableError(
                    f"{self._what}: the Ray cluster at {self._settings.address} does not say how "
                    f"job {job_id} is ({first_line(error)}): look at its head"
                ) from None
            self.started = False
            raise WorkerKilledError(
                f"{self._what}: the Ray cluster at {self._settings.address} no longer knows job "
                f"{job_id}: most likely it was started anew ({first_line(error)})"
            ) from None
        now = time.monotonic()
        if self.answered:
            self._deadline = min(self._deadline, now + self._leave_s)
            self.answered = False
        if now > self._deadline and not self.status.is_terminal():
            self.too_long = True
            raise Over
        return self.status

    def end(self, log: dg.DagsterLogManager) -> None:
        """Stop it unless it has ended, and wait until no process of it is left."""
        # From here on nobody waits: the log of a lost node is lost too.
        self._patience_s = 0
        if not self.started or (self.status is not None and self.status.is_terminal()):
            return
        deadline = time.monotonic() + self._settings.terminate_grace_s + STOP_S
        asked, failures = False, 0
        while failures < _END_TRIES and time.monotonic() < deadline:
            if asked or failures:
                time.sleep(POLL_S / 2 * 2**failures)
            try:
                if not asked:
                    self.stop_job(self.id)
                    asked = True
                self.status = super().get_job_status(self.id)
                if self.status.is_terminal():
                    return
            except (RuntimeError, ClusterUnavailableError, PreflightError) as error:
                if isinstance(error, RuntimeError) and self._code in _REFUSED:
                    # Nobody knows it, as after a head that was started anew.
                    return
                failures += 1
        # A log that fails must not hide why the job was to end.
        with suppress(Exception):
            log.warning(
                f"{self._what}: Ray job {self.id} may still run: `ray job stop {self.id} "
                f"--address {self._settings.address}`"
            )

    def details(self) -> JobDetails | None:
        """What Ray knows of it; None where nobody answers."""
        with suppress(RuntimeError, ClusterUnavailableError):
            return self.get_job_info(self.id)
        return None


def step_of(context: StepContext) -> str:
    return context.get_step_execution_context().step.key


def first_line(error: object) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def spelled(amounts: Mapping[str, float]) -> str:
    return ", ".join(
        f"{format_bytes(n)} of memory" if name == "memory" else f"{n:g} {name}"
        for name, n in amounts.items()
    )
