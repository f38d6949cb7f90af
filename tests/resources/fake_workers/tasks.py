"""What a worker's task may do, good and bad."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from fake_workers.messages import FakeRequest, FakeResult

from tensorize_assets.core.errors import (
    PreflightError,
    StoreUnavailableError,
    WorkerBusyError,
    WorkerError,
)
from tensorize_assets.core.protocol import WorkerResult
from tensorize_assets.worker import session
from tensorize_assets.worker.session import Progress


def answer(request: FakeRequest, progress: Progress) -> FakeResult:
    progress.log(f"asked {request.text}")
    inherited = [name for name in os.environ if name.startswith("DAGSTER_PIPES")]
    assert inherited == [], "a rank would inherit the session"
    return FakeResult(text=request.text, numbers=(0.5,) * request.number)


def answer_and_stay(request: FakeRequest, progress: Progress) -> FakeResult:
    threading.Thread(target=time.sleep, args=(600,)).start()
    return FakeResult(text="answered")


def refuse(request: FakeRequest, progress: Progress) -> FakeResult:
    raise PreflightError("2 KV heads do not divide by 3 ranks")


def wait(request: FakeRequest, progress: Progress) -> FakeResult:
    raise WorkerBusyError("another worker is building it")


def lose_the_store(request: FakeRequest, progress: Progress) -> FakeResult:
    raise StoreUnavailableError("cannot put s3://bucket/model.tensors: connection refused")


def fail(request: FakeRequest, progress: Progress) -> FakeResult:
    raise WorkerError("the scratch disk lost model.tensors")


def crash(request: FakeRequest, progress: Progress) -> FakeResult:
    print("(Worker_TP1 pid=7) ERROR 11-29 14:00:00 [x.py:1] ValueError: rank 1 is the cause")
    raise KeyError("lm_head")


def leave(request: FakeRequest, progress: Progress) -> FakeResult:
    print("about to leave", flush=True)
    os._exit(request.number)


def send_signal(request: FakeRequest, progress: Progress) -> FakeResult:
    # Longer than the launcher's pause between two readings of memory.
    time.sleep(0.6)
    os.kill(os.getpid(), request.number)
    time.sleep(30)
    raise AssertionError("a signal did not end the worker")


def wrong_result(request: FakeRequest, progress: Progress) -> WorkerResult:
    class OtherResult(WorkerResult):
        text: int = 5
        speed: float = 1.0

    return OtherResult()


def grow(request: FakeRequest, progress: Progress) -> FakeResult:
    """Hold `number` bytes in this process and as many in a child."""
    code = f"import time; held = b'x' * {request.number}; time.sleep(1)"
    child = subprocess.Popen([sys.executable, "-c", code])
    held = b"x" * request.number
    child.wait()
    return FakeResult(text=str(len(held)))


def print_lines(request: FakeRequest, progress: Progress) -> FakeResult:
    print(request.text, flush=True)
    return FakeResult()


def report_progress(request: FakeRequest, progress: Progress) -> FakeResult:
    progress.update("starting the engine")
    time.sleep(1)
    for done in range(10):
        progress.update(
            "writing",
            1,
            3,
            tensors_done=12 * done,
            tensors_total=272,
            bytes_done=31_000_000 * done,
            bytes_total=900_000_000,
        )
        time.sleep(0.05)
    return FakeResult()


def reveal(request: FakeRequest, progress: Progress) -> FakeResult:
    """Tell everything that others can read of this process, and log the secret every way."""
    secret = session.secrets()["data-key"]
    progress.log(f"logged {secret.decode()}")
    print(f"printed {secret.decode()} {secret.hex()}", flush=True)
    child = [sys.executable, "-c", "import os; print(os.listdir('/proc/self/fd'))"]
    seen = [
        Path("/proc/self/cmdline").read_text(),
        Path("/proc/self/environ").read_text(),
        str(dict(os.environ)),
        subprocess.run(
            child, capture_output=True, text=True, check=True, close_fds=False
        ).stdout.strip(),
    ]
    if request.number:
        raise RuntimeError(f"raised {secret.decode()}")
    return FakeResult(text="\n".join(seen) + f"\nlength {len(secret)}")


# Ignores SIGTERM, in a session of its own: what SIGTERM to the worker's group does not reach.
_STUBBORN = """
import os, signal, sys, time
os.setsid()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1] + "/" + str(os.getpid()), "w").close()
time.sleep(600)
"""


def family(request: FakeRequest, progress: Progress) -> FakeResult:
    """Start a child, a stubborn one, and one whose parent leaves; then wait or answer."""
    subprocess.Popen([sys.executable, "-c", _STUBBORN, request.text])
    orphan = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]])"
    subprocess.Popen([sys.executable, "-c", orphan, _STUBBORN, request.text])
    while len(os.listdir(request.text)) < 2:
        time.sleep(0.05)
    (Path(request.text) / str(os.getpid())).touch()
    if request.number:
        try:
            signal.pause()
        finally:
            Path(request.text).with_suffix(".cleaned").touch()
    return FakeResult(text="answered")
