"""As test_kills.py, of a build whose worker reads the mirror of the snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from march import March, at, marching
from points import MIRRORED, Point

from tensorize_assets.demo.s3_server import LocalS3

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def march(tmp_path_factory: pytest.TempPathFactory, sources: Path, s3: LocalS3) -> Iterator[March]:
    """Of workers that see no folder of the step's machine."""
    with marching(tmp_path_factory.mktemp("march"), s3, sources, {}, elsewhere=True) as made:
        yield made


@pytest.mark.parametrize("point", list(map(at, MIRRORED)))
def test_nothing_is_lost_and_nothing_half_is_seen(march: March, point: Point) -> None:
    """After the kill, and with what the earlier ones left."""
    march.kill(point)


@pytest.mark.fault("Kill", "after all of these, with a mirror", "published; nothing is left behind")
def test_the_last_run_goes_to_the_end(march: March) -> None:
    """What the last worker had stored died with its step, which alone knew what it was."""
    march.finish(sent=1)
