"""What a run in the terminal shows of its log."""

from __future__ import annotations

import logging

import pytest

from tensorize_assets.running import _worth_a_line


@pytest.mark.parametrize(
    ("level", "message", "shown"),
    [
        (logging.INFO, "rank 0/1: 272 tensors", True),
        (logging.WARNING, "the published build has lost its evidence", True),
        (logging.DEBUG, "50%", False),
        (logging.WARNING, "[cpu.py:207] Triton is not installed.", False),
        (logging.WARNING, "rank 1: [cpu_worker.py:114] libiomp is not found", False),
        (logging.INFO, "[pipes] external process successfully opened dagster pipes.", False),
        (logging.ERROR, "rank 1: [engine.py:3] it died", True),
    ],
)
def test_what_libraries_say_is_left_to_the_ui(level: int, message: str, shown: bool) -> None:
    """Fifty warnings of vLLM hide the one line that is ours; its errors stay."""
    record = logging.LogRecord("dagster", level, __file__, 1, message, (), None)
    assert shown == _worth_a_line(record)
