"""The pods that the launcher asks for, as Dagster's client writes them, held against Kubernetes."""

from __future__ import annotations

from typing import Any

import kubernetes
import kubernetes_validate
import pytest
from dagster_k8s.pipes import build_pod_body

from tensorize_assets.core.errors import PreflightError
from tensorize_assets.core.launcher_k8s import K8sSettings
from tensorize_assets.core.protocol import WorkerRequest
from tensorize_assets.core.rank_resources import RankResources
from tensorize_assets.core.tasks import ReloadRequest, ShardRequest, SnapshotSource
from tensorize_assets.resources.launchers.k8s_pods import pod_spec

_FULL: dict[str, Any] = {
    "image": "registry.example/vllm-tensorize-assets:0.31.0-cpu",
    "gpu_image": "registry.example/vllm-tensorize-assets:0.31.0",
    "image_pull_policy": "IfNotPresent",
    "image_pull_secrets": ["registry"],
    "service_account_name": "models-writer",
    "node_selector": {"kubernetes.io/arch": "amd64"},
    "gpu_node_selector": {"nvidia.com/gpu.product": "NVIDIA-H200"},
    "tolerations": [{"key": "builds", "operator": "Exists", "effect": "NoSchedule"}],
    "gpu_tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "labels": {"team": "models"},
    "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"},
    "runtime_class": "nvidia",
    "worker_public_key": "7iuW0yKDoEH/pPHZ+YhkVjmV6gMY8cRS5lRvz2PZjgY=",
    "worker_key_secret": "worker-key",
    "env": {"AWS_ENDPOINT_URL_S3": "https://s3.example"},
    "pod_spec": {
        "priorityClassName": "batch",
        "securityContext": {"supplementalGroups": [44]},
        "volumes": [{"name": "ca", "configMap": {"name": "company-ca"}}],
    },
    "container": {
        "volumeMounts": [{"name": "ca", "mountPath": "/etc/company", "readOnly": True}],
        "env": [{"name": "REGION", "valueFrom": {"configMapKeyRef": {"name": "x", "key": "y"}}}],
    },
    "resources": {"cpu": 3.5, "memory": "16Gi", "ephemeral_storage": "40Gi"},
}


def _reload(device: str, ranks: int) -> WorkerRequest:
    return ReloadRequest.model_validate(
        {
            "model": "facebook/opt-125m",
            "suffix": "v1",
            "tensor_parallel_size": ranks,
            "dtype": "auto",
            "device": device,
            "prompts": [],
            "root": "s3://models/prod",
            "directory": "vllm/x/v1",
            "companions": [],
        }
    )


def _shard(ranks: int, **more: Any) -> WorkerRequest:
    return ShardRequest(
        model="facebook/opt-125m",
        suffix="v1",
        snapshot=SnapshotSource(folder="/nowhere"),
        root="s3://models/prod",
        directory="vllm/x/v1",
        scratch_dir="/nowhere",
        dtype="auto",
        tensor_parallel_size=ranks,
        **more,
    )


def _pod(request: WorkerRequest, asked: dict[str, Any] | None = None, **fields: Any) -> Any:
    """The pod as PipesK8sClient sends it, in the API's own words."""
    settings = K8sSettings.model_validate({"image": "registry.example/worker:1", **fields})
    body = build_pod_body(
        pod_name="dagster-worker",
        image=None,
        command=None,
        env_vars={"DAGSTER_PIPES_CONTEXT": "x", "DAGSTER_PIPES_MESSAGES": "y"},
        base_pod_meta={"labels": settings.labels, "annotations": settings.annotations},
        base_pod_spec=pod_spec(settings, request, RankResources.model_validate(asked or {})),
    )
    plain: Any = kubernetes.client.ApiClient().sanitize_for_serialization(body)
    return {"apiVersion": "v1", "kind": "Pod", **plain}


@pytest.mark.parametrize("version", ["1.31", "1.37"])
@pytest.mark.parametrize("fields", [{}, _FULL], ids=["default", "full"])
@pytest.mark.parametrize("request_", [_reload("cuda", 4), _shard(8)], ids=["reload", "shard"])
def test_kubernetes_takes_it(version: str, fields: dict[str, Any], request_: WorkerRequest):
    """Strictly: a misspelt field is otherwise dropped in silence."""
    kubernetes_validate.validate(_pod(request_, **fields), version, strict=True)


def test_gpus_go_to_who_computes_on_them():
    """By the profile's TP: an asset's own tags could not say how many."""
    limits = {
        name: _container(_pod(request, **_FULL))["resources"]["limits"].get("nvidia.com/gpu")
        for name, request in {
            "reload": _reload("cuda", 4),
            "reload on cpu": _reload("cpu", 4),
            "virtual": _shard(4),
            "executor": _shard(4, sharding="executor", device="cuda"),
            "executor on cpu": _shard(4, sharding="executor"),
        }.items()
    }
    assert limits == {
        "reload": "4",
        "reload on cpu": None,
        "virtual": None,
        "executor": "4",
        "executor on cpu": None,
    }


def test_pods_with_gpus_have_their_own_image_and_nodes():
    """GPU nodes are tainted, and the CPU build of vLLM runs on none of them."""
    gpu, cpu = _pod(_reload("cuda", 1), **_FULL), _pod(_shard(1), **_FULL)
    assert _container(gpu)["image"] == _FULL["gpu_image"]
    assert _container(cpu)["image"] == _FULL["image"]
    assert gpu["spec"]["nodeSelector"] == _FULL["gpu_node_selector"]
    assert cpu["spec"]["nodeSelector"] == _FULL["node_selector"]
    assert "nvidia.com/gpu" in [one["key"] for one in gpu["spec"]["tolerations"]]
    assert "nvidia.com/gpu" not in [one["key"] for one in cpu["spec"]["tolerations"]]


def test_resources_are_those_of_the_ranks_in_the_pod():
    """An engine's ranks together; of a virtual build one, since they come after one another."""
    engine = _container(_pod(_reload("cpu", 4), {"memory": "20Gi"}, **_FULL))["resources"]
    assert engine["requests"]["memory"] == engine["limits"]["memory"] == "80Gi"
    assert engine["requests"]["cpu"] == "14000m"
    assert "cpu" not in engine["limits"]
    virtual = _pod(_shard(4), {"custom": {"example.com/fpga": 1}}, **_FULL)
    resources = _container(virtual)["resources"]
    assert resources["limits"]["memory"] == "16Gi"
    assert resources["limits"]["ephemeral-storage"] == "40Gi"
    assert resources["limits"]["example.com/fpga"] == "1"
    (scratch,) = [one for one in virtual["spec"]["volumes"] if one["name"] == "scratch"]
    assert scratch["emptyDir"] == {"sizeLimit": "40Gi"}


def test_snapshots_lie_on_the_scratch_volume():
    """In /tmp they would fill the node's disk beside what the pod was given."""

    def cache(**fields: Any) -> Any:
        env = {
            one["name"]: one.get("value") for one in _container(_pod(_shard(1), **fields))["env"]
        }
        return env["TENSORIZE_SNAPSHOT_CACHE"]

    assert cache() == "/scratch/snapshots"
    assert cache(env={"TENSORIZE_SNAPSHOT_CACHE": "/mnt/x"}) == "/mnt/x"


def test_half_a_device_is_refused():
    """Ray has such; the API would refuse the pod in other words."""
    with pytest.raises(PreflightError, match=r"0\.5 of example\.com/fpga"):
        _pod(_shard(1), {"custom": {"example.com/fpga": 0.5}})


def test_ranks_that_talk_get_shared_memory():
    """A container's own 64 MB end an engine of several ranks with a bus error."""
    mounts = {one["mountPath"] for one in _container(_pod(_reload("cuda", 2)))["volumeMounts"]}
    assert "/dev/shm" in mounts
    alone = {one["mountPath"] for one in _container(_pod(_reload("cuda", 1)))["volumeMounts"]}
    assert "/dev/shm" not in alone


def test_a_pod_may_do_little():
    """It passes the Pod Security Standard `restricted`, and has no token unless it is given one."""
    pod = _pod(_shard(1))
    context, container = pod["spec"]["securityContext"], _container(pod)["securityContext"]
    assert context["runAsNonRoot"]
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["readOnlyRootFilesystem"]
    assert not container["allowPrivilegeEscalation"]
    assert container["capabilities"] == {"drop": ["ALL"]}
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert "automountServiceAccountToken" not in _pod(_shard(1), **_FULL)["spec"]


def test_what_is_not_modelled_is_merged():
    """Beside what is there, and not in place of it."""
    pod = _pod(_shard(1), **_FULL)
    assert pod["spec"]["priorityClassName"] == "batch"
    assert pod["spec"]["securityContext"]["supplementalGroups"] == [44]
    assert pod["spec"]["securityContext"]["runAsNonRoot"]
    assert {"ca", "scratch", "worker-key"} <= {one["name"] for one in pod["spec"]["volumes"]}
    names = {one["name"] for one in _container(pod)["env"]}
    assert {"REGION", "AWS_ENDPOINT_URL_S3", "TENSORIZE_WORKER_KEY_FILE"} <= names


def test_settings_with_a_path_that_is_none_are_refused():
    """The schema cannot say it; the message does."""
    with pytest.raises(ValueError, match="absolute path"):
        K8sSettings(image="x", scratch_dir="scratch")


def _container(pod: Any) -> Any:
    (container,) = pod["spec"]["containers"]
    return container
