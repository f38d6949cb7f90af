"""Run the task `shard` with `encrypted`, and look for plaintext in all that it writes; to CASES.

    python encrypted_shard_cases.py MODELS OUT CASES

Leaves in OUT/artifacts the directories `both` (encrypted of plaintext shards) and `only` (written
so) of a tiny Llama, each with its data key as vLLM wants it, for other scripts to load.
"""

import builtins
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from building import request
from safetensors.torch import load_file
from shard_cases import attempt, killed
from tensorizer import TensorSerializer

from tensorize_assets.core.tasks import EncryptRequest, ShardRequest, TensorFile
from tensorize_assets.worker import encrypt, session, shard, write_rank
from tensorize_assets.worker.session import Progress

KEY = bytes(range(7, 39))
NEW_KEY = bytes(range(60, 92))
SIZE = 2
# What is looked for, of each tensor: bytes from its beginning, at rows that some rank has.
_BYTES = 24
_ROWS = 16

opened: set[str] = set()


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Note every file that is opened to be written, whoever asks for it and where it goes then."""
    if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        opened.add(str(arguments[0]))


class Writes(io.FileIO):
    """A file that hands on what is written to it, also what is soon written over."""

    seen: Callable[[bytes], None]

    def write(self, data: Any) -> int | None:
        Writes.seen(bytes(data))
        return super().write(data)


@contextmanager
def watched(wanted: dict[str, bytes]) -> Iterator[set[str]]:
    """The tensors of which the sample was in anything that was written to any file."""
    found: set[str] = set()
    plain_open = builtins.open

    def seen(data: bytes) -> None:
        found.update(name for name, sample in wanted.items() if sample in data)

    def opened(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if "b" in mode and mode.strip("b") != "r" and isinstance(file, (str, Path)):
            raw = Writes(file, mode.replace("b", ""))
            return io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return plain_open(file, mode, *rest, **options)

    def hooked(name: str) -> Any:
        plain = getattr(os, name)

        def write(descriptor: int, data: Any, *rest: Any) -> int:
            seen(bytes(data))
            return plain(descriptor, data, *rest)

        return patch.object(os, name, write)

    Writes.seen = seen
    with (
        patch.object(builtins, "open", opened),
        patch.object(io, "open", opened),
        hooked("write"),
        hooked("pwrite"),
        # It has taken os.pwrite for itself.
        patch.object(TensorSerializer, "_pwrite_compat", staticmethod(lambda *a: os.pwrite(*a))),
    ):
        yield found


def samples(snapshot: Path) -> dict[str, bytes]:
    """Bytes of every tensor of a snapshot that is not the same number all over."""
    found = {}
    for name, tensor in load_file(snapshot / "model.safetensors").items():
        rows = tensor.reshape(-1, tensor.shape[-1])
        row = rows[min(_ROWS, len(rows) - 1)]
        found[name] = row.contiguous().view(torch.uint8).numpy().tobytes()[:_BYTES]
    return found


def shown(folder: Path, wanted: dict[str, bytes]) -> list[str]:
    """The tensors of which a file below `folder` shows the sample, hidden files too."""
    data = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    return sorted(name for name, sample in wanted.items() if any(sample in one for one in data))


@contextmanager
def secrets(**held: bytes) -> Iterator[None]:
    with patch.object(session, "secrets", lambda: held):
        yield


def main(models: Path, out: Path, cases: Path) -> None:
    out.mkdir(parents=True)
    llama = models / "llama"
    wanted = samples(llama)
    found: dict[str, Any] = {"tensors": sorted(wanted), "killed": {}}
    # None of this process's threads may be what a fork waits for: first of all, as in shard_cases.
    stages = (("loading", 0), ("writing", 0), ("storing", 0), ("writing", 1), ("storing", 1))
    with secrets(data_key=KEY):
        for encrypted in (True, False):
            # Of a plaintext shard nothing is reported while it is written, if it takes no second.
            for stage, rank in stages if encrypted else stages[::2]:
                name = f"{encrypted} {stage} {rank}"
                asked = hidden(llama, out / name, encrypted)
                ended = killed(asked, stage, rank)
                found["killed"][name] = {
                    "signal": ended["signal"],
                    "written": sorted(Path(file).name for file in ended["root"] + ended["scratch"]),
                    "shown": shown(out / name, wanted),
                }

        sys.addaudithook(watch)
        opened.clear()
        asked = hidden(llama, out / "only", True)
        with watched(wanted) as writes:
            only = attempt(asked)
        found["only"] = only | {
            "written": sorted(writes),
            "opened": sorted(name for name in opened if name.endswith(".tensors")),
            "opened elsewhere": sorted(x for x in opened if not x.startswith(str(out / "only"))),
            "shown": shown(out / "only", wanted),
        }
        again = hidden(llama, out / "again", True)
        found["again"] = attempt(again)["result"]["files"] == found["only"]["result"]["files"]
        plain = hidden(llama, out / "plain", False)
        with watched(wanted) as writes:
            clear = attempt(plain)
        found["plain"] = clear | {
            "written": sorted(writes),
            "shown": shown(out / "plain", wanted),
        }
        found["both"] = encrypted_of(plain, found["plain"]["result"])

        def damaged(change: Callable[[Path], None], name: str) -> dict[str, Any]:
            written = write_rank.write_encrypted_shard

            def damaging(model: Any, path: Path, *rest: Any) -> Any:
                tensors = written(model, path, *rest)
                change(path)
                return tensors

            with patch.object(write_rank, "write_encrypted_shard", damaging):
                return attempt(hidden(llama, out / name, True))

        def flip(path: Path) -> None:
            data = bytearray(path.read_bytes())
            data[-1000] ^= 1
            path.write_bytes(data)

        def other(path: Path) -> None:
            theirs = out / "only" / asked.directory / "model-rank-001.tensors"
            path.write_bytes(theirs.read_bytes())

        found["flipped"] = damaged(flip, "flipped")
        found["other rank"] = damaged(other, "other")
    with secrets():
        found["no key"] = attempt(hidden(llama, out / "no-key", True))
    with secrets(data_key=KEY[:30]):
        found["short key"] = attempt(hidden(llama, out / "short-key", True))
    with secrets(data_key=NEW_KEY):
        renewed = attempt(hidden(llama, out / "renewed", True))
    found["new key"] = {
        "tensors": renewed["result"]["shards"] == found["only"]["result"]["shards"],
        "encrypted anew": encrypted_of(asked, found["only"]["result"], NEW_KEY, KEY)["files"]
        == renewed["result"]["files"],
    }

    artifacts = out / "artifacts"
    with secrets(data_key=KEY):
        single = request(llama, out / "single", "only", encrypted=True)
        shard.run(single, Progress.silent())
        folder(artifacts / "only", llama, out / "single" / single.directory / "model.tensors")
        clear = request(llama, out / "clear", "both")
        result = shard.run(clear, Progress.silent()).model_dump(mode="json")
        encrypted_of(clear, result)
        folder(artifacts / "both", llama, out / "clear" / "vllm/tiny/anew" / "model.tensors")
    cases.write_text(json.dumps(found))


def hidden(snapshot: Path, root: Path, encrypted: bool) -> ShardRequest:
    root.mkdir(exist_ok=True)
    return request(snapshot, root, "llama", tensor_parallel_size=SIZE, encrypted=encrypted)


def encrypted_of(
    asked: ShardRequest, result: dict[str, Any], key: bytes = KEY, old_key: bytes | None = None
) -> dict[str, Any]:
    """What the task `encrypt` makes of what the task `shard` has made."""
    names = [TensorFile(path=one["file"], tensors=one["tensors"]) for one in result["shards"]]
    request = EncryptRequest(
        model=asked.model,
        suffix=asked.suffix,
        root=asked.root,
        source=asked.directory,
        directory="vllm/tiny/anew",
        files=tuple(names),
        scratch_dir=asked.scratch_dir,
    )
    held = {"data_key": key} | ({} if old_key is None else {"old_data_key": old_key})
    with secrets(**held):
        return encrypt.run(request, Progress.silent()).model_dump(mode="json")


def folder(place: Path, snapshot: Path, shard: Path) -> None:
    """An artifact directory, and its data key."""
    shutil.copytree(snapshot, place, ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copy(shard, place)
    (place / "data.key").write_bytes(KEY)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
