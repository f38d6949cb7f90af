"""A prefix of an S3 bucket as an artifact store.

A file goes up in parts, each with a checksum that the server compares, and appears when the upload
is completed, which is after everything about it is known to be right; whatever stops before that
aborts the upload. What a killed run left is aborted by the next put of the same object.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import tenacity

from tensorize_assets.core import layout
from tensorize_assets.core.errors import StoreError, StoreUnavailableError
from tensorize_assets.core.jsonio import MAX_BYTES
from tensorize_assets.core.local_store import new_file
from tensorize_assets.core.ranged import RangedReader, S3Source, Stopped
from tensorize_assets.core.s3 import (
    S3Access,
    algorithm,
    checksum,
    like,
    split_uri,
    sums_by_md5,
)
from tensorize_assets.core.s3_errors import (
    ABSENT,
    DENIED,
    LACKING,
    REFUSED,
    UNSAFE,
    code_of,
    explained,
    not_s3,
)
from tensorize_assets.core.s3_parts import THREADS, PartBody, PartSender
from tensorize_assets.core.store import (
    FileDigest,
    Hasher,
    ListedObject,
    Reader,
    StoredObject,
    conflict,
    read_chunks,
    require_same,
)
from tensorize_assets.core.store import explained as explained_file

_MiB = 1024 * 1024

# Measured: larger parts are not faster.
PART_BYTES = 16 * _MiB

_STEP_BYTES = _MiB

# Metadata of an object that went up in parts: which upload it came from.
_MARK = "tensorize-assets-upload"

# S3's own limits.
_MAX_PARTS = 10_000
_MAX_COPY_BYTES = 5 * 1024 * _MiB
_COPY_PART_BYTES = 256 * _MiB

_CONFLICT_ATTEMPTS = 5

# A worker that is told to stop is killed 10 s later: what the wait for its parts leaves of them is
# for aborting their upload, each try of it so long at most.
_ABORT_TIMEOUT_S = 2.0
_ABORT_ATTEMPTS = 2

# Stands for the ETag of an object that is not there.
_NOTHING = ""

# Also an ETag of another kind may look like one: where objects are encrypted, or copied.
_MD5 = re.compile("[0-9a-f]{32}")

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
        condition: dict[str, Any] = {}
        before = None
        if if_absent or if_match is not None:
            before = if_match or _NOTHING
            if self._honours_conditions():
                condition = {"IfNoneMatch": "*"} if if_absent else {"IfMatch": if_match}
            else:
                self._compare_unsafely(key, if_match)
        with self._explained("put", key):
            try:
                return self._until_seen(key, partial(self._put_if, key, data, condition), before)
            except self._client.exceptions.ClientError as error:
                if not condition or code_of(error) not in REFUSED | _AT_ONCE | ABSENT:
                    raise
                if code_of(error) in ABSENT and self._bucket_is_missing():
                    raise
        return self._etag_if_ours(key, data, if_absent)

    def get_bytes(self, key: str) -> StoredObject | None:
        found = self._get_whole(key)
        # A bit may have flipped on the way here, or this ETag is none of the bytes alone.
        return found if found is None or _fits(found) else self._get_whole(key)

    def get_file(self, key: str, path: Path, *, sha256: str | None = None) -> FileDigest:
        hasher = Hasher()
        room = memoryview(bytearray(_STEP_BYTES))
        with new_file(path, self.uri(key)) as descriptor:
            # Left in this order: what the reader does not wait for writes nothing afterwards.
            with (
                closing(_Tee(self.ranges(key), descriptor)) as source,
                RangedReader(source) as stream,
            ):
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
        source = self.ranges(key)
        return cast("BinaryIO", RangedReader(source, min(start, source.size), end))

    def ranges(self, key: str) -> S3Source:
        at = self._at(key)
        explain = partial(self._explained, "get", key)
        return S3Source(self._client, at["Bucket"], at["Key"], self.uri(key), explain)

    def copy(self, source_key: str, key: str, *, source: Reader | None = None) -> bool:
        at = self._at(key)
        origin = self if source is None else source
        if not isinstance(origin, S3Store) or not self._reaches(origin):
            return False
        head = origin._head(source_key)
        if head is None:
            raise StoreError(f"{origin.uri(source_key)} does not exist; build it again")
        copy_from = {"CopySource": origin._at(source_key), "CopySourceIfMatch": head.etag}
        try:
            with self._raw("copy", key):
                if head.size <= _MAX_COPY_BYTES:
                    self._client.copy_object(**at, **copy_from)["CopyObjectResult"]
                else:
                    self._copy_parts(key, copy_from, head.size)
        except _Code as error:
            if error.code in DENIED | LACKING:
                return False
            raise error.meaning from None
        return True

    def stat(self, key: str) -> int | None:
        head = self._head(key)
        return None if head is None else head.size

    def list(self, prefix: str) -> tuple[str, ...]:
        return tuple(found.key for found in self.listing(prefix))

    def listing(self, prefix: str) -> tuple[ListedObject, ...]:
        folder, _, _ = prefix.rpartition("/")
        if folder:
            layout.check_key(folder)
        skip = len(self._full(""))
        with self._explained("list", prefix):
            found = [
                ListedObject(entry["Key"][skip:], entry["Size"], entry["LastModified"].timestamp())
                for entry in self._entries(prefix)
            ]
        # Consoles mark folders by objects named with a slash at the end.
        return tuple(
            sorted(one for one in found if not one.key.endswith("/") and not _is_ours(one.key))
        )

    def delete(self, key: str) -> None:
        with self._explained("delete", key):
            self._client.delete_object(**self._at(key))

    def sweep(self, prefix: str, older_than_s: float) -> int:
        latest = time.time() - older_than_s
        count = 0
        for upload in self._uploads(prefix):
            if upload.begun <= latest:
                count += self._abort(upload.key, upload.id)
        return count + self._sweep_hidden(prefix, latest)

    def local_path(self, key: str) -> Path | None:
        layout.check_key(key)
        return None

    def _entries(self, prefix: str) -> Iterator[dict[str, Any]]:
        """Yield what S3 lists under `prefix`, with S3's own errors."""
        full = self._full(prefix)
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=full
        )
        for page in pages:
            # Some servers and proxies lose the prefix, and what is listed may be removed.
            yield from (
                entry for entry in page.get("Contents", ()) if entry["Key"].startswith(full)
            )

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

    def _head(self, key: str) -> _Head | None:
        try:
            with self._raw("get", key):
                head = self._client.head_object(**self._at(key))
                return _Head(head["ContentLength"], head["ETag"])
        except _Code as error:
            if error.code not in ABSENT:
                raise error.meaning from None
            # The answer to HEAD does not say which of the two is missing.
            self._require_bucket(key)
            return None

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

    def _get_whole(self, key: str) -> StoredObject | None:
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

    def _get_bytes(self, key: str, at: dict[str, str]) -> StoredObject | None:
        try:
            with self._raw("get", key):
                answer = self._client.get_object(**at)
                size, etag = answer["ContentLength"], answer["ETag"]
        except _Code as error:
            if error.code not in ABSENT:
                raise error.meaning from None
            # Where the answer was cut short, it does not say which of the two is missing.
            if error.code != "NoSuchKey":
                self._require_bucket(key)
            return None
        with answer["Body"] as body:
            if size > MAX_BYTES:
                raise StoreError(
                    f"{self.uri(key)} has more than {MAX_BYTES} bytes, far above any document of "
                    "this package; restore it or build it again"
                )
            try:
                with self._explained("get", key):
                    return StoredObject(body.read(), etag)
            except StoreUnavailableError as error:
                raise _BrokenOff(str(error)) from None

    def _put_if(self, key: str, data: bytes, condition: dict[str, Any]) -> _Seen:
        """Write under a condition; a write that meets another of the same moment comes again."""
        client_error: Any = self._client.exceptions.ClientError

        def at_once(error: BaseException) -> bool:
            return isinstance(error, client_error) and code_of(error) in _AT_ONCE

        answer = tenacity.Retrying(
            retry=tenacity.retry_if_exception(at_once),
            stop=tenacity.stop_after_attempt(_CONFLICT_ATTEMPTS),
            wait=tenacity.wait_random_exponential(0.05, max=1),
            reraise=True,
        )(
            self._client.put_object,
            **self._at(key),
            Body=data,
            **checksum(self._client, data),
            **condition,
        )
        return _Seen(answer["ETag"], _when(answer["ResponseMetadata"]["HTTPHeaders"].get("date")))

    def _until_seen(self, key: str, write: Callable[[], _Seen], before: str | None) -> str:
        """Write until what was written is there to be seen, and return its ETag.

        It was lost where nothing is there, or the ETag `before` still stands; without `before`,
        where what is there is older than the answer. Anything else is of who came next.
        """
        for attempt in tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_Lost),
            stop=tenacity.stop_after_attempt(self.access.settings.max_attempts),
            wait=tenacity.wait_random_exponential(0.1, max=5),
            reraise=True,
        ):
            with attempt:
                written = write()
                now = self._seen_now(key, written)
                is_old = _bare(now.etag) == _bare(before) if before else now.when < written.when
                if not now.etag or (_bare(now.etag) != _bare(written.etag) and is_old):
                    raise self._lost(key)
                return written.etag
        raise AssertionError  # not reached: the last attempt's error is raised

    def _seen_now(self, key: str, said: _Seen) -> _Seen:
        """Return what is there; `said` where it may not be looked at."""
        try:
            with self._raw("get", key):
                answer = self._client.head_object(**self._at(key))
                return _Seen(answer["ETag"], answer["LastModified"].timestamp())
        except _Code as error:
            if error.code in ABSENT:
                return _Seen(_NOTHING, 0)
            # Whoever may only write takes the server at its word.
            if error.code in DENIED:
                return said
            raise error.meaning from None

    def _lost(self, key: str) -> _Lost:
        return _Lost(
            f"cannot put {self.uri(key)} at {self.access.endpoint}: the server answers that it is "
            "stored, and it is not there; the server, or a cache on the way to it, loses what is "
            "written: see to that, and run again"
        )

    def _etag_if_ours(self, key: str, data: bytes, if_absent: bool) -> str:
        """Return the ETag of what is there if it is what was written; else ConflictError.

        A refusal may also answer the second attempt of a write whose first was done, and its
        answer lost on the way.
        """
        current = self.get_bytes(key)
        if current is not None and current.data == data:
            return current.etag
        raise conflict(self.uri(key), there=current is not None, once=if_absent)

    def _compare_unsafely(self, key: str, if_match: str | None) -> None:
        current = self.get_bytes(key)
        if (None if current is None else current.etag) != if_match:
            raise conflict(self.uri(key), there=current is not None, once=if_match is None)

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
        raise StoreError(f"{self.root} at {self.access.endpoint} {reason}, so that {UNSAFE}")

    def _why_not(self) -> str | None:
        """Return how the server fails at conditional writes, or None."""
        # One name for everybody: whoever cannot remove it leaves one object, and the next finds it.
        probe = f"{layout.HIDDEN_PREFIX}probe"
        at = {"Bucket": self._bucket, "Key": self._full(probe)}
        made: list[dict[str, str]] = []

        def put(**condition: str) -> str:
            """Return S3's code of a refusal; empty when it was written."""
            try:
                with self._raw("put", probe):
                    answer = self._client.put_object(
                        **at, Body=b"", **checksum(self._client, b""), **condition
                    )
                    answer["ETag"]
            except _Code as error:
                if error.code in REFUSED | ABSENT | LACKING | {"InvalidArgument", "400"}:
                    return error.code
                raise error.meaning from None
            made.append({"VersionId": answer["VersionId"]} if "VersionId" in answer else {})
            return ""

        try:
            # Refused at once where another run is at it, or one left it: that is proof as well.
            # Who made it is the only one to remove it, so that it is there for the second try.
            first = put(IfNoneMatch="*")
            if first and first not in REFUSED:
                return f"refuses conditional writes ({first})"
            if not first and put(IfNoneMatch="*") not in REFUSED:
                return "does not honour If-None-Match on PUT"
            if put(IfMatch='"00000000000000000000000000000000"') not in REFUSED | ABSENT:
                return "does not honour If-Match on PUT"
            return None
        finally:
            exceptions: Any = importlib.import_module("botocore.exceptions")
            # By its version, so that a versioned bucket keeps nothing of it. Where that is not
            # allowed it stays: a marker from each process would only be more.
            for version in made if made and made[0] else made[:1]:
                with suppress(exceptions.ClientError, exceptions.BotoCoreError):
                    self._client.delete_object(**at, **version)

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
        upload, mark = self._begin(key)
        try:
            with PartSender(partial(self._send_part, key, upload), size, part_bytes) as sender:
                for chunk in _upto(size, chunks, hasher):
                    sender.send(chunk)
                parts = sender.finish()
            found = hasher.digest()
            require_same(found, size, sha256, source, self.uri(key))
            self._complete(key, upload, parts, size, mark)
        except BaseException:
            self._abort_at_once(at["Key"], upload["UploadId"])
            raise
        for orphan in orphans:
            self._abort(orphan.key, orphan.id)
        return found

    def _begin(self, key: str) -> tuple[dict[str, str], str]:
        """Begin an upload; return what names it, and the mark that its object will have."""
        mark = uuid.uuid4().hex
        at = self._at(key)
        with self._explained("put", key):
            answer = self._client.create_multipart_upload(
                **at, Metadata={_MARK: mark}, **algorithm(self._client)
            )
            return {**at, "UploadId": answer["UploadId"]}, mark

    def _send_part(
        self, key: str, upload: dict[str, str], number: int, body: PartBody
    ) -> dict[str, Any]:
        sums = checksum(self._client, body.data)
        with self._explained("put", key):
            answer = self._client.upload_part(**upload, PartNumber=number, Body=body, **sums)
            part = {"PartNumber": number, "ETag": answer["ETag"]}
        return part if sums_by_md5(self._client) else {**part, **sums}

    def _complete(
        self, key: str, upload: dict[str, str], parts: list[dict[str, Any]], size: int, mark: str
    ) -> None:
        try:
            with self._raw("put", key):
                answer = self._client.complete_multipart_upload(
                    **upload, MultipartUpload={"Parts": parts}
                )
        except _Code as error:
            # It may have been completed by an attempt whose answer was lost.
            if error.code != "NoSuchUpload" or not self._is_stored(key, size, mark):
                raise error.meaning from None
            return
        # Where S3 itself says so, another run's object of the same content may have come since,
        # and whoever may only write is taken at the server's word.
        said = "ETag" in answer
        if not self._is_stored(key, size, None if said else mark, unseen=said):
            if said:
                raise self._lost(key)
            raise not_s3(f"cannot put {self.uri(key)} at {self.access.endpoint}")

    def _is_stored(self, key: str, size: int, mark: str | None, *, unseen: bool = False) -> bool:
        """Say whether an object of this size, and of the upload with this mark, is there.

        `unseen` is the answer where it may not be looked at.
        """
        # Not told by the ETag: where objects are encrypted it is made of nothing that is known.
        try:
            with self._raw("get", key):
                head = self._client.head_object(**self._at(key))
                return head["ContentLength"] == size and mark in (
                    None,
                    head["Metadata"].get(_MARK),
                )
        except _Code as error:
            if error.code in ABSENT:
                return False
            if unseen and error.code in DENIED:
                return True
            raise error.meaning from None

    def _copy_parts(self, key: str, copy_from: dict[str, Any], size: int) -> None:
        upload, mark = self._begin(key)
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
            with ThreadPoolExecutor(THREADS) as pool:
                futures = [
                    pool.submit(copy_part, number + 1) for number in range(-(-size // part_bytes))
                ]
                try:
                    parts = [future.result() for future in futures]
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
            self._complete(key, upload, parts, size, mark)
        except BaseException:
            self._abort_at_once(upload["Key"], upload["UploadId"])
            raise

    def _uploads(self, prefix: str, verb: str = "list uploads of") -> list[_Upload]:
        """Return the unfinished uploads under `prefix`; none where that cannot be asked."""
        try:
            with self._raw(verb, prefix):
                full = self._full(prefix)
                pages = self._client.get_paginator("list_multipart_uploads").paginate(
                    Bucket=self._bucket, Prefix=full
                )
                return [
                    _Upload(entry["Key"], entry["UploadId"], entry["Initiated"].timestamp())
                    for page in pages
                    for entry in page.get("Uploads", ())
                    if entry["Key"].startswith(full)
                ]
        except _Code as error:
            if error.code in DENIED | LACKING:
                return []
            raise error.meaning from None

    def _abort_at_once(self, key: str, upload: str) -> None:
        """Abort an upload before whoever wants this process to end kills it."""
        client = like(
            self._client,
            retries={"mode": "standard", "total_max_attempts": _ABORT_ATTEMPTS},
            connect_timeout=_ABORT_TIMEOUT_S,
            read_timeout=_ABORT_TIMEOUT_S,
        )
        self._abort(key, upload, client)

    def _abort(self, key: str, upload: str, client: Any = None) -> bool:
        """Abort an upload; one that cannot be aborted now is by the next put of the object."""
        exceptions: Any = importlib.import_module("botocore.exceptions")
        client = client or self._client
        try:
            client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload)
        except (exceptions.ClientError, exceptions.BotoCoreError):
            return False
        return True

    def _sweep_hidden(self, prefix: str, latest: float) -> int:
        """Remove hidden objects of before `latest`; those that may not be removed stay."""
        exceptions: Any = importlib.import_module("botocore.exceptions")
        try:
            with self._raw("list", prefix):
                found = [
                    entry["Key"]
                    for entry in self._entries(prefix)
                    if _is_ours(entry["Key"][len(self._full("")) :])
                    and entry["LastModified"].timestamp() <= latest
                ]
        except _Code as error:
            if error.code in DENIED | LACKING:
                return 0
            raise error.meaning from None
        count = 0
        for key in found:
            with suppress(exceptions.ClientError, exceptions.BotoCoreError):
                self._client.delete_object(Bucket=self._bucket, Key=key)
                count += 1
        return count


class _Head(NamedTuple):
    """What S3 says of an object without its content; `size` in bytes."""

    size: int
    etag: str


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


class _Seen(NamedTuple):
    """An object's ETag, and when it was written: by the server's clock, in whole seconds."""

    etag: str
    when: float


class _BrokenOff(StoreUnavailableError):
    """The body of an answer ended early."""


class _Lost(StoreUnavailableError):
    """The server said that something is stored which is not there."""


class _Tee:
    """A RangeSource that also writes what is read to its place in a file.

    The threads that fetch do the writing, so that whoever hashes the bytes in order need not.
    Once closed it writes nothing: the descriptor's number may be another file's by then.
    """

    def __init__(self, source: S3Source, descriptor: int) -> None:
        self._source = source
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._closed = False
        self.uri = source.uri
        self.size = source.size
        self.version = source.version

    def read_into(self, start: int, buffer: memoryview, stopped: Stopped) -> None:
        self._source.read_into(start, buffer, stopped)
        with self._lock:
            if self._closed:
                raise StoreUnavailableError(f"reading {self.uri} was given up")
            # Of its own, so that threads write at once, and to this file whatever is closed.
            descriptor = os.dup(self._descriptor)
        try:
            done = 0
            while done < len(buffer):
                done += os.pwrite(descriptor, buffer[done:], start + done)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        with self._lock:
            self._closed = True


def _upto(size: int, chunks: Iterable[bytes], hasher: Hasher) -> Iterator[bytes]:
    """Yield and hash `chunks`, to their end, unless they hold more than `size` bytes."""
    for chunk in chunks:
        hasher.update(chunk)
        if hasher.size > size:
            return
        yield chunk


def _bare(etag: str) -> str:
    """An ETag as servers and what is before them agree on it."""
    return etag.removeprefix("W/").strip('"')


def _when(date: str | None) -> float:
    """The time of an HTTP header, in seconds of the epoch; 0 for none that is one."""
    with suppress(TypeError, ValueError):
        return parsedate_to_datetime(date or "").timestamp()
    return 0


def _fits(found: StoredObject) -> bool:
    """Say whether an object is what its ETag says, where that is the MD5 of its bytes."""
    said = _bare(found.etag)
    md5 = hashlib.md5(found.data, usedforsecurity=False).hexdigest()
    return said == md5 or not _MD5.fullmatch(said)


def _round_up(value: int, to: int) -> int:
    return -(-value // to) * to


def _is_ours(key: str) -> bool:
    """Say whether a key is the store's own, which no listing shows."""
    return any(name.startswith(layout.HIDDEN_PREFIX) for name in key.split("/"))
