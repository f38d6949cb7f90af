"""Ask vLLM's own application, without an engine, for what our middleware closes; into CASES.

python routes_cases.py CASES
"""

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

from starlette.testclient import TestClient
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

MIDDLEWARE = "tensorize_assets.vllm_plugin.middleware.AdaptersOnly"
CLOSED = {
    "POST /v1/load_lora_adapter": {"lora_name": "mine", "lora_path": "/"},
    "POST /v1/unload_lora_adapter": {"lora_name": "mine"},
    "POST /adapters": {"name": "mine", "src": "/"},
    "DELETE /adapters/mine": None,
}
SPELLED = (
    "/v1/load_lora_adapter/",
    "//v1/load_lora_adapter",
    "/v1//load_lora_adapter",
    "/v1/./load_lora_adapter",
    "/v1/x/../load_lora_adapter",
    "/v1/%6coad_lora_adapter",
    "/v1%2fload_lora_adapter",
    "/v1/load_lora_adapter%0a",
    "/v1/load_lora_adapter%20",
    "/v1/load_lora_adapter%00",
    "/v1/load_lora_adapter;x",
    "/v1/load_lora_adapter%3fx",
    "/v1/load_lora_adapter?x=/health",
    "/V1/LOAD_LORA_ADAPTER",
    "/adapters%0a",
)
OTHERS = (
    "GET /version",
    "GET /health",
    "GET /v1/load",
    "GET /load_lora",
    "POST /version",
    "GET /v1/nothing",
    "GET /openapi.json",
    "POST /v1/completions",
)


class Handler:
    """Stands in for vLLM's own, which needs an engine; says that it was reached."""

    def __init__(self) -> None:
        self.load_lora_adapter = AsyncMock(return_value="done")
        self.unload_lora_adapter = AsyncMock(return_value="done")

    @property
    def reached(self) -> int:
        return self.load_lora_adapter.await_count + self.unload_lora_adapter.await_count


def client(handler: Handler, *arguments: str) -> TestClient:
    parser = make_arg_parser(FlexibleArgumentParser())
    app = build_app(parser.parse_args([*arguments]), ("generate",), None)
    app.state.openai_serving_models = handler
    app.state.engine_client = None
    return TestClient(app, raise_server_exceptions=False, follow_redirects=True)


def ask(asked: TestClient, request: str, body: dict[str, Any] | None = None) -> Any:
    method, path = request.split(" ", 1)
    # As it is: httpx would tidy the path.
    return asked.request(method, f"http://testserver{path}", json=body)


def main(cases: Path) -> None:
    handler = Handler()
    open_, closed = client(handler), client(handler, "--middleware", MIDDLEWARE)
    found: dict[str, Any] = {
        "routes": sorted(
            route
            for route in closed.get("/openapi.json").json()["paths"]
            if "lora" in route or "adapter" in route
        ),
        "closed": {},
        "spelled": {},
    }
    for request, body in CLOSED.items():
        answer = ask(closed, request, body)
        found["closed"][request] = {
            "status": answer.status_code,
            "body": answer.text,
            "type": answer.headers["content-type"],
            "open": ask(open_, request, body).status_code,
        }
    for prefix in ("", "/api"):
        bare = client(handler, "--root-path", prefix or "/")
        ours = client(handler, "--root-path", prefix or "/", "--middleware", MIDDLEWARE)
        for path in SPELLED:
            counts = [handler.reached]
            for asked in (bare, ours):
                body = {"lora_name": "x", "lora_path": "/", "name": "x", "src": "/"}
                ask(asked, f"POST {prefix}{path}", body)
                counts.append(handler.reached)
            found["spelled"][f"{prefix}{path}"] = {
                "reached without": counts[1] > counts[0],
                "reached": counts[2] > counts[1],
            }
    for name, asked in (("others without", open_), ("others", closed)):
        found[name] = {request: ask(asked, request).status_code for request in OTHERS}
    cases.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
