"""A proxy before an S3 server, that misbehaves as it is told to."""

from __future__ import annotations

import http.client
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tensorize_assets.demo.s3_server import REGION, LocalS3

_OURS = {"host", "authorization", "x-amz-date", "x-amz-content-sha256", "connection", "expect"}


@dataclass
class Asked:
    """A request as it came, header names In-Title-Case; as changed, it is signed anew and sent."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Answer:
    """An answer as it is sent back; `halfway` is called when half of its body is."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    halfway: Callable[[], object] | None = None

    @staticmethod
    def refusal(status: int, code: str, message: str = "no", **more: str) -> Answer:
        """An error as S3 says it."""
        parts = {"Code": code, "Message": message, **more}
        body = "".join(f"<{name}>{text}</{name}>" for name, text in parts.items())
        return Answer(
            status,
            {"Content-Type": "application/xml"},
            f'<?xml version="1.0" encoding="UTF-8"?><Error>{body}</Error>'.encode(),
        )


Before = Callable[[Asked], Answer | None]
After = Callable[[Asked, Answer], Answer | None]


class S3Proxy:
    """Stands before an S3 server and misbehaves as other servers and networks do.

    `before` may change a request or answer it instead of the server. `after` may change an
    answer; None loses it: the connection breaks. Both run in many threads.
    """

    def __init__(self, s3: LocalS3) -> None:
        self.before: Before = lambda asked: None
        self.after: After = lambda asked, answer: answer
        self.asked: list[Asked] = []
        self._s3 = s3
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                headers = {name.title(): value for name, value in self.headers.items()}
                answer = proxy._answer(Asked(self.command, self.path, headers, body))
                if answer is None:
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                if "Content-Length" not in answer.headers:
                    self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                if self.command != "HEAD":
                    half = len(answer.body) // 2 if answer.halfway else 0
                    self.wfile.write(answer.body[:half])
                    if answer.halfway:
                        answer.halfway()
                    self.wfile.write(answer.body[half:])

            do_PUT = do_POST = do_HEAD = do_DELETE = do_GET

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None:
                # A client that goes away is no news.
                if not isinstance(sys.exception(), ConnectionError):
                    super().handle_error(request, client_address)

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, asked: Asked) -> Answer | None:
        self.asked.append(asked)
        answer = self.before(asked)
        if answer is not None:
            return answer
        return self.after(asked, self._forward(asked))

    def _forward(self, asked: Asked) -> Answer:
        url = urlsplit(self._s3.endpoint)
        headers = {k: v for k, v in asked.headers.items() if k.lower() not in _OURS}
        # What was signed has another host: only a signature of its own lets the request through.
        request: Any = AWSRequest(
            asked.method, f"{self._s3.endpoint}{asked.target}", headers, asked.body
        )
        S3SigV4Auth(Credentials(self._s3.access_key, self._s3.secret_key), "s3", REGION).add_auth(
            request
        )
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=60)
        try:
            connection.request(asked.method, asked.target, asked.body, dict(request.headers))
            answer = connection.getresponse()
            kept = {
                k: v
                for k, v in answer.getheaders()
                if k.lower() not in ("connection", "transfer-encoding", "date", "server")
            }
            return Answer(answer.status, kept, answer.read())
        finally:
            connection.close()
