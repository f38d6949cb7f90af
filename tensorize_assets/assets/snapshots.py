"""Snapshots as manifests and workers have them."""

from tensorize_assets.core import hub
from tensorize_assets.core.manifest import FileEntry, SnapshotEntry
from tensorize_assets.core.records import AdapterRecord
from tensorize_assets.core.tasks import AdapterSnapshot


def snapshot_entry(snapshot: hub.Snapshot) -> SnapshotEntry:
    """A snapshot as manifests have it."""
    return SnapshotEntry(
        revision=snapshot.revision,
        commit=snapshot.commit,
        files=tuple(
            FileEntry(path=file.path, size=file.size, sha256=file.sha256) for file in snapshot.files
        ),
        weights_format=snapshot.weights_format,
    )


def local_adapter(access: hub.HubAccess, adapter: AdapterRecord) -> AdapterSnapshot:
    """An adapter as a worker is given it, its files downloaded again where they are gone.

    Raises as `hub.ensure_local`.
    """
    found = adapter.snapshot
    return AdapterSnapshot(
        name=adapter.name,
        repo=found.model,
        snapshot=snapshot_entry(found),
        folder=str(hub.ensure_local(access, found, adapter=True)),
    )
