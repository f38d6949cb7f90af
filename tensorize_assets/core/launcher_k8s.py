"""Settings of the launcher `k8s`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue

from tensorize_assets.core.rank_resources import Quantity, RankResources
from tensorize_assets.core.sealing import PublicKey
from tensorize_assets.core.worker_versions import WorkerVersions


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError("is a folder in the pod; write an absolute path, such as /scratch")
    return path


class K8sSettings(BaseModel):
    """Pods on a Kubernetes cluster, of an image that has this package, vLLM and tensorizer.

    What is written as Kubernetes has it (`tolerations`, `pod_spec`, `container`) keeps its names.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: str = Field(description="The pods' image.", min_length=1)
    gpu_image: str | None = Field(
        default=None,
        min_length=1,
        description="The image of pods with GPUs, where it is another. Default: `image`.",
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None, description="Default: Kubernetes' own: Always for the tag latest."
    )
    image_pull_secrets: tuple[str, ...] = Field(
        default=(), description="Names of the Secrets that open the registry."
    )
    versions: WorkerVersions | None = Field(
        default=None,
        description="vllm, torch and tensorizer in the image. Default: those beside Dagster, for "
        "one image for both.",
    )
    command: tuple[str, ...] = Field(
        default=("python", "-m", "tensorize_assets.worker"),
        min_length=1,
        description="What starts the worker in the image.",
    )
    env: dict[str, str] = Field(
        default={},
        description="Environment variables of the worker. No place for secrets: they show in the "
        "pod's spec.",
    )
    kubeconfig: str | None = Field(
        default=None,
        description="A kubeconfig file. Default: in a pod the cluster that it is on, elsewhere "
        "$KUBECONFIG or ~/.kube/config.",
    )
    context: str | None = Field(
        default=None, description="A context of the kubeconfig. Default: its current one."
    )
    namespace: str | None = Field(
        default=None,
        min_length=1,
        description="Where pods are made. Default: in a pod its own namespace, elsewhere that of "
        "the kubeconfig's context.",
    )
    service_account_name: str | None = Field(
        default=None,
        min_length=1,
        description="The pods' account, such as one with a role for the bucket (IRSA). Without "
        "one a pod has no token of the cluster's API.",
    )
    node_selector: dict[str, str] = Field(
        default={}, description="Labels of the nodes that pods may run on."
    )
    gpu_node_selector: dict[str, str] = Field(
        default={}, description="In place of node_selector for pods with GPUs, where it is given."
    )
    tolerations: tuple[dict[str, JsonValue], ...] = Field(
        default=(), description="Taints that pods tolerate."
    )
    gpu_tolerations: tuple[dict[str, JsonValue], ...] = Field(
        default=(), description="Further taints that pods with GPUs tolerate."
    )
    gpu_resource: str = Field(
        default="nvidia.com/gpu", min_length=1, description="What the cluster calls its GPUs."
    )
    labels: dict[str, str] = Field(default={}, description="Further labels of the pods.")
    annotations: dict[str, str] = Field(default={}, description="Annotations of the pods.")
    runtime_class: str | None = Field(
        default=None, min_length=1, description="The pods' runtime class, such as nvidia."
    )
    run_as_user: int = Field(
        default=1000, gt=0, description="The user that the worker runs as; never root."
    )
    fs_group: int = Field(
        default=1000,
        gt=0,
        description="The group that scratch and the mounted private key belong to.",
    )
    scratch_dir: Annotated[str, AfterValidator(_absolute)] = Field(
        default="/scratch",
        description="Where scratch is mounted in the pods: a disk of the node, as large as "
        "ephemeral_storage.",
    )
    shared_memory: Quantity = Field(
        default="2Gi",
        description="Size of /dev/shm, through which ranks in one pod talk. Counts as memory.",
    )
    worker_public_key: PublicKey | None = Field(
        default=None,
        description="What secrets (data keys, keys of the bucket) are sealed to on their way into "
        "a pod, as `tensorize keys generate` prints it.",
    )
    worker_key_secret: str | None = Field(
        default=None,
        min_length=1,
        description="Name of the Secret that holds the private key to worker_public_key.",
    )
    worker_key_secret_key: str = Field(
        default="private-key", min_length=1, description="The private key's entry in that Secret."
    )
    timeout_s: int = Field(
        default=6 * 60 * 60,
        gt=0,
        description="Seconds after which a pod that has not finished is ended and fails, counted "
        "from when it has a node.",
    )
    unschedulable_timeout_s: float = Field(
        default=900.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds that a pod waits for a node, an autoscaler's included.",
    )
    start_timeout_s: float = Field(
        default=1800.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds that a pod may take on its node to start: pulling its image, mostly.",
    )
    node_loss_timeout_s: int = Field(
        default=60,
        ge=0,
        description="Seconds that a pod stays bound to a node that does not answer.",
    )
    terminate_grace_s: int = Field(
        default=10,
        ge=1,
        description="Seconds between asking a worker to stop (SIGTERM) and killing it (SIGKILL).",
    )
    poll_interval_s: float = Field(
        default=3.0,
        gt=0,
        le=60,
        allow_inf_nan=False,
        description="Seconds between two looks at a pod.",
    )
    parallel_ranks: int = Field(
        default=8, ge=1, description="Pods that build ranks of one model at once."
    )
    pod_spec: dict[str, JsonValue] = Field(
        default={},
        description="Anything else of the pod's spec. Objects are merged, lists are appended.",
    )
    container: dict[str, JsonValue] = Field(
        default={},
        description="Anything else of the worker's container. Objects are merged, lists are "
        "appended.",
    )
    resources: RankResources = Field(
        default=RankResources(), description="What each rank gets unless its profile says other."
    )
