"""Tensorize SNAPSHOT at TP into OUT with the worker's own task: python ours.py SNAPSHOT OUT TP."""

import sys

from tensorize_assets.core.tasks import ShardRequest, SnapshotSource
from tensorize_assets.worker import shard
from tensorize_assets.worker.session import Progress

if __name__ == "__main__":
    snapshot, out, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    shard.run(
        ShardRequest(
            model="bench/model",
            suffix=f"tp{size}",
            snapshot=SnapshotSource(folder=snapshot),
            root=out,
            directory=f"vllm/bench/model/tp{size}",
            scratch_dir=f"{out}/.scratch",
            tensor_parallel_size=size,
            dtype="auto",
        ),
        Progress.silent(),
    )
