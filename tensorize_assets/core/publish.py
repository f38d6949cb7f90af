"""Moving a channel: only to a build whose manifest and evidence hold, as found in the store."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from tensorize_assets.core import build_keys, channel, layout
from tensorize_assets.core.audit_record import require_undamaged
from tensorize_assets.core.build import base_id
from tensorize_assets.core.channel import Channel, ChannelEntry, EncryptedVariant
from tensorize_assets.core.errors import BuildMismatchError, EvidenceError, ManifestError
from tensorize_assets.core.evidence import Evidence, read_evidence
from tensorize_assets.core.manifest import Manifest, StoredManifest, read_manifest
from tensorize_assets.core.signing import SecretKey
from tensorize_assets.core.store import Reader, Store


def publish(
    store: Store,
    key: SecretKey,
    trusted: Collection[str] | None,
    *,
    model: str,
    suffix: str,
    build_id: str,
    directory: str,
    device: str,
    encrypted: EncryptedVariant | None = None,
    republish: bool = False,
    seen: Path | None = None,
) -> ChannelEntry:
    """Make a build current for the vLLM it was built with, and return the channel's entry.

    `encrypted` is the variant that is published with it: it needs evidence of its own. `seen` as
    in `channel.read_channel`.

    A build that a rollback has just taken out of service stays out unless `republish` is set: a
    schedule that runs the chain again must not undo what a person did. The entry returned is then
    the rollback's.

    Raises:
        ManifestError: no valid manifest, or of another build, or a file has another size; or the
            last audit found it damaged; or retention removed it meanwhile: the message says
            whether the channel was moved by then.
        EvidenceError: no evidence of a reload on `device`, or it did not pass.
        BuildMismatchError: its data key was changed since.
        ConflictError: others kept moving the channel.
        HistoryError: the channel, or the history of its data keys, is older than was seen here.
    """
    stored = require_manifest(store, directory, build_id, trusted)
    manifests = [stored.manifest]
    version = stored.manifest.inputs.vllm
    require_evidence(store, stored, device, version, trusted)
    if encrypted is not None:
        other = require_manifest(store, encrypted.directory, encrypted.build_id, trusted)
        require_same(store, other, encrypted.directory, encrypted.manifest_sha256)
        require_evidence(store, other, device, version, trusted)
        manifests.append(other.manifest)

    def require_unchanged() -> None:
        for manifest in manifests:
            _require_current_key(store, manifest, trusted, seen)
        _require_there(store, directory, *([encrypted.directory] if encrypted else []))

    moved = channel.append(
        store,
        key,
        model,
        suffix,
        build_id=build_id,
        directory=directory,
        manifest_sha256=stored.sha256,
        commit=stored.manifest.inputs.commit,
        vllm_version=version,
        device="cuda" if device == "cuda" else "cpu",
        trusted=trusted,
        encrypted=encrypted,
        seen=seen,
        unless=lambda history: not republish and _rolled_back(history, build_id, version),
        # Asked of each history read, as `unless` is: a run with the new key then moves the channel
        # after this one, or has this one read it again.
        require=require_unchanged,
    )
    entry = moved.current_for(version) or moved.current
    _require_still_there(store, model, suffix, *(place for _, place, _ in entry.manifests()))
    return entry


def _require_there(store: Store, *directories: str) -> None:
    """Refuse a build that retention has removed since it was looked at."""
    for directory in directories:
        if store.stat(layout.manifest_key(directory)) is None:
            raise ManifestError(
                f"{store.uri(directory)} was removed meanwhile; materialize this partition from "
                "hf_snapshot on, which builds it again"
            )


def _require_still_there(store: Store, model: str, suffix: str, *directories: str) -> None:
    """Say so where retention removed what the channel now names.

    A manifest that is there after the move stays: retention reads the channel after it removed one.
    """
    for directory in directories:
        if store.stat(layout.manifest_key(directory)) is None:
            raise ManifestError(
                f"the channel of {model} {suffix} now names {store.uri(directory)}, which "
                "retention removed meanwhile; unless it is put back, materialize this partition "
                "from hf_snapshot on, which builds it again, or go back to another build with "
                f"`tensorize rollback {model} {suffix}`"
            )


def _require_current_key(
    store: Store, manifest: Manifest, trusted: Collection[str] | None, seen: Path | None
) -> None:
    """Refuse a build whose data key was given up while it was under way; a rollback may take it.

    Raises BuildMismatchError. A build without a history of keys, such as a copy, passes.
    """
    key_id = manifest.inputs.data_key
    if key_id is None:
        return
    model, suffix, base = manifest.model, manifest.suffix, base_id(manifest.inputs)
    stored = build_keys.read_keys(store, model, suffix, base, trusted, seen)
    if stored is not None and stored.keys.current != key_id:
        raise BuildMismatchError(
            f"{model} {suffix}: build {manifest.build_id} is encrypted with data key {key_id}, and "
            f"{stored.keys.current} has taken its place meanwhile; materialize this partition from "
            "hf_snapshot on, which encrypts with that one"
        )


def _rolled_back(history: Channel, build_id: str, vllm_version: str) -> bool:
    """Whether the channel's last move was a rollback that took this build out of service.

    It took out what was published after the build that it went back to. A build that this one
    had superseded is not held: a revision that goes back to a known commit moves the channel.
    """
    moves = [entry for entry in history.entries if entry.vllm_version == vllm_version]
    if not moves or moves[-1].reason != "rollback":
        return False
    *earlier, rollback = moves
    for entry in reversed(earlier):
        if entry.build_id == rollback.build_id:
            break
        if entry.build_id == build_id:
            return True
    return False


def roll_back(
    store: Store,
    key: SecretKey,
    trusted: Collection[str] | None,
    *,
    model: str,
    suffix: str,
    to_build_id: str | None = None,
    seen: Path | None = None,
) -> ChannelEntry:
    """Make an earlier build current again, after the same checks as `publish`.

    Raises:
        StoreError: there is no such build in the channel's history.
        ManifestError, EvidenceError: that build can no longer be served; nothing was moved.
        ManifestError: retention removed it as the channel was moved; the message says that it was.
    """
    entries = channel.rollback_target(store, model, suffix, to_build_id, trusted=trusted, seen=seen)
    for entry in entries:
        for build_id, directory, sha256 in entry.manifests():
            stored = require_manifest(store, directory, build_id, trusted)
            require_same(store, stored, directory, sha256)
            require_evidence(store, stored, entry.device, entry.vllm_version, trusted)
    # By name: "the build before" is another one if somebody moves the channel meanwhile.
    target = entries[-1].build_id
    directories = [place for entry in entries for _, place, _ in entry.manifests()]
    moved = channel.rollback(
        store,
        key,
        model,
        suffix,
        target,
        trusted=trusted,
        require=lambda: _require_there(store, *directories),
        seen=seen,
    )
    _require_still_there(store, model, suffix, *directories)
    return moved.current


def require_same(store: Reader, stored: StoredManifest, directory: str, sha256: str) -> None:
    """Raises ManifestError unless `stored` is the manifest whose SHA-256 was noted before."""
    if stored.sha256 != sha256:
        raise ManifestError(
            f"{store.uri(directory)} has another manifest than the one that was published or "
            "reloaded; restore it, or take another build"
        )


def require_manifest(
    store: Reader, directory: str, build_id: str, trusted: Collection[str] | None
) -> StoredManifest:
    """The manifest of `directory`, whose files are all there in their sizes.

    Raises:
        ManifestError: see `publish`; or the last audit found it damaged.
    """
    stored = read_manifest(store, directory, trusted)
    if stored is None:
        raise ManifestError(
            f"{store.uri(directory)} has no manifest: it is not a finished build; materialize the "
            "asset artifact"
        )
    if stored.manifest.build_id != build_id:
        raise ManifestError(
            f"{store.uri(directory)} holds build {stored.manifest.build_id}, not {build_id}; "
            "materialize this partition from hf_snapshot on"
        )
    require_whole(store, directory, stored.manifest, stored.sha256, trusted)
    return stored


def require_whole(
    store: Reader,
    directory: str,
    manifest: Manifest,
    sha256: str,
    trusted: Collection[str] | None,
) -> None:
    """Raises ManifestError unless each file is there in its size, and no audit found damage.

    `sha256` is the manifest's.
    """
    for file in manifest.files:
        place = layout.file_key(directory, file.path)
        size = store.stat(place)
        if size != file.size:
            found = "is gone" if size is None else f"has {size:,} bytes"
            raise ManifestError(
                f"{store.uri(place)} {found}, its manifest says {file.size:,} bytes; restore it, "
                "or remove the directory and build again"
            )
    require_undamaged(store, directory, sha256, trusted)


def require_evidence(
    store: Reader,
    stored: StoredManifest,
    device: str,
    vllm_version: str,
    trusted: Collection[str] | None,
) -> None:
    """Raises EvidenceError unless a reload of this manifest on `device` passed every check."""
    manifest = stored.manifest
    where = f"{manifest.model} {manifest.suffix}, build {manifest.build_id}"
    evidence = read_evidence(store, stored.sha256, device, vllm_version, trusted)
    if evidence is None:
        raise EvidenceError(
            f"{where}: no evidence of a reload on {device} with vLLM {vllm_version}; materialize "
            "reload_check"
        )
    require_passed(evidence, where)


def require_passed(evidence: Evidence, where: str) -> None:
    """Raises EvidenceError unless every check of a reload passed; `where` names the build."""
    if not evidence.passed:
        wrong = [check for check in evidence.checks if not check.passed]
        raise EvidenceError(
            f"{where}: its last reload on {evidence.device} failed: "
            + "; ".join(f"{check.name} ({check.description})" for check in wrong)
            + ". Mend the cause and materialize reload_check again"
        )
