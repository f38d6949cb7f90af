"""Task `reload`: an artifact loaded as it will be served, its tensors hashed, its answers had."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import vllm
from vllm.lora.request import LoRARequest

from tensorize_assets.core import layout
from tensorize_assets.core.errors import StoreError, StoreUnavailableError
from tensorize_assets.core.s3 import ACCESS_VARIABLE
from tensorize_assets.core.scratch import private_folder
from tensorize_assets.core.store import Store, digest, open_store
from tensorize_assets.core.tasks import Answers, Refusal, ReloadRequest, ReloadResult
from tensorize_assets.vllm_plugin import adapters, report, streams
from tensorize_assets.worker import arguments, refusals
from tensorize_assets.worker.access import access_of, keyfile, store_of
from tensorize_assets.worker.engine import (
    ask,
    ask_with,
    check_device,
    engine,
    load_reports,
    lora_arguments,
    why,
)
from tensorize_assets.worker.session import Progress


def run(request: ReloadRequest, progress: Progress) -> ReloadResult:
    """Load with `verify_hash` and ask, first without an adapter, then with each.

    Of an encrypted artifact that loads, attempts follow that must not load. A load that fails is a
    result too: the checks report it. So is a file that is gone from the store, was replaced there,
    or is not the manifest's. Refused keys, an address that leads nowhere and a store that is down
    are none: they say nothing about the artifact.

    Raises:
        PreflightError: this host has not the device asked for, its vLLM not our plugin, or its
            tensorizer no such argument.
        WorkerError: an artifact is encrypted, and no data key was handed over.
        StoreUnavailableError: the store, or the way to it, is in trouble.
        StoreError: the store refuses, or `reload_url` does not lead to it.
    """
    check_device(request.device, request.tensor_parallel_size, _where(request))
    arguments.check_deserialization(request.deserialization_kwargs, _where(request))
    answers: Answers | None = None
    adapters: dict[str, Answers] = {}
    refused: tuple[Refusal, ...] = ()
    error: str | None = None
    with load_reports() as reports:
        try:
            with _served(request, progress) as served:
                answers, adapters = _answers(request, served, reports, progress)
                if served.keyfile is not None:
                    progress.update("trying what must not load")
                    refused = refusals.try_all(_first_shard(request, served), served.keyfile)
        except _FindingError as finding:
            error = str(finding)
            progress.log(f"the artifact does not load: {error}", "error")
        loads = report.loads(reports)
    return ReloadResult(
        answers=answers,
        adapters=adapters,
        refusals=refused,
        loads=loads,
        device_name=loads[0].device_name if loads else report.device_name(),
        vllm_version=vllm.__version__.partition("+")[0],
        error=error,
    )


def _where(request: ReloadRequest) -> str:
    return f"{request.model} {request.suffix}"


class _FindingError(Exception):
    """The artifact cannot be served as it lies in the store."""


class _Served(NamedTuple):
    """What vLLM is given: a local folder as the model, and where its tensors and their key are."""

    folder: str
    tensorizer_uri: str
    keyfile: Path | None


def _answers(
    request: ReloadRequest, served: _Served, reports: Path, progress: Progress
) -> tuple[Answers, dict[str, Answers]]:
    # Flat: vLLM builds its own "tensorizer_config" of these, and drops one that it is given.
    settings = {
        "tensorizer_uri": served.tensorizer_uri,
        # In both: what is set here goes before `verify_hash` itself.
        "deserialization_kwargs": {**request.deserialization_kwargs, "verify_hash": True},
        "verify_hash": True,
    }
    if served.keyfile is not None:
        settings["encryption_keyfile"] = str(served.keyfile)
    lora = lora_arguments([adapter.rank for adapter in request.adapters], _where(request))
    before = _shards(request)
    progress.update("starting the engine on the artifact")
    try:
        with engine(
            served.folder,
            request.tensor_parallel_size,
            request.dtype,
            load_format="tensorizer",
            model_loader_extra_config=settings,
            **lora,
        ) as llm:
            progress.update("asking the artifact")
            answers = ask(llm, request.prompts)
            with private_folder(in_memory=request.encrypted) as place:
                loras = _adapters(request, served, place)
                return answers, ask_with(llm, request.prompts, loras)
    except Exception as failure:  # Whatever stops the engine is the finding, but for the store.
        said, trouble = why(reports, failure)
        if trouble is not None:
            lost = [] if trouble.retryable else _lost(before, _shards(request))
            if not lost:
                raise trouble(said) from failure
            said = f"{'; '.join(lost)}; {said}"
        raise _FindingError(said) from failure


def _adapters(request: ReloadRequest, served: _Served, place: Path) -> Iterator[LoRARequest]:
    """The artifact's adapters, as the server's own resolver has them."""
    folder = Path(served.folder)
    store = open_store(str(folder.parent))
    keyfile = str(served.keyfile) if served.keyfile else None
    for number, adapter in enumerate(request.adapters, 1):
        files = request.companions
        try:
            path = adapters.unpack(store, folder.name, adapter, files, keyfile, place)
        except Exception as error:
            raise RuntimeError(f"adapter {adapter.name}: {error}") from error
        yield LoRARequest(adapter.name, number, str(path))


def _first_shard(request: ReloadRequest, served: _Served) -> streams.TensorFile:
    folder = served.tensorizer_uri.rpartition("/")[0]
    return streams.find(f"{folder}/{layout.shard_name(0, request.tensor_parallel_size)}", {})


def _shards(request: ReloadRequest) -> dict[str, str | None]:
    """The version of each shard in S3, whatever way the ranks take to it; None where it is not."""
    store = store_of(request.root, request.s3)
    if store.local_path(request.directory) is not None:
        return {}
    access = access_of(request.s3)
    size = request.tensor_parallel_size
    versions: dict[str, str | None] = {}
    for rank in range(size):
        key = layout.file_key(request.directory, layout.shard_name(rank, size))
        uri = store.uri(key)
        try:
            versions[uri] = streams.object_in_s3(uri, access).version
        except StoreError as error:
            if not _is_absent(store, key, error):
                raise
            versions[uri] = None
    return versions


def _is_absent(store: Store, key: str, error: StoreError) -> bool:
    """Whether `error` came of reading a file that is not in the store."""
    if isinstance(error, StoreUnavailableError):
        return False
    # Not by HEAD, which answers the same where there is no bucket.
    return key not in store.list(key)


def _lost(before: dict[str, str | None], after: dict[str, str | None]) -> list[str]:
    gone = [f"{uri} does not exist" for uri, version in after.items() if version is None]
    replaced = [
        f"{uri} was replaced while it was loaded"
        for uri, version in after.items()
        if version is not None and version != before[uri]
    ]
    return gone + replaced


@contextmanager
def _served(request: ReloadRequest, progress: Progress) -> Iterator[_Served]:
    """The artifact as vLLM takes it: one not on this disk is streamed, all but its small files."""
    store = store_of(request.root, request.s3)
    name = layout.tensorizer_uri_name(request.tensor_parallel_size)
    local = store.local_path(request.directory)
    with ExitStack() as stack:
        secrets = stack.enter_context(private_folder(in_memory=True))
        encrypted = f"{_where(request)}: {request.directory}"
        key = keyfile(secrets, encrypted) if request.encrypted else None
        if local is not None:
            progress.update("hashing the artifact's small files")
            _hold(store, request)
            yield _Served(str(local), f"{local}/{name}", key)
            return
        access = access_of(request.s3)
        folder = stack.enter_context(private_folder()) / "model"
        folder.mkdir()
        progress.update("fetching the artifact's small files")
        _hold(store, request, folder)
        path = secrets / "s3-access.json"
        access.write(path)
        base = access.settings.reload_url
        if base is None or base == "presigned":
            uri = f"{store.uri(request.directory)}/{name}"
        else:
            uri = f"{base.rstrip('/')}/{quote(request.directory)}/{name}"
        # In the environment, since vLLM logs its arguments, and the process list shows them.
        stack.enter_context(_variable(ACCESS_VARIABLE, str(path)))
        yield _Served(str(folder), uri, key)


def _hold(store: Store, request: ReloadRequest, folder: Path | None = None) -> None:
    """Hold the artifact's small files, adapters among them, against the manifest.

    They are fetched into `folder`, where they are not on this disk.
    """
    for file in request.companions:
        key = layout.file_key(request.directory, file.path)
        try:
            if folder is None:
                found = digest(store, key)
            else:
                path = folder / file.path
                path.parent.mkdir(parents=True, exist_ok=True)
                found = store.get_file(key, path)
        except StoreError as error:
            if not _is_absent(store, key, error):
                raise
            absent = f"{store.uri(key)} does not exist, and the manifest names it"
            raise _FindingError(absent) from error
        if found != (file.size, file.sha256):
            raise _FindingError(
                f"{store.uri(key)} has {found.size} bytes with SHA-256 {found.sha256}, and in the "
                f"manifest it has {file.size} with {file.sha256}"
            )


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
