"""A link of limited rate to a server on this machine: python slow_link.py PORT MB_PER_SECOND.

Prints the port it listens on. What goes to the server shares the rate; answers are not held back.
"""

from __future__ import annotations

import socket
import sys
import threading
import time

_STEP = 256 << 10


class _Rate:
    """Hands out time on the link, to all connections in turn."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = time.monotonic()
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        with self._lock:
            begin = max(time.monotonic(), self._free_at)
            self._free_at = begin + size / self._bytes_per_second
            wait = self._free_at - time.monotonic()
        if wait > 0:
            time.sleep(wait)


def _copy(source: socket.socket, target: socket.socket, rate: _Rate | None) -> None:
    buffer = memoryview(bytearray(_STEP))
    try:
        while size := source.recv_into(buffer):
            if rate is not None:
                rate.take(size)
            target.sendall(buffer[:size])
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, target):
            end.close()


def main(port: int, megabytes_per_second: float) -> None:
    """Serve until killed."""
    rate = _Rate(megabytes_per_second * 1e6)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            client, _ = listener.accept()
            server = socket.create_connection(("127.0.0.1", port))
            for one, other, limit in ((client, server, rate), (server, client, None)):
                threading.Thread(target=_copy, args=(one, other, limit), daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
