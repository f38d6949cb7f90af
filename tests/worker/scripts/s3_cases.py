"""Load small artifacts from a real S3 server; what came of each goes to CASES.

    python s3_cases.py MODELS OUT CASES

As in production the keys come over a descriptor, which `session.secrets` reads. The load on two
ranks goes all the way: through the launcher, in a step that has the keys in its environment.
"""

import base64
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import dagster as dg
import psutil
from building import artifact
from cutting_proxy import CuttingProxy
from loader_cases import failure, flip, reported

from tensorize_assets.core import layout, processes, ranged, s3
from tensorize_assets.core.errors import StoreError
from tensorize_assets.core.manifest import FileEntry
from tensorize_assets.core.protocol import SECRETS_VARIABLE
from tensorize_assets.core.s3 import ACCESS_VARIABLE, S3Access, S3Credentials, S3Settings
from tensorize_assets.core.store import digest, open_store
from tensorize_assets.core.tasks import ReloadRequest, ReloadResult
from tensorize_assets.demo.s3_server import REGION, LocalS3
from tensorize_assets.resources.launchers.local import SubprocessLauncher
from tensorize_assets.vllm_plugin import loader, report, streams
from tensorize_assets.worker import reload, session
from tensorize_assets.worker.session import Progress

BUCKET = "artifacts"
# With what a URL or a template could take for its own.
PREFIX = "team a/100%25d"
ROOT = f"s3://{BUCKET}/{PREFIX}"

# In the step's environment only: a worker that shows it has inherited it.
STEP_TOKEN = "a-session-token-of-the-step"


def hand_over(server: LocalS3, secret_key: str | None = None) -> None:
    """Give the keys as the launcher does."""
    secrets = S3Credentials(server.access_key, secret_key or server.secret_key).to_secrets()
    encoded = {name: base64.b64encode(value).decode() for name, value in secrets.items()}
    reading, writing = os.pipe()
    os.write(writing, json.dumps(encoded).encode())
    os.close(writing)
    os.environ[SECRETS_VARIABLE] = str(reading)
    session.secrets.cache_clear()


def settings(server: LocalS3, **changes: Any) -> S3Settings:
    return S3Settings(endpoint_url=server.endpoint, region=REGION, **changes)


class Watch:
    """Looks at every process of this launch, again and again, for what must not be seen."""

    def __init__(self, *needles: str) -> None:
        self._needles = needles
        self._ended = threading.Event()
        self.processes: set[int] = set()
        self.found: set[str] = set()
        self.told: set[int] = set()

    def __enter__(self) -> "Watch":
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        own = psutil.Process()
        while not self._ended.wait(0.05):
            for process in (own, *processes.descendants(own)):
                for name in ("cmdline", "environ"):
                    try:
                        text = Path(f"/proc/{process.pid}/{name}").read_text(errors="replace")
                    except OSError:
                        continue
                    self.processes.add(process.pid)
                    if ACCESS_VARIABLE in text:
                        self.told.add(process.pid)
                    seen = [needle for needle in self._needles if needle in text]
                    self.found |= {f"{name} of {process.pid}: {needle}" for needle in seen}


@contextmanager
def logged(path: Path) -> Generator[None]:
    """Everything that this process and its children print goes to `path`."""
    kept = [os.dup(1), os.dup(2)]
    with path.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    except BaseException:
        os.write(kept[1], path.read_bytes())
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in enumerate(kept, 1):
            os.dup2(descriptor, number)
            os.close(descriptor)


class Ranges(SimpleHTTPRequestHandler):
    """Serves a folder to everybody, a range at a time."""

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        data = path.read_bytes()
        body = data[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def public(folder: Path) -> Iterator[str]:
    handler = partial(Ranges, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def companions(folder: Path) -> tuple[FileEntry, ...]:
    store = open_store(str(folder))
    return tuple(
        FileEntry(path=key, size=found.size, sha256=found.sha256)
        for key in store.list("")
        if not key.endswith(".tensors")
        for found in [digest(store, key)]
    )


def main(models: Path, out: Path, cases: Path) -> None:
    local = out / "root"
    llama, llama_built = artifact(models / "llama", local, "llama")
    halves, halves_built = artifact(models / "llama", local, "tp2", tensor_parallel_size=2)
    found: dict[str, Any] = {
        "built": {
            "one": llama_built.model_dump(mode="json"),
            "two": halves_built.model_dump(mode="json"),
        }
    }
    with LocalS3(out / "s3") as server:
        server.create_bucket(BUCKET)
        client = server.client()
        for path in local.rglob("*"):
            if path.is_file():
                client.upload_file(
                    str(path), BUCKET, f"{PREFIX}/{path.relative_to(local).as_posix()}"
                )
        hand_over(server)
        with logged(out / "log"):
            engines(server, local, llama, halves, found)
            alone(server, llama, out, found)
        log = (out / "log").read_text(errors="replace")
        found["log"] = {
            "lines": log.count("\n"),
            "leaks": [needle for needle in needles(server) if needle in log],
            "again": [line for line in log.splitlines() if " again in " in line],
        }
    cases.write_text(json.dumps(found))


def needles(server: LocalS3) -> tuple[str, ...]:
    return (server.access_key, server.secret_key, STEP_TOKEN, "Signature=", "AWSAccessKeyId")


def launched(server: LocalS3, request: ReloadRequest) -> ReloadResult:
    """What the worker answers a step that has the keys in its environment, as users set them."""
    results: list[ReloadResult] = []
    assert request.s3 is not None
    secrets = S3Credentials(server.access_key, server.secret_key).to_secrets()

    @dg.asset
    def step(context: dg.AssetExecutionContext) -> dg.MaterializeResult[Any]:
        launcher = SubprocessLauncher()
        results.append(launcher.run(context, request, ReloadResult, secrets).result)
        return dg.MaterializeResult()

    variables = {
        "S3_ACCESS_KEY_ID": server.access_key,
        "S3_SECRET_ACCESS_KEY": server.secret_key,
        "S3_SESSION_TOKEN": STEP_TOKEN,
    }
    os.environ.update(variables)
    try:
        assert s3.resolve(request.s3).credentials is not None
        dg.materialize([step])
    finally:
        for name in variables:
            del os.environ[name]
    return results[0]


def private() -> set[str]:
    """What lies where workers keep keys, of this process: others may run beside it."""
    name = f"tensorize-assets-{os.getuid()}/private-{os.getpid()}-*"
    places = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    return {str(path) for place in places for path in place.glob(name)}


def engines(server: LocalS3, local: Path, llama: Path, halves: Path, found: dict[str, Any]) -> None:
    """The task itself."""

    def reloaded(
        name: str,
        folder: Path,
        s3: S3Settings,
        size: int = 1,
        run: Callable[[ReloadRequest], ReloadResult] = lambda one: reload.run(
            one, Progress.silent()
        ),
    ) -> None:
        request = ReloadRequest(
            model="tiny/llama",
            suffix="v1",
            root=roots[-1],
            directory=folder.relative_to(local).as_posix(),
            companions=companions(folder),
            s3=s3,
            tensor_parallel_size=size,
            dtype="bfloat16",
            device="cpu",
            prompts=("the quick brown fox",),
        )
        before = private()
        with Watch(*needles(server)) as watch:
            try:
                found[name] = run(request).model_dump(mode="json")
            except StoreError as error:
                found[name] = {"raised": f"{type(error).__name__}: {error}"}
        found[name] |= {
            "seen": len(watch.processes),
            "told": len(watch.told),
            "leaks": sorted(watch.found),
            "left": sorted(private() - before),
            "variable": os.environ.get(ACCESS_VARIABLE),
        }

    reloaded("s3", llama, settings(server))
    reloaded("presigned", llama, settings(server, reload_url="presigned"))
    with public(local) as url:
        reloaded("public", llama, settings(server, reload_url=f"{url}/"))
        reloaded("nowhere", llama, settings(server, reload_url=f"{url}/elsewhere"))

    proxy = CuttingProxy(urlsplit(server.endpoint).port or 0)
    through = settings(server, max_attempts=1).model_copy(
        update={"endpoint_url": f"http://127.0.0.1:{proxy.port}"}
    )
    proxy.cuts.extend([400_000, 400_000])
    reloaded("cut", llama, through)
    with attempts(1):
        proxy.cuts.extend([400_000])
        proxy.dies_of_cuts = True
        reloaded("dead in the middle", llama, through)
    reloaded("dead", llama, through)
    hand_over(server, "not-the-secret-of-this-key")
    reloaded("refused", llama, settings(server))
    hand_over(server)
    with another_root("s3://no-such-bucket/prefix"):
        reloaded("no bucket for it", llama, settings(server))
    reloaded("s3 at 2", halves, settings(server), 2, partial(launched, server))

    client = server.client()

    def key(file: str) -> dict[str, str]:
        directory = llama.relative_to(local).as_posix()
        return {"Bucket": BUCKET, "Key": f"{PREFIX}/{layout.file_key(directory, file)}"}

    # Last: each leaves the artifact worse.
    data = (llama / "model.tensors").read_bytes()
    proxy.dead = proxy.dies_of_cuts = False
    proxy.cuts.extend([400_000])
    proxy.on_cut = lambda: client.put_object(**key("model.tensors"), Body=flip(data))
    reloaded("replaced in the middle", llama, through)
    client.delete_object(**key("model.tensors"))
    reloaded("gone", llama, settings(server))
    client.put_object(**key("config.json"), Body=b"{}")
    reloaded("other config", llama, settings(server))
    client.delete_object(**key("config.json"))
    reloaded("no config", llama, settings(server))


roots = [ROOT]


@contextmanager
def another_root(root: str) -> Generator[None]:
    roots.append(root)
    yield
    roots.pop()


@contextmanager
def attempts(number: int) -> Generator[None]:
    """Fewer tries of a part than a server needs to restart."""
    before, ranged._ATTEMPTS = ranged._ATTEMPTS, number
    try:
        yield
    finally:
        ranged._ATTEMPTS = before


def alone(server: LocalS3, llama: Path, out: Path, found: dict[str, Any]) -> None:
    """The loader without an engine around it: it finds the access in the environment."""
    client = server.client()
    reports = out / "reports"
    reports.mkdir()
    os.environ[report.FOLDER_VARIABLE] = str(reports)
    credentials = S3Credentials(server.access_key, server.secret_key)
    data = (llama / "model.tensors").read_bytes()

    def access(
        name: str, endpoint: str | None = None, secret: str | None = None, url: str | None = None
    ) -> None:
        given = S3Settings(
            endpoint_url=endpoint or server.endpoint,
            region=REGION,
            max_attempts=1,
            reload_url=url,
        )
        path = out / f"{name}.json"
        keys = S3Credentials(server.access_key, secret) if secret else credentials
        S3Access(given, keys).write(path)
        os.environ[ACCESS_VARIABLE] = str(path)

    def put(name: str, body: bytes) -> str:
        client.put_object(Bucket=BUCKET, Key=name, Body=body)
        return f"s3://{BUCKET}/{name}"

    def case(name: str, uri: str, **given: Any) -> None:
        found[name] = {"error": failure(llama, uri, **given)}
        found[name]["told"] = json.loads(reported(reports, "failure-000.json") or "null")
        found[name]["load"] = json.loads(reported(reports, "rank-000.json") or "null")

    access("good")
    whole = put("whole.tensors", data)
    case("whole", whole)
    case("four readers", whole, num_readers=4)
    case("flipped", put("flipped.tensors", flip(data)))
    case("truncated", put("truncated.tensors", data[:-1000]))
    case("empty", put("empty.tensors", b""))
    case("missing", f"s3://{BUCKET}/missing.tensors")
    case("no bucket", "s3://no-such-bucket/missing.tensors")
    case("unknown scheme", "gs://bucket/model.tensors")
    case("no http server", "http://127.0.0.1:1/model.tensors?X-Amz-Signature=0123")

    replaced = put("replaced.tensors", data)
    with before_the_model(lambda: put("replaced.tensors", flip(data))):
        case("replaced", replaced)
    access("wrong", secret="wrong")
    case("wrong key", whole)
    access("wrong, presigned", secret="wrong", url="presigned")
    case("wrong key, presigned", whole)

    access("presigned", url="presigned")
    case("missing, presigned", f"s3://{BUCKET}/missing.tensors")
    streams._SIGNED_FOR_S, before = 2, streams._SIGNED_FOR_S
    with before_the_model(lambda: time.sleep(3)):
        case("signed for too short", whole)
    streams._SIGNED_FOR_S = before

    proxy = CuttingProxy(urlsplit(server.endpoint).port or 0)
    access("proxy", endpoint=f"http://127.0.0.1:{proxy.port}")
    proxy.refusals = 1
    case("not there at first", whole)
    proxy.refusals = 99
    case("not there at all", whole)
    proxy.refusals = 0
    with attempts(1):
        proxy.cuts.extend([600_000])
        case("begun again", whole)
        proxy.cuts.extend([600_000])
        again = put("again.tensors", data)
        with before_the_second_look(lambda: put("again.tensors", flip(data))):
            case("replaced between", again)

    del os.environ[ACCESS_VARIABLE]
    os.environ["S3_ENDPOINT_URL"] = server.endpoint
    os.environ["AWS_DEFAULT_REGION"] = REGION
    keys = {"s3_access_key_id": server.access_key, "s3_secret_access_key": server.secret_key}
    case("vllm's own settings", whole, **keys)
    host = server.endpoint.removeprefix("http://")
    case(
        "tensorizer's own settings",
        whole,
        stream_kwargs={**keys, "s3_endpoint": host, "force_http": True},
    )


@contextmanager
def before_the_model(act: Callable[[], object]) -> Generator[None]:
    """Between finding the file and reading it."""
    original = loader.initialize_model

    def acting(**arguments: Any) -> Any:
        act()
        return original(**arguments)

    loader.initialize_model = acting
    try:
        yield
    finally:
        loader.initialize_model = original


@contextmanager
def before_the_second_look(act: Callable[[], object]) -> Generator[None]:
    original = loader.streams.find
    looks: list[str] = []

    def acting(uri: str, given: Any) -> Any:
        looks.append(uri)
        if len(looks) == 2:
            act()
        return original(uri, given)

    loader.streams.find = acting
    try:
        yield
    finally:
        loader.streams.find = original


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
