"""Runs each worker as a pod of a Kubernetes cluster."""

# Without `annotations` of the future: Dagster looks at the field's own to find ResourceDependency.

import copy
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import dagster as dg
from dagster_k8s.pipes import build_pod_body

from tensorize_assets.core import handover
from tensorize_assets.core.errors import (
    PreflightError,
    WorkerKilledError,
)
from tensorize_assets.core.launcher_k8s import K8sSettings
from tensorize_assets.core.protocol import (
    REQUEST_EXTRA,
    SEALED_EXTRA,
    R,
    WorkerFailure,
    WorkerRequest,
    describe_request,
    redact,
)
from tensorize_assets.core.rank_resources import RankResources
from tensorize_assets.core.s3 import is_s3
from tensorize_assets.core.shard_parts import merge, split
from tensorize_assets.core.tasks import ShardRequest, ShardResult
from tensorize_assets.resources.launchers import k8s_status as status
from tensorize_assets.resources.launchers.base import (
    Launcher,
    LaunchReport,
    StepContext,
    failed,
    last_lines,
    result_of,
)
from tensorize_assets.resources.launchers.k8s_cluster import (
    API_ERRORS,
    API_TIMEOUT_S,
    connect,
    refused,
)
from tensorize_assets.resources.launchers.k8s_log import PodLog
from tensorize_assets.resources.launchers.k8s_pods import pod_spec, share_of
from tensorize_assets.resources.launchers.k8s_request import RequestInjector
from tensorize_assets.resources.launchers.k8s_watch import PodClient, Stopped
from tensorize_assets.resources.launchers.local import versions_of

_LABEL = "tensorize-assets"
# How long after its grace a pod may still be there: before it is removed by force, and at all.
_FORCE_S = 5.0
_REMOVAL_S = 30.0


class K8sLauncher(Launcher):
    """Runs workers as pods, one for each request and one for each virtual rank.

    Dagster may run inside the cluster or outside of it.
    """

    shares_disks: ClassVar[bool] = False

    settings: dg.ResourceDependency[K8sSettings]

    def run(
        self,
        context: StepContext,
        request: WorkerRequest,
        result_type: type[R],
        secrets: Mapping[str, bytes] | None = None,
        resources: RankResources | None = None,
    ) -> LaunchReport[R]:
        """As `Launcher.run`. No pod is left, however it ends; `peak_memory_bytes` is 0.

        Raises:
            ClusterUnavailableError: the cluster's API does not answer, or it has no node for a
                pod in the time that the settings give it; a retry may help.
        """
        root = getattr(request, "root", None)
        if root is not None and not is_s3(root):
            raise PreflightError(
                f"{describe_request(request)}: the root {root} is a folder, which pods do not "
                "see: use an s3:// root"
            )
        namespace, api = connect(self.settings)
        launch = _Launch(self.settings, context, secrets or {}, resources, namespace, api)
        start = time.monotonic()
        try:
            # The first request that tells whether there is a cluster, and what we may do there.
            launch.sweep()
        except API_ERRORS as error:
            raise refused(describe_request(request), error, ()) from None
        try:
            if isinstance(request, ShardRequest) and share_of(request).ranks == 1:
                # A pod has its machine's disk to itself.
                parts = split(request.model_copy(update={"shares_machine": False}))
            else:
                parts = (request,)
            if len(parts) == 1:
                result = launch.one(request, result_type)
            else:
                # A ShardRequest's result is that, which `merge` gives.
                shards = launch.all(parts, self.settings.parallel_ranks)
                result = cast("R", merge(shards))
        except (dg.DagsterExecutionInterruptedError, KeyboardInterrupt):
            # How Dagster cancels a step: it raises in the thread that waits.
            context.log.warning(f"{describe_request(request)}: cancelled; deleting its pods")
            raise
        finally:
            launch.end()
        return LaunchReport(
            result=result, peak_memory_bytes=0, seconds=round(time.monotonic() - start, 3)
        )

    def versions(self) -> dict[str, str]:
        """Return the versions in the settings, or else those installed beside Dagster.

        Raises:
            WorkerError: there are neither.
        """
        return versions_of(self.settings.versions, "in the pods' image", "launchers.k8s")


@dataclass
class _Launch:
    """The pods of one `run`, which carry its `id` as a label."""

    settings: K8sSettings
    context: StepContext
    secrets: Mapping[str, bytes]
    resources: RankResources | None
    namespace: str
    api: Any
    id: str = field(default_factory=lambda: os.urandom(8).hex())
    stop: threading.Event = field(default_factory=threading.Event)

    def one(self, request: WorkerRequest, result_type: type[R], part: int | None = None) -> R:
        """Run one pod to its end."""
        what = describe_request(request) + ("" if part is None else f" rank {part}")
        hidden = tuple(self.secrets.values())
        prefix = "" if part is None else f"rank {part}: "
        log = PodLog(self.context.log, prefix, hidden)
        label = f"{self.id}-{part or 0}"
        scratch = self.settings.scratch_dir
        if "scratch_dir" in type(request).model_fields:
            request = request.model_copy(update={"scratch_dir": scratch})
        extras = self._extras(request)
        large = RequestInjector.is_large(extras)
        injector = RequestInjector(f"{scratch}/request-{label}.json" if large else None)
        spec = pod_spec(
            self.settings, request, self.resources, before=injector.unpack if large else ""
        )
        meta = {
            "labels": {
                **self.settings.labels,
                f"{_LABEL}/launch": self.id,
                f"{_LABEL}/pod": label,
                f"{_LABEL}/run-id": self.context.run_id,
                f"{_LABEL}/step": self._step,
                f"{_LABEL}/task": request.task.replace("_", "-"),
            },
            "annotations": {**self.settings.annotations, f"{_LABEL}/work": what},
        }
        _check_pod(meta, spec)
        client = PodClient(what, self.settings, log, injector, self.stop)
        if self.stop.is_set():
            raise Stopped
        try:
            client.run(
                context=_op_context(self.context),
                extras=extras,
                namespace=self.namespace,
                base_pod_meta=meta,
                base_pod_spec=spec,
                pod_wait_timeout=0,
                # It deletes once, and what that raises hides why the pod ended.
                delete_pod_on_completion=False,
            )
        except API_ERRORS as error:
            raise refused(what, error, hidden) from None
        finally:
            log.give_up()
            lost = client.end is not None and client.end.node_lost
            self._remove(f"{_LABEL}/pod={label}", force=lost)
        return self._result(client, what, result_type)

    def all(self, parts: Sequence[ShardRequest], at_once: int) -> list[ShardResult]:
        """Run a pod for each of `parts`, some at once; the first that fails ends the others."""
        with ThreadPoolExecutor(at_once, thread_name_prefix="rank") as pool:
            running: dict[Future[ShardResult], int] = {}
            try:
                for number, part in enumerate(parts):
                    rank = part.ranks[0] if part.ranks else number
                    running[pool.submit(self.one, part, ShardResult, rank)] = number
                left = set(running)
                while left:
                    done, left = wait(left, return_when=FIRST_COMPLETED)
                    for future in done:
                        future.result()
            except BaseException:
                self.stop.set()
                for future in running:
                    future.cancel()
                # At once, rather than as the threads get to it.
                self._delete(f"{_LABEL}/launch={self.id}")
                raise
            return [future.result() for future in running]

    def end(self) -> None:
        """Whatever is left, such as a pod that was made while the launch was cancelled."""
        self.stop.set()
        self._remove(f"{_LABEL}/launch={self.id}")

    def sweep(self) -> None:
        """Delete the pods of launches that nobody waits for: their process was killed."""
        for pod in self._pods(f"{_LABEL}/launch"):
            name, labels = pod.metadata.name, pod.metadata.labels
            run_id, step = labels.get(f"{_LABEL}/run-id"), labels.get(f"{_LABEL}/step")
            if run_id == self.context.run_id:
                # A step does one thing at a time, so that it is an earlier attempt's.
                lost = step == self._step
            else:
                run = self.context.instance.get_run_by_id(run_id)
                lost = run is not None and run.is_finished
            if lost:
                self.context.log.warning(
                    f"deleting pod {self.namespace}/{name} of run {run_id}: its launcher is gone"
                )
                self._delete_one(name, self.settings.terminate_grace_s)

    def _extras(self, request: WorkerRequest) -> dict[str, Any]:
        extras: dict[str, Any] = {REQUEST_EXTRA: request.model_dump(mode="json")}
        if not self.secrets:
            return extras
        key = self.settings.worker_public_key
        if key is None:
            raise PreflightError(
                f"{describe_request(request)} needs secrets ({', '.join(self.secrets)}), and a pod "
                "gets them sealed only: make a pair with `tensorize keys generate`, put the "
                "private key into a Secret, and set launchers.k8s.worker_public_key and "
                "worker_key_secret. A role of the pods' service account (IRSA) needs none for the "
                "bucket"
            )
        if self.settings.worker_key_secret is None and (
            handover.WORKER_KEY_VARIABLE not in self.settings.env
        ):
            raise PreflightError(
                "launchers.k8s.worker_public_key is set, and the pods have no private key: name "
                "its Secret in worker_key_secret"
            )
        return {**extras, SEALED_EXTRA: handover.seal(self.secrets, key)}

    def _result(self, client: PodClient, what: str, result_type: type[R]) -> R:
        log, end = client.log, client.end
        hidden = tuple(self.secrets.values())
        what = f"{what}: {client.place}" if client.place else what
        reply = result_of(what, log.custom_messages, result_type, hidden)
        if isinstance(reply, WorkerFailure):
            if reply.traceback is not None:
                self.context.log.error(redact(reply.traceback, hidden))
            killed = end and status.killed_by(client.pod, end)
            if reply.kind == "failed" and killed:
                # A rank was killed; what the worker says of it is only that it is gone.
                message = redact(f"{what}: {reply.message}", hidden)
                raise WorkerKilledError(f"{message}\n{killed}")
            raise failed(what, reply, list(log.lines), hidden)
        if reply is not None:
            if end is None or end.exit_code != 0:
                self.context.log.warning(
                    f"{what}: the worker gave its result and then did not leave cleanly; the "
                    "result counts"
                )
            return reply
        if client.error is not None:
            raise client.error
        assert end is not None
        lines = last_lines(list(log.lines))
        if not log.lines and end.exit_code is not None and end.message:
            lines = f"Its last lines:\n{redact(end.message, hidden)}"
        raise status.no_reply(what, client.pod, end, client.seconds, lines)

    @property
    def _step(self) -> str:
        """The step's name as a label's value, which has at most 63 characters."""
        name = _op_context(self.context).op.name
        return re.sub(r"[^A-Za-z0-9]", "-", name).strip("-")[:63].strip("-") or "step"

    def _pods(self, selector: str) -> list[Any]:
        return self.api.list_namespaced_pod(
            self.namespace, label_selector=selector, _request_timeout=API_TIMEOUT_S
        ).items

    def _delete_one(self, name: str, grace_s: int) -> None:
        try:
            self.api.delete_namespaced_pod(
                name, self.namespace, grace_period_seconds=grace_s, _request_timeout=API_TIMEOUT_S
            )
        except API_ERRORS as error:
            if getattr(error, "status", None) != 404:
                raise

    def _delete(self, selector: str, grace_s: int | None = None) -> bool:
        """Ask for an end of the pods once; returns whether there were any, or nobody answers."""
        grace = self.settings.terminate_grace_s if grace_s is None else grace_s
        try:
            pods = self._pods(selector)
            for pod in pods:
                if pod.metadata.deletion_timestamp is None or grace_s is not None:
                    self._delete_one(pod.metadata.name, grace)
            return bool(pods)
        except API_ERRORS:
            return True

    def _remove(self, selector: str, force: bool = False) -> None:
        """Delete the pods and wait until they are gone; by force where nothing ends them."""
        grace = self.settings.terminate_grace_s
        start = time.monotonic()
        pause = 0.1
        try:
            while self._delete(selector, 0 if force else None):
                waited = time.monotonic() - start
                force = force or waited > grace + _FORCE_S
                if waited > grace + _REMOVAL_S:
                    self.context.log.warning(
                        f"pods are left: kubectl delete pods -n {self.namespace} -l {selector}"
                    )
                    return
                time.sleep(pause)
                pause = min(2 * pause, 1.0)
        except BaseException:
            # A second Ctrl-C, or Dagster's own patience: no more grace.
            self._delete(selector, 0)
            raise


def _op_context(context: StepContext) -> dg.OpExecutionContext:
    # What Dagster warns of is asking an asset's context for its op.
    if isinstance(context, dg.AssetExecutionContext):
        return context.op_execution_context
    return context


def _check_pod(meta: Mapping[str, Any], spec: Mapping[str, Any]) -> None:
    """Raises PreflightError for what is no field of a pod, before anything is made."""
    try:
        build_pod_body(
            pod_name="pod",
            image=None,
            command=None,
            env_vars={},
            base_pod_meta=copy.deepcopy(dict(meta)),
            base_pod_spec=copy.deepcopy(dict(spec)),
        )
    except Exception as error:
        raise PreflightError(
            f"what launchers.k8s says of its pods is no pod: {error}. Correct pod_spec, container "
            "or tolerations"
        ) from error
