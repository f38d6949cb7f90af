"""The points at which the chain is killed, in the order in which a run comes to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

When = Literal["before", "after"]
Who = Literal["the worker", "the step", "the step, not its worker"]

STORE = "tensorize_assets.core.s3_store:S3Store"
WORKER = "tensorize_assets.worker"
# In the order of a run.
ASSETS = (
    "hf_snapshot",
    "lora_adapters",
    "reference_outputs",
    "tensorized_shards",
    "encrypted_shards",
    "artifact",
    "reload_check",
    "published",
)


class Point(NamedTuple):
    """A call of a function, and who is killed before or after it."""

    asset: str
    what: str
    who: Who
    when: When
    at: str
    match: str = ""

    def __str__(self) -> str:
        return f"{self.asset}: {self.who}, {self.when} {self.what}"

    @property
    def upto(self) -> tuple[str, ...]:
        """The assets of a run that comes to this point."""
        return ASSETS[: ASSETS.index(self.asset) + 1]


def _around(asset: str, what: str, who: Who, at: str, match: str = "") -> Iterator[Point]:
    yield Point(asset, what, who, "before", at, match)
    yield Point(asset, what, who, "after", at, match)


def _put(asset: str, what: str, match: str) -> Iterator[Point]:
    return _around(asset, f"storing {what}", "the step", f"{STORE}.put_bytes", match)


def _record(asset: str) -> Iterator[Point]:
    return _put(asset, "its record", f"^records/{asset}/")


def _of_only() -> Iterator[Point]:
    """`encryption: only`, with an adapter, from a local cache of the Hub."""
    asset = "hf_snapshot"
    yield Point(
        asset, "the Hub is asked", "the step", "before", "tensorize_assets.core.hub:_resolve"
    )
    yield from _put(asset, "the sealed data key", r"^keys/\w+/anna ")
    yield from _put(asset, "the key's record", r"^keys/\w+\.json ")
    yield from _put(asset, "which key the build has", r"^keys/builds/")
    yield Point(
        asset,
        "the download",
        "the step",
        "before",
        "tensorize_assets.core.hub_download:fetch_files",
    )
    yield from _around(
        asset,
        "hashing what came",
        "the step",
        "tensorize_assets.core.hub_verify:verify_files",
        "tiny/llama",
    )
    yield from _record(asset)

    asset = "lora_adapters"
    yield Point(asset, "it begins", "the worker", "before", f"{WORKER}.adapters:run")
    yield from _around(
        asset, "storing the tensors", "the worker", f"{STORE}.put_file", "adapter_model.tensors"
    )
    yield Point(
        asset,
        "storing the config",
        "the step, not its worker",
        "before",
        f"{STORE}.put_bytes",
        "/adapter_config.json ",
    )
    yield from _record(asset)

    asset = "reference_outputs"
    yield Point(asset, "it begins", "the worker", "before", f"{WORKER}.reference:run")
    yield Point(
        asset, "the engine answered", "the step, not its worker", "after", f"{WORKER}.engine:ask"
    )
    yield from _put(asset, "the answers", "^references/")
    yield from _record(asset)

    asset = "tensorized_shards"
    yield Point(asset, "it begins", "the worker", "before", f"{WORKER}.shard:run")
    yield Point(
        asset, "writing the file", "the worker", "after", f"{WORKER}.write_shard:write_encrypted"
    )
    yield Point(asset, "the upload began", "the worker", "after", f"{STORE}._begin")
    yield Point(asset, "sending a part", "the worker", "after", f"{STORE}._send_part")
    yield Point(asset, "sending a part", "the step, not its worker", "after", f"{STORE}._send_part")
    yield from _around(asset, "the upload is complete", "the worker", f"{STORE}._complete")
    yield Point(asset, "storing the file", "the step, not its worker", "after", f"{STORE}.put_file")
    yield from _record(asset)

    yield from _record("encrypted_shards")

    asset = "artifact"
    yield from _around(
        asset, "storing config.json", "the step", f"{STORE}.put_file", "/config.json"
    )
    yield Point(
        asset, "storing the tokenizer", "the step", "after", f"{STORE}.put_file", "/tokenizer.json"
    )
    yield from _put(asset, "the manifest", "/manifest.json ")
    yield from _put(asset, "the provenance", "/provenance.dsse.json ")
    yield from _record(asset)

    asset = "reload_check"
    yield Point(asset, "it begins", "the worker", "before", f"{WORKER}.reload:run")
    yield Point(
        asset, "the engine answered", "the step, not its worker", "after", f"{WORKER}.engine:ask"
    )
    yield from _put(asset, "the evidence", "^evidence/")
    yield from _record(asset)

    asset = "published"
    yield from _put(asset, "the channel", "^vllm/tiny/llama/v1.json ")
    yield from _record(asset)


def _of_mirrored() -> Iterator[Point]:
    """A plaintext build that takes its snapshot from the mirror."""
    asset = "hf_snapshot"
    folder = "^snapshots/tiny/llama/"
    yield from _put(asset, "the lease of the mirror", folder + r"\w+/lease.json ")
    yield from _around(
        asset, "mirroring a file", "the step", f"{STORE}.put_file", folder + "files/"
    )
    yield Point(asset, "mirroring: an upload began", "the step", "after", f"{STORE}._begin")
    yield Point(asset, "mirroring: sending a part", "the step", "after", f"{STORE}._send_part")
    yield from _around(asset, "mirroring: completing an upload", "the step", f"{STORE}._complete")
    yield from _put(asset, "the hashes of a file's blocks", folder + r"files/\w+\.blocks ")
    yield from _put(asset, "the list of the mirrored files", folder + r"\w+/snapshot.json ")
    asset = "tensorized_shards"
    yield Point(
        asset,
        "reading the mirror",
        "the worker",
        "after",
        f"{WORKER}.remote_weights:RemoteFile.read",
    )
    yield Point(
        asset, "writing the file", "the worker", "after", f"{WORKER}.write_shard:write_shard"
    )
    yield Point(asset, "reading it back", "the worker", "before", f"{WORKER}.read_back:read_back")
    yield Point(asset, "storing the file", "the step, not its worker", "after", f"{STORE}.put_file")


ONLY = tuple(_of_only())
MIRRORED = tuple(_of_mirrored())
