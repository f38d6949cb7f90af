"""Fixtures for more than one folder of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tensorize_assets.demo.hub_server import LocalHub


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    """A running local Hub without repos."""
    with LocalHub() as running:
        yield running
