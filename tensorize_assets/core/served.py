"""Which build is served: the channel's, of this host's vLLM, with proof, and whole."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from tensorize_assets.core import layout
from tensorize_assets.core.channel import ChannelEntry, StoredChannel, read_channel
from tensorize_assets.core.copy import copy_file
from tensorize_assets.core.errors import EvidenceError, ManifestError, StoreError
from tensorize_assets.core.evidence import Device, Evidence, read_evidence
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.manifest import FileEntry, Manifest, manifest_sha256
from tensorize_assets.core.printable import printable
from tensorize_assets.core.publish import require_manifest, require_passed, require_same
from tensorize_assets.core.releases import InstalledVllm, require_supported
from tensorize_assets.core.store import Reader, Store, digest
from tensorize_assets.core.verify import extra_files


class Served(NamedTuple):
    """A build that may be served: one variant of an entry of the channel, and its proof."""

    channel: StoredChannel
    entry: ChannelEntry
    directory: str
    manifest: Manifest
    manifest_sha256: str
    evidence: Evidence

    @property
    def key_id(self) -> str | None:
        """The data key that opens it; None for one in plaintext."""
        return self.manifest.encryption.key_id if self.manifest.encryption else None


def choose(
    source: Reader,
    model: str,
    suffix: str,
    vllm: InstalledVllm,
    trusted: Collection[str],
    *,
    encrypted: bool = False,
    accept_cpu_evidence: bool = False,
    seen: Path | None = None,
) -> Served:
    """Return what the channel has for this vLLM, after every check short of hashing its tensors.

    Of a build that was published in both variants it is the one in plaintext, unless `encrypted`.
    For vLLM on CUDA a reload on a CPU is no proof, unless `accept_cpu_evidence`. `seen` as in
    `channel.read_channel`.

    Raises:
        PreflightError: this release of vLLM is not supported.
        StoreError: nothing is published for it.
        ManifestError: the build is not whole, or not the one that was published.
        EvidenceError: nothing proves that it loads on such a device.
        SignatureError, HistoryError: see `channel.read_channel`.
    """
    require_supported(vllm.release)
    channel = read_channel(source, model, suffix, trusted, seen)
    where = source.uri(layout.channel_key(model, suffix))
    if channel is None:
        raise StoreError(
            f"nothing of {model} {suffix} was published: {where} does not exist; see to the names "
            "and the root"
        )
    entry = channel.channel.current_for(vllm.release)
    if entry is None:
        known = sorted({entry.vllm_version for entry in channel.channel.entries})
        raise StoreError(
            f"{where}: no build of {model} {suffix} was published for vLLM {vllm.release}, which "
            f"is installed; there are builds for vLLM {', '.join(known)}: install one of these, or "
            "build with this one"
        )
    # The encrypted variant is the last one, also where it is the only one.
    build_id, directory, sha256 = list(entry.manifests())[-1 if encrypted else 0]
    stored = require_manifest(source, directory, build_id, trusted)
    require_same(source, stored, directory, sha256)
    if encrypted and stored.manifest.encryption is None:
        raise ManifestError(
            f"build {build_id} of {model} {suffix} was published in plaintext only; leave out "
            "--encrypted, or set `encryption: both` in its profile and build it again"
        )
    evidence = _evidence(source, stored.manifest, sha256, vllm, trusted, accept_cpu_evidence)
    return Served(channel, entry, directory, stored.manifest, sha256, evidence)


def small_files(manifest: Manifest) -> tuple[FileEntry, ...]:
    """What vLLM reads beside the tensors: config, tokenizer, and the like, no adapter's."""
    others = {*manifest.tensor_files, *(adapter.config for adapter in manifest.adapters)}
    return tuple(file for file in manifest.files if file.path not in others)


def require_small_files(source: Store, served: Served) -> None:
    """Raises StoreError unless each small file has the manifest's hash, and there are no others.

    vLLM would read another, such as a chat template, as if it were the build's.
    """
    if extra := extra_files(source, served.directory, served.manifest):
        raise StoreError(
            f"{source.uri(served.directory)} holds what its manifest does not name: "
            f"{printable(', '.join(extra[:5]))}; remove it"
        )
    for file in small_files(served.manifest):
        key = layout.file_key(served.directory, file.path)
        if digest(source, key) != (file.size, file.sha256):
            raise StoreError(
                f"{source.uri(key)} is not what its manifest says; restore it, or roll back to "
                "another build: `tensorize verify` names every such file"
            )


def copy_small_files(source: Reader, served: Served, folder: Path) -> None:
    """Put the small files and the manifest into `folder`. Raises as `require_small_files`."""
    target = LocalStore(folder)
    for file in small_files(served.manifest):
        copy_file(source, layout.file_key(served.directory, file.path), target, file.path, file)
    key = layout.manifest_key(served.directory)
    found = source.get_bytes(key)
    if found is None or manifest_sha256(found.data) != served.manifest_sha256:
        raise ManifestError(f"{source.uri(key)} was replaced while it was read; start again")
    target.put_bytes(layout.MANIFEST, found.data)


def _evidence(
    source: Reader,
    manifest: Manifest,
    sha256: str,
    vllm: InstalledVllm,
    trusted: Collection[str],
    accept_cpu_evidence: bool,
) -> Evidence:
    """The evidence of this device, or else of the other one, where that will do."""
    where = f"{manifest.model} {manifest.suffix}, build {manifest.build_id}"
    evidence = read_evidence(source, sha256, vllm.device, vllm.release, trusted)
    if evidence is None:
        other: Device = "cpu" if vllm.device == "cuda" else "cuda"
        evidence = read_evidence(source, sha256, other, vllm.release, trusted)
    if evidence is None:
        raise EvidenceError(
            f"{where}: no evidence of a reload with vLLM {vllm.release}; materialize reload_check"
        )
    if vllm.device == "cuda" and evidence.device == "cpu" and not accept_cpu_evidence:
        raise EvidenceError(
            f"{where}: it was reloaded on a CPU only, and this vLLM ({vllm.distribution} "
            f"{vllm.release}) is for CUDA; reload it on a GPU (`reload_device: cuda`), or give "
            "--accept-cpu-evidence"
        )
    require_passed(evidence, where)
    return evidence
