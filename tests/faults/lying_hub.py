"""A Hub whose answers go through what a test puts in their way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Self
from urllib.parse import unquote, urlsplit

from tensorize_assets.demo.hub_server import LocalHub, _Handler, _Server


class Answer(NamedTuple):
    """An answer before it is sent. Without a `length` it ends when who asked hangs up."""

    method: str
    path: str
    status: int
    length: int | None
    body: Iterator[bytes]
    headers: Mapping[str, str]

    def with_header(self, name: str, value: str) -> Answer:
        """This answer with a header in the place of its own."""
        return self._replace(headers={**self.headers, name: value})


Lie = Callable[[Answer], Answer]


class LyingHub(LocalHub):
    """Passes each answer through `lie`, which may change all of it, or do something meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.lie: Lie = lambda answer: answer

    def start(self) -> Self:
        self._server = _Server(
            ("127.0.0.1", self.port), lambda *args: _Liar(self, self._state, *args)
        )
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return self

    def forget(self, repo: str, commit: str) -> None:
        """Drop a commit, as the Hub does some time after a force-push."""
        del self._state.repos[repo].commits[commit]


class _Liar(_Handler):
    def _send(
        self, status: int, length: int, body: Iterator[bytes], headers: Mapping[str, str]
    ) -> None:
        hub: Any = self._hub
        path = unquote(urlsplit(self.path).path)
        answer: Answer = hub.lie(Answer(self.command, path, status, length, body, headers))
        if answer.length is not None:
            super()._send(answer.status, answer.length, answer.body, answer.headers)
            return
        self.close_connection = True
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        for chunk in answer.body if self.command != "HEAD" else ():
            try:
                self.wfile.write(chunk)
            except OSError:
                return
