"""A Dagster process that waits for a Ray job, for tests that cancel or kill it."""

import sys
from pathlib import Path

import dagster as dg
from fake_workers.messages import FakeRequest, FakeResult

from tensorize_assets.core.launcher_ray import RaySettings
from tensorize_assets.resources.launchers.ray import RayLauncher


@dg.asset
def family(context: dg.AssetExecutionContext, launcher: RayLauncher):
    Path(sys.argv[2]).with_suffix(".run").write_text(context.run_id)
    request = FakeRequest(task="family", text=sys.argv[2], number=1)
    launcher.run(context, request, FakeResult)
    return dg.MaterializeResult()


if __name__ == "__main__":
    settings = RaySettings(address=sys.argv[1], python=sys.executable, terminate_grace_s=1)
    launcher = RayLauncher(settings=settings, module="fake_workers.ray_worker")
    dg.materialize([family], resources={"launcher": launcher})
