"""Hold `read_back`, `preflight` and `census` against tensorizer itself; writes findings to CASES.

    python format_cases.py OUT CASES FILE…

Each FILE is read by tensorizer, with all its hashes verified. No vLLM in this one.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from tensorizer import TensorDeserializer

from tensorize_assets.core.errors import PreflightError, WorkerError
from tensorize_assets.core.manifest import TensorEntry
from tensorize_assets.worker import census
from tensorize_assets.worker.module_tensors import MARKER, tied_names
from tensorize_assets.worker.preflight import METADATA_REGION, check_scratch, check_tensors
from tensorize_assets.worker.read_back import read_back
from tensorize_assets.worker.write_shard import write_shard


def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape).to(dtype), requires_grad=False)


def small() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.inner = torch.nn.Module()
    model.inner.register_parameter("weight", parameter(4, 6))
    model.inner.register_parameter("bias", parameter(6, dtype=torch.float32))
    model.inner.register_buffer("scale", torch.tensor(1.5))
    model.register_buffer("index", torch.arange(3), persistent=False)
    model.register_buffer("mask", torch.tensor([True, False]))
    return model


def tensors_of(path: Path) -> list[dict[str, Any]]:
    """The tensors of a file as tensorizer reads them, every hash verified."""
    with TensorDeserializer(str(path), device="cpu", verify_hash=True, lazy_load=True) as reader:
        found = []
        for _, kind, name, tensor in reader.read_tensors():
            entry = next(e for e in reader._metadata.values() if str(e.name.normalize_()) == name)
            if name == f".{MARKER}":
                continue
            found.append(
                {
                    "name": name,
                    "kind": ("parameter", "buffer")[kind],
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "shape": list(tensor.shape),
                    "size": tensor.numel() * tensor.element_size(),
                    "sha256": next(h.hash.hex() for h in entry.hashes if h.type == 1),
                }
            )
    return sorted(found, key=lambda tensor: tensor["name"])


def outcome(path: Path) -> str:
    """`same`, `other`, or the class of the error, of a file that was `small` before."""
    try:
        _, tensors = whole(path)
    except WorkerError as error:
        return f"WorkerError: {error}"
    except Exception as error:  # noqa: BLE001 - a test says that there is none
        return f"{type(error).__name__}: {error}"
    return "same" if tensors == WHOLE[1] else "other"


def whole(path: Path) -> tuple[bytes, list[TensorEntry]]:
    """The bytes that `read_back` hands on, and the tensors that it finds."""
    tensors: list[TensorEntry] = []
    data = b"".join(read_back(path, tensors))
    return data, tensors


def reading(out: Path) -> dict[str, Any]:
    path = out / "damaged.tensors"
    raw = (out / "small.tensors").read_bytes()

    def damaged(data: bytes) -> str:
        path.write_bytes(data)
        return outcome(path)

    def flipped(position: int) -> str:
        data = bytearray(raw)
        data[position] ^= 0x41
        return damaged(bytes(data))

    with TensorDeserializer(str(out / "small.tensors"), device="cpu", lazy_load=True) as reader:
        entries = {str(e.name.normalize_()): e for e in reader._metadata.values()}
    weight = entries["inner.weight"]
    start = min(entry.offset for entry in entries.values())
    index = start - METADATA_REGION
    used = sum(
        31 + len(e.name.serialized_()) + len(e.dtype) + 4 * len(e.shape) - 2
        for e in entries.values()
    )
    # Everything that has a meaning: the file's header, the used part of its index, every tensor.
    positions = [*range(index + used), *range(start, len(raw))]
    unmarked = out / "unmarked.tensors"
    from tensorizer import TensorSerializer

    serializer = TensorSerializer(str(unmarked))
    serializer.write_module(small())
    serializer.close()
    return {
        "file": {
            "size": len(raw),
            "sha256": hashlib.sha256(raw).hexdigest(),
            "handed_on": hashlib.sha256(WHOLE[0]).hexdigest(),
            "tensors": [tensor.model_dump(mode="json") for tensor in WHOLE[1]],
            "expected": tensors_of(out / "small.tensors"),
        },
        "data": flipped(weight.data_offset + 3),
        "header": flipped(weight.offset + 14),
        "index": flipped(index + 4),
        "flips": sorted({flipped(position).partition(":")[0] for position in positions}),
        "flipped": len(positions),
        "cuts": sorted({damaged(raw[:end]).partition(":")[0] for end in range(0, len(raw), 101)}),
        "cut": damaged(raw[:-20]),
        "longer": damaged(raw + b"x"),
        "empty": damaged(b""),
        "other": damaged(b"PK\x03\x04" * 100),
        "unmarked": outcome(unmarked),
        "gone": outcome(out / "gone.tensors"),
    }


def filled(index: int) -> torch.nn.Module:
    """A module whose tensors and marker take exactly `index` bytes of tensorizer's index."""
    # Lengths of name, dtype and shape, kind, the dtype's own name, two dimensions, three offsets.
    entry = 2 + 1 + 1 + 1 + len("<i2\0torch.bfloat16") + 8 + 24
    left = index - (2 + len(f".{MARKER}") + 1 + 1 + 1 + len("<i8") + 4 + 24)
    model = torch.nn.Module()
    number = 0
    while left:
        # The last two share what is left, so that neither's name is too short.
        size = 160 if left >= 320 else (left if left < 240 else left // 2)
        name = f"{number:05d}".ljust(size - entry - 1, "x")
        model.register_parameter(name, parameter(1, 1))
        left -= size
        number += 1
    return model


def limit(out: Path, index: int) -> dict[str, Any]:
    """What we and what tensorizer say of an index of so many bytes."""
    model = filled(index)
    found: dict[str, Any] = {"tensors": len(model._parameters)}
    try:
        found["bytes"] = check_tensors(model, "org/model v1")
    except PreflightError as error:
        found["refused"] = str(error)
    path = out / "limit.tensors"
    try:
        write_shard(model, path, {}, lambda _: None)
        found["read"] = len(whole(path)[1])
    except RuntimeError as error:
        found["tensorizer"] = str(error)
    return found


def refusals(out: Path) -> dict[str, Any]:
    def check(name: str, *shape: int) -> int | str:
        model = torch.nn.Module()
        model.register_parameter(name, torch.nn.Parameter(torch.empty(shape, device="meta")))
        try:
            return check_tensors(model, "org/model v1")
        except PreflightError as error:
            return str(error)

    found = {
        "dimension": check("weight", 2**32),
        "largest dimension": check("weight", 2**32 - 1),
        "name": check("n" * 65535, 1),
        "longest name": check("n" * 65534, 1),
    }
    try:
        check_scratch(out, 2**62, "org/model v1")
    except PreflightError as error:
        found["scratch"] = str(error)
    unset = torch.nn.Module()
    unset.register_parameter("weight", torch.nn.Parameter(torch.empty(2, device="meta")))
    try:
        write_shard(unset, out / "unset.tensors", {}, lambda _: None)
    except WorkerError as error:
        found["unset"] = str(error)
    return found


def counting() -> dict[str, Any]:
    """The census of a module with everything that a cast to bfloat16 keeps or changes."""
    model = torch.nn.Module()
    values = {
        "same": torch.tensor([0.1], dtype=torch.bfloat16),
        "kept": torch.tensor([1.0, -2.5, float("inf"), float("nan")]),
        "rounded": torch.tensor([1.0, 0.1]),
        "overflowing": torch.tensor([1e300], dtype=torch.float64),
        "float16": torch.tensor([0.1], dtype=torch.float16),
        "small_integer": torch.tensor([3, 255]),
        "integer": torch.tensor([3, 257]),
        "boolean": torch.tensor([True]),
        "empty": torch.empty(0),
        "scalar": torch.tensor(1.0),
    }
    for name, tensor in values.items():
        model.register_buffer(name, tensor)
    counted = census.rank_census(model, 3, torch.bfloat16)
    model.one = torch.nn.Linear(2, 2)
    model.two = torch.nn.Linear(2, 2)
    model.two.weight = model.one.weight
    return {
        "merged": census.merge([counted, counted], torch.bfloat16).model_dump(mode="json"),
        "tied": tied_names(model),
    }


def main(out: Path, cases: Path, shards: list[Path]) -> None:
    global WHOLE
    out.mkdir()
    write_shard(small(), out / "small.tensors", {}, lambda _: None)
    WHOLE = whole(out / "small.tensors")
    found = {
        "shards": {str(path): tensors_of(path) for path in shards},
        "reading": reading(out),
        "fits": limit(out, METADATA_REGION),
        "does not fit": limit(out, METADATA_REGION + 1),
        "refusals": refusals(out),
        "census": counting(),
    }
    cases.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [Path(name) for name in sys.argv[3:]])
