"""Reads the log of a worker's pod: Pipes messages, and all else that the worker prints."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import dagster as dg
from dagster_pipes import (
    PIPES_PROTOCOL_VERSION_FIELD,
    PipesDefaultMessageWriter,
    PipesMessage,
    PipesParams,
)

from tensorize_assets.core.protocol import LogLine, read_line, redact

_LAST_LINES = 200
_MESSAGE = f'{{"{PIPES_PROTOCOL_VERSION_FIELD}"'
_TIMEOUT_S = (10, 60)
_PAUSE_S = 0.5
# What two clocks may differ by while a broken log is read again from the last line on.
_OVERLAP_S = 10


class PodLog(dg.PipesMessageReader):
    """Follows the log of one pod, which it hands to the step's log without secrets.

    Unlike PipesK8sPodLogsMessageReader it takes lines apart in bytes, wherever the connection cut
    them; finds a message behind a progress bar that did not end its line; reads in a thread, so
    that whoever waits can look at the pod; and hands on by level what is not a message, which
    Dagster's prints to the stdout of its own process.
    """

    def __init__(self, log: dg.DagsterLogManager, prefix: str, secrets: Sequence[bytes]) -> None:
        self.lines: deque[LogLine] = deque(maxlen=_LAST_LINES)
        self.custom_messages: list[object] = []
        self.moved = threading.Event()
        """Set when the log came to an end, which whoever waits for the pod may want to look at."""
        self._log = log
        self._prefix = prefix
        self._secrets = secrets
        self._handler: dg.PipesMessageHandler | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._given_up = threading.Event()
        self._in_traceback: set[str] = set()
        # Where it stands, for a log that breaks and is read again.
        self._last = ""
        self._last_at = 0.0

    @contextmanager
    def read_messages(self, handler: dg.PipesMessageHandler) -> Generator[PipesParams]:
        self._handler = handler
        yield {PipesDefaultMessageWriter.STDIO_KEY: PipesDefaultMessageWriter.STDERR}

    @property
    def expected_writer_count(self) -> int:
        # The inherited one is a preview, and warns of itself on every launch.
        return 1

    def no_messages_debug_text(self) -> str:
        return "The worker writes its messages to the log of its pod."

    def follow(self, api: Any, namespace: str, pod: str, container: str) -> None:
        """Start to read, once; the container has started."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._read, args=(api, namespace, pod, container), name="log", daemon=True
            )
            self._thread.start()

    def drain(self, timeout_s: float) -> None:
        """Read to the end the log of a container that has ended."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
        self.give_up()

    def give_up(self) -> None:
        """Read no more than what is on its way."""
        self._given_up.set()

    def _read(self, api: Any, namespace: str, pod: str, container: str) -> None:
        while not self._given_up.is_set():
            # Before it is opened: what was printed until then is in it to the last line.
            ended = self._ended.is_set()
            since = None
            if self._last:
                since = int(time.monotonic() - self._last_at) + _OVERLAP_S
            clean = False
            rest = b""
            try:
                stream = api.read_namespaced_pod_log(
                    pod,
                    namespace,
                    container=container,
                    follow=True,
                    timestamps=True,
                    since_seconds=since,
                    _preload_content=False,
                    _request_timeout=_TIMEOUT_S,
                )
                try:
                    rest = self._take(stream.stream(1 << 16))
                    clean = True
                finally:
                    stream.close()
            except Exception as error:  # noqa: BLE001 - the pod's state tells what broke it
                if ended and getattr(error, "status", None) is not None:
                    return
            if ended and clean:
                # The half line of a killed worker.
                self._line(rest)
                return
            self.moved.set()
            (self._given_up if ended else self._ended).wait(_PAUSE_S)

    def _take(self, chunks: Any) -> bytes:
        """Handle whole lines; returns what is left behind the last one."""
        again = self._last
        rest: list[bytes] = []
        for chunk in chunks:
            if self._given_up.is_set():
                break
            *whole, tail = chunk.split(b"\n")
            for part in whole:
                line = b"".join([*rest, part])
                rest = []
                time_of, _, _ = line.partition(b" ")
                # One format, nanoseconds of UTC: they sort as text.
                if again and time_of.decode("ascii", "replace") <= again:
                    continue
                again = ""
                self._line(line)
            rest.append(tail)
        left = b"".join(rest)
        time_of, _, _ = left.partition(b" ")
        return b"" if again and time_of.decode("ascii", "replace") <= again else left

    def _line(self, line: bytes) -> None:
        time_of, _, said = line.partition(b" ")
        if not time_of:
            return
        self._last, self._last_at = time_of.decode("ascii", "replace"), time.monotonic()
        text = said.decode("utf-8", "replace")
        start = text.find(_MESSAGE)
        if start >= 0:
            try:
                message, end = json.JSONDecoder().raw_decode(text, start)
                self._message(cast("PipesMessage", message))
                text = text[:start] + text[end:]
            except Exception as error:  # noqa: BLE001 - one broken message must not hide the next
                self._log.warning(
                    f"{self._prefix}a message of the worker is broken ({type(error).__name__})"
                )
                text = text[:start]
        # What a progress bar wrote over stays out of the log.
        self._print(re.split(r"\r+", text.rstrip("\r"))[-1])

    def _message(self, message: PipesMessage) -> None:
        params = message["params"]
        if message["method"] == "log" and params is not None:
            shown = redact(params["message"], self._secrets)
            message["params"] = {**params, "message": self._named(shown)}
        if message["method"] == "report_custom_message" and params is not None:
            self.custom_messages.append(params["payload"])
            # A worker that has answered only has to leave.
            self.moved.set()
        if self._handler is not None:
            self._handler.handle_message(message)

    def _print(self, text: str) -> None:
        line = read_line(redact(text, self._secrets), self._in_traceback)
        if not line.text:
            return
        self.lines.append(line)
        # A step's log that fails for a moment must not end the reading.
        with suppress(Exception):
            self._log.log(line.level, self._named(line.text))

    def _named(self, text: str) -> str:
        """With the rank before it, unless the worker says so itself: `rank 0: ` or `rank 0/2: `."""
        own = self._prefix.removesuffix(": ")
        return text if own and text.startswith(own) else self._prefix + text
