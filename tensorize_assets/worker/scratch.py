"""Scratch folders that two runs never share, and that a killed run does not leave for ever."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tensorize_assets.core.errors import WorkerError

_LOCK = ".lock"


@contextmanager
def scratch_folder(parent: Path, name: str) -> Iterator[Path]:
    """An empty folder `parent/name`, held by a lock and removed at the end.

    Folders beside it that no living process holds are swept.

    Raises:
        WorkerError: another process is building the same thing.
    """
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / name
    folder.mkdir(exist_ok=True)
    lock = _try_lock(folder)
    if lock is None:
        raise WorkerError(
            f"another worker is building {name} (it holds {folder / _LOCK}); wait for it, then "
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
