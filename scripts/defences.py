"""Takes out one defence after the other, and asks that the test named for it fails then.

    python scripts/defences.py [--jobs N] [PART OF ITS `what` ...]

The defences are in tests/faults/defences/*.toml, a table `[[defence]]` each:

    what = "what it is for, as docs/security.md or docs/faults.md would say"
    file = "tensorize_assets/core/publish.py"
    old = '''its source, found once in the file'''
    new = '''the source without it'''
    test = "tests/core/test_publish.py::test_of_that_name"

Each is taken out of a copy of the repository, in which its test then runs; all of the tests have to
pass in a copy from which nothing was taken. The exit code is 1 when one passed without its defence.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[1]
_TIMEOUT_S = 300
# pytest's exit code for "tests ran, and some failed".
_FAILED = 1


class Defence(NamedTuple):
    """One piece of source that keeps a promise, and the test that notices its absence."""

    what: str
    file: str
    old: str
    new: str
    test: str


def defences() -> Iterator[Defence]:
    """All of them, in the order of the files. Raises TypeError for a table with other keys."""
    for file in sorted((REPO / "tests/faults/defences").glob("*.toml")):
        for table in tomllib.loads(file.read_text())["defence"]:
            yield Defence(**table)


def without(defence: Defence, folder: Path) -> Path:
    """Copy the repository to `folder`, without the defence; return the file that was changed.

    Raises ValueError when its source is not found, or found more than once.
    """
    copy_to(folder)
    changed = folder / defence.file
    source = without_text(defence)
    # Else the test would fail for that.
    compile(source, defence.file, "exec")
    changed.write_text(source)
    return changed


def copy_to(folder: Path) -> None:
    """Copy what git would take of the repository."""
    git = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, cwd=REPO, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (REPO / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, folder / name)


def without_text(defence: Defence) -> str:
    """The source of the defence's file without it. Raises ValueError where it is not found once."""
    source = (REPO / defence.file).read_text()
    if source.count(defence.old) != 1:
        raise ValueError(
            f"{defence.what}: its `old` is found {source.count(defence.old)} times in "
            f"{defence.file}, not once; write down its source as it is now"
        )
    return source.replace(defence.old, defence.new)


def is_noticed(defence: Defence) -> tuple[bool, str]:
    """Whether the test fails without the defence, and what it printed."""
    with tempfile.TemporaryDirectory(prefix="defence-") as folder:
        without(defence, Path(folder))
        code, said = _run(folder, defence.test, "-x", "-o", f"timeout={_TIMEOUT_S}")
    # One that does not end without it has noticed too.
    return code is None or (code == _FAILED and "error" not in _summary(said)), said


def fail_anyway(tests: Sequence[str], jobs: int) -> str | None:
    """What the tests print where one fails in a whole copy; None where all pass."""
    with tempfile.TemporaryDirectory(prefix="defence-") as folder:
        copy_to(Path(folder))
        code, said = _run(folder, *tests, "-n", str(jobs), "--dist", "loadfile", limit_s=None)
    return None if code == 0 else said


def _run(
    folder: str, *arguments: str, limit_s: float | None = 2 * _TIMEOUT_S
) -> tuple[int | None, str]:
    """pytest's exit code, None when its time was over, and what it printed."""
    started = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": folder},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said = started.communicate(timeout=limit_s)[0]
        return started.returncode, said
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)


def _summary(output: str) -> str:
    """pytest's last line, `1 failed in 0.50s`: a test that was not set up is an error there."""
    return output.rstrip().rpartition("\n")[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("parts", nargs="*")
    asked = parser.parse_args()
    chosen = [
        one for one in defences() if not asked.parts or any(p in one.what for p in asked.parts)
    ]
    if not chosen:
        parser.error(f"no defence has {' or '.join(asked.parts)} in its `what`")
    tests = sorted({one.test for one in chosen})
    print(f"defences: {len(tests)} tests, first with all of them", flush=True)
    if said := fail_anyway(tests, asked.jobs):
        print(f"A TEST FAILS ANYWAY:\n{said[-5000:]}")
        return 1
    missed = 0
    with ThreadPoolExecutor(asked.jobs) as pool:
        for one, (noticed, said) in zip(chosen, pool.map(is_noticed, chosen), strict=True):
            missed += not noticed
            if noticed:
                print(f"noticed: {one.what}", flush=True)
            else:
                print(f"NOT NOTICED: {one.what}\n  {one.test} does not fail:\n{said[-2000:]}")
    print(f"defences: {len(chosen)} taken out one by one, {len(chosen) - missed} noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
