"""The artifact store: objects under keys, each complete or absent, whoever is killed when.

A write goes to a hidden file in the target's own folder, is synced, and gets its name in one
step. Conditional writes decide races: of any number of writers exactly one wins, the others get
ConflictError.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import stat as stat_module
import uuid
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, cast

from tensorize_assets.core import layout
from tensorize_assets.core.errors import ConflictError, StoreError
from tensorize_assets.core.jsonio import MAX_BYTES

CHUNK_BYTES = 4 * 1024 * 1024

_LOCKS = f"{layout.HIDDEN_PREFIX}locks"


class StoredObject(NamedTuple):
    """A small object as it was read, with the ETag that a conditional write compares."""

    data: bytes
    etag: str


class FileDigest(NamedTuple):
    """The size in bytes and the SHA-256 (hex) of what one pass over a file read."""

    size: int
    sha256: str


class Store(Protocol):
    """What the product asks of a store. Keys are those of `layout`."""

    def uri(self, key: str) -> str:
        """Return how `key` is called in messages."""
        ...

    def put_file(
        self,
        key: str,
        path: Path,
        *,
        sha256: str | None = None,
        move: bool = False,
        just_read: FileDigest | None = None,
    ) -> FileDigest:
        """Store the file at `path` under `key`, whatever is there now.

        The file is read once; what was read is hashed and, when `sha256` is given, compared
        with it before the object appears. With `move` the file is gone afterwards; the store
        takes the file itself instead of a copy where it can. Then `just_read`, what the caller
        found in the file when it read it back, is believed instead of reading it once more.

        Raises StoreError when the hash differs (nothing is stored) or the store refuses.
        """
        ...

    def put_bytes(
        self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None
    ) -> str:
        """Store `data` under `key` and return its ETag.

        Raises ConflictError when `if_absent` is set and the object exists, or when `if_match`
        is given and the object is absent or has another ETag.
        """
        ...

    def get_bytes(self, key: str) -> StoredObject | None:
        """Return a small object, or None when it is absent.

        Raises StoreError for an object above 64 MiB: those are read with `open_read`.
        """
        ...

    def open_read(self, key: str, start: int = 0, end: int | None = None) -> BinaryIO:
        """Open the bytes `start` to `end` (exclusive, None for all) of an object.

        Raises StoreError when it is absent.
        """
        ...

    def stat(self, key: str) -> int | None:
        """Return the size of an object in bytes, or None when it is absent."""
        ...

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return the keys that start with `prefix`, sorted."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; one that is absent already is no error."""
        ...

    def local_path(self, key: str) -> Path | None:
        """Return where `key`, a file or a folder, is or would be on this machine's disk.

        None when the store is not on a disk.
        """
        ...


def open_store(root: str) -> Store:
    """Return the store at `root`, a folder; it is made by the first write.

    Raises StoreError for a root that is no folder.
    """
    scheme, separator, _ = root.partition("://")
    if separator:
        raise StoreError(
            f"root {scheme}://… is not in this release: only folders are; "
            "set `root` in the catalog to the path of a folder"
        )
    if not root:
        raise StoreError("the store has no root; set `root` in the catalog to a folder")
    path = Path(root).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise StoreError(f"root {path} is not a folder; set `root` in the catalog to one")
    return LocalStore(path)


def digest(store: Store, key: str) -> FileDigest:
    """Read an object once and return its size and hash. Raises StoreError when absent."""
    with store.open_read(key) as stream, _explained("read", store.uri(key)):
        return _drain(stream, None)


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
        just_read: FileDigest | None = None,
    ) -> FileDigest:
        target = self._path(key)
        with _explained("store", f"{path} as {target}"):
            _make_folder(target.parent)
            _sweep(target.parent)
            if move and _is_ours_alone(path, target.parent):
                with path.open("rb") as source:
                    found = just_read or _drain(source, None)
                    _compare(found, sha256, path, target)
                    os.fsync(source.fileno())
                with self._locked(key):
                    os.replace(path, target)
                    _sync_folder(target.parent)
                return found
            with _hidden_file(target.parent) as (temp, descriptor):
                with path.open("rb") as source:
                    found = _drain(source, descriptor)
                _compare(found, sha256, path, target)
                os.fsync(descriptor)
                with self._locked(key):
                    os.replace(temp, target)
                    _sync_folder(target.parent)
            if move:
                path.unlink(missing_ok=True)
            return found

    def put_bytes(
        self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None
    ) -> str:
        target = self._path(key)
        with _explained("write", str(target)):
            _make_folder(target.parent)
            _sweep(target.parent)
            with _hidden_file(target.parent) as (temp, descriptor):
                _write_all(descriptor, data)
                os.fsync(descriptor)
                if if_absent:
                    _link_new(temp, target)
                else:
                    with self._locked(key):
                        if if_match is not None:
                            self._require_etag(key, if_match)
                        os.replace(temp, target)
                _sync_folder(target.parent)
        return _etag(data)

    def get_bytes(self, key: str) -> StoredObject | None:
        path = self._path(key)
        with _explained("read", str(path)):
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

    def open_read(self, key: str, start: int = 0, end: int | None = None) -> BinaryIO:
        path = self._path(key)
        if start < 0 or (end is not None and end < start):
            raise StoreError(f"{path} has no bytes {start} to {end}; ask for a range that exists")
        with _explained("read", str(path)):
            stream = _open_file(path)
            if stream is None:
                raise StoreError(f"{path} does not exist; build it again")
            stream.seek(start)
            if end is None:
                return stream
            return cast("BinaryIO", io.BufferedReader(_Range(stream, end - start)))

    def stat(self, key: str) -> int | None:
        path = self._path(key)
        with _explained("read", str(path)):
            try:
                status = path.stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
        return status.st_size if stat_module.S_ISREG(status.st_mode) else None

    def list(self, prefix: str) -> tuple[str, ...]:
        folder, _, _ = prefix.rpartition("/")
        start = self._path(folder) if folder else self.root
        with _explained("list", str(start)):
            keys = (path.relative_to(self.root).as_posix() for path in _walk(start))
            return tuple(sorted(key for key in keys if key.startswith(prefix)))

    def delete(self, key: str) -> None:
        path = self._path(key)
        with _explained("delete", str(path)):
            if not os.path.lexists(path):
                return
            with self._locked(key):
                path.unlink(missing_ok=True)
                _sync_folder(path.parent)

    def local_path(self, key: str) -> Path | None:
        return self._path(key)

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
        if current is None:
            raise ConflictError(f"{self.uri(key)} was removed since it was read; read it again")
        if current.etag != etag:
            raise ConflictError(f"{self.uri(key)} changed since it was read; read it again")

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


def _drain(source: BinaryIO, descriptor: int | None) -> FileDigest:
    """Read `source` to its end, hashing and, with a descriptor, writing what was read."""
    hasher = hashlib.sha256()
    size = 0
    while chunk := source.read(CHUNK_BYTES):
        hasher.update(chunk)
        size += len(chunk)
        if descriptor is not None:
            _write_all(descriptor, chunk)
    return FileDigest(size, hasher.hexdigest())


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _compare(found: FileDigest, expected: str | None, path: Path, target: Path) -> None:
    if expected is not None and found.sha256 != expected:
        raise StoreError(
            f"{path} is not what was to be stored as {target}: its {found.size} bytes have "
            f"SHA-256 {found.sha256}, expected {expected}; nothing was stored; make the file again"
        )


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


def _is_hidden(name: str) -> bool:
    return name.startswith(layout.HIDDEN_PREFIX)


def _make_folder(folder: Path) -> None:
    """Make `folder` and its parents, each durable before anything is put into it."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
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


def _sweep(folder: Path) -> None:
    """Remove what killed writers left in `folder`; it may be as large as a shard."""
    with os.scandir(folder) as entries:
        left = [entry for entry in entries if _is_hidden(entry.name)]
    for entry in left:
        if not entry.is_file(follow_symlinks=False):
            continue
        try:
            descriptor = os.open(entry.path, os.O_RDWR)
        except OSError:
            continue  # gone, or another account's: not ours to remove
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(entry.path)
        except (BlockingIOError, FileNotFoundError):
            pass  # its writer lives, or has just finished
        finally:
            os.close(descriptor)


def _link_new(temp: Path, target: Path) -> None:
    try:
        os.link(temp, target)
    except FileExistsError:
        raise ConflictError(f"{target} exists already; it is written once") from None


_ADVICE = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there, or raise the quota",
    errno.EACCES: "give this user access to it",
    errno.EPERM: "give this user access to it, and use a file system that has hard links",
    errno.EROFS: "mount it writable, or set another `root` in the catalog",
    errno.EISDIR: "a folder has the object's name: move it away",
    errno.ENOTDIR: "a file has the name of one of its folders: move it away",
    errno.EEXIST: "a file has the name of one of its folders: move it away",
    errno.ENOENT: "it or its folder is gone: make it again",
    errno.ENOTSUP: "use a file system that has hard links and locks",
    errno.ENOLCK: "use a file system that has locks",
}


@contextmanager
def _explained(action: str, what: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "check the disk")
        raise StoreError(f"cannot {action} {what}: {error.strerror}; {advice}") from error
