"""TP=4 of a 2 GB random Llama from the mirror: ranks as Ray tasks, against one process.

    python -m bench.ranks [--rounds 3]

Both read the same safetensors from the same S3 server, by ranges, and write to it. What counts is
the ranks' own work, from the configuration of vLLM to the last byte stored: not the start of
processes and not imports, of which Ray's tasks have four, two at a time.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from tensorize_assets.core import mirror, signing
from tensorize_assets.core.manifest import FileEntry
from tensorize_assets.core.s3 import S3Access, S3Credentials, S3Settings
from tensorize_assets.core.store import digest, open_store
from tensorize_assets.core.tasks import MirroredSnapshot, ShardRequest, SnapshotSource
from tensorize_assets.demo.s3_server import REGION, LocalS3

MODEL, COMMIT, RANKS, AT_ONCE, LAYERS = "bench/llama", "c" * 40, 4, 2, 19


def requests_in(folder: Path) -> Any:
    """The request that `one` and `ray` work on, of a round."""
    return ShardRequest.model_validate_json((folder / "request.json").read_bytes())


def one(folder: Path, directory: str) -> None:
    """All ranks in this process; prints seconds and bytes."""
    from tensorize_assets.worker import shard
    from tensorize_assets.worker.session import Progress

    request = requests_in(folder).model_copy(update={"directory": directory})
    began, before = time.perf_counter(), psutil.cpu_times()
    result = shard.run(request, Progress.silent())
    seconds, after = time.perf_counter() - began, psutil.cpu_times()
    # Of the whole machine: the S3 server's work is the same whoever asks it.
    idle = after.idle - before.idle + after.iowait - before.iowait
    busy = 1 - idle / (seconds * (os.cpu_count() or 1))
    print(json.dumps({"seconds": seconds, "bytes": result.source_bytes, "busy": busy}))


def on_ray(folder: Path, directory: str) -> None:
    """Each rank a task, two at a time; prints seconds and bytes."""
    import ray

    from tensorize_assets.core.protocol import parse_reply
    from tensorize_assets.core.shard_parts import split
    from tensorize_assets.core.tasks import ShardResult
    from tensorize_assets.worker import ray_ranks

    ray.init(
        num_cpus=AT_ONCE, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False
    )
    request = requests_in(folder).model_copy(update={"directory": directory})

    class Quiet:
        def put_nowait(self, _: object) -> None:
            pass

    start = ray.remote(num_cpus=1, max_calls=1)(ray_ranks.rank_task)
    tasks = [
        start.remote(
            "tensorize_assets.worker.__main__", part.model_dump(mode="json"), None, Quiet()
        )
        for part in split(request)
    ]
    results = [parse_reply([reply], ShardResult) for reply in ray.get(tasks)]
    took = [sum(result.seconds.values()) for result in results if isinstance(result, ShardResult)]
    assert len(took) == RANKS, results
    # Two at a time: the second pair begins when the first has ended.
    seconds = sum(max(took[at : at + AT_ONCE]) for at in range(0, RANKS, AT_ONCE))
    read = sum(result.source_bytes or 0 for result in results if isinstance(result, ShardResult))
    print(json.dumps({"seconds": seconds, "bytes": read}))


def main(rounds: int) -> None:
    with TemporaryDirectory(prefix="bench-ranks-") as work, LocalS3(Path(work, "s3")) as server:
        server.create_bucket("bench")
        access = S3Access(
            settings=S3Settings(endpoint_url=server.endpoint, region=REGION),
            credentials=S3Credentials(
                access_key_id=server.access_key, secret_access_key=server.secret_key
            ),
        )
        snapshot = Path(work, "llama")
        made = [sys.executable, str(Path(__file__).parent / "random_llama.py")]
        subprocess.run([*made, str(snapshot), str(LAYERS)], check=True, capture_output=True)
        store = open_store("s3://bench", access)
        files = [path for path in snapshot.rglob("*") if path.is_file()]
        entries = tuple(_entry(path, snapshot) for path in sorted(files))
        key = signing.generate_signing_key()
        listed = mirror.SnapshotList(
            model=MODEL, commit=COMMIT, weights_format="safetensors", files=entries
        )
        mirror.upload(store, listed, snapshot, key=key)
        request = ShardRequest(
            model=MODEL,
            suffix="tp4",
            snapshot=SnapshotSource(
                mirrored=MirroredSnapshot(
                    model=MODEL, commit=COMMIT, files=entries, trusted=(key.public_key,)
                )
            ),
            root="s3://bench",
            directory="-",
            scratch_dir=f"{work}/scratch",
            tensor_parallel_size=RANKS,
            dtype="auto",
            s3=access.settings,
        )
        Path(work, "request.json").write_text(request.model_dump_json())
        size = sum(entry.size for entry in entries if entry.path.endswith(".safetensors"))
        found: dict[str, list[dict[str, float]]] = {"one": [], "ray": []}
        for number in range(rounds):
            for kind, results in found.items():
                results.append(_run(kind, work, f"vllm/{MODEL}/{kind}-{number}", server))
        _table(found, size)


def _entry(path: Path, folder: Path) -> FileEntry:
    found = digest(open_store(str(folder)), str(path.relative_to(folder)))
    return FileEntry(path=str(path.relative_to(folder)), size=found.size, sha256=found.sha256)


def _run(kind: str, work: str, directory: str, server: LocalS3) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "bench.ranks", "--as", kind, "--folder", work, "--to", directory],
        env=os.environ
        | {
            # Else Ray leaves a token in the home, which every later cluster asks for.
            "RAY_AUTH_MODE": "disabled",
            "S3_ACCESS_KEY_ID": server.access_key,
            "S3_SECRET_ACCESS_KEY": server.secret_key,
            "TENSORIZE_SNAPSHOT_CACHE": f"{work}/cache-{directory.replace('/', '-')}",
        },
        stdout=subprocess.PIPE,
        check=True,
        timeout=900,
    )
    return json.loads(done.stdout.splitlines()[-1])


def _table(found: dict[str, list[dict[str, float]]], size: int) -> None:
    table = Table("ranks", "seconds", "ratio", "bytes read of the checkpoint's")
    medians = {
        kind: statistics.median(one["seconds"] for one in results)
        for kind, results in found.items()
    }
    for kind, results in found.items():
        table.add_row(
            {"one": "one process", "ray": f"Ray tasks, {AT_ONCE} at a time"}[kind],
            f"{medians[kind]:.1f}",
            f"{medians[kind] / medians['one']:.2f}",
            f"{max(one['bytes'] for one in results) / size:.3f}",
        )
    Console().print(f"TP={RANKS} of {size / 1e9:.2f} GB, medians of {len(found['one'])}")
    Console().print(table)
    busy = statistics.median(one["busy"] for one in found["one"])
    Console().print(
        f"One process has {busy:.0%} of the machine's cores busy: the same work spread over all of "
        f"them takes {busy:.2f} of its time at least."
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--as", dest="kind", choices=("one", "ray"))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--to")
    asked = parser.parse_args()
    if asked.kind is None:
        main(asked.rounds)
    else:
        {"one": one, "ray": on_ray}[asked.kind](asked.folder, asked.to)
