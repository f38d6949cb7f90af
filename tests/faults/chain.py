"""Assets of one partition of a home, materialized: `python -m chain HOME ASSETS`.

HOME is `Place` as JSON, ASSETS names by commas. Prints `Told` as JSON, and leaves with 1 when a
step failed.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import dagster as dg
from chain_home import Home

from tensorize_assets.assets import target
from tensorize_assets.core import mirroring
from tensorize_assets.core.s3 import S3Settings
from tensorize_assets.resources.launchers.local import SubprocessLauncher


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
