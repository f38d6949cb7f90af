"""Run the task `adapters` on adapters it must store or refuse; what came of each goes to CASES.

    python adapter_cases.py MODELS OUT CASES

MODELS is what tiny_models.py writes. No vLLM in this one.
"""

import hashlib
import json
import os
import pickle
import struct
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from tensorizer import DecryptionParams, TensorDeserializer, TensorSerializer
from tiny_adapters import ATTENTION, LINEAR, Tensors, config, matrices, save

from tensorize_assets.core.errors import PreflightError, TensorizeAssetsError
from tensorize_assets.core.s3 import S3Credentials, S3Settings
from tensorize_assets.core.scratch import scratch_folder
from tensorize_assets.core.tasks import DATA_KEY, AdaptersRequest
from tensorize_assets.demo.s3_server import REGION, LocalS3
from tensorize_assets.worker import adapters, preflight, session
from tensorize_assets.worker.access import store_of
from tensorize_assets.worker.session import Progress

KEY = bytes(range(32))
LLAMA = "tiny/llama"
Q = "base_model.model.model.layers.1.self_attn.q_proj"
EMBED = "base_model.model.model.embed_tokens"


def snapshot(folder: Path, name: str = "poet", weights_format: str = "safetensors") -> Any:
    return {
        "name": name,
        "repo": f"org/{name}",
        "snapshot": {
            "revision": "main",
            "commit": "c" * 40,
            "files": [],
            "weights_format": weights_format,
        },
        "source": str(folder),
    }


def request(base: Path, root: Path | str, *sources: Any, **changes: Any) -> AdaptersRequest:
    fields: dict[str, Any] = {
        "model": f"tiny/{base.name}",
        "suffix": "v1",
        "base": str(base),
        "adapters": sources,
        "root": str(root),
        "directory": "vllm/tiny/model/v1-0123456789ab",
        "scratch_dir": f"{root}/.scratch",
    }
    return AdaptersRequest.model_validate(fields | changes)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def attempt(asked: AdaptersRequest) -> dict[str, Any]:
    """What the task answers or raises, what it warned of, and what it leaves."""
    said: list[str] = []
    progress = Progress(lambda message, level: said.append(f"{level}: {message}"))
    try:
        answer: dict[str, Any] = {"result": adapters.run(asked, progress).model_dump(mode="json")}
    except TensorizeAssetsError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    except Exception as error:  # noqa: BLE001 - a test reads which it was
        answer = {"unforeseen": f"{type(error).__name__}: {error}"}
    return answer | {"said": said}


def left(root: Path) -> list[str]:
    return [name for name in files(root) if ".tmp-" not in name] if root.exists() else []


def held(path: Path, key: bytes | None = None) -> Tensors:
    """A file's tensors as tensorizer reads them, every hash verified."""
    encryption = DecryptionParams.from_key(key) if key else None
    with TensorDeserializer(
        str(path), device="cpu", verify_hash=True, encryption=encryption
    ) as reader:
        return {str(name): tensor.clone() for name, tensor in reader.items()}


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


class Attack:
    """Unpickled by anything that lets a pickle call what it likes, it makes a folder."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.target),)


def with_header(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """A safetensors file whose header says something else."""
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    change(header)
    written = json.dumps(header).encode()
    return struct.pack("<Q", len(written)) + written + data[8 + size :]


def index_of(size: int, out: Path) -> dict[str, Any]:
    """What becomes of a state dict whose index takes so many bytes, ours and tensorizer's word."""
    # Lengths of name, dtype and shape, kind, the dtype's own name, two dimensions, three offsets.
    entry = 2 + 1 + 1 + 1 + len("<f4") + 8 + 24
    names = [f"{number:0100d}" for number in range(size // (entry + 100))]
    names[-1] += "x" * (size % (entry + 100))
    tensors = {name: torch.ones(1, 1) for name in names}
    found: dict[str, Any] = {"tensors": len(tensors)}
    try:
        preflight.check_format(tensors.items(), "org/model v1", "do this")
    except PreflightError as error:
        found["refused"] = str(error)
    try:
        adapters.write_adapter(tensors, out / "index.tensors")
        found["read"] = len(held(out / "index.tensors"))
    except RuntimeError as error:
        found["tensorizer"] = str(error)
    return found


def threads_left(out: Path) -> list[str]:
    """Threads of tensorizer's that still write when its error is here: into the next file."""
    pwrite = TensorSerializer._pwrite_syscall

    def slow(self: TensorSerializer, *args: Any, **kwargs: Any) -> int:
        time.sleep(0.05)
        return pwrite(self, *args, **kwargs)

    with patch.object(TensorSerializer, "_pwrite_syscall", slow):
        index_of(preflight.METADATA_REGION + 1, out)
    return [thread.name for thread in threading.enumerate() if "Tensorizer" in thread.name]


def main(models: Path, out: Path, cases: Path) -> None:
    llama, made = models / "llama", out / "adapters"
    plain = matrices(llama)
    found: dict[str, Any] = {}

    def case(name: str, asked: AdaptersRequest) -> dict[str, Any]:
        found[name] = attempt(asked) | {"root": left(Path(asked.root))}
        return found[name]

    def adapter(
        name: str,
        tensors: Tensors = plain,
        fields: dict[str, Any] | None = None,
        weights_format: str = "safetensors",
        base: Path = llama,
    ) -> AdaptersRequest:
        folder = save(made / name, tensors, fields or config(f"tiny/{base.name}"), weights_format)
        return request(base, out / name, snapshot(folder, weights_format=weights_format))

    def stored(asked: AdaptersRequest, path: str = "adapter_model.tensors") -> Path:
        return Path(asked.root) / asked.directory / path

    # What is stored

    one = adapter("one")
    answer = case("one", one)
    source = load_file(made / "one" / "adapter_model.safetensors")
    answer["same"] = same(source, held(stored(one)))
    answer["config is the source's"] = (made / "one" / "adapter_config.json").read_bytes() == (
        stored(one, "adapter_config.json").read_bytes()
    )
    answer["sha256 of files"] = {
        name: hashlib.sha256((stored(one).parent / name).read_bytes()).hexdigest()
        for name in ("adapter_config.json", "adapter_model.tensors")
    }
    case("again", one)
    for name, old in (("bin", False), ("old bin", True)):
        asked = adapter(name, weights_format="bin")
        if old:
            path = made / name / "adapter_model.bin"
            torch.save(plain, path, _use_new_zipfile_serialization=False)
        answer = case(name, asked)
        answer["same"] = same(plain, held(stored(asked)))

    parts = {
        name: snapshot(save(made / name, matrices(llama, rank, targets, dtype, rank), fields), name)
        for name, rank, targets, dtype, fields in (
            ("coder", 16, LINEAR, torch.bfloat16, config(LLAMA, 16, use_rslora=True)),
            ("poet", 8, (*ATTENTION, "lm_head"), torch.float16, config(LLAMA)),
        )
    }
    asked = request(llama, out / "several", *parts.values())
    answer = case("several", asked)
    answer["same"] = [
        same(
            load_file(made / name / "adapter_model.safetensors"),
            held(stored(asked, f"adapters/{name}/adapter_model.tensors")),
        )
        for name in parts
    ]
    with scratch_folder(Path(one.scratch_dir), one.directory):
        case("beside the shards", one)

    embedding = {
        f"{EMBED}.lora_embedding_A": torch.randn(8, 500),
        f"{EMBED}.lora_embedding_B": torch.randn(256, 8),
    }
    case("embedding", adapter("embedding", plain | embedding))
    for name in ("opt", "gemma", "qwen2"):
        base = models / name
        targets = (*ATTENTION, "out_proj", "fc1", "fc2", *LINEAR)
        case(name, adapter(name, matrices(base, targets=targets), base=base))
    tied = {
        "base_model.model.lm_head.lora_A.weight": torch.randn(8, 256),
        "base_model.model.lm_head.lora_B.weight": torch.randn(500, 8),
    }
    case("tied", adapter("tied", tied, base=models / "qwen2"))
    gpt2 = "base_model.model.transformer.h.0.attn.c_attn"
    turned = {
        f"{gpt2}.lora_A.weight": torch.randn(8, 256),
        f"{gpt2}.lora_B.weight": torch.randn(768, 8),
    }
    fields = config("tiny/gpt2", fan_in_fan_out=True)
    case("turned", adapter("turned", turned, fields, base=models / "gpt2"))

    # As files and code differ: a base that was saved without the code's first part, and in bins.
    short = out / "short" / "llama"
    short.mkdir(parents=True)
    weights = load_file(llama / "model.safetensors")
    shortened = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    for number, names in enumerate((sorted(shortened)[::2], sorted(shortened)[1::2])):
        torch.save({n: shortened[n] for n in names}, short / f"pytorch_model-{number}.bin")
    case("short names", request(short, out / "short names", snapshot(made / "one")))

    # What is stored with a warning

    for name, base_name in (
        ("same name", "Tiny/LLAMA"),
        ("other name", "unsloth/llama-bnb-4bit"),
        ("local path", "/home/me/llama"),
        ("no name", None),
    ):
        case(name, adapter(name, plain, config(base_name)))
    copy = {f"{EMBED}.base_layer.weight": torch.randn(500, 256)}
    case("embeddings left out", adapter("embeddings left out", plain | copy))

    # Encrypted

    with patch.object(session, "secrets", lambda: {DATA_KEY: KEY}):
        asked = adapter("encrypted").model_copy(update={"encrypted": True})
        answer = case("encrypted", asked)
        data = stored(asked).read_bytes()
        answer["same"] = same(plain, held(stored(asked), KEY))
        answer["readable"] = [
            name for name, tensor in plain.items() if tensor.numpy().tobytes()[:64] in data
        ]
        answer["sha256"] = hashlib.sha256(data).hexdigest()
        case("encrypted again", asked)
    asked = adapter("no key").model_copy(update={"encrypted": True})
    case("no key", asked)

    # Refused

    attack: Any = plain | {"x": Attack(out / "attacked")}
    case("attack", adapter("attack", attack, weights_format="bin"))
    found["attack"]["attacked"] = (out / "attacked").exists()
    # The attack is one: plain unpickling runs it.
    pickle.loads(pickle.dumps(Attack(out / "attacked")))  # noqa: S301
    found["attack"]["works"] = (out / "attacked").exists()

    def refuse(name: str, tensors: Tensors = plain, **fields: object) -> None:
        case(name, adapter(name, tensors, config(LLAMA) | fields))

    for field, value in (
        ("use_dora", True),
        ("modules_to_save", ["embed_tokens"]),
        ("trainable_token_indices", [1, 2]),
        ("lora_bias", True),
        ("layer_replication", [[0, 2], [1, 2]]),
        ("alora_invocation_tokens", [5]),
        ("use_bdlora", {"nblocks": 2}),
        ("use_qalora", True),
        ("bias", "lora_only"),
        ("peft_type", "LOHA"),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "loftq"),
        ("alpha_pattern", {"q_proj": 64}),
        ("rank_pattern", {"q_proj": 64}),
        ("r", 0),
        ("r", 513),
        ("r", "8"),
        ("r", True),
        ("lora_alpha", None),
        ("fan_in_fan_out", True),
    ):
        refuse(f"{field}={value}", **{field: value})
    for field in ("r", "lora_alpha", "target_modules"):
        fields = config(LLAMA)
        del fields[field]
        case(f"no {field}", adapter(f"no {field}", plain, fields))
    a, b = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"
    refuse("other rank", plain | {a: torch.ones(4, 256), b: torch.ones(256, 4)})
    refuse("no fit", plain | {b: torch.ones(256, 4)})
    refuse("one half", {name: tensor for name, tensor in plain.items() if name != b})
    refuse("convolution", plain | {a: torch.ones(8, 256, 1, 1)})
    refuse("integers", plain | {a: torch.ones(8, 256, dtype=torch.int8)})
    refuse("empty", plain | {a: torch.ones(8, 0)})
    refuse("twice", plain | {a.removeprefix("base_model.model."): torch.ones(8, 256)})
    refuse("nothing", {})
    refuse("bias tensor", plain | {f"{Q}.lora_B.bias": torch.ones(256)})
    refuse("whole embeddings", plain | {f"{EMBED}.weight": torch.ones(501, 256)})
    refuse("classifier", plain | {"base_model.model.score.weight": torch.ones(2, 256)})
    larger = {f"{EMBED}.base_layer.weight": torch.ones(501, 256)}
    refuse("added tokens", plain | larger)
    larger = embedding | {f"{EMBED}.lora_embedding_A": torch.randn(8, 501)}
    refuse("added embeddings", plain | larger)
    larger = tied | {"base_model.model.lm_head.lora_B.weight": torch.randn(501, 8)}
    refuse("added outputs", plain | larger)
    case("added outputs, tied", adapter("added outputs, tied", larger, base=models / "qwen2"))
    refuse("flat embeddings", plain | {f"{EMBED}.base_layer.weight": torch.ones(500)})
    deep = {name.replace("layers.1.", "layers.2."): tensor for name, tensor in plain.items()}
    refuse("deeper base", deep)
    refuse("other base", matrices(models / "opt"), base_model_name_or_path="tiny/opt")
    refuse("other shapes", matrices(models / "gemma", targets=LINEAR[:1]) | {b: torch.ones(9, 8)})
    experts = {
        f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}.lora_{half}.weight": (
            torch.ones(1, 1)
        )
        for layer in range(8)
        for expert in range(64)
        for name in ("gate_proj", "up_proj", "down_proj")
        for half in "AB"
    }
    refuse("many experts", experts)
    found["index"] = {extra: index_of(preflight.METADATA_REGION + extra, out) for extra in (0, 1)}
    found["threads left"] = {"names": threads_left(out)}

    good = (made / "one" / "adapter_model.safetensors").read_bytes()
    first = sorted(plain)[0]

    def lie(header: dict[str, Any]) -> None:
        start, end = header[first]["data_offsets"]
        header[first]["data_offsets"] = [start, end + 4096]

    def shape(header: dict[str, Any]) -> None:
        header[first]["shape"] = [1 << 40, 1 << 40]

    for name, data in (
        ("cut", good[:-100]),
        ("longer", good + b"more"),
        ("cut header", good[:100]),
        ("no file of tensors", b"<html>not found</html>"),
        ("empty file", b""),
        ("huge header", struct.pack("<Q", 1 << 40) + good[8:]),
        ("lying offsets", with_header(good, lie)),
        ("lying shape", with_header(good, shape)),
    ):
        asked = adapter(name)
        (made / name / "adapter_model.safetensors").write_bytes(data)
        case(name, asked)
    for name, data in (
        ("html bin", b"<html>not found</html>"),
        ("cut bin", (made / "bin" / "adapter_model.bin").read_bytes()[:2000]),
    ):
        asked = adapter(name, weights_format="bin")
        (made / name / "adapter_model.bin").write_bytes(data)
        case(name, asked)
    others: Any = {"state_dict": plain}
    case("nested bin", adapter("nested bin", others, weights_format="bin"))
    meta = plain | {a: torch.empty(8, 256, device="meta")}
    case("meta bin", adapter("meta bin", meta, weights_format="bin"))
    sparse = plain | {a: torch.ones(8, 256).to_sparse()}
    case("sparse bin", adapter("sparse bin", sparse, weights_format="bin"))
    negative = plain | {a: torch._neg_view(torch.ones(8, 256))}
    case("negative bin", adapter("negative bin", negative, weights_format="bin"))
    for name, text in (
        ("no json", "{"),
        ("no object", "[]"),
        ("key twice", json.dumps(config(LLAMA))[:-1] + ', "r": 16}'),
    ):
        asked = adapter(name)
        (made / name / "adapter_config.json").write_text(text)
        case(name, asked)
    # Of two, one cannot be served: the other is not written either.
    pair = (snapshot(made / "one", "first"), snapshot(made / "use_dora=True", "second"))
    case("one of two", request(llama, out / "one of two", *pair))
    usage = namedtuple("usage", "total used free")
    with patch.object(preflight.shutil, "disk_usage", lambda _: usage(10**6, 0, 10**5)):
        case("small disk", adapter("small disk"))
    broken = out / "broken" / "llama"
    broken.mkdir(parents=True)
    (broken / "model.safetensors").write_bytes(b"not this")
    case("broken base", request(broken, out / "broken base", snapshot(made / "one")))

    # A scratch disk that does not keep what it is given

    def damaging(tensors: Tensors, path: Path) -> None:
        write(tensors, path)
        data = bytearray(path.read_bytes())
        data[-2000] ^= 1
        path.write_bytes(data)

    def forgetful(tensors: Tensors, path: Path) -> None:
        write(dict(list(tensors.items())[1:]), path)

    write = adapters.write_adapter
    for name, writer in (("damaged scratch", damaging), ("lost tensor", forgetful)):
        with patch.object(adapters, "write_adapter", writer):
            case(name, adapter(name))

    # To S3

    with LocalS3(out / "s3") as server:
        server.create_bucket("models")
        settings = S3Settings(endpoint_url=server.endpoint, region=REGION)
        credentials = S3Credentials(
            access_key_id=server.access_key, secret_access_key=server.secret_key
        )
        with patch.object(session, "secrets", credentials.to_secrets):
            scratch = {"scratch_dir": str(out / "s3-scratch"), "s3": settings}
            asked = request(llama, "s3://models/prod", snapshot(made / "one"), **scratch)
            found["s3"] = attempt(asked)
            found["s3"]["root"] = store_of(asked.root, settings).list("")
            found["s3"]["scratch"] = left(out / "s3-scratch")

    found["imported"] = [name for name in ("vllm", "transformers") if name in sys.modules]
    cases.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
