"""The real entry point of a worker, with tasks that take no vLLM and report progress quickly."""

import sys

from fake_workers.messages import FakeRequest

from tensorize_assets.core.tasks import ShardRequest
from tensorize_assets.worker.__main__ import Task, main

_NAMES = (
    "answer",
    "answer_and_stay",
    "answer_beside_noise",
    "crash",
    "fail",
    "family",
    "grow",
    "leave",
    "lose_the_store",
    "measure",
    "print_lines",
    "reveal",
    "send_signal",
    "refuse",
    "stay",
    "wait",
    "report_progress",
    "wrong_result",
)

if __name__ == "__main__":
    tasks = {name: Task(FakeRequest, f"fake_workers.tasks:{name}") for name in _NAMES}
    tasks["shard"] = Task(ShardRequest, "fake_workers.tasks:shard")
    sys.exit(main(tasks, shortest_gap_s=0.1, longest_silence_s=0.4))
