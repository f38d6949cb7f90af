"""Fixtures for the tests of core/."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# The helpers of these tests; pytest does not put their folder on the path.
sys.path.insert(0, str(Path(__file__).parent))

from s3_proxy import Answer, S3Proxy

from tensorize_assets.demo.s3_server import LocalS3


@pytest.fixture
def proxy(s3: LocalS3) -> Iterator[S3Proxy]:
    """A proxy before the S3 server that does nothing wrong yet."""
    running = S3Proxy(s3)
    yield running
    running.close()


@pytest.fixture(scope="session")
def s3_strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalS3]:
    """A server that speaks https only, and knows users with some rights each.

    A user's access key is its name, its secret key `NAME-secret-key`.
    """
    users = {"reader": ["Read", "List"], "writer": ["Write"], "lister": ["List"]}
    with LocalS3(
        tmp_path_factory.mktemp("s3-strict"),
        tls=True,
        identities=[(name, name, f"{name}-secret-key", acts) for name, acts in users.items()],
    ) as running:
        yield running


@pytest.fixture
def refusal() -> Callable[..., Answer]:
    """Makes the error that S3 answers with: `refusal(403, "AccessDenied")`."""
    return Answer.refusal
