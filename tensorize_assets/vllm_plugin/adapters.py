"""A build's LoRA adapters as vLLM takes them from a folder: the files that peft writes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from vllm.model_executor.model_loader.tensorizer import TensorizerConfig

from tensorize_assets.core import layout
from tensorize_assets.core.copy import copy_file
from tensorize_assets.core.errors import StoreError
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.manifest import AdapterEntry, FileEntry
from tensorize_assets.core.store import Reader
from tensorize_assets.vllm_plugin import streams
from tensorize_assets.vllm_plugin.loader import arguments_of, file_errors, require_whole


def unpack(
    store: Reader,
    directory: str,
    adapter: AdapterEntry,
    files: Collection[FileEntry],
    keyfile: str | None,
    place: Path,
) -> Path:
    """Write an adapter of the artifact in `directory` to a folder in `place`; returns the folder.

    It is named by its content, and complete; one that is there is taken. Both files are held
    against the manifest's `files`. The tensors are read on the CPU, whatever the server's device.

    Raises:
        StoreError: a file cannot be had, StoreUnavailableError if only now; or is not the
            manifest's; or cannot be written.
        ValueError, HashMismatchError, CryptographyError: as the loader does.
    """
    tensors, config = _files(adapter, files)
    folder = place / content(adapter, files)
    if folder.exists():
        return folder
    part = Path(tempfile.mkdtemp(dir=place))
    try:
        for file, name in ((config, layout.ADAPTER_CONFIG), (tensors, layout.ADAPTER_TENSORS)):
            key = layout.file_key(directory, file.path)
            copy_file(store, key, LocalStore(part), name, file)
        _convert(
            part / layout.ADAPTER_TENSORS,
            store.uri(layout.file_key(directory, tensors.path)),
            keyfile,
        )
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return folder


def content(adapter: AdapterEntry, files: Collection[FileEntry]) -> str:
    """A name for what an adapter's files hold, by the manifest's `files`."""
    return "-".join(file.sha256 for file in _files(adapter, files))


def _files(adapter: AdapterEntry, files: Collection[FileEntry]) -> tuple[FileEntry, FileEntry]:
    entries = {file.path: file for file in files}
    return entries[adapter.file], entries[adapter.config]


def _convert(packed: Path, uri: str, keyfile: str | None) -> None:
    config = TensorizerConfig(
        tensorizer_uri=str(packed), verify_hash=True, num_readers=1, encryption_keyfile=keyfile
    )
    file = streams.find(str(packed), {})
    arguments = arguments_of(config).deserialization_kwargs
    with file_errors(uri), file.deserializer("cpu", arguments) as deserializer:
        require_whole(file, deserializer)
        tensors = {str(name): tensor for name, tensor in deserializer.items()}
    # A folder in memory need not have room for both.
    packed.unlink()
    path = packed.with_suffix(".safetensors")
    try:
        save_file(tensors, path, {"format": "pt"})
    except SafetensorError as error:
        raise StoreError(f"cannot write {path}: {error}; free some space there") from error
