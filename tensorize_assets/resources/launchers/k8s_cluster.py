"""The way to a Kubernetes cluster, and what its API's errors mean."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

import kubernetes  # pyright: ignore[reportMissingTypeStubs]
import urllib3
from dagster_k8s import PipesK8sClient
from dagster_k8s.client import DagsterKubernetesClient
from dagster_k8s.utils import detect_current_namespace
from urllib3.connection import HTTPConnection

from tensorize_assets.core.errors import ClusterUnavailableError, WorkerError
from tensorize_assets.core.launcher_k8s import K8sSettings
from tensorize_assets.core.protocol import redact

# It has no types.
_kubernetes = cast("Any", kubernetes)
_connection = cast("Any", HTTPConnection)

API_ERRORS = (kubernetes.client.ApiException, urllib3.exceptions.HTTPError)
"""What a request to the API raises."""

API_TIMEOUT_S = (10, 30)
"""Of one request: to connect, and between two pieces of the answer."""

_CONNECTING = threading.Lock()
_RETRIES = urllib3.Retry(
    total=6,
    backoff_factor=0.5,
    backoff_max=8,
    status_forcelist=(429, 500, 502, 503, 504),
    # Also of a POST: the pod's name is given, so that it is made once.
    allowed_methods=None,
    raise_on_status=False,
)


def connect(settings: K8sSettings) -> tuple[str, Any]:
    """The namespace for pods, and a client that outlasts an API server that restarts.

    Raises:
        WorkerError: no cluster is named, or none can be.
    """
    loader = PipesK8sClient(kubeconfig_file=settings.kubeconfig, kube_context=settings.context)
    # The client library keeps what it loads for the whole process.
    with _CONNECTING:
        try:
            loader._load_k8s_config()  # pyright: ignore[reportPrivateUsage]
            namespace = settings.namespace or _namespace(settings)
        except (_kubernetes.config.ConfigException, OSError) as error:
            raise WorkerError(
                f"there is no way to a Kubernetes cluster: {error}. Set launchers.k8s.kubeconfig "
                "(and context), or run Dagster in the cluster"
            ) from error
        config = _kubernetes.client.Configuration.get_default_copy()
        config.retries = _RETRIES
        config.socket_options = [*_connection.default_socket_options, *_KEEP_ALIVE]
        _kubernetes.client.Configuration.set_default(config)
        return namespace, cast("Any", DagsterKubernetesClient).production_client().core_api


# The client has no timeouts of its own: a connection that is dead ends within half a minute.
_KEEP_ALIVE = [
    (level, option, value)
    for level, name, value in (
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 15),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 5),
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", 30_000),
    )
    if (option := getattr(socket, name, None)) is not None
]


def _namespace(settings: K8sSettings) -> str:
    if settings.context is None:
        found = detect_current_namespace(settings.kubeconfig)
        if found:
            return found
    with suppress(_kubernetes.config.ConfigException, KeyError):
        contexts, active = _kubernetes.config.list_kube_config_contexts(settings.kubeconfig)
        named = [one for one in contexts if one["name"] == settings.context]
        return (named[0] if named else active)["context"]["namespace"]
    return "default"


def refused(what: str, error: Exception, secrets: Sequence[bytes]) -> WorkerError:
    """What is raised where the API does not do what it is asked for."""
    code: int | None = getattr(error, "status", None)
    if code is None:
        return ClusterUnavailableError(
            f"{what}: the Kubernetes API does not answer ({type(error).__name__}: {error}). Look "
            "at the cluster"
        )
    try:
        said = str(json.loads(getattr(error, "body", ""))["message"])
    except (TypeError, ValueError, KeyError):
        said = str(getattr(error, "reason", ""))
    message = f"{what}: the Kubernetes API refuses ({code}): {redact(said, secrets)}"
    if code == 403 and "exceeded quota" in said:
        return ClusterUnavailableError(f"{message}. Wait for other pods, or raise the quota")
    if code in (0, 408, 409, 429) or code >= 500:
        return ClusterUnavailableError(f"{message}. It may pass; look at the cluster")
    if code == 401 or (code == 403 and "cannot" in said):
        return WorkerError(
            f"{message}. Dagster's service account, or the kubeconfig's user, needs in the "
            "namespace: pods (create, get, list, delete), pods/log (get), events (list)"
        )
    return WorkerError(f"{message}. Correct launchers.k8s, or ask whoever makes that rule")
