"""The chain is killed (SIGKILL) at every point in turn, and every next run goes on from there.

Real workers, a real engine, a real S3 server. Each test is one point: the run that comes to it is
killed there, and it is looked at what is left. The next point's run goes on with that; the last
one goes to the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from march import March, at, marching
from points import ONLY, Point

from tensorize_assets.demo.s3_server import LocalS3

pytestmark = pytest.mark.engine

POET = {"name": "poet", "repo": "org/poet", "revision": "main"}


@pytest.fixture(scope="module")
def march(tmp_path_factory: pytest.TempPathFactory, sources: Path, s3: LocalS3) -> Iterator[March]:
    """Of an encrypted build with an adapter, of which nothing may lie anywhere in plaintext."""
    profile = {"encryption": "only", "adapters": [POET]}
    with marching(tmp_path_factory.mktemp("march"), s3, sources, profile, hidden=True) as made:
        yield made


@pytest.mark.parametrize("point", list(map(at, ONLY)))
def test_nothing_is_lost_and_nothing_half_is_seen(march: March, point: Point) -> None:
    """After the kill, and with what the earlier ones left."""
    march.kill(point)


@pytest.mark.fault("Kill", "after all of these", "published; nothing is left behind")
def test_the_last_run_goes_to_the_end(march: March) -> None:
    """It finds all of the work done."""
    march.finish(sent=0)
