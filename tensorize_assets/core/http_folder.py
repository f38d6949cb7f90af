"""An artifact directory on a web server that knows ranges: only read, and never listed."""

from __future__ import annotations

from typing import BinaryIO, cast
from urllib.parse import quote

from tensorize_assets.core.errors import StoreError
from tensorize_assets.core.http_source import AbsentError, HttpSource, split_url, without_query
from tensorize_assets.core.jsonio import MAX_BYTES
from tensorize_assets.core.ranged import RangedReader
from tensorize_assets.core.store import StoredObject


class HttpFolder:
    """The directory at an http(s) URL. See `store.Reader` for what each method promises.

    `ca_bundle` is a file of certificates to trust instead of the system's.

    Raises StoreError for a URL that names no directory.
    """

    def __init__(self, url: str, *, ca_bundle: str | None = None) -> None:
        parts = split_url(url)
        if parts.query or parts.fragment:
            raise StoreError(
                f"{without_query(url)}: the URL of a directory has no query: its files are named "
                "behind it; give it without one"
            )
        self._url = url.rstrip("/") + "/"
        self._ca_bundle = ca_bundle

    def uri(self, key: str) -> str:
        return without_query(self._at(key))

    def get_bytes(self, key: str) -> StoredObject | None:
        source = self._find(key)
        if source is None:
            return None
        if source.size > MAX_BYTES:
            raise StoreError(f"{source.uri} has {source.size} bytes; documents end at {MAX_BYTES}")
        with RangedReader(source) as stream:
            return StoredObject(stream.read(), source.version)

    def open_read(self, key: str, start: int = 0, end: int | None = None) -> BinaryIO:
        return cast("BinaryIO", RangedReader(self._open(key), start, end))

    def stat(self, key: str) -> int | None:
        source = self._find(key)
        return source.size if source else None

    def _find(self, key: str) -> HttpSource | None:
        try:
            return self._open(key)
        except AbsentError:
            return None

    def _open(self, key: str) -> HttpSource:
        return HttpSource(self._at(key), ca_bundle=self._ca_bundle)

    def _at(self, key: str) -> str:
        return self._url + quote(key)
