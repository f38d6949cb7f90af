"""A mirrored snapshot as vLLM sees one in a folder, its safetensors left in the store."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.model_loader import default_loader

from tensorize_assets.core import block_hashes, layout
from tensorize_assets.core.errors import SignatureError, StoreError, StoreUnavailableError
from tensorize_assets.core.manifest import FileEntry
from tensorize_assets.core.store import Store
from tensorize_assets.core.tasks import MirroredSnapshot
from tensorize_assets.worker import snapshots
from tensorize_assets.worker.remote_weights import AT_ONCE, Counter, RemoteFile, tensors_of

_ENDING = ".safetensors"


def lists_of_blocks(snapshot: MirroredSnapshot, store: Store) -> dict[str, bytes] | None:
    """The hashes of the blocks of each file of weights, by its path, to read parts of it by.

    None where a snapshot's weights cannot be read in parts: they are no safetensors, or nobody
    whom the request trusts has signed their lists.
    """
    found: dict[str, bytes] = {}
    for file in snapshot.files:
        if snapshots.is_small(file):
            continue
        if not file.path.endswith(_ENDING):
            return None
        key = layout.snapshot_blocks_key(snapshot.model, file.sha256)
        try:
            stored = store.get_bytes(key)
            if stored is None:
                return None
            found[file.path] = block_hashes.decode(
                stored.data, file.sha256, file.size, snapshot.trusted, store.uri(key)
            )
        except StoreUnavailableError:
            raise
        except (SignatureError, StoreError):
            return None
    return found or None


@contextmanager
def remote_snapshot(
    snapshot: MirroredSnapshot,
    store: Store,
    blocks: Mapping[str, bytes],
    small_files: Path,
    folder: Path,
    counter: Counter,
    cache: Path | None,
) -> Iterator[Path]:
    """Make a `folder` with links to the small files, from which vLLM loads as from a whole one.

    In the weights' places are files of their sizes that hold only the headers: what looks for
    names, types and shapes finds them. Which of the files are loaded is vLLM's own choice; it then
    gets tensors that are read as they are copied. `blocks` is what `lists_of_blocks` returned, and
    `cache` is `tensors_of`'s.

    Raises:
        StoreError: a file is gone from the mirror, or is not the one that was verified.
        PreflightError: a file is no safetensors file.
    """
    _link(small_files, folder)
    # vLLM's own name for it, which pyright takes for a private import.
    module: Any = default_loader
    before = module.safetensors_weights_iterator
    with ExitStack() as stack:
        remote: dict[str, RemoteFile] = {}
        pool = stack.enter_context(ThreadPoolExecutor(AT_ONCE, thread_name_prefix="weights"))
        for file in snapshot.files:
            if file.path in blocks:
                hashes = blocks[file.path]
                opened = stack.enter_context(
                    _opened(store, snapshot.model, file, hashes, counter, pool)
                )
                _placeholder(opened, folder / file.path)
                remote[str(folder / file.path)] = opened

        def iterator(files: list[str], *_: Any, **__: Any) -> Iterator[tuple[str, torch.Tensor]]:
            return _tensors(files, remote, cache)

        module.safetensors_weights_iterator = iterator
        try:
            yield folder
        finally:
            module.safetensors_weights_iterator = before


@contextmanager
def _opened(
    store: Store,
    model: str,
    file: FileEntry,
    hashes: bytes,
    counter: Counter,
    pool: ThreadPoolExecutor,
) -> Iterator[RemoteFile]:
    ranges = store.ranges(layout.snapshot_file_key(model, file.sha256))
    if ranges.size != file.size:
        raise StoreError(
            f"{ranges.uri} has {ranges.size} bytes, and {file.path} of {model} has {file.size}; "
            "remove it and materialize hf_snapshot again"
        )
    opened = RemoteFile(ranges, hashes, counter, pool)
    try:
        yield opened
    finally:
        opened.close()


def _link(small_files: Path, folder: Path) -> None:
    for path in small_files.rglob("*"):
        if path.is_file():
            target = folder / path.relative_to(small_files)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(path)


def _placeholder(file: RemoteFile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    places = file.places()
    path.write_bytes(file.content(0, places[0].start if places else file.size))
    os.truncate(path, file.size)


def _tensors(
    files: list[str], remote: Mapping[str, RemoteFile], cache: Path | None
) -> Iterator[tuple[str, torch.Tensor]]:
    # In the order in which vLLM takes them: of a name that comes twice, the last one stays.
    for file in sorted(files, key=lambda name: [*map(_number, re.split(r"(\d+)", name))]):
        yield from tensors_of(remote[file], cache)


def _number(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdigit() else (0, part)
