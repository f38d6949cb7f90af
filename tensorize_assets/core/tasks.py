"""What orchestration asks of a worker, and what it gets back: one request and one result a task."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue, model_validator

from tensorize_assets.core.catalog import Sharding, TensorFormat
from tensorize_assets.core.jsonio import Commit, Record
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

# direct: into vLLM's own tensors; slow: through the model's load_weights, name by name.
LoadPath = Literal["direct", "slow"]

# What an artifact's tensors were read from.
LoadSource = Literal["disk", "s3", "presigned_url", "public_url"]


class MirroredSnapshot(Record):
    """A snapshot in the mirror of the request's root, and what each of its files is to be.

    `trusted` are public keys whose lists of blocks are believed, by which parts can be read.
    """

    model: str
    commit: Commit
    files: tuple[FileEntry, ...]
    trusted: tuple[str, ...] = ()


class SnapshotSource(Record):
    """Where a worker finds a snapshot: in a folder that it sees, or in the mirror.

    Read from a plain str, it is a folder.
    """

    folder: str | None = None
    mirrored: MirroredSnapshot | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_a_path(cls, value: object) -> object:
        return {"folder": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _is_one(self) -> SnapshotSource:
        if (self.folder is None) == (self.mirrored is None):
            raise ValueError("give either a folder or a mirrored snapshot")
        return self


class _WriteRequest(WorkerRequest):
    """`encrypted`: with the secret DATA_KEY, so that no plaintext tensor is written anywhere."""

    model: str
    suffix: str
    snapshot: SnapshotSource
    root: str
    directory: str
    scratch_dir: str
    dtype: str
    serialization_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    s3: S3Settings | None = None
    encrypted: bool = False


class ShardRequest(_WriteRequest):
    """Build every tensor-parallel rank of a snapshot, or some, and store it under `directory`.

    `device` is where the ranks are in executor mode; they are all built at once. `shares_machine`:
    ranks that are built apart may be on one machine, where they read some tensors once for all.
    """

    task: Literal["shard"] = "shard"
    tensor_parallel_size: int
    ranks: tuple[int, ...] | None = None
    shares_machine: bool = True
    sharding: Sharding = "virtual"
    device: Device = "cpu"


class ShardResult(WorkerResult):
    """What was written. `seconds` by stage: configure, load, census, write, store.

    `source_bytes` are what was read of the weights, where they were read by ranges from the mirror.
    `store` is reading back, verifying and storing; it runs beside the building of the next rank.
    In executor mode load, census and write are the slowest rank's, and `start` all the rest of it.
    """

    dtype: str
    architecture: str
    files: tuple[FileEntry, ...]
    shards: tuple[ShardEntry, ...]
    census: DtypeCensus
    tied: tuple[TiedGroup, ...]
    stock_vllm: StockVllm
    tensor_format: TensorFormat = "vllm"
    sharding: Sharding = "virtual"
    versions: dict[str, str]
    seconds: dict[str, float]
    source_bytes: int | None = None


class HfTensorsRequest(_WriteRequest):
    """Write the snapshot's own tensors, under their own names, into one file of `directory`.

    A ShardResult comes of it.
    """

    task: Literal["hf_tensors"] = "hf_tensors"


class AdapterSnapshot(Record):
    """A LoRA adapter as it was downloaded: `source` has its weights and adapter_config.json."""

    name: str
    repo: str
    snapshot: SnapshotEntry
    source: SnapshotSource


class AdaptersRequest(WorkerRequest):
    """Write every adapter's tensors and its config below `directory`.

    `base` is the snapshot of the model that they are for. `encrypted` as in ShardRequest.
    """

    task: Literal["adapters"] = "adapters"
    model: str
    suffix: str
    base: SnapshotSource
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
    """One tensor as it stands in the loaded model, before post-load processing; see RankLoad."""

    sha256: str
    finite: bool


class RankLoad(Record):
    """How one rank was loaded. Memory is the rank's resident set, in bytes.

    `seconds` is the whole load, with what had to be read again: `part_retries` counts requests,
    `restarts` how often the file was begun anew. `tensors` of a slow load are the file's, as they
    were read from it, and not as vLLM has put them together.
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
    path: LoadPath = "direct"


class _EngineRequest(WorkerRequest):
    model: str
    suffix: str
    tensor_parallel_size: int
    dtype: str
    device: Device
    prompts: tuple[str, ...]


class ReferenceRequest(_EngineRequest):
    """Load the source snapshot with vLLM's default loader and ask it the prompts.

    With adapters, each is asked too, in the same engine, from its own repo's files. `root` is for
    what is mirrored.
    """

    task: Literal["reference"] = "reference"
    snapshot: SnapshotSource
    adapters: tuple[AdapterSnapshot, ...] = ()
    root: str | None = None
    s3: S3Settings | None = None


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


class SelfCheckRequest(_EngineRequest):
    """Load any tensorizer files as vLLM does and ask the prompts; a ReloadResult comes of it.

    `folder` holds config and tokenizer. `tensors` is a path or URI, with a template for the rank
    (%03d) where there are several; `settings` are vLLM's for tensorizer, without any secret.
    `encrypted`: with the secret DATA_KEY.
    """

    task: Literal["self_check"] = "self_check"
    folder: str
    tensors: str
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    encrypted: bool = False
    s3: S3Settings | None = None


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
