"""What orchestration asks of a worker, and what it gets back: one request and one result a task."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from tensorize_assets.core.jsonio import Record
from tensorize_assets.core.manifest import (
    AdapterEntry,
    DtypeCensus,
    FileEntry,
    ShardEntry,
    SnapshotEntry,
    StockVllm,
    TensorEntry,
    TiedGroup,
)
from tensorize_assets.core.protocol import WorkerRequest, WorkerResult
from tensorize_assets.core.s3 import S3Settings

Device = Literal["cpu", "cuda"]

DATA_KEY = "data_key"
"""The secret, 32 bytes, with which a worker encrypts what it writes and opens what it loads."""

OLD_DATA_KEY = "old_data_key"
"""The secret with which a worker opens what it encrypts anew."""

# What an artifact's tensors were read from.
LoadSource = Literal["disk", "s3", "presigned_url", "public_url"]


class ShardRequest(WorkerRequest):
    """Build every tensor-parallel rank of a snapshot and store it under `directory`.

    `encrypted`: with the secret DATA_KEY, so that no plaintext tensor is written anywhere.
    """

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
    encrypted: bool = False


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


class AdapterSnapshot(Record):
    """A LoRA adapter as it was downloaded: `folder` holds its weights and adapter_config.json."""

    name: str
    repo: str
    snapshot: SnapshotEntry
    folder: str


class AdaptersRequest(WorkerRequest):
    """Write every adapter's tensors and its config below `directory`.

    `base_folder` is the snapshot of the model that they are for. `encrypted` as in ShardRequest.
    """

    task: Literal["adapters"] = "adapters"
    model: str
    suffix: str
    base_folder: str
    adapters: tuple[AdapterSnapshot, ...]
    root: str
    directory: str
    scratch_dir: str
    s3: S3Settings | None = None
    encrypted: bool = False


class AdaptersResult(WorkerResult):
    """What was written: two files an adapter. `seconds` by stage."""

    adapters: tuple[AdapterEntry, ...]
    files: tuple[FileEntry, ...]
    seconds: dict[str, float]


class TensorFile(Record):
    """A file of tensors below a directory, and what it holds."""

    path: str
    tensors: tuple[TensorEntry, ...]


class EncryptRequest(WorkerRequest):
    """Encrypt tensor files of `source` into `directory` with the secret DATA_KEY.

    With the secret OLD_DATA_KEY they are encrypted already, and get the new key.
    """

    task: Literal["encrypt"] = "encrypt"
    model: str
    suffix: str
    root: str
    source: str
    directory: str
    files: tuple[TensorFile, ...]
    scratch_dir: str
    s3: S3Settings | None = None


class EncryptResult(WorkerResult):
    """The encrypted files, and their tensors with the hashes that they have there."""

    files: tuple[FileEntry, ...]
    tensors: tuple[TensorFile, ...]
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
    """Load the source snapshot with vLLM's default loader and ask it the prompts.

    With adapters, each is asked too, in the same engine, from its own repo's files.
    """

    task: Literal["reference"] = "reference"
    folder: str
    adapters: tuple[AdapterSnapshot, ...] = ()


class ReferenceResult(WorkerResult):
    """The source's answers, each adapter's by name, and how its default load went on each rank."""

    answers: Answers
    adapters: dict[str, Answers] = Field(default_factory=dict)
    loads: tuple[RankLoad, ...]
    device_name: str
    vllm_version: str


class ReloadRequest(_EngineRequest):
    """Load an artifact with `load_format="tensorizer"` and ask it the prompts.

    `directory` is the artifact's key under `root`; `companions` are its files that are no shards,
    the adapters' tensors among them. `encrypted`: with the secret DATA_KEY.
    """

    task: Literal["reload"] = "reload"
    root: str
    directory: str
    companions: tuple[FileEntry, ...]
    adapters: tuple[AdapterEntry, ...] = ()
    encrypted: bool = False
    s3: S3Settings | None = None
    deserialization_kwargs: dict[str, JsonValue] = Field(default_factory=dict)


class Refusal(Record):
    """What became of an attempt to load an encrypted artifact that must not load."""

    attempt: str
    refused: bool
    message: str


class ReloadResult(WorkerResult):
    """The artifact's answers and every rank's tensors; `error` instead where it did not load.

    `adapters` are the answers with each, by name. `refusals` are of an encrypted artifact.
    """

    answers: Answers | None
    adapters: dict[str, Answers] = Field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()
    loads: tuple[RankLoad, ...]
    device_name: str
    vllm_version: str
    error: str | None = None
