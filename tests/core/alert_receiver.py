"""A Slack-compatible webhook on this machine, for tests."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

PATH = "/services/T0/B0/a-secret-path"


class Receiver:
    """Takes messages at `url`; `answers` are given first, each once, and then 200."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.answers: deque[tuple[int, Mapping[str, str]]] = deque()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.paths.append(self.path)
                status, headers = receiver.answers.popleft() if receiver.answers else (200, {})
                if status == 200:
                    assert "application/json" == self.headers["Content-Type"]
                    receiver.messages.append(json.loads(body))
                self.send_response(status)
                for name, value in {"Content-Length": "2", **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(b"ok")

            # A client that follows redirects asks with GET.
            def do_GET(self) -> None:
                receiver.paths.append(f"GET {self.path}")
                self.send_error(404)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}{PATH}"

    @property
    def texts(self) -> list[str]:
        return [message["text"] for message in self.messages]

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
