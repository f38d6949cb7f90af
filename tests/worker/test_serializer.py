"""tensorizer's threads after an error."""

from __future__ import annotations

from collections.abc import Callable


def test_pools_that_wait_for_one_another_end(run_script: Callable[..., None]) -> None:
    """Python's own way to cancel what has not begun leaves whoever waits for it waiting."""
    run_script("stop_pools.py")
