"""A home whose chain is killed again and again, and what must hold after each time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from chain import TOO_LONG_S, Place, Told, require_whole
from chain_home import MODEL, Home
from injection import Rule, environment
from points import ASSETS, STORE, Point

from tensorize_assets.core import sealing
from tensorize_assets.demo.hub_server import LocalHub, folder_files
from tensorize_assets.demo.s3_server import REGION, LocalS3

_HERE = Path(__file__).parent
# A worker looks once a second whether its step is there; an engine's processes end after it.
_GONE_S = 20
_MARK = "FAULT_MARCH"
_SAMPLE = 256


@dataclass
class March:
    """A home whose chain is killed again and again."""

    place: Place
    s3: LocalS3
    folder: Path
    # What no object and no file may hold.
    plaintext: tuple[bytes, ...]
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    count: int = 0

    @property
    def home(self) -> Home:
        return self.place.home

    @property
    def uploads(self) -> list[str]:
        """The key of each tensor file that was sent, in the order of their uploads."""
        told = self.folder / "uploads"
        return [line.split()[2] for line in told.read_text().splitlines()] if told.exists() else []

    def run(self, assets: Sequence[str], *rules: Rule) -> tuple[int, Told | None]:
        """Run the chain; the exit code of the step's process, and what it said if it could."""
        self.count += 1
        tell = Rule(
            f"{STORE}.put_file", "before", "tell", str(self.folder / "uploads"), r"\.tensors "
        )
        variables = environment(
            [tell, *rules], _HERE, _HERE.parent / "assets", Path(__file__).parents[2]
        )
        (self.folder / "tmp").mkdir(exist_ok=True)
        log = self.folder / f"run-{self.count}.log"
        with log.open("w") as stderr:
            done = subprocess.run(
                [sys.executable, "-m", "chain", json.dumps(asdict(self.place)), ",".join(assets)],
                env={**os.environ, **variables, _MARK: self.mark, "TMPDIR": f"{self.folder}/tmp"},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                timeout=TOO_LONG_S,
            )
        told = Told(**json.loads(done.stdout.splitlines()[-1])) if done.stdout.strip() else None
        return done.returncode, told

    def kill(self, point: Point) -> None:
        """Run the chain to a point, where it is killed, and look at what is left."""
        fired = self.folder / f"fired-{self.count}"
        do: Any = "kill-launcher" if point.who == "the step, not its worker" else "kill"
        before = self.uploads
        code, told = self.run(point.upto, Rule(point.at, point.when, do, str(fired), point.match))
        log = (self.folder / f"run-{self.count}.log").read_text()[-3000:]
        assert fired.exists(), f"no run came to it: {told} {log}"
        if point.who == "the worker":
            assert (1, [point.asset]) == (code, list(told.failures) if told else told), log
            assert told is not None
            assert "SIGKILL" in told.failures[point.asset]
        else:
            assert -signal.SIGKILL == code, (told, log)
        self.require_nothing_runs()
        require_whole(self.home)
        self.require_no_plaintext()
        # What a step had finished is not sent again.
        if ASSETS.index(point.asset) > ASSETS.index("tensorized_shards"):
            assert before == self.uploads

    def finish(self, *, sent: int) -> None:
        """Run the chain to its end, which sends so many files of tensors."""
        before = self.uploads
        code, told = self.run(ASSETS)
        assert code == 0, told
        assert told is not None
        assert told.failures == {}
        self.require_nothing_runs()
        require_whole(self.home)
        self.require_no_plaintext()
        self.require_clean()
        assert sent == len(self.uploads) - len(before)
        assert 1 == len(self.home.channel())

    def processes(self) -> list[psutil.Process]:
        """What still runs of any of its runs."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == self.mark and process.status() != "zombie":
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def require_nothing_runs(self) -> None:
        deadline = time.monotonic() + _GONE_S
        while found := self.processes():
            assert time.monotonic() < deadline, [process.cmdline() for process in found]
            time.sleep(0.1)

    def require_no_plaintext(self) -> None:
        """Neither in the root nor where workers write."""
        store = self.home.store
        places = [(key, store.open_read(key).read()) for key in store.list("")]
        for folder in (self.home.folder / "scratch", self.folder / "tmp"):
            places += [(str(p), p.read_bytes()) for p in folder.rglob("*") if p.is_file()]
        assert not [place for place, data in places for part in self.plaintext if part in data]

    def require_clean(self) -> None:
        """No upload that was begun, no scratch folder, no temporary file of ours."""
        bucket = self.place.root.removeprefix("s3://").partition("/")[0]
        uploads = self.s3.client().list_multipart_uploads(Bucket=bucket).get("Uploads", [])
        assert [] == [upload["Key"] for upload in uploads]
        left = _files(self.home.folder / "scratch") + _files(self.folder / "tmp")
        # torch keeps what it compiled.
        left = [path for path in left if "torchinductor" not in str(path)]
        assert not left, left


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _samples(folder: Path) -> tuple[bytes, ...]:
    """Some bytes of each end of the tensors of a snapshot or an adapter."""
    files = [file.read_bytes() for file in folder.glob("*.safetensors")]
    assert files
    return tuple(
        part for data in files for part in (data[-_SAMPLE:], data[-len(data) // 3 :][:_SAMPLE])
    )


@contextmanager
def marching(
    folder: Path,
    s3: LocalS3,
    sources: Path,
    profile: Mapping[str, Any],
    *,
    hidden: bool = False,
    elsewhere: bool = False,
) -> Iterator[March]:
    """A home in which nothing was built. `hidden`: nothing may show plaintext."""
    bucket = f"test-{uuid.uuid4().hex}"
    s3.create_bucket(bucket)
    settings = {"endpoint_url": s3.endpoint, "region": REGION}
    repos = {MODEL: sources / "llama", "org/poet": sources / "adapters" / "poet"}
    with LocalHub() as hub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("S3_ACCESS_KEY_ID", s3.access_key)
        patch.setenv("S3_SECRET_ACCESS_KEY", s3.secret_key)
        for repo, source in repos.items():
            hub.commit(repo, folder_files(source))
        root = f"s3://{bucket}/some/prefix"
        place = Place(str(folder / "home"), hub.endpoint, root, settings, elsewhere)
        home = place.home
        (home.folder / "keys").mkdir(parents=True)
        private = sealing.generate_private_key(home.folder / "keys" / "private.key")
        recipients = {"anna": private.public_key} if hidden else {}
        home.write_catalog({MODEL: {"v1": profile}}, recipients=recipients)
        samples = tuple(part for source in repos.values() for part in _samples(source))
        yield March(place, s3, folder, samples if hidden else ())
    s3.client().delete_bucket(Bucket=bucket)


def at(point: Point) -> Any:
    """A parameter of a test that kills at it."""
    cell = f"{point.asset}, {point.when} {point.what}: SIGKILL to {point.who}"
    outcome = "nothing half is seen; the next run goes on"
    return pytest.param(point, id=str(point), marks=pytest.mark.fault("Kill", cell, outcome))
