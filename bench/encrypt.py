"""Encrypting a shard from disk to disk, against libsodium's secretbox and nothing else.

`python -m bench.encrypt WHAT [FILE [FOLDER]]` is one measurement in a process of its own: its
seconds, also of all its cores together, its bytes and, in bytes, the most memory it had.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

Row = tuple[str, str, str]

_MB = 1_000_000
_MIB = 1 << 20
_CHUNK = 2 * _MIB
_KEY = bytes(range(32))
# A Llama's layer of about 100 MiB, nine times, and an embedding: some are held in memory, some
# wait in scratch.
_LAYER = {"qkv": 12, "o": 8, "gate_up": 56, "down": 28}
_LAYERS = 9
_EMBEDDING = 128


def encrypt(rounds: int, work: Path) -> list[Row]:
    """A shard of 1.1 GB to a file and to a store, in turns with libsodium alone on one core.

    Cores used are CPU seconds by seconds, so that what else runs on the machine does not count.
    """
    shard = work / "plain.tensors"
    _measured("make", shard)
    rates: dict[str, list[float]] = {}
    memory = 0
    for number in range(rounds + 1):
        for what in ("secretbox", "sha256", "file", "store"):
            with TemporaryDirectory(dir=work) as folder:
                found = _measured(what, shard, Path(folder))
            if not number:
                continue
            rates.setdefault(what, []).append(found["bytes"] / found["cpu"] / _MB)
            rates.setdefault(f"{what}, wall", []).append(found["bytes"] / found["wall"] / _MB)
            if what in ("file", "store"):
                memory = max(memory, int(found["memory"]))
    shard.unlink()
    median = {what: statistics.median(found) for what, found in rates.items()}
    # What no way to make this file from that one, and to hold it against its hashes, does without.
    least = 1 / (1 / median["secretbox"] + 2 / median["sha256"])
    return [
        (
            "encrypt a 1.1 GB shard, disk to disk: ours / (libsodium secretbox on one core x cores "
            f"used), MB/s of a core; {median['file, wall']:.0f} MB/s in all, "
            f"{median['store, wall']:.0f} MB/s into a store, hashed once more and synced",
            _ratio(median["file"], median["secretbox"]),
            "at least 0.85",
        ),
        (
            "the same / (secretbox and the two SHA-256 of each tensor: its old and its new one, "
            f"{median['sha256']:.0f} MB/s each, on one core x cores used)",
            _ratio(median["file"], least),
            "at least 0.7",
        ),
        ("encrypt a 1.1 GB shard: peak memory", f"{memory / _MIB:.0f} MiB", "under 300 MiB"),
    ]


def _ratio(ours: float, theirs: float) -> str:
    return f"{ours:.0f} / {theirs:.0f} = {ours / theirs:.2f}"


def _measured(*arguments: str | Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "bench.encrypt", *map(str, arguments)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
    )
    return json.loads(done.stdout)


def _make(shard: Path) -> int:
    import torch
    from tensorizer import TensorSerializer

    torch.manual_seed(0)
    model = torch.nn.Module()
    sizes = {"embedding": _EMBEDDING}
    for layer in range(_LAYERS):
        sizes |= {f"{name}_{layer}": size for name, size in _LAYER.items()}
    for name, size in sizes.items():
        data = torch.randint(0, 256, (size * _MIB,), dtype=torch.uint8)
        model.register_buffer(name, data)
    serializer = TensorSerializer(str(shard))
    serializer.write_module(model)
    serializer.close()
    return shard.stat().st_size


def _secretbox(_: Path, __: Path) -> int:
    from tensorize_assets.worker import secretbox

    data, room = os.urandom(_CHUNK), bytearray(secretbox.MAC_BYTES + _CHUNK)
    for number in range(400):
        secretbox.seal(data, number.to_bytes(24, "little"), _KEY, room)
    return 400 * _CHUNK


def _sha256(_: Path, __: Path) -> int:
    digest, data = hashlib.sha256(), os.urandom(_CHUNK)
    for _number in range(400):
        digest.update(data)
    return 400 * _CHUNK


def _file(shard: Path, folder: Path) -> int:
    from tensorize_assets.worker.encrypt_shard import encrypt_shard

    with (folder / "encrypted.tensors").open("wb", buffering=0) as file:
        return sum(file.write(chunk) for chunk in encrypt_shard(shard, _KEY, []))


def _store(shard: Path, folder: Path) -> int:
    from tensorize_assets.core.local_store import LocalStore
    from tensorize_assets.worker.encrypt_shard import encrypt_shard, encrypted_size

    return (
        LocalStore(folder)
        .put_stream("e.tensors", encrypt_shard(shard, _KEY, []), size=encrypted_size(shard))
        .size
    )


_RUNS: dict[str, Callable[[Path, Path], int]] = {
    "secretbox": _secretbox,
    "sha256": _sha256,
    "file": _file,
    "store": _store,
}


def _cpu() -> float:
    times = os.times()
    return times.user + times.system


def _peak() -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x)
    return int(line.split()[1]) * 1024


def main(what: str, shard: Path, folder: Path) -> None:
    if what == "make":
        print(json.dumps({"bytes": _make(shard)}))
        return
    # Imports are not what is measured.
    import tensorize_assets.core.local_store
    import tensorize_assets.worker.encrypt_shard  # noqa: F401

    cpu, wall = _cpu(), time.perf_counter()
    size = _RUNS[what](shard, folder)
    cpu, wall = _cpu() - cpu, time.perf_counter() - wall
    print(json.dumps({"bytes": size, "cpu": cpu, "wall": wall, "memory": _peak()}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3] if len(sys.argv) > 3 else "."))
