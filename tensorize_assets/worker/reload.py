"""Task `reload`: an artifact loaded as it will be served, its tensors hashed, its answers had."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from urllib.parse import quote

import vllm

from tensorize_assets.core import layout
from tensorize_assets.core.errors import StoreUnavailableError
from tensorize_assets.core.s3 import ACCESS_VARIABLE
from tensorize_assets.core.store import Store
from tensorize_assets.core.tasks import Answers, ReloadRequest, ReloadResult
from tensorize_assets.vllm_plugin import report
from tensorize_assets.worker.access import access_of, store_of
from tensorize_assets.worker.engine import (
    ask,
    check_device,
    collect,
    engine,
    load_failures,
    load_reports,
)
from tensorize_assets.worker.session import Progress


def run(request: ReloadRequest, progress: Progress) -> ReloadResult:
    """Load with `verify_hash` and ask. A load that fails is a result too: the checks report it.

    Raises:
        PreflightError: this host has not the device asked for, or its vLLM not our plugin.
        StoreUnavailableError: the store, or the way to it, is in trouble, which says nothing
            about the artifact.
        StoreError: the store refuses a file, or has another than the manifest says.
    """
    ranks = request.tensor_parallel_size
    check_device(request.device, ranks, f"{request.model} {request.suffix}")
    answers: Answers | None = None
    error: str | None = None
    with _served(request, progress) as served, load_reports() as reports:
        # Flat: vLLM builds its own "tensorizer_config" of these, and drops one that it is given.
        settings = {
            "tensorizer_uri": served.tensorizer_uri,
            # In both: what is set here goes before `verify_hash` itself.
            "deserialization_kwargs": {**request.deserialization_kwargs, "verify_hash": True},
            "verify_hash": True,
        }
        progress.update("starting the engine on the artifact")
        try:
            with engine(
                served.folder,
                ranks,
                request.dtype,
                load_format="tensorizer",
                model_loader_extra_config=settings,
            ) as llm:
                progress.update("asking the artifact")
                answers = ask(llm, request.prompts)
        except Exception as failure:  # Whatever stops the engine is the finding.
            failures = load_failures(reports)
            if any(one.store_unavailable for one in failures):
                raise StoreUnavailableError("; ".join(map(str, failures))) from failure
            error = "; ".join(map(str, failures)) or f"{type(failure).__name__}: {failure}"
            progress.log(f"the artifact does not load: {error}", "error")
        loads = collect(reports)
    return ReloadResult(
        answers=answers,
        loads=loads,
        device_name=loads[0].device_name if loads else report.device_name(),
        vllm_version=vllm.__version__.partition("+")[0],
        error=error,
    )


class _Served(NamedTuple):
    """What vLLM is given: a local folder as the model, and where its tensors are."""

    folder: str
    tensorizer_uri: str


@contextmanager
def _served(request: ReloadRequest, progress: Progress) -> Iterator[_Served]:
    """The artifact as vLLM takes it: one not on this disk is streamed, all but its small files."""
    store = store_of(request.root, request.s3)
    name = layout.tensorizer_uri_name(request.tensor_parallel_size)
    local = store.local_path(request.directory)
    if local is not None:
        yield _Served(str(local), f"{local}/{name}")
        return
    access = access_of(request.s3)
    # Two folders: what vLLM takes for the model holds no keys.
    with TemporaryDirectory(prefix="reload-") as folder, TemporaryDirectory() as private:
        progress.update("fetching the artifact's small files")
        _fetch(store, request, Path(folder))
        path = Path(private, "s3-access.json")
        access.write(path)
        base = access.settings.reload_url
        if base is None or base == "presigned":
            uri = f"{store.uri(request.directory)}/{name}"
        else:
            uri = f"{base.rstrip('/')}/{quote(request.directory)}/{name}"
        # In the environment, since vLLM logs its arguments, and the process list shows them.
        with _variable(ACCESS_VARIABLE, str(path)):
            yield _Served(folder, uri)


def _fetch(store: Store, request: ReloadRequest, folder: Path) -> None:
    for file in request.companions:
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        store.get_file(layout.file_key(request.directory, file.path), path, sha256=file.sha256)


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
