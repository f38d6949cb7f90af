"""A lease in the store: of several machines that want to do one thing, one does it at a time.

No clock is compared with another's. Who holds a lease writes it anew every few seconds; who waits
takes it over once it has stood unchanged for a while by the waiter's own clock. What is done under
a lease must be right also when two do it at once, since a holder that was only slow goes on.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager

from tensorize_assets.core import jsonio
from tensorize_assets.core.errors import ConflictError, StoreError, StoreUnavailableError
from tensorize_assets.core.store import Store, StoredObject

Say = Callable[[str], None]

BEAT_S = 10.0
EXPIRY_S = 60.0
"""A lease that was not written for so long is of nobody. Some beats: one may be slow, or fail."""

_LOOK_S = 1.0
_UNKNOWN = "somebody"
_SAID_EVERY_S = 30.0


class Lease(jsonio.Record):
    """Who holds it: host and process. `token` and `beat` make each writing another one.

    `free`: nobody does. It is not removed then: a removal cannot be made to depend on whose it is.
    """

    owner: str
    token: str
    beat: int
    free: bool = False


def read(store: Store, key: str) -> Lease | None:
    """Return the lease at `key`; None where there is none, or no valid one."""
    found = store.get_bytes(key)
    return found and _decode(found, key)


@contextmanager
def held(
    store: Store,
    key: str,
    what: str,
    say: Say,
    *,
    beat_s: float = BEAT_S,
    expiry_s: float = EXPIRY_S,
    look_s: float = _LOOK_S,
) -> Generator[None]:
    """Hold the lease at `key` while the context lasts; first wait for whoever holds it.

    `what` is said of the work: `mirroring org/model`. Seconds: `beat_s` between two writings,
    `expiry_s` until a silent one's lease is taken over, `look_s` between two looks at it.

    Raises StoreError and StoreUnavailableError as the store does, before the context begins.
    """
    mine = Lease(
        owner=f"{socket.gethostname()}, process {os.getpid()}", token=uuid.uuid4().hex, beat=0
    )
    etag = _acquire(store, key, mine, what, say, expiry_s, look_s)
    ended = threading.Event()
    beats = _Beats(store, key, mine, etag, ended, what, say, beat_s)
    thread = threading.Thread(target=beats.run, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        beats.end()


def _acquire(
    store: Store, key: str, mine: Lease, what: str, say: Say, expiry_s: float, look_s: float
) -> str:
    seen: str | None = None
    told_of: str | None = None
    since = said_at = time.monotonic()
    while True:
        found = store.get_bytes(key)
        lease = found and _decode(found, key)
        now = time.monotonic()
        if found is not None and found.etag != seen:
            seen, since = found.etag, now
            whose = lease.token if lease else _UNKNOWN
            if whose != told_of and not (lease and lease.free):
                told_of, said_at = whose, now
                say(f"{what} is being done by {_owner(lease)}: waiting for it")
        stale = found is not None and now - since >= expiry_s
        if found is None or (lease and lease.free) or stale:
            if stale:
                say(f"{_owner(lease)} has not been heard of for {expiry_s:.0f} s: {what} goes on")
            try:
                return _put(store, key, mine, found)
            except ConflictError:
                # Another one was quicker.
                continue
        if now - said_at >= _SAID_EVERY_S:
            said_at = now
            say(f"{what} is still being done by {_owner(lease)}")
        time.sleep(look_s)


class _Beats:
    """Writes a lease anew until it is ended, or lost."""

    def __init__(
        self,
        store: Store,
        key: str,
        lease: Lease,
        etag: str,
        ended: threading.Event,
        what: str,
        say: Say,
        beat_s: float,
    ) -> None:
        self._store = store
        self._key = key
        self._lease = lease
        self._etag: str | None = etag
        self._ended = ended
        self._what = what
        self._say = say
        self._beat_s = beat_s

    def run(self) -> None:
        while self._etag is not None and not self._ended.wait(self._beat_s):
            self._write()

    def end(self) -> None:
        if self._etag is not None:
            self._lease = self._lease.model_copy(update={"free": True})
            self._write()

    def _write(self) -> None:
        self._lease = self._lease.model_copy(update={"beat": self._lease.beat + 1})
        data = _encode(self._lease)
        try:
            self._etag = self._store.put_bytes(self._key, data, if_match=self._etag)
        except StoreUnavailableError:
            # The next one may arrive. Of this one it is not known whether it did.
            self._etag = self._current()
        except ConflictError:
            self._etag = None
            self._say(f"another run took over {self._what}, which was not heard of here for a time")
        except StoreError as error:
            self._etag = None
            self._say(f"{self._what} goes on without its lease: {error}")

    def _current(self) -> str | None:
        try:
            found = self._store.get_bytes(self._key)
        except StoreError:
            return self._etag
        lease = found and _decode(found, self._key)
        return found.etag if found and lease and lease.token == self._lease.token else None


def _put(store: Store, key: str, lease: Lease, over: StoredObject | None) -> str:
    data = _encode(lease)
    if over is None:
        return store.put_bytes(key, data, if_absent=True)
    return store.put_bytes(key, data, if_match=over.etag)


def _encode(lease: Lease) -> bytes:
    return jsonio.canonical(jsonio.dump_record(lease))


def _decode(found: StoredObject, key: str) -> Lease | None:
    try:
        return jsonio.load_record(Lease, found.data, key)
    except StoreError:
        return None


def _owner(lease: Lease | None) -> str:
    return lease.owner if lease else _UNKNOWN
