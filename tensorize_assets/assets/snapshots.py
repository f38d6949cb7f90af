"""Snapshots as manifests and workers have them: in a folder of this machine, or in the mirror."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import dagster as dg

from tensorize_assets.assets.target import Target
from tensorize_assets.core import hub, mirror, mirroring
from tensorize_assets.core.errors import CatalogError, HubError
from tensorize_assets.core.hub_access import HubAccess
from tensorize_assets.core.hub_download import Progress
from tensorize_assets.core.hub_files import Snapshot
from tensorize_assets.core.manifest import SnapshotEntry
from tensorize_assets.core.protocol import format_bytes
from tensorize_assets.core.records import AdapterRecord
from tensorize_assets.core.store import Store
from tensorize_assets.core.tasks import AdapterSnapshot, MirroredSnapshot, SnapshotSource
from tensorize_assets.resources.catalog import CatalogResource
from tensorize_assets.resources.hub import HubResource
from tensorize_assets.resources.keyring import KeyringResource
from tensorize_assets.resources.launchers.base import Launcher

_SAID_EVERY_S = 10.0


def snapshot_entry(snapshot: Snapshot) -> SnapshotEntry:
    """A snapshot as manifests have it."""
    return SnapshotEntry(
        revision=snapshot.revision,
        commit=snapshot.commit,
        files=mirroring.entries_of(snapshot),
        weights_format=snapshot.weights_format,
    )


class Snapshots(NamedTuple):
    """What a step needs to find snapshots, and to hand them to workers."""

    context: dg.AssetExecutionContext
    target: Target
    catalog: CatalogResource
    launcher: Launcher
    store: Store
    access: HubAccess
    keyring: KeyringResource

    @classmethod
    def of(
        cls,
        context: dg.AssetExecutionContext,
        target: Target,
        catalog: CatalogResource,
        launcher: Launcher,
        store: Store,
        hub_resource: HubResource,
        keyring: KeyringResource,
    ) -> Snapshots:
        """Those of a step."""
        return cls(context, target, catalog, launcher, store, hub_resource.access(), keyring)

    @property
    def work(self) -> mirroring.Work:
        """What `mirroring` needs."""
        return mirroring.Work(
            self.store, self.access, self.context.log.info, self.progress, self.keyring.key()
        )

    def are_mirrored(self, repo: str) -> bool:
        """Whether what is taken of a repo goes to the mirror.

        Raises CatalogError where workers could read it nowhere else, and the catalog forbids it.
        """
        catalog, shared = self.catalog.catalog(), self.launcher.shares_disks
        rules = catalog.snapshots
        secret = self.target.profile.encryption == "only" or catalog.is_encrypted_only(repo)
        forbidden = secret and not rules.encrypted_only
        if shared:
            return rules.mirror == "always" and not forbidden
        where = f"{self.target.model} {self.target.suffix}"
        needed = (
            f"{where}: this launcher's workers see no folder of this machine, and read {repo} from "
            "the mirror in the root"
        )
        if rules.mirror == "never":
            raise CatalogError(
                f"{needed}, which the catalog turns off: set snapshots: {{mirror: auto}}, or build "
                "it with launcher: subprocess"
            )
        if forbidden:
            raise CatalogError(
                f"{needed}. A profile of it is `encryption: only`, and the mirror is no secret: "
                "set snapshots: {encrypted_only: true} to have its files there as the Hub has "
                "them, or build it with launcher: subprocess, whose workers read the Hub's cache"
            )
        return True

    def require_allowed(self, repos: Sequence[str]) -> None:
        """Raise CatalogError for the first repo that workers may not be given."""
        for repo in repos:
            self.are_mirrored(repo)

    def source(self, snapshot: Snapshot, *, adapter: bool = False) -> SnapshotSource:
        """Where workers find a snapshot that was checked before; brought there if it is gone.

        Raises as `hub.ensure_local` and `mirroring.bring` do, and as `are_mirrored`.
        """
        if self.launcher.shares_disks:
            folder = hub.local_path(self.access, snapshot)
            if folder is not None:
                return SnapshotSource(folder=str(folder))
        files = mirroring.entries_of(snapshot)
        mirrored = self.are_mirrored(snapshot.model)
        held = mirror.holds(self.store, snapshot.model, snapshot.commit, files)
        # A list says what was there, and a damaged file is to be removed.
        if not held or mirror.missing(self.store, snapshot.model, files):
            if not mirrored:
                folder = hub.ensure_local(self.access, snapshot, adapter=adapter)
                return SnapshotSource(folder=str(folder))
            self._bring_again(snapshot, adapter)
        return SnapshotSource(
            mirrored=MirroredSnapshot(
                model=snapshot.model,
                commit=snapshot.commit,
                files=files,
                trusted=self.keyring.trusted(),
            )
        )

    def adapter(self, adapter: AdapterRecord) -> AdapterSnapshot:
        """An adapter as a worker is given it. Raises as `source`."""
        found = adapter.snapshot
        return AdapterSnapshot(
            name=adapter.name,
            repo=found.model,
            snapshot=snapshot_entry(found),
            source=self.source(found, adapter=True),
        )

    def progress(self, repo: str, done_is: str) -> Progress:
        """Says in the log, now and then, how many bytes are done."""
        said_at = time.monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal said_at
            if time.monotonic() - said_at >= _SAID_EVERY_S:
                said_at = time.monotonic()
                self.context.log.info(
                    f"{repo}: {format_bytes(done)} of {format_bytes(total)} {done_is}"
                )

        return progress

    def _bring_again(self, snapshot: Snapshot, adapter: bool) -> None:
        if adapter:
            listing = mirroring.resolve_adapter(self.work, snapshot.model, snapshot.commit)
        else:
            listing = hub.resolve(self.access, snapshot.model, snapshot.commit)
        again = mirroring.bring(self.work, listing).snapshot
        if again.files != snapshot.files:
            raise HubError(
                f"{snapshot.model}@{snapshot.commit} has other files now than when it was "
                "resolved; materialize hf_snapshot again"
            )
