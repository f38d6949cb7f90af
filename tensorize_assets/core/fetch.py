"""Brings a build that may be served to a folder, which is a root of its own afterwards."""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from tensorize_assets.core import layout, sealing
from tensorize_assets.core.channel import read_channel
from tensorize_assets.core.copy import Say, copy_build, is_same_place
from tensorize_assets.core.errors import HistoryError, ManifestError, StoreError
from tensorize_assets.core.http_folder import HttpFolder
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.served import Served
from tensorize_assets.core.store import Reader, Store, explained


class FetchReport(NamedTuple):
    """What was fetched: bytes, and bytes per second, of the files that were not kept."""

    model: str
    suffix: str
    build_id: str
    directory: str
    entry: int
    files: int
    bytes: int
    seconds: float
    bytes_per_second: float
    kept: int
    kept_bytes: int


def fetch(
    source: Store | HttpFolder,
    served: Served,
    folder: Path,
    trusted: Collection[str],
    say: Say,
) -> FetchReport:
    """Copy a build to `folder` with all that it takes to serve it from there, the channel last.

    What is there with the right hash is kept, so that a fetch that was killed goes on where it
    was. The channel is copied as it was signed: it may name builds that are not there.

    Raises:
        HistoryError: the channel in `folder` is newer, or another one.
        StoreError: the disk has no room for the build, or as `copy_build` does.
        ManifestError, SignatureError, EvidenceError: as `copy_build` does.
        SealingError: the key of an encrypted build is not there.
    """
    begun = time.monotonic()
    target = LocalStore(folder)
    if is_same_place(source, target):
        raise StoreError(f"{folder} is the root that was to be fetched from; give another folder")
    manifest = served.manifest
    _require_newer(target, served, trusted)
    _require_room(target, served)
    if served.key_id is not None:
        _copy_key(source, target, served.key_id, trusted)
    report = copy_build(source, served.directory, target, trusted, say)
    if report.manifest_sha256 != served.manifest_sha256:
        raise ManifestError(
            f"{source.uri(served.directory)} was replaced while it was fetched; fetch it again"
        )
    target.put_bytes(layout.channel_key(manifest.model, manifest.suffix), served.channel.data)
    seconds = time.monotonic() - begun
    return FetchReport(
        model=manifest.model,
        suffix=manifest.suffix,
        build_id=manifest.build_id,
        directory=served.directory,
        entry=served.entry.number,
        files=report.copied,
        bytes=report.copied_bytes,
        seconds=round(seconds, 3),
        bytes_per_second=round(report.copied_bytes / seconds),
        kept=report.kept,
        kept_bytes=sum(file.size for file in manifest.files) - report.copied_bytes,
    )


def _require_newer(target: LocalStore, served: Served, trusted: Collection[str]) -> None:
    """Where no home keeps marks, what was fetched before is one."""
    manifest, entries = served.manifest, served.channel.channel.entries
    there = read_channel(target, manifest.model, manifest.suffix, trusted)
    if there is not None and there.channel.entries != entries[: len(there.channel.entries)]:
        where = target.uri(layout.channel_key(manifest.model, manifest.suffix))
        raise HistoryError(
            f"{where} is no earlier state of the channel that was to be fetched, which ends at "
            f"entry {len(entries)}: an old one was put back, or another one in its place. Restore "
            f"it; or if that is meant to be so, remove {where}"
        )


def _require_room(target: LocalStore, served: Served) -> None:
    needed = sum(
        file.size
        for file in served.manifest.files
        if target.stat(layout.file_key(served.directory, file.path)) != file.size
    )
    folder = target.root.absolute()
    with explained("look into", str(folder)):
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
    if needed > free:
        raise StoreError(
            f"{target.root} has {free:,} bytes free, and {needed:,} more are needed for build "
            f"{served.manifest.build_id} of {served.manifest.model} {served.manifest.suffix}; "
            "nothing was fetched: free some space there, or give another folder"
        )


def _copy_key(source: Reader, target: LocalStore, key_id: str, trusted: Collection[str]) -> None:
    """As it is sealed: who serves opens it."""
    record = sealing.read_record(source, key_id, trusted).record
    seals = [layout.seal_key(key_id, name) for name in record.recipients]
    # The record last: without it there is no such key.
    for place in (*seals, layout.key_record_key(key_id)):
        found = source.get_bytes(place)
        if found is not None:
            target.put_bytes(place, found.data)
