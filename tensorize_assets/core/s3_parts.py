"""The parts of an S3 upload, sent from threads while the next ones are filled."""

from __future__ import annotations

import io
import mmap
import queue
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any

# Measured: more threads are not faster, and all buffers stay below 160 MiB.
THREADS = 8
_BUFFERS_BYTES = 160 * 1024 * 1024
_LEAST_READ_BYTES = 1024 * 1024

# A worker that is told to stop is killed 10 s later. So much is spent on parts on their way.
_STOP_WAIT_S = 1.0


class PartSender:
    """Fills buffers of one part each from chunks, and sends them from threads of its own.

    Leaving the context stops the parts on their way, and waits a moment for them: one that
    arrives after its upload was aborted may be kept.
    """

    def __init__(
        self, send: Callable[[int, PartBody], dict[str, Any]], size: int, part_bytes: int
    ) -> None:
        self._send = send
        self._part_bytes = part_bytes
        parts = -(-size // part_bytes)
        # One buffer more than threads is filled meanwhile.
        threads = max(1, min(THREADS, parts, _BUFFERS_BYTES // part_bytes - 1))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="put")
        self._free: queue.SimpleQueue[mmap.mmap | None] = queue.SimpleQueue()
        for _ in range(threads + 1):
            self._free.put(None)
        self._buffer: mmap.mmap | None = None
        self._filled = 0
        self._sent: list[Future[dict[str, Any]]] = []
        self._error: BaseException | None = None
        self._stopped = threading.Event()

    def __enter__(self) -> PartSender:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stopped.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        # Not `shutdown`'s own wait: one that the network swallows takes minutes to end.
        wait([part for part in self._sent if not part.cancelled()], timeout=_STOP_WAIT_S)

    def send(self, chunk: bytes) -> None:
        """Take the next bytes. Raises what a part before them failed with."""
        rest = memoryview(chunk)
        while rest:
            if self._buffer is None:
                # Not a bytearray: freed, its memory often stays with the process.
                self._buffer = self._free.get() or mmap.mmap(-1, self._part_bytes)
                if self._error is not None:
                    raise self._error
            room = self._part_bytes - self._filled
            taken = rest[:room]
            self._buffer[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            rest = rest[room:]
            if self._filled == self._part_bytes:
                self._submit()

    def finish(self) -> list[dict[str, Any]]:
        """Send what is left and return the parts as S3 wants them listed."""
        if self._filled:
            self._submit()
        wait(self._sent)
        if self._error is not None:
            raise self._error
        return [future.result() for future in self._sent]

    def _submit(self) -> None:
        buffer, length = self._buffer, self._filled
        assert buffer is not None
        self._buffer, self._filled = None, 0
        self._sent.append(self._pool.submit(self._run, len(self._sent) + 1, buffer, length))

    def _run(self, number: int, buffer: mmap.mmap, length: int) -> dict[str, Any]:
        try:
            if self._stopped.is_set() or self._error is not None:
                raise CancelledError
            return self._send(number, PartBody(memoryview(buffer)[:length], self._stopped))
        except (CancelledError, _Stop):
            raise
        except BaseException as error:
            self._error = self._error or error
            raise
        finally:
            self._free.put(buffer)


class PartBody(io.RawIOBase):
    """A part's bytes as the file that boto3 wants, without a copy of them.

    Given as bytes they are copied for each attempt, and once more for a signature made by awscrt.
    Once `stopped` is set, neither the attempt nor another one goes on.
    """

    def __init__(self, data: memoryview, stopped: threading.Event) -> None:
        self.data = data
        self._stopped = stopped
        self._position = 0

    def __len__(self) -> int:
        return len(self.data)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._require_wanted()
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self.data)}
        self._position = base[whence] + offset
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        self._require_wanted()
        # http.client asks for 16 KiB a time and sends whatever it gets; between many threads,
        # each such step costs more than what it sends.
        wanted = len(self.data) if size is None or size < 0 else max(size, _LEAST_READ_BYTES)
        found = self.data[self._position : self._position + wanted]
        self._position += len(found)
        return bytes(found)

    def readinto(self, buffer: Any, /) -> int:
        self._require_wanted()
        found = self.data[self._position : self._position + len(buffer)]
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)

    def _require_wanted(self) -> None:
        if self._stopped.is_set():
            raise _Stop


class _Stop(BaseException):
    """A part is not wanted any more. boto3 would make a new attempt of any Exception."""
