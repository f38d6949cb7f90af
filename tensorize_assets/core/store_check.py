"""Tries every verb that the product needs of a store, and says what to set where one fails.

Everything is tried under a name of its own that no listing shows, and removed afterwards.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from hashlib import md5
from pathlib import Path
from typing import Any, Literal

from tensorize_assets.core import jsonio, layout
from tensorize_assets.core.errors import StoreError, StoreUnavailableError
from tensorize_assets.core.s3 import S3Access, code_of, explained, is_s3, resolve, split_uri
from tensorize_assets.core.store import explained as explained_file

LARGE_BYTES = 64 * 1024 * 1024
"""Size of the object or file whose transfer is timed."""

_PART_BYTES = 16 * 1024 * 1024
_PARTS = LARGE_BYTES // _PART_BYTES
_SMALL = b"tensorize store check"
_ATTEMPTS = 2
_CLOCK_S = 60.0

# Free space below which a folder is not fit for any model, in bytes.
_LITTLE_BYTES = 1024 * 1024 * 1024

_DENIED = frozenset({"AccessDenied", "AllAccessDisabled", "Forbidden", "403"})
_LACKING = frozenset({"NotImplemented", "501", "MethodNotAllowed", "405"})
_REFUSED = frozenset({"PreconditionFailed", "412"})

_UNSAFE = (
    "two runs at once could overwrite each other's publication: use a server that honours "
    "If-None-Match and If-Match, or take the risk with `s3.unsafe_no_cas: true`"
)
_ORPHANS = (
    "then uploads that killed runs left are not found: have the bucket's lifecycle abort "
    "incomplete uploads"
)
_STREAMS = "then `tensorize copy` moves the bytes through this machine"


class Verb(jsonio.Record):
    """One verb as it was tried.

    `tolerated`: it does not work, and the product does without. `skipped`: not tried, since what
    it builds on does not work. Rates count bytes of the object's content, in MB/s (10^6 bytes).
    """

    name: str
    needs: str
    status: Literal["works", "fails", "tolerated", "skipped"]
    reason: str = ""
    milliseconds: float | None = None
    mb_per_s: float | None = None


class StoreReport(jsonio.Record):
    """What a store can do. `left` names what could not be removed again."""

    root: str
    facts: dict[str, str]
    verbs: tuple[Verb, ...]
    left: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether the product can work on this store."""
        return all(verb.status in ("works", "tolerated") for verb in self.verbs)


def check_store(root: str, access: S3Access | None = None) -> StoreReport:
    """Try every verb on a folder or s3://bucket/prefix. `access` None: as the environment says.

    What the store refuses is in the report. Raises StoreError for a root that is none, and for
    settings with which nothing can be tried.
    """
    if is_s3(root):
        return _check_s3(root, access or resolve())
    if "://" in root or not root:
        raise StoreError(f"{root!r} is no store; give s3://bucket/prefix or the path of a folder")
    return _check_folder(Path(root).expanduser().absolute())


class _Wrong(Exception):
    """The store answered, and not as it has to."""


@dataclass
class _Tried:
    """The verbs so far; `explain` gives a verb's errors the product's words."""

    explain: Callable[[str, Callable[[], Any]], Any]
    verbs: list[Verb] = field(default_factory=list[Verb])

    def try_(
        self,
        name: str,
        needs: str,
        call: Callable[[], int | None],
        *,
        after: str = "",
        verb: str = "",
        otherwise: str = "",
    ) -> bool:
        """Run `call`, which returns how many bytes it moved, and note how it went.

        `after` names the verb that it builds on. `otherwise` says how the product does without.
        """
        if after and not self.works(after):
            skipped = Verb(name=name, needs=needs, status="skipped", reason=f"needs `{after}`")
            self.verbs.append(skipped)
            return False
        began = time.perf_counter()
        reason = ""
        moved: int | None = None
        try:
            moved = self.explain(verb or name, call)
        except (StoreError, _Wrong) as error:
            reason = f"{error}; {otherwise}" if otherwise else str(error)
        seconds = time.perf_counter() - began
        status = "works" if not reason else "tolerated" if otherwise else "fails"
        self.verbs.append(
            Verb(
                name=name,
                needs=needs,
                status=status,
                reason=reason,
                milliseconds=round(seconds * 1e3, 1),
                mb_per_s=round(moved / seconds / 1e6, 1) if moved and not reason else None,
            )
        )
        return not reason

    def works(self, name: str) -> bool:
        return any(verb.name == name and verb.status == "works" for verb in self.verbs)

    def skip_rest(self, names: dict[str, str], reason: str) -> None:
        done = {verb.name for verb in self.verbs}
        self.verbs += [
            Verb(name=name, needs=needs, status="skipped", reason=reason)
            for name, needs in names.items()
            if name not in done
        ]


# S3


_S3_VERBS = {
    "list": "s3:ListBucket",
    "put": "s3:PutObject",
    "get": "s3:GetObject",
    "get a range": "s3:GetObject",
    "get if unchanged": "s3:GetObject",
    "put if absent": "s3:PutObject",
    "put if unchanged": "s3:PutObject",
    "put in parts": "s3:PutObject",
    "get in parts": "s3:GetObject",
    "list uploads": "s3:ListBucketMultipartUploads",
    "abort an upload": "s3:AbortMultipartUpload",
    "copy": "s3:GetObject, s3:PutObject",
    "delete": "s3:DeleteObject",
}


@dataclass
class _Bucket:
    """Where an S3 store is tried, and what was made there."""

    access: S3Access
    bucket: str
    folder: str
    versions: list[tuple[str, str | None]] = field(
        default_factory=list[tuple[str, str | None]], init=False
    )
    uploads: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]], init=False)

    @property
    def client(self) -> Any:
        return self.access.client_for(self.bucket)

    def at(self, name: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": f"{self.folder}/{name}"}

    def checksum(self, body: bytes) -> dict[str, str]:
        # As the store does it: one or the other, computed before.
        if self.client.meta.config.request_checksum_calculation == "when_required":
            digest = md5(body, usedforsecurity=False).digest()
            return {"ContentMD5": base64.b64encode(digest).decode()}
        return {"ChecksumCRC32": base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()}

    def put(self, name: str, body: bytes, **condition: str) -> str:
        """Put an object and return its ETag."""
        at = {**self.at(name), **self.checksum(body), **condition}
        return self.make(at["Key"], lambda: self.client.put_object(**at, Body=body))["ETag"]

    def make(self, key: str, call: Callable[[], Any]) -> Any:
        """Run a call that makes an object, and note it, to be removed at the end."""
        note = (key, None)
        self.versions.append(note)
        try:
            answer = call()
        except self.client.exceptions.ClientError as error:
            # Only what was refused is surely not there: an answer may be lost.
            if error.response["ResponseMetadata"]["HTTPStatusCode"] < 500:
                self.versions.remove(note)
            raise
        if "VersionId" in answer:
            self.versions.append((key, answer["VersionId"]))
        return answer

    def get(self, name: str, **options: str) -> bytes:
        with self.client.get_object(**self.at(name), **options)["Body"] as body:
            return body.read()

    def begin(self, name: str) -> dict[str, str]:
        """Begin a multipart upload and return what names it."""
        at = self.at(name)
        md5s = self.client.meta.config.request_checksum_calculation == "when_required"
        algorithm = {} if md5s else {"ChecksumAlgorithm": "CRC32"}
        answer = self.client.create_multipart_upload(**at, **algorithm)
        self.uploads.append((at["Key"], answer["UploadId"]))
        return {**at, "UploadId": answer["UploadId"]}

    def part(self, upload: dict[str, str], number: int, body: bytes) -> dict[str, Any]:
        checksum = self.checksum(body)
        answer = self.client.upload_part(**upload, PartNumber=number, Body=body, **checksum)
        kept = {} if "ContentMD5" in checksum else checksum
        return {"PartNumber": number, "ETag": answer["ETag"], **kept}


def _check_s3(root: str, access: S3Access) -> StoreReport:
    bucket, prefix = split_uri(root)
    # Whoever asks wants to know now; retries would only make the same answer late.
    settings = access.settings
    access = S3Access(
        settings.model_copy(update={"max_attempts": min(_ATTEMPTS, settings.max_attempts)}),
        access.credentials,
    )
    folder = f"{layout.HIDDEN_PREFIX}check-{uuid.uuid4().hex}"
    at = _Bucket(access, bucket, f"{prefix}/{folder}" if prefix else folder)
    facts: dict[str, str] = {}
    left: tuple[str, ...] = ()
    tried = _Tried(lambda verb, call: _in_our_words(at.access, verb, root, call))
    try:
        existing = _reach(at, tried, prefix, facts)
        if existing is not None:
            _try_verbs(at, tried, existing)
    finally:
        left = _clean(at)
    if not tried.works("list"):
        facts.setdefault("endpoint", at.access.endpoint)
    tried.skip_rest(_S3_VERBS, "nothing works without the first")
    return StoreReport(root=root, facts=facts, verbs=tuple(tried.verbs), left=left)


def _in_our_words(access: S3Access, verb: str, root: str, call: Callable[[], Any]) -> Any:
    try:
        with explained(verb, root, access):
            return call()
    except StoreError as error:
        # The table says what was tried where.
        text = str(error).removeprefix(f"cannot {verb} {root} at {access.endpoint}: ")
        raise type(error)(text) from None


def _reach(
    at: _Bucket, tried: _Tried, prefix: str, facts: dict[str, str]
) -> list[dict[str, Any]] | None:
    """List the root: the first request, on which everything else depends.

    Returns what is there, or None when nothing else need be tried.
    """
    found: list[dict[str, Any]] = []
    codes: list[str] = []

    def first() -> None:
        try:
            answer = at.client.list_objects_v2(
                Bucket=at.bucket, Prefix=f"{prefix}/" if prefix else "", MaxKeys=100
            )
        except Exception as error:
            codes.append(code_of(error))
            raise
        found.extend(answer.get("Contents", ()))
        _note_clock(answer, facts)

    works = tried.try_("list", _S3_VERBS["list"], first)
    with suppress(StoreError):
        _note_client(at, facts)
    return found if works or (codes and codes[0] in _DENIED | _LACKING) else None


def _note_client(at: _Bucket, facts: dict[str, str]) -> None:
    client = at.client
    facts["endpoint"] = client.meta.endpoint_url
    facts["region"] = str(client.meta.region_name)
    style: Any = client.meta.config.s3
    facts["addressing"] = str(style["addressing_style"])
    md5s = client.meta.config.request_checksum_calculation == "when_required"
    facts["checksums"] = "Content-MD5 (when_required)" if md5s else "CRC32 (when_supported)"


def _note_clock(answer: dict[str, Any], facts: dict[str, str]) -> None:
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    with suppress(TypeError, ValueError):
        off = (parsedate_to_datetime(str(date)) - datetime.now(UTC)).total_seconds()
        if abs(off) > _CLOCK_S:
            facts["clock"] = f"the server's is {off:+.0f} s off this machine's; S3 allows 900 s"


def _try_verbs(at: _Bucket, tried: _Tried, existing: list[dict[str, Any]]) -> None:
    def try_(name: str, call: Callable[[], int | None], **how: str) -> bool:
        return tried.try_(name, _S3_VERBS[name], call, **how)

    etags: list[str] = []

    def put() -> None:
        etags.append(at.put("small", _SMALL))

    if not try_("put", put):
        _put_without_checksums(at, tried)
        _read_existing(tried, at, existing)
        return

    try_("get", partial(_get, at), after="put")
    try_("get a range", partial(_get_range, at), after="get", verb="get")
    try_("get if unchanged", partial(_get_if, at, etags[0]), after="get", verb="get")
    unsafe = "`s3.unsafe_no_cas` takes the risk" if at.access.settings.unsafe_no_cas else ""
    try_("put if absent", partial(_put_if_absent, at), verb="put", otherwise=unsafe)
    try_("put if unchanged", partial(_put_if_match, at), verb="put", otherwise=unsafe)
    content = os.urandom(_PART_BYTES) * _PARTS
    try_("put in parts", partial(_put_parts, at, content), verb="put")
    try_("get in parts", partial(_get_parts, at, content), after="put in parts", verb="get")
    upload: dict[str, str] = {}
    with suppress(Exception):
        # What keeps it from beginning is said above.
        upload = at.begin("unfinished")
        at.part(upload, 1, _SMALL)
    otherwise = {"verb": "list uploads of", "otherwise": _ORPHANS}
    try_("list uploads", partial(_list_uploads, at, upload), after="put in parts", **otherwise)
    try_("abort an upload", partial(_abort, at, upload), after="put in parts", verb="abort")
    try_("copy", partial(_copy, at), after="get", otherwise=_STREAMS)
    try_("delete", partial(_delete, at))


def _put_without_checksums(at: _Bucket, tried: _Tried) -> None:
    """Say so when the server takes objects without boto3's newer checksums."""
    if at.access.settings.checksums == "when_required":
        return
    settings = at.access.settings.model_copy(update={"checksums": "when_required"})
    other = _Bucket(S3Access(settings, at.access.credentials), at.bucket, at.folder)
    try:
        with explained("put", at.bucket, other.access):
            other.put("small", _SMALL)
    except StoreError:
        return
    finally:
        at.versions += other.versions
    failed = tried.verbs[-1]
    reason = f"{failed.reason}; with `s3.checksums: when_required` it works"
    tried.verbs[-1] = failed.model_copy(update={"reason": reason})


def _read_existing(tried: _Tried, at: _Bucket, existing: list[dict[str, Any]]) -> None:
    """Without the right to write, reading is tried on what is there."""
    found = next((entry for entry in existing if entry["Size"]), None)

    def read() -> None:
        assert found is not None
        options = {"Bucket": at.bucket, "Key": found["Key"], "Range": "bytes=0-0"}
        with at.client.get_object(**options)["Body"] as body:
            if len(body.read()) != 1:
                raise _Wrong("a range of one byte has another size; a proxy on the way drops Range")

    if found is not None:
        tried.try_("get", _S3_VERBS["get"], read)
    tried.skip_rest(_S3_VERBS, "needs `put`")


def _get(at: _Bucket) -> None:
    if at.get("small") != _SMALL:
        raise _Wrong("what comes back is not what was put; something on the way changes content")


def _get_range(at: _Bucket) -> None:
    if at.get("small", Range="bytes=3-7") != _SMALL[3:8]:
        raise _Wrong("the server, or a proxy on the way, ignores Range; use one that honours it")


def _get_if(at: _Bucket, etag: str) -> None:
    at.get("small", IfMatch=etag)
    if _refusal(at, lambda: at.get("small", IfMatch='"0"')) not in _REFUSED:
        raise _Wrong(
            "If-Match is ignored, so that an object replaced while it is read goes unnoticed; use "
            "a server that honours it"
        )


def _put_if_absent(at: _Bucket) -> None:
    at.put("absent", _SMALL, IfNoneMatch="*")
    if _refusal(at, lambda: at.put("absent", b"other", IfNoneMatch="*")) not in _REFUSED:
        raise _Wrong(f"If-None-Match is ignored, so that {_UNSAFE}")


def _put_if_match(at: _Bucket) -> None:
    etag = at.put("matched", _SMALL)
    at.put("matched", b"other", IfMatch=etag)
    if _refusal(at, lambda: at.put("matched", b"third", IfMatch=etag)) not in _REFUSED:
        raise _Wrong(f"If-Match is ignored, so that {_UNSAFE}")


def _put_parts(at: _Bucket, content: bytes) -> int:
    upload = at.begin("large")

    def part(number: int) -> dict[str, Any]:
        start = (number - 1) * _PART_BYTES
        return at.part(upload, number, content[start : start + _PART_BYTES])

    with ThreadPoolExecutor(_PARTS) as pool:
        parts = list(pool.map(part, range(1, _PARTS + 1)))
    complete: Any = partial(at.client.complete_multipart_upload, **upload)
    at.make(upload["Key"], lambda: complete(MultipartUpload={"Parts": parts}))
    at.uploads.remove((upload["Key"], upload["UploadId"]))
    return LARGE_BYTES


def _get_parts(at: _Bucket, content: bytes) -> int:
    def part(start: int) -> bool:
        end = start + _PART_BYTES
        return at.get("large", Range=f"bytes={start}-{end - 1}") == content[start:end]

    with ThreadPoolExecutor(_PARTS) as pool:
        if not all(pool.map(part, range(0, LARGE_BYTES, _PART_BYTES))):
            raise _Wrong("what comes back is not what was put in parts")
    return LARGE_BYTES


def _list_uploads(at: _Bucket, upload: dict[str, str]) -> None:
    answer = at.client.list_multipart_uploads(Bucket=at.bucket, Prefix=f"{at.folder}/")
    found = {entry["UploadId"] for entry in answer.get("Uploads", ())}
    if upload and upload["UploadId"] not in found:
        raise _Wrong("an unfinished upload is not listed")


def _abort(at: _Bucket, upload: dict[str, str]) -> None:
    if not upload:
        raise _Wrong("no upload could be begun to try it on; run again")
    at.client.abort_multipart_upload(**upload)
    if _refusal(at, lambda: at.part(upload, 2, _SMALL)) == "":
        raise _Wrong("an aborted upload still takes parts, which would be stored for ever")
    at.uploads.remove((upload["Key"], upload["UploadId"]))


def _copy(at: _Bucket) -> None:
    target = at.at("copied")
    source = at.at("small")
    at.make(target["Key"], lambda: at.client.copy_object(**target, CopySource=source))
    if at.get("copied") != _SMALL:
        raise _Wrong("the copy is not what was copied")


def _delete(at: _Bucket) -> None:
    answer = at.client.delete_object(**at.at("small"))
    if answer.get("DeleteMarker"):
        at.versions.append((at.at("small")["Key"], answer["VersionId"]))
    if _refusal(at, lambda: at.get("small")) == "":
        raise _Wrong("a deleted object is still there")


def _refusal(at: _Bucket, call: Callable[[], object]) -> str:
    """Return the code that S3 refuses a call with; empty when it does it."""
    try:
        call()
    except at.client.exceptions.ClientError as error:
        return code_of(error)
    return ""


def _clean(at: _Bucket) -> tuple[str, ...]:
    """Remove what was made; return what is left, each with the reason."""
    left: dict[str, str] = {}

    def remove(key: str, verb: str, call: Callable[[], Any], also: str = "") -> None:
        uri = f"s3://{at.bucket}/{key}"
        try:
            _in_our_words(at.access, verb, uri, call)
        except StoreUnavailableError:
            left[uri] = "the server is gone"
        except StoreError as error:
            if "NoSuchUpload" not in str(error):
                left[uri] = f"{error}{also}"

    for key, upload in at.uploads:
        names = {"Bucket": at.bucket, "Key": key, "UploadId": upload}
        remove(key, "abort", partial(_call, at, "abort_multipart_upload", names))
    # By their versions, so that a versioned bucket keeps nothing of it; those without one last.
    versioned = {key for key, version in at.versions if version}
    for key, version in at.versions:
        if version:
            names = {"Bucket": at.bucket, "Key": key, "VersionId": version}
            also = "; removing a version needs s3:DeleteObjectVersion"
            remove(key, "delete", partial(_call, at, "delete_object", names), also)
    for key in sorted({key for key, _ in at.versions} - versioned):
        names = {"Bucket": at.bucket, "Key": key}
        remove(key, "delete", partial(_call, at, "delete_object", names))
    return tuple(f"{uri}: {why}" for uri, why in left.items())


def _call(at: _Bucket, method: str, names: dict[str, str]) -> None:
    getattr(at.client, method)(**names)


# Folders


_FOLDER_VERBS = {
    "write": "write access",
    "write 64 MiB": "disk space",
    "read 64 MiB": "read access",
    "rename": "write access",
    "create exclusively": "hard links",
    "lock": "flock",
    "list": "read access",
    "copy in the kernel": "copy_file_range",
    "delete": "write access",
    "free space": "at least 1 GiB",
}


def _check_folder(root: Path) -> StoreReport:
    if root.exists() and not root.is_dir():
        raise StoreError(f"root {root} is not a folder; give one")
    tried = _Tried(_explain_file)
    made = [path for path in (root, *root.parents) if not path.exists()]
    folder = root / f"{layout.HIDDEN_PREFIX}check-{uuid.uuid4().hex}"
    left: list[str] = []
    try:
        _try_folder(tried, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            left.append(f"{folder}: this user cannot remove it")
        # Only those that were made here, and only empty.
        for path in made:
            with suppress(OSError):
                path.rmdir()
    tried.skip_rest(_FOLDER_VERBS, "needs `write`")
    return StoreReport(
        root=str(root), facts=_disk_facts(root), verbs=tuple(tried.verbs), left=tuple(left)
    )


def _explain_file(verb: str, call: Callable[[], Any]) -> Any:
    with explained_file(verb, "there"):
        return call()


def _try_folder(tried: _Tried, folder: Path) -> None:
    def try_(name: str, call: Callable[[], int | None], **how: str) -> bool:
        return tried.try_(name, _FOLDER_VERBS[name], call, **how)

    small, large = folder / "small", folder / "large"

    def write() -> None:
        folder.mkdir(parents=True)
        _write(small, _SMALL)

    if not try_("write", write):
        return
    content = os.urandom(_PART_BYTES) * _PARTS
    try_("write 64 MiB", lambda: _write(large, content), verb="write")
    try_("read 64 MiB", lambda: _read(large, content), after="write 64 MiB", verb="read")
    try_("rename", lambda: _rename(small))
    try_("create exclusively", lambda: _link(small), verb="make a hard link")
    try_("lock", lambda: _lock(small))
    try_("list", lambda: _list(folder, small))
    try_("copy in the kernel", lambda: _copy_range(small), otherwise=_STREAMS)
    try_("delete", small.unlink)
    try_("free space", lambda: _space(folder))


def _write(path: Path, content: bytes) -> int:
    """Write a file so that it outlives a power cut."""
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    _sync_folder(path.parent)
    return len(content)


def _read(path: Path, content: bytes) -> int:
    if path.read_bytes() != content:
        raise _Wrong("what comes back is not what was written; check the disk")
    return len(content)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename(path: Path) -> None:
    target = path.with_name("renamed")
    target.write_bytes(b"what it replaces")
    path.rename(target)
    _sync_folder(path.parent)
    if target.read_bytes() != _SMALL:
        raise _Wrong("a renamed file did not replace the other; check the disk")
    target.rename(path)


def _link(path: Path) -> None:
    os.link(path, path.with_name("linked"))
    try:
        os.link(path, path.with_name("linked"))
    except FileExistsError:
        return
    raise _Wrong("a second exclusive create did not fail, so that two runs could publish at once")


def _lock(path: Path) -> None:
    with path.open("rb+") as one, path.open("rb+") as other:
        fcntl.flock(one, fcntl.LOCK_EX)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
    raise _Wrong("a lock does not exclude; mount the file system with locks")


def _list(folder: Path, path: Path) -> None:
    if path not in folder.iterdir():
        raise _Wrong("a file that is there is not listed")


def _copy_range(path: Path) -> None:
    with path.open("rb") as source, path.with_name("copied").open("wb") as target:
        try:
            os.copy_file_range(source.fileno(), target.fileno(), len(_SMALL))
        except OSError as error:
            if error.errno in (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
                raise _Wrong("this file system, or kernel, does not copy by itself") from error
            raise


def _space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _LITTLE_BYTES:
        raise _Wrong(f"only {free:,} bytes are free; free some, or set another `root`")


def _disk_facts(root: Path) -> dict[str, str]:
    there = next(path for path in (root, *root.parents) if path.exists())
    usage = shutil.disk_usage(there)
    return {"free": f"{usage.free / 1e9:,.1f} of {usage.total / 1e9:,.1f} GB"}
