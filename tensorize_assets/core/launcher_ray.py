"""Settings of the launcher `ray`, and what it leaves for the job that it starts."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from tensorize_assets.core.jsonio import Record
from tensorize_assets.core.rank_resources import RankResources
from tensorize_assets.core.sealing import PublicKey
from tensorize_assets.core.worker_versions import WorkerVersions

RANKS_FILE: Final = "ranks.json"
"""In the working directory of a job whose ranks are tasks: `RankTasks`, as JSON."""


def _address(value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise ValueError("is not the URL of a dashboard; write http://HOST:8265")
    return value.rstrip("/")


def _scratch(value: str) -> str:
    if not value.startswith("/"):
        raise ValueError("is a folder on each node; write an absolute path, such as /tmp/tensorize")
    return value


class RaySettings(BaseModel):
    """A Ray cluster whose nodes have this package, vLLM and tensorizer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: Annotated[str, AfterValidator(_address)] = Field(
        description="The cluster's dashboard: http://HOST:8265. Where it asks for a token, Ray "
        "reads it itself (RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH).",
        min_length=1,
    )
    resources: RankResources = Field(
        default=RankResources(),
        description="What each rank gets unless its profile says other. Without cpu: 1.",
    )
    versions: WorkerVersions | None = Field(
        default=None,
        description="vllm, torch and tensorizer on the nodes. Default: those beside Dagster.",
    )
    python: str = Field(
        default="python",
        min_length=1,
        description="Interpreter on the nodes that has this package and vLLM; the one that Ray "
        "itself runs with.",
    )
    env: dict[str, str] = Field(
        default={},
        description="Environment variables of the worker. No place for secrets: they show in the "
        "cluster's dashboard.",
    )
    scratch: Annotated[str, AfterValidator(_scratch)] = Field(
        default="/tmp/tensorize-scratch",
        description="Folder on each node for what a rank writes before it is stored: its shard.",
    )
    shared_disks: bool = Field(
        default=False,
        description="Whether nodes see the folders of Dagster's machine under the same paths: the "
        "Hub's files, and a root that is a folder.",
    )
    worker_public_key: PublicKey | None = Field(
        default=None,
        description="What secrets (data keys, keys of the bucket) are sealed to on their way to a "
        "node, as `tensorize keys generate` prints it. On the nodes TENSORIZE_WORKER_KEY_FILE "
        "names the file of the private key.",
    )
    autoscaling: bool = Field(
        default=False,
        description="Whether nodes come when they are asked for. Without, what no node can hold is "
        "refused at once.",
    )
    max_retries: int = Field(
        default=3,
        ge=0,
        le=100,
        description="How often a virtual rank whose node is lost is started anew on another one.",
    )
    timeout_s: int = Field(
        default=6 * 60 * 60,
        gt=0,
        description="Seconds after which a job that has not finished is ended and fails, its wait "
        "for free resources among them.",
    )
    terminate_grace_s: float = Field(
        default=10.0,
        gt=0,
        description="Seconds between asking a worker's processes to stop (SIGTERM) and killing "
        "them (SIGKILL), on a cancel or a timeout.",
    )


class RankTasks(Record):
    """How the ranks of a job run as Ray tasks: what each gets, in Ray's units (memory: bytes).

    `sealed` are the secrets as they came: each task opens them on its own node.
    """

    num_cpus: float
    memory: int | None = None
    resources: dict[str, float] = Field(default_factory=dict)
    max_retries: int
    sealed: str | None = None
