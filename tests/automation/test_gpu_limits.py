"""Runs take GPUs by their partition's profile, and wait for one another by that."""

import logging
import os
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster._cli.job import _create_run
from dagster._core.definitions.reconstruct import reconstructable
from dagster._core.remote_origin import (
    GrpcServerCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.run_coordinator import SubmitRunContext
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import PythonFileTarget
from dagster._daemon.monitoring.concurrency import execute_concurrency_slots_iteration
from dagster._daemon.monitoring.run_monitoring import execute_run_monitoring_iteration
from dagster._daemon.run_coordinator.queued_run_coordinator_daemon import (
    QueuedRunCoordinatorDaemon,
)

from tensorize_assets.automation.run_coordinator import GpuRunCoordinator
from tensorize_assets.core.catalog import Profile
from tensorize_assets.core.gpus import gpus_of, gpus_of_run
from tensorize_assets.core.tasks import ReferenceRequest, ShardRequest, SnapshotSource

_SETTINGS = Path(__file__).parents[2] / "dagster_home" / "dagster.yaml"
_CATALOG = """\
root: artifacts
models:
  org/a:
    profiles:
      one: {reload_device: cuda}
      two: {reload_device: cuda}
      three: {reload_device: cuda}
      four: {reload_device: cuda}
      tp4: {reload_device: cuda, tensor_parallel_size: 4}
      real: {reload_device: cuda, tensor_parallel_size: 4, sharding: executor}
      cpu: {reload_device: cpu, tensor_parallel_size: 4}
"""
# A run in the queue is of some code location, which here is never asked.
_ORIGIN = RemoteJobOrigin(
    RemoteRepositoryOrigin(GrpcServerCodeLocationOrigin(host="127.0.0.1", port=1), "x"), "nothing"
)
# Stands in for the chain: an asset of its name, partitions and pool, which goes on when it may.
_CODE = """\
import os
import time
from pathlib import Path

import dagster as dg

from tensorize_assets.assets.reload_check import reload_check as real
from tensorize_assets.partitions import model_suffix

HERE = Path(__file__).parent


@dg.asset(partitions_def=model_suffix, pool=real.op.pool)
def reload_check(context):
    (HERE / f"{context.run_id}.started").write_text(str(os.getpid()))
    while not (HERE / f"{context.run_id}.go").exists():
        time.sleep(0.05)


job = dg.define_asset_job("build", [reload_check], executor_def=dg.in_process_executor)
defs = dg.Definitions([reload_check], jobs=[job])
"""


@pytest.fixture
def home(tmp_path: Path, empty_instance: Path) -> Path:
    """A Dagster home with the settings of ours, but that one GPU is all there is."""
    shutil.copytree(empty_instance, tmp_path, dirs_exist_ok=True)
    settings = yaml.safe_load(_SETTINGS.read_text())
    settings["concurrency"]["runs"]["tag_concurrency_limits"] = [
        {"key": "gpus", "value": "1", "limit": 1}
    ]
    settings["run_monitoring"]["free_slots_after_run_end_seconds"] = 1
    settings["run_retries"] = {"enabled": False}
    (tmp_path / "dagster.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "models.yaml").write_text(_CATALOG)
    (tmp_path / "code.py").write_text(_CODE)
    return tmp_path


@pytest.fixture
def instance(home: Path) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.from_config(str(home)) as found:
        yield found


def _tags(suffix: str, model: str = "org--a") -> dict[str, str]:
    return {
        "dagster/partition": f"{model}|{suffix}",
        "dagster/partition/model": model,
        "dagster/partition/suffix": suffix,
    }


def _queued(
    instance: dg.DagsterInstance, tags: Mapping[str, str], **fields: Any
) -> Mapping[str, str]:
    """The tags of a run after it came into the queue."""
    run = dg.DagsterRun(
        job_name="build",
        run_id=str(uuid.uuid4()),
        tags=tags,
        remote_job_origin=_ORIGIN,
        job_code_origin=reconstructable(nothing).get_python_origin(),
        **fields,
    )
    instance.add_run(run)
    coordinator = instance.run_coordinator
    assert isinstance(coordinator, GpuRunCoordinator)
    queued = coordinator.submit_run(SubmitRunContext(run, workspace=None))  # pyright: ignore[reportArgumentType]
    assert queued.status is dg.DagsterRunStatus.QUEUED
    return queued.tags


@dg.job
def nothing():
    pass


@pytest.mark.parametrize(
    ("suffix", "assets", "expected"),
    [
        ("one", None, "1"),
        ("tp4", None, "4"),
        ("tp4", ["hf_snapshot", "reload_check"], "4"),
        ("tp4", ["hf_snapshot", "tensorized_shards", "artifact"], None),
        ("real", ["tensorized_shards"], "4"),
        ("cpu", None, None),
    ],
)
def test_a_run_takes_what_its_partition_computes_on(
    instance: dg.DagsterInstance, suffix: str, assets: list[str] | None, expected: str | None
):
    """Virtual builds take none, and a run of a few assets only what these take."""
    selection = None if assets is None else frozenset(map(dg.AssetKey, assets))
    assert _queued(instance, _tags(suffix), asset_selection=selection).get("gpus") == expected


def test_a_tag_that_a_run_has_stays(instance: dg.DagsterInstance):
    """Whoever launches it may know better."""
    assert _queued(instance, {**_tags("tp4"), "gpus": "2"})["gpus"] == "2"


def test_a_run_that_is_tried_again_takes_what_its_profile_says_now(
    home: Path, instance: dg.DagsterInstance
):
    """Dagster copies its parent's tags, and somebody may have changed the ranks meanwhile."""
    parent = dg.DagsterRun("build", str(uuid.uuid4()), tags={**_tags("tp4"), "gpus": "4"})
    instance.add_run(parent)
    again = {**parent.tags}
    changed = _CATALOG.replace("parallel_size: 4", "parallel_size: 8")
    (home / "models.yaml").write_text(changed)

    def queued(tags: Mapping[str, str]) -> str:
        group = {"parent_run_id": parent.run_id, "root_run_id": parent.run_id}
        return _queued(instance, tags, **group)["gpus"]

    assert queued(again) == "8"
    assert queued({**again, "gpus": "2"}) == "2", "a person set it"
    (home / "models.yaml").unlink()
    assert queued(again) == "4"


def test_a_catalog_that_is_not_seen_is_a_warning(
    home: Path, instance: dg.DagsterInstance, caplog: pytest.LogCaptureFixture
):
    """Of every run the limit is missed, and nothing else says so."""
    _queued(instance, _tags("unknown"))
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
    (home / "models.yaml").unlink()
    _queued(instance, _tags("one"))
    (said,) = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert "queued without the tag gpus" in said.getMessage()
    assert str(home / "models.yaml") in said.getMessage()


def test_nothing_keeps_a_run_out_of_the_queue(
    home: Path, instance: dg.DagsterInstance, caplog: pytest.LogCaptureFixture
):
    """It is a limit that is missed then; the run itself says what is wrong."""
    assert "gpus" not in _queued(instance, {})
    assert "gpus" not in _queued(instance, _tags("unknown"))
    assert "gpus" not in _queued(instance, _tags("one", "org--unknown"))
    assert "gpus" not in _queued(instance, _tags("one", "?"))
    (home / "models.yaml").write_text("models: [")
    assert "gpus" not in _queued(instance, _tags("one"))
    (home / "models.yaml").unlink()
    assert "gpus" not in _queued(instance, _tags("one"))
    (home / "models.yaml").mkdir()
    assert "gpus" not in _queued(instance, _tags("one"))


@pytest.mark.parametrize(
    ("sharding", "device", "expected"),
    [("virtual", "cpu", 0), ("executor", "cpu", 0), ("executor", "cuda", 4)],
)
def test_a_shard_request_takes_gpus_where_its_ranks_are_on_them(
    sharding: Any, device: Any, expected: int
):
    """What the launchers ask their clusters for."""
    request = ShardRequest(
        model="org/a",
        suffix="v1",
        snapshot=SnapshotSource(folder="/x"),
        root="/x",
        directory="x",
        scratch_dir="/x",
        dtype="auto",
        tensor_parallel_size=4,
        sharding=sharding,
        device=device,
    )
    assert gpus_of(request) == expected


@pytest.mark.parametrize(("device", "expected"), [("cpu", 0), ("cuda", 4)])
def test_an_engine_takes_a_gpu_a_rank(device: Any, expected: int):
    """And the run of its profile is counted with as many."""
    request = ReferenceRequest(
        model="org/a",
        suffix="v1",
        snapshot=SnapshotSource(folder="/x"),
        tensor_parallel_size=4,
        dtype="auto",
        device=device,
        prompts=("x",),
    )
    assert gpus_of(request) == expected
    assert gpus_of_run(Profile(reload_device=device, tensor_parallel_size=4), None) == expected


class Daemon:
    """The daemon's queue and monitoring, an iteration at a time, and a code server."""

    def __init__(self, home: Path, instance: dg.DagsterInstance, context: Any) -> None:
        self._home = home
        self._instance = instance
        self._context = context
        self._queue = QueuedRunCoordinatorDaemon(interval_seconds=1)
        self._log = logging.getLogger("monitoring")

    def launch(self, suffix: str) -> str:
        """Submit a run as the UI does; returns its id."""
        request = self._context.create_request_context()
        (location,) = request.code_locations
        (repository,) = location.get_repositories().values()
        run = _create_run(
            self._instance,
            location,
            repository,
            repository.get_full_job("build"),
            {},
            _tags(suffix),
            None,
            None,
        )
        return self._instance.submit_run(run.run_id, request).run_id

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            self.iterate()
            time.sleep(0.1)

    def iterate(self) -> None:
        list(self._queue.run_iteration(self._context))
        list(execute_run_monitoring_iteration(self._context, self._log))
        list(execute_concurrency_slots_iteration(self._context, self._log))

    def status(self, run: str) -> dg.DagsterRunStatus:
        found = self._instance.get_run_by_id(run)
        assert found is not None
        return found.status

    def process(self, run: str) -> int | None:
        """The number of a run's process once its step has begun."""
        started = self._home / f"{run}.started"
        return int(started.read_text() or 0) or None if started.exists() else None

    def let_go(self, run: str) -> None:
        (self._home / f"{run}.go").touch()


@pytest.fixture
def daemon(home: Path, instance: dg.DagsterInstance) -> Iterator[Daemon]:
    instance.add_dynamic_partitions("tensorize_model", ["org--a"])
    instance.add_dynamic_partitions("tensorize_suffix", ["one", "two", "three", "four"])
    target = PythonFileTarget(
        str(home / "code.py"), attribute=None, working_directory=str(home), location_name=None
    )
    with WorkspaceProcessContext(instance, target) as context:
        yield Daemon(home, instance, context)


def test_two_runs_take_turns_on_one_gpu(daemon: Daemon, instance: dg.DagsterInstance):
    """The second waits until the first ends, is cancelled or crashes; its slots come back."""
    first, second, third, fourth = (daemon.launch(name) for name in ("one", "two", "three", "four"))

    def waits(run: str) -> bool:
        for _ in range(3):
            daemon.iterate()
        return daemon.status(run) is dg.DagsterRunStatus.QUEUED

    daemon.until(lambda: daemon.process(first) is not None)
    assert waits(second)
    daemon.let_go(first)
    daemon.until(lambda: daemon.process(second) is not None)
    assert daemon.status(first) is dg.DagsterRunStatus.SUCCESS

    assert waits(third)
    instance.run_coordinator.cancel_run(second)
    daemon.until(lambda: daemon.process(third) is not None)
    assert daemon.status(second) is dg.DagsterRunStatus.CANCELED

    assert waits(fourth)
    pid = daemon.process(third)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    daemon.until(lambda: daemon.process(fourth) is not None)
    assert daemon.status(third) is dg.DagsterRunStatus.FAILURE
    daemon.let_go(fourth)
    daemon.until(lambda: daemon.status(fourth) is dg.DagsterRunStatus.SUCCESS)
