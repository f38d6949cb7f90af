"""A wire between a client and a server of this machine, which can be slow, silent and cut."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass

_STEP_BYTES = 64 * 1024
_LOOK_S = 0.2
# Closing then says RST and not FIN, whatever was not delivered yet.
_RESET = struct.pack("ii", 1, 0)


@dataclass
class Cut:
    """Resets a connection once more than `after` bytes went up, or down; so many `times`."""

    up: bool
    after: int
    times: int


class TcpProxy:
    """Passes bytes on as they come, both ways.

    `cuts` end connections with a reset to both sides. `delay_s` is what each step of 64 KiB takes.
    Of the next `silent` connections nothing is passed on, and nothing said.
    """

    def __init__(self, port: int) -> None:
        self.cuts: list[Cut] = []
        self.delay_s = 0.0
        self.silent = 0
        self._lock = threading.Lock()
        self._to = port
        self._ended = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_LOOK_S)
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._ended.set()
        # The first adds to the others until it ends.
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            with suppress(TimeoutError):
                client, _ = self._listener.accept()
                silent, self.silent = self.silent > 0, max(0, self.silent - 1)
                thread = threading.Thread(
                    target=self._hold if silent else self._pass, args=[client]
                )
                self._threads.append(thread)
                thread.start()

    def _hold(self, client: socket.socket) -> None:
        with client:
            self._ended.wait()

    def _pass(self, client: socket.socket) -> None:
        with ExitStack() as closed, suppress(OSError):
            closed.enter_context(client)
            server = closed.enter_context(socket.create_connection(("127.0.0.1", self._to)))
            passed = {client: 0, server: 0}
            while not self._ended.is_set():
                ready, _, _ = select.select(list(passed), [], [], _LOOK_S)
                for source in ready:
                    chunk = source.recv(_STEP_BYTES)
                    passed[source] += len(chunk)
                    if self._is_cut(source is client, passed[source]):
                        for one in passed:
                            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                        return
                    if not chunk:
                        return
                    time.sleep(self.delay_s)
                    (server if source is client else client).sendall(chunk)

    def _is_cut(self, up: bool, passed: int) -> bool:
        with self._lock:
            for cut in self.cuts:
                if cut.up == up and passed > cut.after and cut.times:
                    cut.times -= 1
                    return True
        return False
