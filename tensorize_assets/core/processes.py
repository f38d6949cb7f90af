"""A worker's processes: which they are, the memory they use and leave, how they are ended."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from tensorize_assets.core.protocol import LAUNCH_VARIABLE

_POLL_S = 0.1
# Nothing catches SIGKILL, but a process deep in the kernel (a dead NFS mount) ends late.
_KILL_WAIT_S = 10.0
_CGROUP_V1_UNLIMITED = 1 << 60


def forbid_core_dumps() -> None:
    """Have this process, what it starts and what it becomes leave no memory on a disk in a crash.

    It stays readable in /proc to its own user (it could be made not to be, PR_SET_DUMPABLE): the
    launcher finds the processes of a worker by their environment, and an exec would undo it.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Where the kernel pipes dumps to a program, the limit does not count: let them hold no memory.
    with suppress(OSError):
        Path("/proc/self/coredump_filter").write_text("0")


def descendants(process: psutil.Process) -> set[psutil.Process]:
    """Return the living descendants of a process; none if it is gone itself."""
    try:
        return set(process.children(recursive=True))
    except psutil.Error:
        return set()


def launched(
    launch: str, leader: int | None, known: Iterable[psutil.Process]
) -> set[psutil.Process]:
    """Return every living process of a launch but the calling one.

    These are the ones `known` already, those in the session of `leader`, those that carry
    `launch` in their environment, and all descendants. No one of these finds all: a rank whose
    parent died has another parent, one that made its own session has left the old one, and one
    that rewrites its title (vLLM's ranks do) overwrites what can be read of its environment.
    """
    # A session's number is that of its first process: a new process that has it, while ours is
    # gone, leads a session of its own.
    session_is_ours = leader is not None and (
        any(process.pid == leader and process.is_running() for process in known)
        or not psutil.pid_exists(leader)
    )
    found = {process for process in known if is_alive(process)}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            in_session = session_is_ours and os.getsid(process.pid) == leader
            if in_session or process.environ().get(LAUNCH_VARIABLE) == launch:
                found.add(process)
    for process in list(found):
        found |= descendants(process)
    return {process for process in found if process.pid != os.getpid() and is_alive(process)}


def is_alive(process: psutil.Process) -> bool:
    """Return whether the process runs; one that only waits to be reaped does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def end(find: Callable[[], set[psutil.Process]], grace_s: float) -> set[psutil.Process]:
    """End what `find` returns: SIGTERM, and SIGKILL to those left after `grace_s` seconds.

    `find` is asked again and again, for what starts while others end. Returns the processes
    that were there at the beginning.
    """
    first = find()
    asked: set[psutil.Process] = set()
    deadline = time.monotonic() + grace_s
    while (left := find()) and time.monotonic() < deadline:
        for process in left - asked:
            _send(process, signal.SIGTERM)
        asked |= left
        time.sleep(_POLL_S)
    deadline = time.monotonic() + _KILL_WAIT_S
    while left and time.monotonic() < deadline:
        for process in left:
            _send(process, signal.SIGKILL)
        time.sleep(_POLL_S)
        left = find()
    return first


def _send(process: psutil.Process, number: signal.Signals) -> None:
    # psutil checks that the number still belongs to this process.
    with suppress(psutil.Error, ProcessLookupError):
        process.send_signal(number)


def anonymous_memory(processes: Iterable[psutil.Process]) -> int:
    """Return the anonymous memory of the processes together, in bytes.

    Mapped files do not count: the kernel drops their pages when memory is short. Where only the
    whole resident set can be read (not Linux), it is that.
    """
    return sum(_anonymous_memory(process) for process in processes)


def _anonymous_memory(process: psutil.Process) -> int:
    try:
        if sys.platform != "linux":
            return process.memory_info().rss
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except (psutil.Error, OSError):
        pass
    return 0


def memory_limit(root: Path = Path("/")) -> int:
    """Return how much memory this process's control group may use, in bytes.

    That is the smallest limit of it and the groups around it (v1 or v2), or the machine's memory.
    """
    limits = [psutil.virtual_memory().total]
    for group in _memory_groups(root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):
                limits.append(int((group / name).read_text()))
    return min(limit for limit in limits if limit < _CGROUP_V1_UNLIMITED)


def oom_kills(root: Path = Path("/")) -> int:
    """Return how often the kernel killed a process of this control group for its memory.

    Where the group does not count them, it is the machine's number.
    """
    sources = [
        group / name
        for group in _memory_groups(root)[:1]
        for name in ("memory.events", "memory.oom_control")
    ]
    for source in [*sources, root / "proc/vmstat"]:
        with suppress(OSError, ValueError):
            for line in source.read_text().splitlines():
                name, _, number = line.partition(" ")
                if name == "oom_kill":
                    return int(number)
    return 0


def _memory_groups(root: Path) -> list[Path]:
    """The folders of this process's memory control group and those around it, innermost first."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    base, path = root / "sys/fs/cgroup", groups.get("", "/")
    for controllers in groups:
        if "memory" in controllers.split(","):
            base, path = base / "memory", groups[controllers]
    inside = base / path.lstrip("/")
    if not inside.is_dir():
        # In a container the path is often the host's, and the group itself is mounted at the base.
        return [base]
    return [inside, *(folder for folder in inside.parents if folder.is_relative_to(base))]
