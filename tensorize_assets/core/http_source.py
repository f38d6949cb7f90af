"""An object at an http(s) URL, read by ranges: presigned, or public."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit, urlunsplit

import urllib3

from tensorize_assets.core.errors import StoreError, StoreUnavailableError
from tensorize_assets.core.printable import printable
from tensorize_assets.core.ranged import (
    SIGNED,
    Stopped,
    fill,
    hand_back,
    replaced,
    require_range,
    total_of,
    trouble,
)

_CONNECT_TIMEOUT_S = 10.0
_READ_TIMEOUT_S = 60.0
_MAX_REDIRECTS = 5

# What a signed URL whose time is over is answered: 400 at AWS when its session token's is.
_EXPIRED = frozenset({400, 401, 403})


class AbsentError(StoreError):
    """The server says that there is nothing at this URL."""


class HttpSource:
    """An object at an http(s) URL of a server that knows ranges.

    The URL may be signed: its query is in no message and no log. One that is signed for a time is
    given as a function that signs anew, which any thread may call. Redirects are followed, but
    not from https to http. `ca_bundle` is a file of certificates to trust instead of the system's.

    Raises StoreError when the object cannot be read, StoreUnavailableError when a later try may
    help.
    """

    def __init__(self, url: str | Callable[[], str], *, ca_bundle: str | None = None) -> None:
        self._sign = None if isinstance(url, str) else url
        self._url = url = url if isinstance(url, str) else url()
        self.uri = without_query(url)
        _hide_queries()
        self._pool = _pool(url, ca_bundle)
        self._etag: str | None = None
        self.size, self.version = self._first()

    def read_into(self, start: int, buffer: memoryview, stopped: Stopped) -> None:
        raw = self._get(start, start + len(buffer) - 1)
        try:
            if raw.status != 206:
                raise _refusal(self.uri, raw)
            if _version(raw.headers) != self.version:
                raise replaced(self.uri)
            require_range(self.uri, raw.headers.get("Content-Range"), start, buffer, self.size)
        except BaseException:
            raw.close()
            raise
        fill(raw, buffer, self.uri, stopped)

    def _first(self) -> tuple[int, str]:
        raw = self._get(0, 0)
        self._etag = raw.headers.get("ETag")
        content_range = raw.headers.get("Content-Range")
        try:
            if raw.status == 416 and content_range == "bytes */0":
                return 0, _version(raw.headers)
            if raw.status != 206:
                raise _refusal(self.uri, raw)
            return total_of(self.uri, content_range), _version(raw.headers)
        finally:
            # Not read to its end: a server without ranges sends all of the object.
            hand_back(raw)

    def _get(self, first: int, last: int) -> urllib3.BaseHTTPResponse:
        raw = self._ask(first, last)
        if self._sign is None or raw.status not in _EXPIRED:
            return raw
        raw.close()
        self._url = self._sign()
        return self._ask(first, last)

    def _ask(self, first: int, last: int) -> urllib3.BaseHTTPResponse:
        headers = {"Range": f"bytes={first}-{last}", "Accept-Encoding": "identity"}
        # A weak ETag must not stand in If-Match.
        if self._etag is not None and not self._etag.startswith("W/"):
            headers["If-Match"] = self._etag
        url = self._url
        for _ in range(_MAX_REDIRECTS + 1):
            try:
                raw = self._pool.request(
                    "GET", url, headers=headers, preload_content=False, redirect=False
                )
            # Not chained: these errors may hold the whole URL.
            except (urllib3.exceptions.HTTPError, OSError) as error:
                raise trouble(self.uri, error) from None
            except ValueError:
                raise StoreError(f"{self.uri} cannot be asked for: correct the URL") from None
            target = raw.get_redirect_location()
            if not target:
                return raw
            raw.close()
            before = url
            try:
                url = urljoin(before, target)
                parts = split_url(url)
            except (StoreError, ValueError):
                raise StoreError(
                    f"{self.uri} redirects to a URL that cannot be followed; give one that "
                    "answers by itself"
                ) from None
            if parts.scheme not in {"https", urlsplit(before).scheme}:
                raise StoreError(
                    f"{self.uri} redirects to {without_query(url)}, which is not https; give a "
                    "URL that answers by itself"
                )
        raise StoreError(
            f"{self.uri} redirects more than {_MAX_REDIRECTS} times; give a URL that answers itself"
        )


def split_url(url: str) -> SplitResult:
    """Return the parts of an http(s) URL. Raises StoreError for another, and one with a password.

    A password would be in argv, in histories and in logs.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:
        usable, parts = False, urlsplit("")
    if not usable:
        raise StoreError(f"{without_query(url)} is no http(s) URL; correct it")
    if "@" in parts.netloc:
        raise StoreError(
            f"{without_query(url)}: its URL has a user or password before the host, which is not "
            "used; give it without one"
        )
    return parts


def without_query(url: str) -> str:
    """Return a URL as it may be shown: signatures are in queries, passwords before the host."""
    try:
        parts = urlsplit(url)
    except ValueError:
        # Where its parts end is not known.
        return f"{printable(url.partition(':')[0][:8])}:…"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _refusal(uri: str, raw: urllib3.BaseHTTPResponse) -> StoreError:
    status = raw.status
    if status == 200:
        return StoreError(
            f"{uri}: the server knows no ranges, and a broken read could not go on; serve the "
            "object from one that does (S3, nginx, Apache, Caddy do)"
        )
    if status in (412, 416):
        return replaced(uri)
    if status in (401, 403):
        return StoreError(
            f"{uri}: the server refuses ({status}); is the object public, or its signed URL "
            "expired or made with a wrong key?"
        )
    if status in (404, 410):
        return AbsentError(f"{uri} does not exist ({status}); build it again, or correct the URL")
    if status in (408, 425, 429) or status >= 500:
        return StoreUnavailableError(f"{uri}: the server answered {status}; try again later")
    return StoreError(f"{uri}: the server answered {status} to a ranged GET")


def _version(headers: Mapping[str, str]) -> str:
    return headers.get("ETag") or headers.get("Last-Modified") or ""


def _pool(url: str, ca_bundle: str | None) -> urllib3.PoolManager:
    parts = split_url(url)
    settings: dict[str, Any] = {
        "retries": False,
        "maxsize": 16,
        "timeout": urllib3.Timeout(connect=_CONNECT_TIMEOUT_S, read=_READ_TIMEOUT_S),
    }
    if ca_bundle is not None:
        settings["ca_certs"] = ca_bundle
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and not urllib.request.proxy_bypass(parts.hostname or ""):
        return urllib3.ProxyManager(proxy, **settings)
    return urllib3.PoolManager(**settings)


class _WithoutQueries(logging.Filter):
    """Cuts signatures out of urllib3's debug log, which names each request's path and query."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(
                SIGNED.sub("?…", value) if isinstance(value, str) else value
                for value in record.args
            )
        return True


_FILTER = _WithoutQueries()


def _hide_queries() -> None:
    # Adding the same filter twice does nothing.
    logging.getLogger("urllib3.connectionpool").addFilter(_FILTER)
