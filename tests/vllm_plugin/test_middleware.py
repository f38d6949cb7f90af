"""The routes by which vLLM loads adapters for anybody, closed; on vLLM's own application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tensorize_assets.vllm_plugin.middleware import AdaptersOnly

SCRIPT = Path(__file__).parent / "scripts" / "routes_cases.py"


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory, run_script: Callable[..., None]) -> Any:
    """What came of each request of routes_cases.py."""
    out = tmp_path_factory.mktemp("routes")
    run_script(SCRIPT, out / "cases.json", VLLM_ALLOW_RUNTIME_LORA_UPDATING="1")
    return json.loads((out / "cases.json").read_text())


def test_every_route_that_loads_or_unloads_is_closed(cases: Any) -> None:
    """vLLM's own two and SageMaker's two: whatever a release calls so has to be among them."""
    assert ["/adapters", "/adapters/{adapter_name}"] == cases["routes"][:2]
    assert ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"] == cases["routes"][2:]
    assert 4 == len(cases["routes"])
    assert {403} == {case["status"] for case in cases["closed"].values()}
    assert {200} == {case["open"] for case in cases["closed"].values()}


@pytest.mark.parametrize("prefix", ["", "/api"])
def test_no_spelling_leads_around_it(cases: Any, prefix: str) -> None:
    """Whatever reaches such a route without us must not reach it with us."""
    spellings = {path: case for path, case in cases["spelled"].items() if path.startswith(prefix)}
    around = [path for path, case in spellings.items() if case["reached"]]
    assert [] == around
    reached_without = [path for path, case in spellings.items() if case["reached without"]]
    # Some of them do reach it: a newline behind the path, and a letter as its number.
    assert len(reached_without) >= 3


def test_the_answer_is_an_error_as_openai_has_it(cases: Any) -> None:
    """Clients show its message."""
    case = cases["closed"]["POST /v1/load_lora_adapter"]
    error = json.loads(case["body"])["error"]
    assert {"message", "type", "param", "code"} == error.keys()
    assert 403 == error["code"]
    assert "Adapters are those of the build that is served" in error["message"]
    assert "application/json" == case["type"]


def test_everything_else_passes(cases: Any) -> None:
    """As it does without: answers, errors, and methods that do not exist."""
    assert cases["others without"] == cases["others"]
    assert 200 == cases["others"]["GET /version"]


@pytest.mark.parametrize(
    "scope",
    [
        {"type": "lifespan"},
        {"type": "websocket", "path": "/v1/realtime"},
        {"type": "http", "path": "/"},
    ],
)
def test_what_is_no_such_request_passes_untouched(scope: dict[str, Any]) -> None:
    """A server without lifespan does not start."""
    seen: list[Any] = []

    async def app(*arguments: Any) -> None:
        seen.extend(arguments)

    async def nothing(*_: Any) -> Any: ...

    asyncio.run(AdaptersOnly(app)(scope, nothing, nothing))
    assert [scope, nothing, nothing] == seen
    assert seen[0] is scope
