"""What a task has of its surroundings: progress to report, secrets, and a parent to outlive not."""

from __future__ import annotations

import base64
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Literal

import psutil

from tensorize_assets.core import handover, processes
from tensorize_assets.core.errors import WorkerError
from tensorize_assets.core.protocol import (
    LAUNCH_VARIABLE,
    PARENT_VARIABLE,
    SECRETS_VARIABLE,
    format_bytes,
)
from tensorize_assets.core.tasks import DATA_KEY

Level = Literal["debug", "info", "warning", "error"]
Send = Callable[[str, Level], None]


@dataclass(frozen=True)
class _State:
    """Where the work stands; counts as far as they are known, times on the monotonic clock."""

    stage: str
    rank: int | None
    ranks: int | None
    tensors_done: int | None
    tensors_total: int | None
    bytes_done: int | None
    bytes_total: int | None

    def same_work(self, other: _State | None) -> bool:
        return other is not None and (self.stage, self.rank) == (other.stage, other.rank)


class Progress:
    """Tells whoever waits how the work goes, through `send(message, level)`.

    Inside `with`, a thread reports the latest `update` at most every `shortest_gap_s` seconds,
    and at least every `longest_silence_s`, also when nothing was updated since. `log` reports at
    once. Outside `with` only `log` reports.
    """

    def __init__(
        self, send: Send, *, shortest_gap_s: float = 5.0, longest_silence_s: float = 10.0
    ) -> None:
        self._send = send
        self._shortest_gap_s = shortest_gap_s
        self._longest_silence_s = longest_silence_s
        # One lock: reports come whole, and none comes after the end.
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._state: _State | None = None
        self._since = 0.0

    @classmethod
    def silent(cls) -> Progress:
        """Return one that reports nothing, for work that nobody watches."""
        return cls(lambda _message, _level: None)

    def __enter__(self) -> Progress:
        self._thread = threading.Thread(target=self._tick, name="progress", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def log(self, message: str, level: Level = "info") -> None:
        """Report a message at once."""
        with self._lock:
            self._send(message, level)

    def update(
        self,
        stage: str,
        rank: int | None = None,
        ranks: int | None = None,
        *,
        tensors_done: int | None = None,
        tensors_total: int | None = None,
        bytes_done: int | None = None,
        bytes_total: int | None = None,
    ) -> None:
        """Say where the work stands: rank (from 0) of ranks, tensors and bytes done of all.

        Cheap: it may be called for every tensor or chunk.
        """
        state = _State(stage, rank, ranks, tensors_done, tensors_total, bytes_done, bytes_total)
        if not state.same_work(self._state):
            self._since = time.monotonic()
        self._state = state

    def _tick(self) -> None:
        reported: _State | None = None
        reported_at = time.monotonic()
        while not self._ended.wait(self._shortest_gap_s):
            state, now = self._state, time.monotonic()
            # Half a gap of tolerance: a tick that comes a moment early does not skip its turn.
            overdue = now - reported_at > self._longest_silence_s - self._shortest_gap_s / 2
            if state is None or (state == reported and not overdue):
                continue
            # A rate since the last report shows a stall; an average would hide it.
            before = reported.bytes_done if reported and state.same_work(reported) else 0
            since = reported_at if state.same_work(reported) else max(self._since, reported_at)
            rate = ((state.bytes_done or 0) - (before or 0)) / max(now - since, 1e-3)
            self.log(_line(state, rate, now - self._since))
            reported, reported_at = state, now


def _line(state: _State, rate: float, seconds: float) -> str:
    """`rank 1/3: writing: 120 of 272 tensors, 310 MB of 900 MB, 250 MB/s`, as far as known."""
    facts: list[str] = []
    if state.tensors_done is not None:
        total = "" if state.tensors_total is None else f" of {state.tensors_total}"
        facts.append(f"{state.tensors_done}{total} tensors")
    if state.bytes_done is not None:
        total = "" if state.bytes_total is None else f" of {format_bytes(state.bytes_total)}"
        facts.append(f"{format_bytes(state.bytes_done)}{total}")
        facts.append(f"{format_bytes(rate)}/s")
    if not facts:
        facts.append(f"{seconds:.0f} s")
    of_all = "" if state.ranks is None else f"/{state.ranks}"
    rank = "" if state.rank is None else f"rank {state.rank}{of_all}: "
    separator = ": " if len(facts) > 1 else ", "
    return f"{rank}{state.stage}{separator}{', '.join(facts)}"


_unsealed: dict[str, bytes] = {}


@cache
def secrets() -> Mapping[str, bytes]:
    """Return the secrets that the launcher handed over; none if it did not.

    They are read once, and the descriptor is closed: no process started later inherits it.
    """
    descriptor = os.environ.pop(SECRETS_VARIABLE, None)
    if descriptor is None:
        return dict(_unsealed)
    with open(int(descriptor), "rb") as file:
        return {name: base64.b64decode(value) for name, value in json.load(file).items()}


def unseal(sealed: str) -> None:
    """Have `secrets` return what `handover.seal` made. Raises as `handover.unseal`."""
    _unsealed.update(handover.unseal(sealed))
    secrets.cache_clear()


def data_key(where: str) -> bytes:
    """Return the secret DATA_KEY. Raises WorkerError, which says for what, if there is none."""
    key = secrets().get(DATA_KEY)
    if key is None:
        raise WorkerError(
            f"{where}: the worker was given no data key to encrypt it or to open it with; the "
            "launcher hands it over as a secret, which the asset or the command unseals"
        )
    return key


_OWN_END_S = 5.0


def end_with_parent(interval_s: float = 1.0) -> None:
    """End this process and all it started once the launcher that waits for it is gone.

    Does nothing where no launcher is named. A launcher that is asked to stop ends its worker
    itself; this is for one that is killed.
    """
    named = os.environ.get(PARENT_VARIABLE)
    if named is None:
        return
    thread = threading.Thread(
        target=_watch_parent, args=(int(named), interval_s), name="parent", daemon=True
    )
    thread.start()


def _watch_parent(parent: int, interval_s: float) -> None:
    own = psutil.Process()
    try:
        launcher = psutil.Process(parent)
    except psutil.NoSuchProcess:
        launcher = None
    # Not compared with `parent`: the interpreter may be a script that starts the real one.
    adopted_by = os.getppid()
    while launcher and processes.is_alive(launcher) and os.getppid() == adopted_by:
        time.sleep(interval_s)
    launch = os.environ.get(LAUNCH_VARIABLE, "")
    # The others first: this thread is gone as soon as the main one is.
    processes.end(lambda: processes.launched(launch, own.pid, {own}), grace_s=0)
    os.kill(own.pid, signal.SIGTERM)
    time.sleep(_OWN_END_S)
    os.kill(own.pid, signal.SIGKILL)
