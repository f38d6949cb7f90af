"""Snapshots on this machine: where a launcher has put them, or brought here from the mirror.

What comes from the mirror is kept in a cache that all workers of a machine share, since the next
task of a build wants the same files: `files/SHA256`, and for each set of files that was asked for a
folder of hard links. What nobody uses goes, the longest unused first, when something else needs the
room: at the end of a task the files would have to come once more for the next one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from tensorize_assets.core import jsonio, mirror
from tensorize_assets.core.errors import PreflightError, WorkerError
from tensorize_assets.core.manifest import FileEntry
from tensorize_assets.core.s3 import S3Settings
from tensorize_assets.core.tasks import MirroredSnapshot, SnapshotSource
from tensorize_assets.worker.access import store_of
from tensorize_assets.worker.session import Progress

CACHE_VARIABLE = "TENSORIZE_SNAPSHOT_CACHE"
"""Names the folder of the cache. Without it: in the folder for temporary files."""

CACHE_BYTES_VARIABLE = "TENSORIZE_SNAPSHOT_CACHE_BYTES"
"""The most bytes that stay in the cache unused. Without it: half of its disk."""

_FILES = "files"
_COLUMNS = "-columns"
_HALF_MADE = ".part"
_LOCK = ".lock"
_LOOK_S = 0.2
_WEIGHTS = (".safetensors", ".bin")

# Open locks of what this process uses: it is in use until the process, or what it forked, ends.
_used: dict[Path, int] = {}


def is_small(file: FileEntry) -> bool:
    """Whether a file of a snapshot is no weights: config, tokenizer, an index."""
    return not file.path.endswith(_WEIGHTS)


def local_folder(
    source: SnapshotSource,
    root: str | None,
    s3: S3Settings | None,
    progress: Progress,
    wanted: Callable[[FileEntry], bool] = lambda _: True,
) -> Path:
    """Return a folder that has the files of a snapshot, of a mirrored one just those `wanted`.

    It stays until this process ends. Every file from the mirror has the SHA-256 that `source` says.
    Of several workers on one machine one downloads, and the others wait for it.

    Raises:
        PreflightError: the disk has no room, or the cache is not this user's alone.
        StoreError: a file is not in the mirror, or is another one there.
        WorkerError: the source is mirrored and the request has no root.
    """
    if source.folder is not None:
        return Path(source.folder)
    assert source.mirrored is not None
    if root is None:
        raise WorkerError(f"{source.mirrored.model} is in the mirror of a root that is not named")
    files = tuple(file for file in source.mirrored.files if wanted(file))
    cache = _cache()
    folder = cache / _name(source.mirrored, files)
    if folder in _used:
        return folder
    snapshot = source.mirrored.model_copy(update={"files": files})
    said = False
    # It is made by whoever holds its lock alone, and used under a lock that is shared.
    while (lock := _lock(folder, fcntl.LOCK_SH)) is None or not folder.is_dir():
        if lock is not None:
            os.close(lock)
        alone = _lock(folder, fcntl.LOCK_EX)
        if alone is not None:
            try:
                if not folder.is_dir():
                    _make(cache, folder, snapshot, root, s3, progress)
            finally:
                os.close(alone)
            continue
        if not said:
            said = True
            progress.log(f"waiting for another worker of this machine, which brings {folder.name}")
        progress.update("waiting for another worker's download")
        time.sleep(_LOOK_S)
    # What was used last goes last.
    os.utime(lock)
    _used[folder] = lock
    return folder


def columns(snapshot: MirroredSnapshot) -> Path:
    """Return a folder of the cache for tensors of which each rank takes columns.

    Ranks that share this machine read each of them once. It stays until this process ends.

    Raises PreflightError as `local_folder`.
    """
    cache = _cache()
    folder = cache / f"{_name(snapshot, snapshot.files)}{_COLUMNS}"
    if folder in _used:
        return folder
    if not folder.is_dir():
        # Of a Llama they are a third, and no more is known before the first rank is built.
        needed = sum(file.size for file in snapshot.files if not is_small(file)) // 3
        _make_room(cache, needed, f"{snapshot.model}@{snapshot.commit[:12]}")
    while (lock := _lock(folder, fcntl.LOCK_SH)) is None:
        time.sleep(_LOOK_S)
    folder.mkdir(exist_ok=True)
    os.utime(lock)
    _used[folder] = lock
    return folder


def _cache() -> Path:
    named = os.environ.get(CACHE_VARIABLE)
    user = os.getuid()
    cache = Path(named or Path(tempfile.gettempdir(), f"tensorize-assets-snapshots-{user}"))
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = cache.stat() if named else cache.lstat()
        (cache / _FILES).mkdir(exist_ok=True)
    except OSError as error:
        raise PreflightError(
            f"{cache}, for snapshots from the mirror, cannot be used: {error.strerror}; set "
            f"{CACHE_VARIABLE} to a folder of this worker's own"
        ) from error
    # Whoever can write there could put other files in the place of verified ones.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & 0o022:
        raise PreflightError(
            f"{cache}, for snapshots from the mirror, is not this user's alone: chmod 700 it, or "
            f"set {CACHE_VARIABLE} to another folder"
        )
    return cache


def _name(snapshot: MirroredSnapshot, files: Sequence[FileEntry]) -> str:
    """A name for just these files with just this content."""
    listed = {file.path: file.sha256 for file in files}
    digest = hashlib.sha256(jsonio.canonical(listed)).hexdigest()
    return f"{snapshot.model.replace('/', '--')[:100]}-{snapshot.commit[:12]}-{digest[:32]}"


def _make(
    cache: Path,
    folder: Path,
    snapshot: MirroredSnapshot,
    root: str,
    s3: S3Settings | None,
    progress: Progress,
) -> None:
    """Make the folder, complete or not at all; what of the files is in the cache is not read."""
    half = folder.with_name(f"{folder.name}{_HALF_MADE}")
    _remove(half)
    half.mkdir()
    files = {file.sha256: file for file in snapshot.files}
    absent = [file for file in files.values() if not _link(cache, half, file, snapshot.files)]
    needed = sum(file.size for file in absent)
    if absent:
        _make_room(cache, needed, f"{snapshot.model}@{snapshot.commit[:12]}")

    def place(file: FileEntry) -> Path:
        return half / f"{_HALF_MADE}-{file.sha256}"

    def downloaded(done: int, total: int) -> None:
        progress.update("reading the snapshot from the mirror", bytes_done=done, bytes_total=total)

    def keep(file: FileEntry) -> None:
        _link_to(place(file), half, file, snapshot.files)
        # Last, so that it has another name wherever it is seen. If another worker has brought it
        # meanwhile, either is right.
        os.replace(place(file), _file(cache, file))

    began = time.monotonic()
    store = store_of(root, s3)
    for batch in _batches(absent):
        mirror.download(store, snapshot.model, batch, place, downloaded)
        # At once: what is complete stays, whatever becomes of the rest.
        for file in batch:
            keep(file)
    half.rename(folder)
    if absent:
        progress.log(
            f"{len(absent)} files of {snapshot.model} came from the mirror, {needed:,} bytes in "
            f"{time.monotonic() - began:.1f} s; {len(files) - len(absent)} were here"
        )


def _batches(files: Sequence[FileEntry]) -> Iterator[Sequence[FileEntry]]:
    """All small ones together, and each large one by itself."""
    small = [file for file in files if file.size <= mirror.LARGE_BYTES]
    if small:
        yield small
    for file in files:
        if file.size > mirror.LARGE_BYTES:
            yield [file]


def _file(cache: Path, file: FileEntry) -> Path:
    return cache / _FILES / file.sha256


def _link(cache: Path, half: Path, file: FileEntry, files: Sequence[FileEntry]) -> bool:
    """Link a file from the cache to each of its places; False where the cache has it not."""
    source = _file(cache, file)
    try:
        if source.stat().st_size != file.size:
            source.unlink()
            return False
        _link_to(source, half, file, files)
    except FileNotFoundError:
        return False
    return True


def _link_to(source: Path, half: Path, file: FileEntry, files: Sequence[FileEntry]) -> None:
    for one in files:
        if one.sha256 == file.sha256:
            target = half / one.path
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(source, target)


# Room


def _make_room(cache: Path, needed: int, what: str) -> None:
    """Remove what nobody uses until `needed` bytes fit. Raises PreflightError where they do not."""
    most = _most(cache)
    for left in cache.glob(f"{_HALF_MADE}-*"):
        shutil.rmtree(left, ignore_errors=True)
    unused = sorted(cache.glob(f"*{_LOCK}"), key=_last_used)
    while unused and (needed > shutil.disk_usage(cache).free or _kept(cache) + needed > most):
        _forget(cache, unused.pop(0))
    free = shutil.disk_usage(cache).free
    if needed > free:
        raise PreflightError(
            f"{what} needs {needed:,} bytes in {cache}, which has {free:,} free: set "
            f"{CACHE_VARIABLE} to a folder of a larger disk"
        )


def _most(cache: Path) -> int:
    said = os.environ.get(CACHE_BYTES_VARIABLE)
    if not said:
        return shutil.disk_usage(cache).total // 2
    if not said.isdecimal():
        raise PreflightError(f"{CACHE_BYTES_VARIABLE} is {said!r}; write a number of bytes")
    return int(said)


def _last_used(lock: Path) -> float:
    with suppress(FileNotFoundError):
        return lock.stat().st_mtime
    return 0.0


def _kept(cache: Path) -> int:
    total = 0
    for file in (*cache.glob(f"{_FILES}/*"), *cache.glob(f"*{_COLUMNS}/*")):
        # Others may remove it meanwhile.
        with suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


def _forget(cache: Path, lock: Path) -> None:
    """Remove a folder that no process uses, and the files that no other folder has."""
    folder = lock.with_name(lock.name.removesuffix(_LOCK))
    descriptor = _lock(folder, fcntl.LOCK_EX)
    if descriptor is None:
        return
    try:
        _remove(folder)
        _remove(folder.with_name(f"{folder.name}{_HALF_MADE}"))
        lock.unlink()
    finally:
        os.close(descriptor)
    for entry in os.scandir(cache / _FILES):
        with suppress(FileNotFoundError):
            if entry.stat().st_nlink == 1:
                os.unlink(entry.path)


def _remove(folder: Path) -> None:
    # Under another name first: half of a folder is none.
    aside = folder.with_name(f"{_HALF_MADE}-{uuid.uuid4().hex}")
    with suppress(FileNotFoundError):
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


# Locks


def _lock(folder: Path, kind: int) -> int | None:
    """Lock a folder of the cache, alone or shared; return the open lock, None if others hold it."""
    path = folder.with_name(f"{folder.name}{_LOCK}")
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        # Whoever held it before may have removed the file between our open and our lock.
        held, there = os.fstat(descriptor), os.stat(path)
        if (held.st_dev, held.st_ino) == (there.st_dev, there.st_ino):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None
