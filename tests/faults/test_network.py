"""A bad network between client and store, and a bad store: by retry or not at all, nothing half."""

from __future__ import annotations

import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import tenacity
from botocore import credentials as botocore_credentials
from botocore.retries.standard import ExponentialBackoff
from chain_home import NO_WORKER, Home, stand_in, weights
from s3_proxy import Answer, Asked, S3Proxy
from small_builds import MODEL, SUFFIX, TRUSTED, build, put
from tcp_proxy import Cut, TcpProxy

from tensorize_assets.assets import target
from tensorize_assets.core import channel, layout, ranged, s3_store
from tensorize_assets.core import s3 as s3s
from tensorize_assets.core.errors import ConflictError, StoreError, StoreUnavailableError
from tensorize_assets.core.s3 import S3Access, S3Credentials, S3Settings, split_uri
from tensorize_assets.core.s3_store import S3Store
from tensorize_assets.core.store import digest
from tensorize_assets.core.verify import verify_directory
from tensorize_assets.demo.hub_server import LocalHub
from tensorize_assets.demo.s3_server import REGION, LocalS3

MiB = 1024 * 1024
PART = 5 * MiB
BIG = 2 * PART + MiB
NAME = "vllm/gpt2/v1/model.tensors"
FILES = {"config.json": b"{}", "model.safetensors": weights(b"small")}

Act = Callable[[S3Store], object]
Prepare = Callable[..., S3Store]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As small as S3 takes them, so that little data has many."""
    monkeypatch.setattr(s3_store, "PART_BYTES", PART)
    monkeypatch.setattr(ranged, "PART_BYTES", MiB)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another try follows at once."""
    monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda *_: 0.01)
    monkeypatch.setattr(ranged, "_WAIT", tenacity.wait_none())
    monkeypatch.setattr(tenacity, "wait_random_exponential", lambda *_, **__: tenacity.wait_none())
    monkeypatch.setattr(target, "_FIRST_WAIT_S", 0.01)


@pytest.fixture
def store(s3_root: str, s3_access: S3Access) -> S3Store:
    """Reached straight: what a reader sees."""
    return S3Store(s3_root, s3_access)


@pytest.fixture
def proxy(s3: LocalS3) -> Iterator[S3Proxy]:
    running = S3Proxy(s3)
    yield running
    running.close()


@pytest.fixture
def wire(s3: LocalS3) -> Iterator[TcpProxy]:
    running = TcpProxy(urlsplit(s3.endpoint).port or 0)
    yield running
    running.close()


@pytest.fixture
def through(s3: LocalS3, s3_root: str, proxy: S3Proxy) -> Prepare:
    """Makes a store that is reached through the proxy, with changed settings."""
    return lambda **settings: at(proxy.endpoint, s3, s3_root, **settings)


def at(endpoint: str, s3: LocalS3, root: str, **settings: Any) -> S3Store:
    values = {"endpoint_url": endpoint, "region": REGION, "addressing": "path", **settings}
    keys = S3Credentials(s3.access_key, s3.secret_key)
    return S3Store(root, S3Access(S3Settings(**values), keys))


def shown(s3: LocalS3, store: S3Store) -> tuple[list[str], list[str]]:
    """The keys of all objects, hidden ones too, and of all unfinished uploads."""
    bucket, prefix = split_uri(store.root)
    objects = s3.client().list_objects_v2(Bucket=bucket).get("Contents", ())
    uploads = s3.client().list_multipart_uploads(Bucket=bucket).get("Uploads", ())
    objects, uploads = (
        sorted(entry["Key"].removeprefix(f"{prefix}/") for entry in found)
        for found in (objects, uploads)
    )
    return objects, uploads


def content(size: int = BIG) -> bytes:
    return os.urandom(size)


def send(store: S3Store, data: bytes, key: str = NAME) -> object:
    return store.put_stream(key, [data], size=len(data))


class Times:
    """True for the first `times` requests that fit, whichever thread asks."""

    def __init__(self, times: int, fits: Callable[[Asked], bool]) -> None:
        self.left = times
        self._fits = fits
        self._lock = threading.Lock()

    def __call__(self, asked: Asked) -> bool:
        with self._lock:
            if self.left and self._fits(asked):
                self.left -= 1
                return True
            return False


def is_part(asked: Asked) -> bool:
    return asked.method == "PUT" and "partNumber=" in asked.target


def is_end(asked: Asked) -> bool:
    return asked.method == "POST" and "uploadId=" in asked.target


def is_put(asked: Asked) -> bool:
    return asked.method == "PUT" and "?" not in asked.target


ALWAYS = 10**6


# The wire


@pytest.mark.fault("Bad network", "upload: resets in the middle of a part, 3 times", "sent again")
def test_a_part_whose_connection_is_reset_is_sent_again(
    s3: LocalS3, store: S3Store, wire: TcpProxy
) -> None:
    """Each part once more, and no byte twice in the object."""
    wire.cuts = [Cut(up=True, after=2 * MiB, times=3)]
    data = content()
    found = send(at(wire.endpoint, s3, store.root), data)
    assert 0 == wire.cuts[0].times
    assert found == digest(store, NAME)
    assert ([NAME], []) == shown(s3, store)


@pytest.mark.fault(
    "Bad network", "upload: every part is reset", "one error; nothing is seen, no upload stays"
)
def test_an_upload_whose_parts_never_arrive_is_given_up(
    s3: LocalS3, store: S3Store, wire: TcpProxy
) -> None:
    """A middlebox that cuts whatever is long lets the small requests through: also the abort."""
    wire.cuts = [Cut(up=True, after=MiB, times=ALWAYS)]
    with pytest.raises(StoreUnavailableError) as caught:
        send(at(wire.endpoint, s3, store.root, max_attempts=2), content())
    assert re.search(rf"cannot put {store.uri(NAME)} at .*; is the server up", str(caught.value))
    assert ([], []) == shown(s3, store)


@pytest.mark.fault("Bad network", "download: resets in the middle of an answer, 3 times", "resumed")
def test_a_download_that_is_reset_goes_on(
    s3: LocalS3, store: S3Store, wire: TcpProxy, tmp_path: Path
) -> None:
    """From where each part begins, not from the first byte."""
    data = content()
    sent = send(store, data)
    wire.cuts = [Cut(up=False, after=MiB // 2, times=3)]
    assert sent == at(wire.endpoint, s3, store.root).get_file(NAME, tmp_path / "file")
    assert 0 == wire.cuts[0].times
    assert data == (tmp_path / "file").read_bytes()


@pytest.mark.fault("Bad network", "download: every answer is reset", "one error; no file")
def test_a_download_that_never_arrives_leaves_no_file(
    s3: LocalS3, store: S3Store, wire: TcpProxy, tmp_path: Path
) -> None:
    """Not half of it, and not under another name either."""
    send(store, content())
    wire.cuts = [Cut(up=False, after=MiB // 2, times=ALWAYS)]
    with pytest.raises(StoreUnavailableError, match=re.escape(store.uri(NAME))):
        at(wire.endpoint, s3, store.root).get_file(NAME, tmp_path / "file")
    assert [] == list(tmp_path.iterdir())


@pytest.mark.fault("Bad network", "every request: 5 ms for each 64 KiB", "done, only later")
def test_a_slow_line_is_only_slow(
    s3: LocalS3, store: S3Store, wire: TcpProxy, tmp_path: Path
) -> None:
    """No limit is on how long a transfer takes, as long as something comes."""
    wire.delay_s = 0.005
    slow = at(wire.endpoint, s3, store.root)
    data = content()
    assert send(slow, data) == slow.get_file(NAME, tmp_path / "file")
    etag = slow.put_bytes("a.json", b"1", if_absent=True)
    slow.put_bytes("a.json", b"2", if_match=etag)
    assert ("a.json", NAME) == slow.list("")
    assert (["a.json", NAME], []) == shown(s3, store)


@pytest.mark.fault(
    "Bad network", "every request: connections on which nothing comes", "given up, made again"
)
@pytest.mark.parametrize("act", ["upload", "download", "small"])
def test_a_connection_without_an_answer_is_made_again(
    s3: LocalS3,
    store: S3Store,
    wire: TcpProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    act: str,
) -> None:
    """A firewall that forgot a connection says nothing to anybody."""
    # Of what is sent, the other one is the limit.
    monkeypatch.setattr(s3s, "_READ_TIMEOUT_S", 0.5)
    monkeypatch.setattr(s3s, "_CONNECT_TIMEOUT_S", 0.5)
    silenced = at(wire.endpoint, s3, store.root)
    data = content(PART if act == "small" else BIG)
    sent = send(store, data)
    wire.silent = 2
    if act == "download":
        assert sent == silenced.get_file(NAME, tmp_path / "file")
    else:
        assert sent == send(silenced, data)
    assert 0 == wire.silent
    assert ([NAME], []) == shown(s3, store)


# A busy server


READS: dict[str, tuple[str, Act]] = {
    "get": ("GET", lambda s: s.get_bytes("a")),
    "get in parts": ("GET", lambda s: s.open_read(NAME).read()),
    "head": ("HEAD", lambda s: s.stat("a")),
    "list": ("GET", lambda s: s.list("")),
    "put": ("PUT", lambda s: s.put_bytes("b", b"x")),
    "put if absent": ("PUT", lambda s: s.put_bytes("b", b"x", if_absent=True)),
    "delete": ("DELETE", lambda s: s.delete("a")),
    "begin an upload": ("POST", lambda s: send(s, content(), "big")),
    "copy": ("PUT", lambda s: s.copy("a", "c")),
}


@pytest.mark.parametrize(
    ("method", "act"),
    [
        pytest.param(
            *READS[name],
            marks=pytest.mark.fault("Bad network", f"{name}: 503 SlowDown, twice", "asked again"),
            id=name,
        )
        for name in READS
    ],
)
def test_a_busy_server_is_asked_again(
    through: Prepare, store: S3Store, proxy: S3Proxy, method: str, act: Act
) -> None:
    """For every verb, as a server under load says it to whoever comes."""
    store.put_bytes("a", b"x")
    send(store, content())
    busy = Times(2, lambda asked: asked.method == method)
    proxy.before = lambda asked: Answer.refusal(503, "SlowDown") if busy(asked) else None
    act(through())
    assert 0 == busy.left


# Uploads in parts


@pytest.mark.fault(
    "Bad network", "complete an upload: 500, and it did succeed", "found by its mark, whole"
)
def test_an_upload_that_was_completed_in_spite_of_a_500_is_whole(
    through: Prepare, store: S3Store, proxy: S3Proxy, s3: LocalS3
) -> None:
    """The second request is told that there is no such upload, by servers that forget it."""
    failed, forgotten = Times(1, is_end), Times(ALWAYS, is_end)
    proxy.before = lambda asked: (
        Answer.refusal(404, "NoSuchUpload") if not failed.left and forgotten(asked) else None
    )
    proxy.after = lambda asked, answer: (
        Answer.refusal(500, "InternalError") if failed(asked) else answer
    )
    assert send(through(), content()) == digest(store, NAME)
    assert ([NAME], []) == shown(s3, store)


@pytest.mark.fault(
    "Bad network",
    "complete an upload: 500 to every try, and the first did succeed",
    "found by its mark, or one error; what is seen is whole, no upload stays",
)
@pytest.mark.parametrize("attempts", [1, 3])
def test_an_upload_whose_end_is_never_confirmed_is_no_half(
    through: Prepare, store: S3Store, proxy: S3Proxy, s3: LocalS3, attempts: int
) -> None:
    proxy.after = lambda asked, answer: (
        Answer.refusal(500, "InternalError") if is_end(asked) else answer
    )
    data = content()
    with pytest.raises(StoreUnavailableError, match=r"cannot put .*InternalError.*run again later"):
        send(through(max_attempts=attempts), data)
    with store.open_read(NAME) as stream:
        assert data == stream.read()
    assert ([NAME], []) == shown(s3, store)


@pytest.mark.fault(
    "Bad network", "complete an upload: 200 with an error in its body", "asked for again"
)
def test_an_error_in_a_200_is_an_error(
    through: Prepare, store: S3Store, proxy: S3Proxy, s3: LocalS3
) -> None:
    """S3 says 200 before it knows, to keep the connection open."""
    failed = Times(1, is_end)
    said = Answer.refusal(200, "InternalError", "We encountered an internal error.")
    proxy.before = lambda asked: said if failed(asked) else None
    assert send(through(), content()) == digest(store, NAME)
    assert ([NAME], []) == shown(s3, store)


# What was damaged on the way


def flipped(data: bytes) -> bytes:
    """As long as before, with one bit of the middle changed."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.fault(
    "Bad network", "put: one bit of a small object flips on the way", "one error; nothing is seen"
)
@pytest.mark.parametrize("condition", [{}, {"if_absent": True}])
def test_a_small_object_damaged_on_the_way_up_is_refused(
    through: Prepare, store: S3Store, proxy: S3Proxy, s3: LocalS3, condition: dict[str, Any]
) -> None:
    def flip(asked: Asked) -> None:
        if is_put(asked) and asked.target.endswith("/a.json"):
            asked.body = flipped(asked.body)

    proxy.before = flip
    with pytest.raises(StoreError, match=rf"cannot put {store.uri('a.json')} .*not what was sent"):
        through().put_bytes("a.json", b'{"some": "document"}', **condition)
    assert ([], []) == shown(s3, store)


@pytest.mark.fault(
    "Bad network", "download: one bit flips, the length is right", "one error; no file"
)
def test_a_file_damaged_on_the_way_down_is_refused(
    through: Prepare, store: S3Store, proxy: S3Proxy, tmp_path: Path
) -> None:
    """No range has a checksum of its own: the whole file's is what is compared."""
    data = content(PART)
    sent = store.put_stream(NAME, [data], size=len(data))
    damaged = Times(1, lambda asked: asked.headers.get("Range", "bytes=0-0") != "bytes=0-0")

    def after(asked: Asked, answer: Answer) -> Answer:
        if damaged(asked):
            answer.body = flipped(answer.body)
        return answer

    proxy.after = after
    fetching = through()
    with pytest.raises(StoreError, match=rf"{store.uri(NAME)} is not what belongs at"):
        fetching.get_file(NAME, tmp_path / "file", sha256=sent.sha256)
    assert [] == list(tmp_path.iterdir())
    assert sent == fetching.get_file(NAME, tmp_path / "file", sha256=sent.sha256)


@pytest.mark.fault(
    "Bad network", "get: one bit of a small object flips, the length is right", "read again"
)
def test_a_document_damaged_on_the_way_down_is_read_again(
    through: Prepare, store: S3Store, proxy: S3Proxy
) -> None:
    """Its checksum comes with it; without that its signature would only be called wrong."""
    put(build(store))
    damaged = Times(1, lambda asked: asked.method == "GET" and asked.target.endswith(".json"))

    def after(asked: Asked, answer: Answer) -> Answer:
        if damaged(asked):
            answer.body = flipped(answer.body)
        return answer

    proxy.after = after
    found = channel.read_channel(through(), MODEL, SUFFIX, TRUSTED)
    assert found == channel.read_channel(store, MODEL, SUFFIX, TRUSTED)
    assert 0 == damaged.left


@pytest.mark.fault("Bad network", "verify: one bit of one read flips", "read again; no damage")
@pytest.mark.fault("Bad network", "verify: the same bit of every read flips", "named as damage")
@pytest.mark.parametrize("times", [1, ALWAYS])
def test_a_build_is_not_called_damaged_for_a_bit_that_flips_on_the_way(
    through: Prepare, store: S3Store, proxy: S3Proxy, times: int
) -> None:
    """An audit would take it out of service until it reads it again."""
    made = build(store)
    shard = made.key("model-rank-000.tensors")
    damaged = Times(
        times,
        lambda asked: (
            asked.method == "GET"
            and unquote(asked.target).endswith(shard)
            and asked.headers["Range"] != "bytes=0-0"
        ),
    )

    def after(asked: Asked, answer: Answer) -> Answer:
        if damaged(asked):
            answer.body = flipped(answer.body)
        return answer

    proxy.after = after
    report = verify_directory(through(), made.directory, TRUSTED)
    assert damaged.left < times
    assert (times == ALWAYS) == bool(report.problems)
    assert {"hash"} >= {problem.kind for problem in report.problems}


@pytest.mark.fault(
    "Bad network", "download: bodies cut to half, by a cache that says so", "one error; no file"
)
def test_a_body_that_is_shorter_than_its_range_is_refused(
    through: Prepare, store: S3Store, proxy: S3Proxy, tmp_path: Path
) -> None:
    """Its Content-Length is that of what is left: no connection breaks."""
    send(store, content(PART))

    def after(asked: Asked, answer: Answer) -> Answer:
        if asked.method == "GET" and len(answer.body) > 1:
            answer.body = answer.body[: len(answer.body) // 2]
            answer.headers["Content-Length"] = str(len(answer.body))
        return answer

    proxy.after = after
    with pytest.raises(StoreUnavailableError, match=rf"reading {store.uri(NAME)} broke off after"):
        through().get_file(NAME, tmp_path / "file")
    assert [] == list(tmp_path.iterdir())


# Writes that are lost


def losing(lost: Callable[[Asked], bool]) -> Callable[[Asked], Answer | None]:
    """A store that says 200 to these, with what an ETag looks like, and keeps nothing."""

    def before(asked: Asked) -> Answer | None:
        if not lost(asked):
            return None
        if not is_end(asked):
            return Answer(200, {"ETag": f'"{"0" * 32}"', "Date": formatdate(usegmt=True)})
        said = "<CompleteMultipartUploadResult><ETag>&quot;0-3&quot;</ETag>"
        return Answer(200, {}, f"{said}</CompleteMultipartUploadResult>".encode())

    return before


def to(name: str) -> Callable[[Asked], bool]:
    return lambda asked: is_put(asked) and unquote(asked.target).endswith(f"/{name}")


@pytest.mark.parametrize(
    "condition",
    [
        pytest.param(
            condition,
            marks=pytest.mark.fault("Bad network", f"{name}: 200, and it is lost, twice", "again"),
            id=name,
        )
        for name, condition in {
            "put": {},
            "put if absent": {"if_absent": True},
            "put if unchanged": {"if_match": True},
        }.items()
    ],
)
def test_a_write_that_is_lost_is_made_again(
    through: Prepare, store: S3Store, proxy: S3Proxy, condition: dict[str, Any]
) -> None:
    """Nothing is taken for stored that is not there to be seen."""
    if "if_match" in condition:
        condition = {"if_match": store.put_bytes("a", b"old")}
    lost = Times(2, to("a"))
    proxy.before = losing(lost)
    etag = through().put_bytes("a", b"new", **condition)
    assert (b"new", etag) == store.get_bytes("a")
    assert 0 == lost.left


@pytest.mark.fault("Bad network", "put: 200, and every one is lost", "one error, to be tried again")
@pytest.mark.parametrize("before", [None, b"old"])
@pytest.mark.parametrize("conditional", [False, True])
def test_a_store_that_loses_every_write_is_named(
    through: Prepare,
    store: S3Store,
    proxy: S3Proxy,
    s3: LocalS3,
    before: bytes | None,
    conditional: bool,
) -> None:
    """Whether something was there or not; what was, is there still."""
    etag = store.put_bytes("a", before) if before else None
    if before:
        # A server's times have whole seconds, and by these an old object is told from a new one.
        (written,) = [found.modified for found in store.listing("a")]
        while time.time() < int(written) + 1:
            time.sleep(0.05)
    proxy.before = losing(to("a"))
    condition: dict[str, Any] = (
        {} if not conditional else {"if_match": etag} if etag else {"if_absent": True}
    )
    with pytest.raises(StoreUnavailableError) as caught:
        through().put_bytes("a", b"new", **condition)
    said = rf"cannot put {store.uri('a')} at .* it is not there; .*loses what is written"
    assert re.search(said, str(caught.value))
    found = store.get_bytes("a")
    assert before == (found.data if found else None)
    assert [] == shown(s3, store)[1]


@pytest.mark.fault(
    "Bad network", "complete an upload: 200, and it is lost", "one error; no upload stays"
)
def test_an_upload_that_is_lost_at_its_end_is_named(
    through: Prepare, store: S3Store, proxy: S3Proxy, s3: LocalS3
) -> None:
    """What a run writes next is a manifest that names it."""
    proxy.before = losing(is_end)
    with pytest.raises(StoreUnavailableError, match=rf"cannot put {store.uri(NAME)}.*not there"):
        send(through(), content())
    assert ([], []) == shown(s3, store)


@pytest.mark.fault("Bad network", "put: another writer comes next", "no loss, and not made again")
def test_a_write_that_another_builds_on_is_not_taken_for_lost(
    through: Prepare, store: S3Store, proxy: S3Proxy
) -> None:
    """Written again it would undo the other's, which was made from this one."""
    first = store.put_bytes("a", b"1")
    followed = Times(1, lambda asked: asked.method == "HEAD" and asked.target.endswith("/a"))

    def before(asked: Asked) -> None:
        if followed(asked):
            now = store.get_bytes("a")
            assert now is not None
            store.put_bytes("a", b"3", if_match=now.etag)

    proxy.before = before
    etag = through().put_bytes("a", b"2", if_match=first)
    found = store.get_bytes("a")
    assert found is not None
    assert (b"3", True) == (found.data, etag != found.etag)
    with pytest.raises(ConflictError, match="changed since"):
        store.put_bytes("a", b"4", if_match=etag)


@pytest.mark.fault("Bad network", "publish: the channel's write is lost, once", "published once")
def test_a_move_of_the_channel_that_is_lost_is_made_again(
    through: Prepare, store: S3Store, proxy: S3Proxy
) -> None:
    first, second = build(store, "a"), build(store, "b")
    put(first)
    lost = Times(1, to(layout.channel_key(MODEL, SUFFIX)))
    proxy.before = losing(lost)
    entry = put(second._replace(store=through()))
    found = channel.read_channel(store, MODEL, SUFFIX, TRUSTED)
    assert found is not None
    assert (0, 2, entry) == (lost.left, len(found.channel.entries), found.channel.current)


# Clocks and keys


@pytest.mark.fault(
    "Bad network",
    "upload: the clock jumps in the middle (RequestTimeTooSkewed)",
    "one error that names NTP; the next put leaves no upload",
)
def test_a_clock_that_jumps_in_the_middle_is_named(
    through: Prepare, store: S3Store, proxy: S3Proxy, s3: LocalS3
) -> None:
    """The abort is refused too: what stays goes with the next put of the object."""
    jumped = threading.Event()

    def before(asked: Asked) -> Answer | None:
        if is_part(asked) and "partNumber=2" in asked.target:
            jumped.set()
        return Answer.refusal(403, "RequestTimeTooSkewed") if jumped.is_set() else None

    proxy.before = before
    with pytest.raises(StoreError, match=rf"cannot put {store.uri(NAME)}.*NTP") as caught:
        send(through(), content())
    assert not caught.value.retryable
    assert ([], [NAME]) == shown(s3, store)
    send(store, content())
    assert ([NAME], []) == shown(s3, store)


def expiring(valid: Callable[[str], bool]) -> Callable[[Asked], Answer | None]:
    def before(asked: Asked) -> Answer | None:
        token = asked.headers.pop("X-Amz-Security-Token", "")
        return None if valid(token) else Answer.refusal(400, "ExpiredToken", f"The token {token}")

    return before


@pytest.mark.fault(
    "Bad network",
    "upload: the session token expires in the middle (ExpiredToken)",
    "one error; the next put leaves no upload",
)
def test_a_token_that_expires_in_the_middle_is_named(
    through: Prepare, store: S3Store, proxy: S3Proxy, s3: LocalS3
) -> None:
    """Not even the abort is allowed by then."""
    expired = threading.Event()
    expires = expiring(lambda token: not expired.is_set())

    def before(asked: Asked) -> Answer | None:
        if is_part(asked) and "partNumber=2" in asked.target:
            expired.set()
        return expires(asked)

    proxy.before = before
    given = S3Credentials(s3.access_key, s3.secret_key, "a-session-token")
    one = S3Store(store.root, S3Access(through().access.settings, given))
    with pytest.raises(StoreError, match=rf"cannot put {store.uri(NAME)}.*get a new one") as caught:
        send(one, content())
    assert not caught.value.retryable
    assert "a-session-token" not in str(caught.value)
    assert ([], [NAME]) == shown(s3, store)
    send(store, content())
    assert ([NAME], []) == shown(s3, store)


@pytest.fixture
def renewing(
    s3: LocalS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[timedelta], None]:
    """Keys that a program gives, each for an hour with a token of its own: token-1, token-2, …

    Returned is what moves the clock by which boto3 sees them expire.
    """
    for name in [name for name in os.environ if name.startswith(("AWS_", "S3_"))]:
        monkeypatch.delenv(name)
    program = tmp_path / "keys.py"
    program.write_text(
        "import json, pathlib, datetime\n"
        f"count = pathlib.Path({str(tmp_path / 'count')!r})\n"
        "number = int(count.read_text()) + 1 if count.exists() else 1\n"
        "count.write_text(str(number))\n"
        "now = datetime.datetime.now(datetime.timezone.utc)\n"
        "until = now + datetime.timedelta(hours=number)\n"
        f"print(json.dumps({{'Version': 1, 'AccessKeyId': {s3.access_key!r}, 'SecretAccessKey': "
        f"{s3.secret_key!r}, 'SessionToken': f'token-{{number}}', "
        "'Expiration': until.isoformat()}))\n"
    )
    command = shlex.join([sys.executable, str(program)])
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {command}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    ahead = [timedelta()]
    monkeypatch.setattr(
        botocore_credentials.RefreshableCredentials.__init__,
        "__defaults__",
        tuple(
            (lambda: datetime.now(UTC) + ahead[0])
            if default is botocore_credentials._local_now
            else default
            for default in botocore_credentials.RefreshableCredentials.__init__.__defaults__ or ()
        ),
    )
    monkeypatch.setattr(botocore_credentials, "_local_now", lambda: datetime.now(UTC) + ahead[0])

    def move(by: timedelta) -> None:
        ahead[0] += by

    return move


@pytest.mark.fault(
    "Bad network", "upload: a role's token expires in the middle, and is renewed", "sent whole"
)
def test_keys_that_are_renewed_in_the_middle_of_an_upload_go_on(
    store: S3Store, proxy: S3Proxy, s3: LocalS3, renewing: Callable[[timedelta], None]
) -> None:
    """What takes a day outlives many tokens; none of them is held on to."""
    tokens: list[str] = []
    valid = {"token-1"}
    expires = expiring(lambda token: tokens.append(token) or token in valid)

    def chunks() -> Iterator[bytes]:
        yield bytes(2 * PART)
        renewing(timedelta(minutes=59))
        valid.add("token-2")
        yield bytes(4 * PART)

    proxy.before = expires
    settings = S3Settings(endpoint_url=proxy.endpoint, region=REGION, addressing="path")
    found = S3Store(store.root, S3Access(settings)).put_stream(NAME, chunks(), size=6 * PART)
    assert found == digest(store, NAME)
    assert {"token-1", "token-2"} == set(tokens)
    assert ([NAME], []) == shown(s3, store)


@pytest.mark.fault(
    "Bad network", "put: a role's token expires before its time", "an error that a retry mends"
)
def test_a_token_that_expires_before_its_time_is_tried_again_with_another(
    store: S3Store, proxy: S3Proxy, renewing: Callable[[timedelta], None]
) -> None:
    """It was taken back, or a clock is wrong: Dagster's retry asks for a new one."""
    proxy.before = expiring(lambda token: token != "token-1")
    settings = S3Settings(endpoint_url=proxy.endpoint, region=REGION, addressing="path")
    with pytest.raises(StoreUnavailableError, match="expired before its time") as caught:
        S3Store(store.root, S3Access(settings)).put_bytes("a", b"x")
    assert "token-1" not in str(caught.value)
    assert S3Store(store.root, S3Access(settings)).put_bytes("a", b"x")


# A policy that refuses one verb


def denied(verb: str) -> Callable[[Asked], bool]:
    tests: dict[str, Callable[[Asked], bool]] = {
        "put": is_put,
        "get": lambda asked: asked.method == "GET" and "?" not in asked.target,
        "head": lambda asked: asked.method == "HEAD",
        "list": lambda asked: asked.method == "GET" and "list-type=2" in asked.target,
        "delete": lambda asked: asked.method == "DELETE" and "uploadId=" not in asked.target,
        "begin": lambda asked: asked.method == "POST" and asked.target.endswith("?uploads"),
        "part": is_part,
        "complete": is_end,
        "abort": lambda asked: asked.method == "DELETE" and "uploadId=" in asked.target,
        "list uploads": lambda asked: asked.method == "GET" and "uploads" in asked.target,
    }
    return tests[verb]


REFUSED: list[tuple[str, str, Act, str | None]] = [
    ("put", "a small object", lambda s: s.put_bytes("b", b"x"), "put.*s3:PutObject"),
    ("put", "a manifest", lambda s: s.put_bytes("b", b"x", if_absent=True), "put.*s3:PutObject"),
    ("get", "a small object", lambda s: s.get_bytes("a"), "get.*s3:GetObject"),
    ("get", "a file", lambda s: s.open_read("a"), "get.*s3:GetObject"),
    ("head", "a size", lambda s: s.stat("a"), "get.*s3:GetObject"),
    ("head", "a small object", lambda s: s.put_bytes("b", b"x"), None),
    ("head", "an upload", lambda s: send(s, content(), "b"), None),
    ("list", "a folder", lambda s: s.list(""), "list.*s3:ListBucket"),
    ("delete", "an object", lambda s: s.delete("a"), "delete.*s3:DeleteObject"),
    ("delete", "a manifest", lambda s: s.put_bytes("b", b"x", if_absent=True), None),
    ("begin", "an upload", lambda s: send(s, content(), "b"), "put.*s3:PutObject"),
    ("part", "an upload", lambda s: send(s, content(), "b"), "put.*s3:PutObject"),
    ("complete", "an upload", lambda s: send(s, content(), "b"), "put.*s3:PutObject"),
    ("abort", "an upload", lambda s: send(s, content(), "b"), None),
    ("list uploads", "an upload", lambda s: send(s, content(), "b"), None),
    ("list uploads", "a sweep", lambda s: s.sweep("", 0), None),
]


@pytest.mark.parametrize(
    ("verb", "what", "act", "said"),
    [
        pytest.param(
            verb,
            what,
            act,
            said,
            marks=pytest.mark.fault(
                "Bad network",
                f"a policy refuses to {verb}: {what}",
                "one error that names the right" if said else "done without",
            ),
            id=f"{verb}: {what}",
        )
        for verb, what, act, said in REFUSED
    ],
)
def test_a_policy_that_refuses_one_verb_is_named_or_done_without(
    through: Prepare,
    store: S3Store,
    proxy: S3Proxy,
    s3: LocalS3,
    verb: str,
    what: str,
    act: Act,
    said: str | None,
) -> None:
    """Of the bucket, the key, the verb and the right that is missing."""
    store.put_bytes("a", b"x")
    s3_store._honour.clear()
    is_denied = denied(verb)
    proxy.before = lambda asked: Answer.refusal(403, "AccessDenied") if is_denied(asked) else None
    if said is None:
        act(through())
    else:
        verb_said, _, right = said.partition(".*")
        with pytest.raises(StoreError) as caught:
            act(through())
        where = rf"cannot {verb_said} {store.root}/\S* at {proxy.endpoint}: no \(AccessDenied\)"
        if verb == "head":
            where = where.replace(r"no \(AccessDenied\)", r".*403\)")
        assert re.search(rf"{where}; allow these credentials {right}", str(caught.value))
        assert not caught.value.retryable
    objects, uploads = shown(s3, store)
    assert [] == uploads
    assert {"a", "b", ".tmp-probe"} >= set(objects)
    assert ("b" in objects) == (said is None and what != "a sweep")


# The whole chain


@pytest.fixture
def home(
    tmp_path: Path,
    hub: LocalHub,
    s3: LocalS3,
    s3_root: str,
    proxy: S3Proxy,
    monkeypatch: pytest.MonkeyPatch,
) -> Home:
    """A home whose root is reached through the proxy, also by its workers."""
    hub.commit("org/a", FILES)
    monkeypatch.setenv("S3_ACCESS_KEY_ID", s3.access_key)
    monkeypatch.setenv("S3_SECRET_ACCESS_KEY", s3.secret_key)
    settings = S3Settings(endpoint_url=proxy.endpoint, region=REGION, addressing="path")
    made = Home(tmp_path / "home", hub.endpoint, s3_root, settings)
    made.write_catalog({"org/a": {"v1": {}}})
    return made


class Witness:
    """Looks at each manifest as soon as there is one, as any reader may, past the proxy."""

    def __init__(self, home: Home, store: S3Store) -> None:
        self._home = home
        self._store = store
        self.manifests = 0
        self.wrong: list[str] = []

    def look(self, asked: Asked) -> None:
        if is_put(asked) and asked.target.endswith(layout.MANIFEST):
            folder = f"{split_uri(self._store.root)[1]}/"
            directory = asked.target.partition(folder)[2].removesuffix(f"/{layout.MANIFEST}")
            report = verify_directory(self._store, directory, self._home.trusted)
            self.manifests += 1
            self.wrong += [
                problem.message for problem in report.problems if problem.kind != "missing"
            ]


@pytest.mark.fault(
    "Bad network",
    "the chain: busy, lost answers, lost writes and broken answers, all the way",
    "published; no manifest was ever seen before its files",
)
def test_a_chain_gets_through_bad_weather(
    home: Home, proxy: S3Proxy, store: S3Store, s3: LocalS3
) -> None:
    """Of nine requests three meet a fault each; each first write of an object is lost."""
    witness = Witness(home, store)
    lock = threading.Lock()
    written: set[str] = set()
    turns: dict[int, int] = {}

    def first_write(asked: Asked) -> bool:
        with lock:
            known = asked.target in written
            if is_put(asked):
                written.add(asked.target)
            return is_put(asked) and not known and not asked.target.endswith("probe")

    lose = losing(first_write)

    def before(asked: Asked) -> Answer | None:
        with lock:
            turn = turns[id(asked)] = len(turns) % 9
        return Answer.refusal(503, "SlowDown") if turn == 0 else lose(asked)

    def after(asked: Asked, answer: Answer) -> Answer | None:
        witness.look(asked)
        turn = turns[id(asked)]
        if turn == 3:
            return None
        if turn == 6 and asked.method == "GET" and "?" not in asked.target:
            answer.headers |= {"Content-Length": str(len(answer.body)), "Connection": "close"}
            answer.body = answer.body[: len(answer.body) // 2]
        return answer

    proxy.before, proxy.after = before, after
    run = home.run("org/a", launcher=stand_in())
    assert {} == run.failures
    assert witness.manifests
    assert [] == witness.wrong
    proxy.before, proxy.after = lambda asked: None, lambda asked, answer: answer
    (entry,) = home.channel("org/a")
    assert verify_directory(store, entry.directory, home.trusted).ok
    assert [] == shown(s3, store)[1]


@pytest.mark.parametrize(
    ("what", "asset"),
    [
        pytest.param(
            what,
            asset,
            marks=pytest.mark.fault(
                "Bad network",
                f"the chain: a policy refuses the {what}",
                f"{asset} fails at once and says so; with the right, the next run goes on",
            ),
            id=what,
        )
        for what, asset in {
            "shard": "tensorized_shards",
            "manifest": "artifact",
            "channel": "published",
        }.items()
    ],
)
def test_a_chain_that_may_not_write_one_object_says_which(
    home: Home, proxy: S3Proxy, store: S3Store, s3: LocalS3, what: str, asset: str
) -> None:
    ends = {
        "shard": r"/model\.tensors",
        "manifest": r"/manifest\.json",
        "channel": r"/vllm/org/a/v1\.json",
    }[what]
    refused = re.compile(rf".*{ends}")
    proxy.before = lambda asked: (
        Answer.refusal(403, "AccessDenied")
        if is_put(asked) and refused.fullmatch(asked.target)
        else None
    )
    run = home.run("org/a", launcher=stand_in())
    assert [asset] == list(run.failures)
    assert re.search(rf"cannot put {store.root}\S*{ends} at .*s3:PutObject", run.failures[asset])
    assert [] == run.retried
    assert () == home.channel("org/a")
    objects, uploads = shown(s3, store)
    assert [] == uploads
    for key in objects:
        if key.endswith(layout.MANIFEST):
            directory = key.removesuffix(f"/{layout.MANIFEST}")
            assert verify_directory(store, directory, home.trusted).ok
    proxy.before = lambda asked: None
    again = home.run("org/a", launcher=NO_WORKER if what == "channel" else stand_in())
    assert {} == again.failures
    (entry,) = home.channel("org/a")
    assert verify_directory(store, entry.directory, home.trusted).ok
