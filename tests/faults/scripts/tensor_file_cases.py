"""Have bad .tensors files read by all that opens one; writes what came of it to CASES.

    python tensor_file_cases.py FOLDER CASES CHANGES

Of each reader and change: what it raised, and by how much the process grew at its peak. CHANGES is
how many of each file are made at random. No engine: the loader's parts, without a model.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import resource
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from tensorizer import DecryptionParams
from tensorizer import serialization as tensorizer_format

from tensorize_assets.core.errors import TensorizeAssetsError
from tensorize_assets.vllm_plugin import streams
from tensorize_assets.vllm_plugin.loader import file_errors, require_whole
from tensorize_assets.worker.encrypt_shard import encrypt_shard
from tensorize_assets.worker.read_back import read_back
from tensorize_assets.worker.tensor_file import Entry, read_index
from tensorize_assets.worker.write_shard import write_encrypted_shard, write_shard, write_state_dict

KEY, OLD_KEY = bytes(range(32)), bytes(range(100, 132))
HEADER, INDEX = 73, 256 << 10
# What one who calls a reader is told to expect.
EXPECTED = (
    TensorizeAssetsError,
    ValueError,
    tensorizer_format.HashMismatchError,
    tensorizer_format.CryptographyError,
)
Reader = Callable[[Path], str]


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


def _module() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.register_parameter("weight", _parameter(torch.randn(4, 6).bfloat16()))
    model.register_parameter("bias", _parameter(torch.randn(6)))
    model.register_buffer("scale", torch.tensor(1.5))
    return model


def _digest(tensors: Iterator[tuple[str, torch.Tensor]]) -> str:
    whole = hashlib.sha256()
    for name, tensor in tensors:
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        whole.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def _load(path: Path, key: bytes | None) -> str:
    """As the loader, the reload's attempts and the unpacking of adapters do."""
    encryption = None if key is None else DecryptionParams.from_key(key)
    arguments = {"verify_hash": True, "encryption": encryption, "num_readers": 1}
    file = streams.find(str(path), {})
    with file_errors(str(path)), file.deserializer("cpu", arguments) as deserializer:
        require_whole(file, deserializer)
        loaded = deserializer._bulk_load_uncached(list(deserializer._metadata))
        return _digest((str(one.header.name.normalize_()), one.parameter) for one in loaded)


def _in_place(path: Path) -> str:
    """As the loader reads a plaintext file on the CPU: to where the model's tensors are."""
    file = streams.find(str(path), {})
    with (
        file_errors(str(path)),
        file.deserializer("cpu", {"verify_hash": True, "num_readers": 1}) as deserializer,
    ):
        require_whole(file, deserializer)
        entries = {key: entry for key, entry in deserializer._metadata.items() if entry.data_length}
        rooms = {key: memoryview(bytearray(entry.data_length)) for key, entry in entries.items()}
        deserializer.read_into(rooms)
        whole = hashlib.sha256()
        for key, room in rooms.items():
            entry = entries[key]
            whole.update(f"{key.normalize_()} {entry.dtype} {entry.shape}".encode() + bytes(room))
        return whole.hexdigest()


def _read_back(path: Path, key: bytes | None) -> str:
    tensors: list[Any] = []
    for _ in read_back(path, tensors, needs_marker=False, key=key):
        pass
    return repr(tensors)


def _encrypt(path: Path, old_key: bytes | None) -> str:
    tensors: list[Any] = []
    with path.open("rb") as file:
        index = read_index(file, str(path))
        made = encrypt_shard(
            file, index, str(path), KEY, tensors, scratch=path.parent, old_key=old_key, threads=1
        )
        return hashlib.sha256(b"".join(made)).hexdigest()


def _files(folder: Path) -> dict[str, tuple[bytes, dict[str, Reader]]]:
    """Small files of each kind, and what reads them."""
    path = folder / "made.tensors"
    write_shard(_module(), path, {}, lambda _: None)
    plain = path.read_bytes()
    write_encrypted_shard(_module(), path, OLD_KEY, lambda _: None)
    encrypted = path.read_bytes()
    lora = {"a.lora_A.weight": torch.randn(2, 3), "a.lora_B.weight": torch.randn(3, 2)}
    write_state_dict(lora, path, {}, lambda _: None)
    adapter = path.read_bytes()
    return {
        "shard": (
            plain,
            {
                "load": lambda file: _load(file, None),
                "load in place": _in_place,
                "read back": lambda file: _read_back(file, None),
                "encrypt": lambda file: _encrypt(file, None),
            },
        ),
        "encrypted shard": (
            encrypted,
            {
                "load": lambda file: _load(file, OLD_KEY),
                "read back": lambda file: _read_back(file, OLD_KEY),
                "encrypt": lambda file: _encrypt(file, OLD_KEY),
            },
        ),
        "adapter": (
            adapter,
            {
                "load": lambda file: _load(file, None),
                "read back": lambda file: _read_back(file, None),
                "encrypt": lambda file: _encrypt(file, None),
            },
        ),
    }


def _index(data: bytes) -> tuple[bool, tuple[Entry, ...]]:
    found = read_index(io.BytesIO(data), "it")
    return found.encrypted, found.entries


def _hashed_anew(data: bytes) -> bytes:
    """A plaintext file with the hashes that its headers and data have: whoever made it, can."""
    changed = bytearray(data)
    for entry in _index(data)[1]:
        # At a header's end: type and size of the CRC, itself; the same of the SHA-256; data's size.
        crc, sha = entry.data_offset - 46, entry.data_offset - 40
        changed[crc : crc + 4] = bytes(4)
        changed[sha : sha + 32] = bytes(32)
        end = entry.data_offset + entry.size
        whole = bytes(changed[entry.offset : end])
        changed[crc : crc + 4] = zlib.crc32(whole).to_bytes(4, "little")
        changed[sha : sha + 32] = hashlib.sha256(whole).digest()
    return bytes(changed)


def _lies(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Files that say of themselves what would take any memory, were it believed."""
    encrypted, entries = _index(data)
    first, last = entries[0], entries[-1]

    def put(at: int, form: str, value: int) -> bytes:
        changed = bytearray(data)
        struct.pack_into(form, changed, at, value)
        return bytes(changed)

    def entry(**changes: Any) -> bytes:
        largest = max(entries, key=lambda one: one.size)
        packed = largest.packed()
        other = type(largest)(
            **{name: getattr(largest, name) for name in largest.__slots__} | changes
        ).packed()
        assert len(packed) == len(other)
        return data.replace(packed, other, 1)

    sizes = {"2 GiB": 2 << 30, "64 GiB": 64 << 30, "1 EiB": 1 << 60, "all ones": (1 << 64) - 1}
    for name, size in sizes.items():
        yield f"index of {name}", put(HEADER - 8, "<Q", size)
        yield f"{name} of tensors", put(HEADER - 16, "<Q", size)
        yield f"first tensor's header of {name}", put(first.offset, "<Q", size)
        yield f"last tensor's header of {name}", put(last.offset, "<Q", size)
        yield f"data of {name} in a header", put(first.data_offset - 8, "<Q", size)
        yield f"data of {name} in the index", entry(size=size)
        yield f"data at {name}", entry(data_offset=size)
        yield f"header at {name}", entry(offset=size)
    unnamed = bytearray(data)
    unnamed[first.offset + 13] ^= 1
    header = first.data_offset - first.offset
    for name, size in (("back", -header), ("beyond all disks", (1 << 63) - 1)):
        struct.pack_into("<q", unnamed, first.data_offset - 8, size)
        yield f"a tensor that the index does not name, and that leads {name}", bytes(unnamed)
    largest = max(entries, key=lambda one: one.size)
    wide = tuple((1 << 32) - 1 for _ in largest.shape)
    yield "a shape beyond all memory", entry(shape=wide)
    yield "a shape beyond all memory, of no data", entry(shape=wide, size=0)
    for shape in (wide, tuple(1 << 16 for _ in largest.shape)):
        absent = bytearray(entry(shape=shape, size=0))
        struct.pack_into("<Q", absent, largest.data_offset - 8, 0)
        yield f"a tensor of shape {shape} that was on no device", bytes(absent)
    for kind in (b"f4,(", b"O", b"V999", b"((((", b"\x00\x00\x00", b"M8[s", b"\xff\xfe", b"|b9"):
        spelled = kind[: len(largest.dtype)].ljust(len(largest.dtype), b"1")
        yield f"type {spelled!r}", entry(dtype=spelled)
        if not encrypted:
            everywhere = data.replace(largest.dtype, spelled)
            yield f"type {spelled!r}, with right hashes", _hashed_anew(everywhere)
    many = largest.packed() * (INDEX // len(largest.packed()))
    count = len(many) // len(largest.packed())
    filled = put(HEADER - 16, "<Q", count)
    yield (
        "an index full of one tensor",
        filled[:HEADER] + many.ljust(INDEX, b"\0") + filled[HEADER + INDEX :],
    )


def _at_random(data: bytes, count: int, chance: random.Random) -> Iterator[bytes]:
    """The file with a few bytes changed where they mean something, cut, or with parts exchanged."""
    used = len(data[HEADER : HEADER + INDEX].rstrip(b"\0"))
    places = [*range(HEADER + used + 8), *range(HEADER + INDEX, len(data))]
    extremes = (b"\0" * 8, b"\xff" * 8, struct.pack("<Q", 1 << 40), b"\xff\xff\xff\x7f")
    for _ in range(count):
        changed = bytearray(data)
        for _ in range(chance.randint(1, 3)):
            at = chance.choice(places)
            match chance.randrange(5):
                case 0:
                    changed[at : at + 1] = bytes([chance.randrange(256)])
                case 1:
                    value = chance.choice(extremes)
                    changed[at : at + len(value)] = value
                case 2:
                    other = chance.choice(places)
                    changed[at : at + 8] = data[other : other + 8]
                case 3:
                    del changed[at : at + chance.randint(1, 40)]
                case _:
                    changed[at:at] = chance.randbytes(chance.randint(1, 40))
        yield bytes(changed)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


class Findings:
    """What came of it, by reader."""

    def __init__(self) -> None:
        self.crashes: dict[str, str] = {}
        self.outcomes: dict[str, Counter[str]] = {}
        self.others: list[str] = []
        self.grown: dict[str, int] = {}

    def note(self, reader: str, what: str, path: Path, read: Reader, whole: str) -> None:
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        try:
            found = "same" if read(path) == whole else "other"
        except EXPECTED as error:
            found = type(error).__name__
            if any(isinstance(cause, MemoryError) for cause in _causes(error)):
                self.crashes[f"{reader}, {what}"] = "asked for more memory than there is"
        except BaseException as error:  # noqa: BLE001 - a test says that there is none
            found = f"crash: {type(error).__name__}"
            self.crashes[f"{reader}, {what}"] = f"{type(error).__name__}: {error}"[:300]
        # With right hashes it is another file: those of the manifest tell.
        if found == "other" and not what.endswith("right hashes"):
            self.others.append(f"{reader}, {what}")
        self.outcomes.setdefault(reader, Counter())[found] += 1
        grown = _status("VmHWM") - before
        self.grown[reader] = max(self.grown.get(reader, 0), grown)
        if grown > 256 << 20:
            self.crashes[f"{reader}, {what}"] = f"grew by {grown:,} bytes"


def main() -> None:
    folder, out, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    folder.mkdir()
    path = folder / "it.tensors"
    findings = Findings()
    files = _files(folder)
    wholes: dict[tuple[str, str], str] = {}
    for kind, (data, readers) in files.items():
        path.write_bytes(data)
        for name, read in readers.items():
            wholes[kind, name] = read(path)
    # What is asked for and never touched shows in no resident bytes.
    soft = _status("VmSize") + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (soft, soft))
    for kind, (data, readers) in files.items():
        chance = random.Random(f"{kind} 1")
        # Right hashes anew are those that it has.
        assert kind == "encrypted shard" or _hashed_anew(data) == data
        at_random = enumerate(_at_random(data, count, chance))
        # Not all at once: they are as large as memory is here.
        for what, one in chain(_lies(data), ((f"change {n}", one) for n, one in at_random)):
            path.write_bytes(one)
            for name, read in readers.items():
                findings.note(f"{kind}: {name}", what, path, read, wholes[kind, name])
    out.write_text(
        json.dumps(
            {
                "crashes": findings.crashes,
                "others": findings.others,
                "outcomes": findings.outcomes,
                "grown": findings.grown,
            }
        )
    )


if __name__ == "__main__":
    main()
