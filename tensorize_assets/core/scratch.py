"""Scratch folders that two processes never share, and that a killed one does not leave for ever."""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tensorize_assets.core.errors import PreflightError, WorkerBusyError

_LOCK = ".lock"
_MEMORY = "/dev/shm"
# A sweep or a worker that is just leaving holds a lock for a moment.
_TRIES = 10
_PAUSE_S = 0.1


@contextmanager
def scratch_folder(parent: Path, build: str) -> Generator[Path]:
    """An empty folder in `parent` for `build`, held by a lock and removed at the end.

    Folders beside it that no living process holds are swept.

    Raises:
        WorkerBusyError: another process is building the same thing.
    """
    folder, lock = _held(parent, build)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@contextmanager
def private_folder(*, in_memory: bool = False) -> Generator[Path]:
    """An empty folder that no other user can enter, for what only this process may know.

    It is removed at the end. What a killed process left is, by the next process that has one.
    `in_memory`: for keys, of which no disk keeps what a killed process left, where the host has
    `/dev/shm`; it may be small.

    Raises:
        PreflightError: the place for such folders is not this user's alone.
    """
    with scratch_folder(_private_parent(in_memory), _private_name()) as folder:
        yield folder


def lasting_private_folder(*, in_memory: bool = False) -> Path:
    """As `private_folder`, for as long as this process lives, also as the program it becomes.

    Its lock passes through exec. The program removes it with `remove_at_exit`; after a kill, the
    next process that has such a folder does.
    """
    folder, lock = _held(_private_parent(in_memory), _private_name())
    os.set_inheritable(lock, True)
    return folder


def remove_at_exit(folder: Path) -> None:
    """Have a lasting private folder of this process removed when the process ends.

    Any other folder is left alone, also that of a parent.
    """
    process = os.getpid()
    if not folder.name.startswith(_private_name_of(process)):
        return

    def remove() -> None:
        # Not at the end of a fork.
        if os.getpid() == process:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)


def _private_name() -> str:
    # Of its own: two workers may check one artifact, on two devices.
    return _private_name_of(os.getpid()) + os.urandom(4).hex()


def _private_name_of(process: int) -> str:
    return f"private-{process}-"


def _private_parent(in_memory: bool) -> Path:
    user = os.getuid()
    memory = in_memory and os.access(_MEMORY, os.W_OK)
    parent = Path(_MEMORY if memory else tempfile.gettempdir(), f"tensorize-assets-{user}")
    parent.mkdir(mode=0o700, exist_ok=True)
    # Not followed: whoever made a link there could change where it leads.
    found = parent.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & 0o077:
        raise PreflightError(
            f"{parent} is where keys are kept for vLLM's processes, and others can get into it; "
            "remove it, or chmod 700 it if it is this user's"
        )
    return parent


def _held(parent: Path, build: str) -> tuple[Path, int]:
    """The folder, empty, and the open lock that holds it."""
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
    except BaseException:
        os.close(lock)
        raise
    return folder, lock


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
