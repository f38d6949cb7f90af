"""What each asset hands to the next: one small JSON record for each partition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, JsonValue

from tensorize_assets.core.build import BuildInputs
from tensorize_assets.core.catalog import Encryption
from tensorize_assets.core.hub_files import Snapshot
from tensorize_assets.core.jsonio import BuildId, KeyId, PathPart, Record, RelativePath, Sha256
from tensorize_assets.core.tasks import AdaptersResult, EncryptResult, ShardResult


class BuildRecord(Record):
    """Which build a record is of. Everything a later asset needs to know of it rides along."""

    model: str
    suffix: str
    build_id: BuildId


class AdapterRecord(Record):
    """An adapter at the commit that the build is of."""

    name: PathPart
    snapshot: Snapshot


class EncryptedBuild(Record):
    """The encrypted variant of a build: a build of its own, since its data key is an input."""

    key_id: KeyId
    build_id: BuildId
    directory: RelativePath


class SnapshotRecord(BuildRecord):
    """The build as `hf_snapshot` fixed it: commits, profile, tools, and its place in the store.

    `directory` is of the plaintext artifact; with `encryption: only` nothing is ever there.
    """

    inputs: BuildInputs
    profile: dict[str, JsonValue]
    directory: RelativePath
    snapshot: Snapshot
    adapters: tuple[AdapterRecord, ...] = ()
    encryption: Encryption = "none"
    encrypted: EncryptedBuild | None = None


class ShardsRecord(BuildRecord):
    """What the worker wrote to `directory`: of the plaintext artifact, or of the encrypted one."""

    directory: RelativePath
    result: ShardResult


class AdaptersRecord(BuildRecord):
    """What the worker wrote to `directory`; `result` is None for a profile without adapters."""

    directory: RelativePath
    result: AdaptersResult | None


class EncryptedRecord(BuildRecord):
    """What was encrypted into `directory`; `result` is None where there was nothing to do.

    That is without encryption, and with `encryption: only`, where the shards were written so.
    """

    directory: RelativePath | None
    result: EncryptResult | None


class ArtifactPlace(Record):
    """A complete directory: its manifest stands. `build_id` is the manifest's."""

    build_id: BuildId
    directory: RelativePath
    manifest_sha256: Sha256
    encrypted: bool


class ArtifactRecord(BuildRecord):
    """The complete directories of a build: the plaintext one first, where there are two."""

    variants: Annotated[tuple[ArtifactPlace, ...], Field(min_length=1, max_length=2)]


class ReferenceRecord(BuildRecord):
    """Where the source's answers are kept; builds of one commit share them."""

    reference: RelativePath
    prompts_digest: str


class ReloadRecord(BuildRecord):
    """Where the evidence of each variant's reload is."""

    evidence: Annotated[tuple[RelativePath, ...], Field(min_length=1, max_length=2)]
    passed: bool


class PublishedRecord(BuildRecord):
    """Where the channel stands."""

    channel: RelativePath
    number: int


RECORDS: Mapping[str, type[BuildRecord]] = {
    "hf_snapshot": SnapshotRecord,
    "tensorized_shards": ShardsRecord,
    "lora_adapters": AdaptersRecord,
    "encrypted_shards": EncryptedRecord,
    "artifact": ArtifactRecord,
    "reference_outputs": ReferenceRecord,
    "reload_check": ReloadRecord,
    "published": PublishedRecord,
}
"""What each of our assets hands on."""
