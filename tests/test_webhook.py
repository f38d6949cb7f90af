"""The Hub's webhook over real HTTP: what is believed, refused, and told to the revision sensor."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import dagster as dg
import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from postgres import postgres

from tensorize_assets import webhook
from tensorize_assets.core.catalog import load_catalog

SECRET = "0123456789abcdef-the-secret"
HEADERS = {"X-Webhook-Secret": SECRET}
A, B, C = "a" * 40, "b" * 40, "c" * 40

CATALOG = """
root: artifacts
models:
  org/model:
    profiles:
      v1:
        reload_device: cpu
        adapters: [{name: summarize, repo: org/adapter, revision: v2.0}]
      v2: {reload_device: cpu, revision: refs/pr/3}
  org/pinned:
    profiles: {v1: {reload_device: cpu, track: pin}}
  org/commit:
    profiles: {v1: {reload_device: cpu, revision: %s}}
""" % ("d" * 40)


class Running:
    """A server in a thread; `reports` are what the sensor would be told, if `gate` is open."""

    def __init__(self, catalog: Path, every_s: float) -> None:
        self.catalog = catalog
        self.reports: queue.Queue[tuple[str, str | None]] = queue.Queue()
        self.errors: list[Exception] = []
        self.begun: queue.Queue[tuple[str, str | None]] = queue.Queue()
        self.gate = threading.Event()
        self.gate.set()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self.listener.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self.server = webhook.webhook_server(
            webhook.webhook_app(SECRET, catalog, self._report, every_s)
        )
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self.server.serve([self.listener]))
        )
        self._thread.start()

    def _report(self, repo: str, commit: str | None) -> None:
        self.begun.put((repo, commit))
        self.gate.wait(20)
        if self.errors:
            raise self.errors.pop()
        self.reports.put((repo, commit))

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    def post(self, content: Any, headers: dict[str, str] | None = None) -> httpx.Response:
        body = content if isinstance(content, bytes) else json.dumps(content)
        with httpx.Client(timeout=20, trust_env=False) as client:
            return client.post(f"{self.url}/hub", content=body, headers=headers or HEADERS)

    def reported(self) -> list[tuple[str, str | None]]:
        """What was reported so far."""
        found: list[tuple[str, str | None]] = []
        while not self.reports.empty():
            found.append(self.reports.get())
        return found

    def raw(self, *parts: bytes) -> bytes:
        """What comes back on a connection of its own, to its end."""
        with socket.create_connection(self.address, timeout=20) as connection:
            for part in parts:
                connection.sendall(part)
            return read_to_end(connection)


def read_to_end(connection: socket.socket) -> bytes:
    found = b""
    try:
        while part := connection.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


def delivery(
    repo: str = "org/model",
    new: str | None = B,
    old: str | None = A,
    ref: str = "refs/heads/main",
    **fields: Any,
) -> dict[str, Any]:
    """A payload as the Hub documents it, with fields that nothing here reads."""
    return {
        "event": {"action": "update", "scope": "repo.content"},
        "repo": {
            "type": "model",
            "name": repo,
            "id": "6366c000a2abcdf2fd69a080",
            "private": False,
            "url": {"web": f"https://huggingface.co/{repo}"},
            "headSha": B,
            "tags": ["license:other"],
            "owner": {"id": "61d2000c3c2083e1c08af22d"},
        },
        "updatedRefs": [{"ref": ref, "oldSha": old, "newSha": new}],
        "webhook": {"id": "6390e855e30d9209411de93b", "version": 3},
        **fields,
    }


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts servers over a catalog, and stops them."""
    catalog = tmp_path / "models.yaml"
    catalog.write_text(CATALOG)
    running: list[Running] = []

    def started(every_s: float = 0.0) -> Running:
        running.append(Running(catalog, every_s))
        return running[-1]

    yield started
    for server in running:
        server.stop()


@pytest.fixture
def server(start: Callable[..., Running]) -> Running:
    return start()


def test_a_new_commit_is_reported(server: Running) -> None:
    """With the repo and the commit, at once: a build starts within seconds."""
    answer = server.post(delivery())
    assert (202, True) == (answer.status_code, answer.json()["reported"])
    assert "org/model: reported" in answer.json()["said"]
    assert [("org/model", B)] == server.reported()


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        (delivery(ref="refs/pr/3"), ("org/model", B)),
        (delivery("org/adapter", ref="refs/tags/v2.0"), ("org/adapter", B)),
        # Its branch was deleted: the sensor will say so.
        (delivery(new=None), ("org/model", None)),
        (delivery(old=None), ("org/model", B)),
        # Created, renamed or made private; no reference moved.
        (
            delivery(event={"action": "update", "scope": "repo"}, updatedRefs=None),
            ("org/model", B),
        ),
        # What the Hub may add one day counts as the broader scope.
        (delivery(event={"action": "update", "scope": "repo.content.lfs"}), ("org/model", B)),
    ],
)
def test_what_the_catalog_follows_is_reported(
    server: Running, given: Any, reported: tuple[str, str | None]
) -> None:
    """Branches, tags and pull requests that a profile names, of models and adapters."""
    assert 202 == server.post(given).status_code
    assert [reported] == server.reported()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (delivery("org/other"), "org/other is not followed"),
        (delivery("org/pinned"), "org/pinned is not followed"),
        (delivery("org/commit"), "org/commit is not followed"),
        (delivery(ref="refs/heads/dev"), "no revision moved that the catalog follows"),
        # A pull request on the Hub makes a reference of its own.
        (delivery(ref="refs/pr/9"), "no revision moved"),
        (delivery(updatedRefs=[]), "no revision moved"),
        (delivery(repo_type="dataset"), "repos of type dataset"),
        (delivery(event={"action": "create", "scope": "discussion"}), "scope discussion"),
        (delivery(event={"action": "update", "scope": "repo.config"}), "scope repo.config"),
        (delivery(event={"action": "update", "scope": "repo.contents"}), "scope repo.contents"),
    ],
)
def test_what_it_does_not_follow_is_not(server: Running, given: Any, said: str) -> None:
    """A webhook may watch a whole organisation. It is no error: the Hub would show one."""
    if "repo_type" in given:
        given = {**given, "repo": {**given["repo"], "type": given["repo_type"]}}
    answer = server.post(given)
    assert (200, False) == (answer.status_code, answer.json()["reported"])
    assert said in answer.json()["said"]
    assert [] == server.reported()


@pytest.mark.fault(
    "Secrets",
    "a webhook's delivery with a wrong secret, or none",
    "the same answer, whatever it holds",
)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"X-Webhook-Secret": ""},
        {"X-Webhook-Secret": SECRET[:-1]},
        {"X-Webhook-Secret": SECRET + "0"},
        {"X-Webhook-Secret": "x" * 10_000},
        {"X-Webhook-Secret": "größer, 日本".encode()},
        {"X-Webhook-Secret": b"\xff\xfe"},
        [("X-Webhook-Secret", SECRET), ("X-Webhook-Secret", "another")],
        {"Authorization": f"Bearer {SECRET}"},
    ],
    ids=range(9),
)
def test_without_the_secret_every_answer_is_the_same(server: Running, headers: Any) -> None:
    """Whoever guesses learns nothing, neither of the secret nor of the rest."""
    bodies = [json.dumps(delivery()).encode(), b"{", b"x" * 100_000]
    with httpx.Client(timeout=20, trust_env=False) as client:
        answers = [
            client.post(f"{server.url}/hub", content=body, headers=headers) for body in bodies
        ]
    said = {"error": "the header X-Webhook-Secret is missing or wrong"}
    assert [(401, said)] * 3 == [(answer.status_code, answer.json()) for answer in answers]
    assert [] == server.reported()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "Invalid JSON"),
        (b"{", "Invalid JSON"),
        (b"\xff\xfe{}", "Invalid JSON"),
        (b"[" * 60_000, "Invalid JSON"),
        (b"[]", "should be an object"),
        (b"null", "should be an object"),
        (b"{}", "event: Field required; repo: Field required"),
        ({**delivery(), "repo": "org/model"}, "repo: "),
        (delivery(repo=""), "repo.name: "),
        (delivery(repo="x" * 301), "repo.name: "),
        (delivery(new="main"), "updatedRefs.0.newSha: "),
        (delivery(new="B" * 40), "updatedRefs.0.newSha: "),
        (delivery(updatedRefs={"ref": "x"}), "updatedRefs: "),
        ({**delivery(), "event": {"action": 1, "scope": "repo"}}, "event.action: "),
    ],
)
def test_wrong_content_is_refused_with_the_reason(
    server: Running, content: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In the Hub's activity tab somebody reads it; no traceback, there or in the log."""
    answer = server.post(content)
    assert 400 == answer.status_code
    assert said in answer.json()["error"]
    assert "Traceback" not in answer.text + caplog.text
    assert [] == server.reported()


def test_a_long_body_is_refused_however_it_comes(server: Running) -> None:
    """Declared, in chunks, or declared shorter than it is: 64 KiB are read and no more."""
    large = json.dumps(delivery(padding="x" * webhook.MAX_BODY)).encode()
    assert 413 == server.post(large).status_code
    with httpx.Client(timeout=20, trust_env=False) as client:
        chunks = (large[at : at + 1000] for at in range(0, len(large), 1000))
        answer = client.post(f"{server.url}/hub", content=chunks, headers=HEADERS)
    assert 413 == answer.status_code
    assert "more than 65536 bytes" in answer.json()["error"]
    answer = server.raw(head(f"Content-Length: {10**19}"))
    assert answer.startswith(b"HTTP/1.1 4")
    assert [] == server.reported()


def head(*lines: str, secret: str = SECRET) -> bytes:
    fields = ["POST /hub HTTP/1.1", "Host: x", f"X-Webhook-Secret: {secret}", "Connection: close"]
    return "\r\n".join([*fields, *lines, "", ""]).encode()


def test_a_content_length_that_lies_gets_nothing(server: Running) -> None:
    """Of a body that is longer than it said, the rest is no request; a shorter one never ends."""
    body = json.dumps(delivery()).encode()
    assert server.raw(head("Content-Length: 20"), body).startswith(b"HTTP/1.1 400")
    assert server.raw(head("Content-Length: -1"), body).startswith(b"HTTP/1.1 400")
    lines = ("Content-Length: 20", "Content-Length: 30")
    assert server.raw(head(*lines), body).startswith(b"HTTP/1.1 400")
    with socket.create_connection(server.address, timeout=20) as connection:
        connection.sendall(head(f"Content-Length: {len(body) + 1}") + body)
        connection.shutdown(socket.SHUT_WR)
        read_to_end(connection)
    assert [] == server.reported()
    assert 202 == server.post(delivery()).status_code


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /hub HT",
        b"POST /hub HTTP/1.1\r\nHost: x\r\nX-Slow: ",
        head("Content-Length: 100") + b'{"event"',
        head("Transfer-Encoding: chunked") + b"8\r\n",
    ],
)
def test_a_slow_client_is_cut(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """One that sends a byte a minute would hold its connection for ever."""
    monkeypatch.setattr(webhook, "CONNECTION_S", 0.3)
    server = start()
    with socket.create_connection(server.address, timeout=20) as connection:
        connection.sendall(sent)
        assert b"" == read_to_end(connection)
    monkeypatch.setattr(webhook, "CONNECTION_S", 20)
    assert 202 == server.post(delivery()).status_code


def test_many_clients_are_turned_away_and_none_harms_the_rest(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit there is 503, far beyond it nothing; when they are gone, all is as before."""
    monkeypatch.setattr(webhook, "MOST_CONNECTIONS", 3)
    server = start()
    with ExitStack() as open_ones:

        def connect() -> socket.socket:
            connection = socket.create_connection(server.address, timeout=20)
            return open_ones.enter_context(connection)

        for _ in range(3):
            connect()
        assert 503 == server.post(delivery()).status_code
        for _ in range(3):
            connect()
        assert b"" == read_to_end(connect())
    # The server takes a moment to see that they are gone.
    while server.post(delivery()).status_code == 503:
        pass
    assert [("org/model", B)] == server.reported()


def test_there_is_nothing_else(server: Running) -> None:
    """One route for deliveries, one for whoever watches the process."""
    with httpx.Client(base_url=server.url, timeout=20, trust_env=False) as client:
        assert {"status": "ok"} == client.get("/health").json()
        assert 405 == client.post("/health").status_code
        for method in ("GET", "PUT", "DELETE", "HEAD", "OPTIONS"):
            assert 405 == client.request(method, "/hub", headers=HEADERS).status_code
        for path in ("/", "/hub/", "/hub/x", "/docs"):
            assert 404 == client.post(path, headers=HEADERS, json=delivery()).status_code
        assert "server" not in client.get("/health").headers
    assert [] == server.reported()


def test_the_same_delivery_again_reports_nothing(server: Running) -> None:
    """The Hub's own retry, its Replay button, and whoever recorded one."""
    assert 202 == server.post(delivery(new=B, old=A)).status_code
    again = server.post(delivery(new=B, old=A))
    assert (200, False) == (again.status_code, again.json()["reported"])
    assert "was reported already" in again.json()["said"]
    # Back to the commit before is another one.
    assert 202 == server.post(delivery(new=A, old=B)).status_code
    assert 200 == server.post(delivery(new=B, old=A)).status_code
    assert [("org/model", B), ("org/model", A)] == server.reported()


def test_of_a_flood_the_first_and_the_last_are_reported(start: Callable[..., Running]) -> None:
    """A script that pushes file by file makes a hundred commits a minute."""
    server = start(every_s=0.5)
    assert 202 == server.post(delivery(new=B, old=A)).status_code
    for number in range(20):
        answer = server.post(delivery(new=f"{number:040x}", old=A))
        assert 202 == answer.status_code
    assert ("org/model", B) == server.reports.get(timeout=20)
    last = ("org/model", f"{19:040x}")
    reports = [server.reports.get(timeout=20)]
    while reports[-1] != last:
        reports.append(server.reports.get(timeout=20))
    # A loaded machine may take longer than one interval for the requests.
    assert len(reports) < 20
    # Another repo does not wait for this one.
    assert "reported, " in server.post(delivery("org/adapter", ref="refs/tags/v2.0")).text


def test_what_comes_during_a_slow_report_is_reported_by_the_same_task(
    start: Callable[..., Running], caplog: pytest.LogCaptureFixture
) -> None:
    """Two that wait for one repo were an error, and reports that come too soon."""
    server = start(every_s=1)
    server.post(delivery(new=B))
    server.post(delivery(new=C))
    server.gate.clear()
    while server.begun.get(timeout=20) != ("org/model", C):
        pass
    assert 202 == server.post(delivery(new=A)).status_code
    server.gate.set()
    assert [("org/model", commit) for commit in (B, C, A)] == [
        server.reports.get(timeout=20) for _ in range(3)
    ]
    # By the time that another repo has waited as long, nothing of this one waits.
    for commit in (B, C):
        server.post(delivery("org/adapter", commit, ref="refs/tags/v2.0"))
        assert ("org/adapter", commit) == server.reports.get(timeout=20)
    gc.collect()
    assert "Task exception" not in caplog.text


def test_what_waits_is_reported_when_the_server_ends(start: Callable[..., Running]) -> None:
    """An update of the server must not cost a build until the next poll."""
    server = start(every_s=3600)
    server.post(delivery(new=B))
    answer = server.post(delivery(new=C))
    assert "will be reported within" in answer.json()["said"]
    assert [("org/model", B)] == server.reported()
    server.stop()
    assert [("org/model", C)] == server.reported()


def test_many_repos_at_once_are_each_reported(start: Callable[..., Running]) -> None:
    """A fleet's organisation pushes a release of everything."""
    server = start()
    names = [f"org/m{number}" for number in range(40)]
    profile = "{profiles: {v1: {reload_device: cpu}}}"
    models = "\n".join(f"  {name}: {profile}" for name in names)
    server.catalog.write_text(f"root: artifacts\nmodels:\n{models}\n")
    with ThreadPoolExecutor(20) as pool:
        answers = pool.map(lambda name: server.post(delivery(name)).status_code, names)
        assert [202] * 40 == list(answers)
    assert sorted((name, B) for name in names) == sorted(server.reported())


def test_a_storage_that_fails_is_said_and_the_delivery_may_come_again(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """Not as a success: in the Hub's activity tab it can be replayed."""
    server.errors.append(RuntimeError("postgresql://user:password@host"))
    answer = server.post(delivery())
    assert 503 == answer.status_code
    assert "Dagster's storage does not answer" in answer.json()["error"]
    assert "password" not in answer.text + caplog.text
    assert "org/model could not be reported: RuntimeError" in caplog.text
    assert 202 == server.post(delivery()).status_code
    assert [("org/model", B)] == server.reported()


def test_what_waits_is_tried_until_the_storage_takes_it(start: Callable[..., Running]) -> None:
    """The Hub was told that it will be."""
    server = start(every_s=0.2)
    server.post(delivery(new=B))
    server.errors.extend([RuntimeError("down"), RuntimeError("down")])
    server.post(delivery(new=C))
    assert ("org/model", B) == server.reports.get(timeout=20)
    assert ("org/model", C) == server.reports.get(timeout=20)


def test_the_catalog_is_read_again_when_it_changes(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that is added is followed at once; a broken catalog is no reason to stop."""
    text = server.catalog.read_text()
    assert 200 == server.post(delivery("org/new")).status_code
    server.catalog.write_text(f"{text}  org/new:\n    profiles: {{v1: {{reload_device: cpu}}}}\n")
    assert 202 == server.post(delivery("org/new")).status_code
    server.catalog.write_text("models: [")
    answer = server.post(delivery(new=C))
    assert 503 == answer.status_code
    assert str(server.catalog) not in answer.text
    assert str(server.catalog) in caplog.text
    server.catalog.unlink()
    assert 503 == server.post(delivery(new=C)).status_code
    server.catalog.write_text(text)
    assert 202 == server.post(delivery(new=C)).status_code


def test_no_log_holds_the_secret(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """Nor a payload: at any level, of any part."""
    caplog.set_level(logging.DEBUG)
    server.post(delivery())
    server.post(b"{")
    server.post(delivery(), {"X-Webhook-Secret": SECRET + "1"})
    server.raw(head("Content-Length: 5"), b"\xff\xff\xff\xff\xff")
    # Those of httpx are of the client.
    logged = "\n".join(r.getMessage() for r in caplog.records if not r.name.startswith("http"))
    assert "org/model moved to" in logged
    assert SECRET not in logged
    assert "61d2000c3c2083e1c08af22d" not in logged


def test_revisions_that_can_move_are_followed(start: Callable[..., Running]) -> None:
    """Pinned profiles and commits never start a build again."""
    assert {
        "org/model": {"main", "refs/pr/3"},
        "org/adapter": {"v2.0"},
    } == webhook.followed_repos(load_catalog(start().catalog))


# The command


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    (folder / "models.yaml").write_text(CATALOG)
    return folder


@pytest.fixture(params=["sqlite", "postgres"])
def either_home(
    home: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[Path, signal.Signals]]:
    """A home whose instance is kept in files, or in Postgres; and how its command is ended."""
    if request.param == "sqlite":
        yield home, signal.SIGTERM
        return
    with postgres(tmp_path / "postgres") as server, (home / "dagster.yaml").open("a") as settings:
        settings.write(f"storage: {{postgres: {{postgres_url: '{server.url}'}}}}\n")
        settings.flush()
        yield home, signal.SIGINT


def command(home: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    ours = ("DAGSTER_", "TENSORIZE_", "HF_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return subprocess.Popen(
        [sys.executable, "-m", "tensorize_assets.cli", "webhook", *arguments],
        env={**kept, "DAGSTER_HOME": str(home), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.fault(
    "Secrets",
    "the webhook without a secret, or one that can be guessed",
    "does not start, and quotes nothing",
)
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "no secret: set TENSORIZE_ASSETS_WEBHOOK_SECRET"),
        ({"TENSORIZE_ASSETS_WEBHOOK_SECRET": "größer"}, "not ASCII, which the Hub cannot send"),
        ({"TENSORIZE_ASSETS_WEBHOOK_SECRET_FILE": "/no/größer"}, "cannot be read: No such file"),
        ({"TENSORIZE_ASSETS_WEBHOOK_SECRET": "guess me"}, "has 8 characters, which can be guessed"),
    ],
)
def test_it_does_not_start_without_a_secret(
    home: Path, variables: dict[str, str], said: str
) -> None:
    """An open webhook would let anyone have the Hub asked without end."""
    process = command(home, **variables)
    output, _ = process.communicate(timeout=60)
    assert 2 == process.returncode
    assert said in " ".join(output.split())
    assert "größer" not in output
    assert "guess me" not in output


def test_a_delivery_becomes_an_observation_and_a_signal_ends_it(
    either_home: tuple[Path, signal.Signals], tmp_path: Path
) -> None:
    """The whole way, into the instance that the daemon reads."""
    home, ending = either_home
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    process = command(
        home, "--port", "0", TENSORIZE_ASSETS_WEBHOOK_SECRET_FILE=str(file), PYTHONUNBUFFERED="1"
    )
    try:
        assert process.stdout is not None
        lines: list[str] = []
        while not (
            found := re.search(r"POST (http://127\.0\.0\.1:\d+/hub); 2 repos", "".join(lines))
        ):
            line = process.stdout.readline()
            assert line, lines
            lines.append(line)
        with httpx.Client(timeout=30, trust_env=False) as client:
            answer = client.post(found[1], json=delivery(), headers=HEADERS)
            assert 202 == answer.status_code
            assert 202 == client.post(found[1], json=delivery(new=C), headers=HEADERS).status_code
            process.send_signal(ending)
            output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait(20)
    assert 0 == process.returncode, output
    assert "org/model moved to" in output
    assert "Traceback" not in output
    assert SECRET not in "".join(lines) + output
    with dg.DagsterInstance.from_config(str(home)) as instance:
        records = instance.fetch_observations(dg.AssetKey("hf_snapshot"), limit=10).records
    observations = [record.asset_observation for record in records]
    assert [C, B] == [one.metadata["commit"].value for one in observations if one]
    assert all(
        {"repo": "org/model", "source": "webhook"}
        == {name: one.metadata[name].value for name in ("repo", "source")}
        for one in observations
        if one
    )


def test_a_port_that_is_taken_is_said(home: Path) -> None:
    """With the port, and without a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = command(home, "--port", port, TENSORIZE_ASSETS_WEBHOOK_SECRET=SECRET)
        output, _ = process.communicate(timeout=60)
    assert 2 == process.returncode
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in " ".join(
        output.split()
    )
    assert "Traceback" not in output
