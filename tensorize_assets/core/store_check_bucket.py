"""Tries what the product needs of a bucket, under a prefix of its own that is removed again."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any

from tensorize_assets.core import layout, store_verbs
from tensorize_assets.core.errors import StoreError, StoreUnavailableError
from tensorize_assets.core.s3 import S3Access, algorithm, checksum, split_uri, sums_by_md5
from tensorize_assets.core.s3_errors import DENIED, LACKING, REFUSED, UNSAFE, code_of, explained
from tensorize_assets.core.store_verbs import (
    SMALL,
    STREAMS,
    StoreReport,
    Tried,
    Wrong,
    large_content,
)

_ATTEMPTS = 2
_CLOCK_S = 60.0

_ORPHANS = (
    "then uploads that killed runs left are not found: have the bucket's lifecycle abort "
    "incomplete uploads"
)

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

    def put(self, name: str, body: bytes, **condition: str) -> str:
        """Put an object and return its ETag."""
        at = {**self.at(name), **checksum(self.client, body), **condition}
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
        answer = self.client.create_multipart_upload(**at, **algorithm(self.client))
        self.uploads.append((at["Key"], answer["UploadId"]))
        return {**at, "UploadId": answer["UploadId"]}

    def part(self, upload: dict[str, str], number: int, body: bytes) -> dict[str, Any]:
        sums = checksum(self.client, body)
        answer = self.client.upload_part(**upload, PartNumber=number, Body=body, **sums)
        kept = {} if "ContentMD5" in sums else sums
        return {"PartNumber": number, "ETag": answer["ETag"], **kept}


def check_bucket(root: str, access: S3Access) -> StoreReport:
    """Try every verb on s3://bucket/prefix. Raises StoreError for a root that is none."""
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
    tried = Tried(lambda verb, call: _in_our_words(at.access, verb, root, call))
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
    at: _Bucket, tried: Tried, prefix: str, facts: dict[str, str]
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
    return found if works or (codes and codes[0] in DENIED | LACKING) else None


def _note_client(at: _Bucket, facts: dict[str, str]) -> None:
    client = at.client
    facts["endpoint"] = at.access.endpoint
    facts["region"] = str(client.meta.region_name)
    style: Any = client.meta.config.s3
    facts["addressing"] = str(style["addressing_style"])
    facts["checksums"] = (
        "Content-MD5 (when_required)" if sums_by_md5(client) else "CRC32 (when_supported)"
    )


def _note_clock(answer: dict[str, Any], facts: dict[str, str]) -> None:
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    with suppress(TypeError, ValueError):
        off = (parsedate_to_datetime(str(date)) - datetime.now(UTC)).total_seconds()
        if abs(off) > _CLOCK_S:
            facts["clock"] = f"the server's is {off:+.0f} s off this machine's; S3 allows 900 s"


def _try_verbs(at: _Bucket, tried: Tried, existing: list[dict[str, Any]]) -> None:
    def try_(name: str, call: Callable[[], int | None], **how: str) -> bool:
        return tried.try_(name, _S3_VERBS[name], call, **how)

    etags: list[str] = []

    def put() -> None:
        etags.append(at.put("small", SMALL))

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
    content = large_content()
    try_("put in parts", partial(_put_parts, at, content), verb="put")
    try_("get in parts", partial(_get_parts, at, content), after="put in parts", verb="get")
    upload: dict[str, str] = {}
    with suppress(Exception):
        # What keeps it from beginning is said above.
        upload = at.begin("unfinished")
        at.part(upload, 1, SMALL)
    otherwise = {"verb": "list uploads of", "otherwise": _ORPHANS}
    try_("list uploads", partial(_list_uploads, at, upload), after="put in parts", **otherwise)
    try_("abort an upload", partial(_abort, at, upload), after="put in parts", verb="abort")
    try_("copy", partial(_copy, at), after="get", otherwise=STREAMS)
    try_("delete", partial(_delete, at))


def _put_without_checksums(at: _Bucket, tried: Tried) -> None:
    """Say so when the server takes objects without boto3's newer checksums."""
    if at.access.settings.checksums == "when_required":
        return
    settings = at.access.settings.model_copy(update={"checksums": "when_required"})
    other = _Bucket(S3Access(settings, at.access.credentials), at.bucket, at.folder)
    try:
        with explained("put", at.bucket, other.access):
            other.put("small", SMALL)
    except StoreError:
        return
    finally:
        at.versions += other.versions
    failed = tried.verbs[-1]
    reason = f"{failed.reason}; with `s3.checksums: when_required` it works"
    tried.verbs[-1] = failed.model_copy(update={"reason": reason})


def _read_existing(tried: Tried, at: _Bucket, existing: list[dict[str, Any]]) -> None:
    """Without the right to write, reading is tried on what is there."""
    found = next((entry for entry in existing if entry["Size"]), None)

    def read() -> None:
        assert found is not None
        options = {"Bucket": at.bucket, "Key": found["Key"], "Range": "bytes=0-0"}
        with at.client.get_object(**options)["Body"] as body:
            if len(body.read()) != 1:
                raise Wrong("a range of one byte has another size; a proxy on the way drops Range")

    if found is not None:
        tried.try_("get", _S3_VERBS["get"], read)
    tried.skip_rest(_S3_VERBS, "needs `put`")


def _get(at: _Bucket) -> None:
    if at.get("small") != SMALL:
        raise Wrong("what comes back is not what was put; something on the way changes content")


def _get_range(at: _Bucket) -> None:
    if at.get("small", Range="bytes=3-7") != SMALL[3:8]:
        raise Wrong("the server, or a proxy on the way, ignores Range; use one that honours it")


def _get_if(at: _Bucket, etag: str) -> None:
    at.get("small", IfMatch=etag)
    if _refusal(at, lambda: at.get("small", IfMatch='"0"')) not in REFUSED:
        raise Wrong(
            "If-Match is ignored, so that an object replaced while it is read goes unnoticed; use "
            "a server that honours it"
        )


def _put_if_absent(at: _Bucket) -> None:
    at.put("absent", SMALL, IfNoneMatch="*")
    if _refusal(at, lambda: at.put("absent", b"other", IfNoneMatch="*")) not in REFUSED:
        raise Wrong(f"If-None-Match is ignored, so that {UNSAFE}")


def _put_if_match(at: _Bucket) -> None:
    etag = at.put("matched", SMALL)
    at.put("matched", b"other", IfMatch=etag)
    if _refusal(at, lambda: at.put("matched", b"third", IfMatch=etag)) not in REFUSED:
        raise Wrong(f"If-Match is ignored, so that {UNSAFE}")


def _put_parts(at: _Bucket, content: bytes) -> int:
    upload = at.begin("large")

    def part(start: int) -> dict[str, Any]:
        size = store_verbs.PART_BYTES
        return at.part(upload, start // size + 1, content[start : start + size])

    starts = _starts(content)
    with ThreadPoolExecutor(len(starts)) as pool:
        parts = list(pool.map(part, starts))
    complete: Any = partial(at.client.complete_multipart_upload, **upload)
    at.make(upload["Key"], lambda: complete(MultipartUpload={"Parts": parts}))
    at.uploads.remove((upload["Key"], upload["UploadId"]))
    return len(content)


def _get_parts(at: _Bucket, content: bytes) -> int:
    def part(start: int) -> bool:
        end = start + store_verbs.PART_BYTES
        return at.get("large", Range=f"bytes={start}-{end - 1}") == content[start:end]

    starts = _starts(content)
    with ThreadPoolExecutor(len(starts)) as pool:
        if not all(pool.map(part, starts)):
            raise Wrong("what comes back is not what was put in parts")
    return len(content)


def _starts(content: bytes) -> range:
    return range(0, len(content), store_verbs.PART_BYTES)


def _list_uploads(at: _Bucket, upload: dict[str, str]) -> None:
    answer = at.client.list_multipart_uploads(Bucket=at.bucket, Prefix=f"{at.folder}/")
    found = {entry["UploadId"] for entry in answer.get("Uploads", ())}
    if upload and upload["UploadId"] not in found:
        raise Wrong("an unfinished upload is not listed")


def _abort(at: _Bucket, upload: dict[str, str]) -> None:
    if not upload:
        raise Wrong("no upload could be begun to try it on; run again")
    at.client.abort_multipart_upload(**upload)
    if _refusal(at, lambda: at.part(upload, 2, SMALL)) == "":
        raise Wrong("an aborted upload still takes parts, which would be stored for ever")
    at.uploads.remove((upload["Key"], upload["UploadId"]))


def _copy(at: _Bucket) -> None:
    target = at.at("copied")
    source = at.at("small")
    at.make(target["Key"], lambda: at.client.copy_object(**target, CopySource=source))
    if at.get("copied") != SMALL:
        raise Wrong("the copy is not what was copied")


def _delete(at: _Bucket) -> None:
    answer = at.client.delete_object(**at.at("small"))
    if answer.get("DeleteMarker"):
        at.versions.append((at.at("small")["Key"], answer["VersionId"]))
    if _refusal(at, lambda: at.get("small")) == "":
        raise Wrong("a deleted object is still there")


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
