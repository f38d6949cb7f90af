"""What the tests ask of a fake worker, and what they get back."""

from __future__ import annotations

from tensorize_assets.core.protocol import WorkerRequest, WorkerResult


class FakeRequest(WorkerRequest):
    text: str = ""
    number: int = 0


class FakeResult(WorkerResult):
    text: str = ""
    numbers: tuple[float, ...] = ()
