"""A folder as an artifact store.

A write goes to a hidden file in the target's own folder, is synced, and gets its name in one
step, and the folder is synced.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import stat as stat_module
import time
import uuid
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from tensorize_assets.core import layout
from tensorize_assets.core.errors import StoreError
from tensorize_assets.core.jsonio import MAX_BYTES
from tensorize_assets.core.ranged import RangeSource, Stopped
from tensorize_assets.core.store import (
    CHUNK_BYTES,
    FileDigest,
    Hasher,
    ListedObject,
    Reader,
    StoredObject,
    conflict,
    explained,
    read_chunks,
    require_same,
)

_LOCKS = f"{layout.HIDDEN_PREFIX}locks"
_COPY_BYTES = 1024 * 1024 * 1024


@dataclass(frozen=True)
class LocalStore:
    """A folder as a store. See `Store` for what each method promises."""

    root: Path

    def uri(self, key: str) -> str:
        return str(self.root / key)

    def put_file(
        self,
        key: str,
        path: Path,
        *,
        sha256: str | None = None,
        move: bool = False,
        chunks: Iterable[bytes] | None = None,
    ) -> FileDigest:
        target = self._path(key)
        action = f"{path} as {target}"
        with explained("store", action):
            _make_folder(target.parent)
            _sweep(target.parent, 0)
            status = path.stat()
            size = status.st_size if stat_module.S_ISREG(status.st_mode) else None
            rename = move and _is_ours_alone(path, target.parent)
        given = read_chunks(path) if chunks is None else chunks
        if rename:
            hasher = Hasher()
            for chunk in given:
                hasher.update(chunk)
            found = hasher.digest()
            require_same(found, size, sha256, str(path), str(target))
            with explained("store", action):
                with path.open("rb") as source:
                    os.fsync(source.fileno())
                with self._locked(key):
                    os.replace(path, target)
                    sync_folder(target.parent)
            return found
        found = self._put(key, given, size, sha256, str(path))
        if move:
            with explained("remove", str(path)):
                path.unlink(missing_ok=True)
        return found

    def put_stream(
        self, key: str, chunks: Iterable[bytes], *, size: int, sha256: str | None = None
    ) -> FileDigest:
        folder = self._path(key).parent
        with explained("store", self.uri(key)):
            _make_folder(folder)
            _sweep(folder, 0)
        return self._put(key, chunks, size, sha256, "the stream")

    def put_bytes(
        self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None
    ) -> str:
        target = self._path(key)
        with explained("write", str(target)):
            _make_folder(target.parent)
            _sweep(target.parent, 0)
            with _hidden_file(target.parent) as (temp, descriptor):
                write_all(descriptor, data)
                os.fsync(descriptor)
                if if_absent:
                    _link_new(temp, target)
                else:
                    with self._locked(key):
                        if if_match is not None:
                            self._require_etag(key, if_match)
                        os.replace(temp, target)
                sync_folder(target.parent)
        return _etag(data)

    def get_bytes(self, key: str) -> StoredObject | None:
        path = self._path(key)
        with explained("read", str(path)):
            stream = _open_file(path)
            if stream is None:
                return None
            with stream:
                data = stream.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise StoreError(
                f"{path} has more than {MAX_BYTES} bytes, far above any document of this package; "
                "restore it or build it again"
            )
        return StoredObject(data, _etag(data))

    def get_file(self, key: str, path: Path, *, sha256: str | None = None) -> FileDigest:
        hasher = Hasher()
        with self.open_read(key) as stream, new_file(path, self.uri(key)) as descriptor:
            while chunk := stream.read(CHUNK_BYTES):
                hasher.update(chunk)
                write_all(descriptor, chunk)
            found = hasher.digest()
            require_same(found, None, sha256, self.uri(key), str(path))
        return found

    def open_read(self, key: str, start: int = 0, end: int | None = None) -> BinaryIO:
        path = self._path(key)
        if start < 0 or (end is not None and end < start):
            raise StoreError(f"{path} has no bytes {start} to {end}; ask for a range that exists")
        with explained("read", str(path)):
            stream = _open_file(path)
            if stream is None:
                raise StoreError(f"{path} does not exist; build it again")
            stream.seek(start)
            if end is None:
                return stream
            return cast("BinaryIO", io.BufferedReader(_Range(stream, end - start)))

    def ranges(self, key: str) -> RangeSource:
        path = self._path(key)
        with explained("read", str(path)):
            stream = _open_file(path)
            if stream is None:
                raise StoreError(f"{path} does not exist; build it again")
            return _FileRanges(str(path), stream)

    def copy(self, source_key: str, key: str, *, source: Reader | None = None) -> bool:
        origin = self if source is None else source
        if not isinstance(origin, LocalStore):
            return False
        target = self._path(key)
        with (
            origin.open_read(source_key) as stream,
            explained("copy", f"{origin.uri(source_key)} to {target}"),
        ):
            _make_folder(target.parent)
            _sweep(target.parent, 0)
            with _hidden_file(target.parent) as (temp, descriptor):
                if not copy_in_kernel(stream.fileno(), descriptor):
                    return False
                os.fsync(descriptor)
                with self._locked(key):
                    os.replace(temp, target)
                    sync_folder(target.parent)
        return True

    def stat(self, key: str) -> int | None:
        path = self._path(key)
        with explained("read", str(path)):
            try:
                status = path.stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
        return status.st_size if stat_module.S_ISREG(status.st_mode) else None

    def list(self, prefix: str) -> tuple[str, ...]:
        return tuple(key for key, _ in self._entries(prefix))

    def listing(self, prefix: str) -> tuple[ListedObject, ...]:
        found: list[ListedObject] = []
        for key, path in self._entries(prefix):
            with explained("read", str(path)), suppress(FileNotFoundError):
                status = path.lstat()
                found.append(ListedObject(key, status.st_size, status.st_mtime))
        return tuple(found)

    def _entries(self, prefix: str) -> list[tuple[str, Path]]:
        """The keys that start with `prefix`, sorted, and their files."""
        folder, _, _ = prefix.rpartition("/")
        start = self._path(folder) if folder else self.root
        with explained("list", str(start)):
            found = ((path.relative_to(self.root).as_posix(), path) for path in _walk(start))
            return sorted((key, path) for key, path in found if key.startswith(prefix))

    def delete(self, key: str) -> None:
        path = self._path(key)
        with explained("delete", str(path)):
            if not os.path.lexists(path):
                return
            with self._locked(key):
                path.unlink(missing_ok=True)
                sync_folder(path.parent)

    def sweep(self, prefix: str, older_than_s: float) -> int:
        folder, _, name = prefix.rpartition("/")
        start = self._path(folder) if folder else self.root
        with explained("sweep", str(start)):
            # In the folder itself a hidden file does not tell of which object it is.
            count = 0 if name else _sweep(start, older_than_s)
            for below in _folders(start):
                if below.relative_to(self.root).as_posix().startswith(prefix):
                    count += _sweep(below, older_than_s)
        return count

    def local_path(self, key: str) -> Path:
        return self._path(key)

    def _put(
        self, key: str, chunks: Iterable[bytes], size: int | None, sha256: str | None, source: str
    ) -> FileDigest:
        target = self._path(key)
        action = f"{source} as {target}"
        hasher = Hasher()
        with _hidden_file(target.parent) as (temp, descriptor):
            # Errors of `chunks` are not the store's, so that only what it does is explained.
            for chunk in chunks:
                hasher.update(chunk)
                if size is not None and hasher.size > size:
                    # Before it fills the disk.
                    break
                with explained("store", action):
                    write_all(descriptor, chunk)
            found = hasher.digest()
            require_same(found, size, sha256, source, str(target))
            with explained("store", action):
                os.fsync(descriptor)
                with self._locked(key):
                    os.replace(temp, target)
                    sync_folder(target.parent)
        return found

    def _path(self, key: str) -> Path:
        """Return the path of `key`; StoreError when a link in it leads out of the root."""
        path = self.root.joinpath(*layout.check_key(key).split("/"))
        root = os.path.realpath(self.root)
        real = os.path.realpath(path)
        if os.path.commonpath([root, real]) != root:
            raise StoreError(
                f"{path} leads out of the store, to {real}: a symbolic link is in the way; "
                "remove it, or copy what it names into the store"
            )
        return path

    def _require_etag(self, key: str, etag: str) -> None:
        current = self.get_bytes(key)
        if current is None or current.etag != etag:
            raise conflict(self.uri(key), there=current is not None)

    @contextmanager
    def _locked(self, key: str) -> Generator[None]:
        """Hold the lock of `key` against every other process and thread.

        Locks are a bounded set of files apart from the objects: a lock file beside its object
        would end in artifact directories, and one that is removed after use no longer excludes.
        """
        folder = self.root / _LOCKS
        folder.mkdir(exist_ok=True)
        name = hashlib.sha256(key.encode()).hexdigest()[:2]
        descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            # flock, not POSIX locks: those do not hold between threads of one process.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            # Said, not left to close: a child forked meanwhile has the descriptor open too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


@contextmanager
def new_file(path: Path, what: str) -> Generator[int]:
    """Open a file that gets the name `path` when the context ends well, and else none.

    Errors of the file system become StoreError; `what` is called as written.
    """
    with explained("write", f"{what} to {path}"):
        _make_folder(path.parent)
        _sweep(path.parent, 0)
        with _hidden_file(path.parent) as (temp, descriptor):
            yield descriptor
            os.fsync(descriptor)
            os.replace(temp, path)
            sync_folder(path.parent)


class _FileRanges:
    """A file as a RangeSource."""

    def __init__(self, uri: str, stream: BinaryIO) -> None:
        found = os.fstat(stream.fileno())
        self.uri = uri
        self.size = found.st_size
        self.version = f"{found.st_ino}-{found.st_mtime_ns}"
        self._stream = stream

    def read_into(self, start: int, buffer: memoryview, stopped: Stopped) -> None:
        done = 0
        with explained("read", self.uri):
            while done < len(buffer) and not stopped():
                count = os.preadv(self._stream.fileno(), [buffer[done:]], start + done)
                if not count:
                    raise StoreError(
                        f"{self.uri} ends within bytes that were there; build it again"
                    )
                done += count


class _Range(io.RawIOBase):
    """The next `length` bytes of a stream; closes it when closed."""

    def __init__(self, stream: BinaryIO, length: int) -> None:
        self._stream = stream
        self._left = length

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        data = self._stream.read(min(len(buffer), self._left))
        buffer[: len(data)] = data
        self._left -= len(data)
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of `data` at the file's position. Raises OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def copy_in_kernel(source: int, target: int) -> bool:
    """Copy a whole file, sharing its blocks where the disk can; False where the kernel cannot."""
    try:
        while os.copy_file_range(source, target, _COPY_BYTES):
            pass
    except OSError as error:
        # Between file systems, or on one that does not know it.
        if error.errno in (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
            return False
        raise
    return True


def _is_ours_alone(path: Path, folder: Path) -> bool:
    """Say whether a rename puts this very file, and nothing that others can change, in place."""
    status = path.lstat()
    # A link would be moved instead of its file, and a second hard link could change what is stored.
    return (
        stat_module.S_ISREG(status.st_mode)
        and status.st_nlink == 1
        and status.st_dev == folder.stat().st_dev
    )


def _open_file(path: Path) -> BinaryIO | None:
    """Open a regular file, or return None when there is no such object."""
    try:
        # Non-blocking, since a pipe put in the object's place would hold the reader forever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat_module.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    return os.fdopen(descriptor, "rb")


def _walk(folder: Path) -> Iterator[Path]:
    """Yield everything below `folder` that is no folder and not the store's own."""
    try:
        with os.scandir(folder) as entries:
            found = [entry for entry in entries if not _is_hidden(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in found:
        # A link to a folder is named, not followed: it may lead out, or in a circle.
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path))
        else:
            yield Path(entry.path)


def _folders(folder: Path) -> Iterator[Path]:
    """Yield every folder below `folder` that is not the store's own."""
    try:
        with os.scandir(folder) as entries:
            found = [
                Path(entry.path)
                for entry in entries
                if entry.is_dir(follow_symlinks=False) and not _is_hidden(entry.name)
            ]
    except (FileNotFoundError, NotADirectoryError):
        return
    for below in found:
        yield below
        yield from _folders(below)


def _is_hidden(name: str) -> bool:
    return name.startswith(layout.HIDDEN_PREFIX)


def _make_folder(folder: Path) -> None:
    """Make `folder` and its parents, each durable before anything is put into it."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder outlive a power cut. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _hidden_file(folder: Path) -> Generator[tuple[Path, int]]:
    """Make a file that no listing shows; whatever still has its name at the end is removed.

    Its lock lives as long as its writer, so that `_sweep` can tell a killed writer's file.
    """
    with explained("write to", str(folder)):
        temp, descriptor = _create_locked(folder)
    try:
        yield temp, descriptor
    finally:
        temp.unlink(missing_ok=True)
        os.close(descriptor)


def _create_locked(folder: Path) -> tuple[Path, int]:
    while True:
        temp = folder / f"{layout.HIDDEN_PREFIX}{uuid.uuid4().hex}"
        # Not mkstemp: its mode 0600 would hide the artifact from the account that serves it.
        descriptor = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # A sweep between the two calls took the file for a killed writer's.
        if temp.exists():
            return temp, descriptor
        os.close(descriptor)


def _sweep(folder: Path, older_than_s: float) -> int:
    """Remove what killed writers left in `folder`; it may be as large as a shard."""
    try:
        with os.scandir(folder) as entries:
            left = [entry for entry in entries if _is_hidden(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return 0
    latest = time.time() - older_than_s
    count = 0
    for entry in left:
        if not entry.is_file(follow_symlinks=False):
            continue
        try:
            descriptor = os.open(entry.path, os.O_RDWR)
        except OSError:
            continue  # gone, or another account's: not ours to remove
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if older_than_s and os.fstat(descriptor).st_mtime > latest:
                continue
            os.unlink(entry.path)
            count += 1
        except (BlockingIOError, FileNotFoundError):
            pass  # its writer lives, or has just finished
        finally:
            os.close(descriptor)
    return count


def _link_new(temp: Path, target: Path) -> None:
    try:
        os.link(temp, target)
    except FileExistsError:
        raise conflict(str(target), there=True, once=True) from None
