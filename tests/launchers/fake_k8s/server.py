"""The API server: as much of it as clients of pods call, with scheduler and kubelet behind it."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import yaml

from fake_k8s.pods import FakePod, Node

TOKEN = "fake-token-of-the-test-user"
_POD = re.compile(
    r"/api/v1/namespaces/(?P<namespace>[^/]+)/pods(?:/(?P<name>[^/]+)(?P<log>/log)?)?$"
)
_EVENTS = re.compile(r"/api/v1/namespaces/(?P<namespace>[^/]+)/events$")


class FakeKubernetes:
    """Makes pods of what it is asked for, and runs each one's container as a process.

    The process has the environment that the pod's spec gives it and no other, apart from `env`,
    which stands for what the image holds. Nothing can be mounted: a volume is a folder below
    `folder` for as long as its pod is there, and paths to it, in the environment and in what the
    worker is asked, are changed to it. Roots and snapshots are told by URL, or lie below `folder`.
    """

    def __init__(
        self, *, images: set[str], env: dict[str, str], versions: tuple[str, ...] = ("1.31", "1.37")
    ) -> None:
        self.images = images
        """What the registry has; of anything else it says that it is not found."""
        self.env = env
        self.versions = versions
        """Every pod must be one for these, strictly, or it is refused."""
        self.node: Node | None = Node()
        """Where every pod runs; None when there is none."""
        self.secrets: dict[str, dict[str, bytes]] = {}
        self.registry_error: str | None = None
        """What pulling says, whatever the image."""
        self.refusal: tuple[int, str] | None = None
        """What making a pod is answered with."""
        self.start_error: str | None = None
        """Why no container can be made."""
        self.most_at_once = 0
        self.pods: dict[tuple[str, str], FakePod] = {}
        self.made: list[dict[str, Any]] = []
        """Every pod that was ever asked for, as it was asked for."""
        self.requests: list[str] = []
        self.break_logs_after: int | None = None
        """Bytes of a log after which its connection breaks, once for each pod."""
        self.ever: list[FakePod] = []
        """Every pod there was."""
        self._failing = itertools.repeat(0, 0)
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._uids = itertools.count(1)

    def __enter__(self) -> FakeKubernetes:
        self.folder = Path(tempfile.mkdtemp(prefix="fake-k8s-"))
        server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        server.daemon_threads = True
        server.kubernetes = self  # type: ignore[attr-defined]
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        self.kubeconfig = self.folder / "kubeconfig"
        self.kubeconfig.write_text(yaml.safe_dump(self._kubeconfig()))
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self.ever:
            pod.delete(0)
            pod.end_processes()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    def fail_next(self, count: int, status: int = 500) -> None:
        """Answer the next requests with an error."""
        self._failing = itertools.repeat(status, count)

    def events_of(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self._events if event["involvedObject"]["name"] == name]

    def only_pod(self, started: bool = True, timeout_s: float = 30) -> FakePod:
        """Wait for a pod, and for its container to run."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for pod in list(self.pods.values()):
                if not started or pod.is_running:
                    return pod
            time.sleep(0.02)
        raise AssertionError("no pod runs")

    def event(self, pod: FakePod, reason: str, message: str, kind: str = "Warning") -> None:
        now = _now()
        self._events.append(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {
                    "name": f"{pod.name}.{len(self._events)}",
                    "namespace": pod.namespace,
                    "creationTimestamp": now,
                },
                "involvedObject": {"kind": "Pod", "name": pod.name, "namespace": pod.namespace},
                "type": kind,
                "reason": reason,
                "message": message,
                "firstTimestamp": now,
                "lastTimestamp": now,
                "count": 1,
            }
        )

    def _kubeconfig(self) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "tester", "user": {"token": TOKEN}}],
            "contexts": [
                {
                    "name": "fake",
                    "context": {"cluster": "fake", "user": "tester", "namespace": "models"},
                }
            ],
            "current-context": "fake",
        }

    # What the handler calls.

    def next_failure(self) -> int:
        return next(self._failing, 0)

    def create(self, namespace: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        body = {"apiVersion": "v1", "kind": "Pod", **body}
        for version in self.versions:
            try:
                kubernetes_validate.validate(body, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                return _status(422, f"Pod is invalid: {error.message}")
        if self.refusal is not None:
            return _status(*self.refusal)
        name = body["metadata"]["name"]
        with self._lock:
            if (namespace, name) in self.pods:
                return _status(409, f'pods "{name}" already exists')
            self.made.append(body)
            pod = FakePod(self, namespace, name, f"uid-{next(self._uids)}", body)
            self.pods[namespace, name] = pod
            self.ever.append(pod)
            self.most_at_once = max(self.most_at_once, len(self.pods))
        pod.start()
        return 201, pod.as_dict()

    def listed(self, namespace: str, query: dict[str, list[str]]) -> dict[str, Any]:
        fields = _selector(query, "fieldSelector")
        labels = _selector(query, "labelSelector")
        items = [
            pod.as_dict()
            for (where, name), pod in list(self.pods.items())
            if where == namespace
            and fields.get("metadata.name", name) == name
            and all(
                key in pod.labels and value in (None, pod.labels[key])
                for key, value in labels.items()
            )
        ]
        return {"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": items}

    def listed_events(self, namespace: str, query: dict[str, list[str]]) -> dict[str, Any]:
        name = _selector(query, "fieldSelector").get("involvedObject.name") or ""
        items = [one for one in self.events_of(name) if one["metadata"]["namespace"] == namespace]
        return {"apiVersion": "v1", "kind": "EventList", "metadata": {}, "items": items}


def _selector(query: dict[str, list[str]], name: str) -> dict[str, str | None]:
    terms = [term for text in query.get(name, ()) for term in text.split(",") if term]
    found: dict[str, str | None] = {}
    for term in terms:
        key, equals, value = term.partition("=")
        found[key] = value if equals else None
    return found


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _status(code: int, message: str) -> tuple[int, dict[str, Any]]:
    return code, {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "code": code,
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def _cluster(self) -> FakeKubernetes:
        return self.server.kubernetes  # type: ignore[attr-defined]

    def do_POST(self) -> None:
        found = self._asked()
        if found is not None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(*self._cluster.create(found["namespace"], body))

    def do_DELETE(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = self._asked()
        if found is None:
            return
        pod = self._cluster.pods.get((found["namespace"], found["name"]))
        if pod is None:
            self._answer(*_status(404, f'pods "{found["name"]}" not found'))
            return
        options = json.loads(body) if body else {}
        given = self._query.get("gracePeriodSeconds") or [options.get("gracePeriodSeconds")]
        pod.delete(None if given[0] is None else int(given[0]))
        self._answer(200, pod.as_dict())

    def do_GET(self) -> None:
        found = self._asked()
        if found is None:
            return
        cluster = self._cluster
        if found.re is _EVENTS:
            self._answer(200, cluster.listed_events(found["namespace"], self._query))
            return
        if found["name"] is None:
            self._answer(200, cluster.listed(found["namespace"], self._query))
            return
        pod = cluster.pods.get((found["namespace"], found["name"]))
        if pod is None:
            self._answer(*_status(404, f'pods "{found["name"]}" not found'))
        elif found["log"]:
            self._log(pod)
        else:
            self._answer(200, pod.as_dict())

    def _asked(self) -> re.Match[str] | None:
        """What is asked for; None where that was answered already."""
        url = urlsplit(self.path)
        self._query = parse_qs(url.query)
        self._cluster.requests.append(f"{self.command} {self.path}")
        failure = self._cluster.next_failure()
        if failure:
            # A body that is not read would be taken for the next request.
            self.close_connection = True
            self._answer(*_status(failure, "etcdserver: request timed out"))
            return None
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(*_status(401, "Unauthorized"))
            return None
        found = _POD.match(url.path) or _EVENTS.match(url.path)
        if found is None:
            self._answer(*_status(404, f"the server could not find {url.path}"))
        return found

    def _answer(self, code: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def _log(self, pod: FakePod) -> None:
        if not pod.has_log:
            message = f'container "worker" in pod "{pod.name}" is waiting to start'
            self._answer(*_status(400, message))
            return
        since = self._query.get("sinceSeconds")
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with suppress(BrokenPipeError, ConnectionResetError):
            for data in _cut(pod.read_log(float(since[0]) if since else None)):
                limit = self._cluster.break_logs_after
                if limit is not None and pod.log_sent > limit and not pod.log_broken:
                    pod.log_broken = True
                    self.close_connection = True
                    return
                pod.log_sent += len(data)
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


def _cut(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """As a network does: not where lines end."""
    sizes = itertools.cycle((7, 4001, 13, 30011))
    for chunk in chunks:
        while chunk:
            size = next(sizes)
            yield chunk[:size]
            chunk = chunk[size:]
