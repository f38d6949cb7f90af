"""What a worker's pod looks like: from the launcher's settings, a request and what a rank asks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from tensorize_assets.core.errors import PreflightError
from tensorize_assets.core.handover import WORKER_KEY_VARIABLE
from tensorize_assets.core.launcher_k8s import K8sSettings
from tensorize_assets.core.protocol import WorkerRequest
from tensorize_assets.core.rank_resources import RankResources
from tensorize_assets.core.tasks import (
    ReferenceRequest,
    ReloadRequest,
    SelfCheckRequest,
    ShardRequest,
)

CONTAINER = "worker"

_HOME = "/home/worker"
_KEY_FOLDER = "/etc/tensorize-assets"

# The kubelet takes stdout and stderr apart and cuts lines of more than 16 KiB into pieces, between
# which it puts what the other stream says. A result is longer, and whole in one stream only.
_ONE_STREAM = 'exec "$@" 2>&1'


class Share(NamedTuple):
    """How many ranks compute in one pod, and the GPUs that they need together."""

    ranks: int
    gpus: int


def share_of(request: WorkerRequest) -> Share:
    """What of a model the pod of `request` holds at once."""
    is_engine = isinstance(request, ReferenceRequest | ReloadRequest | SelfCheckRequest)
    if is_engine or (isinstance(request, ShardRequest) and request.sharding == "executor"):
        ranks = request.tensor_parallel_size
        return Share(ranks=ranks, gpus=ranks if request.device == "cuda" else 0)
    # Virtual ranks are built one after another; the others read files.
    return Share(ranks=1, gpus=0)


def pod_spec(
    settings: K8sSettings,
    request: WorkerRequest,
    resources: RankResources | None = None,
    before: str = "",
) -> dict[str, Any]:
    """The spec of the pod for `request`, as Kubernetes writes it. `before`: shell, run first.

    Raises:
        PreflightError: it asks for what Kubernetes does not know.
    """
    share = share_of(request)
    asked = (resources or RankResources()).over(settings.resources)
    volumes, mounts = _volumes(settings, share, asked)
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": (share.gpus and settings.gpu_image) or settings.image,
        "command": ["sh", "-c", before + _ONE_STREAM, "sh", *settings.command],
        "workingDir": _HOME,
        "env": [{"name": name, "value": value} for name, value in _environment(settings).items()],
        "resources": _resources(settings, share, asked),
        # Where the log could not be read, its end is in the pod's status.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }
    if settings.image_pull_policy is not None:
        container["imagePullPolicy"] = settings.image_pull_policy
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": settings.timeout_s,
        "terminationGracePeriodSeconds": settings.terminate_grace_s,
        # They would put the address of every service of the namespace into the environment.
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": settings.run_as_user,
            "runAsGroup": settings.fs_group,
            "fsGroup": settings.fs_group,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": _tolerations(settings, share),
        "containers": [merged(container, settings.container)],
        "volumes": volumes,
    }
    if settings.service_account_name is None:
        spec["automountServiceAccountToken"] = False
    else:
        spec["serviceAccountName"] = settings.service_account_name
    selector = (share.gpus and settings.gpu_node_selector) or settings.node_selector
    if selector:
        spec["nodeSelector"] = dict(selector)
    if settings.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
    if settings.runtime_class is not None:
        spec["runtimeClassName"] = settings.runtime_class
    return merged(spec, settings.pod_spec)


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `more` in it: objects are merged, lists appended, all else replaced."""
    result = dict(base)
    for key, value in more.items():
        there = result.get(key)
        if isinstance(there, dict) and isinstance(value, dict):
            result[key] = merged(cast("dict[str, Any]", there), cast("dict[str, Any]", value))
        elif isinstance(there, list) and isinstance(value, list):
            result[key] = [*there, *value]
        else:
            result[key] = value
    return result


def _environment(settings: K8sSettings) -> dict[str, str]:
    environment = {
        "NO_COLOR": "1",
        "PYTHONUNBUFFERED": "1",
        # A crash in native code prints where Python was.
        "PYTHONFAULTHANDLER": "1",
        "HOME": _HOME,
        "TMPDIR": "/tmp",
        # The image need not have a name for the user, which torch's caches are called by.
        "USER": "worker",
        "LOGNAME": "worker",
        # On the volume that is sized for it, and not in /tmp.
        "TENSORIZE_SNAPSHOT_CACHE": f"{settings.scratch_dir}/snapshots",
    }
    if settings.worker_key_secret is not None:
        environment[WORKER_KEY_VARIABLE] = f"{_KEY_FOLDER}/private-key"
    return {**environment, **settings.env}


def _resources(settings: K8sSettings, share: Share, asked: RankResources) -> dict[str, Any]:
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}
    if asked.cpu is not None:
        # No limit: what nobody else uses of a node makes a build faster.
        requests["cpu"] = f"{round(asked.cpu * share.ranks * 1000)}m"
    # The same for both: more memory than was asked for is another pod's.
    for name, amount in (("memory", asked.memory), ("ephemeral-storage", asked.ephemeral_storage)):
        if amount is not None:
            requests[name] = limits[name] = _times(amount, share.ranks)
    counts = {name: count * share.ranks for name, count in asked.custom.items()}
    if share.gpus:
        counts[settings.gpu_resource] = share.gpus
    for name, count in counts.items():
        if count != int(count):
            raise PreflightError(
                f"a rank asks for {count} of {name}, of which Kubernetes gives whole ones only: "
                "correct `custom` in the profile's or the launcher's resources"
            )
        requests[name] = limits[name] = str(int(count))
    return {"requests": requests, "limits": limits}


def _times(quantity: str, factor: int) -> str:
    number = re.match(r"[0-9]+", quantity)
    assert number is not None
    return f"{int(number[0]) * factor}{quantity[number.end() :]}"


def _volumes(
    settings: K8sSettings, share: Share, asked: RankResources
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Volumes, and where they are mounted: the root file system cannot be written to."""
    scratch: dict[str, Any] = {}
    if asked.ephemeral_storage is not None:
        scratch["sizeLimit"] = _times(asked.ephemeral_storage, share.ranks)
    folders: dict[str, tuple[str, dict[str, Any]]] = {
        "scratch": (settings.scratch_dir, scratch),
        "tmp": ("/tmp", {}),
        "home": (_HOME, {}),
    }
    if share.ranks > 1:
        # A container's own has 64 MB.
        memory = {"medium": "Memory", "sizeLimit": settings.shared_memory}
        folders["memory"] = ("/dev/shm", memory)
    volumes: list[dict[str, Any]] = [
        {"name": name, "emptyDir": volume} for name, (_, volume) in folders.items()
    ]
    mounts: list[dict[str, Any]] = [
        {"name": name, "mountPath": path} for name, (path, _) in folders.items()
    ]
    if settings.worker_key_secret is not None:
        item = {"key": settings.worker_key_secret_key, "path": "private-key"}
        volumes.append(
            {
                "name": "worker-key",
                "secret": {
                    "secretName": settings.worker_key_secret,
                    # With fsGroup the kubelet makes it 0440, of root and that group.
                    "defaultMode": 0o400,
                    "items": [item],
                },
            }
        )
        mounts.append({"name": "worker-key", "mountPath": _KEY_FOLDER, "readOnly": True})
    return volumes, mounts


def _tolerations(settings: K8sSettings, share: Share) -> list[dict[str, Any]]:
    # Without them the cluster adds its own, by which a pod waits 5 minutes for a lost node.
    lost: list[dict[str, Any]] = [
        {
            "key": f"node.kubernetes.io/{taint}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": settings.node_loss_timeout_s,
        }
        for taint in ("not-ready", "unreachable")
    ]
    return [*lost, *settings.tolerations, *(settings.gpu_tolerations if share.gpus else ())]
