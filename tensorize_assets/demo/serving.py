"""The last step of the demo: the published model is served, and answers over HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tensorize_assets.core.errors import TensorizeAssetsError
from tensorize_assets.demo.ports import free_port

_READY_WITHIN_S = 240.0
_POLL_S = 0.5
_ANSWER_WITHIN_S = 60.0
_END_WITHIN_S = 30.0
_LAST_LINES = 30

# Small, for a machine that runs the S3 server too.
_ENGINE = ("--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "4")


def answers(
    home: Path, model: str, suffix: str, prompt: str, adapters: tuple[str, ...]
) -> dict[str, Any]:
    """Serve a published build and ask it `prompt`, then the same with each adapter.

    Returns the server's own start-up report, and the answers by the name of the model asked.

    Raises:
        TensorizeAssetsError: it does not start, or does not answer.
    """
    # At this point, and not above: it takes a second, and `tensorize` imports this module.
    from openai import DefaultHttpxClient, OpenAI, OpenAIError

    log = home / "serve.log"
    with _server(home, model, suffix, log) as url:
        # Of no proxy: it is on loopback.
        direct = DefaultHttpxClient(trust_env=False)
        client = OpenAI(
            base_url=f"{url}/v1", api_key="none", timeout=_ANSWER_WITHIN_S, http_client=direct
        )
        try:
            said = {
                name: client.completions.create(
                    model=name,
                    prompt=prompt,
                    max_tokens=16,
                    temperature=0,
                    # As in the reload check: a model for chats ends a bare prompt at once.
                    extra_body={"ignore_eos": True},
                )
                .choices[0]
                .text
                for name in (model, *adapters)
            }
        except OpenAIError as error:
            raise TensorizeAssetsError(
                f"{model} {suffix} was served and did not answer: {error}; its log is {log}"
            ) from error
    return {"report": _report(log), "prompt": prompt, "answers": said}


@contextmanager
def _server(home: Path, model: str, suffix: str, log: Path) -> Generator[str]:
    """`tensorize serve` on a free port of loopback, until it is ready; ended at the end."""
    port = free_port()
    command = [sys.executable, "-m", "tensorize_assets.cli", "serve", model, suffix, "--"]
    address = ["--host", "127.0.0.1", "--port", str(port)]
    with (
        log.open("wb") as file,
        subprocess.Popen(
            [*command, *address, *_ENGINE],
            env=_environment(home),
            stdout=file,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            _wait(f"http://127.0.0.1:{port}/health", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_END_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _environment(home: Path) -> dict[str, str]:
    return {**os.environ, "DAGSTER_HOME": str(home), "VLLM_NO_USAGE_STATS": "1"}


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + _READY_WITHIN_S
    while time.monotonic() < until:
        if process.poll() is not None:
            last = "\n".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
            raise TensorizeAssetsError(f"`tensorize serve` ended before it was ready:\n{last}")
        try:
            if httpx.get(url, timeout=5, trust_env=False).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(_POLL_S)
    raise TensorizeAssetsError(f"`tensorize serve` was not ready in {_READY_WITHIN_S:.0f} s: {log}")


def _report(log: Path) -> dict[str, Any]:
    """The line of JSON in which the server says what it has loaded."""
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("{") and '"model_loaded"' in line:
            return json.loads(line)
    raise TensorizeAssetsError(f"the server did not say what it has loaded: {log}")
