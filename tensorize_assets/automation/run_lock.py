"""The lock that a run of `tensorize build` holds, by which its end is known, however it came.

Such a run lives in a process that no code server started. Killed, it says nothing, and would keep
its places in the pools, and its partition's only run, for as long as a run may take.

The lock is flock's, on a file in the instance's folder. Some file systems keep locks for their own
machine only, where one of another machine looks free: of those the file's age counts, which a
living run renews.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import re
import socket
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import dagster as dg

LOST = (
    "The `tensorize build` of this run ended without a word: it was killed, such as for its "
    "memory, or its machine went down. Run the command again: what is complete is kept."
)

_UNTOLD = (
    "if this run is killed, it will count as under way, for it has no lock; let this user write "
    "there: %s"
)
_FOLDER = "run_locks"
_RUN_ID = re.compile("[0-9a-f-]{36}")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_BEAT_S = 10.0
_BEATS_PER_LOOK = 3
_SILENT_S = 120.0

_logger = logging.getLogger(__name__)


@contextmanager
def held(instance: dg.DagsterInstance, run_id: str) -> Generator[None]:
    """Say that a run lives, from before it begins until the context ends, or the process does.

    Meanwhile it ends those that are lost: it may wait for the place of one. Where the folder cannot
    be written to, a warning says so.
    """
    path = _folder(instance) / run_id
    descriptor = _taken(path)
    if descriptor is None:
        yield
        return
    ended = threading.Event()
    beat = threading.Thread(target=_beat, args=(instance, path, ended), daemon=True)
    try:
        _end_lost(instance)
        beat.start()
        try:
            yield
        finally:
            ended.set()
            beat.join()
        # After an exception it stays: Dagster may not have written down how the run ended.
        path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def is_lost(instance: dg.DagsterInstance, run_id: str) -> bool:
    """Say whether a run held its lock and holds it no more; of one that is not known, no."""
    path = _folder(instance) / run_id
    try:
        return _is_left(path)
    except OSError as error:
        _logger.warning("%s does not tell whether its run lives: %s", path, error)
        return False


def _end_lost(instance: dg.DagsterInstance) -> None:
    """Fail the runs whose process is gone, and give their places in the pools back.

    Dagster's daemon does so too, by `WatchedRunLauncher`, but not every home has one. What cannot
    be ended is told, and in nobody's way.
    """
    storage = instance.event_log_storage
    for path in sorted(_folder(instance).glob("*")):
        run_id = path.name
        try:
            # What else a file system keeps there, such as .nfs…, is of no run.
            if not _RUN_ID.fullmatch(run_id) or not _is_left(path):
                continue
            run = instance.get_run_by_id(run_id)
            if run is not None and not run.is_finished:
                instance.report_run_failed(run, LOST)
            if storage.supports_global_concurrency_limits:
                storage.free_concurrency_slots_for_run(run_id)
            path.unlink(missing_ok=True)
        except Exception as error:  # noqa: BLE001 - another run's trouble is not this one's
            _logger.warning("%s is of no run that can be ended: %s", path, error)


def _taken(path: Path) -> int | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    except OSError as error:
        _logger.warning(_UNTOLD, error)
        return None
    try:
        # Somebody may hold it for a moment, to see whether it is held.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, _kernel().encode())
    except OSError as error:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        _logger.warning(_UNTOLD, error)
        return None
    return descriptor


def _is_left(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Shared: two who look at once must not take each other for the run.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if os.read(descriptor, 100) == _kernel().encode():
            return True
        return _now(path.parent) - os.fstat(descriptor).st_mtime > _SILENT_S
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def _beat(instance: dg.DagsterInstance, path: Path, ended: threading.Event) -> None:
    for number in itertools.count(1):
        if ended.wait(_BEAT_S):
            return
        with suppress(OSError):
            os.utime(path)
        if number % _BEATS_PER_LOOK == 0:
            _end_lost(instance)


def _folder(instance: dg.DagsterInstance) -> Path:
    return Path(instance.root_directory) / _FOLDER


def _kernel() -> str:
    """What all who share a file's locks have in common, whatever the file system."""
    return _BOOT.read_text().strip() if _BOOT.exists() else socket.gethostname()


def _now(folder: Path) -> float:
    """The time by the clock that dates the folder's files."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime
