"""The artifact store: objects under keys, each complete or absent, whoever is killed when.

A root is a folder or s3://bucket/prefix, and both keep the same promises. Conditional writes
decide races: of any number of writers exactly one wins, the others get ConflictError.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Protocol

from tensorize_assets.core.errors import ConflictError, StoreError

if TYPE_CHECKING:
    from tensorize_assets.core.ranged import RangeSource
    from tensorize_assets.core.s3 import S3Access

CHUNK_BYTES = 4 * 1024 * 1024


class StoredObject(NamedTuple):
    """A small object as it was read, with the ETag that a conditional write compares."""

    data: bytes
    etag: str


class ListedObject(NamedTuple):
    """An object as a listing shows it: its size in bytes, and when it was written.

    `modified` is in seconds of the epoch, by the store's clock.
    """

    key: str
    size: int
    modified: float


class FileDigest(NamedTuple):
    """The size in bytes and the SHA-256 (hex) of what one pass over a file read."""

    size: int
    sha256: str


class Reader(Protocol):
    """What it takes to read an artifact directory. As `Store`, which does more."""

    def uri(self, key: str) -> str:
        """Return how `key` is called in messages."""
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


class Store(Reader, Protocol):
    """What the product asks of a store. Keys are those of `layout`.

    Everything raises StoreError for what the store refuses, StoreUnavailableError for trouble
    on the way to it.
    """

    def put_file(
        self,
        key: str,
        path: Path,
        *,
        sha256: str | None = None,
        move: bool = False,
        chunks: Iterable[bytes] | None = None,
    ) -> FileDigest:
        """Store the file at `path` under `key`, whatever is there now.

        The file is read once, by the store or by whoever yields it as `chunks`: every byte in
        order. What was read is hashed and, when `sha256` is given, compared with it before the
        object appears. An error that `chunks` raises, also after the last byte, passes through,
        and nothing is stored. With `move` the file is gone afterwards; the store takes the file
        itself instead of a copy where it can.

        Raises StoreError when the hash, or the size of what came, differs; nothing is stored.
        """
        ...

    def put_stream(
        self, key: str, chunks: Iterable[bytes], *, size: int, sha256: str | None = None
    ) -> FileDigest:
        """Store the `size` bytes that `chunks` yields, as `put_file` stores a file's."""
        ...

    def put_bytes(
        self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None
    ) -> str:
        """Store `data` under `key` and return its ETag.

        An object store may count an object that holds just `data` as written by this call: the
        answer to its first attempt may have been lost.

        Raises ConflictError when `if_absent` is set and the object exists, or when `if_match`
        is given and the object is absent or has another ETag.
        """
        ...

    def get_file(self, key: str, path: Path, *, sha256: str | None = None) -> FileDigest:
        """Write an object to the file `path`, in place of one that is there.

        Raises StoreError when the object is absent or its hash differs; then `path` stays as it
        was.
        """
        ...

    def copy(self, source_key: str, key: str, *, source: Reader | None = None) -> bool:
        """Copy an object of `source` (None: this store) without its bytes passing through here.

        Returns False, with nothing done, where the two stores cannot do that. Raises StoreError
        when the object is absent.
        """
        ...

    def ranges(self, key: str) -> RangeSource:
        """Return an object any parts of which can be read, by any thread, untried a second time.

        Raises StoreError when it is absent.
        """
        ...

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return the keys that start with `prefix`, sorted."""
        ...

    def listing(self, prefix: str) -> tuple[ListedObject, ...]:
        """Return what `list` does, with sizes and times, sorted by key."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; one that is absent already is no error."""
        ...

    def sweep(self, prefix: str, older_than_s: float) -> int:
        """Remove what killed writers left under `prefix`; return how many pieces that were.

        On a disk these are files without a living writer, in S3 multipart uploads and hidden
        objects, all of them begun more than `older_than_s` seconds ago.
        """
        ...

    def local_path(self, key: str) -> Path | None:
        """Return where `key`, a file or a folder, is or would be on this machine's disk.

        None when the store is not on a disk.
        """
        ...


def open_store(root: str, access: S3Access | None = None) -> Store:
    """Return the store at `root`, a folder or s3://bucket/prefix.

    A folder is made by the first write, a bucket is not. `access` None: S3 is reached as
    `s3.from_environment` says.

    Raises StoreError for a root that is neither.
    """
    # Not before a root asks for it: boto3 takes long to import, and these do not import it.
    from tensorize_assets.core.s3 import from_environment, is_other_url, is_s3

    if is_s3(root):
        from tensorize_assets.core.s3_store import S3Store

        return S3Store(root, access or from_environment())
    if is_other_url(root):
        raise StoreError(
            f"root {root.partition(':')[0]}:… is no store; set `root` in the catalog to "
            "s3://bucket/prefix or to the path of a folder"
        )
    if not root:
        raise StoreError(
            "the store has no root; set `root` in the catalog to s3://bucket/prefix or a folder"
        )
    from tensorize_assets.core.local_store import LocalStore

    path = Path(root).expanduser().absolute()
    with explained("look into", str(path)):
        wrong = path.exists() and not path.is_dir()
    if wrong:
        raise StoreError(f"root {path} is not a folder; set `root` in the catalog to one")
    return LocalStore(path)


def digest(store: Reader, key: str) -> FileDigest:
    """Read an object once and return its size and hash. Raises StoreError when absent."""
    with store.open_read(key) as stream, explained("read", store.uri(key)):
        hasher = Hasher()
        while chunk := stream.read(CHUNK_BYTES):
            hasher.update(chunk)
        return hasher.digest()


# What the backends share


class Hasher:
    """Counts and hashes what passes; hashlib lets go of the interpreter lock meanwhile."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self.size = 0

    def update(self, chunk: bytes | memoryview) -> None:
        self._sha256.update(chunk)
        self.size += len(chunk)

    def digest(self) -> FileDigest:
        return FileDigest(self.size, self._sha256.hexdigest())


def read_chunks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file. Raises StoreError for one that cannot be read."""
    with explained("read", str(path)), path.open("rb") as source:
        while chunk := source.read(CHUNK_BYTES):
            yield chunk


def require_same(
    found: FileDigest, size: int | None, sha256: str | None, source: str, target: str
) -> None:
    """Raise StoreError when what came from `source` is not what was to be stored or fetched."""
    if size is not None and found.size != size:
        raise StoreError(
            f"{source} gave {found.size} bytes for {target}, expected {size}: it changed while it "
            "was read; nothing was written there; make it again"
        )
    if sha256 is not None and found.sha256 != sha256:
        raise StoreError(
            f"{source} is not what belongs at {target}: its {found.size} bytes have SHA-256 "
            f"{found.sha256}, expected {sha256}; nothing was written there; make it again"
        )


def conflict(what: str, *, there: bool, once: bool = False) -> ConflictError:
    """Return the error of a conditional write that lost.

    `there` says whether there is an object now, `once` whether none was to be.
    """
    if once:
        return ConflictError(f"{what} exists already; it is written once")
    how = "changed" if there else "was removed"
    return ConflictError(f"{what} {how} since it was read; read it again")


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
def explained(action: str, what: str) -> Generator[None]:
    """Turn errors of the file system into StoreError."""
    try:
        yield
    except OSError as error:
        said = error.strerror or error
        raise StoreError(f"cannot {action} {what}: {said}; {advice(error)}") from error


def advice(error: OSError) -> str:
    """Return what to do about an error of the file system."""
    return _ADVICE.get(error.errno or 0, "check the disk")
