"""Task `hf_tensors`: a snapshot's own tensors, under their own names, in one tensorizer file.

Without vLLM, which does not mark such a file as its own: it loads it through the model's
`load_weights`, on its slow path.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tensorize_assets.core import layout
from tensorize_assets.core.errors import PreflightError, WorkerError
from tensorize_assets.core.manifest import (
    FileEntry,
    ShardEntry,
    StockVllm,
    TensorEntry,
)
from tensorize_assets.core.scratch import scratch_folder
from tensorize_assets.core.tasks import HfTensorsRequest, ShardResult
from tensorize_assets.worker import arguments, census, preflight, session, snapshots
from tensorize_assets.worker.access import store_of
from tensorize_assets.worker.environment import versions
from tensorize_assets.worker.read_back import read_back
from tensorize_assets.worker.session import Progress
from tensorize_assets.worker.write_shard import Named, write_encrypted, write_state_dict

# tensorizer's TensorType of what `write_state_dict` writes.
_STATE_DICT = 2
_INDEX = "model.safetensors.index.json"
_SLOW = "by its slow path, through load_weights: the file has the repo's names and no vLLM marker"


def run(request: HfTensorsRequest, progress: Progress) -> ShardResult:
    """Write and store the file; it is read back once: verified, and stored by the same read.

    Tensors are mapped from the snapshot's safetensors and never copied, so that memory stays as it
    is, whatever the model's size. Nothing is cast: `dtype` is what vLLM loads them as.

    Raises:
        PreflightError: the snapshot, the format or the scratch disk does not allow it; nothing was
            written.
        WorkerError: what was written does not read back; or there is no key to encrypt with.
        StoreError: the store refuses a file.
    """
    where = f"{request.model} {request.suffix}"
    arguments.check_serialization(request.serialization_kwargs, where)
    key = session.data_key(where) if request.encrypted else None
    folder = snapshots.local_folder(request.snapshot, request.root, request.s3, progress)
    start = time.perf_counter()
    found: list[TensorEntry] = []
    with ExitStack() as stack:
        progress.update("mapping the snapshot's tensors")
        tensors = _mapped(folder, stack, where)
        config = json.loads((folder / "config.json").read_bytes())
        architecture = _architecture(config, where)
        dtype = _dtype(request.dtype, config, tensors, where)
        size = preflight.check_format(
            tensors.items(), where, "use format vllm, which has fewer tensors a file"
        )
        store = store_of(request.root, request.s3)
        scratch = stack.enter_context(scratch_folder(Path(request.scratch_dir), request.directory))
        preflight.check_scratch(scratch, size + preflight.METADATA_REGION, where, "its file takes")
        path = scratch / layout.shard_name(0, 1)

        def written(done: int) -> None:
            progress.update("writing", bytes_done=done, bytes_total=size)

        if key is None:
            write_state_dict(tensors, path, dict(request.serialization_kwargs), written)
        else:
            named = [Named(name, _STATE_DICT, 0, tensor) for name, tensor in tensors.items()]
            write_encrypted(named, path, key, written)
        wrote = time.perf_counter()
        progress.update("storing")
        stored = store.put_file(
            layout.file_key(request.directory, path.name),
            path,
            move=True,
            chunks=_verified(path, found, tensors, key, where),
        )
        # No casts: on its slow path stock vLLM copies into the model's own tensors.
        types = census.merge([(*census.count(tensors.values()), [])], getattr(torch, dtype))
    progress.log(f"{where}: {len(found)} tensors, {stored.size:,} bytes, {layout.shard_name(0, 1)}")
    file = FileEntry(path=layout.shard_name(0, 1), size=stored.size, sha256=stored.sha256)
    return ShardResult(
        dtype=dtype,
        architecture=architecture,
        files=(file,),
        shards=(ShardEntry(rank=0, file=file.path, tensors=tuple(found)),),
        census=types,
        tied=(),
        stock_vllm=StockVllm(loadable=True, reasons=(_SLOW,)),
        tensor_format="hf",
        versions=versions(),
        seconds={
            "write": round(wrote - start, 3),
            "store": round(time.perf_counter() - wrote, 3),
        },
    )


def _mapped(folder: Path, stack: ExitStack, where: str) -> dict[str, torch.Tensor]:
    """Every tensor of the files that vLLM would read, in their order; on no memory of its own."""
    files = sorted(folder.glob("*.safetensors"))
    index = folder / _INDEX
    if index.is_file():
        # As vLLM: of a repo that also holds the whole model in one file, only what the index names.
        named = set(json.loads(index.read_bytes())["weight_map"].values())
        files = [file for file in files if file.name in named]
    if not files:
        raise PreflightError(
            f"{where}: format hf is made of safetensors, and the snapshot has none (others would "
            "have to be unpickled); choose another revision, or format vllm"
        )
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            opened: Any = stack.enter_context(safe_open(file, framework="pt"))
            names = list(opened.keys())
        except (SafetensorError, OSError) as error:
            raise PreflightError(f"{where}: {file.name} cannot be read: {error}") from error
        for name in names:
            if name in tensors:
                raise PreflightError(
                    f"{where}: the snapshot has tensor {name!r} twice; choose another revision"
                )
            tensors[name] = opened.get_tensor(name)
    return tensors


def _dtype(
    asked: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], where: str
) -> str:
    """The type that vLLM loads the file as."""
    if asked != "auto":
        return asked
    text = config.get("text_config") or {}
    named = [part.get(name) for part in (config, text) for name in ("dtype", "torch_dtype")]
    counts, _ = census.count(tensors.values())
    found = next(filter(None, named), None) or counts.most_common(1)[0][0]
    if found in ("bfloat16", "float16"):
        return str(found)
    raise PreflightError(
        f"{where}: its weights are {found}, and what vLLM takes dtype auto for then depends on its "
        "device; set dtype (float32, bfloat16 or float16) in the profile"
    )


def _architecture(config: Mapping[str, Any], where: str) -> str:
    names = config.get("architectures")
    if not names:
        raise PreflightError(f"{where}: config.json names no architecture; vLLM loads no such repo")
    return str(names[0])


def _verified(
    path: Path,
    found: list[TensorEntry],
    tensors: Mapping[str, torch.Tensor],
    key: bytes | None,
    where: str,
) -> Iterator[bytes]:
    """The file's bytes; raises after the last one unless they are what was to be written."""
    yield from read_back(path, found, needs_marker=False, key=key)
    differ = {tensor.name for tensor in found} ^ tensors.keys()
    if differ:
        raise WorkerError(
            f"{where}: {path.name} holds {len(found)} tensors and the snapshot has {len(tensors)}; "
            f"they differ in {', '.join(sorted(differ)[:5])}"
        )
