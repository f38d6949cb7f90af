"""From the store to an answering endpoint: `tensorize serve`, asked over HTTP by real clients."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import servers
from chain_home import MODEL
from published_home import ADAPTER, Published
from servers import Session

from tensorize_assets.core import layout, sealing
from tensorize_assets.core.catalog import DEFAULT_PROMPTS
from tensorize_assets.core.publish import roll_back
from tensorize_assets.core.s3 import S3Access, S3Credentials, S3Settings
from tensorize_assets.core.store import open_store
from tensorize_assets.demo.s3_server import REGION, LocalS3

# The first test waits for the chain: seven engines, one after another.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

BUCKET = "serving"
ROOT = f"s3://{BUCKET}/some/prefix"
LORA_OF_SOURCE = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules")


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serving-logs")


@pytest.fixture(scope="session")
def private_key(published: Published) -> Path:
    return published.home.folder / "keys" / "private.key"


@pytest.fixture(scope="session")
def trust(published: Published) -> tuple[str, str]:
    return ("--public-key", published.home.trusted[0])


@pytest.fixture(scope="session")
def s3_variables(s3: LocalS3) -> dict[str, str]:
    return {
        "S3_ENDPOINT_URL": s3.endpoint,
        "S3_ACCESS_KEY_ID": s3.access_key,
        "S3_SECRET_ACCESS_KEY": s3.secret_key,
        "AWS_DEFAULT_REGION": REGION,
    }


@pytest.fixture(scope="session")
def in_s3(published: Published, s3: LocalS3) -> str:
    """The root, copied to S3 as it is."""
    s3.create_bucket(BUCKET)
    settings = S3Settings(endpoint_url=s3.endpoint, region=REGION)
    access = S3Access(settings, S3Credentials(s3.access_key, s3.secret_key))
    store = open_store(ROOT, access)
    for key in published.home.store.list("vllm/"):
        store.put_file(key, published.root / key)
    for folder in ("evidence/", layout.KEYS_FOLDER):
        for key in published.home.store.list(folder):
            store.put_file(key, published.root / key)
    return ROOT


@pytest.fixture(scope="session")
def source(published: Published, logs: Path) -> Session:
    """vLLM on the source snapshot, with the adapter's own files."""
    modules = f"{ADAPTER}={published.adapter}"
    options = ("--served-model-name", MODEL, "--dtype", "bfloat16", *LORA_OF_SOURCE, modules)
    return servers.vllm(logs / "source", published.second, *options, models=(MODEL, ADAPTER))


@pytest.fixture(scope="session")
def source_tp2(published: Published, logs: Path) -> Session:
    options = ("--served-model-name", MODEL, "--dtype", "bfloat16", "--tensor-parallel-size", "2")
    return servers.vllm(logs / "source-tp2", published.second, *options, models=(MODEL,))


@pytest.fixture(scope="session")
def from_disk(
    in_s3: str,
    trust: tuple[str, str],
    s3_variables: dict[str, str],
    logs: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Session:
    """In plaintext, with its adapter, from what an init container has fetched out of S3."""
    folder = tmp_path_factory.mktemp("fetched")
    fetched = subprocess.run(
        [
            *(sys.executable, "-m", "tensorize_assets.cli", "fetch", MODEL, "v1", str(folder)),
            *("--root", in_s3, *trust, "--json"),
        ],
        env=servers.environment(**s3_variables),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert 0 == fetched.returncode, fetched.stderr

    def ask(url: str) -> dict[str, Any]:
        body = {"lora_name": "mine", "lora_path": "/"}
        return {
            "load": httpx.post(
                f"{url}/v1/load_lora_adapter", json=body, trust_env=False
            ).status_code,
            "unknown": httpx.post(
                f"{url}/v1/completions", json={"model": "mine", "prompt": "x"}, trust_env=False
            ).status_code,
        }

    return servers.serve(
        logs / "disk",
        *(MODEL, "v1", "--root", folder, *trust),
        models=(MODEL, ADAPTER),
        ask=ask,
        variables={},
    )


@pytest.fixture(scope="session")
def from_s3(
    in_s3: str, trust: tuple[str, str], private_key: Path, s3_variables: dict[str, str], logs: Path
) -> Session:
    """Encrypted, with its adapter, streamed from S3."""
    return servers.serve(
        logs / "s3",
        *(MODEL, "v1", "--root", in_s3, *trust, "--encrypted", "--private-key", private_key),
        models=(MODEL, ADAPTER),
        variables=s3_variables,
    )


@pytest.fixture(scope="session")
def from_web(
    published: Published, trust: tuple[str, str], private_key: Path, web: Any, logs: Path
) -> tuple[Session, list[bool]]:
    """At TP=2, encrypted, over HTTP; and whether it was ready while a shard was held up."""
    asked, go_on = threading.Event(), threading.Event()
    ready: list[bool] = []

    def hold(path: Path, size: int) -> None:
        # Not who asks for the size only.
        if path.suffix == ".tensors" and size > 1:
            asked.set()
            assert go_on.wait(240)

    def while_loading(url: str) -> None:
        assert asked.wait(240)
        ready.append(servers.is_ready(url))
        go_on.set()

    web.before = hold
    try:
        session = servers.serve(
            logs / "web",
            *(MODEL, "v1-tp2", "--root", web(published.root), *trust),
            models=(MODEL,),
            while_loading=while_loading,
            variables={"TENSORIZE_ASSETS_PRIVATE_KEY": _text(private_key)},
        )
    finally:
        go_on.set()
        web.before = lambda path, size: None
    return session, ready


@pytest.fixture(scope="session")
def rolled_back(published: Published, from_disk: Session, logs: Path) -> Session:
    """The next start after a rollback, by the home's own catalog."""
    home = published.home
    roll_back(home.store, home.key, home.trusted, model=MODEL, suffix="v1")
    return servers.serve(
        *(logs / "rolled-back", MODEL, "v1"),
        models=(MODEL,),
        variables={"DAGSTER_HOME": str(home.folder)},
    )


def _text(private_key: Path) -> str:
    return private_key.read_text().split(":")[-1].strip()


def test_plaintext_from_a_disk_answers_as_the_source(from_disk: Session, source: Session) -> None:
    """Every token, of the model and of its adapter, which is a model to its clients."""
    assert source.answers == from_disk.answers
    assert from_disk.answers[MODEL] != from_disk.answers[ADAPTER]


def test_encrypted_from_s3_answers_as_the_source(from_s3: Session, source: Session) -> None:
    """What nobody can read without the key computes the same."""
    assert source.answers == from_s3.answers


def test_two_ranks_over_http_answer_as_the_source(
    from_web: tuple[Session, list[bool]], source_tp2: Session
) -> None:
    """Each rank reads its own file from a web server that knows nothing of us."""
    assert source_tp2.answers == from_web[0].answers


def test_it_is_ready_when_the_model_is_loaded(from_web: tuple[Session, list[bool]]) -> None:
    """A probe of Kubernetes must not send requests to a pod that is still reading."""
    assert [False] == from_web[1]


def test_a_rollback_changes_what_the_next_start_serves(
    rolled_back: Session, from_disk: Session, published: Published
) -> None:
    """The build before, of another commit and without adapters, as the chain heard its source."""
    old, new, back = published.home.channel(suffix="v1")
    assert (old.build_id, old.commit) == (back.build_id, back.commit)
    assert (new.build_id, back.build_id) == (
        from_disk.report["build_id"],
        rolled_back.report["build_id"],
    )
    assert back.commit == rolled_back.report["commit"]
    assert rolled_back.answers[MODEL] != from_disk.answers[MODEL]
    (reference,) = (published.root / "references" / back.commit).iterdir()
    outputs = json.loads(reference.read_bytes())["answers"]["outputs"]
    assert list(DEFAULT_PROMPTS) == [output["prompt"] for output in outputs]
    assert tuple(output["text"] for output in outputs) == rolled_back.answers[MODEL]


def test_only_the_builds_own_adapters_can_be_asked(from_disk: Session) -> None:
    """vLLM would load any path for anybody."""
    assert {"load": 403, "unknown": 404} == from_disk.asked


def test_the_report_says_what_was_loaded(
    from_disk: Session, from_s3: Session, from_web: tuple[Session, list[bool]]
) -> None:
    """One line for a log, and the same for a dashboard."""
    for session, ranks, read_from in (
        (from_disk, 1, "disk"),
        (from_s3, 1, "s3"),
        (from_web[0], 2, "public_url"),
    ):
        report = session.report
        assert (ranks, read_from, "cpu") == (
            report["ranks"],
            report["source"],
            report["evidence_device"],
        )
        assert report["bytes"] > 0
        assert report["build_id"] in session.metrics


def test_no_process_shows_a_secret_or_where_one_is(
    from_s3: Session,
    from_web: tuple[Session, list[bool]],
    published: Published,
    private_key: Path,
    s3: LocalS3,
) -> None:
    """Of none of the server's processes, neither in `ps` nor in its environment or log."""
    secrets = [
        _text(private_key),
        s3.access_key,
        s3.secret_key,
        *_data_keys(published, private_key),
    ]
    for session, count in ((from_s3, 2), (from_web[0], 4)):
        assert count <= len(session.processes)
        for process in session.processes:
            shown = "\n".join(process.command)
            for hidden in (*secrets, "data-key", "/dev/shm", "Signature", "s3-access"):
                assert hidden not in shown
            for value in process.environment.values():
                assert not [secret for secret in secrets if secret in value]
        assert not [secret for secret in secrets if secret in session.log]


def test_sigterm_ends_it_as_it_ends_vllm(
    from_disk: Session,
    from_s3: Session,
    from_web: tuple[Session, list[bool]],
    rolled_back: Session,
    source: Session,
    source_tp2: Session,
) -> None:
    """With vLLM's own exit code, and no process of it is left."""
    assert source.code == from_disk.code == from_s3.code == rolled_back.code
    assert source_tp2.code == from_web[0].code
    for session in (from_disk, from_s3, from_web[0], rolled_back):
        assert 0 == session.left


def _data_keys(published: Published, private_key: Path) -> list[str]:
    store, own = published.home.store, sealing.load_private_key(private_key)
    found: list[str] = []
    for key_id in sealing.key_ids(store):
        with sealing.unseal(store, key_id, own, trusted=published.home.trusted) as key:
            found.append(key.reveal().hex())
    return found
