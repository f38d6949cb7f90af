"""What the state of a worker's pod means: whether it has ended, how, and what to do about it."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from tensorize_assets.core.errors import ClusterUnavailableError, WorkerError, WorkerKilledError
from tensorize_assets.core.launcher_k8s import K8sSettings
from tensorize_assets.resources.launchers.base import CRASHES, signal_of
from tensorize_assets.resources.launchers.k8s_pods import CONTAINER

# What passes by itself, such as a Secret that was made a moment ago.
_SETTLE_S = 10.0
# A registry, or a node's container runtime, in trouble; the kubelet tries again and again.
_PATIENCE_S = 120.0
_LAST_EVENTS = 5
_STARTING = (None, "PodInitializing", "ContainerCreating")
_PULLING = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable", "ImageInspectError")
_NO_SUCH_IMAGE = re.compile(
    r"(?i)not found|manifest unknown|no such image|no match(?:ing manifest)? for platform"
    r"|no matching manifest|(?<!connect: permission )denied|unauthorized|authorization failed"
    r"|forbidden|no basic auth|insufficient_scope|authentication required"
)
# What the container runtime says of a node that is busy or short of something.
_RUNTIME = ("CreateContainerError", "RunContainerError")
_MISSING_MOUNT = re.compile(r'(?i)(?:secret|configmap) "?[^" ]+"? not found|non-existent \w+ key')
_MORE_MEMORY = (
    "Give each rank more `memory` in the profile's or the launcher's resources, or raise "
    "tensor_parallel_size (a build holds one shard at a time)."
)


class _Part(BaseModel):
    """A part of what the API says of a pod, as far as it counts here."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel)


class _Waiting(_Part):
    reason: str | None = None
    message: str = ""


class _Terminated(_Part):
    exit_code: int
    reason: str = ""
    message: str = ""


class _State(_Part):
    waiting: _Waiting = _Waiting()
    running: dict[str, Any] | None = None
    terminated: _Terminated | None = None


class _ContainerStatus(_Part):
    name: str
    state: _State = _State()


class _Condition(_Part):
    type: str
    reason: str = ""
    message: str = ""


class _Status(_Part):
    phase: str = ""
    reason: str = ""
    message: str = ""
    conditions: tuple[_Condition, ...] = ()
    container_statuses: tuple[_ContainerStatus, ...] = ()


class _Metadata(_Part):
    deletion_timestamp: str | None = None


class _Resources(_Part):
    limits: dict[str, str] = {}


class _Container(_Part):
    name: str
    image: str = ""
    resources: _Resources = _Resources()


class _Spec(_Part):
    node_name: str | None = None
    containers: tuple[_Container, ...]


class Pod(_Part):
    """A pod as the API says it."""

    metadata: _Metadata
    spec: _Spec
    status: _Status = _Status()

    @property
    def state(self) -> _State:
        """That of the worker's container."""
        found = (one.state for one in self.status.container_statuses if one.name == CONTAINER)
        return next(found, _State())

    @property
    def container(self) -> _Container:
        """The worker's, as it was asked for."""
        return next(one for one in self.spec.containers if one.name == CONTAINER)

    @property
    def has_started(self) -> bool:
        """Whether the worker's container runs or ran, so that it has a log."""
        return self.state.running is not None or self.state.terminated is not None

    @property
    def is_bound(self) -> bool:
        """Whether the pod has a node."""
        return self.spec.node_name is not None

    def condition(self, name: str) -> _Condition | None:
        """The condition of that type, where it is set."""
        return next((one for one in self.status.conditions if one.type == name), None)


class Event(_Part):
    """What the cluster says of a pod."""

    type: str = "Warning"
    message: str = ""


class End(NamedTuple):
    """How a pod ended. `exit_code` is None where its container left none."""

    exit_code: int | None
    reason: str
    message: str
    deleted: bool = False

    @property
    def out_of_memory(self) -> bool:
        return self.reason == "OOMKilled"

    @property
    def node_lost(self) -> bool:
        """Whether nobody is there to end the pod's processes and say that they have ended."""
        return self.reason in ("DeletionByTaintManager", "NodeLost")


def end_of(pod: Pod | None) -> End | None:
    """How the pod ended, or None while it may still go on. A pod that is not there was deleted."""
    if pod is None:
        return End(None, "Deleted", "", deleted=True)
    status, ended = pod.status, pod.state.terminated
    exit_code = ended.exit_code if ended else None
    if status.phase == "Failed" and status.reason:
        # It says more than the container, which was killed for it.
        return End(exit_code, status.reason, status.message or (ended.message if ended else ""))
    if pod.metadata.deletion_timestamp is not None:
        disruption = pod.condition("DisruptionTarget")
        reason, message = (disruption.reason, disruption.message) if disruption else ("", "")
        return End(exit_code, reason, message, deleted=True)
    if ended is not None:
        return End(exit_code, ended.reason, ended.message)
    if status.phase in ("Succeeded", "Failed"):
        return End(None, status.phase, status.message)
    return None


def waits_for_node(pod: Pod) -> str | None:
    """Why the pod has no node, in the scheduler's words; None when it has one."""
    if pod.is_bound:
        return None
    scheduled = pod.condition("PodScheduled")
    return (scheduled.message if scheduled else "") or "no scheduler has looked at it yet"


def where(pod: Pod | None, namespace: str, name: str) -> str:
    """What a message calls the pod."""
    node = pod.spec.node_name if pod else None
    return f"pod {namespace}/{name}" + (f" on node {node}" if node else " (on no node yet)")


def stuck(
    pod: Pod,
    place: str,
    settings: K8sSettings,
    waited_s: float,
    trouble_s: float,
    events: Sequence[Event],
) -> WorkerError | None:
    """Why a pod that has not started never will, or has had its time; None to wait on.

    `waited_s`: since it was made, or since it has a node; `trouble_s`: since `in_trouble`.
    """
    unbound = waits_for_node(pod)
    if unbound is not None:
        if waited_s < settings.unschedulable_timeout_s:
            return None
        return ClusterUnavailableError(
            f"{place}: no node has taken it for {waited_s:.0f} s (unschedulable_timeout_s): "
            f"{unbound}. Make room, correct the resources, node selectors or tolerations, or "
            "raise the time if nodes take longer to come"
        )
    reason = pod.state.waiting.reason
    said = "; ".join(filter(None, [pod.state.waiting.message, *_said(events)]))
    image = pod.container.image
    if reason in ("InvalidImageName", "ErrImageNeverPull") or (
        reason in _PULLING and _NO_SUCH_IMAGE.search(said)
    ):
        return WorkerError(
            f"{place}: the image {image} cannot be pulled ({reason}): {said}. Correct the "
            "launcher's image, or name the Secret of its registry in image_pull_secrets"
        )
    if reason in _PULLING and trouble_s > _PATIENCE_S:
        return ClusterUnavailableError(
            f"{place}: the image {image} could not be pulled for {trouble_s:.0f} s "
            f"({reason}): {said}. Look whether the node reaches the registry"
        )
    if trouble_s > _SETTLE_S:
        if _MISSING_MOUNT.search(said):
            return WorkerError(
                f"{place}: what it mounts is missing: {said}. Make the Secret or ConfigMap in "
                "its namespace, or correct its name in the launcher's settings"
            )
        if reason in _RUNTIME and trouble_s > _PATIENCE_S:
            return ClusterUnavailableError(
                f"{place}: its container could not be started for {trouble_s:.0f} s ({reason}): "
                f"{said}. Look at the node; correct `command` or `container` of the launcher's "
                "settings if that is what it names"
            )
        if reason not in (*_STARTING, *_PULLING, *_RUNTIME):
            return WorkerError(
                f"{place}: its container cannot be started ({reason}): {said}. Correct the "
                "launcher's settings: command, env, run_as_user, pod_spec, container"
            )
    if waited_s > settings.start_timeout_s:
        return ClusterUnavailableError(
            f"{place}: it has not started for {waited_s:.0f} s (start_timeout_s); it is at "
            f"{reason or 'nothing'}: {said or 'no events'}. Look at the node, or raise the time "
            "if its image is large"
        )
    return None


def in_trouble(pod: Pod, events: Sequence[Event]) -> bool:
    """Whether the start of a pod goes wrong, which may pass."""
    return pod.state.waiting.reason not in _STARTING or any(
        _MISSING_MOUNT.search(text) for text in _said(events)
    )


def no_reply(what: str, pod: Pod | None, end: End, seconds: float, lines: str) -> WorkerError:
    """What is raised for a pod that ended without an answer. `lines` is the end of its log."""
    killed = killed_by(pod, end)
    if killed is not None:
        return WorkerKilledError(f"{what}: after {seconds:.0f} s {killed} {lines}")
    if end.reason == "DeadlineExceeded":
        return WorkerError(
            f"{what}: the worker ran longer than the launcher's timeout_s and was ended; raise it "
            f"if the work takes longer. {lines}"
        )
    number = signal_of(end.exit_code or 0)
    if number is not None and number in CRASHES:
        return WorkerError(
            f"{what}: the worker crashed in native code ({number.name}) after {seconds:.0f} s. "
            f"Most likely {_cause(number)}. {lines}"
        )
    code = "no exit code" if end.exit_code is None else f"exit code {end.exit_code}"
    said = f" ({end.reason}: {end.message})" if end.exit_code is None else ""
    return WorkerError(f"{what}: the worker left with {code}{said} and no result. {lines}")


def killed_by(pod: Pod | None, end: End) -> str | None:
    """What ended the worker from outside, and what to do; None where it ended by itself."""
    if end.out_of_memory:
        return (
            f"it was killed for its memory (OOMKilled) at its limit of {_memory(pod)}. "
            f"{_MORE_MEMORY}"
        )
    if end.reason == "Evicted":
        more = (
            " Give each rank more `ephemeral_storage` in the profile's or the launcher's resources."
            if re.search(r"(?i)ephemeral|emptydir|disk", end.message)
            else f" {_MORE_MEMORY}"
            if "memory" in end.message
            else ""
        )
        return f"its node evicted it: {end.message or 'it does not say why'}.{more}"
    if end.deleted:
        by = f" ({end.reason}: {end.message})" if end.message else ""
        return (
            f"it was deleted from outside{by}: a drained or lost node, a preemption, or a person. "
            "Nothing of the build is lost that was stored; it is run again."
        )
    if end.exit_code is None and end.reason not in ("DeadlineExceeded", "Succeeded"):
        return f"its node gave it up ({end.reason}): {end.message or 'it does not say why'}."
    if end.reason in ("DeadlineExceeded", "Completed"):
        return None
    number = signal_of(end.exit_code or 0)
    if end.reason in ("Terminated", "NodeShutdown", "Shutdown"):
        return f"its node shut down: {end.message or 'it does not say why'}."
    if number == signal.SIGKILL:
        return (
            "it was killed (SIGKILL). Kubernetes counted no kill for memory: most likely a rank "
            "was, or the node's memory was short; look at the node's events."
        )
    if number == signal.SIGTERM:
        return "it was asked to stop (SIGTERM): a shutdown, or a person on the node."
    return None


def _memory(pod: Pod | None) -> str:
    limit = pod.container.resources.limits.get("memory") if pod else None
    return limit or "the node's memory"


def _said(events: Sequence[Event]) -> list[str]:
    """What the last warnings among events say, each once."""
    texts = [event.message for event in events if event.type == "Warning" and event.message]
    return list(dict.fromkeys(texts))[-_LAST_EVENTS:]


def _cause(number: signal.Signals) -> str:
    if number == signal.SIGILL:
        return "this CPU lacks an instruction that the vLLM or torch build uses"
    if number == signal.SIGBUS:
        return "/dev/shm (shared_memory) or the disk under a mapped file is full"
    return "a bug in vLLM, torch or a driver"
