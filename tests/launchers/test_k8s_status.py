"""What the launcher makes of a pod's state: those that the fake cluster's pods do not come to."""

from __future__ import annotations

from typing import Any

import pytest

from tensorize_assets.core.errors import ClusterUnavailableError, WorkerError, WorkerKilledError
from tensorize_assets.core.launcher_k8s import K8sSettings
from tensorize_assets.resources.launchers import k8s_status as status
from tensorize_assets.resources.launchers.k8s_status import Event, Pod

_SETTINGS = K8sSettings(image="registry.example/worker:1")


def _pod(node: str | None = "node-1", **fields: Any) -> Pod:
    container = {
        "name": "worker",
        "image": "registry.example/worker:1",
        "resources": {"limits": {"memory": "16Gi"}},
    }
    spec = {"containers": [container], **({"nodeName": node} if node else {})}
    return Pod.model_validate({"metadata": {"name": "x"}, "spec": spec, "status": fields})


def _state(**state: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "worker", "ready": False, "state": state}]}


def _ended(exit_code: int, because: str = "Error", **more: Any) -> Pod:
    return _pod(**_state(terminated={"exitCode": exit_code, "reason": because}), **more)


@pytest.mark.parametrize(
    ("pod", "words"),
    [
        # Evicted before its container began: there is no container status at all.
        (_pod(phase="Failed", reason="Evicted", message="low on resource: memory"), "`memory`"),
        (_pod(phase="Failed", reason="OutOfnvidia.com/gpu", message="was 0"), "OutOfnvidia.com"),
        (_pod(phase="Failed", reason="UnexpectedAdmissionError", message="no devices"), "devices"),
        (_ended(137, phase="Failed", reason="Terminated", message="node shutdown"), "shutdown"),
        (_ended(143), "SIGTERM"),
        (_ended(137), "SIGKILL"),
        (_ended(1, "OOMKilled"), "16Gi"),
    ],
)
def test_what_comes_from_outside_is_tried_again(pod: Pod, words: str):
    """The worker did nothing wrong; elsewhere, or later, it ends well."""
    end = status.end_of(pod)
    assert end is not None
    error = status.no_reply("shard m v1", pod, end, 12, "It printed nothing.")
    assert isinstance(error, WorkerKilledError)
    assert words in str(error)


@pytest.mark.parametrize(
    ("pod", "words"),
    [
        (_ended(1), "exit code 1 and no result"),
        (_ended(0, "Completed"), "exit code 0 and no result"),
        (_ended(132), "SIGILL"),
        (_ended(135), "shared_memory"),
        (_ended(137, phase="Failed", reason="DeadlineExceeded", message="x"), "timeout_s"),
    ],
)
def test_what_would_come_again_is_not(pod: Pod, words: str):
    """A retry would only delay the message."""
    end = status.end_of(pod)
    assert end is not None
    error = status.no_reply("shard m v1", pod, end, 12, "It printed nothing.")
    assert type(error) is WorkerError
    assert words in str(error)


def test_a_pod_that_goes_on_has_no_end():
    """None of them is a failure yet."""
    for pod in (
        _pod(node=None),
        _pod(phase="Pending"),
        _pod(phase="Running", **_state(running={})),
        _pod(phase="Pending", **_state(waiting={"reason": "ImagePullBackOff"})),
    ):
        assert status.end_of(pod) is None


def _stuck(pod: Pod, waited_s: float, trouble_s: float, *events: str) -> WorkerError | None:
    said = [Event(message=text) for text in events]
    return status.stuck(pod, "pod models/x", _SETTINGS, waited_s, trouble_s, said)


@pytest.mark.parametrize(
    "said",
    [
        "rpc error: code = NotFound desc = registry.example/worker:1: not found",
        "unexpected status from HEAD request: 401 Unauthorized",
        "pull access denied, repository does not exist or may require authorization",
        "no match for platform in manifest: not found",
        "rpc error: code = PermissionDenied desc = permission denied for worker:1",
    ],
)
def test_a_registry_s_refusal_counts_at_once(said: str):
    """Also where the status has moved on to the back-off, and only an event still says why."""
    pull = _state(waiting={"reason": "ImagePullBackOff", "message": "Back-off pulling image"})
    error = _stuck(_pod(**pull), 3, 0, said)
    assert type(error) is WorkerError
    assert said in str(error)


@pytest.mark.parametrize("said", ["i/o timeout", "dial tcp 10.0.0.1: connect: permission denied"])
def test_a_registry_that_is_away_has_its_time(said: str):
    """Minutes, and then a retry."""
    pull = _state(waiting={"reason": "ErrImagePull", "message": said})
    assert _stuck(_pod(**pull), 60, 60) is None
    assert isinstance(_stuck(_pod(**pull), 200, 200), ClusterUnavailableError)


@pytest.mark.parametrize("reason", ["CreateContainerError", "RunContainerError"])
def test_a_container_runtime_in_trouble_has_its_time(reason: str):
    """A busy node says so; what the settings have wrong is CreateContainerConfigError."""
    pod = _pod(**_state(waiting={"reason": reason, "message": "context deadline exceeded"}))
    assert _stuck(pod, 60, 60) is None
    error = _stuck(pod, 200, 200)
    assert isinstance(error, ClusterUnavailableError)
    assert "context deadline exceeded" in str(error)


def test_a_start_that_takes_too_long_says_where_it_is():
    """Pulling a large image looks like this; so does a volume that is never attached."""
    pod = _pod(**_state(waiting={"reason": "ContainerCreating"}))
    assert _stuck(pod, 1700, 0) is None
    error = _stuck(pod, 1801, 0, "Unable to attach or mount volumes: unmounted volumes=[models]")
    assert isinstance(error, ClusterUnavailableError)
    assert "unmounted volumes=[models]" in str(error)
    assert "start_timeout_s" in str(error)


def test_a_scheduler_that_says_nothing_is_told():
    """Its own name in the spec, misspelt, or none that runs."""
    error = _stuck(_pod(node=None), 901, 0)
    assert isinstance(error, ClusterUnavailableError)
    assert "no scheduler has looked at it" in str(error)
