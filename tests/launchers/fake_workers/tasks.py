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
from tensorize_assets.core.manifest import DtypeCensus, FileEntry, ShardEntry, StockVllm
from tensorize_assets.core.protocol import WorkerResult
from tensorize_assets.core.tasks import ShardRequest, ShardResult
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
    print("(Worker_TP0 pid=7) INFO 11-29 14:00:00 [x.py:1] at it", flush=True)
    code = f"import time; held = b'x' * {request.number}; time.sleep(1)"
    child = subprocess.Popen([sys.executable, "-c", code])
    held = b"x" * request.number
    child.wait()
    return FakeResult(text=str(len(held)))


def stay(request: FakeRequest, progress: Progress) -> FakeResult:
    """Say so, and stay for `number` seconds, or for ever."""
    print("(Worker_TP0 pid=7) INFO 11-29 14:00:00 [x.py:1] at it", flush=True)
    time.sleep(request.number or 600)
    return FakeResult(text="stayed")


def measure(request: FakeRequest, progress: Progress) -> FakeResult:
    return FakeResult(text=str(len(request.text)))


def answer_beside_noise(request: FakeRequest, progress: Progress) -> FakeResult:
    """Answer at length behind a progress bar that has not ended its line, stdout talking on."""
    print("before", flush=True)
    print("\rloading:  50%\rloading: 100%", end="", file=sys.stderr, flush=True)
    noise = "import os\nfor _ in range(200): os.write(1, b'noise ' * 20 + b'\\n')"
    subprocess.run([sys.executable, "-c", noise], check=True)
    return FakeResult(numbers=(0.5,) * request.number)


def shard(request: ShardRequest, progress: Progress) -> ShardResult:
    """The ranks asked for, of a model that is named after what becomes of it: `MODEL-at-RANK`.

    They meet in the folder that is named as the snapshot's.
    """
    here = Path(str(request.snapshot.folder))
    (rank,) = request.ranks or (0,)
    fate, _, at = request.model.partition("-at-")
    print(f"(Worker_TP{rank} pid=7) INFO 11-29 14:00:00 [x.py:1] at it", flush=True)
    if fate == "fails" and int(at) == rank:
        # Once the others are at it.
        while len(list(here.iterdir())) < request.tensor_parallel_size - 1:
            time.sleep(0.02)
        raise WorkerError(f"rank {rank} has no room")
    (here / str(rank)).write_text(request.scratch_dir)
    if fate != "works":
        time.sleep(600)
    name = f"model-rank-{rank:03d}.tensors"
    return ShardResult(
        dtype="bfloat16",
        architecture="OPTForCausalLM",
        files=(FileEntry(path=name, size=rank + 1, sha256="0" * 64),),
        shards=(ShardEntry(rank=rank, file=name, tensors=()),),
        census=DtypeCensus(by_dtype={}, model_dtype="bfloat16"),
        tied=(),
        stock_vllm=StockVllm(loadable=True, reasons=()),
        versions={},
        seconds={"write": 0.5},
    )


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


def overhear(request: FakeRequest, progress: Progress) -> FakeResult:
    """Tell all that others can read of this process, and how long its secret is."""
    secret = session.secrets()["data-key"]
    seen = [Path(f"/proc/self/{name}").read_text() for name in ("cmdline", "environ")]
    return FakeResult(text="\n".join([*seen, str(dict(os.environ))]), numbers=(len(secret),))


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
