"""Ask a small model with LoRA adapters, in the clear and encrypted; what came of it goes to CASES.

    python lora_cases.py MODELS OUT CASES

One process for all, as in engine_cases.py; the worker's own tasks write what is loaded. The data
key comes over a descriptor, as the launcher gives it.
"""

import base64
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_adapters
from building import artifact
from engine_cases import crossed, fields
from loader_cases import failure

from tensorize_assets.core.errors import PreflightError, WorkerError
from tensorize_assets.core.manifest import AdapterEntry, FileEntry, SnapshotEntry
from tensorize_assets.core.protocol import SECRETS_VARIABLE
from tensorize_assets.core.s3 import S3Credentials, S3Settings
from tensorize_assets.core.store import digest, open_store
from tensorize_assets.core.tasks import (
    DATA_KEY,
    AdapterSnapshot,
    AdaptersRequest,
    AdaptersResult,
    EncryptRequest,
    ReferenceRequest,
    ReferenceResult,
    ReloadRequest,
    ReloadResult,
    ShardResult,
    SnapshotSource,
    TensorFile,
)
from tensorize_assets.demo.s3_server import REGION, LocalS3
from tensorize_assets.worker import adapters, encrypt, reference, reload, session
from tensorize_assets.worker.session import Progress

KEY = bytes(range(32))
SNAPSHOT = SnapshotEntry(revision="main", commit="a" * 40, files=(), weights_format="safetensors")


def hand_over(**secrets: bytes) -> None:
    """Give the worker its secrets as the launcher does."""
    encoded = {name: base64.b64encode(value).decode() for name, value in secrets.items()}
    reading, writing = os.pipe()
    os.write(writing, json.dumps(encoded).encode())
    os.close(writing)
    os.environ[SECRETS_VARIABLE] = str(reading)
    session.secrets.cache_clear()


def snapshot(llama: Path, folder: Path, seed: int, rank: int, trained: bool = True):
    """An adapter as it was downloaded; one that is not trained changes nothing."""
    tensors = tiny_adapters.matrices(llama, rank, tiny_adapters.LINEAR, seed=seed)
    if not trained:
        tensors |= {name: one * 0 for name, one in tensors.items() if "lora_B" in name}
    config = tiny_adapters.config("tiny/llama", rank, target_modules=[*tiny_adapters.LINEAR])
    tiny_adapters.save(folder, tensors, config)
    return AdapterSnapshot(
        name=folder.name,
        repo=f"tiny/{folder.name}",
        snapshot=SNAPSHOT,
        source=SnapshotSource(folder=str(folder)),
    )


def where(folder: Path) -> dict[str, Any]:
    """A directory as requests name it."""
    root = folder.parents[2]
    return {
        "model": "tiny/llama",
        "suffix": "v1",
        "root": str(root),
        "directory": folder.relative_to(root).as_posix(),
    }


def scratch(folder: Path) -> dict[str, str]:
    return {"scratch_dir": str(folder.parents[2] / ".scratch")}


def written(llama: Path, folder: Path, *sources: AdapterSnapshot) -> AdaptersResult:
    asked = where(folder) | scratch(folder)
    base = SnapshotSource(folder=str(llama))
    request = AdaptersRequest(base=base, adapters=sources, **asked)
    return adapters.run(request, Progress.silent())


def encrypted(
    folder: Path, name: str, built: ShardResult, with_: AdaptersResult
) -> tuple[Path, ShardResult]:
    """The directory's encrypted variant, with its small files; and its shards as they are there."""
    copy = folder.parent / name
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.tensors"))
    files = [TensorFile(path=shard.file, tensors=shard.tensors) for shard in built.shards]
    files += [TensorFile(path=one.file, tensors=one.tensors) for one in with_.adapters]
    asked = where(folder) | {"source": where(folder)["directory"], **where(copy), **scratch(copy)}
    result = encrypt.run(EncryptRequest(files=tuple(files), **asked), Progress.silent())
    stored = {file.path: file.tensors for file in result.tensors}
    shards = tuple(
        shard.model_copy(update={"tensors": stored[shard.file]}) for shard in built.shards
    )
    return copy, built.model_copy(update={"shards": shards})


def changed(folder: Path, name: str, file: str, change: Callable[[bytes], bytes]) -> Path:
    copy = folder.parent / name
    shutil.copytree(folder, copy)
    (copy / file).write_bytes(change((copy / file).read_bytes()))
    return copy


def companions(folder: Path) -> tuple[FileEntry, ...]:
    store = open_store(str(folder))
    return tuple(
        FileEntry(path=key, size=found.size, sha256=found.sha256)
        for key in store.list("")
        if not key.startswith("model")
        for found in [digest(store, key)]
    )


def referenced(folder: Path, *asked: AdapterSnapshot, **more: object) -> dict[str, Any]:
    about = {"snapshot": str(folder), "adapters": asked}
    request = ReferenceRequest.model_validate(fields(**about | more))
    return crossed(reference.run(request, Progress.silent()), ReferenceResult)


def reloaded(folder: Path, asked: tuple[AdapterEntry, ...], **more: object) -> dict[str, Any]:
    held = {"companions": companions(folder), "adapters": asked}
    request = ReloadRequest.model_validate(fields(**where(folder) | held | more))
    try:
        result = crossed(reload.run(request, Progress.silent()), ReloadResult)
    except (PreflightError, WorkerError) as error:
        result = {"refused": str(error)}
    # Of this process: others may run beside it.
    name = f"tensorize-assets-{os.getuid()}/private-{os.getpid()}-*"
    places = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    left = [str(path) for place in places for path in place.glob(name)]
    return result | {"left": left}


def main(models: Path, out: Path, cases: Path) -> None:
    os.environ["TMPDIR"] = str(out)
    tempfile.tempdir = None
    llama = models / "llama"
    sources = (
        snapshot(llama, out / "adapters" / "pirate", 1, 4),
        snapshot(llama, out / "adapters" / "poet", 2, 12),
    )
    idle = snapshot(llama, out / "adapters" / "idle", 3, 8, trained=False)
    found: dict[str, Any] = {"reference": referenced(llama, *sources)}

    plain, built = artifact(llama, out / "root", "llama")
    found["built"] = built.model_dump(mode="json")
    alone = plain.parent / "alone"
    shutil.copytree(plain, alone)
    several, one = written(llama, plain, *sources), written(llama, alone, idle)
    found["reload"] = reloaded(plain, several.adapters)
    found["idle"] = reloaded(alone, one.adapters)
    file = several.adapters[1].file
    cut = changed(plain, "cut", file, lambda data: data[:-100])
    found["cut"] = reloaded(cut, several.adapters)
    small = [adapter.model_copy(update={"rank": 1}) for adapter in several.adapters]
    found["refused by vllm"] = reloaded(plain, tuple(small))
    found["not the manifest's"] = reloaded(cut, several.adapters, companions=companions(plain))

    hand_over(**{DATA_KEY: KEY})
    secret, _ = encrypted(plain, "secret", built, several)
    found["encrypted"] = reloaded(secret, several.adapters, encrypted=True)
    hand_over(**{DATA_KEY: KEY[::-1]})
    found["another data key"] = reloaded(secret, several.adapters, encrypted=True)
    hand_over()
    found["no data key"] = reloaded(secret, several.adapters, encrypted=True)
    found["from s3"] = from_s3(secret, several.adapters, out / "s3")
    found["loader"] = loads(plain, secret, out)
    cases.write_text(json.dumps(found))


def from_s3(folder: Path, asked: tuple[AdapterEntry, ...], where_to: Path) -> dict[str, Any]:
    """The same, streamed from a bucket: the key and the adapters go by the disk."""
    with LocalS3(where_to) as server:
        server.create_bucket("artifacts")
        for path in folder.rglob("*"):
            if path.is_file():
                key = path.relative_to(folder.parents[2]).as_posix()
                server.client().upload_file(str(path), "artifacts", key)
        credentials = S3Credentials(server.access_key, server.secret_key)
        hand_over(**{DATA_KEY: KEY}, **credentials.to_secrets())
        settings = S3Settings(endpoint_url=server.endpoint, region=REGION)
        more = {"root": "s3://artifacts", "s3": settings, "encrypted": True}
        return reloaded(folder, asked, **more)


def loads(plain: Path, secret: Path, out: Path) -> dict[str, str]:
    """What the loader makes of an encrypted file by itself, as any engine has it."""
    for name, key in {"key": KEY, "long-key": KEY + b"\n"}.items():
        (out / name).write_bytes(key)
    keyfile = {"encryption_keyfile": str(out / "key")}
    return {
        "with its key": failure(secret, **keyfile),
        "without a key": failure(secret),
        "keyfile gone": failure(secret, encryption_keyfile=str(out / "nothing")),
        "key too long": failure(secret, encryption_keyfile=str(out / "long-key")),
        "not encrypted": failure(plain, **keyfile),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
