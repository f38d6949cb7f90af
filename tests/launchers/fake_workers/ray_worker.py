"""The real worker of a Ray job, with the fake tasks: also a fake `shard`, whose ranks are tasks."""

import sys

from fake_workers.messages import FakeRequest

from tensorize_assets.core.tasks import ShardRequest
from tensorize_assets.worker import ray_ranks
from tensorize_assets.worker.__main__ import Task

_NAMES = (
    "answer",
    "answer_and_stay",
    "crash",
    "fail",
    "family",
    "leave",
    "lose_the_store",
    "overhear",
    "print_lines",
    "refuse",
    "report_progress",
    "reveal",
    "send_signal",
    "wait",
    "wrong_result",
)
TASKS = {
    **{name: Task(FakeRequest, f"fake_workers.tasks:{name}") for name in _NAMES},
    "shard": Task(ShardRequest, "fake_workers.ranks:shard"),
}

if __name__ == "__main__":
    sys.exit(ray_ranks.main("fake_workers.ray_worker", shortest_gap_s=0.1, longest_silence_s=0.4))
