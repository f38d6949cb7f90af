"""The fleet: one row for each model and suffix, and what they come to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, get_args

from pydantic import AwareDatetime

from tensorize_assets.core.catalog import Encryption
from tensorize_assets.core.channel import ChannelEntry, read_channel
from tensorize_assets.core.errors import EvidenceError, ManifestError, TensorizeAssetsError
from tensorize_assets.core.evidence import read_evidence
from tensorize_assets.core.jsonio import BuildId, Commit, Record
from tensorize_assets.core.manifest import SignedManifest, read_placed
from tensorize_assets.core.publish import require_whole
from tensorize_assets.core.store import Reader

State = Literal["damaged", "unpublished", "failed", "held", "behind", "building", "current"]

ORDER: tuple[State, ...] = get_args(State)
"""What needs a person first comes first.

damaged: the channel, or the build that it names, cannot be believed or served; only `verified`
finds that. unpublished: nothing was ever published. failed: the last run did not get to the
channel. held: a rollback keeps the newest build out. behind: the newest commit that a run has found
is not the published one. building: a run is queued or under way.
"""


class Publication(Record):
    """What a run found current: the channel's entry, its proof, and its size in bytes.

    `held`: a rollback keeps the run's own build out.
    """

    entry: int
    build: BuildId
    commit: Commit
    published: AwareDatetime
    reloaded: AwareDatetime
    device: str
    bytes: int
    encryption: Encryption
    signed_by: str
    held: bool = False


def line(publication: Publication) -> str:
    """A publication as the data version of the asset `published`: one line, the same for the same.

    Dagster keeps data versions where it reads the newest of each partition at once; to read the
    events themselves takes longer than all the rest, for some thousand partitions.
    """
    fields = publication.model_dump(mode="json", exclude_defaults=True)
    return " ".join(f"{name}={value}" for name, value in fields.items())


def read_line(text: str) -> Publication | None:
    """The publication in a line; None for a data version of another making."""
    try:
        return Publication.model_validate(dict(part.split("=", 1) for part in text.split(" ")))
    except ValueError:
        return None


class Reload(Record):
    """The last reload of a pair's build."""

    when: AwareDatetime
    device: str
    passed: bool


class FleetRow(Record):
    """A model and suffix, as its last runs left it; `current` is what they found published.

    `found_commit` is the newest one that a run found on the Hub. `problem` says why a channel could
    not be read.
    """

    model: str
    suffix: str
    state: State
    in_catalog: bool = True
    current: Publication | None = None
    found_commit: str | None = None
    reload: Reload | None = None
    problem: str | None = None

    @property
    def behind(self) -> bool | None:
        """Whether the Hub has another commit than the channel; None where one is not known."""
        if self.current is None or self.found_commit is None:
            return None
        return self.current.commit != self.found_commit


class Totals(Record):
    """What the rows come to. `oldest_reload_seconds` is 0 where nothing was reloaded."""

    pairs: int
    damaged: int
    unpublished: int
    failed: int
    held: int
    behind: int
    building: int
    current: int
    bytes: int
    encrypted: int
    last_reload_failed: int
    oldest_reload_seconds: float


def ordered(rows: Sequence[FleetRow]) -> list[FleetRow]:
    """Rows by what needs a person first, then by name."""
    return sorted(rows, key=lambda row: (ORDER.index(row.state), row.model, row.suffix))


def totals(rows: Sequence[FleetRow], now: datetime) -> Totals:
    """The numbers that are worth a line over time."""
    counts = Counter(row.state for row in rows)
    reloads = [row.reload for row in rows if row.reload is not None]
    ages = [(now - reload.when).total_seconds() for reload in reloads]
    return Totals(
        pairs=len(rows),
        **{state: counts[state] for state in ORDER},
        bytes=sum(row.current.bytes for row in rows if row.current),
        encrypted=sum(row.current is not None and row.current.encryption != "none" for row in rows),
        last_reload_failed=sum(not reload.passed for reload in reloads),
        oldest_reload_seconds=max(ages, default=0.0),
    )


COLUMNS = {
    "model": "string",
    "suffix": "string",
    "state": "string",
    "behind": "bool",
    "build": "string",
    "entry": "int",
    "commit": "string",
    "on_the_hub": "string",
    "published": "string",
    "age_days": "float",
    "reloaded": "string",
    "device": "string",
    "passed": "bool",
    "bytes": "int",
    "encryption": "string",
    "signed_by": "string",
}
"""The columns of the table, and what is in each."""


def cells(row: FleetRow, now: datetime) -> dict[str, str | int | float | bool | None]:
    """A row of the table, by column. Times are of UTC; `age_days` is since the channel moved."""
    current, reload = row.current, row.reload
    return {
        "model": row.model,
        "suffix": row.suffix,
        "state": row.state if row.in_catalog else f"{row.state}, not in the catalog",
        "behind": row.behind,
        "build": current and current.build,
        "entry": current and current.entry,
        "commit": current and current.commit[:12],
        "on_the_hub": row.found_commit and row.found_commit[:12],
        "published": current and minute(current.published),
        "age_days": current and round((now - current.published).total_seconds() / 86_400, 1),
        "reloaded": reload and minute(reload.when),
        "device": reload and reload.device,
        "passed": reload and reload.passed,
        "bytes": current and current.bytes,
        "encryption": current and current.encryption,
        "signed_by": current and current.signed_by,
    }


def minute(when: datetime) -> str:
    """A time as tables have it."""
    return f"{when.astimezone(UTC):%Y-%m-%d %H:%M}"


def verified(
    store: Reader, row: FleetRow, trusted: Collection[str], seen: Path | None = None
) -> FleetRow:
    """The row as its channel itself has it now; `problem` says why where that cannot be served.

    Manifests and the sizes of all files are looked at, and what the last audit found; files are not
    read. Raises nothing: one channel that is damaged must not hide the others.
    """
    try:
        found = read_channel(store, row.model, row.suffix, trusted, seen)
        if found is None:
            gone = None if row.current is None else "its channel is gone"
            return row.model_copy(update={"state": "unpublished", "current": None, "problem": gone})
        entry = found.channel.current
        back = entry.reason == "rollback"
        current, reload = look_up(store, entry, trusted, held=back, whole=True)
        if row.current is not None and entry.number == row.current.entry:
            return row
    except TensorizeAssetsError as error:
        return row.model_copy(update={"state": "damaged", "problem": str(error)})
    state: State = row.state
    if back:
        state = "held"
    elif state not in ("failed", "building"):
        state = "behind" if row.found_commit not in (None, entry.commit) else "current"
    return row.model_copy(update={"state": state, "current": current, "reload": reload})


def look_up(
    store: Reader,
    entry: ChannelEntry,
    trusted: Collection[str],
    *,
    held: bool,
    whole: bool = False,
) -> tuple[Publication, Reload]:
    """What speaks for an entry of a channel, from its manifests and its evidence.

    Raises ManifestError and EvidenceError where they are gone, and as `read_placed` and
    `read_evidence` do; with `whole` also as `require_whole`.
    """
    manifests: list[SignedManifest] = []
    for build_id, directory, sha256 in entry.manifests():
        manifest = read_placed(store, directory, trusted)
        if manifest is None or manifest.sha256 != sha256:
            raise ManifestError(
                f"{store.uri(directory)} has lost the manifest of build {build_id}, which is "
                "published, or has another; restore it, or roll back to another build"
            )
        if whole:
            require_whole(store, directory, manifest.manifest, sha256, trusted)
        manifests.append(manifest)
    evidence = read_evidence(
        store, entry.manifest_sha256, entry.device, entry.vllm_version, trusted
    )
    if evidence is None:
        raise EvidenceError(
            f"{store.uri(entry.evidence_key)} is gone: nothing says any more that build "
            f"{entry.build_id}, which is published, loads; materialize reload_check"
        )
    encryption: Encryption = "none"
    if manifests[-1].manifest.encryption is not None:
        encryption = "both" if len(manifests) > 1 else "only"
    publication = Publication(
        entry=entry.number,
        build=entry.build_id,
        commit=entry.commit,
        published=entry.when,
        reloaded=evidence.when,
        device=evidence.device,
        bytes=sum(file.size for one in manifests for file in one.manifest.files),
        encryption=encryption,
        signed_by=manifests[0].key_id,
        held=held,
    )
    return publication, Reload(when=evidence.when, device=evidence.device, passed=evidence.passed)
