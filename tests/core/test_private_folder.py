"""Where keys are kept for vLLM's processes. Real processes, without vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "hold_private.py"
Worker = tuple["subprocess.Popen[str]", str]
Start = Callable[..., Worker]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process that holds a private folder, and reads what it says."""
    with ExitStack() as stack:

        def begin(*where: str) -> Worker:
            process = subprocess.Popen(
                [sys.executable, str(SCRIPT), *where],
                env={**os.environ, "TMPDIR": str(tmp_path)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout
            return process, process.stdout.readline().rstrip()

        yield begin


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """Where this user's private folders are."""
    return tmp_path / f"tensorize-assets-{os.getuid()}"


def held(worker: Worker) -> Path:
    assert worker[1].startswith("held ")
    return Path(worker[1].removeprefix("held "))


def test_keys_are_held_where_no_disk_keeps_them(start: Start) -> None:
    """A worker killed outright removes nothing; what was on a disk stays until the next one."""
    process, answer = start("memory")
    folder = held((process, answer))
    assert folder.is_relative_to("/dev/shm")
    assert 0o700 == folder.parent.stat().st_mode & 0o777
    assert process.stdin
    process.stdin.close()
    process.wait(10)
    assert not folder.exists()


def test_no_other_user_can_enter_it(start: Start, parent: Path) -> None:
    """The file in it has the key to the whole store."""
    assert parent == held(start()).parent
    assert 0o700 == parent.stat().st_mode & 0o777


def test_it_is_gone_at_the_end(start: Start, parent: Path) -> None:
    """The keys live as long as the engine."""
    process, _ = start()
    assert process.stdin
    process.stdin.close()
    process.wait(10)
    assert [] == list(parent.iterdir())


@pytest.mark.fault("Secrets", "a process that holds keys in memory is killed", "swept by the next")
def test_a_killed_workers_is_removed_by_the_next(start: Start, parent: Path) -> None:
    """And a living one's is not: two workers may check one artifact, on two devices."""
    alive = held(start())
    process, answer = start()
    process.kill()
    process.wait(10)
    dead = held((process, answer))
    assert (dead / "keys").exists()
    new = held(start())
    assert {alive, new} == set(parent.iterdir())


@pytest.mark.fault("Secrets", "the place for keys is one that others can enter", "refused")
def test_a_place_that_others_can_enter_is_refused(start: Start, parent: Path) -> None:
    """Whoever made it first in a /tmp of all would read the keys."""
    parent.mkdir()
    parent.chmod(0o755)
    assert start()[1].startswith(f"{parent} is where keys are kept for vLLM's processes")
    assert [] == list(parent.iterdir())


@pytest.mark.fault("Secrets", "the place for keys is a link", "refused")
def test_a_link_to_another_place_is_refused(start: Start, parent: Path) -> None:
    """Its owner can change where it leads."""
    elsewhere = parent.with_name("elsewhere")
    elsewhere.mkdir(mode=0o700)
    parent.symlink_to(elsewhere)
    assert start()[1].startswith(f"{parent} is where keys are kept for vLLM's processes")
    assert [] == list(elsewhere.iterdir())
