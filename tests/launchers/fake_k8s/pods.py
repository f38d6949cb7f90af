"""A pod: where it runs, its container as a process, its log as the kubelet keeps it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import psutil
from dagster_pipes import DAGSTER_PIPES_CONTEXT_ENV_VAR, decode_param, encode_param

from tensorize_assets.core import processes
from tensorize_assets.core.protocol import LAUNCH_VARIABLE
from tensorize_assets.core.rank_resources import bytes_of

if TYPE_CHECKING:
    from fake_k8s.server import FakeKubernetes

# Container runtimes cut a line of one stream at this many bytes.
_PIECE = 16 << 10
_MEMORY_EVERY_S = 0.05
_REPORTED_S = 1.0


@dataclass
class Node:
    """What a node has; a pod that asks for more finds none."""

    name: str = "node-1"
    has: dict[str, int] = field(default_factory=dict)


class FakePod:
    """Started, it goes through what a real one does: node, image, container, end."""

    def __init__(
        self, cluster: FakeKubernetes, namespace: str, name: str, uid: str, body: dict[str, Any]
    ) -> None:
        self.namespace = namespace
        self.name = name
        self.labels: dict[str, str] = body["metadata"].get("labels") or {}
        self.log_sent = 0
        self.log_broken = False
        self._cluster = cluster
        self._body = body
        self._uid = uid
        self._created = _timestamp()
        self._container: dict[str, Any] = body["spec"]["containers"][0]
        self._changed = threading.Condition()
        self._log: list[tuple[float, bytes]] = []
        self._log_closed = False
        self._status: dict[str, Any] = {"phase": "Pending", "conditions": []}
        self._node: str | None = None
        self._deleted_at: str | None = None
        self._lost = False
        self._process: subprocess.Popen[bytes] | None = None
        self._launch = os.urandom(8).hex()
        self._folders: list[Path] = []
        self._end: dict[str, Any] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def has_log(self) -> bool:
        return self._process is not None

    def log_holds(self, text: bytes) -> bool:
        with self._changed:
            return text in b"".join(piece for _, piece in self._log)

    def as_dict(self) -> dict[str, Any]:
        metadata = {
            **self._body["metadata"],
            "namespace": self.namespace,
            "uid": self._uid,
            "creationTimestamp": self._created,
        }
        if self._deleted_at is not None:
            metadata["deletionTimestamp"] = self._deleted_at
        spec = {**self._body["spec"]}
        if self._node is not None:
            spec["nodeName"] = self._node
        return {**self._body, "metadata": metadata, "spec": spec, "status": {**self._status}}

    # What happens to a pod.

    def start(self) -> None:
        threading.Thread(target=self._live, name=self.name, daemon=True).start()

    def delete(self, grace_s: int | None, because: tuple[str, str] | None = None) -> None:
        """As the API does it: at once only with a grace of 0, otherwise once the process ended."""
        if because is not None:
            self._condition("DisruptionTarget", *because)
        self._deleted_at = _timestamp()
        if grace_s is None:
            grace_s = self._body["spec"].get("terminationGracePeriodSeconds", 30)
        if grace_s == 0:
            self._gone()
        if not self._lost:
            end = threading.Thread(target=self._terminate, args=(grace_s,), daemon=True)
            end.start()

    def evict(self, message: str) -> None:
        """By its node, which is short of something."""
        self._end = {"phase": "Failed", "reason": "Evicted", "message": message}
        self.end_processes()
        if self._process is None:
            self._finish(None)

    def lose_node(self) -> None:
        """The node does not answer: nothing there ends, and the cluster marks the pod."""
        self._lost = True
        message = "Taint manager: deleting due to NoExecute taint"
        self._condition("DisruptionTarget", "DeletionByTaintManager", message)
        self._deleted_at = _timestamp()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """As the kernel or a person on the node does it."""
        assert self._process is not None
        os.kill(self._process.pid, number)

    # Scheduler and kubelet.

    def _live(self) -> None:
        if not self._schedule() or not self._pull() or not self._mount():
            return
        self._run()

    def _schedule(self) -> bool:
        asked = (self._container.get("resources") or {}).get("limits") or {}
        while self._deleted_at is None:
            node = self._cluster.node
            short = [
                name
                for name, amount in asked.items()
                if "/" in name and node is not None and node.has.get(name, 0) < int(amount)
            ]
            if node is not None and not short:
                self._node = node.name
                self._status["conditions"] = [{"type": "PodScheduled", "status": "True"}]
                self._status["startTime"] = _timestamp()
                return True
            lack = "; ".join(f"1 Insufficient {name}" for name in short) or "no nodes"
            message = f"0/{int(node is not None)} nodes are available: {lack}."
            if not self._status["conditions"]:
                self._condition("PodScheduled", "Unschedulable", message, status="False")
                self._cluster.event(self, "FailedScheduling", message)
            time.sleep(0.05)
        self._gone()
        return False

    def _pull(self) -> bool:
        image = self._container["image"]
        turn = 0
        while self._deleted_at is None:
            error = self._cluster.registry_error
            if error is None and image in self._cluster.images:
                return True
            error = error or f"{image}: not found"
            message = f'failed to pull and unpack image "{image}": {error}'
            if turn == 0:
                self._cluster.event(self, "Failed", f'Failed to pull image "{image}": {message}')
            reason = ("ErrImagePull", "ImagePullBackOff")[turn % 2]
            shown = message if turn % 2 == 0 else f'Back-off pulling image "{image}"'
            self._waiting(reason, shown)
            turn += 1
            time.sleep(0.2)
        self._gone()
        return False

    def _mount(self) -> bool:
        self._waiting("ContainerCreating", None)
        while self._deleted_at is None:
            missing = [
                volume["secret"]["secretName"]
                for volume in self._body["spec"].get("volumes") or ()
                if "secret" in volume
                and volume["secret"]["secretName"] not in self._cluster.secrets
            ]
            if self._cluster.start_error is not None:
                self._waiting("CreateContainerConfigError", self._cluster.start_error)
            elif not missing:
                return True
            if missing and not self._cluster.events_of(self.name):
                message = f'MountVolume.SetUp failed for volume: secret "{missing[0]}" not found'
                self._cluster.event(self, "FailedMount", message)
            time.sleep(0.05)
        self._gone()
        return False

    def _run(self) -> None:
        try:
            process: subprocess.Popen[bytes] = subprocess.Popen(
                [*self._container["command"], *self._container.get("args", [])],
                env=self._environment(),
                cwd=self._cluster.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                extra_groups=self._groups(),
            )
        except OSError as error:
            message = f"exec failed: {error}"
            self._waiting("RunContainerError", message)
            self._cluster.event(self, "Failed", message)
            return
        self._process = process
        self._status |= {"phase": "Running"}
        self._set_state({"running": {"startedAt": _timestamp()}}, ready=True)
        readers = [
            threading.Thread(target=self._collect, args=(stream,), daemon=True)
            for stream in (process.stdout, process.stderr)
        ]
        for reader in readers:
            reader.start()
        watcher = threading.Thread(target=self._limit, daemon=True)
        watcher.start()
        code = process.wait()
        # The other processes of a container end with its first.
        self.end_processes()
        for reader in readers:
            reader.join()
        if not self._lost:
            self._finish(code)

    def _limit(self) -> None:
        """Kills at the limits of memory and time, as the kernel and the kubelet do."""
        assert self._process is not None
        limits = (self._container.get("resources") or {}).get("limits") or {}
        most = bytes_of(limits["memory"]) if "memory" in limits else None
        deadline = self._body["spec"].get("activeDeadlineSeconds")
        start = time.monotonic()
        while self.is_running:
            if most is not None:
                family = {
                    each
                    for leader in self._leader()
                    for each in (leader, *processes.descendants(leader))
                }
                if processes.anonymous_memory(family) > most:
                    self._end = {"reason": "OOMKilled"}
                    self.end_processes()
                    return
            if deadline is not None and time.monotonic() > start + deadline:
                message = "Pod was active on the node longer than the specified deadline"
                self._end = {"phase": "Failed", "reason": "DeadlineExceeded", "message": message}
                self.end_processes()
                return
            time.sleep(_MEMORY_EVERY_S)

    def _terminate(self, grace_s: int) -> None:
        process = self._process
        if process is not None:
            with suppress(ProcessLookupError):
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
            self.end_processes()
            process.wait()
            with self._changed:
                self._changed.wait_for(lambda: self._log_closed, 10)
            # A kubelet reports the container's end before it lets the pod go.
            time.sleep(_REPORTED_S)
        self._gone()

    def end_processes(self) -> None:
        """Kill every process of the container."""
        if self._process is None:
            return
        known = self._leader()
        processes.end(lambda: processes.launched(self._launch, None, known), grace_s=0)

    def _leader(self) -> set[psutil.Process]:
        """The container's first process; none once it has ended."""
        with suppress(psutil.NoSuchProcess):
            if self._process is not None and self.is_running:
                return {psutil.Process(self._process.pid)}
        return set()

    def _finish(self, code: int | None) -> None:
        end = self._end or {}
        if code is not None:
            exit_code = 128 - code if code < 0 else code
            ended = {
                "exitCode": exit_code,
                "reason": end["reason"]
                if end.get("reason") == "OOMKilled"
                else ("Completed" if exit_code == 0 else "Error"),
                "startedAt": self._created,
                "finishedAt": _timestamp(),
            }
            self._set_state({"terminated": ended}, ready=False)
            self._status["phase"] = "Succeeded" if exit_code == 0 else "Failed"
        if "phase" in end:
            self._status |= end
        with self._changed:
            self._log_closed = True
            self._changed.notify_all()

    def _gone(self) -> None:
        with self._changed:
            self._log_closed = True
            self._changed.notify_all()
        self._cluster.pods.pop((self.namespace, self.name), None)
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _condition(self, kind: str, reason: str, message: str, status: str = "True") -> None:
        condition = {"type": kind, "status": status, "reason": reason, "message": message}
        self._status["conditions"] = [*self._status["conditions"], condition]

    def _waiting(self, reason: str, message: str | None) -> None:
        self._set_state({"waiting": {"reason": reason, "message": message}}, ready=False)

    def _set_state(self, state: dict[str, Any], *, ready: bool) -> None:
        self._status["containerStatuses"] = [
            {
                "name": self._container["name"],
                "image": self._container["image"],
                "imageID": "sha256:0",
                "ready": ready,
                "restartCount": 0,
                "state": state,
            }
        ]

    # The container's surroundings.

    def _environment(self) -> dict[str, str]:
        """The container's, with the folder of each mount in the place of its path."""
        given = {one["name"]: one["value"] for one in self._container.get("env") or ()}
        volumes = {one["name"]: one for one in self._body["spec"].get("volumes") or ()}
        mounted: dict[str, str] = {}
        for mount in self._container.get("volumeMounts") or ():
            volume = volumes[mount["name"]]
            # Short: sockets lie in some, whose paths have at most 107 characters.
            folder = self._cluster.folder / f"{self._uid}-{mount['name']}"
            folder.mkdir()
            self._folders.append(folder)
            if "secret" in volume:
                self._put_secret(folder, volume["secret"])
            mounted[mount["mountPath"]] = str(folder)
        given = {name: self._moved(value, mounted) for name, value in given.items()}
        # What is asked names scratch; other paths in it that begin with /tmp are the test's own.
        asked = {path: folder for path, folder in mounted.items() if path != "/tmp"}
        request = decode_param(given[DAGSTER_PIPES_CONTEXT_ENV_VAR])
        given[DAGSTER_PIPES_CONTEXT_ENV_VAR] = encode_param(self._moved(request, asked))
        return {**self._cluster.env, **given, LAUNCH_VARIABLE: self._launch}

    def _moved(self, value: Any, mounted: dict[str, str]) -> Any:
        """`value` with every path in it where it is on this machine."""
        if isinstance(value, dict):
            return {key: self._moved(one, mounted) for key, one in value.items()}
        if isinstance(value, list):
            return [self._moved(one, mounted) for one in value]
        if isinstance(value, str) and not value.startswith(str(self._cluster.folder)):
            for path, folder in mounted.items():
                if value == path or value.startswith(f"{path}/"):
                    return folder + value[len(path) :]
        return value

    def _put_secret(self, folder: Path, source: dict[str, Any]) -> None:
        entries = self._cluster.secrets[source["secretName"]]
        for item in source["items"]:
            file = folder / item["path"]
            file.write_bytes(entries[item["key"]])
            # As the kubelet does with fsGroup: of root and that group, readable by both.
            if os.getuid() == 0:
                os.chown(file, 0, self._body["spec"]["securityContext"]["fsGroup"])
            file.chmod(0o440)

    def _groups(self) -> list[int] | None:
        """The pod's fsGroup; only root may give a process a group."""
        return [self._body["spec"]["securityContext"]["fsGroup"]] if os.getuid() == 0 else None

    # Its log.

    def _collect(self, stream: IO[bytes] | None) -> None:
        assert stream is not None
        with stream:
            while piece := stream.readline(_PIECE):
                with self._changed:
                    self._log.append((time.time(), piece))
                    self._changed.notify_all()

    def read_log(self, since_s: float | None) -> Iterator[bytes]:
        """Follow it with timestamps, as the kubelet: one where the line before had ended."""
        oldest = 0.0 if since_s is None else time.time() - since_s
        at, begins = 0, True
        while True:
            with self._changed:
                self._changed.wait_for(lambda at=at: len(self._log) > at or self._log_closed)
                new, closed = self._log[at:], self._log_closed
            at += len(new)
            for when, piece in new:
                if when < oldest:
                    continue
                yield (f"{_nanoseconds(when)} ".encode() if begins else b"") + piece
                begins = piece.endswith(b"\n")
            if closed and not new:
                return


def _timestamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _nanoseconds(when: float) -> str:
    moment = datetime.fromtimestamp(when, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond:06d}000Z"
