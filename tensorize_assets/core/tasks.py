"""What orchestration asks of a worker, and what it gets back: one request and one result a task."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from tensorize_assets.core.jsonio import Record
from tensorize_assets.core.manifest import (
    DtypeCensus,
    FileEntry,
    ShardEntry,
    StockVllm,
    TiedGroup,
)
from tensorize_assets.core.protocol import WorkerRequest, WorkerResult
from tensorize_assets.core.s3 import S3Settings

Device = Literal["cpu", "cuda"]

# What an artifact's tensors were read from.
LoadSource = Literal["disk", "s3", "presigned_url", "public_url"]


class ShardRequest(WorkerRequest):
    """Build every tensor-parallel rank of a snapshot and store it under `directory`."""

    task: Literal["shard"] = "shard"
    model: str
    suffix: str
    snapshot_dir: str
    root: str
    directory: str
    scratch_dir: str
    tensor_parallel_size: int
    dtype: str
    serialization_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    s3: S3Settings | None = None


class ShardResult(WorkerResult):
    """What was written. `seconds` by stage: configure, load, census, write, store.

    `store` is reading back, verifying and storing; it runs beside the building of the next rank.
    """

    dtype: str
    architecture: str
    files: tuple[FileEntry, ...]
    shards: tuple[ShardEntry, ...]
    census: DtypeCensus
    tied: tuple[TiedGroup, ...]
    stock_vllm: StockVllm
    versions: dict[str, str]
    seconds: dict[str, float]


class TokenScore(Record):
    """One generated position: the token, and the log-probability of each of the top tokens."""

    token: int
    top: dict[int, float]


class Output(Record):
    """Greedy continuation of one prompt."""

    prompt: str
    text: str
    positions: tuple[TokenScore, ...]


class Answers(Record):
    """What a loaded model says: to the prompts, and about the bundled text."""

    outputs: tuple[Output, ...]
    perplexity: float
    logprobs_finite: bool


class TensorReport(Record):
    """One tensor as it stands in the loaded model, before post-load processing."""

    sha256: str
    finite: bool


class RankLoad(Record):
    """How one rank was loaded. Memory is the rank's resident set, in bytes.

    `seconds` is the whole load, with what had to be read again: `part_retries` counts requests,
    `restarts` how often the file was begun anew.
    """

    rank: int
    device: Device
    device_name: str
    seconds: float
    bytes: int
    host_memory_before: int
    host_memory_after: int
    tensors: dict[str, TensorReport] = Field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    on_meta: tuple[str, ...] = ()
    source: LoadSource = "disk"
    part_retries: int = 0
    restarts: int = 0


class _EngineRequest(WorkerRequest):
    model: str
    suffix: str
    tensor_parallel_size: int
    dtype: str
    device: Device
    prompts: tuple[str, ...]


class ReferenceRequest(_EngineRequest):
    """Load the source snapshot with vLLM's default loader and ask it the prompts."""

    task: Literal["reference"] = "reference"
    folder: str


class ReferenceResult(WorkerResult):
    """The source's answers, and how its default load went on each rank."""

    answers: Answers
    loads: tuple[RankLoad, ...]
    device_name: str
    vllm_version: str


class ReloadRequest(_EngineRequest):
    """Load an artifact with `load_format="tensorizer"` and ask it the prompts.

    `directory` is the artifact's key under `root`; `companions` are its files that are no shards.
    """

    task: Literal["reload"] = "reload"
    root: str
    directory: str
    companions: tuple[FileEntry, ...]
    s3: S3Settings | None = None
    deserialization_kwargs: dict[str, JsonValue] = Field(default_factory=dict)


class ReloadResult(WorkerResult):
    """The artifact's answers and every rank's tensors; `error` instead where it did not load."""

    answers: Answers | None
    loads: tuple[RankLoad, ...]
    device_name: str
    vllm_version: str
    error: str | None = None
