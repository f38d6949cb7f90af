"""Dagster's own launcher, which also knows of a started run whether its process still lives."""

import psutil
from dagster import DagsterEventType, DagsterRun, DefaultRunLauncher
from dagster._core.errors import DagsterUserCodeUnreachableError
from dagster._core.launcher import CheckRunHealthResult, WorkerStatus
from dagster._grpc.client import DagsterGrpcClient
from dagster._grpc.types import GetCurrentRunsResult
from dagster._serdes import deserialize_value

from tensorize_assets.automation import run_lock

# What a clock may have been set forward meanwhile, which makes processes look younger.
_CLOCK_S = 60.0


class WatchedRunLauncher(DefaultRunLauncher):
    """Answers Dagster's run monitoring, so that a run that was lost with its machine is failed.

    Run retries then start it anew. By the stock launcher it would count as started for ever, and
    the one run that its partition may have would be taken. Whatever is not known for certain
    counts as alive.
    """

    @property
    def supports_check_run_worker_health(self) -> bool:
        return True

    def check_run_worker_health(self, run: DagsterRun) -> CheckRunHealthResult:
        """NOT_FOUND for a run whose code server, or this machine, no longer has its process.

        A run of `tensorize build`, which no code server started, has a lock instead.
        """
        if run_lock.is_lost(self._instance, run.run_id):
            return _lost(run_lock.LOST)
        # Its signature leaves a type open.
        server = self._get_grpc_client_for_termination(  # pyright: ignore[reportUnknownMemberType]
            run.run_id
        )
        if server is None:
            return _alive("it was started by no code server")
        if server.socket is not None:
            return self._on_this_machine(run)
        return _on_server(server, run)

    def _on_this_machine(self, run: DagsterRun) -> CheckRunHealthResult:
        """Of a run of `dagster dev`, whose code servers come and go while its runs go on."""
        for entry in self._instance.all_logs(run.run_id, of_type=DagsterEventType.ENGINE_EVENT):
            event = entry.dagster_event
            pid = event.engine_event_data.metadata.get("pid") if event else None
            if pid is None:
                continue
            # The first one named is the run's own process; those of its steps come after.
            number = int(str(pid.value))
            try:
                born = psutil.Process(number).create_time()
            except psutil.NoSuchProcess:
                return _lost(f"process {number} of this run is gone")
            except psutil.Error:
                break
            if born > entry.timestamp + _CLOCK_S:
                return _lost(f"process {number} of this run is gone, another one has its number")
            break
        return _alive("nothing says otherwise")


def _on_server(server: DagsterGrpcClient, run: DagsterRun) -> CheckRunHealthResult:
    """Of a run of a code server (`dagster api grpc`), which takes its runs along when it ends."""
    where = f"the code server at {server.host}:{server.port}"
    try:
        current = deserialize_value(server.get_current_runs(), GetCurrentRunsResult)
    except DagsterUserCodeUnreachableError:
        # It restarts, or is a `dagster code-server`, which does not answer this question.
        return _alive(f"{where} does not say")
    if run.run_id in current.current_runs:
        return _alive(f"{where} has it")
    return _lost(f"{where} was restarted and does not have this run")


def _alive(why: str) -> CheckRunHealthResult:
    return CheckRunHealthResult(WorkerStatus.RUNNING, why)


def _lost(why: str) -> CheckRunHealthResult:
    return CheckRunHealthResult(WorkerStatus.NOT_FOUND, why)
