"""What stands before vLLM's own routes: `vllm serve --middleware` names it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

# vLLM's own routes, and SageMaker's: POST /adapters, DELETE /adapters/NAME.
_CLOSED = frozenset({"load_lora_adapter", "unload_lora_adapter", "adapters"})

_ANSWER = json.dumps(
    {
        "error": {
            "message": "Adapters are those of the build that is served: give the name of one as "
            "`model`. They are neither loaded from elsewhere nor unloaded; a server for that is "
            "started with VLLM_ALLOW_RUNTIME_LORA_UPDATING set",
            "type": "PermissionDeniedError",
            "param": None,
            "code": 403,
        }
    }
).encode()


class AdaptersOnly:
    """Refuses to load and unload adapters, which vLLM would do for anybody, from any path.

    vLLM opens these routes with VLLM_ALLOW_RUNTIME_LORA_UPDATING, without which it asks no
    resolver either.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_closed(scope["path"]):
            await self._app(scope, receive, send)
            return
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(_ANSWER)),
        ]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": _ANSWER})


def _is_closed(path: str) -> bool:
    # Any part: what stands before it may be a root_path. Stripped: a route also takes a newline
    # behind its path.
    return any(part.strip() in _CLOSED for part in path.split("/"))
