"""A disk that runs full, for real: small file systems in memory, filled at each phase of a build.

It takes the right to mount one.
"""

from __future__ import annotations

import errno
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from chain import Place, require_whole, started, told, wait_for
from chain_home import MODEL
from injection import Rule
from points import ASSETS

from tensorize_assets.demo.hub_server import LocalHub, folder_files

pytestmark = [pytest.mark.engine, pytest.mark.long]

_SIZE = "size=80m"


class Moment(NamedTuple):
    """A call in a build, before which the disk of a folder of the home is filled."""

    asset: str
    what: str
    folder: str
    at: str
    match: str = ""


_STORE = "tensorize_assets.core.local_store:LocalStore"
MOMENTS = (
    Moment("hf_snapshot", "the download", "hub", "tensorize_assets.core.hub_download:fetch_files"),
    Moment(
        "tensorized_shards",
        "writing the shard",
        "artifacts",
        "tensorize_assets.worker.write_shard:write_shard",
    ),
    Moment("artifact", "the config files", "artifacts", f"{_STORE}.put_file", "/config.json"),
    Moment("artifact", "the manifest", "artifacts", f"{_STORE}.put_bytes", "/manifest.json "),
    Moment("reload_check", "the evidence", "artifacts", f"{_STORE}.put_bytes", "^evidence/"),
    Moment("published", "the channel", "artifacts", f"{_STORE}.put_bytes", "^vllm/[^ ]*/v1.json "),
)


@contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", _SIZE, "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, sources: Path) -> Iterator[Place]:
    """A home whose root (with scratch) and Hub cache are on small disks."""
    folder = tmp_path_factory.mktemp("full") / "home"
    with LocalHub() as hub, _small_disk(folder / "artifacts"), _small_disk(folder / "hub"):
        hub.commit(MODEL, folder_files(sources / "llama"))
        made = Place(str(folder), hub.endpoint, "artifacts", None)
        made.home.write_catalog({MODEL: {"v1": {}}})
        yield made


def _fill(folder: Path) -> Path:
    """Take all that is free on the disk of `folder`; remove what is returned to give it back."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    return filler


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(
            moment,
            id=f"{moment.asset}-{moment.what}",
            marks=pytest.mark.fault(
                "Bad disk",
                f"{moment.asset}, {moment.what}: a small disk is full",
                "refused: no space left, and where; the next run goes on",
            ),
        )
        for moment in MOMENTS
    ],
)
def test_a_full_disk_is_named_and_nothing_half_is_seen(
    place: Place, moment: Moment, tmp_path: Path
) -> None:
    held = tmp_path / "held"
    upto = ASSETS[: ASSETS.index(moment.asset) + 1]
    disk = Path(place.folder) / moment.folder
    rule = Rule(moment.at, "before", "hold", str(held), moment.match)
    with started(place, upto, rule) as running:
        wait_for(held, running)
        filler = _fill(disk)
        held.with_suffix(".go").touch()
        failures = told(running).failures
    filler.unlink()
    assert [moment.asset] == list(failures)
    assert re.search("(?i)no space left|disk (is|became) full", failures[moment.asset])
    assert str(disk) in failures[moment.asset]
    require_whole(place.home)


@pytest.mark.fault("Bad disk", "after each of these disks was full", "published")
def test_the_last_run_goes_to_the_end(place: Place) -> None:
    with started(place, ASSETS) as running:
        assert told(running).failures == {}
    require_whole(place.home)
    assert 1 == len(place.home.channel())
