"""A prefix of an S3 bucket as an artifact store.

A file goes up in parts, each with a checksum that the server compares, and appears when the upload
is completed, which is after everything about it is known to be right; whatever stops before that
aborts the upload. What a killed run left is aborted by the next put of the same object.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import io
import mmap
import os
import queue
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import tenacity

from tensorize_assets.core import layout
from tensorize_assets.core.errors import ConflictError, StoreError, StoreUnavailableError
from tensorize_assets.core.jsonio import MAX_BYTES
from tensorize_assets.core.local_store import new_file
from tensorize_assets.core.ranged import RangedReader, S3Source, Stopped
from tensorize_assets.core.s3 import S3Access, code_of, explained, split_uri
from tensorize_assets.core.store import (
    FileDigest,
    Hasher,
    Store,
    StoredObject,
    read_chunks,
    require_same,
)
from tensorize_assets.core.store import explained as explained_file

_MiB = 1024 * 1024

# Measured: larger parts or more threads are not faster, and all buffers stay below 160 MiB.
PART_BYTES = 16 * _MiB
_THREADS = 8
_BUFFERS_BYTES = 160 * _MiB

_STEP_BYTES = 1024 * 1024

# S3's own limits.
_MAX_PARTS = 10_000
_MAX_COPY_BYTES = 5 * 1024 * _MiB
_COPY_PART_BYTES = 256 * _MiB

_CONFLICT_ATTEMPTS = 5

_ABSENT = frozenset({"404", "NoSuchKey", "NotFound"})
_CANNOT = frozenset({"NotImplemented", "501", "MethodNotAllowed", "AccessDenied", "403"})
_REFUSED = frozenset({"PreconditionFailed", "412"})
_AT_ONCE = frozenset({"ConditionalRequestConflict", "409"})

# Servers and buckets that were seen to honour conditional writes, by this process.
_honour: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class S3Store:
    """s3://bucket/prefix as a store. See `Store` for what each method promises."""

    root: str
    access: S3Access

    def __post_init__(self) -> None:
        split_uri(self.root)

    def uri(self, key: str) -> str:
        return f"{self.root.rstrip('/')}/{key}"

    def put_file(
        self,
        key: str,
        path: Path,
        *,
        sha256: str | None = None,
        move: bool = False,
        chunks: Iterable[bytes] | None = None,
    ) -> FileDigest:
        with explained_file("store", f"{path} as {self.uri(key)}"):
            size = path.stat().st_size
        given = read_chunks(path) if chunks is None else chunks
        found = self._put(key, given, size, sha256, str(path))
        if move:
            with explained_file("remove", str(path)):
                path.unlink(missing_ok=True)
        return found

    def put_stream(
        self, key: str, chunks: Iterable[bytes], *, size: int, sha256: str | None = None
    ) -> FileDigest:
        return self._put(key, chunks, size, sha256, "the stream")

    def put_bytes(
        self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None
    ) -> str:
        if not if_absent and if_match is None:
            with self._explained("put", key):
                return self._client.put_object(**self._at(key), Body=data, **self._sum(data))[
                    "ETag"
                ]
        if not self._honours_conditions():
            self._compare_unsafely(key, if_match)
            return self.put_bytes(key, data)
        condition = {"IfNoneMatch": "*"} if if_absent else {"IfMatch": if_match}
        with self._explained("put", key):
            try:
                return self._put_if(key, data, condition)
            except self._client.exceptions.ClientError as error:
                if code_of(error) not in _REFUSED | _AT_ONCE | _ABSENT:
                    raise
                if code_of(error) in _ABSENT and self._bucket_is_missing():
                    raise
        return self._etag_if_ours(key, data, if_absent)

    def get_bytes(self, key: str) -> StoredObject | None:
        at = self._at(key)
        for attempt in tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_BrokenOff),
            stop=tenacity.stop_after_attempt(self.access.settings.max_attempts),
            wait=tenacity.wait_random_exponential(0.1, max=5),
            reraise=True,
        ):
            with attempt:
                return self._get_bytes(key, at)
        raise AssertionError  # not reached: the last attempt's error is raised

    def get_file(self, key: str, path: Path, *, sha256: str | None = None) -> FileDigest:
        hasher = Hasher()
        room = memoryview(bytearray(_STEP_BYTES))
        with new_file(path, self.uri(key)) as descriptor:
            with RangedReader(_Tee(self._source(key), descriptor)) as stream:
                while count := stream.readinto1(room):
                    hasher.update(room[:count])
            found = hasher.digest()
            require_same(found, stream.source.size, sha256, self.uri(key), str(path))
        return found

    def open_read(self, key: str, start: int = 0, end: int | None = None) -> BinaryIO:
        if start < 0 or (end is not None and end < start):
            raise StoreError(
                f"{self.uri(key)} has no bytes {start} to {end}; ask for a range that exists"
            )
        source = self._source(key)
        return cast("BinaryIO", RangedReader(source, min(start, source.size), end))

    def copy(self, source_key: str, key: str, *, source: Store | None = None) -> bool:
        at = self._at(key)
        origin = self if source is None else source
        if not isinstance(origin, S3Store) or not self._reaches(origin):
            return False
        head = origin._head(source_key)
        if head is None:
            raise StoreError(f"{origin.uri(source_key)} does not exist; build it again")
        size, etag = head
        copy_from = {"CopySource": origin._at(source_key), "CopySourceIfMatch": etag}
        try:
            with self._raw("copy", key):
                if size <= _MAX_COPY_BYTES:
                    self._client.copy_object(**at, **copy_from)
                else:
                    self._copy_parts(key, copy_from, size)
        except _Code as error:
            if error.code in _CANNOT:
                return False
            raise error.meaning from None
        return True

    def stat(self, key: str) -> int | None:
        head = self._head(key)
        return None if head is None else head[0]

    def list(self, prefix: str) -> tuple[str, ...]:
        folder, _, _ = prefix.rpartition("/")
        if folder:
            layout.check_key(folder)
        start = self._full(prefix)
        skip = len(self._full(""))
        with self._explained("list", prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=start
            )
            found = [entry["Key"][skip:] for page in pages for entry in page.get("Contents", ())]
        return tuple(sorted(key for key in found if not _is_hidden(key)))

    def delete(self, key: str) -> None:
        with self._explained("delete", key):
            self._client.delete_object(**self._at(key))

    def sweep(self, prefix: str, older_than_s: float) -> int:
        latest = time.time() - older_than_s
        count = 0
        for upload in self._uploads(prefix):
            if upload.begun <= latest:
                count += self._abort(upload.key, upload.id)
        return count

    def local_path(self, key: str) -> Path | None:
        layout.check_key(key)
        return None

    # Where

    @cached_property
    def _bucket(self) -> str:
        return split_uri(self.root)[0]

    @property
    def _client(self) -> Any:
        return self.access.client_for(self._bucket)

    def _full(self, key: str) -> str:
        prefix = split_uri(self.root)[1]
        return f"{prefix}/{key}" if prefix else key

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._full(layout.check_key(key))}

    def _source(self, key: str) -> S3Source:
        at = self._at(key)
        explain = partial(self._explained, "get", key)
        return S3Source(self._client, at["Bucket"], at["Key"], self.uri(key), explain)

    def _explained(self, verb: str, key: str) -> Any:
        return explained(verb, self.uri(key), self.access)

    @contextmanager
    def _raw(self, verb: str, key: str) -> Generator[None]:
        """Like `_explained`, for a caller that decides by S3's code what to do."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised again, unless it is S3's
            try:
                with self._explained(verb, key):
                    raise
            except StoreError as meaning:
                raise _Code(code_of(error), meaning) from None

    def _reaches(self, origin: S3Store) -> bool:
        """Say whether the server that holds this store can read `origin` by itself."""
        return (
            self._client.meta.endpoint_url == origin._client.meta.endpoint_url
            and self.access.credentials == origin.access.credentials
            and self.access.settings.profile == origin.access.settings.profile
        )

    def _head(self, key: str) -> tuple[int, str] | None:
        try:
            with self._raw("get", key):
                answer = self._client.head_object(**self._at(key))
        except _Code as error:
            if error.code not in _ABSENT:
                raise error.meaning from None
            # The answer to HEAD does not say which of the two is missing.
            self._require_bucket(key)
            return None
        return answer["ContentLength"], answer["ETag"]

    @cached_property
    def _seen(self) -> threading.Event:
        """Set once the bucket was seen to exist."""
        return threading.Event()

    def _require_bucket(self, key: str) -> None:
        if not self._seen.is_set():
            if self._bucket_is_missing():
                with self._explained("get", key):
                    self._client.list_objects_v2(Bucket=self._bucket, MaxKeys=1)
            self._seen.set()

    def _bucket_is_missing(self) -> bool:
        exceptions: Any = importlib.import_module("botocore.exceptions")
        try:
            self._client.head_bucket(Bucket=self._bucket)
        except (exceptions.ClientError, exceptions.BotoCoreError) as error:
            return code_of(error) in ("404", "NoSuchBucket")
        return False

    # Small objects

    def _get_bytes(self, key: str, at: dict[str, str]) -> StoredObject | None:
        try:
            with self._raw("get", key):
                answer = self._client.get_object(**at)
        except _Code as error:
            if error.code == "NoSuchKey":
                return None
            raise error.meaning from None
        with answer["Body"] as body:
            if answer["ContentLength"] > MAX_BYTES:
                raise StoreError(
                    f"{self.uri(key)} has more than {MAX_BYTES} bytes, far above any document of "
                    "this package; restore it or build it again"
                )
            try:
                with self._explained("get", key):
                    return StoredObject(body.read(), answer["ETag"])
            except StoreUnavailableError as error:
                raise _BrokenOff(str(error)) from None

    def _put_if(self, key: str, data: bytes, condition: dict[str, Any]) -> str:
        """Write under a condition; a write that meets another of the same moment comes again."""
        client_error: Any = self._client.exceptions.ClientError

        def at_once(error: BaseException) -> bool:
            return isinstance(error, client_error) and code_of(error) in _AT_ONCE

        return tenacity.Retrying(
            retry=tenacity.retry_if_exception(at_once),
            stop=tenacity.stop_after_attempt(_CONFLICT_ATTEMPTS),
            wait=tenacity.wait_random_exponential(0.05, max=1),
            reraise=True,
        )(self._client.put_object, **self._at(key), Body=data, **self._sum(data), **condition)[
            "ETag"
        ]

    def _etag_if_ours(self, key: str, data: bytes, if_absent: bool) -> str:
        """Return the ETag of what is there if it is what was written; else ConflictError.

        A refusal may also answer the second attempt of a write whose first was done, and its
        answer lost on the way.
        """
        current = self.get_bytes(key)
        if current is not None and current.data == data:
            return current.etag
        if if_absent:
            raise ConflictError(f"{self.uri(key)} exists already; it is written once")
        if current is None:
            raise ConflictError(f"{self.uri(key)} was removed since it was read; read it again")
        raise ConflictError(f"{self.uri(key)} changed since it was read; read it again")

    def _compare_unsafely(self, key: str, if_match: str | None) -> None:
        current = self.get_bytes(key)
        if if_match is None:
            if current is not None:
                raise ConflictError(f"{self.uri(key)} exists already; it is written once")
        elif current is None:
            raise ConflictError(f"{self.uri(key)} was removed since it was read; read it again")
        elif current.etag != if_match:
            raise ConflictError(f"{self.uri(key)} changed since it was read; read it again")

    def _honours_conditions(self) -> bool:
        """Say whether conditional writes decide races here; proven once a process.

        Raises StoreError when they do not, unless the settings take that risk: a server that
        ignores a condition answers as if it had been kept.
        """
        where = (self._client.meta.endpoint_url, self._bucket)
        if where in _honour:
            return True
        reason = self._why_not()
        if reason is None:
            _honour.add(where)
            return True
        if self.access.settings.unsafe_no_cas:
            return False
        raise StoreError(
            f"{self.root} at {self.access.endpoint} {reason}, so that two runs at once could "
            "overwrite each other's publication: use a server that honours If-None-Match and "
            "If-Match, or take the risk with `s3.unsafe_no_cas: true`"
        )

    def _why_not(self) -> str | None:
        """Return how the server fails at conditional writes, or None."""
        probe = f"{layout.HIDDEN_PREFIX}probe-{uuid.uuid4().hex}"
        at = {"Bucket": self._bucket, "Key": self._full(probe)}
        versions: list[str] = []

        def put(**condition: str) -> str:
            """Return S3's code of a refusal; empty when it was written."""
            try:
                with self._raw("put", probe):
                    answer = self._client.put_object(**at, Body=b"", **self._sum(b""), **condition)
            except _Code as error:
                if error.code in _REFUSED | {"NotImplemented", "501", "InvalidArgument", "400"}:
                    return error.code
                raise error.meaning from None
            if "VersionId" in answer:
                versions.append(answer["VersionId"])
            return ""

        try:
            first = put(IfNoneMatch="*")
            if first:
                return f"refuses conditional writes ({first})"
            if put(IfNoneMatch="*") not in _REFUSED:
                return "does not honour If-None-Match on PUT"
            if put(IfMatch='"00000000000000000000000000000000"') not in _REFUSED:
                return "does not honour If-Match on PUT"
            return None
        finally:
            self._remove_probe(at, versions)

    def _remove_probe(self, at: dict[str, str], versions: list[str]) -> None:
        exceptions: Any = importlib.import_module("botocore.exceptions")
        errors = (exceptions.ClientError, exceptions.BotoCoreError)
        # By their versions, so that a versioned bucket keeps nothing of it.
        for version in versions:
            with suppress(*errors):
                self._client.delete_object(**at, VersionId=version)
        if not versions:
            with suppress(*errors):
                self._client.delete_object(**at)

    # Large objects

    def _put(
        self, key: str, chunks: Iterable[bytes], size: int, sha256: str | None, source: str
    ) -> FileDigest:
        part_bytes = max(PART_BYTES, _round_up(-(-size // _MAX_PARTS), _MiB))
        if size > part_bytes:
            return self._put_parts(key, chunks, size, part_bytes, sha256, source)
        data = bytearray()
        hasher = Hasher()
        for chunk in _upto(size, chunks, hasher):
            data += chunk
        found = hasher.digest()
        require_same(found, size, sha256, source, self.uri(key))
        self.put_bytes(key, bytes(data))
        return found

    def _put_parts(
        self,
        key: str,
        chunks: Iterable[bytes],
        size: int,
        part_bytes: int,
        sha256: str | None,
        source: str,
    ) -> FileDigest:
        hasher = Hasher()
        at = self._at(key)
        # Asked before ours begins, so that no upload that begins after it is taken for a dead one.
        orphans = [upload for upload in self._uploads(key, "put") if upload.key == at["Key"]]
        upload = {**at, "UploadId": self._begin(key)}
        try:
            with _Sender(partial(self._send_part, key, upload), size, part_bytes) as sender:
                for chunk in _upto(size, chunks, hasher):
                    sender.send(chunk)
                parts = sender.finish()
            found = hasher.digest()
            require_same(found, size, sha256, source, self.uri(key))
            self._complete(key, upload, parts)
        except BaseException:
            self._abort(at["Key"], upload["UploadId"])
            raise
        for orphan in orphans:
            self._abort(orphan.key, orphan.id)
        return found

    def _begin(self, key: str) -> str:
        algorithm = {} if self._sums_by_md5 else {"ChecksumAlgorithm": "CRC32"}
        with self._explained("put", key):
            return self._client.create_multipart_upload(**self._at(key), **algorithm)["UploadId"]

    def _send_part(
        self, key: str, upload: dict[str, str], number: int, data: memoryview
    ) -> dict[str, Any]:
        checksum = self._sum(data)
        with self._explained("put", key):
            answer = self._client.upload_part(
                **upload, PartNumber=number, Body=_Body(data), **checksum
            )
        part = {"PartNumber": number, "ETag": answer["ETag"]}
        return part if self._sums_by_md5 else {**part, **checksum}

    def _complete(self, key: str, upload: dict[str, str], parts: list[dict[str, Any]]) -> None:
        try:
            with self._raw("put", key):
                self._client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
        except _Code as error:
            # It may have been completed by an attempt whose answer was lost.
            if error.code == "NoSuchUpload":
                head = self._head(key)
                if head is not None and head[1] == _multipart_etag(parts):
                    return
            raise error.meaning from None

    def _copy_parts(self, key: str, copy_from: dict[str, Any], size: int) -> None:
        upload = {**self._at(key), "UploadId": self._begin(key)}
        part_bytes = max(_COPY_PART_BYTES, _round_up(-(-size // _MAX_PARTS), _MiB))

        def copy_part(number: int) -> dict[str, Any]:
            start = (number - 1) * part_bytes
            end = min(start + part_bytes, size) - 1
            answer = self._client.upload_part_copy(
                **upload, PartNumber=number, CopySourceRange=f"bytes={start}-{end}", **copy_from
            )["CopyPartResult"]
            kept = {name: answer[name] for name in ("ETag", "ChecksumCRC32") if name in answer}
            return {"PartNumber": number, **kept}

        try:
            with ThreadPoolExecutor(_THREADS) as pool:
                futures = [
                    pool.submit(copy_part, number + 1) for number in range(-(-size // part_bytes))
                ]
                try:
                    parts = [future.result() for future in futures]
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
            self._complete(key, upload, parts)
        except BaseException:
            self._abort(upload["Key"], upload["UploadId"])
            raise

    def _uploads(self, prefix: str, verb: str = "list uploads of") -> list[_Upload]:
        """Return the unfinished uploads under `prefix`; none where that cannot be asked."""
        try:
            with self._raw(verb, prefix):
                pages = self._client.get_paginator("list_multipart_uploads").paginate(
                    Bucket=self._bucket, Prefix=self._full(prefix)
                )
                return [
                    _Upload(entry["Key"], entry["UploadId"], entry["Initiated"].timestamp())
                    for page in pages
                    for entry in page.get("Uploads", ())
                ]
        except _Code as error:
            if error.code in _CANNOT:
                return []
            raise error.meaning from None

    def _abort(self, key: str, upload: str) -> bool:
        """Abort an upload; one that cannot be aborted now is by the next put of the object."""
        exceptions: Any = importlib.import_module("botocore.exceptions")
        try:
            self._client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload)
        except (exceptions.ClientError, exceptions.BotoCoreError):
            return False
        return True

    # Checksums

    @property
    def _sums_by_md5(self) -> bool:
        return self._client.meta.config.request_checksum_calculation == "when_required"

    def _sum(self, data: bytes | memoryview) -> dict[str, str]:
        """Return the checksum that the server compares with what arrives."""
        # Given, boto3 computes none: its own would be sent after the data, in a form that many
        # servers do not know.
        if self._sums_by_md5:
            md5 = hashlib.md5(data, usedforsecurity=False).digest()
            return {"ContentMD5": base64.b64encode(md5).decode()}
        return {"ChecksumCRC32": base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()}


class _Upload(NamedTuple):
    """An unfinished multipart upload; `begun` in seconds of the epoch, by the server's clock."""

    key: str
    id: str
    begun: float


class _Code(Exception):
    """S3's code of an error, and what it means if the caller has no other use for it."""

    def __init__(self, code: str, meaning: StoreError) -> None:
        super().__init__(code)
        self.code = code
        self.meaning = meaning


class _BrokenOff(StoreUnavailableError):
    """The body of an answer ended early."""


class _Tee:
    """A RangeSource that also writes what is read to its place in a file.

    The threads that fetch do the writing, so that whoever hashes the bytes in order need not.
    """

    def __init__(self, source: S3Source, descriptor: int) -> None:
        self._source = source
        self._descriptor = descriptor
        self.uri = source.uri
        self.size = source.size
        self.version = source.version

    def read_into(self, start: int, buffer: memoryview, stopped: Stopped) -> None:
        self._source.read_into(start, buffer, stopped)
        done = 0
        while done < len(buffer):
            done += os.pwrite(self._descriptor, buffer[done:], start + done)


class _Sender:
    """Fills buffers of one part each from chunks, and sends them from threads of its own.

    Leaving the context waits for the parts on their way: the upload cannot be aborted before.
    """

    def __init__(
        self, send: Callable[[int, memoryview], dict[str, Any]], size: int, part_bytes: int
    ) -> None:
        self._send = send
        self._part_bytes = part_bytes
        parts = -(-size // part_bytes)
        # One buffer more than threads is filled meanwhile.
        threads = max(1, min(_THREADS, parts, _BUFFERS_BYTES // part_bytes - 1))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="put")
        self._free: queue.SimpleQueue[mmap.mmap | None] = queue.SimpleQueue()
        for _ in range(threads + 1):
            self._free.put(None)
        self._buffer: mmap.mmap | None = None
        self._filled = 0
        self._sent: list[Future[dict[str, Any]]] = []
        self._error: BaseException | None = None
        self._stopped = False

    def __enter__(self) -> _Sender:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stopped = True
        self._pool.shutdown(cancel_futures=True)

    def send(self, chunk: bytes) -> None:
        """Take the next bytes. Raises what a part before them failed with."""
        rest = memoryview(chunk)
        while rest:
            if self._buffer is None:
                # Not a bytearray: freed, its memory often stays with the process.
                self._buffer = self._free.get() or mmap.mmap(-1, self._part_bytes)
                if self._error is not None:
                    raise self._error
            room = self._part_bytes - self._filled
            taken = rest[:room]
            self._buffer[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            rest = rest[room:]
            if self._filled == self._part_bytes:
                self._submit()

    def finish(self) -> list[dict[str, Any]]:
        """Send what is left and return the parts as S3 wants them listed."""
        if self._filled:
            self._submit()
        wait(self._sent)
        if self._error is not None:
            raise self._error
        return [future.result() for future in self._sent]

    def _submit(self) -> None:
        buffer, length = self._buffer, self._filled
        assert buffer is not None
        self._buffer, self._filled = None, 0
        self._sent.append(self._pool.submit(self._run, len(self._sent) + 1, buffer, length))

    def _run(self, number: int, buffer: mmap.mmap, length: int) -> dict[str, Any]:
        try:
            if self._stopped or self._error is not None:
                raise CancelledError
            return self._send(number, memoryview(buffer)[:length])
        except CancelledError:
            raise
        except BaseException as error:
            self._error = self._error or error
            raise
        finally:
            self._free.put(buffer)


class _Body(io.RawIOBase):
    """A part's bytes as the file that boto3 wants, without a copy of them.

    Given as bytes they are copied for each attempt, and once more for a signature made by awscrt.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def __len__(self) -> int:
        return len(self._data)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._data)}
        self._position = base[whence] + offset
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        # http.client asks for 16 KiB a time and sends whatever it gets; between many threads,
        # each such step costs more than what it sends.
        wanted = len(self._data) if size is None or size < 0 else max(size, _STEP_BYTES)
        found = self._data[self._position : self._position + wanted]
        self._position += len(found)
        return bytes(found)

    def readinto(self, buffer: Any, /) -> int:
        found = self._data[self._position : self._position + len(buffer)]
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)


def _upto(size: int, chunks: Iterable[bytes], hasher: Hasher) -> Iterator[bytes]:
    """Yield and hash `chunks`, to their end, unless they hold more than `size` bytes."""
    for chunk in chunks:
        hasher.update(chunk)
        if hasher.size > size:
            return
        yield chunk


def _round_up(value: int, to: int) -> int:
    return -(-value // to) * to


def _multipart_etag(parts: list[dict[str, Any]]) -> str:
    """Return the ETag that S3 gives to an object made of these parts."""
    joined = b"".join(bytes.fromhex(part["ETag"].strip('"')) for part in parts)
    return f'"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(parts)}"'


def _is_hidden(key: str) -> bool:
    """Say whether a key is the store's own, or a folder as consoles mark them."""
    names = key.split("/")
    return not names[-1] or any(name.startswith(layout.HIDDEN_PREFIX) for name in names)
