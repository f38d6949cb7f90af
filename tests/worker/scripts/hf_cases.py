"""Write files with a repo's own names, and load them; what came of each goes to CASES.

    python hf_cases.py MODELS OUT CASES

First without vLLM. Then with the plugin's loader, without an engine.
"""

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch
from safetensors.torch import load_file, save_file
from tensorizer import DecryptionParams, TensorDeserializer, TensorSerializer

from tensorize_assets.core.tasks import DATA_KEY, EncryptRequest, HfTensorsRequest, TensorFile
from tensorize_assets.worker import encrypt, hf_tensors, session
from tensorize_assets.worker.session import Progress

KEY = bytes(range(32))


def request(snapshot: Path, root: Path, name: str, **changes: object) -> HfTensorsRequest:
    fields: dict[str, object] = {
        "model": f"tiny/{snapshot.name}",
        "suffix": name,
        "snapshot": str(snapshot),
        "root": str(root),
        "directory": f"vllm/tiny/{name}",
        "scratch_dir": str(root / ".scratch"),
        "dtype": "auto",
    }
    return HfTensorsRequest.model_validate(fields | changes)


def built(snapshot: Path, root: Path, name: str, **changes: object) -> tuple[Path, Any]:
    """An artifact directory, and what the task said of its file."""
    asked = request(snapshot, root, name, **changes)
    result = hf_tensors.run(asked, Progress.silent())
    folder = root / asked.directory
    for file in snapshot.glob("*.json"):
        shutil.copy(file, folder)
    return folder, result


def refused(snapshot: Path, root: Path, **changes: object) -> str:
    try:
        hf_tensors.run(request(snapshot, root, "refused", **changes), Progress.silent())
    except Exception as error:  # noqa: BLE001 - a test reads which it was
        return f"{type(error).__name__}: {error}"
    return "built"


def changed(source: Path, folder: Path, change: Callable[[Path], object]) -> Path:
    shutil.copytree(source, folder)
    change(folder)
    return folder


def with_config(**fields: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        found = {**json.loads(path.read_text()), **fields}
        path.write_text(json.dumps({k: v for k, v in found.items() if v is not None}))

    return change


def without(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        del tensors[name]
        save_file(tensors, path, {"format": "pt"})

    return change


def to_bin(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")


def in_two_files(folder: Path) -> None:
    """As repos of more than 5 GB are; and one file more, which the index does not name."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
    save_file({names[0]: tensors[names[0]] * 2}, folder / "other.safetensors", {"format": "pt"})
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)


def same(path: Path, snapshot: Path, key: bytes | None = None) -> bool:
    source = load_file(snapshot / "model.safetensors")
    decryption = None if key is None else DecryptionParams.from_key(key)
    with TensorDeserializer(
        str(path), device="cpu", verify_hash=True, encryption=decryption
    ) as reader:
        return source.keys() == set(reader.keys()) and all(
            torch.equal(reader[name], source[name]) for name in source
        )


def growth(snapshot: Path, root: Path) -> int:
    """Bytes of anonymous memory that writing takes, at the most."""
    process, most, done = psutil.Process(), 0, threading.Event()

    def anonymous() -> int:
        return sum(part.anonymous for part in process.memory_maps())

    before = anonymous()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.02):
            most = max(most, anonymous() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    built(snapshot, root, "large")
    done.set()
    thread.join()
    return most


def writing(models: Path, out: Path) -> dict[str, Any]:
    llama, root = models / "llama", out / "root"
    limits: list[int] = []
    stock_init = TensorSerializer.__init__

    # Its signature stays: arguments are held against it.
    @wraps(stock_init)
    def init(self: Any, *arguments: Any, **given: Any) -> None:
        stock_init(self, *arguments, **given)
        limits.append(self.cpu_limit)

    with patch.object(TensorSerializer, "__init__", init):
        folder, result = built(
            llama, root, "plain", serialization_kwargs={"limit_cpu_concurrency": 1}
        )
    split, _ = built(changed(llama, out / "split", in_two_files), root, "split")
    with patch.object(session, "secrets", lambda: {DATA_KEY: KEY}):
        hidden, sealed = built(llama, root, "hidden", encrypted=True)
        asked = EncryptRequest(
            model="tiny/llama",
            suffix="both",
            root=str(root),
            source="vllm/tiny/plain",
            directory="vllm/tiny/both",
            files=(TensorFile(path="model.tensors", tensors=result.shards[0].tensors),),
            scratch_dir=str(root / ".scratch"),
        )
        encrypt.run(asked, Progress.silent())
    large = out / "large"
    shutil.copytree(llama, large)
    save_file({f"t{n}": torch.ones(32 << 20) for n in range(2)}, large / "model.safetensors")
    return {
        "result": result.model_dump(mode="json"),
        "same": same(folder / "model.tensors", llama),
        "split": same(split / "model.tensors", llama),
        "hidden": same(hidden / "model.tensors", llama, KEY),
        "both": same(root / "vllm" / "tiny" / "both" / "model.tensors", llama, KEY),
        "hidden tensors": len(sealed.shards[0].tensors),
        "limits": limits,
        "growth": growth(large, root),
        "refused": {
            "bin": refused(changed(llama, out / "bin", to_bin), root),
            "float32": refused(changed(llama, out / "f32", with_config(dtype="float32")), root),
            "no architecture": refused(
                changed(llama, out / "nameless", with_config(architectures=None)), root
            ),
            "no key": refused(llama, root, encrypted=True),
            "unknown": refused(llama, root, serialization_kwargs={"limit_cpu_concurency": 1}),
            "ours": refused(llama, root, serialization_kwargs={"encryption": True}),
        },
        "left": [path.name for path in (root / "vllm" / "tiny").iterdir()],
        "vllm": "vllm" in sys.modules,
    }


def loading(models: Path, out: Path) -> dict[str, Any]:
    from loader_cases import failure, loaded, reported

    from tensorize_assets.core.errors import PreflightError
    from tensorize_assets.vllm_plugin import loader, report, streams
    from tensorize_assets.worker import arguments

    reports = out / "reports"
    reports.mkdir()
    os.environ[report.FOLDER_VARIABLE] = str(reports)
    root = out / "root"
    folder = root / "vllm" / "tiny" / "plain"
    readers: list[object] = []
    stock_init = streams.Deserializer.__init__

    def init(self: Any, *given: Any, **named: Any) -> None:
        stock_init(self, *given, **named)
        readers.append(self._num_readers)

    said: list[str] = []

    def warning(line: str, *values: object) -> None:
        said.append(line % values)

    # No handler: vLLM takes those of its loggers away when it sets up its own, at a first engine.
    with (
        patch.object(streams.Deserializer, "__init__", init),
        patch.object(loader.logger, "warning", warning),
    ):
        loaded(folder, deserialization_kwargs={"num_readers": 3})
        loaded(folder, num_readers=2)
    load = json.loads(reported(reports, "rank-000.json"))
    incomplete = changed(models / "llama", out / "lacking", without("model.norm.weight"))
    lacking, _ = built(incomplete, root, "lacking")
    missing = failure(lacking)
    lacks = json.loads(reported(reports, "rank-000.json"))["missing"]
    gpt2, _ = built(models / "gpt2", root, "gpt2")
    other = failure(folder, gpt2 / "model.tensors")
    flip(lacking / "model.tensors")
    damaged = failure(lacking)
    try:
        arguments.check_deserialization({"num_raeders": 1}, "tiny/llama v1")
        unknown = "taken"
    except PreflightError as error:
        unknown = str(error)
    return {
        "load": load,
        "readers": readers,
        "said": said,
        "missing": missing,
        "lacks": lacks,
        "other": other,
        "damaged": damaged,
        "unknown": unknown,
    }


def main(models: Path, out: Path, cases: Path) -> None:
    found = writing(models, out)
    cases.write_text(json.dumps(found | {"loading": loading(models, out)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
