"""Ranged reading, of a real S3 server and of HTTP servers with manners of their own."""

from __future__ import annotations

import datetime
import importlib
import io
import logging
import random
import ssl
import threading
import time
import tracemalloc
import uuid
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trustme

from tensorize_assets.core import ranged
from tensorize_assets.core import s3 as s3s
from tensorize_assets.core.errors import StoreError, StoreUnavailableError
from tensorize_assets.core.http_source import HttpSource, without_query
from tensorize_assets.core.ranged import RangedReader, S3Source
from tensorize_assets.core.s3_errors import explained
from tensorize_assets.demo.s3_server import REGION, LocalS3

DATA = random.Random(3).randbytes(1_000_003)
PART = 64 * 1024


def access_to(server: LocalS3, **settings: Any) -> s3s.S3Access:
    return s3s.S3Access(
        s3s.S3Settings(endpoint_url=server.endpoint, region=REGION, **settings),
        s3s.S3Credentials(server.access_key, server.secret_key),
    )


def source_of(access: s3s.S3Access, bucket: str, key: str) -> S3Source:
    uri = f"s3://{bucket}/{key}"
    return S3Source(access.client, bucket, key, uri, partial(explained, "get", uri, access))


def signed(server: LocalS3, bucket: str, key: str, seconds: int = 60) -> str:
    return access_to(server).client.generate_presigned_url(
        "get_object", Params={"Bucket": bucket, "Key": key}, ExpiresIn=seconds
    )


@pytest.fixture(scope="module")
def bucket(s3: LocalS3) -> Iterator[str]:
    name = f"ranged-{uuid.uuid4().hex}"
    s3.create_bucket(name)
    s3.client().put_object(Bucket=name, Key="data", Body=DATA)
    yield name
    s3.client().delete_bucket(Bucket=name)


@pytest.fixture(params=["s3", "signed url"])
def source(request: pytest.FixtureRequest, s3: LocalS3, bucket: str) -> ranged.RangeSource:
    if request.param == "s3":
        return source_of(access_to(s3), bucket, "data")
    return HttpSource(signed(s3, bucket, "data"))


@pytest.fixture
def short_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that stays away is given up after two tries instead of six."""
    monkeypatch.setattr(ranged, "_ATTEMPTS", 2)


# Reading


@pytest.mark.parametrize(
    ("start", "end"),
    [(0, None), (0, 1), (5, 5), (PART - 1, PART + 1), (777_777, 10**9), (len(DATA), None)],
)
def test_a_range_is_a_file_of_its_own(
    source: ranged.RangeSource, start: int, end: int | None
) -> None:
    """Its first byte is at position 0, and what lies behind its end is not read."""
    with RangedReader(source, start, end, part_bytes=PART, ahead=2) as reader:
        assert DATA[start:end] == reader.read()
        assert len(DATA[start:end]) == reader.tell()
        assert b"" == reader.read(1)
        assert 0 == reader.seek(0)
        assert DATA[start:end][:10] == reader.read(10)


@pytest.mark.parametrize(("start", "end"), [(2, 1), (-1, None), (len(DATA) + 1, None)])
def test_a_range_that_does_not_exist_is_refused(
    source: ranged.RangeSource, start: int, end: int | None
) -> None:
    with pytest.raises(StoreError, match=f"has {len(DATA)} bytes, not {start} to"):
        RangedReader(source, start, end)


def test_reads_and_seeks_are_those_of_a_file(source: ranged.RangeSource) -> None:
    """Forward within what is read ahead, far away, backwards, and behind the end."""
    rng = random.Random(5)
    expected = io.BytesIO(DATA)
    with RangedReader(source, part_bytes=PART, ahead=2) as reader:
        for _ in range(80):
            match rng.randrange(5):
                case 0:
                    offset = rng.randrange(len(DATA) + 10)
                    assert expected.seek(offset) == reader.seek(offset)
                case 1:
                    # Not before the start: BytesIO would stop there.
                    offset = max(rng.randrange(-2 * PART, 2 * PART), -expected.tell())
                    assert expected.seek(offset, io.SEEK_CUR) == reader.seek(offset, io.SEEK_CUR)
                case 2:
                    size = rng.randrange(3 * PART)
                    assert expected.read(size) == reader.read(size)
                case 3:
                    ours, theirs = bytearray(b"." * 100_000), bytearray(b"." * 100_000)
                    assert expected.readinto(theirs) == reader.readinto(ours)
                    assert theirs == ours
                case _:
                    chunk = reader.read1(1000)
                    assert chunk or expected.tell() >= len(DATA)
                    assert expected.read(len(chunk)) == chunk
            assert expected.tell() == reader.tell()
        assert expected.seek(-9, io.SEEK_END) == reader.seek(-9, io.SEEK_END)
        assert DATA[-9:] == reader.read()


def test_readinto_fills_its_buffer_over_many_parts(source: ranged.RangeSource) -> None:
    """tensorizer does not look at how much it got: what is not filled would be a wrong tensor."""
    buffer = bytearray(len(DATA))
    with RangedReader(source, part_bytes=PART, ahead=3) as reader:
        assert len(DATA) == reader.readinto(memoryview(buffer))
    assert DATA == buffer


def test_nothing_is_read_ahead_from_where_nobody_will_read(source: ranged.RangeSource) -> None:
    """A reader of the first half would fetch what another fetches too. It may still be read."""
    starts: list[int] = []
    read_into = source.read_into

    def counted(start: int, buffer: memoryview, stopped: ranged.Stopped) -> None:
        starts.append(start)
        read_into(start, buffer, stopped)

    source.read_into = counted  # type: ignore[method-assign]
    with RangedReader(source, part_bytes=PART, ahead=3) as reader:
        reader.expect_until(2 * PART)
        assert reader.read(2 * PART) == DATA[: 2 * PART]
        assert [0, PART] == sorted(starts)
        assert reader.read() == DATA[2 * PART :]


def test_an_empty_object_is_read(s3: LocalS3, bucket: str) -> None:
    """It has no first byte to ask for."""
    s3.client().put_object(Bucket=bucket, Key="empty", Body=b"")
    for source in (
        source_of(access_to(s3), bucket, "empty"),
        HttpSource(signed(s3, bucket, "empty")),
    ):
        with RangedReader(source) as reader:
            assert (0, b"") == (source.size, reader.read())


@pytest.mark.parametrize("kind", ["s3", "signed url"])
def test_memory_is_bounded_by_the_parts(s3: LocalS3, bucket: str, kind: str) -> None:
    """Whatever the object's size: a rank reads hundreds of GB."""
    part = 512 * 1024
    s3.client().put_object(Bucket=bucket, Key="large", Body=bytes(32 * part))
    if kind == "s3":
        source: ranged.RangeSource = source_of(access_to(s3), bucket, "large")
    else:
        source = HttpSource(signed(s3, bucket, "large"))
    buffer = bytearray(1000)
    tracemalloc.start()
    try:
        with RangedReader(source, part_bytes=part, ahead=2) as reader:
            while reader.readinto(buffer):
                pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Buffers for three parts, and what boto3 makes of an answer.
    assert 3 * part <= peak < 3 * part + 400_000


def threads(uri: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if uri[-40:] in thread.name]


def test_closing_ends_the_threads(source: ranged.RangeSource) -> None:
    """Also in the middle, with requests on their way."""
    with RangedReader(source, part_bytes=PART, ahead=3) as reader:
        reader.read(10)
        assert threads(source.uri)
    deadline = time.monotonic() + 10
    while threads(source.uri) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [] == threads(source.uri)
    with pytest.raises(ValueError, match="was closed"):
        reader.read(1)


# Objects that change


@pytest.mark.fault(
    "Race",
    "an object is replaced between two of its parts, from S3 and by a signed URL",
    "refused, never mixed",
)
def test_an_object_that_is_replaced_meanwhile_is_refused(s3: LocalS3, bucket: str) -> None:
    """Half of each would be a file that never was."""
    for number, open_source in enumerate(
        [
            lambda: source_of(access_to(s3), bucket, "changing"),
            lambda: HttpSource(signed(s3, bucket, "changing")),
        ]
    ):
        s3.client().put_object(Bucket=bucket, Key="changing", Body=DATA)
        with RangedReader(open_source(), part_bytes=PART, ahead=1) as reader:
            reader.read(10)
            s3.client().put_object(Bucket=bucket, Key="changing", Body=DATA[::-1])
            with pytest.raises(StoreError, match="replaced while it was read") as caught:
                reader.read()
            assert not isinstance(caught.value, StoreUnavailableError), number
            assert 0 == reader.retries


@pytest.mark.fault(
    "Race", "an object is removed between two of its parts", "one error that names it"
)
def test_an_object_that_goes_meanwhile_is_missed(s3: LocalS3, bucket: str) -> None:
    for open_source in (
        lambda: source_of(access_to(s3), bucket, "going"),
        lambda: HttpSource(signed(s3, bucket, "going")),
    ):
        s3.client().put_object(Bucket=bucket, Key="going", Body=DATA)
        with RangedReader(open_source(), part_bytes=PART, ahead=1) as reader:
            reader.read(10)
            s3.client().delete_object(Bucket=bucket, Key="going")
            with pytest.raises(StoreError, match=r"/going.*does not exist"):
                reader.read()


def test_an_absent_object_is_named(s3: LocalS3, bucket: str) -> None:
    with pytest.raises(StoreError, match=f"s3://{bucket}/absent .*does not exist"):
        source_of(access_to(s3), bucket, "absent")
    with pytest.raises(StoreError, match=f"{bucket}/absent does not exist"):
        HttpSource(signed(s3, bucket, "absent"))


# Servers that die


@pytest.mark.fault("Bad network", "download: the server restarts", "goes on where it was")
@pytest.mark.parametrize("kind", ["s3", "signed url"])
def test_a_server_that_restarts_in_the_middle_is_waited_for(tmp_path: Path, kind: str) -> None:
    """What was on its way is asked for again, and counted."""
    with LocalS3(tmp_path / "s3") as server:
        server.create_bucket("bucket")
        server.client().put_object(Bucket="bucket", Key="data", Body=DATA)
        if kind == "s3":
            source = source_of(access_to(server, max_attempts=1), "bucket", "data")
        else:
            source = HttpSource(signed(server, "bucket", "data"))
        with RangedReader(source, part_bytes=PART, ahead=1) as reader:
            first = reader.read(10)
            server.kill()
            # In this thread: the server ends with the one that started it.
            rest: list[bytes] = []
            reading = threading.Thread(target=lambda: rest.append(reader.read()))
            reading.start()
            while reading.is_alive() and not reader.retries:
                time.sleep(0.01)
            server.restart()
            reading.join()
            assert [DATA] == [first + part for part in rest]
            assert reader.retries > 0


@pytest.mark.fault(
    "Bad network",
    "download: the server stays away",
    "one error, to be tried again, without the signature",
)
@pytest.mark.usefixtures("short_tries")
def test_a_server_that_stays_away_is_trouble_that_may_pass(tmp_path: Path) -> None:
    """Not a finding about the object: whoever asked may ask again later."""
    with LocalS3(tmp_path / "s3") as server:
        server.create_bucket("bucket")
        server.client().put_object(Bucket="bucket", Key="data", Body=DATA)
        url = signed(server, "bucket", "data")
        sources = [
            source_of(access_to(server, max_attempts=1), "bucket", "data"),
            HttpSource(url),
        ]
        readers = [RangedReader(source, part_bytes=PART, ahead=1) for source in sources]
        for reader in readers:
            reader.read(10)
        server.kill()
        for reader in readers:
            with pytest.raises(
                StoreUnavailableError, match=r"refused|connect|closed|broke|reset"
            ) as caught:
                reader.read()
            assert url.partition("?")[2] not in str(caught.value)
            assert 1 == reader.retries or 2 == reader.retries
            reader.close()
        with pytest.raises(StoreUnavailableError) as caught:
            HttpSource(url)
        assert "Signature" not in str(caught.value)
        assert caught.value.__cause__ is None


@pytest.mark.fault("Bad network", "download: 503 SlowDown, three times", "asked again, and counted")
def test_every_request_that_a_busy_server_refuses_is_counted(
    s3: LocalS3, bucket: str, proxy: Any, refusal: Any
) -> None:
    """With the settings as they come: what boto3 tried again unseen, nobody would know of."""
    access = s3s.S3Access(
        s3s.S3Settings(endpoint_url=proxy.endpoint, region=REGION),
        s3s.S3Credentials(s3.access_key, s3.secret_key),
    )
    source = source_of(access, bucket, "data")
    refused = 0

    def before(asked: Any) -> Any:
        nonlocal refused
        if refused == 3:
            return None
        refused += 1
        return refusal(503, "SlowDown")

    proxy.before = before
    with RangedReader(source, part_bytes=PART, ahead=1) as reader:
        assert DATA == reader.read()
        assert 3 == reader.retries


@pytest.mark.fault(
    "Bad network",
    "download: 503 SlowDown to its first request",
    "asked again as often as the settings say",
)
def test_a_first_request_that_is_refused_comes_again(
    s3: LocalS3, bucket: str, proxy: Any, refusal: Any
) -> None:
    """As often as the settings say."""
    refused: list[Any] = []

    def before(asked: Any) -> Any:
        refused.append(asked)
        return refusal(503, "SlowDown") if len(refused) < 3 else None

    proxy.before = before
    for attempts in (2, 3):
        refused.clear()
        access = s3s.S3Access(
            s3s.S3Settings(
                endpoint_url=proxy.endpoint,
                region=REGION,
                addressing="path",
                max_attempts=attempts,
            ),
            s3s.S3Credentials(s3.access_key, s3.secret_key),
        )
        if attempts == 2:
            with pytest.raises(StoreUnavailableError, match="SlowDown"):
                source_of(access, bucket, "data")
        else:
            assert len(DATA) == source_of(access, bucket, "data").size
        assert attempts == len(refused)


@pytest.mark.fault("Bad network", "download: nothing comes for minutes", "given up in one error")
def test_a_server_that_swallows_requests_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every try waits for its time-out: ten of them, for each part, would take an hour."""
    monkeypatch.setattr(ranged, "_IDLE_S", 0.0)
    manners = Manners()
    with server_with(manners) as url:
        source = HttpSource(f"{url}/data")
        manners.status = 503
        with RangedReader(source, part_bytes=PART, ahead=1) as reader:
            with pytest.raises(StoreUnavailableError, match="503"):
                reader.read()
            assert 0 == reader.retries


# Other servers


@dataclass
class Manners:
    """How a server of one object, at /data, answers."""

    ranges: bool = True
    headers: dict[str, str] = field(default_factory=lambda: {"ETag": '"one"'})
    conditions: bool = True
    cut: int = 0
    place: str | None = None
    status: int | None = None
    redirects: dict[str, str] = field(default_factory=dict[str, str])
    data: bytes = DATA
    seen: list[str] = field(default_factory=list[str])


@contextmanager
def server_with(manners: Manners, tls: ssl.SSLContext | None = None) -> Generator[str]:
    """Serves; yields its URL without a path."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            manners.seen.append(self.path)
            self.answer(*self.chosen())

        def chosen(self) -> tuple[int, bytes, dict[str, str]]:
            path = self.path.partition("?")[0]
            if path in manners.redirects:
                return 302, b"", {"Location": manners.redirects[path]}
            if manners.status is not None:
                return manners.status, b"no", {}
            wanted = self.headers.get("If-Match")
            if manners.conditions and wanted not in (None, manners.headers.get("ETag")):
                return 412, b"", {}
            if not manners.ranges:
                return 200, manners.data, manners.headers
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            body = manners.data[first : last + 1]
            place = f"bytes {first}-{first + len(body) - 1}/{len(manners.data)}"
            return 206, body, manners.headers | {"Content-Range": manners.place or place}

        def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            if manners.cut and len(body) > 1:
                manners.cut -= 1
                body = body[: len(body) // 2]
                self.close_connection = True
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"{'https' if tls else 'http'}://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def read(url: str, **more: Any) -> bytes:
    with RangedReader(HttpSource(url, **more), part_bytes=PART, ahead=2) as reader:
        return reader.read()


@pytest.mark.fault("Bad network", "download by URL: connections are cut", "resumed")
def test_connections_cut_in_the_middle_are_counted_and_made_again() -> None:
    """tensorizer's own reader would end there."""
    with server_with(Manners(cut=3)) as url:
        source = HttpSource(f"{url}/data")
        with RangedReader(source, part_bytes=PART, ahead=1) as reader:
            assert DATA == reader.read()
            assert 3 == reader.retries


@pytest.mark.fault("Bad network", "download by URL: 500, 503, 429", "one error, to be tried again")
@pytest.mark.usefixtures("short_tries")
@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_server_in_trouble_may_recover(status: int) -> None:
    with (
        server_with(Manners(status=status)) as url,
        pytest.raises(StoreUnavailableError, match=f"{url}/data: the server .*{status}"),
    ):
        read(f"{url}/data?secret")


@pytest.mark.fault(
    "Bad network",
    "download by URL: no ranges, 403, 404, odd answers",
    "one error at once: the reason",
)
@pytest.mark.parametrize(
    ("manners", "says"),
    [
        (Manners(ranges=False), "knows no ranges"),
        (Manners(status=404), "does not exist"),
        (Manners(status=403), "the server refuses .403.; is the object public"),
        (Manners(status=418), "the server answered 418"),
        (Manners(redirects={"/data": "http://[::1"}), "to a URL that cannot be followed"),
        (Manners(redirects={"/data": "http://h:99999999/"}), "to a URL that cannot be followed"),
        (Manners(place="bytes 0-0/" + "9" * 5000), "knows no ranges .Content-Range: 'bytes 0-0/9"),
        (Manners(place="\x1b[2J"), r"Content-Range: '.x1b"),
    ],
    ids=["no ranges", "absent", "forbidden", "odd", "no URL", "no port", "digits", "escape"],
)
def test_what_a_server_refuses_is_refused_with_the_reason(manners: Manners, says: str) -> None:
    """At once: no retry helps."""
    with server_with(manners) as url:
        with pytest.raises(StoreError, match=says) as caught:
            read(f"{url}/data?X-Amz-Signature=0123")
        assert "0123" not in str(caught.value)
        assert not isinstance(caught.value, StoreUnavailableError)
        assert 1 == len(manners.seen)


@pytest.mark.parametrize(
    "headers",
    [{"ETag": 'W/"one"'}, {"Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}],
    ids=["weak", "dated"],
)
@pytest.mark.parametrize("conditions", [True, False])
def test_a_server_without_strong_etags_shows_a_change_too(
    headers: dict[str, str], conditions: bool
) -> None:
    """If-Match takes strong ones only; the answer's own are compared as well."""
    manners = Manners(headers=headers, conditions=conditions)
    with server_with(manners) as url:
        assert DATA == read(f"{url}/data")
        with RangedReader(HttpSource(f"{url}/data"), part_bytes=PART, ahead=1) as reader:
            reader.read(10)
            manners.headers = {
                name: value.replace("1", "2").replace("one", "two")
                for name, value in headers.items()
            }
            with pytest.raises(StoreError, match="replaced while it was read"):
                reader.read()


@pytest.mark.fault("Bad network", "download by URL: another size under the same name", "refused")
def test_an_object_of_another_size_is_another() -> None:
    """Also where a server tells versions apart by nothing at all."""
    manners = Manners(headers={})
    with (
        server_with(manners) as url,
        RangedReader(HttpSource(f"{url}/data"), part_bytes=PART, ahead=1) as reader,
    ):
        reader.read(10)
        manners.data = DATA[:-1]
        with pytest.raises(StoreError, match="was the object replaced"):
            reader.read()


def test_a_redirect_is_followed_for_every_part() -> None:
    """Where it leads may be good for minutes only."""
    manners = Manners(redirects={"/there": "/data?moved"})
    with server_with(manners) as url:
        assert DATA == read(f"{url}/there")
        assert "/data?moved" in manners.seen


def test_a_redirect_in_a_circle_ends() -> None:
    with (
        server_with(Manners(redirects={"/data": "/data"})) as url,
        pytest.raises(StoreError, match="redirects more than 5 times"),
    ):
        read(f"{url}/data")


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def tls(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


def test_https_needs_a_certificate_that_is_trusted(
    authority: trustme.CA, tls: ssl.SSLContext, tmp_path: Path
) -> None:
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    with server_with(Manners(), tls) as url:
        assert DATA == read(f"{url}/data", ca_bundle=str(tmp_path / "ca.pem"))
        with pytest.raises(StoreError, match="certificate is not trusted") as caught:
            read(f"{url}/data?secret")
        assert "secret" not in str(caught.value)


def test_a_redirect_does_not_leave_https(
    authority: trustme.CA, tls: ssl.SSLContext, tmp_path: Path
) -> None:
    """On the way back anybody could put other weights in."""
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    with server_with(Manners()) as plain:
        manners = Manners(redirects={"/data": f"{plain}/data?secret"})
        with (
            server_with(manners, tls) as url,
            pytest.raises(StoreError, match=f"{plain}/data, which is not https") as caught,
        ):
            read(f"{url}/data", ca_bundle=str(tmp_path / "ca.pem"))
    assert "secret" not in str(caught.value)


# Secrets


@pytest.mark.fault(
    "Bad network", "download by URL: its signature has expired", "one error, without the signature"
)
@pytest.mark.parametrize("wrong", ["signature", "expired"])
def test_a_signature_is_in_no_error(
    s3: LocalS3, bucket: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sees it may read the object."""
    if wrong == "expired":
        past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=2)
        for module in ("botocore.auth", "botocore.crt.auth"):
            with suppress(ImportError):
                monkeypatch.setattr(
                    importlib.import_module(module), "get_current_datetime", lambda **_: past
                )
    url = signed(s3, bucket, "data")
    if wrong == "signature":
        url = url.replace("Signature=", "Signature=abc")
    with pytest.raises(StoreError, match="expired or made with a wrong key") as caught:
        HttpSource(url)
    assert "ignature=" not in str(caught.value)


def test_a_signature_is_in_no_log(
    s3: LocalS3, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    """urllib3's debug log names each request."""
    # By name: the kubernetes package turns this logger down for the whole process.
    caplog.set_level(logging.DEBUG, "urllib3")
    url = signed(s3, bucket, "data")
    caplog.clear()
    assert DATA == read(url)
    assert any("/data" in line for line in caplog.messages)
    assert [] == [line for line in caplog.messages if "ignature" in line or "?X" in line]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://user:secret@host/a/b?X-Amz-Signature=1#x", "https://host/a/b"),
        ("http://host:80/a%20b", "http://host:80/a%20b"),
    ],
)
def test_a_url_is_shown_without_secrets(url: str, shown: str) -> None:
    assert shown == without_query(url)


def test_no_http_url_is_refused() -> None:
    with pytest.raises(StoreError, match=r"ftp://host/a is no http\(s\) URL"):
        HttpSource("ftp://host/a?secret")


@pytest.mark.parametrize("kind", ["s3", "url"])
def test_a_server_without_ranges_is_not_read_to_the_end(
    proxy: Any, refusal: Any, kind: str
) -> None:
    """It sends all of an object, hundreds of gigabytes maybe, for what was asked as one byte."""
    ended = threading.Event()
    proxy.before = lambda asked: type(refusal(200, ""))(
        200, {"ETag": '"one"'}, bytes(64 * 1024 * 1024), ended.set
    )
    settings = s3s.S3Settings(endpoint_url=proxy.endpoint, region=REGION, addressing="path")
    access = s3s.S3Access(settings, s3s.S3Credentials("someone", "a-secret"))
    with pytest.raises(StoreError, match="knows no ranges"):
        HttpSource(f"{proxy.endpoint}/data") if kind == "url" else source_of(access, "b", "data")
    assert not ended.is_set()
