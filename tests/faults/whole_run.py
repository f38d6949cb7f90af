"""The whole chain of one partition of a home: `python -m whole_run HOME`.

HOME is `chain.Place` as JSON. Workers are those of `secret_worker`. Prints the run's id.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import dagster as dg
from chain import Place
from chain_home import MODEL

from tensorize_assets import partitions
from tensorize_assets.definitions import ASSETS
from tensorize_assets.resources.launchers.local import SubprocessLauncher

_PATH = [Path(__file__).parent, Path(__file__).parents[1] / "assets", Path(__file__).parents[2]]


def main(place: str) -> int:
    home = Place(**json.loads(place)).home
    launcher = SubprocessLauncher(
        module="secret_worker", env={"PYTHONPATH": os.pathsep.join(map(str, _PATH))}
    )
    with dg.DagsterInstance.from_config(str(home.folder)) as instance:
        partitions.add_pairs(instance, [MODEL], ["v1"])
        result = dg.materialize(
            ASSETS,
            partition_key=partitions.partition_key(MODEL, "v1"),
            instance=instance,
            resources=home.resources(launcher),
            raise_on_error=False,
        )
    print(result.run_id)
    return 0 if result.success else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
