"""What each asset hands to the next: one small JSON record for each partition."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue

from tensorize_assets.core.build import BuildInputs
from tensorize_assets.core.hub import Snapshot
from tensorize_assets.core.jsonio import BuildId, Record, RelativePath, Sha256
from tensorize_assets.core.tasks import ShardResult


class BuildRecord(Record):
    """Which build a record is of. Everything a later asset needs to know of it rides along."""

    model: str
    suffix: str
    build_id: BuildId


class SnapshotRecord(BuildRecord):
    """The build as `hf_snapshot` fixed it: commit, profile, tools, and its place in the store."""

    inputs: BuildInputs
    profile: dict[str, JsonValue]
    directory: RelativePath
    snapshot: Snapshot


class ShardsRecord(BuildRecord):
    """What the worker wrote."""

    result: ShardResult


class ArtifactRecord(BuildRecord):
    """A complete directory: its manifest stands."""

    directory: RelativePath
    manifest_sha256: Sha256


class ReferenceRecord(BuildRecord):
    """Where the source's answers are kept; builds of one commit share them."""

    reference: RelativePath
    prompts_digest: str


class ReloadRecord(BuildRecord):
    """Where the evidence of the reload is."""

    manifest_sha256: Sha256
    evidence: RelativePath
    passed: bool


class PublishedRecord(BuildRecord):
    """Where the channel stands."""

    channel: RelativePath
    number: int


RECORDS: Mapping[str, type[BuildRecord]] = {
    "hf_snapshot": SnapshotRecord,
    "tensorized_shards": ShardsRecord,
    "artifact": ArtifactRecord,
    "reference_outputs": ReferenceRecord,
    "reload_check": ReloadRecord,
    "published": PublishedRecord,
}
"""What each of our assets hands on."""
