"""A Dagster process that waits for the pods of three ranks, for tests that cancel or kill it."""

import sys

import dagster as dg

from tensorize_assets.core.launcher_k8s import K8sSettings
from tensorize_assets.core.tasks import ShardRequest, ShardResult, SnapshotSource
from tensorize_assets.resources.launchers.k8s import K8sLauncher


@dg.asset
def shards(context: dg.AssetExecutionContext, launcher: K8sLauncher):
    request = ShardRequest(
        model="stays",
        suffix="v1",
        snapshot=SnapshotSource(folder=sys.argv[2]),
        root="s3://models/prod",
        directory="vllm/stays/v1",
        scratch_dir="/nowhere",
        dtype="auto",
        tensor_parallel_size=3,
    )
    launcher.run(context, request, ShardResult)
    return dg.MaterializeResult()


if __name__ == "__main__":
    settings = K8sSettings.model_validate_json(sys.argv[1])
    dg.materialize([shards], resources={"launcher": K8sLauncher(settings=settings)})
