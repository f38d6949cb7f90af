"""Gives vLLM the adapters of the build that it serves, each when it is first asked for."""

from __future__ import annotations

import asyncio
import atexit
from contextlib import ExitStack
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

from vllm.exceptions import GracefulHTTPError
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver

from tensorize_assets.core import layout, manifest, serving
from tensorize_assets.core.errors import (
    PreflightError,
    StoreUnavailableError,
    TensorizeAssetsError,
)
from tensorize_assets.core.http_folder import HttpFolder
from tensorize_assets.core.manifest import AdapterEntry, Manifest
from tensorize_assets.core.s3 import S3Settings
from tensorize_assets.core.scratch import private_folder
from tensorize_assets.core.store import Reader, open_store
from tensorize_assets.vllm_plugin import adapters, streams

# Below vLLM's own, which has the handler.
logger = init_logger(f"vllm.{__name__}")


class ArtifactResolver(LoRAResolver):
    """Answers for the adapters of a build, by their names in its manifest, and for no others.

    The build is the one that `tensorize serve` serves; without it, the one in the folder that
    vLLM was given as its model.
    """

    def __init__(self) -> None:
        self._fetched: dict[str, asyncio.Task[Path]] = {}

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Raises GracefulHTTPError, whose message the client gets: 503 where a later try may do."""
        try:
            build = await asyncio.to_thread(_build, base_model_name)
            adapter = build and build.adapters.get(lora_name)
            if not build or not adapter:
                return None
            folder = await self._fetch(build, adapter)
        except Exception as error:
            raise _failed(lora_name, error) from error
        return LoRARequest(lora_name, 1, str(folder))  # vLLM gives it a number of its own.

    async def _fetch(self, build: _Build, adapter: AdapterEntry) -> Path:
        content = adapters.content(adapter, build.manifest.files)
        task = self._fetched.get(content)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = asyncio.create_task(asyncio.to_thread(build.unpack, adapter))
            self._fetched[content] = task
        # Others may wait for it when this client goes.
        return await asyncio.shield(task)


class _Build(NamedTuple):
    store: Reader
    directory: str
    manifest: Manifest
    keyfile: str | None

    @property
    def adapters(self) -> dict[str, AdapterEntry]:
        return {adapter.name: adapter for adapter in self.manifest.adapters}

    def unpack(self, adapter: AdapterEntry) -> Path:
        encrypted = self.manifest.encryption is not None
        if encrypted and self.keyfile is None:
            raise PreflightError(
                f"build {self.manifest.build_id} of {self.manifest.model} is encrypted, and only "
                "`tensorize serve` gives the key of its adapters to the server; start it so"
            )
        place = _place(encrypted)
        files = self.manifest.files
        return adapters.unpack(self.store, self.directory, adapter, files, self.keyfile, place)


@cache
def _build(base_model_name: str) -> _Build | None:
    served = serving.current()
    if served is not None:
        found = serving.manifest_of(served)
        return _Build(_reader(served.root), served.directory, found, served.keyfile)
    folder = Path(base_model_name)
    if not (folder / layout.MANIFEST).is_file():
        return None
    folder = folder.absolute()
    store = open_store(str(folder.parent))
    try:
        found = manifest.read_unplaced(store, folder.name, None)
    except TensorizeAssetsError as error:
        # Other tools have files of this name too.
        logger.warning("%s; adapters are served of our builds only", error)
        return None
    return _Build(store, folder.name, found.manifest, None) if found else None


def _reader(root: str) -> Reader:
    if root.lower().startswith(("http://", "https://")):
        return HttpFolder(root, ca_bundle=streams.ca_bundle(S3Settings()))
    return open_store(root)


@cache
def _place(in_memory: bool) -> Path:
    """The folder for unpacked adapters; it lives as long as this process."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(private_folder(in_memory=in_memory))


def _failed(lora_name: str, error: Exception) -> GracefulHTTPError:
    said = f"adapter {lora_name} was not loaded: {error}"
    # vLLM logs none of what a client gets, which has no paths.
    logger.error("%s", said)
    later = isinstance(error, StoreUnavailableError)
    status = HTTPStatus.SERVICE_UNAVAILABLE if later else HTTPStatus.INTERNAL_SERVER_ERROR
    return GracefulHTTPError(said, status)
