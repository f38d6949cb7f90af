"""Fixtures for more than one folder of tests."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Generator, Iterator
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

import pytest
from botocore.loaders import JSONFileLoader, Loader
from xdist.scheduler import LoadFileScheduling

from tensorize_assets.demo.hub_server import LocalHub
from tensorize_assets.demo.s3_server import REGION, LocalS3

if TYPE_CHECKING:
    from tensorize_assets.core.s3 import S3Access

_SCRIPTS = Path(__file__).parent / "worker" / "scripts"
_LAST_LINES = 40

# What is begun first, so that no process of tests ends with minutes of it alone: files of few tests
# that take long. Files of one line share fixtures that take half a minute, and go to one process.
_FIRST = (
    ("faults/test_kills.py",),
    ("faults/test_kills_mirrored.py",),
    ("test_demo.py",),
    ("live/test_fleet.py",),
    ("serving/test_endpoint.py",),
    (
        "assets/test_chain.py",
        "assets/test_dagster_dev.py",
        "assets/test_encrypted_shards.py",
        "assets/test_errors.py",
    ),
    (
        "worker/test_byte_identity.py",
        "worker/test_encrypted_shards.py",
        "worker/test_preflight.py",
        "worker/test_read_back.py",
        "worker/test_shard.py",
        "worker/test_stock_vllm.py",
    ),
    (
        "vllm_plugin/test_lora_resolver.py",
        "vllm_plugin/test_releases.py",
        "vllm_plugin/test_server.py",
        "vllm_plugin/test_startup.py",
    ),
    ("assets/test_rotation_real.py",),
    ("deploy/test_composed.py",),
    ("test_cli_reload.py",),
    # Each starts a Ray cluster.
    ("launchers/test_same_build.py", "launchers/test_ray.py"),
    ("launchers/test_k8s.py",),
    ("faults/test_soak.py",),
    ("faults/test_daemon_kills.py",),
    ("worker/test_reload_s3.py",),
    ("worker/test_engine.py",),
    ("worker/test_lora.py",),
    ("worker/test_quantized.py",),
    ("worker/test_executor.py",),
)
_PLACES = {f"tests/{file}": place for place, files in enumerate(_FIRST) for file in files}


@pytest.fixture(scope="session", autouse=True)
def botocore_data() -> Iterator[None]:
    """botocore's descriptions of S3, parsed once: each new client would take a quarter second."""
    files = JSONFileLoader()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "load_file", cache(files.load_file))
        patch.setattr(Loader, "FILE_LOADER_CLASS", lambda _: files)
        yield


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    """A running local Hub without repos."""
    with LocalHub() as running:
        yield running


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalS3]:
    """A running S3 server, one for the whole session."""
    with LocalS3(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def s3_root(s3: LocalS3) -> Iterator[str]:
    """A root in a bucket of its own, as a catalog names it."""
    bucket = f"test-{uuid.uuid4().hex}"
    s3.create_bucket(bucket)
    yield f"s3://{bucket}/some/prefix"
    # With all that it holds: SeaweedFS frees the disk of a bucket at once, of objects late.
    s3.client().delete_bucket(Bucket=bucket)


@pytest.fixture
def s3_access(s3: LocalS3) -> S3Access:
    """The administrator's access to the S3 server."""
    from tensorize_assets.core.s3 import S3Access, S3Credentials, S3Settings

    return S3Access(
        settings=S3Settings(endpoint_url=s3.endpoint, region=REGION),
        credentials=S3Credentials(access_key_id=s3.access_key, secret_access_key=s3.secret_key),
    )


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small random snapshot of each architecture, by its name."""
    folder = tmp_path_factory.mktemp("tiny-models")
    script = Path(__file__).parent / "worker" / "scripts" / "tiny_models.py"
    # In a process of its own: transformers stays out of pytest's.
    subprocess.run([sys.executable, str(script), str(folder)], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def run_script() -> Callable[..., None]:
    """Runs a script of `worker/scripts`, or at a path, with arguments.

    Variables of the environment are given by keyword. It may import those of `worker/scripts`.
    """

    def run(script: str | Path, *arguments: object, **variables: str) -> None:
        if find_spec("vllm") is None:
            pytest.skip("vLLM is not installed (extra `cpu` or `gpu`)")
        command = [sys.executable, str(_SCRIPTS / script), *map(str, arguments)]
        path = [str(_SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        done = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)} | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=450,
        )
        if done.returncode:
            last = "\n".join(done.stdout.splitlines()[-_LAST_LINES:])
            pytest.fail(f"{script} ended with {done.returncode}:\n{last}", pytrace=False)

    return run


class _Ranges(SimpleHTTPRequestHandler):
    """Serves files, a range at a time, as web servers do."""

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        size = path.stat().st_size
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        last = min(last, size - 1)
        cast("Web", self.server).before(path, last + 1 - first)
        self.send_response(206 if first < size else 416)
        self.send_header("Content-Range", f"bytes {f'{first}-{last}' if size else '*'}/{size}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        self.end_headers()
        with path.open("rb") as file:
            file.seek(first)
            self.wfile.write(file.read(last + 1 - first))

    def log_message(self, format: str, *args: object) -> None:
        pass


class Web(ThreadingHTTPServer):
    """A web server that gives every folder a URL; `before` may hold up what is asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Ranges, directory="/"))
        self.before: Callable[[Path, int], object] = lambda path, size: None

    def __call__(self, folder: Path) -> str:
        return f"http://127.0.0.1:{self.server_port}{quote(str(folder))}"


@pytest.fixture(scope="session")
def web() -> Iterator[Web]:
    """A running web server."""
    with Web() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI every part is installed, so that a skip there is a missing part; a GPU is excepted."""
    report = yield
    if (
        report.skipped
        and os.environ.get("TENSORIZE_ASSETS_CI")
        and not item.get_closest_marker("cuda")
    ):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
    return report


def pytest_configure(config: pytest.Config) -> None:
    """Of several processes of tests each has one core.

    Engines that each take every core wait for one another in spinning threads, twice as long.
    """
    if hasattr(config, "workerinput"):
        os.environ.setdefault("OMP_NUM_THREADS", "1")


class _TogetherScheduling(LoadFileScheduling):
    """A file's tests go to one process, and so do those of files that `_FIRST` has together."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return str(_PLACES.get(file, file))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """With `--dist loadfile --no-loadscope-reorder`, in the order of collection."""
    if config.getvalue("dist") != "loadfile":
        return None
    return _TogetherScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long goes first (see `_FIRST`)."""
    items.sort(key=lambda item: _PLACES.get(item.nodeid.partition("::")[0], len(_FIRST)))


def pytest_collection_finish() -> None:
    """The worker sets its process's environment, and with it that of every later test's processes.

    Among else it keeps huggingface_hub offline. Tests of it are scripts in processes of their own.
    """
    if "tensorize_assets.worker" in sys.modules:
        raise pytest.UsageError("a test module imports tensorize_assets.worker; run it in a script")
    # All that was imported stays: no collection of garbage has to look at it again.
    gc.freeze()
