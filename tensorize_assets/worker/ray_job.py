"""What a Ray job runs: a worker, and the end of all its processes, however it ends itself.

    python -m tensorize_assets.worker.ray_job MODULE SECONDS

Ray asks a job's processes to stop and kills them; vLLM's ranks may have left their parent by then.
A worker that crashes leaves them too. So this process, which does nothing else, ends them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import NoReturn

import psutil

from tensorize_assets.core import processes
from tensorize_assets.core.protocol import LAUNCH_VARIABLE, PARENT_VARIABLE


def main(module: str, grace_s: float) -> int:
    """Run `python -m MODULE` to its end; returns its exit code, or 128 and its signal's number."""
    launch = os.urandom(16).hex()
    worker: psutil.Popen | None = None
    signal.signal(signal.SIGTERM, _leave)
    try:
        worker = psutil.Popen(
            [sys.executable, "-m", module],
            env={**os.environ, PARENT_VARIABLE: str(os.getpid()), LAUNCH_VARIABLE: launch},
            stdin=subprocess.DEVNULL,
            # It outlives a kill of this process's group by a second, and ends the rest first.
            start_new_session=True,
        )
        code = worker.wait()
        return code if code >= 0 else 128 - code
    finally:
        # Ray asks the worker as well, and this process again at the next cancel.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pid = None if worker is None else worker.pid
        known = () if worker is None else (worker,)
        processes.end(lambda: processes.launched(launch, pid, known), grace_s)


def _leave(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
