"""Every byte of what came from the Hub, against what it declares.

What was checked is remembered in the repo's folder of the cache, so that no file is hashed twice.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from huggingface_hub.utils import WeakFileLock

from tensorize_assets.core import jsonio
from tensorize_assets.core.errors import HubError, HubUnavailableError, StoreError
from tensorize_assets.core.hub_access import (
    SAID_CHARS,
    HubAccess,
    cache_dir_of,
    endpoint_of,
    repo_dir_of,
)
from tensorize_assets.core.hub_config import read_json
from tensorize_assets.core.hub_files import INDEXES, HubFile, RevisionListing, SnapshotFile
from tensorize_assets.core.jsonio import Commit, Record, Sha256
from tensorize_assets.core.printable import printable

_HASHES_AT_ONCE = 4
_CHUNK = 4 * 1024 * 1024

_logger = logging.getLogger(__name__)


def verify_files(
    access: HubAccess, listing: RevisionListing, folder: Path
) -> tuple[SnapshotFile, ...]:
    """Hash what was not yet hashed of a listing's files in `folder`, and return them all.

    Raises:
        HubError: some are not what the Hub declares; their copies are removed.
        HubUnavailableError: some are gone.
    """
    memory = repo_dir_of(access, listing.model) / ".tensorize_assets"
    memory.mkdir(parents=True, exist_ok=True)
    sidecar = memory / f"{listing.commit}.json"
    # Concurrent runs wait for the first one's hashes instead of reading everything again.
    with WeakFileLock(memory / f"{listing.commit}.lock"):
        known = _read_verified(sidecar)

        def measure(file: HubFile) -> _Measured:
            return _measure(folder / file.path, file, known.get(file.path))

        with ThreadPoolExecutor(_HASHES_AT_ONCE) as pool:
            measured = list(pool.map(measure, listing.files))
        problems = {
            file.path: problem
            for file, found in zip(listing.files, measured, strict=True)
            if (problem := _mismatch(file, found))
        }
        good = {
            file.path: found
            for file, found in zip(listing.files, measured, strict=True)
            if file.path not in problems
        }
        if known | good != known:
            _write_verified(sidecar, known | good)
        for path in problems:
            _discard(cache_dir_of(access), folder / path)
    if problems:
        raise HubError(
            f"{listing.model}@{listing.commit} from {endpoint_of(access)} is damaged: "
            + "; ".join(problems.values())
            + ". The copy was removed from the cache; run again to download it anew"
        )
    return tuple(
        SnapshotFile(path=path, size=found.size, sha256=found.sha256)
        for path, found in sorted(good.items())
    )


def check_index(listing: RevisionListing, folder: Path) -> None:
    """See that the commit has every file that its index of weights names.

    Raises:
        HubError: it has not, or the index is none.
    """
    index = INDEXES[listing.weights_format]
    paths = {file.path for file in listing.files}
    if index not in paths:
        return
    weight_map = read_json(folder / index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise HubError(f"{index} of {listing.model}@{listing.commit} has no weight_map")
    absent = sorted({printable(str(name)[:SAID_CHARS]) for name in weight_map.values()} - paths)
    if absent:
        raise HubError(
            f"{listing.model}@{listing.commit} is incomplete on the Hub: {index} names "
            f"{', '.join(absent[:5])}, which the commit does not have; choose another revision"
        )


class _Measured(Record):
    """A file as it was hashed. Only files outside LFS have a Git id to compare."""

    size: int
    mtime_ns: int
    sha256: Sha256
    git_blob_id: Commit | None


class _Verified(Record):
    files: dict[str, _Measured]


def _measure(path: Path, file: HubFile, known: _Measured | None) -> _Measured:
    try:
        stat = path.stat()
    except FileNotFoundError:
        raise HubUnavailableError(
            f"{path} is gone after its download: another run may have found it damaged, or the "
            "cache was cleaned meanwhile; run again"
        ) from None
    if (
        known is not None
        and (known.size, known.mtime_ns) == (stat.st_size, stat.st_mtime_ns)
        and (file.lfs_sha256 or known.git_blob_id)
    ):
        return known
    started = time.monotonic()
    sha256, git_blob_id = _hash(path, None if file.lfs_sha256 else stat.st_size)
    _logger.info(
        "hashed %s: %d bytes in %.1f s", file.path, stat.st_size, time.monotonic() - started
    )
    return _Measured(
        size=stat.st_size, mtime_ns=stat.st_mtime_ns, sha256=sha256, git_blob_id=git_blob_id
    )


def _hash(path: Path, git_size: int | None) -> tuple[str, str | None]:
    sha256 = hashlib.sha256()
    git = None if git_size is None else hashlib.sha1(b"blob %d\0" % git_size)
    buffer = memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            sha256.update(buffer[:count])
            if git is not None:
                git.update(buffer[:count])
    return sha256.hexdigest(), None if git is None else git.hexdigest()


def _mismatch(file: HubFile, found: _Measured) -> str | None:
    if found.size != file.size:
        return f"{file.path}: expected {file.size} bytes, found {found.size}"
    if file.lfs_sha256 is None:
        if found.git_blob_id != file.git_blob_id:
            return f"{file.path}: expected Git blob {file.git_blob_id}, found {found.git_blob_id}"
    elif found.sha256 != file.lfs_sha256:
        return f"{file.path}: expected SHA-256 {file.lfs_sha256}, found {found.sha256}"
    return None


def _read_verified(sidecar: Path) -> dict[str, _Measured]:
    try:
        return jsonio.load_record(_Verified, sidecar.read_bytes(), str(sidecar)).files
    except (OSError, StoreError):
        # It only saves time: without it every file is hashed.
        return {}


def _write_verified(sidecar: Path, files: dict[str, _Measured]) -> None:
    data = jsonio.canonical(jsonio.dump_record(_Verified(files=files)), str(sidecar))
    half_written = sidecar.with_name(f"{sidecar.name}.{uuid.uuid4().hex}.tmp")
    half_written.write_bytes(data)
    half_written.replace(sidecar)


def _discard(cache_dir: Path, pointer: Path) -> None:
    """Remove a snapshot's file with all that it links to inside the cache."""
    path = Path(os.path.abspath(pointer))
    while path.is_relative_to(cache_dir):
        target = path.parent / path.readlink() if path.is_symlink() else None
        path.unlink(missing_ok=True)
        if target is None:
            return
        path = Path(os.path.abspath(target))
