"""Waits for the end of a worker's pod."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any, cast

from dagster_k8s import PipesK8sClient
from dagster_k8s.client import DagsterKubernetesClient

from tensorize_assets.core.launcher_k8s import K8sSettings
from tensorize_assets.resources.launchers import k8s_status as status
from tensorize_assets.resources.launchers.base import StepContext, last_lines
from tensorize_assets.resources.launchers.k8s_cluster import (
    API_ERRORS,
    API_TIMEOUT_S,
    refused,
)
from tensorize_assets.resources.launchers.k8s_log import PodLog
from tensorize_assets.resources.launchers.k8s_pods import CONTAINER
from tensorize_assets.resources.launchers.k8s_request import RequestInjector

# A slice of the wait between two looks: how soon a pod ends because another one failed.
_SLICE_S = 0.25
# As for a subprocess: a worker that has answered only has to leave.
_LEAVE_S = 60.0
# The result is at the end of a log that may be long; a node that is deleted has little time.
_DRAIN_S = 60.0
_LAST_WORDS_S = 2.0
# How long the API may be away while a pod runs, beyond the retries of each request.
_API_PATIENCE_S = 120.0
# The kubelet's own deadline comes first; this is for a kubelet that is gone.
_LATE_S = 60.0
_EVENTS_AFTER_S = 5.0


class Stopped(BaseException):
    """Ends the wait for a pod; as a cancel does, it passes through what catches errors."""


class PodClient(PipesK8sClient):
    """PipesK8sClient, with another way to wait for the pod that it made.

    Its own waits for the container to be ready, with no end for a pod that no node takes or
    whose Secret is missing, and an error of its own making for one that was evicted before that;
    then it reads the log in the waiting thread, and does not look at the pod while the log is
    silent: a lost node is noticed after hours, and so is a deletion there. This one looks at the
    pod all the time, while the log is read in a thread.
    """

    def __init__(
        self,
        what: str,
        settings: K8sSettings,
        log: PodLog,
        request: RequestInjector,
        stop: threading.Event,
    ) -> None:
        super().__init__(
            context_injector=request,
            message_reader=log,
            env=request.parts,
            poll_interval=settings.poll_interval_s,
        )
        self.what = what
        self.settings = settings
        self.log = log
        self.stop = stop
        self.pod: status.Pod | None = None
        self.place = ""
        self.end: status.End | None = None
        self.error: Exception | None = None
        self.seconds = 0.0

    def _load_k8s_config(self) -> None:
        # Done for the launch; by each of several threads it would be torn.
        pass

    @contextmanager
    def consume_pod_logs(
        self,
        context: StepContext,
        client: DagsterKubernetesClient,
        namespace: str,
        pod_name: str,
        enable_multi_container_logs: bool = False,
        ignore_containers: set[str] | None = None,
    ) -> Generator[None]:
        """Wait for the end of the pod, and leave."""
        start = time.monotonic()
        self.place = status.where(None, namespace, pod_name)
        try:
            _Watch(self, context, client.core_api, namespace, pod_name).until_the_end()
        finally:
            self.seconds = time.monotonic() - start
            self.place = status.where(self.pod, namespace, pod_name)
        yield

    def run(self, **arguments: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As PipesK8sClient's; how the pod ended is in `end`, or else `error`."""
        with suppress(_Ended):
            cast("Any", super()).run(**arguments)


class _Ended(Exception):
    """Leaves PipesK8sClient once the pod has ended, since it would look for that itself."""


class _Watch:
    """Looks at one pod until it ends, or has to."""

    def __init__(
        self, client: PodClient, context: StepContext, api: Any, namespace: str, name: str
    ) -> None:
        self._client = client
        self._settings = client.settings
        self._context = context
        self._api = api
        self._namespace = namespace
        self._name = name
        now = time.monotonic()
        self._since = now
        self._bound = False
        self._seen = now
        self._trouble: float | None = None
        self._answered: float | None = None
        self._said = ""

    def until_the_end(self) -> None:
        """Raises _Ended, with what is known of it in the client."""
        while True:
            self._look()
            log, deadline = self._client.log, time.monotonic() + self._settings.poll_interval_s
            while time.monotonic() < deadline:
                if self._client.stop.is_set():
                    raise Stopped
                if log.moved.wait(_SLICE_S):
                    log.moved.clear()
                    break

    def _look(self) -> None:
        client, now = self._client, time.monotonic()
        try:
            pod = self._read()
        except API_ERRORS as error:
            # 401 comes and goes with a token that is renewed.
            if getattr(error, "status", None) == 403 or now - self._seen > _API_PATIENCE_S:
                self._fail(refused(f"{client.what}: {client.place}", error, ()))
            return
        self._seen = now
        end = status.end_of(pod)
        client.pod = pod if pod is not None else client.pod
        if pod is not None and pod.has_started:
            client.log.follow(self._api, self._namespace, self._name, CONTAINER)
        if end is not None:
            # The log of a node that is lost never ends.
            client.log.drain(_LAST_WORDS_S if end.deleted else _DRAIN_S)
            client.end = end
            raise _Ended
        assert pod is not None
        if client.log.custom_messages and self._answered is None:
            self._answered = now
        if self._answered is not None and now > self._answered + _LEAVE_S:
            raise _Ended
        self._wait_on(pod, now)

    def _wait_on(self, pod: status.Pod, now: float) -> None:
        """Fail where the pod has had its time."""
        if pod.is_bound and not self._bound:
            self._bound, self._since = True, now
        waited = now - self._since
        place = f"{self._client.what}: {status.where(pod, self._namespace, self._name)}"
        if pod.has_started:
            if waited > self._settings.timeout_s + _LATE_S:
                late = status.End(None, "DeadlineExceeded", "")
                lines = last_lines(list(self._client.log.lines))
                self._fail(status.no_reply(place, pod, late, waited, lines))
            return
        unbound = status.waits_for_node(pod)
        if unbound and unbound != self._said:
            self._said = unbound
            self._context.log.warning(f"{place}: waits for a node: {unbound}")
        events = self._events() if self._bound and waited > _EVENTS_AFTER_S else []
        if self._bound and status.in_trouble(pod, events):
            self._trouble = self._trouble or now
            events = events or self._events()
        else:
            self._trouble = None
        trouble = 0.0 if self._trouble is None else now - self._trouble
        stuck = status.stuck(pod, place, self._settings, waited, trouble, events)
        if stuck is not None:
            self._fail(stuck)

    def _fail(self, error: Exception) -> None:
        self._client.error = error
        raise _Ended

    def _read(self) -> status.Pod | None:
        try:
            pod = self._api.read_namespaced_pod(
                self._name, self._namespace, _request_timeout=API_TIMEOUT_S
            )
        except API_ERRORS as error:
            if getattr(error, "status", None) == 404:
                return None
            raise
        return status.Pod.model_validate(self._api.api_client.sanitize_for_serialization(pod))

    def _events(self) -> list[status.Event]:
        """What the cluster says of the pod; nothing where we may not read that."""
        with suppress(*API_ERRORS):
            found = self._api.list_namespaced_event(
                self._namespace,
                field_selector=f"involvedObject.name={self._name}",
                _request_timeout=API_TIMEOUT_S,
            )
            plain = self._api.api_client.sanitize_for_serialization(found)["items"]
            return [status.Event.model_validate(event) for event in plain]
        return []
