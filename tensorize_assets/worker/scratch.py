"""Scratch folders that two runs never share, and that a killed run does not leave for ever."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tensorize_assets.core.errors import WorkerBusyError

_LOCK = ".lock"
# A sweep or a worker that is just leaving holds a lock for a moment.
_TRIES = 10
_PAUSE_S = 0.1


@contextmanager
def scratch_folder(parent: Path, build: str) -> Iterator[Path]:
    """An empty folder in `parent` for `build`, held by a lock and removed at the end.

    Folders beside it that no living process holds are swept.

    Raises:
        WorkerBusyError: another process is building the same thing.
    """
    # One-shot builds of two models may have the same last part.
    name = f"{Path(build).name}-{hashlib.sha256(build.encode()).hexdigest()[:8]}"
    folder = parent / name
    for _ in range(_TRIES):
        folder.mkdir(parents=True, exist_ok=True)
        lock = _try_lock(folder)
        if lock is not None:
            break
        time.sleep(_PAUSE_S)
    else:
        raise WorkerBusyError(
            f"another worker is building {build} (it holds {folder / _LOCK}); wait for it, then "
            "run again: what it completes is not built twice"
        )
    try:
        _empty(folder)
        _sweep(parent)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _try_lock(folder: Path) -> int | None:
    try:
        descriptor = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever held it before may have removed the folder between our open and our lock.
        held = os.fstat(descriptor)
        there = os.stat(folder / _LOCK)
        if (held.st_dev, held.st_ino) == (there.st_dev, there.st_ino):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.name == _LOCK:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _sweep(parent: Path) -> None:
    """Remove folders whose worker is gone; a held lock, also our own, keeps its folder."""
    for entry in parent.iterdir():
        if not (entry / _LOCK).is_file():
            continue
        lock = _try_lock(entry)
        if lock is not None:
            shutil.rmtree(entry, ignore_errors=True)
            os.close(lock)
