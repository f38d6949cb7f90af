"""Run the task `encrypt` on a disk and on a real S3 server; writes what it finds to CASES.

    python encrypt_task_cases.py OUT CASES

The files are written by tensorizer: two ranks' shards, and an adapter, which is a state dict.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tensorizer import DecryptionParams, TensorDeserializer, TensorSerializer

from tensorize_assets.core.errors import TensorizeAssetsError
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.manifest import TensorEntry
from tensorize_assets.core.ranged import S3Source
from tensorize_assets.core.s3 import S3Access, S3Credentials, S3Settings
from tensorize_assets.core.scratch import scratch_folder
from tensorize_assets.core.store import Store, digest, open_store
from tensorize_assets.core.tasks import DATA_KEY, OLD_DATA_KEY, EncryptRequest, TensorFile
from tensorize_assets.demo.s3_server import LocalS3
from tensorize_assets.worker import encrypt
from tensorize_assets.worker.read_back import read_back
from tensorize_assets.worker.session import Progress
from tensorize_assets.worker.write_shard import write_shard

KEY = bytes(range(32))
NEW_KEY = bytes(range(50, 82))
PLAIN = "vllm/m/v1-plain"
SHARDS = ("model-rank-000.tensors", "model-rank-001.tensors")
ADAPTER = "adapters/one/adapter_model.tensors"
BUCKET = "encrypt"


def shard(seed: int, *mib: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Module()
    for number, size in enumerate(mib):
        data = torch.randint(0, 256, ((size << 20) + number,), dtype=torch.uint8)
        model.register_parameter(f"w{number}", torch.nn.Parameter(data, requires_grad=False))
    model.register_parameter("norm", torch.nn.Parameter(torch.randn(9).bfloat16()))
    return model


def described(path: Path, marked: bool = True) -> tuple[TensorEntry, ...]:
    tensors: list[TensorEntry] = []
    for _ in read_back(path, tensors, needs_marker=marked):
        pass
    return tuple(tensors)


def plain_files(folder: Path, *mib: int) -> tuple[TensorFile, ...]:
    """Write the plaintext files, and say what is in them."""
    files: list[TensorFile] = []
    for seed, name in enumerate(SHARDS):
        folder.mkdir(parents=True, exist_ok=True)
        write_shard(shard(seed, *mib), folder / name, {}, lambda _: None)
        files.append(TensorFile(path=name, tensors=described(folder / name)))
    path = folder / ADAPTER
    path.parent.mkdir(parents=True)
    state = {f"base_model.model.q.lora_{x}.weight": torch.randn(4, 6).bfloat16() for x in "AB"}
    serializer = TensorSerializer(str(path))
    serializer.write_state_dict(state)
    serializer.close()
    return (*files, TensorFile(path=ADAPTER, tensors=described(path, marked=False)))


def asked(root: str, scratch: Path, files: tuple[TensorFile, ...], **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "model": "m",
        "suffix": "v1",
        "root": root,
        "source": PLAIN,
        "directory": "vllm/m/v1-hidden-encrypted",
        "files": files,
        "scratch_dir": str(scratch),
    }
    return EncryptRequest.model_validate(fields | changes)


@contextmanager
def secrets(**held: bytes) -> Iterator[None]:
    with patch.object(encrypt.session, "secrets", lambda: held):
        yield


def attempt(request: EncryptRequest, **held: bytes) -> dict[str, Any]:
    """What the task answers or raises."""
    lines: list[str] = []
    try:
        with secrets(**held):
            result = encrypt.run(request, Progress(lambda message, _: lines.append(message)))
    except TensorizeAssetsError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"result": result.model_dump(mode="json"), "log": lines}


def values(path: Path, key: bytes | None) -> dict[str, torch.Tensor]:
    encryption = None if key is None else DecryptionParams.from_key(key)
    with TensorDeserializer(
        str(path), device="cpu", verify_hash=True, encryption=encryption
    ) as reader:
        return {str(name): reader[name] for name in list(reader.keys())}


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().reshape(-1).view(torch.uint8)

    return list(one) == list(two) and all(
        one[name].dtype == two[name].dtype and torch.equal(bits(one[name]), bits(two[name]))
        for name in one
    )


def left(store: Store, scratch: Path) -> dict[str, Any]:
    return {
        "root": [key for key in store.list("") if "hidden" in key],
        "scratch": [str(p.relative_to(scratch)) for p in scratch.rglob("*") if p.is_file()],
    }


def hidden_files(root: Path) -> list[str]:
    """Half-written files, which a listing does not show."""
    return sorted(p.name for p in (root / "vllm").rglob(".tmp-*"))


class Stopped(Exception):
    """Stands for the moment of a kill."""


def at_byte(count: int, act: Callable[[], None]) -> Any:
    """Act once a file has passed so many bytes on."""
    counted = encrypt._Work._counted

    def counting(self: Any, path: str, chunks: Iterator[bytes]) -> Iterator[bytes]:
        passed = 0
        for chunk in counted(self, path, chunks):
            passed += len(chunk)
            if passed > count and path == SHARDS[1]:
                act()
            yield chunk

    return patch.object(encrypt._Work, "_counted", counting)


def on_disk(out: Path) -> dict[str, Any]:
    root, scratch = out / "root", out / "scratch"
    store = LocalStore(root)
    files = plain_files(root / PLAIN, 3, 5, 70)
    request = asked(str(root), scratch, files)
    found: dict[str, Any] = {}

    # First of all: a fork has none of the threads of the process it came from.
    child = os.fork()
    if not child:
        with at_byte(4 << 20, lambda: os.kill(os.getpid(), signal.SIGKILL)), secrets(data_key=KEY):
            encrypt.run(request, Progress.silent())
        os._exit(0)
    _, status = os.waitpid(child, 0)
    found["killed"] = {
        "signal": os.WTERMSIG(status),
        "halves": len(hidden_files(root)) > 0,
        "second": store.stat(f"{request.directory}/{SHARDS[1]}"),
        "scratch": left(store, scratch)["scratch"] != [],
    }

    at_once: list[int] = []
    going: set[str] = set()
    counted = encrypt._Work._counted
    both = threading.Barrier(2, timeout=60)

    def counting(self: Any, path: str, chunks: Iterator[bytes]) -> Iterator[bytes]:
        going.add(path)
        if path in SHARDS and len(os.sched_getaffinity(0)) > 1:
            both.wait()
        at_once.append(len(going))
        yield from counted(self, path, chunks)
        going.discard(path)

    with patch.object(encrypt._Work, "_counted", counting):
        answer = attempt(request, data_key=KEY)
    folder = root / request.directory
    found["whole"] = (
        answer
        | left(store, scratch)
        | {
            "halves": hidden_files(root),
            "at once": max(at_once),
            "cores": len(os.sched_getaffinity(0)),
            "loads": [
                equal(values(root / PLAIN / file.path, None), values(folder / file.path, KEY))
                for file in files
            ],
            "digests": {
                file.path: digest(store, f"{request.directory}/{file.path}")._asdict()
                for file in files
            },
            "plain": [file.model_dump(mode="json") for file in files],
        }
    )
    again = attempt(request, data_key=KEY)
    found["again"] = again["result"]["files"] == answer["result"]["files"]

    hidden = tuple(TensorFile.model_validate(file) for file in answer["result"]["tensors"])
    anew = asked(
        str(root), scratch, hidden, source=request.directory, directory="vllm/m/v1-anew-encrypted"
    )
    changed = attempt(anew, data_key=NEW_KEY, old_data_key=KEY)
    found["anew"] = {
        "tensors": changed["result"]["tensors"] == answer["result"]["tensors"],
        "other bytes": changed["result"]["files"] != answer["result"]["files"],
        "loads": [
            equal(
                values(root / PLAIN / file.path, None),
                values(root / anew.directory / file.path, NEW_KEY),
            )
            for file in files
        ],
    }

    def refused(request: EncryptRequest, **held: bytes) -> dict[str, Any]:
        target = request.model_copy(update={"directory": "vllm/m/v1-refused-encrypted"})
        answer = attempt(target, **held)
        stored = [key for key in store.list("") if "refused" in key]
        return answer | {"stored": stored, "halves": hidden_files(root)} | left(store, scratch)

    tensors = [
        entry.model_copy(update={"sha256": "0" * 64}) if entry.name == ".w0" else entry
        for entry in files[0].tensors
    ]
    other = files[0].model_copy(update={"tensors": tuple(tensors)})
    # Beside one that is as expected, and takes longer.
    found["other"] = refused(asked(str(root), scratch, (other, files[1])), data_key=KEY)
    found["no key"] = refused(request)
    found["short key"] = refused(request, data_key=KEY[:31])
    found["wrong old key"] = refused(anew, data_key=NEW_KEY, old_data_key=NEW_KEY)
    found["encrypted already"] = refused(anew, data_key=NEW_KEY)
    found["gone"] = refused(
        asked(str(root), scratch, (files[0].model_copy(update={"path": "gone.tensors"}),)),
        data_key=KEY,
    )
    with scratch_folder(scratch, request.directory):
        found["busy"] = attempt(request, data_key=KEY)
    return found


_ALONE = """
import json, os, sys
from pathlib import Path
from unittest.mock import patch
os.sched_getaffinity = lambda _: set(range(4))
from tensorize_assets.core.tasks import EncryptRequest
from tensorize_assets.worker import encrypt
from tensorize_assets.worker.session import Progress
request = EncryptRequest.model_validate_json(Path(sys.argv[1]).read_text())
with patch.object(encrypt.session, "secrets", lambda: {"data_key": bytes(range(32))}):
    result = encrypt.run(request, Progress.silent())
peak = next(x for x in open("/proc/self/status") if x.startswith("VmHWM")).split()[1]
heavy = sorted({"torch", "vllm", "tensorizer", "dagster"} & sys.modules.keys())
print(json.dumps({"size": sum(f.size for f in result.files), "peak": int(peak) * 1024,
                  "heavy": heavy}))
"""


def alone(request: EncryptRequest, out: Path) -> dict[str, Any]:
    """What a process of its own has of memory and modules, as if on four cores."""
    path = out / "request.json"
    path.write_text(request.model_dump_json())
    done = subprocess.run(
        [sys.executable, "-c", _ALONE, str(path)], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout)


def in_s3(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    local = out / "local"
    files = plain_files(local / PLAIN, 3, 40, 90)
    with LocalS3(out / "server") as server:
        server.create_bucket(BUCKET)
        settings = S3Settings(endpoint_url=server.endpoint, region="us-east-1")
        access = S3Access(settings, S3Credentials(server.access_key, server.secret_key))
        os.environ["S3_ACCESS_KEY_ID"] = server.access_key
        os.environ["S3_SECRET_ACCESS_KEY"] = server.secret_key
        root = f"s3://{BUCKET}/root"
        store = open_store(root, access)
        for file in files:
            store.put_file(f"{PLAIN}/{file.path}", local / PLAIN / file.path)
        reads: list[int] = []
        read_into = S3Source.read_into

        def counted(self: Any, start: int, buffer: memoryview, stopped: Any) -> None:
            reads.append(len(buffer))
            read_into(self, start, buffer, stopped)

        request = asked(root, out / "scratch", files, s3=settings)
        with patch.object(S3Source, "read_into", counted):
            answer = attempt(request, data_key=KEY)
        with secrets(data_key=KEY):
            disk = encrypt.run(asked(str(local), out / "scratch", files), Progress.silent())
        size = sum((local / PLAIN / file.path).stat().st_size for file in files)
        uploads = server.client().list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        found["whole"] = (
            answer
            | left(store, out / "scratch")
            | {
                "as on a disk": answer["result"]["files"] == disk.model_dump(mode="json")["files"],
                "read": [sum(reads), size],
                "uploads": len(uploads),
            }
        )
        entry = files[1].tensors[0].model_copy(update={"sha256": "0" * 64})
        other = files[1].model_copy(update={"tensors": (entry, *files[1].tensors[1:])})
        target = "vllm/m/v1-refused-encrypted"
        found["other"] = attempt(
            request.model_copy(update={"files": (other,), "directory": target}), data_key=KEY
        )
        uploads = server.client().list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        found["other"] |= {
            "stored": [key for key in store.list("") if "refused" in key],
            "uploads": len(uploads),
        }
        found["alone"] = alone(request, out)
    return found


def memory(out: Path) -> dict[str, Any]:
    """Four files of 240 MB at once."""
    root = out / "root"
    folder = root / PLAIN
    folder.mkdir(parents=True)
    files: list[TensorFile] = []
    write_shard(shard(0, 60, 100, 8, 64), folder / "0", {}, lambda _: None)
    tensors = described(folder / "0")
    for number in range(4):
        if number:
            os.link(folder / "0", folder / str(number))
        files.append(TensorFile(path=str(number), tensors=tensors))
    return alone(asked(str(root), out / "scratch", tuple(files)), out)


def main(out: Path, cases: Path) -> None:
    out.mkdir()
    found = {}
    for part in (on_disk, memory, in_s3):
        folder = out / part.__name__
        folder.mkdir()
        found[part.__name__] = part(folder)
    found["secrets"] = [
        form
        for form in (KEY.hex(), NEW_KEY.hex(), repr(KEY), re.escape(repr(NEW_KEY)))
        if form in json.dumps(found)
    ]
    assert (DATA_KEY, OLD_DATA_KEY) == ("data_key", "old_data_key")
    cases.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
