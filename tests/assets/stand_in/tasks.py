"""Answers of the shape that vLLM's would have, for a model of one tensor, and deaths on demand.

`STAND_IN_DEATHS` names a folder: a file `TASK-N` in it ends the N-th start of that task. It holds
`KILL` (the worker dies of SIGKILL) or `INT` (whoever waits for the worker is sent SIGINT). With a
file `weak` in it, an encrypted artifact loads whatever was done to it.

An adapter called `idle` changes nothing, any other one changes every answer.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path

from tensorize_assets.core import compare, layout
from tensorize_assets.core.manifest import (
    AdapterEntry,
    DtypeCensus,
    DtypeCount,
    FileEntry,
    ShardEntry,
    StockVllm,
    TensorEntry,
)
from tensorize_assets.core.tasks import (
    DATA_KEY,
    OLD_DATA_KEY,
    AdaptersRequest,
    AdaptersResult,
    Answers,
    EncryptRequest,
    EncryptResult,
    Output,
    RankLoad,
    ReferenceRequest,
    ReferenceResult,
    Refusal,
    ReloadRequest,
    ReloadResult,
    ShardRequest,
    ShardResult,
    SnapshotSource,
    TensorFile,
    TensorReport,
    TokenScore,
)
from tensorize_assets.worker import session, snapshots
from tensorize_assets.worker.access import store_of
from tensorize_assets.worker.session import Progress

_CONTENT = b"one tensor" * 1000
_VERSIONS = {
    "vllm": "0.31.0",
    "torch": "2.13.0",
    "tensorizer": "2.10.1",
    "tensorize_assets": "0.1.0",
    "python": "3.11.7",
}


def shard(request: ShardRequest, progress: Progress) -> ShardResult:
    _die_if_asked("shard")
    assert (_local(request.snapshot, request, progress) / "config.json").is_file()
    name = layout.shard_name(0, 1)
    file = _stored(request, name, _sealed(_CONTENT) if request.encrypted else _CONTENT)
    return ShardResult(
        dtype="bfloat16",
        architecture="StandInForCausalLM",
        files=(file,),
        shards=(ShardEntry(rank=0, file=name, tensors=(_tensor(file),)),),
        census=DtypeCensus(
            by_dtype={"bfloat16": DtypeCount(tensors=1, bytes=file.size)}, model_dtype="bfloat16"
        ),
        tied=(),
        stock_vllm=StockVllm(loadable=True),
        sharding=request.sharding,
        versions=_VERSIONS,
        seconds={},
    )


def adapters(request: AdaptersRequest, progress: Progress) -> AdaptersResult:
    _die_if_asked("adapters")
    entries: list[AdapterEntry] = []
    files: list[FileEntry] = []
    for adapter in request.adapters:
        content = f"adapter {adapter.name}".encode() * 100
        config = (_local(adapter.source, request, progress) / layout.ADAPTER_CONFIG).read_bytes()
        place, config_place = (
            layout.adapter_file(adapter.name, len(request.adapters), name)
            for name in (layout.ADAPTER_TENSORS, layout.ADAPTER_CONFIG)
        )
        files += [
            _stored(request, place, _sealed(content) if request.encrypted else content),
            _stored(request, config_place, config),
        ]
        entries.append(
            AdapterEntry(
                name=adapter.name,
                repo=adapter.repo,
                snapshot=adapter.snapshot,
                rank=8,
                file=place,
                config=config_place,
                tensors=(_tensor(files[-2]),),
            )
        )
    return AdaptersResult(adapters=tuple(entries), files=tuple(files), seconds={})


def encrypt(request: EncryptRequest, progress: Progress) -> EncryptResult:
    _die_if_asked("encrypt")
    files: list[FileEntry] = []
    for asked in request.files:
        content = _read(request, request.source, asked.path)
        assert hashlib.sha256(content).hexdigest() == asked.tensors[0].sha256
        if OLD_DATA_KEY in session.secrets():
            content = _sealed(content, OLD_DATA_KEY)
        files.append(_stored(request, asked.path, _sealed(content)))
    return EncryptResult(
        files=tuple(files),
        tensors=tuple(TensorFile(path=file.path, tensors=(_tensor(file),)) for file in files),
        seconds={"encrypt": 0.25},
    )


def reference(request: ReferenceRequest, progress: Progress) -> ReferenceResult:
    _die_if_asked("reference")
    assert list(_local(request.snapshot, request, progress).glob("*.safetensors"))
    for adapter in request.adapters:
        assert list(_local(adapter.source, request, progress).glob("adapter_model.*"))
    return ReferenceResult(
        answers=_answers(request.prompts),
        adapters={one.name: _answers(request.prompts, one.name) for one in request.adapters},
        loads=(_load({}),),
        device_name="stand-in",
        vllm_version="0.31.0",
    )


def reload(request: ReloadRequest, progress: Progress) -> ReloadResult:
    _die_if_asked("reload")
    content = _read(request, request.directory, "model.tensors")
    if request.encrypted and _sealed(content) != _CONTENT:
        return ReloadResult(
            answers=None,
            loads=(),
            device_name="stand-in",
            vllm_version="0.31.0",
            error="model.tensors does not open with this key",
        )
    found = hashlib.sha256(content).hexdigest()
    return ReloadResult(
        answers=_answers(request.prompts),
        adapters={one.name: _answers(request.prompts, one.name) for one in request.adapters},
        refusals=_refusals() if request.encrypted else (),
        loads=(_load({"w": TensorReport(sha256=found, finite=True)}),),
        device_name="stand-in",
        vllm_version="0.31.0",
    )


def _local(
    source: SnapshotSource,
    request: ShardRequest | AdaptersRequest | ReferenceRequest,
    progress: Progress,
) -> Path:
    return snapshots.local_folder(source, request.root, request.s3, progress)


def _refusals() -> tuple[Refusal, ...]:
    folder = os.environ.get("STAND_IN_DEATHS")
    weak = folder is not None and Path(folder, "weak").exists()
    return tuple(
        Refusal(attempt=name, refused=not weak, message="model.tensors is damaged")
        for name in compare.ATTEMPTS
    )


def _sealed(content: bytes, key: str = DATA_KEY) -> bytes:
    """Encrypts, and decrypts what is encrypted."""
    stream = session.secrets()[key] * (len(content) // 32 + 1)
    return bytes(one ^ other for one, other in zip(content, stream, strict=False))


def _read(request: EncryptRequest | ReloadRequest, directory: str, path: str) -> bytes:
    found = store_of(request.root, request.s3).get_bytes(layout.file_key(directory, path))
    assert found is not None
    return found.data


def _stored(
    request: ShardRequest | AdaptersRequest | EncryptRequest, path: str, content: bytes
) -> FileEntry:
    # A name of its own for each: two runs of one build may be here at once.
    scratch = Path(request.scratch_dir) / f"stand-in-{os.getpid()}"
    scratch.parent.mkdir(parents=True, exist_ok=True)
    scratch.write_bytes(content)
    key = layout.file_key(request.directory, path)
    stored = store_of(request.root, request.s3).put_file(key, scratch, move=True)
    return FileEntry(path=path, size=stored.size, sha256=stored.sha256)


def _tensor(file: FileEntry) -> TensorEntry:
    return TensorEntry(
        name="w",
        kind="parameter",
        dtype="bfloat16",
        shape=(file.size // 2,),
        size=file.size,
        sha256=file.sha256,
    )


def _answers(prompts: tuple[str, ...], adapter: str = "idle") -> Answers:
    token = 7 if adapter == "idle" else 100 + len(adapter)
    positions = (TokenScore(token=token, top={token: -0.5, 8: -1.5}),)
    outputs = tuple(Output(prompt=prompt, text=" so", positions=positions) for prompt in prompts)
    return Answers(outputs=outputs, perplexity=12.5, logprobs_finite=True)


def _load(tensors: dict[str, TensorReport]) -> RankLoad:
    return RankLoad(
        rank=0,
        device="cpu",
        device_name="stand-in",
        seconds=0.25,
        bytes=len(_CONTENT),
        host_memory_before=1,
        host_memory_after=2,
        tensors=tensors,
    )


def _die_if_asked(task: str) -> None:
    folder = os.environ.get("STAND_IN_DEATHS")
    if folder is None:
        return
    starts = Path(folder) / f"{task}.starts"
    with starts.open("a") as file:
        file.write("x")
    order = Path(folder) / f"{task}-{starts.stat().st_size}"
    if not order.exists():
        return
    if order.read_text() == "INT":
        os.kill(os.getppid(), signal.SIGINT)
    else:
        # Longer than the launcher's pause between two readings of memory.
        time.sleep(0.6)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)
