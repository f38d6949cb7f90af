"""One real server with its store in S3, and what its clients get when something goes wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import servers
from servers import Session
from serving_files import serving

from tensorize_assets.core.s3 import ACCESS_VARIABLE, S3Access, S3Credentials, S3Settings
from tensorize_assets.core.serving import VARIABLE
from tensorize_assets.demo.s3_server import REGION, LocalS3

pytestmark = pytest.mark.engine

KEY = bytes(range(32))
MODEL = "tiny/llama"


@pytest.fixture(scope="session")
def store(builds: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalS3]:
    """A server with the builds, of its own: it is killed."""
    with LocalS3(tmp_path_factory.mktemp("own-s3")) as running:
        running.create_bucket("builds")
        for path in (builds / "root").rglob("*"):
            if path.is_file():
                key = path.relative_to(builds / "root").as_posix()
                running.client().upload_file(str(path), "builds", key)
        yield running


@pytest.fixture(scope="session")
def session(builds: Path, store: LocalS3, tmp_path_factory: pytest.TempPathFactory) -> Session:
    """An encrypted build at max_lora_rank 8 and with room for one adapter."""
    out = tmp_path_factory.mktemp("server")
    folder = builds / "root/vllm/tiny/secret"
    settings = S3Settings(endpoint_url=store.endpoint, region=REGION, max_attempts=2)
    S3Access(settings, S3Credentials(store.access_key, store.secret_key)).write(out / "access")
    (out / "key").write_bytes(KEY)
    serving(folder, "s3://builds", out / "told", out / "key", settings)
    (out / "metrics").mkdir()
    tensors = {"tensorizer_uri": "s3://builds/vllm/tiny/secret/model.tensors"}
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
        *("--served-model-name", MODEL, "--load-format", "tensorizer", "--dtype", "bfloat16"),
        *("--model-loader-extra-config", json.dumps(tensors)),
        *("--kv-cache-memory-bytes", str(64 << 20)),
        *("--enable-lora", "--max-lora-rank", "8", "--max-loras", "1", "--max-cpu-loras", "1"),
        *("--middleware", "tensorize_assets.vllm_plugin.middleware.AdaptersOnly"),
    ]
    environment = servers.environment(
        **{ACCESS_VARIABLE: str(out / "access"), VARIABLE: str(out / "told" / "serving.json")},
        VLLM_ALLOW_RUNTIME_LORA_UPDATING="1",
        PROMETHEUS_MULTIPROC_DIR=str(out / "metrics"),
        TMPDIR=str(out),
    )
    return servers.run(out / "log", command, environment, models=(MODEL,), ask=_asking(store))


def _asking(store: LocalS3) -> Callable[[str], dict[str, Any]]:
    def ask(url: str) -> dict[str, Any]:
        def completion(model: str) -> tuple[int, dict[str, Any]]:
            body = {"model": model, "prompt": "the quick", "max_tokens": 4, "temperature": 0}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False)
            return answer.status_code, answer.json()

        found = {name: completion(name) for name in ("pirate", "nobody", "poet", "cut", "other")}
        store.kill()
        found["late, store down"] = completion("late")
        found["model, store down"] = completion(MODEL)
        store.restart()
        found["late"] = completion("late")
        # Of the two, the server has room for one.
        found["pirate again"] = completion("pirate")
        listed = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"]
        found["listed"] = 200, {model["id"]: model["root"] for model in listed}
        load = {"lora_name": "mine", "lora_path": "/"}
        for route in ("v1/load_lora_adapter", "v1/unload_lora_adapter"):
            answer = httpx.post(f"{url}/{route}", json=load, trust_env=False)
            found[route] = answer.status_code, answer.json()
        return found

    return ask


def error(session: Session, name: str) -> tuple[int, str]:
    status, body = session.asked[name]
    return status, body["error"]["message"]


def test_adapters_answer_by_their_names(session: Session) -> None:
    """From S3, decrypted, and again after another has taken its room."""
    texts = [session.asked[name][1]["choices"][0]["text"] for name in ("pirate", "late")]
    assert texts[0] != texts[1]
    assert session.asked["pirate again"][1]["choices"][0]["text"] == texts[0]
    assert {MODEL, "pirate", "late"} == session.asked["listed"][1].keys()


def test_a_name_that_the_build_has_not_is_404(session: Session) -> None:
    """As any model that does not exist."""
    status, said = error(session, "nobody")
    assert 404 == status
    assert "The model `nobody` does not exist" in said


@pytest.mark.parametrize("name", ["cut", "other"])
def test_a_changed_adapter_is_an_error_of_the_server(session: Session, name: str) -> None:
    """Not 404, which clients take for a wrong name; which file it is stands in the log."""
    status, said = error(session, name)
    assert 500 == status
    assert said.startswith(f"adapter {name} was not loaded: cannot copy s3:/")
    [line] = [line for line in session.log.splitlines() if f"adapter {name} was not" in line]
    assert " ERROR " in line
    assert f"/vllm/tiny/secret/adapters/{name}/adapter_" in line


def test_a_store_that_is_down_is_503_and_the_model_goes_on(session: Session) -> None:
    """Clients and balancers try again, and the server has the adapter then."""
    status, said = error(session, "late, store down")
    assert 503 == status
    assert said.startswith("adapter late was not loaded: ")
    assert 200 == session.asked["model, store down"][0]
    assert 200 == session.asked["late"][0]


def test_an_adapter_that_is_too_large_for_the_server_is_400(session: Session) -> None:
    """`tensorize serve` gives the rank itself; by hand, vLLM says in its log what is wrong."""
    status, said = error(session, "poet")
    assert 400 == status
    assert "LoRA adapter 'poet' was found but could not be loaded." == said
    assert "LoRA rank 12 is greater than max_lora_rank 8" in session.log


@pytest.mark.parametrize("route", ["v1/load_lora_adapter", "v1/unload_lora_adapter"])
def test_nobody_loads_adapters_from_elsewhere(session: Session, route: str) -> None:
    """With vLLM's variable set, without which it asks no resolver, these routes are open."""
    assert 403 == session.asked[route][0]


def test_metrics_are_there_where_several_processes_share_them(session: Session) -> None:
    """With PROMETHEUS_MULTIPROC_DIR, vLLM shows what is in that folder, and nothing else."""
    report = session.report
    assert f'tensorize_assets_build_info{{build_id="{report["build_id"]}"' in session.metrics
    [line] = [
        line
        for line in session.metrics.splitlines()
        if line.startswith("tensorize_assets_load_bytes ")
    ]
    assert report["bytes"] == float(line.split()[1])


def test_nothing_decrypted_is_left(session: Session) -> None:
    """Neither in memory nor on the disk, once the server has ended."""
    folders = {name: Path(root) for name, root in session.asked["listed"][1].items()}
    del folders[MODEL]
    assert all(folder.is_relative_to("/dev/shm") for folder in folders.values())
    assert not any(folder.exists() for folder in folders.values())
