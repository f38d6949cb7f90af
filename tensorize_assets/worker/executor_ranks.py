"""Tensor-parallel ranks as vLLM itself starts them, on their devices: each writes its own file.

For models that vLLM cannot construct on a CPU. vLLM's executor starts the ranks and has them load a
model; with our loader (`vllm_plugin.shard_writer`) loading is writing. There is no engine around
them: no cache, no warm-up, no request.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.distributed import destroy_distributed_environment, destroy_model_parallel
from vllm.v1.executor.abstract import Executor

from tensorize_assets.core.errors import PreflightError, TensorizeAssetsError, WorkerError
from tensorize_assets.core.scratch import private_folder
from tensorize_assets.vllm_plugin import shard_writer
from tensorize_assets.worker.access import keyfile
from tensorize_assets.worker.write_rank import WrittenRank

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from tensorize_assets.core.tasks import ShardRequest
    from tensorize_assets.worker.session import Progress

# vLLM's arguments where nothing is served: neither a cache nor free memory for one.
ARGUMENTS: Mapping[str, object] = {
    "load_format": shard_writer.LOAD_FORMAT,
    "kv_cache_memory_bytes": 64 << 20,
    "gpu_memory_utilization": 0.05,
}

# From the start of all ranks until each has found the others. Imports take 10 to 30 s of it.
_JOIN_S = 300.0
_POLL_S = 0.1
# Exit codes of a rank that runs, or that vLLM ends because of another.
_NOT_ENDED = (None, -signal.SIGTERM)


def write_ranks(
    config: VllmConfig, request: ShardRequest, scratch: Path, progress: Progress, where: str
) -> tuple[WrittenRank, ...]:
    """Have vLLM's ranks write their files into `scratch`, and end them.

    `config` was made with ARGUMENTS. A rank that fails, or dies, ends the others.

    Raises:
        PreflightError: vLLM, the format or the disk does not allow it.
        WorkerError: a rank failed, was killed, or did not find the others in time.
    """
    ranks = request.tensor_parallel_size
    if ranks > 1 and request.device == "cpu":
        _share_cores(ranks)
    with private_folder(in_memory=True) as folder, _told_of(folder):
        shard_writer.Job(
            where=where,
            ranks=ranks,
            scratch=str(scratch),
            keyfile=str(keyfile(folder, where)) if request.encrypted else None,
            serialization_kwargs=request.serialization_kwargs,
        ).write(folder)
        # The only rank of one is in this process, which may have loaded its plugins before.
        shard_writer.register()
        progress.update("starting vLLM's ranks")
        with _Watch(folder, ranks, progress, where) as watch:
            try:
                executor = Executor.get_class(config)(config)
                # From here on they end because they are told to.
                watch.stop()
                executor.shutdown()
            except Exception as error:
                raise watch.why(error) from error
            finally:
                if ranks == 1:
                    destroy_model_parallel()
                    destroy_distributed_environment()
        written = [shard_writer.written(folder, rank) for rank in range(ranks)]
    silent = [rank for rank, one in enumerate(written) if one is None]
    if silent:
        raise WorkerError(f"{where}: ranks {silent} ended without a word about what they wrote")
    return tuple(one for one in written if one is not None)


class _Watch:
    """Looks at the ranks while vLLM waits for them, which knows no timeout and tells no reason."""

    def __init__(self, folder: Path, ranks: int, progress: Progress, where: str) -> None:
        self._folder, self._ranks = folder, ranks
        self._progress, self._where = progress, where
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._began = time.monotonic()
        self._processes: dict[str, BaseProcess] = {}
        self._died: BaseProcess | None = None
        self._late: tuple[int, ...] = ()
        self._ending = False

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Look no longer."""
        self._stop.set()
        self._thread.join()

    def why(self, error: Exception) -> TensorizeAssetsError:
        """The error to raise where vLLM raised `error`, which seldom knows more than that."""
        # The rank that failed may have been faster than the last look.
        self.stop()
        self._look()
        if self._died is not None and (self._died.exitcode or 0) < 0:
            # First: others may have failed because it was gone.
            return WorkerError(self._how(self._died))
        failures = shard_writer.failures(self._folder)
        if failures:
            first = failures[0]
            if first.kind in _OWN:
                return _OWN[first.kind](first.message)
            return WorkerError(
                f"{self._where}: rank {first.rank} of {self._ranks} failed: {first.kind}: "
                f"{first.message}\n{first.traceback}"
            )
        if self._late:
            return WorkerError(
                f"{self._where}: vLLM's {self._ranks} ranks did not find one another within "
                f"{_JOIN_S:.0f} s and were ended (never began to load: "
                f"{', '.join(map(str, self._late))}). They meet over loopback: the worker's log "
                "says what they waited for"
            )
        if self._died is not None and self._died.exitcode:
            return WorkerError(self._how(self._died))
        if isinstance(error, TensorizeAssetsError):
            return error
        return WorkerError(f"{self._where}: {type(error).__name__}: {error}")

    def _how(self, process: BaseProcess) -> str:
        number = process.name.removeprefix(shard_writer.PROCESS_NAME)
        rank = f"{self._where}: rank {number} of {self._ranks}"
        code = process.exitcode or 0
        if code >= 0:
            return f"{rank} ended with exit code {code} before its file was written"
        name = signal.Signals(-code).name
        memory = (
            "; the kernel does so when the machine's, or the container's, memory is full: run the "
            "worker on a larger host, or use a larger tensor_parallel_size"
            if -code == signal.SIGKILL
            else ""
        )
        return f"{rank} was killed by {name} before its file was written{memory}"

    def _run(self) -> None:
        while not self._stop.wait(_POLL_S):
            self._look()
            if self._died or self._late or shard_writer.failures(self._folder):
                # What the others have is worth nothing; vLLM would wait for seconds.
                self._ending = True
                self._kill()
            else:
                self._tell()

    def _look(self) -> None:
        for process in multiprocessing.active_children():
            if process.name.startswith(shard_writer.PROCESS_NAME):
                self._processes.setdefault(process.name, process)
        if not self._ending:
            ended = [one for one in self._processes.values() if one.exitcode not in _NOT_ENDED]
            # Of several, whoever was killed did not end because of another.
            self._died = min(ended, key=lambda one: one.exitcode or 0, default=None)
            if time.monotonic() - self._began > _JOIN_S:
                begun = shard_writer.states(self._folder)
                self._late = tuple(rank for rank in range(self._ranks) if rank not in begun)

    def _kill(self) -> None:
        for process in self._processes.values():
            with suppress(ValueError, OSError):
                process.kill()

    def _tell(self) -> None:
        states = shard_writer.states(self._folder)
        if len(states) < self._ranks:
            return
        # All of them are still loading while one is.
        stage = min(state.stage for state in states.values())
        at_it = [state for state in states.values() if state.stage == stage]
        totals = [state.bytes_total for state in at_it]
        self._progress.update(
            f"{stage}, {len(at_it)} of {self._ranks} ranks",
            bytes_done=sum(state.bytes_done or 0 for state in at_it),
            bytes_total=sum(total or 0 for total in totals) if all(totals) else None,
        )


_OWN: Mapping[str, type[TensorizeAssetsError]] = {
    error.__name__: error for error in (PreflightError, WorkerError)
}


@contextmanager
def _told_of(folder: Path) -> Iterator[None]:
    os.environ[shard_writer.FOLDER_VARIABLE] = str(folder)
    try:
        yield
    finally:
        del os.environ[shard_writer.FOLDER_VARIABLE]


def _share_cores(ranks: int) -> None:
    # Ranks that each take every core wait for one another in spinning threads.
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
