"""The launcher against a fake API server: real HTTP, real worker processes, real log streams."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import dagster as dg
import pytest

import tensorize_assets
from tensorize_assets.core import sealing
from tensorize_assets.core.errors import (
    ClusterUnavailableError,
    PreflightError,
    StoreUnavailableError,
    WorkerError,
    WorkerKilledError,
)
from tensorize_assets.core.launcher_k8s import K8sSettings
from tensorize_assets.core.protocol import WorkerRequest, WorkerResult, redact
from tensorize_assets.core.tasks import ShardRequest, ShardResult, SnapshotSource
from tensorize_assets.resources.launchers import k8s_cluster, k8s_status, k8s_watch
from tensorize_assets.resources.launchers.base import LaunchReport
from tensorize_assets.resources.launchers.k8s import K8sLauncher
from tensorize_assets.resources.launchers.local import SubprocessLauncher

_HERE = Path(__file__).parent
sys.path.insert(0, str(_HERE))

from fake_k8s import FakeKubernetes  # noqa: E402
from fake_k8s.pods import FakePod, Node  # noqa: E402
from fake_workers.messages import FakeRequest, FakeResult  # noqa: E402

_IMAGE = "registry.example/worker:1"
_IMAGE_ENV = {
    "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
    "PYTHONPATH": os.pathsep.join([str(_HERE), str(Path(tensorize_assets.__file__).parents[1])]),
}
_SECRET = b"correct-horse-battery-staple-0001"


class Launch(NamedTuple):
    """What one launch gave: a report or an error, and the step's log as (level, message)."""

    report: LaunchReport[Any] | None
    error: Exception | None
    log: list[tuple[int, str]]
    seconds: float

    def messages(self, level: int) -> list[str]:
        return [message for at, message in self.log if at == level]


@pytest.fixture
def cluster() -> Iterator[FakeKubernetes]:
    """A cluster of one node, after which no pod may be left."""
    with FakeKubernetes(images={_IMAGE}, env=_IMAGE_ENV) as running:
        yield running
        assert list(running.pods) == []


def _settings(cluster: FakeKubernetes, **fields: Any) -> K8sSettings:
    defaults: dict[str, Any] = {
        "image": _IMAGE,
        "command": ("python", "-m", "fake_workers.worker"),
        "kubeconfig": str(cluster.kubeconfig),
        "poll_interval_s": 0.2,
        "terminate_grace_s": 1,
    }
    return K8sSettings.model_validate({**defaults, **fields})


def _launch(
    cluster: FakeKubernetes,
    task: str,
    text: str = "",
    number: int = 0,
    **more: Any,
) -> Launch:
    """Run a fake task in a pod."""
    request = FakeRequest(task=task, text=text, number=number)
    return _run(cluster, request, FakeResult, **more)


def _run(
    cluster: FakeKubernetes,
    request: WorkerRequest,
    result_type: type[WorkerResult],
    *,
    secrets: Mapping[str, bytes] | None = None,
    meanwhile: Callable[[FakePod], object] | None = None,
    instance: dg.DagsterInstance | None = None,
    **settings: Any,
) -> Launch:
    """Run a worker in an asset; `meanwhile` is called with the pod once its worker says so."""
    launcher = K8sLauncher(settings=_settings(cluster, **settings))
    outcome: list[LaunchReport[Any] | Exception] = []

    @dg.asset
    def launched(context: dg.AssetExecutionContext) -> dg.MaterializeResult[Any]:
        try:
            outcome.append(launcher.run(context, request, result_type, secrets=secrets))
        except Exception as error:
            outcome.append(error)
            raise
        return dg.MaterializeResult()

    thread = None
    if meanwhile is not None:
        thread = threading.Thread(target=lambda: meanwhile(_busy_pod(cluster)))
        thread.start()
    start = time.monotonic()
    with ExitStack() as stack:
        instance = instance or stack.enter_context(dg.DagsterInstance.ephemeral())
        run = dg.materialize([launched], instance=instance, raise_on_error=False)
        seconds = time.monotonic() - start
        log = [
            (int(entry.level), str(entry.user_message))
            for entry in instance.all_logs(run.run_id)
            if entry.dagster_event is None
        ]
    if thread is not None:
        thread.join()
    (result,) = outcome
    if isinstance(result, Exception):
        return Launch(None, result, log, seconds)
    return Launch(result, None, log, seconds)


def _busy_pod(cluster: FakeKubernetes) -> FakePod:
    """A pod whose worker is at its task, and has said so in its log."""
    pod = cluster.only_pod()
    assert _eventually(lambda: pod.log_holds(b"at it"))
    return pod


def _eventually(condition: Callable[[], bool], timeout_s: float = 30) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_a_result_comes_back(cluster: FakeKubernetes):
    """The plain case: a pod, its log as the step's, the typed result, and no pod any more."""
    launch = _launch(cluster, "answer", text="what", number=2)
    assert launch.report is not None, launch.error
    assert launch.report.result == FakeResult(text="what", numbers=(0.5, 0.5))
    assert "asked what" in launch.messages(logging.INFO)
    assert launch.messages(logging.WARNING) == []
    (pod,) = cluster.made
    assert pod["metadata"]["labels"]["tensorize-assets/task"] == "answer"


def test_a_result_of_megabytes_arrives_whole_through_a_log_that_breaks(cluster: FakeKubernetes):
    """Kubelets cut long lines, connections cut them elsewhere, and end when a kubelet restarts."""
    cluster.break_logs_after = 1_000_000
    launch = _launch(cluster, "answer_beside_noise", number=1_000_000)
    assert launch.report is not None, launch.error
    assert len(launch.report.result.numbers) == 1_000_000
    assert launch.messages(logging.DEBUG).count("before") == 1
    assert any(pod.log_broken for pod in cluster.ever)


def test_a_request_of_megabytes_arrives(cluster: FakeKubernetes):
    """The tensors of a large model, to be encrypted; Linux takes no variable of that length."""
    text = os.urandom(400_000).hex()
    launch = _launch(cluster, "measure", text=text)
    assert launch.report is not None, launch.error
    assert launch.report.result.text == str(len(text))
    assert all(len(one["value"]) < 1 << 17 for one in _container(cluster)["env"])


def test_a_request_that_no_pod_holds_is_refused(cluster: FakeKubernetes):
    """Rather than by etcd, in words of its own."""
    launch = _launch(cluster, "measure", text=os.urandom(1_000_000).hex())
    assert isinstance(launch.error, PreflightError)
    assert "launcher: subprocess" in str(launch.error)
    assert cluster.made == []


def test_the_worker_s_own_failures_are_told_as_by_a_subprocess(cluster: FakeKubernetes):
    """What is retried and what is not must not depend on where the worker ran."""
    refused = _launch(cluster, "refuse").error
    assert isinstance(refused, PreflightError)
    assert "2 KV heads do not divide by 3 ranks" in str(refused)
    assert isinstance(_launch(cluster, "lose_the_store").error, StoreUnavailableError)
    crash = _launch(cluster, "crash")
    assert type(crash.error) is WorkerError
    assert "KeyError: 'lm_head'" in str(crash.error)
    assert str(crash.error).endswith("ValueError: rank 1 is the cause")


def test_an_image_that_is_not_there_fails_at_once(cluster: FakeKubernetes):
    """Kubernetes would try for ever; the name does not come right by waiting."""
    launch = _launch(cluster, "answer", image="registry.example/wroker:1")
    assert type(launch.error) is WorkerError
    assert not launch.error.retryable
    for part in ("models/dagster-", "node-1", "registry.example/wroker:1", "not found", "image"):
        assert part in str(launch.error)
    assert launch.seconds < 5


def test_a_registry_that_does_not_answer_is_waited_for(cluster: FakeKubernetes):
    """It says nothing about the image, and registries come back."""
    cluster.registry_error = "dial tcp 10.0.0.1:443: i/o timeout"
    timer = threading.Timer(1, lambda: setattr(cluster, "registry_error", None))
    timer.start()
    assert _launch(cluster, "answer").report is not None


def test_out_of_memory_says_how_much_it_had(cluster: FakeKubernetes):
    """The commonest failure: the limit is what has to be changed."""
    launch = _launch(cluster, "grow", number=300_000_000, resources={"memory": "200Mi"})
    assert isinstance(launch.error, WorkerKilledError)
    assert launch.error.retryable
    for part in ("OOMKilled", "200Mi", "`memory`", "node-1", "at it"):
        assert part in str(launch.error)


def test_an_eviction_is_tried_again_and_says_of_what(cluster: FakeKubernetes):
    """Of the disk, most often: the error names the setting that is about it."""
    said = "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi."
    launch = _launch(cluster, "stay", meanwhile=lambda pod: pod.evict(said))
    assert isinstance(launch.error, WorkerKilledError)
    for part in (said, "`ephemeral_storage`", "node-1", "at it"):
        assert part in str(launch.error)
    assert launch.seconds < 10


def test_a_pod_that_is_deleted_from_outside_is_tried_again(cluster: FakeKubernetes):
    """A drained node, with the reason that the API gives for it."""
    because = ("EvictionByEvictionAPI", "Eviction API: evicting")
    launch = _launch(cluster, "stay", meanwhile=lambda pod: pod.delete(30, because))
    assert isinstance(launch.error, WorkerKilledError)
    for part in ("deleted from outside", *because, "at it"):
        assert part in str(launch.error)
    assert launch.seconds < 10


def test_a_pod_that_is_gone_without_a_word_is_noticed(cluster: FakeKubernetes):
    """`kubectl delete --force`: there is nothing left to ask."""
    launch = _launch(cluster, "stay", meanwhile=lambda pod: pod.delete(0))
    assert isinstance(launch.error, WorkerKilledError)
    assert "deleted from outside" in str(launch.error)
    assert launch.seconds < 10


def test_a_lost_node_is_noticed_and_its_pod_removed_by_force(cluster: FakeKubernetes):
    """Its log stays open and silent, and it never ends by itself."""
    launch = _launch(cluster, "stay", meanwhile=lambda pod: pod.lose_node())
    assert isinstance(launch.error, WorkerKilledError)
    assert "DeletionByTaintManager" in str(launch.error)
    assert "gracePeriodSeconds=0" in " ".join(cluster.requests)


def test_a_killed_worker_is_tried_again_and_a_crashed_one_is_not(cluster: FakeKubernetes):
    """A SIGKILL came from outside; a segmentation fault would come again."""
    killed = _launch(cluster, "send_signal", number=signal.SIGKILL).error
    assert isinstance(killed, WorkerKilledError)
    assert "SIGKILL" in str(killed)
    crashed = _launch(cluster, "send_signal", number=signal.SIGSEGV).error
    assert type(crashed) is WorkerError
    assert "SIGSEGV" in str(crashed)
    # What faulthandler printed.
    assert "Segmentation fault" in str(crashed)


def test_a_worker_that_leaves_without_a_word_is_an_error(cluster: FakeKubernetes):
    """Dagster's own client takes exit code 0 for success."""
    for code in (0, 3):
        error = _launch(cluster, "leave", number=code).error
        assert type(error) is WorkerError
        assert f"exit code {code} and no result" in str(error)
        assert "about to leave" in str(error)


def test_a_worker_that_takes_too_long_is_ended(cluster: FakeKubernetes):
    """By the kubelet, at the pod's own deadline: it holds when Dagster is gone, too."""
    launch = _launch(cluster, "stay", timeout_s=2)
    assert type(launch.error) is WorkerError
    assert "timeout_s" in str(launch.error)
    assert "at it" in str(launch.error)


def test_a_pod_that_no_node_takes_fails_when_its_time_is_over(cluster: FakeKubernetes):
    """In the scheduler's words; meanwhile the step's log says what it waits for."""
    launch = _launch(
        cluster,
        "answer",
        unschedulable_timeout_s=1,
        resources={"custom": {"nvidia.com/gpu": 4}},
    )
    assert isinstance(launch.error, ClusterUnavailableError)
    assert launch.error.retryable
    assert "Insufficient nvidia.com/gpu" in str(launch.error)
    assert "unschedulable_timeout_s" in str(launch.error)
    assert any("waits for a node" in message for message in launch.messages(logging.WARNING))


def test_a_node_that_comes_in_time_is_taken(cluster: FakeKubernetes):
    """An autoscaler takes minutes."""
    cluster.node = None
    timer = threading.Timer(1, lambda: setattr(cluster, "node", Node("node-7")))
    timer.start()
    assert _launch(cluster, "answer").report is not None


def test_a_missing_secret_is_named(cluster: FakeKubernetes, monkeypatch: pytest.MonkeyPatch):
    """It shows among events only: the pod would create its container for ever."""
    _patience(monkeypatch)
    launch = _launch(cluster, "answer", worker_key_secret="worker-kye")
    assert type(launch.error) is WorkerError
    assert '"worker-kye" not found' in str(launch.error)


def test_a_container_that_cannot_be_started_fails(
    cluster: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
):
    """Kubernetes would not give up: an image whose user is root, say."""
    _patience(monkeypatch)
    cluster.start_error = "container has runAsNonRoot and image will run as root"
    launch = _launch(cluster, "answer")
    assert type(launch.error) is WorkerError
    assert "CreateContainerConfigError" in str(launch.error)
    assert "image will run as root" in str(launch.error)


def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(k8s_status, "_SETTLE_S", 0.5)
    monkeypatch.setattr(k8s_watch, "_EVENTS_AFTER_S", 0.1)


def test_what_the_api_refuses_is_not_tried_again(cluster: FakeKubernetes):
    """An admission policy's own words are the useful ones."""
    cluster.refusal = (403, 'pods "x" is forbidden: violates PodSecurity "restricted"')
    launch = _launch(cluster, "answer")
    assert type(launch.error) is WorkerError
    assert 'violates PodSecurity "restricted"' in str(launch.error)
    cluster.refusal = (403, 'pods "x" is forbidden: exceeded quota: gpus')
    assert isinstance(_launch(cluster, "answer").error, ClusterUnavailableError)


def test_an_api_server_that_fails_for_a_while_is_asked_again(
    cluster: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
):
    """At every call: an upgrade of the control plane must fail no build of hours."""
    _quick_retries(monkeypatch)
    cluster.fail_next(3)
    launch = _launch(cluster, "stay", number=2, meanwhile=lambda pod: cluster.fail_next(3, 503))
    assert launch.report is not None, launch.error
    assert len(cluster.made) == 1


def test_a_cluster_that_is_away_is_an_error_that_may_pass(
    cluster: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
):
    """And so tells the step to come back."""
    _quick_retries(monkeypatch)
    cluster.kubeconfig.write_text(cluster.kubeconfig.read_text().replace(cluster.url, _nowhere()))
    launch = _launch(cluster, "answer")
    assert isinstance(launch.error, ClusterUnavailableError)
    assert "does not answer" in str(launch.error)


def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(k8s_cluster, "_RETRIES", k8s_cluster._RETRIES.new(backoff_factor=0.01))


def _nowhere() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_without_a_way_to_a_cluster_it_says_what_to_set(cluster: FakeKubernetes):
    """The commonest mistake of a first try."""
    launch = _launch(cluster, "answer", kubeconfig=str(cluster.folder / "absent"))
    assert type(launch.error) is WorkerError
    assert "launchers.k8s.kubeconfig" in str(launch.error)


@pytest.mark.fault("Secrets", "secrets of a worker that is a pod", "sealed in its request")
def test_secrets_are_sealed_on_their_way(cluster: FakeKubernetes):
    """A pod's spec can be read by whoever may list pods; so can its log."""
    keys = sealing.generate_private_key(cluster.folder / "key")
    cluster.secrets["worker-key"] = {"private-key": (cluster.folder / "key").read_bytes()}
    launch = _launch(
        cluster,
        "reveal",
        secrets={"data-key": _SECRET},
        worker_public_key=keys.public_key,
        worker_key_secret="worker-key",
    )
    assert launch.report is not None, launch.error
    assert f"length {len(_SECRET)}" in launch.report.result.text
    everything = json.dumps(cluster.made) + launch.report.result.text + str(launch.log)
    assert redact(everything, (_SECRET,)) == redact(everything)
    assert "logged ***" in launch.messages(logging.INFO)


def test_a_secret_that_the_worker_prints_or_raises_is_hidden(cluster: FakeKubernetes):
    """In the error, its traceback and the lines behind it."""
    keys = sealing.generate_private_key(cluster.folder / "key")
    cluster.secrets["worker-key"] = {"private-key": (cluster.folder / "key").read_bytes()}
    launch = _launch(
        cluster,
        "reveal",
        number=1,
        secrets={"data-key": _SECRET},
        worker_public_key=keys.public_key,
        worker_key_secret="worker-key",
    )
    assert "raised ***" in str(launch.error)
    everything = str(launch.error) + str(launch.log)
    assert redact(everything, (_SECRET,)) == redact(everything)


def test_secrets_without_a_key_to_seal_them_to_are_refused(cluster: FakeKubernetes):
    """Before a pod is made, with what to set."""
    launch = _launch(cluster, "reveal", secrets={"data-key": _SECRET})
    assert isinstance(launch.error, PreflightError)
    assert "worker_public_key" in str(launch.error)
    assert cluster.made == []


def test_a_wrong_pod_spec_is_named_before_anything_is_made(cluster: FakeKubernetes):
    """A misspelt field would be dropped in silence."""
    launch = _launch(cluster, "answer", pod_spec={"nodeSelectr": {"a": "b"}})
    assert isinstance(launch.error, PreflightError)
    assert "nodeSelectr" in str(launch.error)
    assert cluster.made == []


def test_ranks_are_pods_of_their_own(cluster: FakeKubernetes):
    """Two at once here, merged to what one worker would have answered."""
    launch = _shards(cluster, "works", parallel_ranks=2)
    assert launch.report is not None, launch.error
    assert [shard.rank for shard in launch.report.result.shards] == [0, 1, 2]
    assert [file.size for file in launch.report.result.files] == [1, 2, 3]
    assert len(cluster.made) == 3
    assert cluster.most_at_once <= 2
    # Each its own, where the settings say; the request's is on Dagster's machine.
    scratch = {(cluster.folder / "here" / rank).read_text() for rank in "012"}
    assert len(scratch) == 3
    assert all(folder.endswith("-scratch") for folder in scratch)
    assert not any(Path(folder).exists() for folder in scratch)
    assert "rank 1: [x.py:1] at it" in launch.messages(logging.DEBUG)


def test_a_rank_that_fails_ends_the_others(cluster: FakeKubernetes):
    """Within seconds, and its error is the one that is told."""
    launch = _shards(cluster, "fails-at-1")
    assert type(launch.error) is WorkerError
    assert "rank 1 has no room" in str(launch.error)
    assert len(cluster.made) == 3
    assert launch.seconds < 15


def test_a_root_that_pods_do_not_see_is_refused(cluster: FakeKubernetes):
    """Each rank would write its shard into a pod that is then removed."""
    launch = _shards(cluster, "works", root="/models")
    assert type(launch.error) is PreflightError
    assert "use an s3:// root" in str(launch.error)
    assert cluster.made == []


def _shards(
    cluster: FakeKubernetes, model: str, root: str = "s3://models/prod", **settings: Any
) -> Launch:
    here = cluster.folder / "here"
    here.mkdir()
    request = ShardRequest(
        model=model,
        suffix="v1",
        snapshot=SnapshotSource(folder=str(here)),
        root=root,
        directory="vllm/works/v1",
        scratch_dir="/nowhere",
        dtype="auto",
        tensor_parallel_size=3,
    )
    return _run(cluster, request, ShardResult, **settings)


@pytest.fixture
def orchestrator(cluster: FakeKubernetes) -> Iterator[subprocess.Popen[bytes]]:
    """A Dagster process in the middle of a step that waits for three pods."""
    here = cluster.folder / "here"
    here.mkdir()
    settings = _settings(cluster).model_dump_json()
    process = subprocess.Popen(
        [sys.executable, "-m", "fake_k8s.orchestrate", settings, str(here)],
        env={**os.environ, **_IMAGE_ENV},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert _eventually(lambda: len(list(here.iterdir())) == 3)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_cancel_deletes_every_pod(
    cluster: FakeKubernetes, orchestrator: subprocess.Popen[bytes], number: signal.Signals
):
    """Dagster raises in the main thread, while a thread waits for each pod."""
    assert len(cluster.pods) == 3
    orchestrator.send_signal(number)
    assert orchestrator.wait(20) != 0
    assert list(cluster.pods) == []


def test_the_pods_of_a_launcher_that_was_killed_go_with_the_next_launch(
    cluster: FakeKubernetes, orchestrator: subprocess.Popen[bytes]
):
    """Those of another run only where that is over: it may be waiting for them."""
    orchestrator.kill()
    orchestrator.wait()
    pods = list(cluster.pods.values())
    assert len(pods) == 3
    with dg.DagsterInstance.ephemeral() as instance:
        known = instance.create_run_for_job(_nothing)
        for pod, run_id in zip(pods, (known.run_id, "of-another-dagster"), strict=False):
            pod.labels["tensorize-assets/run-id"] = run_id
        assert _launch(cluster, "answer", instance=instance).report is not None
        assert len(cluster.pods) == 3
        instance.report_run_canceled(known)
        assert _launch(cluster, "answer", instance=instance).report is not None
        assert _eventually(lambda: pods[0].name not in {name for _, name in cluster.pods})
        assert len(cluster.pods) == 2
    for pod in pods[1:]:
        pod.delete(0)


@dg.job
def _nothing() -> None:
    pass


def test_versions_are_the_settings_or_those_beside_dagster(cluster: FakeKubernetes):
    """They are part of the build's identity, which is known before there is a pod."""
    named = {"vllm": "0.32.0", "torch": "2.13.0", "tensorizer": "2.10.1"}
    launcher = K8sLauncher(settings=_settings(cluster, versions=named))
    assert launcher.versions() == named
    beside = K8sLauncher(settings=_settings(cluster)).versions()
    assert beside == SubprocessLauncher().versions()
    assert not K8sLauncher.shares_disks


def _container(cluster: FakeKubernetes) -> dict[str, Any]:
    return cluster.made[-1]["spec"]["containers"][0]
