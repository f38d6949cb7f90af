"""`check_store` tells what a store can do, on real servers with real refusals."""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorize_assets.core import store_verbs
from tensorize_assets.core.errors import StoreError
from tensorize_assets.core.s3 import ACCESS_VARIABLE, S3Access, S3Credentials, S3Settings
from tensorize_assets.core.store_check import StoreReport, check_store
from tensorize_assets.demo.s3_server import REGION, LocalS3


@pytest.fixture(autouse=True)
def small_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts as small as S3 takes them: how fast the server is, is not asked here."""
    monkeypatch.setattr(store_verbs, "PART_BYTES", 5 << 20)
    monkeypatch.setattr(store_verbs, "LARGE_BYTES", 10 << 20)


def as_user(server: LocalS3, name: str | None = None) -> S3Access:
    """The access of a user; without a name, of the administrator."""
    keys = (name, f"{name}-secret-key") if name else (server.access_key, server.secret_key)
    settings = S3Settings(
        endpoint_url=server.endpoint, region=REGION, ca_bundle=str(server.ca_bundle)
    )
    return S3Access(settings, S3Credentials(*keys))


def changed(access: S3Access, **settings: object) -> S3Access:
    return S3Access(access.settings.model_copy(update=settings), access.credentials)


def statuses(report: StoreReport) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for verb in report.verbs:
        found.setdefault(verb.status, []).append(verb.name)
    return found


def reason(report: StoreReport, name: str) -> str:
    (found,) = [verb.reason for verb in report.verbs if verb.name == name]
    return found


def contents(server: LocalS3, root: str) -> list[object]:
    """Everything in the bucket of `root`: versions, markers, unfinished uploads."""
    bucket = root.split("/")[2]
    client = server.client()
    versions = client.list_object_versions(Bucket=bucket)
    uploads = client.list_multipart_uploads(Bucket=bucket)
    return [
        *versions.get("Versions", ()),
        *versions.get("DeleteMarkers", ()),
        *uploads.get("Uploads", ()),
    ]


@pytest.fixture
def root(s3_strict: LocalS3) -> Iterator[str]:
    """A root in a new bucket of a server that knows users with some rights each."""
    bucket = f"check-{uuid.uuid4().hex}"
    s3_strict.create_bucket(bucket)
    yield f"s3://{bucket}/some/prefix"
    s3_strict.client().delete_bucket(Bucket=bucket)


def deny(server: LocalS3, root: str, *actions: str) -> None:
    """Take rights away from everybody, in the bucket of `root`."""
    bucket = root.split("/")[2]
    everything = [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"]
    statement = {"Effect": "Deny", "Principal": "*", "Action": actions, "Resource": everything}
    policy = {"Version": "2012-10-17", "Statement": [statement]}
    server.client().put_bucket_policy(Bucket=bucket, Policy=json.dumps(policy))


def forget(proxy: Any, *headers: str) -> None:
    """Have the proxy drop headers of requests, as a gateway does that ignores them."""

    def before(asked: Any) -> None:
        for header in headers:
            asked.headers.pop(header, None)

    proxy.before = before


# S3


@pytest.mark.parametrize("versioned", [False, True])
def test_a_healthy_bucket_works_and_keeps_nothing(
    s3: LocalS3, s3_access: S3Access, versioned: bool
) -> None:
    """In a versioned bucket a plain delete would leave every version, and a marker more."""
    bucket = f"healthy-{uuid.uuid4().hex}"
    s3.create_bucket(bucket, versioned=versioned)
    report = check_store(f"s3://{bucket}/prefix", s3_access)

    assert ["works"] == list(statuses(report))
    assert report.healthy
    assert () == report.left
    assert [] == contents(s3, report.root)
    assert (s3.endpoint, "path") == (report.facts["endpoint"], report.facts["addressing"])
    timed = {verb.name for verb in report.verbs if verb.mb_per_s}
    assert {"put in parts", "get in parts"} == timed
    s3.client().delete_bucket(Bucket=bucket)


def test_a_root_without_prefix_works(s3: LocalS3, s3_root: str, s3_access: S3Access) -> None:
    """A bucket may be given as a whole."""
    assert check_store("/".join(s3_root.split("/")[:3]), s3_access).healthy
    assert [] == contents(s3, s3_root)


def test_content_md5_works_too(s3: LocalS3, s3_root: str, s3_access: S3Access) -> None:
    """What the messages advise must be worth advising."""
    report = check_store(s3_root, changed(s3_access, checksums="when_required"))
    assert report.healthy
    assert "Content-MD5 (when_required)" == report.facts["checksums"]
    assert [] == contents(s3, s3_root)


def test_a_reader_is_told_what_it_may_not(s3_strict: LocalS3, root: str) -> None:
    """Reading is tried on what is there: a serving host may need no more."""
    bucket = root.split("/")[2]
    s3_strict.client().put_object(Bucket=bucket, Key="some/prefix/there", Body=b"v")
    report = check_store(root, as_user(s3_strict, "reader"))

    found = statuses(report)
    assert (["list", "get"], ["put"]) == (found["works"], found["fails"])
    assert "allow these credentials s3:PutObject" in reason(report, "put")
    assert not report.healthy
    assert () == report.left


def test_a_writer_is_told_what_it_may_not(s3_strict: LocalS3, root: str) -> None:
    """What cannot be read back is removed all the same."""
    report = check_store(root, as_user(s3_strict, "writer"))

    found = statuses(report)
    assert ["list", "get", "get in parts"] == found["fails"]
    assert ["list uploads"] == found["tolerated"]
    assert "s3:ListBucket" in reason(report, "list")
    assert "s3:GetObject" in reason(report, "get")
    assert [] == contents(s3_strict, root)


def test_without_the_right_to_delete_it_says_what_is_left(s3_strict: LocalS3, root: str) -> None:
    """Somebody has to remove it."""
    deny(s3_strict, root, "s3:DeleteObject")
    report = check_store(root, as_user(s3_strict))

    assert ["delete"] == statuses(report)["fails"]
    assert "allow these credentials s3:DeleteObject" in reason(report, "delete")
    assert report.left
    assert all("some/prefix/.tmp-check-" in line for line in report.left)


def test_without_the_right_to_abort_it_says_so(s3_strict: LocalS3, root: str) -> None:
    """Parts of an upload that nobody can abort cost money, and no listing shows them."""
    deny(s3_strict, root, "s3:AbortMultipartUpload")
    report = check_store(root, as_user(s3_strict))

    assert ["abort an upload"] == statuses(report)["fails"]
    assert "s3:AbortMultipartUpload" in reason(report, "abort an upload")
    assert 1 == len(report.left)


def test_a_locked_bucket_works_and_keeps_what_it_is_told_to(s3_strict: LocalS3) -> None:
    """With a retention as the bucket's default nothing can be removed before its end."""
    bucket = f"locked-{uuid.uuid4().hex}"
    s3_strict.create_bucket(bucket, object_lock=True)
    retention = {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 1}}
    s3_strict.client().put_object_lock_configuration(
        Bucket=bucket,
        ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", "Rule": retention},
    )
    report = check_store(f"s3://{bucket}/prefix", as_user(s3_strict))

    assert report.healthy
    assert 5 == len(report.left)
    assert all("retention may also forbid it" in line for line in report.left)


@pytest.mark.parametrize(
    ("header", "verb"),
    [
        ("If-None-Match", "put if absent"),
        ("If-Match", "put if unchanged"),
        ("Range", "get a range"),
    ],
)
def test_a_gateway_that_ignores_a_header_is_found(
    s3: LocalS3, s3_root: str, s3_access: S3Access, proxy: Any, header: str, verb: str
) -> None:
    """It answers as if it had done what was asked: only a try against it tells."""
    forget(proxy, header)
    report = check_store(s3_root, changed(s3_access, endpoint_url=proxy.endpoint))

    assert verb in statuses(report)["fails"]
    assert "ignore" in reason(report, verb)
    assert not report.healthy
    assert [] == contents(s3, s3_root)


def test_the_gateway_of_these_tests_drops_nothing_else(
    s3_root: str, s3_access: S3Access, proxy: Any
) -> None:
    """Otherwise the test before would prove nothing."""
    assert check_store(s3_root, changed(s3_access, endpoint_url=proxy.endpoint)).healthy


def test_a_risk_that_is_taken_is_tolerated(s3_root: str, s3_access: S3Access, proxy: Any) -> None:
    """`unsafe_no_cas` says that the user knows."""
    forget(proxy, "If-None-Match", "If-Match")
    access = changed(s3_access, endpoint_url=proxy.endpoint, unsafe_no_cas=True)
    report = check_store(s3_root, access)

    assert ["put if absent", "put if unchanged"] == statuses(report)["tolerated"]
    assert "`s3.unsafe_no_cas` takes the risk" in reason(report, "put if absent")


@pytest.mark.parametrize(
    ("bucket", "secret", "said"),
    [
        ("never-made", None, "make the bucket"),
        (None, "wrong", "the secret key does not belong to the access key"),
    ],
)
def test_what_keeps_everything_from_working_is_said_once(
    s3: LocalS3,
    s3_root: str,
    s3_access: S3Access,
    bucket: str | None,
    secret: str | None,
    said: str,
) -> None:
    """Thirteen times the same refusal would hide it."""
    assert s3_access.credentials is not None
    key = s3_access.credentials.access_key_id
    keys = S3Credentials(key, secret) if secret else s3_access.credentials
    root = f"s3://{bucket}/prefix" if bucket else s3_root
    report = check_store(root, S3Access(s3_access.settings, keys))

    found = statuses(report)
    assert (["list"], 12) == (found["fails"], len(found["skipped"]))
    assert said in reason(report, "list")
    assert s3_access.credentials.secret_access_key not in report.model_dump_json()


def test_an_endpoint_that_is_down_is_named(s3_access: S3Access) -> None:
    """The first thing to look at."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        report = check_store("s3://bucket/prefix", changed(s3_access, endpoint_url=endpoint))

    assert "is the server up" in reason(report, "list")
    assert endpoint == report.facts["endpoint"]


def test_without_an_access_the_environment_leads(
    s3_root: str, s3_access: S3Access, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for every other use of the root."""
    s3_access.write(tmp_path / "access")
    monkeypatch.setenv(ACCESS_VARIABLE, str(tmp_path / "access"))
    assert check_store(s3_root).healthy


# Folders


def test_a_folder_works_and_keeps_nothing(tmp_path: Path) -> None:
    """Also one that is not there yet, as before a first build."""
    report = check_store(str(tmp_path / "new" / "root"))

    assert ["works"] == list(statuses(report))
    assert () == report.left
    assert [] == list(tmp_path.iterdir())


def test_a_folder_that_was_there_stays(tmp_path: Path) -> None:
    """An empty root may be somebody's mount point."""
    check_store(str(tmp_path))
    assert tmp_path.is_dir()


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="needs a folder nobody can write")
def test_a_folder_that_cannot_be_written_says_so() -> None:
    """/proc takes no new folder, from root either."""
    report = check_store("/proc/tensorize")

    assert ["write"] == statuses(report)["fails"]
    assert "cannot write there" in reason(report, "write")
    assert not report.healthy


@pytest.mark.parametrize("root", ["gs://bucket/prefix", "", "s3://", "s3://b/../c"])
def test_what_is_no_root_is_refused(root: str) -> None:
    """Nothing can be tried on it."""
    with pytest.raises(StoreError):
        check_store(root, S3Access())


def test_a_file_is_no_root(tmp_path: Path) -> None:
    """The message names it."""
    file = tmp_path / "file"
    file.write_bytes(os.urandom(8))
    with pytest.raises(StoreError, match="is not a folder"):
        check_store(str(file))
