"""Builds the branches `revision-0` and on, in one process; workers are killed at random.

`python -m soak SETTINGS`, the JSON of `Settings`. Prints a `Reading` as JSON after every build.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
from chain import Place
from chain_home import MODEL, stand_in

from tensorize_assets.assets import target
from tensorize_assets.core.launcher_k8s import K8sSettings
from tensorize_assets.core.launcher_ray import RaySettings
from tensorize_assets.resources.launchers.k8s import K8sLauncher
from tensorize_assets.resources.launchers.ray import RayLauncher

_WORKER = "stand_in.worker"
MARK = "FAULT_SOAK"
"""Of every process of this soak, and of no other test's."""
# Of a worker that takes about a second.
_KILLED_WITHIN_S = 1.5


@dataclass(frozen=True)
class Settings:
    """`builds` of which most run beside Dagster, every `elsewhere`-th on Ray or Kubernetes.

    Of one build in `killed` a worker is killed.
    """

    place: dict[str, Any]
    ray: dict[str, Any]
    k8s: dict[str, Any]
    builds: int
    elsewhere: int = 6
    killed: int = 3
    seed: int = 0


@dataclass(frozen=True)
class Reading:
    """What the process holds after a build, and how it went."""

    build: int
    launcher: str
    killed: bool
    published: bool
    seconds: float
    memory: int
    descriptors: int
    threads: int
    events: int
    files: int
    objects: int


class _Killer(threading.Thread):
    """Kills one worker, wherever it runs, some time after the build began."""

    def __init__(self, after_s: float) -> None:
        super().__init__(daemon=True)
        self.killed = False
        self._ended = threading.Event()
        self._after_s = after_s

    def end(self) -> None:
        """Kill nothing any more."""
        self._ended.set()
        if self.ident is not None:
            self.join()

    def run(self) -> None:
        self._ended.wait(self._after_s)
        while not (self.killed or self._ended.wait(0.05)):
            for process in psutil.process_iter(["cmdline"]):
                if self._is_ours(process) and not self._ended.is_set():
                    process.kill()
                    self.killed = True
                    break

    @staticmethod
    def _is_ours(process: psutil.Process) -> bool:
        if _WORKER not in (process.info["cmdline"] or []):
            return False
        try:
            return process.environ().get(MARK) == os.environ[MARK]
        except psutil.Error:
            return False


def main(described: str) -> None:
    settings = Settings(**json.loads(described))
    place = Place(**settings.place)
    home = place.home
    chance = random.Random(settings.seed)
    target._FIRST_WAIT_S = 0.05
    launchers: dict[str, Any] = {
        "subprocess": stand_in(),
        "ray": RayLauncher(settings=RaySettings.model_validate(settings.ray), module=_WORKER),
        "k8s": K8sLauncher(settings=K8sSettings.model_validate(settings.k8s)),
    }
    own = psutil.Process()
    temporary = Path(os.environ["TMPDIR"])
    home.folder.mkdir()
    with dg.DagsterInstance.from_config(str(home.folder)) as instance:
        for build in range(settings.builds):
            home.write_catalog({MODEL: {"v1": {"revision": f"revision-{build}"}}})
            kind = ("ray", "k8s")[chance.randrange(2)]
            if build % settings.elsewhere:
                kind = "subprocess"
            killer = _Killer(chance.uniform(0, _KILLED_WITHIN_S))
            if not chance.randrange(settings.killed):
                killer.start()
            start = time.monotonic()
            run = home.run(instance=instance, launcher=launchers[kind])
            seconds = time.monotonic() - start
            killer.end()
            entries = home.channel()
            reading = Reading(
                build=build,
                launcher=kind,
                killed=killer.killed,
                published=run.success and entries[-1].build_id == run.build_id,
                seconds=seconds,
                memory=own.memory_info().rss,
                descriptors=own.num_fds(),
                threads=own.num_threads(),
                events=len(instance.all_logs(run.result.run_id)),
                files=sum(1 for path in temporary.rglob("*") if path.is_file())
                + sum(1 for path in (home.folder / "scratch").rglob("*") if path.is_file()),
                objects=len(home.store.list("")),
            )
            print(json.dumps(asdict(reading)), flush=True)
            if not run.success:
                print(json.dumps(run.failures), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
