"""Shard MODEL at TP=4 into ROOT, or upload what is in FOLDER to it.

    python s3_tensorize.py shard|both|upload MODEL ROOT FOLDER

Prints seconds without imports, and bytes: of tensors, stored, and read from scratch files.
"""

from __future__ import annotations

import builtins
import io
import json
import sys
import time
from pathlib import Path
from typing import Any

from tensorize_assets.core.s3 import resolve
from tensorize_assets.core.store import open_store
from tensorize_assets.core.tasks import ShardRequest, SnapshotSource
from tensorize_assets.worker import shard
from tensorize_assets.worker.session import Progress

DIRECTORY = "vllm/bench/llama/tp4"


class Counting(io.FileIO):
    """Counts the bytes that are read from a file."""

    read_bytes = 0

    def readinto(self, buffer: Any) -> int | None:
        found = super().readinto(buffer)
        Counting.read_bytes += found or 0
        return found

    def readall(self) -> bytes:
        found = super().readall()
        Counting.read_bytes += len(found)
        return found


def count_reads(scratch: str) -> None:
    """Put a counter under every file below `scratch` that is opened for reading only."""
    plain = builtins.open

    def opened(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if mode == "rb" and str(file).startswith(scratch):
            return io.BufferedReader(Counting(file))
        return plain(file, mode, *arguments, **options)

    builtins.open = io.open = opened  # type: ignore[assignment]


def main(what: str, model: str, root: str, folder: str) -> None:
    store = open_store(root, resolve())
    store.stat("warm")
    if what == "upload":
        files = sorted((Path(folder) / DIRECTORY).iterdir())
        start = time.perf_counter()
        for path in files:
            store.put_file(f"{DIRECTORY}/{path.name}", path)
        print(json.dumps({"seconds": time.perf_counter() - start}))
        return
    scratch = f"{folder}/.scratch"
    count_reads(scratch)
    request = ShardRequest(
        model="bench/llama",
        suffix="tp4",
        snapshot=SnapshotSource(folder=model),
        root=root,
        directory=DIRECTORY,
        scratch_dir=scratch,
        tensor_parallel_size=4,
        dtype="auto",
    )
    start = time.perf_counter()
    result = shard.run(request, Progress.silent())
    seconds = time.perf_counter() - start
    stored = [store.stat(key) or 0 for key in store.list(f"{DIRECTORY}/")]
    tensors = sum(tensor.size for shard in result.shards for tensor in shard.tensors)
    print(
        json.dumps(
            {
                "seconds": seconds,
                "tensors": tensors,
                "stored": sum(stored),
                "read": Counting.read_bytes,
                "stages": result.seconds,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
