"""Secrets stay where they are kept: what a whole encrypted run shows, and what a crash leaves."""

from __future__ import annotations

import base64
import json
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import dagster as dg
import pytest
import yaml
from chain import Place
from chain_home import MODEL
from s3_proxy import Asked, S3Proxy

from tensorize_assets.core import sealing, secret_settings
from tensorize_assets.core.errors import WorkerError
from tensorize_assets.core.sealing import PRIVATE_KEY_VARIABLE
from tensorize_assets.core.signing import KEY_VARIABLE
from tensorize_assets.demo.hub_server import LocalHub, folder_files
from tensorize_assets.demo.s3_server import REGION, LocalS3
from tensorize_assets.resources.launchers.local import SubprocessLauncher

_HERE = Path(__file__).parent
_LAUNCHERS = _HERE.parent / "launchers"
sys.path.insert(0, str(_LAUNCHERS))

from fake_workers.messages import FakeRequest, FakeResult  # noqa: E402

_TOO_LONG_S = 240
POET = {"name": "poet", "repo": "org/poet", "revision": "main"}


# The scan


def forms(secret: bytes) -> set[bytes]:
    """A secret as programs write it: itself, in hex, as Python and URLs quote it, and in base64.

    Of base64 also what stands within that of more, at each of the three places where it may begin.
    """
    found = {secret, secret.hex().encode(), secret.hex().upper().encode()}
    found |= {repr(secret)[2:-1].encode()}
    found |= {quote(secret, safe=safe).encode() for safe in ("", "/")}
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        for before in range(3):
            # Of a letter at either end some bits are those of what stands beside the secret.
            first, behind = (8 * before + 5) // 6, 8 * (before + len(secret)) // 6
            found.add(encode(bytes(before) + secret)[first:behind])
    return found


def found(kept: Mapping[str, bytes], shown: Iterable[tuple[str, bytes]]) -> set[tuple[str, str]]:
    """Where which of the `kept` secrets stands in what is `shown`, given as place and content."""
    known = {name: forms(secret) for name, secret in kept.items()}
    return {
        (name, where)
        for where, data in shown
        for name, its in known.items()
        if any(form in data for form in its)
    }


@pytest.mark.parametrize(
    "written",
    [
        lambda secret: secret.hex(),
        lambda secret: repr(secret),
        lambda secret: quote(secret),
        lambda secret: base64.b64encode(secret).decode(),
        lambda secret: base64.b64encode(b"{x" + secret + b"}").decode(),
        lambda secret: base64.urlsafe_b64encode(b'{"key": "' + secret + b'"}').decode(),
    ],
    ids=["hex", "repr", "url", "base64", "in base64", "in base64 of a URL"],
)
def test_the_scan_finds_a_secret_however_it_is_written(written: Callable[[bytes], str]) -> None:
    """A scan that finds nothing must be one that would have."""
    secret = secrets.token_bytes(32)
    kept = {"key": secret, "other": secrets.token_bytes(32)}
    assert {("key", "log")} == found(kept, [("log", f"before {written(secret)} behind".encode())])


# A whole encrypted run


class Watched:
    """All that /proc shows of commands, of workers also their environment; and temporary files.

    Workers are those of the run that has `temp` for its temporary files.
    """

    def __init__(self, temp: Path) -> None:
        self.shown: set[tuple[str, bytes]] = set()
        self.workers: set[int] = set()
        self.to_the_end = False
        self._temp = temp
        self._ended = threading.Event()

    def __enter__(self) -> Watched:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            for place in Path("/proc").iterdir():
                if place.name.isdecimal():
                    # It may end between two looks.
                    with suppress(OSError):
                        self._look(place)
            # Unlike rglob, this minds no folder that is gone by then.
            for folder, _, names in os.walk(self._temp):
                for name in names:
                    with suppress(OSError):
                        self.shown.add(("a temporary file", Path(folder, name).read_bytes()))
        self.to_the_end = True

    def _look(self, place: Path) -> None:
        command = (place / "cmdline").read_bytes()
        self.shown.add(("arguments", command))
        parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
        if b"\0secret_worker\0" not in command and parent not in self.workers:
            return
        variables = (place / "environ").read_bytes()
        if os.fsencode(self._temp) in variables:
            self.workers.add(int(place.name))
            self.shown.add(("a worker's environment", variables))


class Ran(NamedTuple):
    """A run that is over: the secrets that it had, and what it shows to whom."""

    kept: dict[str, bytes]
    watched: Watched
    output: list[tuple[str, bytes]]
    events: list[tuple[str, bytes]]
    files: list[tuple[str, bytes]]
    objects: list[tuple[str, bytes]]
    token_was_sent: bool


@pytest.fixture(scope="module")
def ran(
    tmp_path_factory: pytest.TempPathFactory, tiny_models: Path, sources: Path, s3: LocalS3
) -> Iterator[Ran]:
    """A build with `encryption: only` and an adapter, of a gated repo, in S3 with a session token.

    Every secret is in a variable, and the home's keys are in their files too.
    """
    folder = tmp_path_factory.mktemp("secrets")
    token, hub_token = f"session-{secrets.token_hex(20)}", f"hf_{secrets.token_hex(17)}"
    sent: set[str | None] = set()

    def before(asked: Asked) -> None:
        # A server of one's own has nobody who gives out tokens.
        sent.add(asked.headers.pop("X-Amz-Security-Token", None))

    with ExitStack() as stack, LocalHub() as hub:
        proxy = S3Proxy(s3)
        stack.callback(proxy.close)
        proxy.before = before
        s3.create_bucket(bucket := f"secrets-{secrets.token_hex(8)}")
        stack.callback(s3.client().delete_bucket, Bucket=bucket)
        hub.add_repo(MODEL, gated=True, token=hub_token)
        hub.commit(MODEL, folder_files(tiny_models / "llama"))
        hub.commit("org/poet", folder_files(sources / "adapters" / "poet"))
        place = Place(
            folder=str(folder / "home"),
            endpoint=hub.endpoint,
            root=f"s3://{bucket}/some/prefix",
            settings={"endpoint_url": proxy.endpoint, "region": REGION, "addressing": "path"},
        )
        home = place.home
        keys = home.folder / "keys"
        signing = home.key
        private = sealing.generate_private_key(keys / "private.key")
        home.write_catalog(
            {MODEL: {"v1": {"encryption": "only", "adapters": [POET]}}},
            recipients={"home": private.public_key},
        )
        secret_of = {
            name: base64.b64decode((keys / f"{name}.key").read_text().split(":")[-1])
            for name in ("signing", "private")
        }
        variables = {
            "S3_SECRET_ACCESS_KEY": s3.secret_key,
            "S3_SESSION_TOKEN": token,
            "HF_TOKEN": hub_token,
            "HUGGING_FACE_HUB_TOKEN": hub_token,
            secret_settings.HUB_WEBHOOK_SECRET: secrets.token_hex(16),
            secret_settings.ALERT_WEBHOOK: f"http://127.0.0.1:9/{secrets.token_hex(16)}",
        }
        kept = {name: text.encode() for name, text in variables.items()} | secret_of
        variables |= {
            "S3_ACCESS_KEY_ID": s3.access_key,
            KEY_VARIABLE: base64.b64encode(secret_of["signing"]).decode(),
            PRIVATE_KEY_VARIABLE: base64.b64encode(secret_of["private"]).decode(),
        }
        (temp := folder / "tmp").mkdir()
        with Watched(temp) as watched:
            done = subprocess.run(
                [sys.executable, "-m", "whole_run", json.dumps(asdict(place))],
                env={
                    **os.environ,
                    **variables,
                    "TMPDIR": str(temp),
                    "PYTHONPATH": os.pathsep.join(
                        map(str, (_HERE, _HERE.parent / "assets", _HERE.parents[1]))
                    ),
                },
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_TOO_LONG_S,
            )
        assert 0 == done.returncode, done.stdout + done.stderr[-5000:]
        with dg.DagsterInstance.from_config(str(home.folder)) as instance:
            entries = instance.all_logs(done.stdout.split()[-1])
        with pytest.MonkeyPatch.context() as patch:
            for name, text in variables.items():
                patch.setenv(name, text)
            (key_id,) = sealing.key_ids(home.store)
            trusted = (signing.public_key,)
            with sealing.unseal(home.store, key_id, private, trusted=trusted) as data_key:
                kept["the data key"] = data_key.reveal()
        listed = s3.client().list_objects_v2(Bucket=bucket)["Contents"]
        yield Ran(
            kept=kept,
            watched=watched,
            output=[("stdout", done.stdout.encode()), ("stderr", done.stderr.encode())],
            events=[
                (f"event {entry.user_message[:80]}", dg.serialize_value(entry).encode())
                for entry in entries
            ],
            files=[
                (str(path.relative_to(folder)), path.read_bytes())
                for path in folder.rglob("*")
                if path.is_file() and path.parent != keys
            ],
            objects=[
                (key, s3.client().get_object(Bucket=bucket, Key=key)["Body"].read())
                for key in [entry["Key"] for entry in listed]
            ],
            token_was_sent={token} == sent,
        )


@pytest.mark.fault(
    "Secrets", "an encrypted run: arguments of every process", "none; S3, Hub, home and build keys"
)
@pytest.mark.fault(
    "Secrets", "an encrypted run: environment of its workers", "none, whoever started Dagster"
)
@pytest.mark.fault("Secrets", "an encrypted run: its temporary files", "none, at any moment")
def test_no_process_shows_a_secret_while_it_runs(ran: Ran) -> None:
    """`ps` is everybody's, a worker's environment is dumped by whatever reports crashes."""
    places = {where for where, _ in ran.watched.shown}
    assert {"arguments", "a worker's environment", "a temporary file"} == places
    assert ran.watched.to_the_end
    assert ran.token_was_sent
    # Shards, adapters, references and the reload, and what they start.
    assert len(ran.watched.workers) >= 4
    assert set() == found(ran.kept, ran.watched.shown)


@pytest.mark.fault(
    "Secrets", "an encrypted run: what its step and its workers print", "none of them"
)
@pytest.mark.fault("Secrets", "an encrypted run: Dagster's events and metadata", "none of them")
def test_no_log_and_no_event_has_a_secret(ran: Ran) -> None:
    """Dagster keeps them for good, and shows them to everybody."""
    text = b"".join(data for _, data in ran.events)
    assert b"asked to open" in text
    assert b"AssetMaterialization" in text
    assert set() == found(ran.kept, [*ran.output, *ran.events])


@pytest.mark.fault(
    "Secrets", "an encrypted run: files of the home", "none but in its two key files"
)
def test_no_file_has_a_secret_but_the_key_files(ran: Ran) -> None:
    """Caches, scratch, records, Dagster's database and what steps have printed."""
    names = {Path(name).suffix for name, _ in ran.files}
    assert {".db", ".err", ".out"} <= names
    assert set() == found(ran.kept, ran.files)


@pytest.mark.fault("Secrets", "an encrypted run: every object in the store", "the key only sealed")
def test_no_object_has_a_secret(ran: Ran) -> None:
    """Who can read the bucket can read what is not encrypted, and nothing else."""
    names = {name.rpartition("/")[2] for name, _ in ran.objects}
    assert {"model.tensors", "adapter_model.tensors", "manifest.json", "v1.json"} <= names
    assert set() == found(ran.kept, ran.objects)


# What a crash leaves


@pytest.mark.fault(
    "Secrets", "a core dump of a worker of any task", "no byte of it, and no memory in it"
)
def test_no_process_of_a_worker_may_leave_a_core(ran: Ran) -> None:
    """Also where the kernel hands dumps to a program, which no limit holds back."""
    text = b"".join(data for _, data in ran.events).decode()
    said = re.findall(r"at its end, core dumps: \((\d+), (-?\d+)\), ([0-9a-f]+)", text)
    assert [("0", "0", "00000000")] * 4 == said


@pytest.fixture
def cores_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which this process's children would leave theirs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


@pytest.mark.fault("Secrets", "a worker with keys dies of SIGABRT", "reported; no core is left")
def test_a_worker_that_crashes_leaves_no_core(cores_allowed: Path) -> None:
    """Native code that aborts is the usual one, and the keys are in memory."""
    path = os.pathsep.join(map(str, (_LAUNCHERS, _HERE.parents[1])))
    launcher = SubprocessLauncher(module="fake_workers.worker", env={"PYTHONPATH": path})
    raised: list[WorkerError] = []

    @dg.asset
    def crashes(context):
        request = FakeRequest(task="send_signal", number=signal.SIGABRT)
        try:
            launcher.run(context, request, FakeResult, secrets={"data_key": b"k" * 32})
        except WorkerError as error:
            raised.append(error)
            raise

    with dg.DagsterInstance.ephemeral() as instance:
        dg.materialize([crashes], instance=instance, raise_on_error=False)
    (error,) = raised
    assert "SIGABRT" in str(error)
    assert [] == list(cores_allowed.iterdir())


@pytest.mark.fault("Secrets", "a crash of a service of docker-compose.yml", "no core is left")
def test_services_of_the_compose_file_leave_no_core() -> None:
    """Dagster's own processes hold the signing key, and the store's."""
    text = (_HERE.parents[1] / "docker-compose.yml").read_text()
    for service in yaml.safe_load(text)["services"].values():
        assert {"core": 0} == service["ulimits"]
