"""Run the task `shard` in executor mode, as it must work and as it must fail; results go to CASES.

    python executor_cases.py MODELS OUT CASES

One process for all. Its ranks are forks of it, which import nothing anew and have what is patched
here; but for one, whose ranks start as they do in production, by the plugin's entry point.
"""

import base64
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import torch
from building import request
from encrypted_shard_cases import KEY
from engine_cases import ranks
from safetensors.torch import load_file, save_file
from shard_cases import attempt
from tensorizer import DecryptionParams, TensorDeserializer
from vllm.v1.executor import multiproc_executor
from vllm.v1.worker import cpu_worker

from tensorize_assets.core.tasks import DATA_KEY
from tensorize_assets.vllm_plugin import shard_writer
from tensorize_assets.worker import executor_ranks, preflight, session
from tensorize_assets.worker.session import Progress

SECONDS_TO_JOIN = 4.0


@contextmanager
def forked() -> Iterator[None]:
    context = multiprocessing.get_context("fork")
    with patch.object(multiproc_executor, "get_mp_context", lambda: context):
        yield


def in_rank(number: int, act: Callable[[], object], otherwise: Callable[[], object]) -> Any:
    """In the place of `write_rank`: one rank does this, each other that."""

    def write_rank(_config: object, rank: int, *_: object, say: Any, **__: object) -> Any:
        say("loading")
        return (act if rank == number else otherwise)()

    return patch.object(shard_writer, "write_rank", write_rank)


def fail() -> None:
    raise ZeroDivisionError("made to fail")


def die() -> None:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(600)


def meeting(act: Callable[[], object]) -> Any:
    """Rank 1 does this in the place of looking for the others."""
    plain = cpu_worker.init_worker_distributed_environment

    def init(config: Any, rank: int, *rest: Any, **more: Any) -> None:
        if rank == 1:
            act()
        plain(config, rank, *rest, **more)

    return patch.object(cpu_worker, "init_worker_distributed_environment", init)


def without(source: Path, folder: Path, name: str) -> Path:
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def tensors(folder: Path, **arguments: Any) -> dict[str, str]:
    """Each tensor of a build's files, as text that differs where a bit does."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.tensors")):
        with TensorDeserializer(str(path), device="cpu", lazy_load=True, **arguments) as reader:
            for _, _, name, tensor in reader.read_tensors():
                data = tensor.contiguous().reshape(-1).view(torch.uint8)
                found[f"{path.name} {name}"] = bytes(data.numpy()).hex()[:4096]
    return found


def main(models: Path, out: Path, cases: Path) -> None:
    llama = models / "llama"
    found: dict[str, Any] = {}

    def case(name: str, snapshot: Path = llama, **changes: object) -> None:
        fields = {"sharding": "executor", "tensor_parallel_size": 2, **changes}
        said: list[str] = []
        progress = Progress(lambda message, level: said.append(message), shortest_gap_s=0.1)
        start = time.monotonic()
        with progress:
            found[name] = attempt(request(snapshot, out / name, "llama", **fields), progress)
        found[name]["seconds"] = time.monotonic() - start
        found[name]["said"] = said
        found[name]["processes left"] = len(ranks())
        found[name]["variable"] = shard_writer.FOLDER_VARIABLE in os.environ

    # Forks first: they have only this thread, and torch starts others with its first work.
    with forked():
        with in_rank(1, fail, hang):
            case("one fails")
        with in_rank(1, die, hang):
            case("one is killed")
        with meeting(fail):
            case("one fails before it loads")
        with meeting(hang), patch.object(executor_ranks, "_JOIN_S", SECONDS_TO_JOIN):
            case("one does not come")
        usage = namedtuple("usage", "total used free")
        full = SimpleNamespace(disk_usage=lambda _: usage(10**6, 0, 10**6))
        with patch.object(preflight, "shutil", full):
            case("scratch")
        name = "model.layers.1.self_attn.k_proj.weight"
        case("incomplete", without(llama, out / "incomplete-source", name))
        case("two")
    case("no cuda", device="cuda")
    case("one", tensor_parallel_size=1)
    with in_rank(0, fail, fail):
        case("the only one fails", tensor_parallel_size=1)

    for name, size in (("one", 1), ("two", 2)):
        virtual = {"sharding": "virtual", "tensor_parallel_size": size}
        case(f"virtual {name}", **virtual)
    [shard, _] = found["two"]["result"]["shards"]
    found["bytes of a rank"] = sum(tensor["size"] for tensor in shard["tensors"])

    # As they start in production, and as nobody sees them: with a key.
    session.secrets = lambda: {DATA_KEY: KEY}
    with noted() as seen:
        case("encrypted", encrypted=True)
    found["encrypted"]["seen"] = seen
    found["encrypted"]["tensors"] = tensors(
        out / "encrypted" / "vllm/tiny/llama", encryption=DecryptionParams.from_key(KEY)
    ) == tensors(out / "two" / "vllm/tiny/llama")
    cases.write_text(json.dumps(found))


@contextmanager
def noted() -> Iterator[dict[str, Any]]:
    """What the process list shows of the ranks, and who may read the key's file."""
    shown: set[str] = set()
    looked: set[int] = set()
    modes: set[str] = set()
    seen: dict[str, Any] = {}
    plain = executor_ranks._Watch._look

    def look(self: Any) -> None:
        plain(self)
        for process in ranks():
            with suppress(psutil.Error):
                shown.update(process.cmdline())
                shown.update(process.environ().values())
                looked.add(process.pid)
        path = self._folder / "data-key"
        if path.exists():
            modes.add(f"{path.stat().st_mode & 0o777:o}")

    with patch.object(executor_ranks._Watch, "_look", look):
        yield seen
    text = "\n".join(shown)
    forms = (KEY.hex(), base64.b64encode(KEY).decode(), KEY.decode("latin1"))
    seen["secrets"] = [form for form in forms if form in text]
    seen["modes"] = sorted(modes)
    seen["looked at"] = len(looked)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
