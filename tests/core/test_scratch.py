"""Scratch folders: never shared, never left for ever. Real processes, without vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "hold_scratch.py"
Worker = tuple["subprocess.Popen[str]", str]
Start = Callable[[str], Worker]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process that holds the scratch folder of a build, and reads what it says."""
    with ExitStack() as stack:

        def begin(build: str) -> Worker:
            process = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(tmp_path / "scratch"), build],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout
            return process, process.stdout.readline().rstrip()

        yield begin


def folders(tmp_path: Path) -> list[str]:
    return sorted(path.name.rpartition("-")[0] for path in (tmp_path / "scratch").iterdir())


def end(worker: Worker) -> None:
    assert worker[0].stdin
    worker[0].stdin.close()
    worker[0].wait(10)


def test_a_second_process_of_a_build_is_told_who_holds_it(start: Start) -> None:
    """And the first one keeps its files."""
    first = start("vllm/org/model/v1-a")
    folder = Path(first[1].removeprefix("held "))
    _, answer = start("vllm/org/model/v1-a")
    assert answer.startswith(f"another worker is building vllm/org/model/v1-a (it holds {folder}")
    assert (folder / "half").exists()


def test_builds_of_one_name_and_two_models_do_not_meet(start: Start) -> None:
    """One-shot builds are named by their user."""
    assert start("vllm/org/one/mine")[1].startswith("held ")
    assert start("vllm/org/two/mine")[1].startswith("held ")


def test_the_folder_is_gone_at_the_end(start: Start, tmp_path: Path) -> None:
    """A shard may be as large as the disk."""
    end(start("vllm/org/model/v1-a"))
    assert [] == folders(tmp_path)


def test_a_killed_workers_folder_is_emptied_by_the_next_of_its_build(
    start: Start, tmp_path: Path
) -> None:
    """What is in it is half a file, at best."""
    process, answer = start("vllm/org/model/v1-a")
    process.kill()
    process.wait(10)
    folder = Path(answer.removeprefix("held "))
    (folder / "sub").mkdir()
    (folder / "sub" / "left").write_text("x")
    second = start("vllm/org/model/v1-a")
    assert f"held {folder}" == second[1]
    assert [".lock", "half"] == sorted(path.name for path in folder.iterdir())


def test_a_killed_workers_folder_is_swept_by_another_build(start: Start, tmp_path: Path) -> None:
    """The same build may never run again; a living worker's folder stays."""
    start("vllm/org/model/alive")
    process, _ = start("vllm/org/model/dead")
    process.kill()
    process.wait(10)
    assert ["alive", "dead"] == folders(tmp_path)
    start("vllm/org/model/new")
    assert ["alive", "new"] == folders(tmp_path)


LASTING = """
import os, sys
from tensorize_assets.core.scratch import lasting_private_folder
folder = lasting_private_folder()
(folder / "key").write_text("x")
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1], sys.argv[1], str(folder)])
"""
ENDS = """
import subprocess, sys
from pathlib import Path
from tensorize_assets.core.scratch import remove_at_exit
folder = Path(sys.argv[2])
remove_at_exit(folder)
if "child" not in sys.argv:
    subprocess.run([sys.executable, "-c", sys.argv[1], *sys.argv[1:], "child"], check=True)
    print(folder, (folder / "key").is_file())
"""


def test_a_lasting_folder_goes_with_the_program_that_its_process_became(tmp_path: Path) -> None:
    """A data key is not left in memory until somebody else comes; a child's end is not the end."""
    done = subprocess.run(
        [sys.executable, "-c", LASTING, ENDS],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    folder, _, was_there = done.stdout.rstrip().partition(" ")
    assert tmp_path in Path(folder).parents
    assert "True" == was_there
    assert not Path(folder).exists()
