"""Run the task `shard` against a real S3 server; what came of each case goes to CASES.

    python s3_shard_cases.py OUT CASES

The model's shards are of several parts of a multipart upload each.
"""

import builtins
import hashlib
import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from building import request
from transformers import LlamaConfig, LlamaForCausalLM

from tensorize_assets.core import mirror, s3_store
from tensorize_assets.core.manifest import FileEntry
from tensorize_assets.core.s3 import S3Access, S3Credentials, S3Settings
from tensorize_assets.core.shard_parts import merge, split
from tensorize_assets.core.signing import SecretKey, generate_signing_key
from tensorize_assets.core.store import Store, digest, open_store
from tensorize_assets.core.tasks import MirroredSnapshot, ShardRequest, SnapshotSource
from tensorize_assets.demo.s3_server import LocalS3
from tensorize_assets.worker import shard, write_rank
from tensorize_assets.worker.session import Progress

RANKS = 4
BUCKET = "shards"
s3_store.PART_BYTES = 5 << 20


class Reads(io.FileIO):
    """Counts what is read of files."""

    count = 0

    def readinto(self, buffer: Any) -> int | None:
        found = super().readinto(buffer)
        Reads.count += found or 0
        return found

    def readall(self) -> bytes:
        found = super().readall()
        Reads.count += len(found)
        return found


@contextmanager
def counted(folder: Path) -> Iterator[None]:
    """Count what is read of files below `folder`."""
    plain = builtins.open

    def opened(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if mode == "rb" and str(file).startswith(str(folder)):
            return io.BufferedReader(Reads(file))
        return plain(file, mode, *arguments, **options)

    Reads.count = 0
    with patch.object(builtins, "open", opened), patch.object(io, "open", opened):
        yield


class Seen:
    """The most shards that lay in scratch at once."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._ended = threading.Event()
        self.most = 0

    def __enter__(self) -> "Seen":
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.002):
            self.most = max(self.most, len(list(self._scratch.glob("*/*.tensors"))))


def model(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300_000,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def mirror_of(folder: Path, store: Store, key: SecretKey | None = None) -> SnapshotSource:
    """The folder's files in the mirror of a store; with a key they can be read by ranges."""
    files: list[FileEntry] = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        sha256 = hashlib.sha256(data).hexdigest()
        files.append(FileEntry(path=path.name, size=len(data), sha256=sha256))
    found = mirror.SnapshotList(
        model="tiny/model", commit="a" * 40, weights_format="safetensors", files=tuple(files)
    )
    mirror.upload(store, found, folder, key=key)
    entries = MirroredSnapshot(
        model=found.model,
        commit=found.commit,
        files=found.files,
        trusted=(key.public_key,) if key else (),
    )
    return SnapshotSource(mirrored=entries)


def main(out: Path, cases: Path) -> None:
    # In a process of its own, as torch starts threads with its first work; see below.
    if not os.fork():
        model(out / "model")
        os._exit(0)
    os.wait()
    snapshot = out / "model"
    found: dict[str, Any] = {}
    with LocalS3(out / "s3") as server:
        server.create_bucket(BUCKET)
        settings = S3Settings(endpoint_url=server.endpoint, region="us-east-1")
        access = S3Access(settings, S3Credentials(server.access_key, server.secret_key))
        client = server.client()
        os.environ["S3_ACCESS_KEY_ID"] = server.access_key
        os.environ["S3_SECRET_ACCESS_KEY"] = server.secret_key

        def asked(name: str, root: str | None = None) -> ShardRequest:
            asked = request(
                snapshot,
                out / name,
                "big",
                scratch_dir=str(out / name / "scratch"),
                tensor_parallel_size=RANKS,
                s3=None if root else settings,
            )
            return asked.model_copy(update={"root": root or f"s3://{BUCKET}/{name}"})

        def left(name: str) -> dict[str, Any]:
            store = open_store(f"s3://{BUCKET}/{name}", access)
            uploads = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
            return {
                "objects": {key: digest(store, key).sha256 for key in store.list("")},
                "uploads": [entry["Key"] for entry in uploads],
                "scratch": sorted(path.name for path in (out / name).rglob("*.tensors")),
            }

        def run(name: str, source: SnapshotSource | None = None) -> dict[str, Any]:
            lines: list[str] = []
            progress = Progress(lambda message, _: lines.append(message))
            request = asked(name)
            if source is not None:
                request = request.model_copy(update={"snapshot": source})
            try:
                result = shard.run(request, progress)
                answer: dict[str, Any] = {"result": result.model_dump(mode="json")}
            except Exception as error:  # noqa: BLE001 - a test reads which it was
                answer = {"error": type(error).__name__, "message": str(error)}
            return answer | left(name) | {"log": lines}

        # First of all: a fork waits for ever for threads that only the process it came from has.
        child = os.fork()
        if not child:
            sent = s3_store.S3Store._send_part

            def dies(self: Any, key: str, upload: Any, number: int, data: Any) -> Any:
                if "rank-001" in key and number == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                return sent(self, key, upload, number, data)

            with patch.object(s3_store.S3Store, "_send_part", dies):
                shard.run(asked("killed"), Progress.silent())
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found["killed"] = left("killed") | {"signal": os.WTERMSIG(status)}
        found["again"] = run("killed")

        reference = shard.run(asked("disk", root=str(out / "disk" / "root")), Progress.silent())
        found["disk"] = reference.model_dump(mode="json")

        os.environ["TENSORIZE_SNAPSHOT_CACHE"] = str(out / "snapshot-cache")
        mirrored = mirror_of(snapshot, open_store(f"s3://{BUCKET}/mirrored", access))
        key = generate_signing_key()
        ranged = mirror_of(snapshot, open_store(f"s3://{BUCKET}/ranged", access), key)
        snapshot.rename(out / "hidden")
        found["mirrored"] = run("mirrored", mirrored)
        found["ranged"] = run("ranged", ranged)
        files = (out / "hidden").glob("*.safetensors")
        found["ranged"]["size"] = sum(path.stat().st_size for path in files)
        alone = asked("apart").model_copy(
            update={"snapshot": ranged, "root": f"s3://{BUCKET}/ranged"}
        )
        parts = [shard.run(part, Progress.silent()) for part in split(alone)]
        found["apart"] = merge(parts[::-1]).model_dump(mode="json")
        (out / "hidden").rename(snapshot)

        scratch = out / "plain" / "scratch"
        scratch.mkdir(parents=True)
        slow = s3_store.S3Store._send_part

        active: list[int] = []

        def slower(self: Any, *arguments: Any) -> Any:
            active.append(1)
            # Longer than a rank takes to build.
            time.sleep(3)
            active.pop()
            return slow(self, *arguments)

        overlaps: list[bool] = []
        written = write_rank.write_shard

        def writing(model: Any, path: Path, *rest: Any) -> None:
            # The shard before it may still be on its way to its first part.
            deadline = time.monotonic() + 5
            while not active and "rank-000" not in path.name and time.monotonic() < deadline:
                time.sleep(0.01)
            overlaps.append(bool(active))
            written(model, path, *rest)

        with (
            counted(scratch),
            Seen(scratch) as seen,
            patch.object(s3_store.S3Store, "_send_part", slower),
            patch.object(write_rank, "write_shard", writing),
        ):
            found["plain"] = run("plain")
        found["plain"] |= {"most": seen.most, "read": Reads.count, "overlaps": overlaps}

        def damaging(model: Any, path: Path, *rest: Any) -> None:
            written(model, path, *rest)
            if "rank-001" in path.name:
                with path.open("r+b") as file:
                    file.seek(-1000, os.SEEK_END)
                    byte = file.read(1)
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte[0] ^ 1]))

        with patch.object(write_rank, "write_shard", damaging):
            found["damaged"] = run("damaged")

        class Cancelled(Progress):
            """What SIGTERM does to a worker: an exception in the midst of the work."""

            def update(self, stage: str, rank: int | None = None, *_: object, **__: object) -> None:
                if (stage, rank) == ("writing", 2) or (stage, rank) == ("loading", 2):
                    sys.exit(143)

        with patch.object(s3_store.S3Store, "_send_part", slower):
            try:
                shard.run(asked("cancelled"), Cancelled(lambda *_: None))
                found["cancelled"] = {"exit": None}
            except SystemExit as error:
                found["cancelled"] = {"exit": error.code} | left("cancelled")
    cases.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
