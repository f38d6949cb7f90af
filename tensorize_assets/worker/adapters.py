"""Task `adapters`: LoRA adapters become tensorizer files, as vLLM's own function writes them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch

from tensorize_assets.core import layout
from tensorize_assets.core.errors import WorkerError
from tensorize_assets.core.manifest import AdapterEntry, FileEntry, TensorEntry
from tensorize_assets.core.scratch import scratch_folder
from tensorize_assets.core.store import Store
from tensorize_assets.core.tasks import AdaptersRequest, AdaptersResult
from tensorize_assets.worker import adapter_preflight, preflight, session, snapshots
from tensorize_assets.worker.access import store_of
from tensorize_assets.worker.adapter_preflight import Adapter
from tensorize_assets.worker.read_back import read_back
from tensorize_assets.worker.serializer import serializer
from tensorize_assets.worker.session import Progress
from tensorize_assets.worker.write_shard import Named, write_encrypted

# tensorizer's TensorType of what `write_state_dict` writes.
_STATE_DICT = 2


def run(request: AdaptersRequest, progress: Progress) -> AdaptersResult:
    """Write every adapter's tensors, always on the CPU, and its config beside them.

    All are looked at before the first is written. Each file is read back once: verified, and
    stored by the same read.

    Raises:
        PreflightError: an adapter cannot be served, or the scratch disk is too small; nothing was
            written.
        WorkerError: what was written does not read back.
        StoreError: the store refuses a file.
    """
    start = time.perf_counter()
    key = session.data_key(f"{request.model} {request.suffix}") if request.encrypted else None
    progress.update("reading the adapters and what they are for")
    place = partial(snapshots.local_folder, root=request.root, s3=request.s3, progress=progress)
    base = adapter_preflight.read_base(place(request.base), request.model)
    adapters = [
        adapter_preflight.check(
            source, place(source.source), base, lambda said: progress.log(said, "warning")
        )
        for source in request.adapters
    ]
    checked = time.perf_counter()
    store = store_of(request.root, request.s3)
    entries: list[AdapterEntry] = []
    files: list[FileEntry] = []
    # Of a name of its own: the shards of this build may be in the making.
    with scratch_folder(Path(request.scratch_dir), f"{request.directory}/adapters") as scratch:
        _check_scratch(adapters, store, request, scratch)
        for adapter in adapters:
            entry, written = _store(adapter, len(adapters), request, store, scratch, key, progress)
            entries.append(entry)
            files += written
    return AdaptersResult(
        adapters=tuple(entries),
        files=tuple(files),
        seconds={
            "check": round(checked - start, 3),
            "write": round(time.perf_counter() - checked, 3),
        },
    )


def write_adapter(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write the file that vLLM's `tensorize_lora_adapter` makes of these tensors.

    That is in vllm/model_executor/model_loader/tensorizer.py, up to 0.31.
    """
    with serializer(path) as writer:
        writer.write_state_dict(dict(tensors))


def _check_scratch(
    adapters: list[Adapter], store: Store, request: AdaptersRequest, scratch: Path
) -> None:
    sizes = [adapter.size + preflight.METADATA_REGION for adapter in adapters]
    # On a disk that is also the root's, what is stored stays.
    needed = sum(sizes) if store.local_path(request.directory) else max(sizes)
    where = f"{request.model} {request.suffix}"
    preflight.check_scratch(scratch, needed, where, "its adapters take")


def _store(
    adapter: Adapter,
    count: int,
    request: AdaptersRequest,
    store: Store,
    scratch: Path,
    key: bytes | None,
    progress: Progress,
) -> tuple[AdapterEntry, tuple[FileEntry, FileEntry]]:
    name = adapter.source.name
    progress.update(f"writing adapter {name}")
    path = scratch / layout.ADAPTER_TENSORS
    if key is None:
        write_adapter(adapter.tensors, path)
    else:
        named = [Named(name, _STATE_DICT, 0, tensor) for name, tensor in adapter.tensors.items()]
        write_encrypted(named, path, key, lambda _: None)
    progress.update(f"storing adapter {name}")
    place, config_place = (
        layout.adapter_file(name, count, file)
        for file in (layout.ADAPTER_TENSORS, layout.ADAPTER_CONFIG)
    )
    tensors: list[TensorEntry] = []
    chunks = _verified(adapter, path, tensors, key)
    at = layout.file_key(request.directory, place)
    stored = store.put_file(at, path, move=True, chunks=chunks)
    store.put_bytes(layout.file_key(request.directory, config_place), adapter.config)
    progress.log(f"{adapter.where}: {len(tensors)} tensors, {stored.size:,} bytes, {place}")
    entry = AdapterEntry(
        name=name,
        repo=adapter.source.repo,
        snapshot=adapter.source.snapshot,
        rank=adapter.rank,
        file=place,
        config=config_place,
        tensors=tuple(tensors),
    )
    config = FileEntry(
        path=config_place,
        size=len(adapter.config),
        sha256=hashlib.sha256(adapter.config).hexdigest(),
    )
    return entry, (FileEntry(path=place, size=stored.size, sha256=stored.sha256), config)


def _verified(
    adapter: Adapter, path: Path, tensors: list[TensorEntry], key: bytes | None
) -> Iterator[bytes]:
    """The file's bytes; raises after the last one unless they are what was to be written."""
    yield from read_back(path, tensors, needs_marker=False, key=key)
    differ = {tensor.name for tensor in tensors} ^ adapter.tensors.keys()
    if differ:
        raise WorkerError(
            f"{adapter.where}: {path.name} holds {len(tensors)} tensors and the adapter has "
            f"{len(adapter.tensors)}; they differ in {', '.join(sorted(differ)[:5])}"
        )
