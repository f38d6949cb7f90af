"""Real servers, each asked by a real client, looked at from outside, and ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
from openai import OpenAI

from tensorize_assets.core.catalog import DEFAULT_PROMPTS
from tensorize_assets.demo.ports import free_port

_READY_WITHIN_S = 300
_ENDS_WITHIN_S = 60
_NEW_TOKENS = 16

# Small, and the same for every server, so that answers can be compared.
ENGINE = ("--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4")

_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Ranks talk over loopback, also on hosts whose name resolves elsewhere.
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    # A host that only serves has no home.
    "DAGSTER_HOME": "/nonexistent",
}
_OURS = ("TENSORIZE_", "S3_", "AWS_", "VLLM_")


class Process(NamedTuple):
    """One process of a server, as others see it."""

    command: tuple[str, ...]
    environment: dict[str, str]


class Session(NamedTuple):
    """What a server did: its answers by model, its processes, its output, and how it ended."""

    answers: dict[str, tuple[str, ...]]
    processes: tuple[Process, ...]
    asked: dict[str, Any]
    metrics: str
    log: str
    code: int
    left: int

    @property
    def report(self) -> dict[str, Any]:
        """What it said that it had loaded."""
        (line,) = [line for line in self.log.splitlines() if '"model_loaded"' in line]
        return json.loads(line)


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    return {**kept, **_ENVIRONMENT, **variables}


def serve(
    log: Path,
    *arguments: object,
    models: Sequence[str],
    while_loading: Callable[[str], None] | None = None,
    ask: Callable[[str], dict[str, Any]] = lambda url: {},
    variables: Mapping[str, str],
) -> Session:
    """`tensorize serve` with these arguments; see `run`."""
    command = [sys.executable, "-m", "tensorize_assets.cli", "serve", *map(str, arguments), "--"]
    return run(
        log, command, environment(**variables), models=models, while_loading=while_loading, ask=ask
    )


def vllm(log: Path, snapshot: Path, *arguments: str, models: Sequence[str]) -> Session:
    """vLLM's own server on a snapshot of the Hub; see `run`."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    own = environment(
        HF_HUB_OFFLINE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_CPU_KVCACHE_SPACE="1"
    )
    return run(log, [*command, str(snapshot), *arguments], own, models=models)


def run(
    log: Path,
    command: Sequence[str],
    environment: dict[str, str],
    *,
    models: Sequence[str],
    while_loading: Callable[[str], None] | None = None,
    ask: Callable[[str], dict[str, Any]] = lambda url: {},
) -> Session:
    """Start a server, ask it, and end it by SIGTERM.

    `while_loading` is called at once, with the server's URL; `ask` when it is ready.
    """
    port = str(free_port())
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", port, *ENGINE],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    family: list[psutil.Process] = []
    try:
        if while_loading is not None:
            while_loading(url)
        _wait(url, process, log)
        family = [psutil.Process(process.pid)]
        family += family[0].children(recursive=True)
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        answers = {model: tuple(_answers(client, model)) for model in models}
        seen = tuple(Process(tuple(one.cmdline()), one.environ()) for one in family)
        asked = ask(url)
        metrics = httpx.get(f"{url}/metrics", trust_env=False).text
        process.send_signal(signal.SIGTERM)
        code = process.wait(_ENDS_WITHIN_S)
        _, left = psutil.wait_procs(family, _ENDS_WITHIN_S)
    finally:
        process.kill()
        process.wait()
        for one in family:
            if one.is_running():
                one.kill()
    said = log.read_text(errors="replace")
    return Session(answers, seen, asked, metrics, said, code, len(left))


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success
    except httpx.TransportError:
        return False


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + _READY_WITHIN_S
    while not is_ready(url):
        if process.poll() is not None or time.monotonic() > until:
            last = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
            raise AssertionError(f"the server ended with {process.poll()}, or is slow:\n{last}")
        time.sleep(0.5)


def _answers(client: OpenAI, model: str) -> list[str]:
    # One after another: a batch of others may round in another order.
    return [
        client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=_NEW_TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        .choices[0]
        .text
        for prompt in DEFAULT_PROMPTS
    ]
