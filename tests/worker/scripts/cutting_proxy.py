"""A TCP proxy that breaks connections, as networks do."""

import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable


class CuttingProxy:
    """Passes on to a port of this machine; resets connections when told to.

    `cuts` says after how many bytes of answers the connection that carries them is reset; one
    after another, each after a call of `on_cut`. While `dead`, no connection is taken; nor are the
    next `refusals`.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.cuts: deque[int] = deque()
        self.dead = False
        self.dies_of_cuts = False
        self.refusals = 0
        self.on_cut: Callable[[], object] = lambda: None
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            if self.dead or self.refusals:
                self.refusals = max(0, self.refusals - 1)
                _reset(client)
                continue
            server = socket.create_connection(("127.0.0.1", self._target))
            for source, target, answers in ((client, server, False), (server, client, True)):
                thread = threading.Thread(
                    target=self._pass_on, args=(source, target, answers), daemon=True
                )
                thread.start()

    def _pass_on(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        try:
            while data := source.recv(32 << 10):
                if self.dead or (answers and self._is_cut(len(data))):
                    _reset(target)
                    return
                target.sendall(data)
        except OSError:
            pass
        finally:
            source.close()
            target.close()

    def _is_cut(self, size: int) -> bool:
        with self._lock:
            if not self.cuts:
                return False
            self.cuts[0] -= size
            if self.cuts[0] > 0:
                return False
            self.cuts.popleft()
            self.dead = self.dies_of_cuts
        self.on_cut()
        return True


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    # Also where the other thread waits for it.
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RD)
    connection.close()
