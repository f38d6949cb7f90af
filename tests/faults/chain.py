"""Assets of one partition of a home, materialized: `python -m chain HOME ASSETS`.

HOME is `Place` as JSON, ASSETS names by commas. Prints `Told` as JSON, and leaves with 1 when a
step failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import dagster as dg
from chain_home import MODEL, Home
from injection import Rule, environment

from tensorize_assets.assets import target
from tensorize_assets.core import channel, layout, mirroring
from tensorize_assets.core.s3 import S3Settings
from tensorize_assets.core.verify import verify_directory
from tensorize_assets.resources.launchers.local import SubprocessLauncher

TOO_LONG_S = 240


@dataclass(frozen=True)
class Place:
    """What makes a home, in another process too."""

    folder: str
    endpoint: str
    root: str
    settings: dict[str, str] | None
    # Workers as of another machine, which read the mirror of the snapshot.
    elsewhere: bool = False

    @property
    def home(self) -> Home:
        settings = S3Settings.model_validate(self.settings) if self.settings else None
        return Home(Path(self.folder), self.endpoint, self.root, settings)


class Elsewhere(SubprocessLauncher):
    """Workers that see no folder of this machine."""

    shares_disks: ClassVar[bool] = False


@contextmanager
def started(place: Place, assets: Sequence[str], *rules: Rule) -> Iterator[subprocess.Popen[str]]:
    """The chain in a process of its own, which ends with the context at the latest."""
    here = Path(__file__).parent
    process = subprocess.Popen(
        [sys.executable, "-m", "chain", json.dumps(asdict(place)), ",".join(assets)],
        env=os.environ | environment(rules, here, here.parent / "assets", here.parents[1]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def told(process: subprocess.Popen[str]) -> Told:
    """What a chain that was started comes to."""
    return Told(**json.loads(process.communicate(timeout=TOO_LONG_S)[0].splitlines()[-1]))


def wait_for(held: Path, process: subprocess.Popen[str]) -> None:
    """Wait until a rule's file says that the chain has come to it."""
    deadline = time.monotonic() + TOO_LONG_S
    while not held.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def require_whole(home: Home) -> None:
    """Every manifest that a reader finds is true of every byte, and so is the channel."""
    keys = [key for key in home.store.list("vllm/") if key.endswith(f"/{layout.MANIFEST}")]
    for key in keys:
        report = verify_directory(home.store, key.rpartition("/")[0], home.trusted)
        assert report.ok, report
    found = channel.read_channel(home.store, MODEL, "v1", home.trusted)
    if found is not None:
        assert layout.manifest_key(found.channel.current.directory) in keys


def places_taken(instance: dg.DagsterInstance) -> int:
    """In the pools, by steps that run or were killed."""
    storage = instance.event_log_storage
    pools = storage.get_concurrency_keys()
    return sum(len(storage.get_concurrency_info(pool).claimed_slots) for pool in pools)


@dataclass(frozen=True)
class Told:
    """What a run came to: how each step failed that did."""

    failures: dict[str, str]


def main(place: str, assets: str) -> int:
    where = Place(**json.loads(place))
    home = where.home
    launcher = Elsewhere(env={"TENSORIZE_SNAPSHOT_CACHE": f"{where.folder}/worker-cache"})
    # A killed worker's step would start another one, which would come to its end.
    target._RETRIES = 0
    # A killed run's lease: nobody else holds it here.
    work: Any = mirroring.Work.__new__
    work.__defaults__ = (None, 2.0, 0.2)
    with dg.DagsterInstance.from_config(str(home.folder)) as instance:
        run = home.run(
            instance=instance,
            selection=assets.split(","),
            launcher=launcher if where.elsewhere else None,
        )
    print(json.dumps({"failures": run.failures}))
    return 0 if run.success else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
