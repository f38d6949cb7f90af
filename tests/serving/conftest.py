"""What is served, once a session: the chain takes minutes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# The helpers of these tests; pytest does not put their folder on the path.
sys.path.insert(0, str(Path(__file__).parent))

from published_home import Published, publish


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory, tiny_models: Path) -> Published:
    """A home that has published; a rollback of its own is the last thing that happens to it."""
    return publish(tmp_path_factory.mktemp("published"), tiny_models)
