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
from typing import Any

Row = tuple[str, str, str]

_MB = 1_000_000
_MIB = 1 << 20
_CHUNK = 2 * _MIB
_KEY = bytes(range(32))
# A Llama's layer of about 100 MiB, four times, and an embedding: some are held in memory, some
# wait in scratch.
_LAYER = {"qkv": 12, "o": 8, "gate_up": 56, "down": 28}
_LAYERS = 4
_EMBEDDING = 128


def encrypt(rounds: int, work: Path) -> list[Row]:
    """A shard of 0.6 GB to a file, and two by the task, in turns with libsodium on one core.

    Cores used are CPU seconds by seconds, so that what else runs on the machine does not count.
    """
    shard = work / "plain.tensors"
    _measured("make", shard)
    rates: dict[str, list[float]] = {}
    memory = 0
    for number in range(rounds + 1):
        for what in ("secretbox", "sha256", "file", "task", "again"):
            with TemporaryDirectory(dir=work) as folder:
                found = _measured(what, shard, Path(folder))
            if not number:
                continue
            rates.setdefault(what, []).append(found["bytes"] / found["cpu"] / _MB)
            rates.setdefault(f"{what}, wall", []).append(found["bytes"] / found["wall"] / _MB)
            if what in ("task", "again"):
                memory = max(memory, int(found["memory"]))
    for path in (shard, shard.with_suffix(".hidden"), shard.with_suffix(".json")):
        path.unlink()
    median = {what: statistics.median(found) for what, found in rates.items()}
    secretbox, sha256 = median["secretbox"], median["sha256"]
    # What no way to make this file from that one, to hold it against its hashes, and to know the
    # hash of what came out, does without.
    least = 1 / (1 / secretbox + 3 / sha256)
    return [
        (
            "encrypt a 0.6 GB shard, disk to disk: ours / (libsodium secretbox on one core x cores "
            f"used), MB/s of a core; {median['file, wall']:.0f} MB/s in all",
            _ratio(median["file"], secretbox),
            "at least 0.85",
        ),
        (
            "the task `encrypt`, two ranks at once, verified, hashed for the manifest and synced; "
            f"{median['task, wall']:.0f} MB/s in all",
            _ratio(median["task"], secretbox),
            "at least 0.85",
        ),
        (
            "the same / (secretbox and the three SHA-256, of each tensor with its old and with its "
            f"new header, and of the new file, {sha256:.0f} MB/s each, on one core x cores used)",
            _ratio(median["task"], least),
            "at least 0.7",
        ),
        (
            "the task with an old and a new key (`tensorize keys rotate`); "
            f"{median['again, wall']:.0f} MB/s in all",
            _ratio(median["again"], secretbox),
            "",
        ),
        ("the task: peak memory", f"{memory / _MIB:.0f} MiB", "under 300 MiB"),
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

    from tensorize_assets.core.manifest import TensorEntry
    from tensorize_assets.worker.encrypt_shard import encrypt_shard
    from tensorize_assets.worker.read_back import read_back
    from tensorize_assets.worker.tensor_file import read_index

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
    # The same with another key, and what is in both: given to the task as their manifests do.
    described: dict[str, list[Any]] = {}
    for path, key in ((shard, None), (hidden := shard.with_suffix(".hidden"), _KEY[::-1])):
        if key is not None:
            with shard.open("rb") as source, hidden.open("wb") as file:
                index = read_index(source, str(shard))
                made = encrypt_shard(source, index, str(shard), key, [], scratch=shard.parent)
                file.writelines(made)
        tensors: list[TensorEntry] = []
        for _ in read_back(path, tensors, needs_marker=False, key=key):
            pass
        described[path.suffix] = [tensor.model_dump(mode="json") for tensor in tensors]
    shard.with_suffix(".json").write_text(json.dumps(described))
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
    from tensorize_assets.worker.tensor_file import read_index

    with (
        shard.open("rb") as source,
        (folder / "encrypted.tensors").open("wb", buffering=0) as file,
    ):
        index = read_index(source, str(shard))
        made = encrypt_shard(source, index, str(shard), _KEY, [], scratch=folder)
        return sum(file.write(chunk) for chunk in made)


def _task(shard: Path, folder: Path) -> int:
    return _encrypted(shard, folder, {"data_key": _KEY})


def _again(shard: Path, folder: Path) -> int:
    keys = {"data_key": _KEY, "old_data_key": _KEY[::-1]}
    return _encrypted(shard.with_suffix(".hidden"), folder, keys)


def _encrypted(shard: Path, folder: Path, keys: dict[str, bytes]) -> int:
    """Two ranks, which are the same file."""
    from tensorize_assets.core.tasks import EncryptRequest, TensorFile
    from tensorize_assets.worker import encrypt, session
    from tensorize_assets.worker.session import Progress

    (folder / "plain").mkdir()
    described = json.loads(shard.with_suffix(".json").read_text())[shard.suffix]
    names = ["model-rank-000.tensors", "model-rank-001.tensors"]
    for name in names:
        os.link(shard, folder / "plain" / name)
    session.secrets = lambda: keys
    request = EncryptRequest(
        model="m",
        suffix="s",
        root=str(folder),
        source="plain",
        directory="hidden",
        files=tuple(TensorFile(path=name, tensors=described) for name in names),
        scratch_dir=str(folder / "scratch"),
    )
    return sum(file.size for file in encrypt.run(request, Progress.silent()).files)


_RUNS: dict[str, Callable[[Path, Path], int]] = {
    "secretbox": _secretbox,
    "sha256": _sha256,
    "file": _file,
    "task": _task,
    "again": _again,
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
    import tensorize_assets.worker.encrypt  # noqa: F401

    cpu, wall = _cpu(), time.perf_counter()
    size = _RUNS[what](shard, folder)
    cpu, wall = _cpu() - cpu, time.perf_counter() - wall
    print(json.dumps({"bytes": size, "cpu": cpu, "wall": wall, "memory": _peak()}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3] if len(sys.argv) > 3 else "."))
