"""Large remote objects read as files: ranged requests ahead of the reader, each retried.

One long stream breaks with its connection, and one connection is slower than the machine. So an
object is read in parts, a few at a time, each by a request of its own that is pinned to the ETag
seen at the start: an object that is replaced meanwhile is refused, never mixed.
"""

from __future__ import annotations

import http.client
import io
import re
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import tenacity
import urllib3

from tensorize_assets.core.errors import StoreError, StoreUnavailableError
from tensorize_assets.core.printable import quoted
from tensorize_assets.core.s3 import like

PART_BYTES = 16 * 1024 * 1024
AHEAD = 4

# Tries of one part, with 0.2 s to 5 s between them: longer than a server takes to restart.
_ATTEMPTS = 10
_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 5.0

# A part is also given up when nothing arrived for so long, of it or of another: where every try
# waits for its time-out, all of them would take an hour.
_IDLE_S = 180.0

# After each step of this many bytes a request asks whether anybody still waits for it.
_STEP_BYTES = 1024 * 1024
_CLOSE_WAIT_S = 5.0

_WAIT = tenacity.wait_exponential(_FIRST_WAIT_S, _LONGEST_WAIT_S) + tenacity.wait_random(
    0, _FIRST_WAIT_S
)

Stopped = Callable[[], bool]

SIGNED = re.compile(r"\?\S*")
"""The query of a URL, which may hold a signature."""

_PASSWORD = re.compile(r"//[^/\s\"'@]*@")


class RangeSource(Protocol):
    """An object of known size that any thread may read any range of."""

    @property
    def uri(self) -> str:
        """How the object is called in messages: without a query, without secrets."""
        ...

    @property
    def size(self) -> int:
        """The object's size in bytes."""
        ...

    @property
    def version(self) -> str:
        """The object's ETag, or what else tells it from another under the same name."""
        ...

    def read_into(self, start: int, buffer: memoryview, stopped: Stopped) -> None:
        """Fill `buffer` with the bytes from `start` on; give up once `stopped()`.

        Raises:
            StoreUnavailableError: trouble on the way, or given up; another try may help.
            StoreError: the object was replaced, is gone, or is refused.
        """
        ...


class RangedReader(io.BufferedIOBase):
    """The bytes `start` to `end` (exclusive, None for all) of a source, as a file of their own.

    Position 0 is `start`. Reading one part begins the next `ahead` of them, each in a thread;
    held are at most `part_bytes` * (`ahead` + 1) bytes. For one thread at a time. `readinto`
    fills its buffer unless the end comes first. Reading raises what `RangeSource.read_into`
    does, a StoreUnavailableError only after several tries.
    """

    def __init__(
        self,
        source: RangeSource,
        start: int = 0,
        end: int | None = None,
        *,
        part_bytes: int = PART_BYTES,
        ahead: int = AHEAD,
    ) -> None:
        end = source.size if end is None else min(end, source.size)
        if not 0 <= start <= end:
            raise StoreError(
                f"{source.uri} has {source.size} bytes, not {start} to {end}; ask for a range "
                "that exists"
            )
        self.source = source
        self._start = start
        self._length = end - start
        self._position = 0
        self._part_bytes = max(1, min(part_bytes, self._length))
        self._ahead = min(ahead, -(-self._length // self._part_bytes))
        self._ahead_until = self._length
        self._parts: deque[_Part] = deque()
        self._free: list[memoryview] = []
        self._pool: ThreadPoolExecutor | None = None
        self._count_lock = threading.Lock()
        self._retries = 0
        self._arrived = 0.0

    @property
    def retries(self) -> int:
        """How many requests had to be made again so far."""
        return self._retries

    def expect_until(self, position: int) -> None:
        """Begin no part from `position` on before it is read."""
        self._ahead_until = position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        self._require_open()
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._require_open()
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError(f"{self.source.uri} has no byte {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view):
            chunk = self._here(len(view) - done)
            if not chunk:
                break
            view[done : done + len(chunk)] = chunk
            done += len(chunk)
            self._position += len(chunk)
        return done

    def readinto1(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        chunk = self._here(len(view))
        view[: len(chunk)] = chunk
        self._position += len(chunk)
        return len(chunk)

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self._length - self._position)
        if size is not None and size >= 0:
            left = min(left, size)
        if left == 0:
            self._require_open()
            return b""
        first = self._here(left)
        if len(first) == left:
            self._position += left
            return bytes(first)
        data = bytearray(left)
        self.readinto(data)
        return bytes(data)

    def read1(self, size: int = -1, /) -> bytes:
        chunk = bytes(self._here(size if size >= 0 else self._length))
        self._position += len(chunk)
        return chunk

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        self._drop(_CLOSE_WAIT_S)
        self._free.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _require_open(self) -> None:
        if self.closed:
            raise ValueError(f"{self.source.uri} was closed")

    def _here(self, most: int) -> memoryview:
        """Return up to `most` bytes at the position, from one part; none at the end."""
        self._require_open()
        if self._position >= self._length or most <= 0:
            return memoryview(b"")
        parts = self._parts
        if parts and not parts[0].start <= self._position < parts[-1].end:
            self._drop(None)
        while parts and parts[0].end <= self._position:
            self._take_back(parts.popleft())
        if not parts or (len(parts) <= self._ahead and parts[-1].end < self._ahead_until):
            self._request()
        part = parts[0]
        part.future.result()
        offset = self._position - part.start
        return part.view[offset : min(offset + most, part.end - part.start)]

    def _request(self) -> None:
        """Begin parts until `ahead` of them follow the one that is being read."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(
                self._ahead, thread_name_prefix=f"read {self.source.uri[-40:]}"
            )
        start = self._parts[-1].end if self._parts else self._position
        while not self._parts or (len(self._parts) <= self._ahead and start < self._ahead_until):
            end = min(start + self._part_bytes, self._length)
            room = self._free.pop() if self._free else memoryview(bytearray(self._part_bytes))
            stop = threading.Event()
            future = self._pool.submit(self._fetch, self._start + start, room[: end - start], stop)
            self._parts.append(_Part(start, end, room, stop, future))
            start = end

    def _fetch(self, start: int, buffer: memoryview, stop: threading.Event) -> None:
        retrying = patiently(stop, lambda: self._arrived, self._count)
        retrying(self.source.read_into, start, buffer, stop.is_set)
        self._arrived = time.monotonic()

    def _count(self, _: tenacity.RetryCallState) -> None:
        with self._count_lock:
            self._retries += 1

    def _take_back(self, part: _Part) -> None:
        """Keep the buffer of a part that is not needed any more for a later one."""
        if not part.future.done():
            part.stop.set()
            part.future.cancel()
            wait([part.future])
        self._free.append(part.view)

    def _drop(self, patience_s: float | None) -> None:
        """Forget every part; those that do not end in time keep their buffers to themselves."""
        for part in self._parts:
            part.stop.set()
            part.future.cancel()
        ended, _ = wait([part.future for part in self._parts], timeout=patience_s)
        self._free += [part.view for part in self._parts if part.future in ended]
        self._parts.clear()


def patiently(
    stop: threading.Event,
    arrived: Callable[[], float] = lambda: 0,
    count: Callable[[tenacity.RetryCallState], None] | None = None,
) -> tenacity.Retrying:
    """How often, and how long, a part is asked for again where the way to it is in trouble.

    `arrived` is when something last came, of this part or another, on the monotonic clock.
    """

    def again(state: tenacity.RetryCallState) -> bool:
        error = state.outcome.exception() if state.outcome else None
        return isinstance(error, StoreUnavailableError) and not stop.is_set()

    def enough(state: tenacity.RetryCallState) -> bool:
        idle_s = time.monotonic() - max(state.start_time, arrived())
        return state.attempt_number >= _ATTEMPTS or idle_s >= _IDLE_S

    return tenacity.Retrying(
        retry=again,
        stop=enough,
        wait=_WAIT,
        sleep=tenacity.sleep_using_event(stop),
        before_sleep=count,
        reraise=True,
    )


@dataclass(frozen=True)
class _Part:
    """One request's bytes `start` to `end` in `view`, complete once `future` is."""

    start: int
    end: int
    view: memoryview
    stop: threading.Event
    future: Future[None]


class S3Source:
    """An object in S3, pinned to its ETag.

    `client` is an S3Access's; `explain` makes a context in which its errors become those of
    `errors`.

    Raises what `explain` raises when the object cannot be read.
    """

    def __init__(
        self,
        client: Any,
        bucket: str,
        key: str,
        uri: str,
        explain: Callable[[], AbstractContextManager[None]],
    ) -> None:
        # Whoever reads counts the tries; boto3's own within each would multiply them.
        self._client = like(client, retries={"mode": "standard", "total_max_attempts": 1})
        self._object = {"Bucket": bucket, "Key": key}
        self._explain = explain
        self.uri = uri
        self.size, self.version = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(StoreUnavailableError),
            stop=tenacity.stop_after_attempt(client.meta.config.retries["total_max_attempts"])
            | tenacity.stop_after_delay(_IDLE_S),
            wait=_WAIT,
            reraise=True,
        )(self._first)

    def read_into(self, start: int, buffer: memoryview, stopped: Stopped) -> None:
        with self._explain():
            try:
                answer = self._client.get_object(
                    **self._object,
                    Range=f"bytes={start}-{start + len(buffer) - 1}",
                    IfMatch=self.version,
                )
            except self._client.exceptions.ClientError as error:
                if _status(error) in (412, 416):
                    raise replaced(self.uri) from None
                raise
            # The stream below boto3's: it copies what it reads once more.
            raw = answer["Body"]._raw_stream
            try:
                # For stores that do not know the condition.
                if answer["ETag"] != self.version:
                    raise replaced(self.uri)
                require_range(self.uri, answer.get("ContentRange"), start, buffer, self.size)
            except BaseException:
                raw.close()
                raise
            fill(raw, buffer, self.uri, stopped)

    def _first(self) -> tuple[int, str]:
        with self._explain():
            try:
                # Not HEAD: its refusals have no body, and so no reason.
                answer = self._client.get_object(**self._object, Range="bytes=0-0")
            except self._client.exceptions.ClientError as error:
                # No first byte: an empty object.
                if _status(error) != 416:
                    raise
                answer = self._client.head_object(**self._object)
                return answer["ContentLength"], answer["ETag"]
            # Closed, not read to its end: a server without ranges sends all of the object.
            with answer["Body"]._raw_stream as raw:
                version = answer["ETag"]
                size = total_of(self.uri, answer.get("ContentRange"))
                hand_back(raw)
                return size, version


def _status(error: Any) -> int | None:
    return error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")


def fill(raw: urllib3.BaseHTTPResponse, buffer: memoryview, uri: str, stopped: Stopped) -> None:
    """Read a response into `buffer`, and hand its connection back for the next request."""
    # urllib3's own readinto makes a bytes object of everything first; http.client's receives
    # into the buffer.
    direct = getattr(raw, "_fp", None)
    stream = direct if isinstance(direct, http.client.HTTPResponse) else raw
    done = 0
    try:
        while done < len(buffer):
            if stopped():
                raise StoreUnavailableError(f"reading {uri} was given up")
            count = stream.readinto(buffer[done : done + _STEP_BYTES])
            if not count:
                raise StoreUnavailableError(
                    f"reading {uri} broke off after {done} of {len(buffer)} bytes of a part; "
                    "is the server, or the way to it, in trouble?"
                )
            done += count
    except (OSError, http.client.HTTPException, urllib3.exceptions.HTTPError) as error:
        raw.close()
        raise trouble(uri, error) from None
    except BaseException:
        raw.close()
        raise
    raw.release_conn()


def hand_back(raw: urllib3.BaseHTTPResponse) -> None:
    """Hand the connection of an answer of one byte back; close that of a longer one."""
    if raw.headers.get("Content-Length") == "1":
        raw.drain_conn()
        raw.release_conn()
    else:
        raw.close()


def trouble(uri: str, error: Exception) -> StoreError:
    reason: BaseException = error
    while isinstance(inner := getattr(reason, "reason", None), BaseException):
        reason = inner
    if isinstance(reason, ssl.SSLCertVerificationError) or isinstance(
        next(iter(reason.args), None), ssl.SSLCertVerificationError
    ):
        return StoreError(
            f"{uri}: the server's certificate is not trusted; name the certificates to trust in "
            "`ca_bundle` or the variable AWS_CA_BUNDLE"
        )
    said = _PASSWORD.sub("//", SIGNED.sub("?…", str(reason)))
    return StoreUnavailableError(
        f"reading {uri} failed: {type(reason).__name__}: {said}; is the server, or the way to it, "
        "in trouble?"
    )


def replaced(uri: str) -> StoreError:
    return StoreError(
        f"{uri} was replaced while it was read; read it again. Objects of a build never change: "
        "who wrote it?"
    )


_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")


def total_of(uri: str, content_range: str | None) -> int:
    match = _CONTENT_RANGE.fullmatch(content_range or "")
    if match is None:
        raise StoreError(
            f"{uri}: the server knows no ranges (Content-Range: "
            f"{quoted(content_range or '')}); serve the object from one that does"
        )
    return int(match[3])


def require_range(
    uri: str, content_range: str | None, start: int, buffer: memoryview, size: int
) -> None:
    expected = f"bytes {start}-{start + len(buffer) - 1}/{size}"
    if content_range != expected:
        raise StoreError(
            f"{uri}: asked for {expected}, the server sent {quoted(content_range or '')}; "
            "was the object replaced while it was read?"
        )
