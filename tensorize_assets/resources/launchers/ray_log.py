"""What a Ray job prints: the worker's messages, and its and its ranks' lines."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import dagster as dg
from dagster_pipes import PipesDefaultMessageWriter, PipesMessage, PipesParams

from tensorize_assets.core.errors import ClusterUnavailableError
from tensorize_assets.core.protocol import LogLine, read_line, redact
from tensorize_assets.resources.launchers.ray_control import POLL_S, Job

# The log follows a job by two seconds.
_DRAIN_S = 15.0
_RECONNECT_S = 1.0
_LAST_LINES = 200

# As dagster_pipes writes it. Another process of the job may have left half a line before it.
_MESSAGE = '{"__dagster_pipes_version"'
# Before a line of a task: its name, process and node; behind it comes what the process itself puts
# before its lines.
_OF_TASK = re.compile(
    r"(?:\x1b\[\d+m)?\((?P<name>[^()\s]+) pid=\d+(?:, ip=[^)\s]+)?\)(?:\x1b\[0m)? "
    r"(?:\(\S+ pid=\d+\) )?"
)


class JobLog(dg.PipesMessageReader):
    """Reads a job's log: the worker's messages, and what it and its ranks print.

    Unlike dagster-ray's it takes up a broken connection where it was, puts lines together that
    come in parts, finds a message behind half a line of another process, and keeps secrets out of
    Dagster's log.
    """

    def __init__(self, log: dg.DagsterLogManager, job: Job, secrets: Sequence[bytes]) -> None:
        self.lines: deque[LogLine] = deque(maxlen=_LAST_LINES)
        self._log = log
        self._job = job
        self._secrets = secrets
        self._closed: float | None = None
        self._read = 0
        self._part = ""
        self._in_traceback: set[str] = set()
        self._handler: dg.PipesMessageHandler | None = None
        self._thread: threading.Thread | None = None

    @property
    def replies(self) -> Sequence[Any]:
        """The worker's own messages."""
        return () if self._handler is None else self._handler.get_custom_messages()

    @contextmanager
    def read_messages(self, handler: dg.PipesMessageHandler) -> Generator[PipesParams]:
        self._handler = handler
        try:
            yield {PipesDefaultMessageWriter.STDIO_KEY: PipesDefaultMessageWriter.STDOUT}
        finally:
            try:
                self._job.end(self._log)
            finally:
                self._closed = time.monotonic()
                if self._thread is not None:
                    self._thread.join()
            if self._job.started and not self.replies:
                # A message of more than 4 MB passes no websocket.
                with suppress(RuntimeError, ClusterUnavailableError):
                    self._take(self._job.get_job_logs(self._job.id)[self._read :])
            self._take("\n")

    def on_launched(self, launched_payload: dg.PipesLaunchedData) -> None:
        """Start to read: there is a job."""
        super().on_launched(launched_payload)
        self._thread = threading.Thread(target=self._follow, name="ray-log", daemon=True)
        self._thread.start()

    @property
    def expected_writer_count(self) -> int:
        # The inherited one is a preview, and warns of itself on every launch.
        return 1

    def no_messages_debug_text(self) -> str:
        return "The worker writes its messages to the Ray job's log."

    def _follow(self) -> None:
        asyncio.run(self._tail())

    async def _tail(self) -> None:
        while True:
            reading = asyncio.ensure_future(self._read_once())
            while not reading.done():
                await asyncio.wait([reading], timeout=POLL_S)
                if self._closed is not None and time.monotonic() > self._closed + _DRAIN_S:
                    reading.cancel()
            # What went wrong with the connection is of no interest: it is made anew.
            whole = not reading.cancelled() and reading.exception() is None
            if self._closed is not None or (whole and self._ended()):
                return
            await asyncio.sleep(_RECONNECT_S)

    def _ended(self) -> bool:
        return self._job.status is not None and self._job.status.is_terminal()

    async def _read_once(self) -> None:
        """Read from the beginning, which is all that Ray offers, and skip what was read."""
        position = 0
        async for text in self._job.tail_job_logs(self._job.id):
            new = text[max(0, self._read - position) :]
            position += len(text)
            self._read = max(self._read, position)
            self._take(new)

    def _take(self, text: str) -> None:
        *lines, self._part = (self._part + text).split("\n")
        for line in lines:
            try:
                self._line(line)
            except Exception as error:  # noqa: BLE001 - one broken line must not hide the next
                with suppress(Exception):
                    self._log.warning(f"a line of the worker is broken ({type(error).__name__})")

    def _line(self, line: str) -> None:
        start = line.find(_MESSAGE)
        if start >= 0:
            try:
                message, end = json.JSONDecoder().raw_decode(line, start)
            except ValueError:
                pass
            else:
                self._message(message)
                line = line[:start] + line[end:]
        of_task = _OF_TASK.match(line)
        if of_task is not None:
            line = f"({of_task['name']} pid=0) {line[of_task.end() :]}"
        printed = read_line(redact(line, self._secrets), self._in_traceback)
        if printed.text:
            self.lines.append(printed)
            # A step's log that fails for a moment must not take the rest of a chunk along, in
            # which the result may be.
            with suppress(Exception):
                self._log.log(printed.level, printed.text)

    def _message(self, message: PipesMessage) -> None:
        params = message["params"]
        if message["method"] == "log" and params is not None:
            shown = redact(params["message"], self._secrets)
            message["params"] = {**params, "message": shown}
        assert self._handler is not None
        self._handler.handle_message(message)
        if message["method"] == "report_custom_message":
            self._job.answered = True
