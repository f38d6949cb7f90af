"""The files of Hub repos in the store, where workers on other machines read them.

Each file lies there once, named by its SHA-256, whatever revisions have it. A list for each commit
comes last: without it a snapshot is in the mirror for no reader. The list says only that all is
there. What a file is to be is known from elsewhere, and every byte is held against that.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock
from typing import Literal, NamedTuple

from tensorize_assets.core import block_hashes, jsonio, layout, lease
from tensorize_assets.core.block_hashes import LARGEST_FILE, BlockHasher
from tensorize_assets.core.errors import ConflictError, StoreError, StoreUnavailableError
from tensorize_assets.core.manifest import FileEntry
from tensorize_assets.core.signing import SecretKey
from tensorize_assets.core.store import CHUNK_BYTES, ListedObject, Store, StoredObject, read_chunks

Progress = Callable[[int, int], None]
"""Called with the bytes that are done, and how many there are in all."""

# A large file goes in parts, many at a time, through some 100 MB of memory: one after another.
LARGE_BYTES = 16 * 1024 * 1024
_SMALL_AT_ONCE = 8
_IN_PARTS = ".safetensors"
_TRIES = 5
_PROGRESS_S = 1.0
_LEFT_S = 24 * 3600.0


class SnapshotList(jsonio.Record):
    """What the mirror has of one commit; sorted by path."""

    model: jsonio.ModelId
    commit: jsonio.Commit
    weights_format: Literal["safetensors", "bin"]
    files: tuple[FileEntry, ...]


class Upload(NamedTuple):
    """What an upload did: bytes that it sent, and bytes that were there already."""

    sent_bytes: int
    kept_bytes: int


def read_list(store: Store, model: str, commit: str) -> SnapshotList | None:
    """Return what the mirror has of a commit; None where there is no list, or no valid one."""
    found = store.get_bytes(layout.snapshot_key(model, commit))
    return found and _decode(found, model, commit)


def holds(store: Store, model: str, commit: str, files: Iterable[FileEntry]) -> bool:
    """Say whether the mirror has just these files of a commit, as its list says."""
    found = read_list(store, model, commit)
    return found is not None and set(files) <= set(found.files)


def missing(store: Store, model: str, files: Iterable[FileEntry]) -> tuple[FileEntry, ...]:
    """Return those of `files` that are not there with their size; each content once."""
    wanted = list({file.sha256: file for file in files}.values())

    def is_missing(file: FileEntry) -> bool:
        return store.stat(layout.snapshot_file_key(model, file.sha256)) != file.size

    with ThreadPoolExecutor(_SMALL_AT_ONCE) as pool:
        absent = list(pool.map(is_missing, wanted))
    return tuple(file for file, gone in zip(wanted, absent, strict=True) if gone)


def without_blocks(store: Store, model: str, files: Iterable[FileEntry]) -> tuple[FileEntry, ...]:
    """Return the safetensors among `files` that no list of blocks is of; each content once."""
    wanted = list({one.sha256: one for one in files if _has_blocks(one)}.values())
    keys = [layout.snapshot_blocks_key(model, file.sha256) for file in wanted]
    with ThreadPoolExecutor(_SMALL_AT_ONCE) as pool:
        sizes = list(pool.map(store.stat, keys))
    return tuple(file for file, size in zip(wanted, sizes, strict=True) if size is None)


def _has_blocks(file: FileEntry) -> bool:
    return file.path.endswith(_IN_PARTS) and file.size <= LARGEST_FILE


def files_in_use(
    store: Store, model: str, objects: Iterable[ListedObject]
) -> frozenset[str] | None:
    """Return the keys of a repo's mirrored files that the lists among `objects` name.

    None where that is not known: a list is damaged, or a commit is being mirrored, and what it has
    stands in no list yet.
    """
    used: set[str] = set()
    for found in objects:
        of = layout.mirrored(found.key)
        if of is None or of.repo != model or of.commit is None:
            continue
        if of.name == "lease":
            # One that was not written for a day was left by a run that died.
            if time.time() - found.modified < _LEFT_S and not _is_free(store, found.key):
                return None
            continue
        stored = store.get_bytes(found.key)
        listed = stored and _decode(stored, model, of.commit)
        if listed is None:
            return None
        used.update(layout.snapshot_file_key(model, file.sha256) for file in listed.files)
        used.update(layout.snapshot_blocks_key(model, file.sha256) for file in listed.files)
    return frozenset(used)


def upload(
    store: Store,
    snapshot: SnapshotList,
    folder: Path,
    progress: Progress | None = None,
    key: SecretKey | None = None,
) -> Upload:
    """Bring the files of `snapshot`, which are in `folder`, into the mirror, its list last.

    With a `key` safetensors get a signed list of their blocks too, by which parts can be read.

    What is there is not sent again, so that an upload that was interrupted goes on where it was.
    Every file is read once, and hashed as it is sent. `progress` is called about once a second.

    Raises StoreError for a file that is not what `snapshot` says, and what the store refuses.
    """
    model = snapshot.model
    absent = missing(store, model, snapshot.files)
    total = sum({file.sha256: file.size for file in snapshot.files}.values())
    kept = total - sum(file.size for file in absent)
    counted = _Counted(kept)

    def send(file: FileEntry) -> None:
        path = folder / file.path
        hasher = BlockHasher()
        hashed = hasher.passing(counted(read_chunks(path)))
        place = layout.snapshot_file_key(model, file.sha256)
        try:
            store.put_file(place, path, sha256=file.sha256, chunks=hashed)
        except StoreError:
            # Another commit has the same file, and who mirrors that one was first: it ends the
            # uploads that began before its own.
            if store.stat(place) != file.size:
                raise
            return
        if key is not None and _has_blocks(file):
            _write_blocks(store, model, file, hasher.finish(), key)

    _each(send, absent, counted, total, progress)
    for file in set(snapshot.files) - set(absent):
        if file.size > CHUNK_BYTES:
            # Uploads that killed runs began of a file that is there: nobody puts it again.
            store.sweep(layout.snapshot_file_key(model, file.sha256), 0)
    if key is not None:
        for file in without_blocks(store, model, snapshot.files):
            _write_blocks(store, model, file, _hashes_of(folder / file.path, file), key)
    _write_list(store, snapshot)
    # Files that nothing named until now may have been removed since they were found there.
    gone = missing(store, model, snapshot.files)
    _each(send, gone, counted, total, None)
    return Upload(total - kept, kept)


def download(
    store: Store,
    model: str,
    files: Sequence[FileEntry],
    place: Callable[[FileEntry], Path],
    progress: Progress | None = None,
) -> None:
    """Write each file to its `place`, which appears complete and right, or not at all.

    Large ones come in parts, many at a time, and one after another: memory does not grow with
    their number or size. `progress` is called about once a second.

    Raises StoreError for a file that is gone from the mirror, or is not what its entry says.
    """
    total = sum(file.size for file in files)
    counted = _Counted(0)

    def fetch(file: FileEntry) -> None:
        key = layout.snapshot_file_key(model, file.sha256)
        try:
            store.get_file(key, place(file), sha256=file.sha256)
        except StoreUnavailableError:
            raise
        except StoreError as error:
            raise StoreError(
                f"{file.path} of {model} cannot be taken from the mirror: {error}. Remove "
                f"{store.uri(key)} if it is there, and materialize hf_snapshot again"
            ) from error
        counted.add(file.size)

    _each(fetch, files, counted, total, progress)


def chunks(store: Store, model: str, file: FileEntry) -> Iterator[bytes]:
    """Yield the bytes of a mirrored file; whoever takes them compares their hash."""
    with store.open_read(layout.snapshot_file_key(model, file.sha256)) as stream:
        while chunk := stream.read(1024 * 1024):
            yield chunk


class _Counted:
    """Bytes that are done, by any thread; `stop` ends those that pass through."""

    def __init__(self, done: int) -> None:
        self.done = done
        self._lock = Lock()
        self._stopped = Event()

    def __call__(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            if self._stopped.is_set():
                raise StoreError("stopped, because another file failed or the run was ended")
            yield chunk
            self.add(len(chunk))

    def add(self, count: int) -> None:
        with self._lock:
            self.done += count

    def stop(self) -> None:
        self._stopped.set()


def _each(
    do: Callable[[FileEntry], None],
    files: Sequence[FileEntry],
    counted: _Counted,
    total: int,
    progress: Progress | None,
) -> None:
    """Do it for each file: for small ones many at a time, for large ones one after another."""
    large = [file for file in files if file.size > LARGE_BYTES]
    small = [file for file in files if file.size <= LARGE_BYTES]
    with ThreadPoolExecutor(_SMALL_AT_ONCE) as some, ThreadPoolExecutor(1) as one:
        pending: set[Future[None]] = {
            *(some.submit(do, file) for file in small),
            *(one.submit(do, file) for file in large),
        }
        try:
            while pending:
                done, pending = wait(pending, _PROGRESS_S, FIRST_COMPLETED)
                for future in done:
                    future.result()
                if progress is not None:
                    progress(counted.done, total)
        except BaseException:
            # Files that are complete stay; the rest is not worth waiting for.
            counted.stop()
            for future in pending:
                future.cancel()
            raise


def _hashes_of(path: Path, file: FileEntry) -> bytes:
    """The hashes of a file's blocks. Raises StoreError where it is not what its entry says."""
    hasher, whole = BlockHasher(), hashlib.sha256()
    for chunk in hasher.passing(read_chunks(path)):
        whole.update(chunk)
    if whole.hexdigest() != file.sha256:
        raise StoreError(
            f"{path} is not the file that was downloaded, or the disk has damaged it; remove it, "
            "and materialize hf_snapshot again"
        )
    return hasher.finish()


def _write_blocks(store: Store, model: str, file: FileEntry, hashes: bytes, key: SecretKey) -> None:
    """Sign and write the list of a file's blocks, in place of whatever is there."""
    place = layout.snapshot_blocks_key(model, file.sha256)
    store.put_bytes(place, block_hashes.encode(file.sha256, file.size, hashes, key))


def _write_list(store: Store, snapshot: SnapshotList) -> None:
    """Write the list of a commit, or add to it: other releases may choose other files."""
    key = layout.snapshot_key(snapshot.model, snapshot.commit)
    for attempt in range(_TRIES):
        found = store.get_bytes(key)
        known = found and _decode(found, snapshot.model, snapshot.commit)
        files = {file.path: file for file in (*(known.files if known else ()), *snapshot.files)}
        merged = snapshot.model_copy(update={"files": tuple(files[path] for path in sorted(files))})
        if merged == known:
            return
        data = jsonio.canonical(jsonio.dump_record(merged), store.uri(key))
        try:
            if found is None:
                store.put_bytes(key, data, if_absent=True)
            else:
                store.put_bytes(key, data, if_match=found.etag)
            return
        except ConflictError:
            if attempt == _TRIES - 1:
                raise


def _is_free(store: Store, key: str) -> bool:
    found = lease.read(store, key)
    return found is not None and found.free


def _decode(found: StoredObject, model: str, commit: str) -> SnapshotList | None:
    # A damaged one is none: it is written anew.
    with suppress(StoreError):
        read = jsonio.load_record(SnapshotList, found.data, layout.snapshot_key(model, commit))
        if (read.model, read.commit) == (model, commit):
            return read
    return None
