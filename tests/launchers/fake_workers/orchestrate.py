"""A Dagster process that waits for a worker, for tests that cancel or kill it."""

import os
import sys

import dagster as dg
from fake_workers.messages import FakeRequest, FakeResult

from tensorize_assets.resources.launchers.local import SubprocessLauncher


@dg.asset
def family(context: dg.AssetExecutionContext, launcher: SubprocessLauncher):
    request = FakeRequest(task="family", text=sys.argv[1], number=1)
    launcher.run(context, request, FakeResult)
    return dg.MaterializeResult()


if __name__ == "__main__":
    launcher = SubprocessLauncher(
        module="fake_workers.worker",
        env={"PYTHONPATH": os.environ["PYTHONPATH"]},
        terminate_grace_s=0.5,
    )
    dg.materialize([family], resources={"launcher": launcher})
