"""The launcher `ray` with a real cluster: a head, and two nodes with a CPU each."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import dagster as dg
import psutil
import pytest
import requests
from ray.job_submission import JobSubmissionClient

import tensorize_assets
from tensorize_assets.core import processes
from tensorize_assets.core.errors import (
    ClusterUnavailableError,
    PreflightError,
    StoreUnavailableError,
    WorkerBusyError,
    WorkerError,
    WorkerKilledError,
)
from tensorize_assets.core.handover import WORKER_KEY_VARIABLE
from tensorize_assets.core.launcher_ray import RaySettings
from tensorize_assets.core.protocol import WorkerRequest, WorkerResult
from tensorize_assets.core.rank_resources import RankResources
from tensorize_assets.core.sealing import generate_private_key
from tensorize_assets.core.tasks import (
    ReloadRequest,
    ReloadResult,
    ShardRequest,
    ShardResult,
    SnapshotSource,
)
from tensorize_assets.resources.launchers import ray, ray_control, ray_log
from tensorize_assets.resources.launchers.base import LaunchReport
from tensorize_assets.resources.launchers.local import SubprocessLauncher
from tensorize_assets.resources.launchers.ray import RayLauncher

_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE), str(_HERE.parent / "faults")]

from fake_workers.messages import FakeRequest, FakeResult  # noqa: E402
from injection import Rule, environment  # noqa: E402
from ray_cluster import Node, RayCluster  # noqa: E402

_PYTHONPATH = os.pathsep.join([str(_HERE), str(Path(tensorize_assets.__file__).parents[1])])
_SECRET = b"correct-horse-battery-staple-0001"
_PRINTED = b"printed-by-a-careless-library-002"
_NOT_ENDED = ("PENDING", "RUNNING")


class Cluster(NamedTuple):
    """The cluster, and the public key whose private one every node has."""

    ray: RayCluster
    public_key: str

    def nodes(self) -> list[Node]:
        """Two living nodes that take work; one that a test has killed is replaced."""
        living = [node for node in self.ray.nodes[1:] if node.process.poll() is None]
        living += [self.ray.add(cpus=1) for _ in range(2 - len(living))]
        self.ray.wait_for(3)
        return living


class Launch(NamedTuple):
    """What one launch gave: a report or an error, and the step's log as (level, message)."""

    report: LaunchReport[Any] | None
    error: Exception | None
    log: list[tuple[int, str]]

    def messages(self, level: int) -> list[str]:
        return [message for at, message in self.log if at == level]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One for all tests: it takes longer to start than most of them."""
    folder = tmp_path_factory.mktemp("worker-key")
    key = folder / "worker.key"
    public_key = generate_private_key(key).public_key
    with RayCluster({"PYTHONPATH": _PYTHONPATH, WORKER_KEY_VARIABLE: str(key)}) as running:
        found = Cluster(running, public_key)
        found.nodes()
        yield found


def _launcher(
    cluster: Cluster,
    *,
    module: str = "fake_workers.ray_worker",
    leave_s: float = 60,
    **settings: Any,
) -> Any:
    defaults: dict[str, Any] = {
        "address": cluster.ray.address,
        "python": sys.executable,
        "worker_public_key": cluster.public_key,
        "terminate_grace_s": 1.0,
        "shared_disks": True,
    }
    found = RaySettings.model_validate({**defaults, **settings})
    return RayLauncher(settings=found, module=module, leave_s=leave_s)


def _launch(
    launcher: Any,
    request: WorkerRequest | str,
    result_type: type[WorkerResult] = FakeResult,
    *,
    secrets: Mapping[str, bytes] | None = None,
    resources: RankResources | None = None,
    ended: str | None = None,
    **fields: Any,
) -> Launch:
    """Run a task (of a name: a fake one) in an asset of a real, ephemeral Dagster instance.

    `ended` is a run that the instance knows to have failed.
    """
    asked = FakeRequest(task=request, **fields) if isinstance(request, str) else request
    outcome: list[LaunchReport[Any] | Exception] = []

    @dg.asset
    def launched(context: dg.AssetExecutionContext) -> dg.MaterializeResult[Any]:
        try:
            outcome.append(launcher.run(context, asked, result_type, secrets, resources))
        except Exception as error:
            outcome.append(error)
            raise
        return dg.MaterializeResult()

    with dg.DagsterInstance.ephemeral() as instance:
        if ended is not None:
            instance.add_run(dg.DagsterRun("x", ended, status=dg.DagsterRunStatus.FAILURE))
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


def _shard(folder: Path, suffix: str = "v1", ranks: int = 2, **fields: Any) -> ShardRequest:
    (folder / "here").mkdir(exist_ok=True)
    asked = {
        "model": "org/fake",
        "suffix": suffix,
        "snapshot": str(folder / "here"),
        "root": str(folder / "root"),
        "directory": f"vllm/org/fake/{suffix}",
        "scratch_dir": "/of/another/machine",
        "dtype": "bfloat16",
        "tensor_parallel_size": ranks,
        **fields,
    }
    return ShardRequest.model_validate(asked)


def _eventually(condition: Callable[[], bool], timeout_s: float = 15) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def _alive(pids: list[int]) -> list[int]:
    return [
        pid for pid in pids if psutil.pid_exists(pid) and processes.is_alive(psutil.Process(pid))
    ]


def _family(folder: Path) -> list[int]:
    return _alive([int(path.name) for path in folder.iterdir()])


class Launches(NamedTuple):
    """Launches of fake workers, side by side: a job is mostly the start of its processes."""

    of: dict[str, Launch]
    folder: Path
    jobs: str

    def error(self, name: str) -> str:
        return str(self.of[name].error)


_BYTES = os.urandom(500_000).hex()


@pytest.fixture(scope="module")
def launches(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    """One of each kind; four fit on a CPU."""
    folder = tmp_path_factory.mktemp("launches")
    launcher, small = _launcher(cluster), RankResources(cpu=0.25)

    def fake(task: str, launcher: Any = launcher, **fields: Any) -> Callable[[], Launch]:
        return lambda: _launch(launcher, task, resources=small, **fields)

    def ranks(suffix: str, count: int, retries: int = 3, **more: Any) -> Callable[[], Launch]:
        (folder / suffix).mkdir()
        request = _shard(folder / suffix, suffix, count)
        of = _launcher(cluster, scratch="/s", max_retries=retries)
        return lambda: _launch(of, request, ShardResult, resources=small, **more)

    (folder / "family").mkdir()
    asked = {
        "answer": fake("answer", text="what", number=2),
        "large": fake("answer", text=_BYTES, number=1_000_000),
        "refuse": fake("refuse"),
        "wait": fake("wait"),
        "lose_the_store": fake("lose_the_store"),
        "fail": fake("fail"),
        "crash": fake("crash"),
        "leave": fake("leave", number=3),
        "killed": fake("send_signal", number=signal.SIGKILL),
        "crashed": fake("send_signal", number=signal.SIGSEGV),
        "report_progress": fake("report_progress"),
        "print_lines": fake(
            "print_lines", text="(Worker_TP1 pid=123) WARNING 11-29 14:00:00 [cpu.py:1] slow"
        ),
        "overhear": fake("overhear", secrets={"data-key": _SECRET}),
        "reveal": fake("reveal", number=1, secrets={"data-key": _PRINTED}),
        "too_long": fake(
            "family", _launcher(cluster, timeout_s=30), text=str(folder / "family"), number=1
        ),
        "stay": fake("answer_and_stay", _launcher(cluster, leave_s=0.5)),
        "ranks": ranks("v1", 3, secrets={"data_key": _SECRET}),
        "failing rank": ranks("fail", 2),
        "refusing rank": ranks("refuse", 1),
        "lost rank": ranks("lost", 1, retries=0),
        "broken rank": ranks("broken", 1),
    }
    with ThreadPoolExecutor(4) as pool:
        running = {name: pool.submit(launch) for name, launch in asked.items()}
    jobs = json.dumps(cluster.ray.ask("/api/jobs/"))
    return Launches({name: one.result() for name, one in running.items()}, folder, jobs)


def test_a_result_comes_back_with_what_it_said(launches: Launches):
    """The plain case: a request goes in, the typed result comes out, logs reach Dagster."""
    launch = launches.of["answer"]
    assert launch.report is not None, launch.error
    assert launch.report.result == FakeResult(text="what", numbers=(0.5, 0.5))
    assert launch.report.seconds > 0
    assert "asked what" in launch.messages(logging.INFO)


def test_megabytes_arrive_whole(launches: Launches):
    """The tensor list of a large model, there and back.

    Linux takes no variable of 128 KiB, and no websocket of Ray's a line of more than 4 MB.
    """
    launch = launches.of["large"]
    assert launch.report is not None, launch.error
    assert launch.report.result.text == _BYTES
    assert len(launch.report.result.numbers) == 1_000_000


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("refuse", PreflightError, "refuse: 2 KV heads do not divide by 3 ranks"),
        ("wait", WorkerBusyError, "another worker is building it"),
        ("lose_the_store", StoreUnavailableError, "connection refused"),
        ("fail", WorkerError, "fail: the scratch disk lost model.tensors"),
        ("crash", WorkerError, "ValueError: rank 1 is the cause"),
        ("leave", WorkerError, "exit code 3 and no result. Its last lines:\n"),
        ("killed", WorkerKilledError, "was killed (SIGKILL)"),
        ("crashed", WorkerError, "crashed in native code (SIGSEGV)"),
        ("too_long", WorkerError, "longer than timeout_s of launchers.ray"),
    ],
)
def test_a_failure_is_told_as_by_a_subprocess(
    launches: Launches, name: str, kind: type[Exception], text: str
):
    """Whether a step is tried again, and what people read, is the same wherever workers run."""
    assert type(launches.of[name].error) is kind
    assert text in launches.error(name)


def test_progress_and_printed_lines_reach_the_steps_log(launches: Launches):
    """Loading takes minutes; the report tells a slow disk from a hang."""
    reports = launches.of["report_progress"].messages(logging.INFO)
    assert len([text for text in reports if "rank 1/3: writing: " in text]) >= 2
    assert (logging.WARNING, "rank 1: [cpu.py:1] slow") in launches.of["print_lines"].log


def test_a_timeout_ends_every_process_of_the_job(launches: Launches):
    """A hung engine would hold its GPUs until somebody looks; what it has left, too."""
    assert len(list((launches.folder / "family").iterdir())) == 3
    assert _family(launches.folder / "family") == []


def test_a_worker_that_answered_need_not_leave(launches: Launches):
    """Engines hang in their shutdown; the work is done and must not be thrown away."""
    launch = launches.of["stay"]
    assert launch.report is not None, launch.error
    assert any("did not leave cleanly" in text for text in launch.messages(logging.WARNING))


def test_secrets_travel_sealed(cluster: Cluster, launches: Launches):
    """What a job is asked with shows in the dashboard, to everyone who sees the cluster."""
    launch = launches.of["overhear"]
    assert launch.report is not None, launch.error
    assert launch.report.result.numbers == (len(_SECRET),)
    seen = [launch.report.result.text, launches.jobs, *(text for _, text in launch.log)]
    assert all(_SECRET.decode() not in text for text in seen)
    kept = ["grep", "-rlF", _SECRET.decode(), str(cluster.ray.folder)]
    on_disk = subprocess.run(kept, capture_output=True, text=True)
    assert on_disk.stdout == "", "Ray wrote it into its logs or packages"


def test_secrets_that_a_worker_prints_stay_out_of_dagster(launches: Launches):
    """A library may well print the key that it cannot use."""
    assert launches.error("reveal") == "reveal: RuntimeError: raised ***"
    logged = "\n".join(text for _, text in launches.of["reveal"].log)
    assert "printed *** ***" in logged
    assert _PRINTED.decode() not in logged


def test_ranks_are_tasks_whose_results_are_one(launches: Launches):
    """On every node, each with a process and scratch of its own, and with the secret."""
    launch = launches.of["ranks"]
    assert launch.report is not None, launch.error
    result = launch.report.result
    assert [shard.rank for shard in result.shards] == [0, 1, 2]
    assert [file.size for file in result.files] == [len(_SECRET) + 1] * 3
    assert result.seconds == {"write": 1.5}
    infos = launch.messages(logging.INFO)
    assert len({text.partition("on node ")[2] for text in infos if ": on node " in text}) == 2
    assert (logging.WARNING, "rank 2: [x.py:1] as vLLM prints") in launch.log
    here = launches.folder / "v1" / "here"
    left = [(here / f"rank-{rank}").read_text().split() for rank in range(3)]
    assert [scratch for _, scratch in left] == ["/s"] * 3
    assert len({pid for pid, _ in left}) == 3, "vLLM's state is a process's"


def test_a_failing_rank_ends_the_others_and_is_named(launches: Launches):
    """The others would write for an hour what nobody takes."""
    launch = launches.of["failing rank"]
    assert type(launch.error) is WorkerError
    assert "rank 1: RuntimeError: rank 1 is the cause" in str(launch.error).splitlines()[0]
    (traceback,) = [text for text in launch.messages(logging.ERROR) if "Traceback" in text]
    assert traceback.startswith("rank 1: Traceback")
    here = launches.folder / "fail" / "here"
    assert (here / "cleaned").exists(), "rank 0 could not remove its scratch"
    assert _alive([int((here / f"rank-{n}").read_text().split()[0]) for n in range(2)]) == []


def test_a_rank_that_refuses_is_not_tried_again(launches: Launches):
    """The kind of a failure survives the way through Ray."""
    assert type(launches.of["refusing rank"].error) is PreflightError
    assert "rank 0: this vLLM cannot construct it" in launches.error("refusing rank")


def test_a_rank_that_ray_lost_may_be_tried_again(launches: Launches):
    """Its node, or a neighbour's memory, need not be in the way of the next try."""
    assert type(launches.of["lost rank"].error) is WorkerKilledError
    assert "rank 0: Ray lost its process" in launches.error("lost rank")


def test_what_fails_around_a_rank_is_no_lost_process(launches: Launches):
    """Such as an import: nobody should look for memory that was short."""
    launch = launches.of["broken rank"]
    assert type(launch.error) is WorkerError
    assert "rank 0: AttributeError: 'NoneType' object has" in str(launch.error)
    assert any("in rank_task" in text for text in launch.messages(logging.ERROR))


class Proxy(ThreadingHTTPServer):
    """Stands before a dashboard. `trouble`: how often a request gets 503 and goes no further;
    `lost`: requests that are passed on, and whose answers are 502 instead.
    """

    def __init__(self, to: str, trouble: dict[str, int], lost: tuple[str, ...] = ()) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.to, self.trouble, self.lost = to, trouble, lost
        self.address = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> "Proxy":
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Passing(BaseHTTPRequestHandler):
    def _pass(self) -> None:
        proxy, body = self.server, self.rfile.read(int(self.headers.get("Content-Length") or 0))
        assert isinstance(proxy, Proxy)
        what = f"{self.command} {re.sub('tensorize-[a-z0-9-]+', 'ID', self.path)}"
        left = proxy.trouble.get(what, 0)
        proxy.trouble[what] = left - 1
        if left > 0:
            return self._answer(503, b"no healthy upstream")
        kind = {"Content-Type": self.headers.get("Content-Type") or "application/json"}
        found = requests.request(self.command, proxy.to + self.path, data=body, headers=kind)
        if what in proxy.lost:
            return self._answer(502, b"bad gateway")
        return self._answer(found.status_code, found.content)

    def _answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: it would go to the terminal."""

    do_GET = do_POST = do_PUT = _pass


@pytest.mark.parametrize(
    "what", ["GET /api/version", "GET /api/v0/nodes?limit=10000&timeout=20&detail=False"]
)
def test_a_dashboard_in_trouble_may_be_tried_again(cluster: Cluster, what: str):
    """A proxy's answer while the head restarts, in our words and not those of a library."""
    with Proxy(cluster.ray.address, {what: 9}) as proxy:
        launch = _launch(_launcher(cluster, address=proxy.address), "answer")
    assert type(launch.error) is ClusterUnavailableError
    assert "is in trouble (HTTP 503: no healthy upstream)" in str(launch.error)


@pytest.mark.parametrize("stops", [2, 9])
def test_a_job_whose_answer_was_lost_is_stopped(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stops: int
):
    """It may run, and hold a node that nobody waits for: else somebody is told how to stop it."""
    monkeypatch.setattr(ray_control, "_END_TRIES", 3)
    submit, stop = "POST /api/jobs/", "POST /api/jobs/ID/stop"
    with Proxy(cluster.ray.address, {stop: stops}, lost=(submit,)) as proxy:
        launcher = _launcher(cluster, address=proxy.address)
        launch = _launch(launcher, "family", text=str(tmp_path), number=1)
    assert type(launch.error) is ClusterUnavailableError
    assert "HTTP 502" in str(launch.error)
    told = [text for text in launch.messages(logging.WARNING) if "may still run" in text]
    running = [one for one in cluster.ray.ask("/api/jobs/") if one["status"] in _NOT_ENDED]
    if stops == 2:
        assert (told, running) == ([], [])
        return
    (job,) = running
    command = f"`ray job stop {job['submission_id']} --address {proxy.address}`"
    assert command in told[0]
    client = JobSubmissionClient(cluster.ray.address)
    client.stop_job(job["submission_id"])
    assert _eventually(lambda: client.get_job_status(job["submission_id"]).is_terminal(), 30)


def test_a_log_that_fails_takes_no_result_along():
    """Dagster's database may be away for a moment, and the result is behind the line."""

    class Failing:
        def log(self, *_: object) -> None:
            raise ConnectionError

        warning = log

    taken: list[Any] = []
    reader = ray_log.JobLog(cast("Any", Failing()), cast("Any", SimpleNamespace()), ())
    reader._handler = cast("Any", SimpleNamespace(handle_message=taken.append))
    message = {"__dagster_pipes_version": "0.1", "method": "report_custom_message", "params": {}}
    reader._take(f"a line\n{json.dumps(message)}\n")
    assert taken == [message]


def test_snapshots_lie_on_the_disk_for_scratch():
    """A temporary folder may be small, or memory."""
    settings = RaySettings(address="http://x:1", scratch="/mnt/nvme")
    assert ray._environment(settings)["TENSORIZE_SNAPSHOT_CACHE"] == "/mnt/nvme/snapshots"
    named = settings.model_copy(update={"env": {"TENSORIZE_SNAPSHOT_CACHE": "/other"}})
    assert ray._environment(named)["TENSORIZE_SNAPSHOT_CACHE"] == "/other"


def test_a_cluster_that_is_not_there_is_named():
    """The most frequent mistake, and a head that restarts."""
    launcher = RayLauncher(settings=RaySettings(address="http://127.0.0.9:9"))
    launch = _launch(launcher, "answer")
    assert type(launch.error) is ClusterUnavailableError
    assert "the Ray cluster at http://127.0.0.9:9 does not answer" in str(launch.error)


def test_what_no_node_can_hold_is_refused_at_once(cluster: Cluster):
    """Ray itself would wait for a node that never comes."""
    request = ReloadRequest(
        model="org/fake",
        suffix="v1",
        tensor_parallel_size=4,
        dtype="bfloat16",
        device="cuda",
        prompts=("x",),
        root="/root",
        directory="x",
        companions=(),
    )
    resources = RankResources(cpu=0.25, memory="1Gi", custom={"fast_disk": 1})
    start = time.monotonic()
    launch = _launch(_launcher(cluster), request, ReloadResult, resources=resources)
    assert type(launch.error) is ClusterUnavailableError
    assert "can hold 1 CPU, 4.3 GB of memory, 4 GPU, 4 fast_disk" in str(launch.error)
    assert "127.0.0.3 has 1 CPU, " in str(launch.error)
    assert time.monotonic() - start < 10


def test_secrets_without_a_key_are_refused(cluster: Cluster):
    """They would stand in the dashboard in plain text."""
    launcher = _launcher(cluster, worker_public_key=None)
    launch = _launch(launcher, "overhear", secrets={"data-key": _SECRET})
    assert type(launch.error) is PreflightError
    assert "set worker_public_key of launchers.ray" in str(launch.error)


def test_a_root_that_nodes_do_not_see_is_refused(cluster: Cluster, tmp_path: Path):
    """Each node would write its shard onto its own disk."""
    launcher = _launcher(cluster, shared_disks=False)
    launch = _launch(launcher, _shard(tmp_path), ShardResult)
    assert type(launch.error) is PreflightError
    assert "use an s3:// root" in str(launch.error)


@pytest.fixture
def orchestrator(cluster: Cluster, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A Dagster process in the middle of a step whose worker has started three processes."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fake_workers.orchestrate_ray", cluster.ray.address, str(tmp_path)],
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
        for number in _family(tmp_path):
            os.kill(number, signal.SIGKILL)


def test_a_cancel_ends_every_process(orchestrator: subprocess.Popen[bytes], tmp_path: Path):
    """Also those that ignore SIGTERM, left the worker's session or lost their parent."""
    assert len(_family(tmp_path)) == 3
    orchestrator.send_signal(signal.SIGTERM)
    assert orchestrator.wait(20) != 0
    assert _family(tmp_path) == []
    assert tmp_path.with_suffix(".cleaned").exists(), "the task could not remove its scratch"


def test_a_job_ends_after_dagster_was_killed(
    cluster: Cluster, orchestrator: subprocess.Popen[bytes], tmp_path: Path
):
    """Nobody would take its result, and its node would be taken: the next launch stops it."""
    orchestrator.kill()
    orchestrator.wait()
    assert len(_family(tmp_path)) == 3
    ended = tmp_path.with_suffix(".run").read_text()
    launch = _launch(_launcher(cluster), "answer", ended=ended)
    assert launch.report is not None, launch.error
    assert any("its launcher is gone" in text for text in launch.messages(logging.WARNING))
    assert _eventually(lambda: _family(tmp_path) == [])


@pytest.mark.engine
def test_a_build_goes_on_when_a_node_is_lost(cluster: Cluster, tiny_models: Path, tmp_path: Path):
    """TP=2, a rank a node; one is killed while it builds, and the other one does both.

    The files are those of a build in one process.
    """
    nodes = cluster.nodes()
    scratch, held = tmp_path / "nodes", [tmp_path / "held-0", tmp_path / "held-1"]
    request = ShardRequest(
        model="tiny/llama",
        suffix="tp2",
        snapshot=SnapshotSource(folder=str(tiny_models / "llama")),
        root=str(tmp_path / "root"),
        directory="vllm/tiny/llama/tp2",
        scratch_dir="/of/another/machine",
        dtype="bfloat16",
        tensor_parallel_size=2,
    )
    # Both ranks wait in the middle of their work.
    written = "tensorize_assets.worker.write_shard:write_shard"
    rules = [Rule(written, "after", "hold", str(file)) for file in held]
    launcher = _launcher(
        cluster,
        module="tensorize_assets.worker.ray_ranks",
        scratch=str(scratch),
        env=environment(rules, *map(Path, _PYTHONPATH.split(os.pathsep))),
    )

    def kill() -> None:
        killed.append(_eventually(lambda: all(f.exists() and f.read_text() for f in held), 90))
        # The job's own process is on the head. Its queue of the ranks' words should be as well, but
        # Ray mixes up nodes that share a machine: that one is spared. Those of jobs before end.
        killed.append(_eventually(lambda: len(cluster.ray.nodes_of("_QueueActor")) == 1))
        spared = cluster.ray.nodes_of("_QueueActor")
        (lost, *_) = [node for node in nodes if node.address not in spared]
        lost.kill()
        for file in held:
            file.with_name(f"{file.name}.go").touch()

    killed: list[bool] = []
    killer = threading.Thread(target=kill)
    killer.start()
    launch = _launch(launcher, request, ShardResult)
    killer.join()
    assert killed == [True, True]
    assert launch.report is not None, launch.error
    infos = launch.messages(logging.INFO)
    assert len([text for text in infos if ": on node " in text]) == 3
    here = {"root": str(tmp_path / "alone"), "scratch_dir": str(tmp_path / "scratch")}
    alone = _launch(SubprocessLauncher(), request.model_copy(update=here), ShardResult)
    assert alone.report is not None, alone.error
    same = {"seconds": {}}
    one, other = launch.report.result, alone.report.result
    assert one.model_copy(update=same) == other.model_copy(update=same)
    for file in one.files:
        built, expected = (
            (tmp_path / root / request.directory / file.path).read_bytes()
            for root in ("root", "alone")
        )
        assert built == expected


def test_a_worker_whose_node_is_lost_may_be_tried_again(cluster: Cluster, tmp_path: Path):
    """A step's retry finds another node."""
    nodes = cluster.nodes()

    def kill() -> None:
        assert _eventually(lambda: len(list(tmp_path.iterdir())) == 3, 60)
        # One of the three has lost its parent, and is no node's.
        ours = {int(path.name) for path in tmp_path.iterdir()}
        (lost,) = [node for node in nodes if ours & {one.pid for one in node.processes()}]
        lost.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    launch = _launch(_launcher(cluster, timeout_s=90), "family", text=str(tmp_path), number=1)
    killer.join()
    assert type(launch.error) is WorkerKilledError
    assert "Most likely its node is gone" in str(launch.error)
    for pid in _family(tmp_path):
        os.kill(pid, signal.SIGKILL)


def test_versions_are_the_settings_or_those_beside_dagster(cluster: Cluster):
    """A build's id has them, before any worker was asked."""
    versions = {"vllm": "0.31.0", "torch": "2.13.0", "tensorizer": "2.10.1"}
    assert _launcher(cluster, versions=versions).versions() == versions
    assert _launcher(cluster).versions().keys() == versions.keys()
