"""Write one loaded rank with tensorizer, in the form that vLLM takes for its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from tensorizer import TensorSerializer

from tensorize_assets.core.errors import WorkerError
from tensorize_assets.worker.module_tensors import MARKER, marker, module_tensors


def write_shard(
    model: torch.nn.Module,
    path: Path,
    serialization_kwargs: dict[str, Any],
    written: Callable[[int], None],
) -> None:
    """Serialize `model` to `path` and sync it to the disk. `written` gets bytes, every second.

    Raises:
        WorkerError: a tensor has no values; tensorizer would store it as zeros.
    """
    for name, _, tensor in module_tensors(model):
        if tensor.is_meta:
            raise WorkerError(f"tensor {name!r} was never given values (it is on the meta device)")
    model.register_parameter(MARKER, marker())
    done = Event()

    def watch() -> None:
        while not done.wait(1):
            written(path.stat().st_blocks * 512)

    watcher = Thread(target=watch, name="written-bytes", daemon=True)
    # A plain file, never tensorizer's own S3 stream: that one uploads a partial file when it is
    # closed by an exception, or merely collected.
    with path.open("wb+") as file:
        watcher.start()
        try:
            serializer = TensorSerializer(file, **serialization_kwargs)
            serializer.write_module(model)
            serializer.close()
        finally:
            done.set()
            watcher.join()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
