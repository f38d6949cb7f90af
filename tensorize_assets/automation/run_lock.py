"""The lock that a run of `tensorize build` holds, by which its end is known, however it came.

Such a run lives in a process that no code server started. Killed, it says nothing, and would keep
its places in the pools, and its partition's only run, for as long as a run may take.
"""

from __future__ import annotations

import fcntl
import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import dagster as dg

_FOLDER = "run_locks"
_BEAT_S = 10.0
# Of a run on another machine, whose locks this one's file system may not keep.
_SILENT_S = 120.0


@contextmanager
def held(home: Path, run_id: str) -> Generator[None]:
    """Say that a run lives, from before it begins until the context ends, or the process does."""
    path = home / _FOLDER / run_id
    path.parent.mkdir(parents=True, exist_ok=True)
    ended = threading.Event()
    with path.open("w") as file:
        # Somebody may hold it for a moment, to see whether it is held.
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(socket.gethostname())
        file.flush()
        beat = threading.Thread(target=_beat, args=(path, ended), daemon=True)
        beat.start()
        try:
            yield
        finally:
            ended.set()
            beat.join()
            path.unlink(missing_ok=True)


def is_lost(home: Path, run_id: str) -> bool:
    """Say whether a run held its lock and holds it no more; of one that is not known, no."""
    return _is_left(home / _FOLDER / run_id)


def end_lost(instance: dg.DagsterInstance, home: Path) -> None:
    """Fail the runs whose process was killed, and give their places in the pools back.

    Dagster's daemon does so too, by `WatchedRunLauncher`, but not every home has one.
    """
    for path in sorted((home / _FOLDER).glob("*")):
        if not _is_left(path):
            continue
        run = instance.get_run_by_id(path.name)
        if run is not None and not run.is_finished:
            instance.report_run_failed(run, "The process of this run was killed.")
        instance.event_log_storage.free_concurrency_slots_for_run(path.name)
        path.unlink(missing_ok=True)


def _is_left(path: Path) -> bool:
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            here = file.read() == socket.gethostname()
            return here or time.time() - path.stat().st_mtime > _SILENT_S
    # It is held, or was never there.
    except OSError:
        return False


def _beat(path: Path, ended: threading.Event) -> None:
    while not ended.wait(_BEAT_S):
        with suppress(OSError):
            path.touch()
