"""Hold `encrypt_shard` against tensorizer itself; writes what it finds to CASES.

    python encrypt_cases.py OUT CASES

No vLLM in this one: its loader reads an encrypted file with tensorizer's TensorDeserializer too.
"""

import hashlib
import json
import os
import resource
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from tensorizer import (
    DecryptionParams,
    EncryptionParams,
    TensorDeserializer,
    TensorSerializer,
)
from tensorizer import serialization as tensorizer_format

from tensorize_assets.core.errors import WorkerError
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.manifest import TensorEntry
from tensorize_assets.worker import encrypt_shard as ours
from tensorize_assets.worker.module_tensors import MARKER
from tensorize_assets.worker.read_back import read_back
from tensorize_assets.worker.tensor_file import CHUNK_BYTES, MARKER_NAME, read_index
from tensorize_assets.worker.write_shard import write_encrypted_shard, write_shard

KEY = bytes(range(100, 132))
OTHER_KEY = bytes(32)
HEADER = 73 + (256 << 10)
Tensors = dict[str, torch.Tensor]


def parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


def everything() -> torch.nn.Module:
    """Every type, and every size that a chunk makes special; the last is kept in scratch."""
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.types = torch.nn.Module()
    model.types.register_parameter("of_bfloat16", parameter(torch.randn(4, 6).bfloat16()))
    model.types.register_parameter("of_float16", parameter(torch.randn(3, 2, 5).half()))
    model.types.register_parameter("of_float32", parameter(torch.randn(7)))
    model.types.register_parameter("of_fp8", parameter(torch.randn(9).to(torch.float8_e4m3fn)))
    model.types.register_buffer("of_int64", torch.arange(11), persistent=False)
    model.types.register_buffer("of_bool", torch.tensor([True, False, True]))
    model.types.register_buffer("of_scalar", torch.tensor(1.5))
    model.types.register_parameter("of_transposed", parameter(torch.randn(6, 4).T))
    model.sizes = torch.nn.Module()
    for name, size in (
        ("one", 1),
        ("chunk_less_1", CHUNK_BYTES - 1),
        ("chunk", CHUNK_BYTES),
        ("chunk_and_1", CHUNK_BYTES + 1),
        ("chunks", 3 * CHUNK_BYTES),
        ("chunks_and_some", 4 * CHUNK_BYTES + 77),
        ("scratch", ours.HELD_BYTES + 5),
    ):
        data = torch.randint(0, 256, (size,), dtype=torch.uint8)
        model.sizes.register_parameter(name, parameter(data))
    model.tied = torch.nn.Module()
    model.tied.weight = model.types.of_float32
    return model


def small() -> torch.nn.Module:
    torch.manual_seed(1)
    model = torch.nn.Module()
    model.register_parameter("a", parameter(torch.randn(4, 6).bfloat16()))
    model.register_parameter("b", parameter(torch.randn(4, 6).bfloat16()))
    model.register_buffer("scale", torch.tensor(1.5))
    return model


def two_chunks() -> torch.nn.Module:
    torch.manual_seed(2)
    model = torch.nn.Module()
    data = torch.randint(0, 256, (2 * CHUNK_BYTES,), dtype=torch.uint8)
    model.register_parameter("w", parameter(data))
    return model


def encrypt_shard(
    path: Path, key: Any, tensors: list[TensorEntry], **options: Any
) -> Generator[bytes]:
    """The file at `path`, encrypted."""
    with path.open("rb") as file:
        index = read_index(file, str(path))
        yield from ours.encrypt_shard(
            file, index, str(path), key, tensors, scratch=path.parent, **options
        )


def encrypted_size(path: Path) -> int:
    with path.open("rb") as file:
        return read_index(file, str(path)).as_encrypted().size


def encrypted(path: Path, key: Any = KEY, **options: Any) -> tuple[bytes, list[TensorEntry]]:
    tensors: list[TensorEntry] = []
    return b"".join(encrypt_shard(path, key, tensors, **options)), tensors


def written(out: Path, name: str, model: torch.nn.Module, **options: Any) -> Path:
    path = out / f"{name}.tensors"
    write_shard(model, path, options, lambda _: None)
    return path


def loaded(path: Path, key: bytes | None = KEY, verify_hash: bool = True) -> Tensors:
    """Every tensor as tensorizer reads it."""
    encryption = None if key is None else DecryptionParams.from_key(key)
    with TensorDeserializer(
        str(path), device="cpu", verify_hash=verify_hash, encryption=encryption
    ) as reader:
        return flat("", reader)


def flat(above: str, tensors: Mapping[str, Any]) -> Tensors:
    found: Tensors = {}
    for name, value in tensors.items():
        if isinstance(value, Mapping):
            found |= flat(f"{above}{name}/", value)
        else:
            found[above + name] = value
    return found


def same(one: Tensors, two: Tensors) -> bool:
    return list(one) == list(two) and all(
        one[name].dtype == two[name].dtype
        and one[name].shape == two[name].shape
        and type(one[name]) is type(two[name])
        and torch.equal(bits(one[name]), bits(two[name]))
        for name in one
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def headers(path: Path) -> dict[str, tuple[Any, Any]]:
    """Index entry and header of every tensor, by tensorizer's own parser, without a key."""
    data = path.read_bytes()
    count = struct.unpack_from("<Q", data, 57)[0]
    index, _ = tensorizer_format._MetadataDeserializer.from_buffer(data[73:HEADER], count)
    found = {}
    for entry in index.values():
        raw = bytearray(data[entry.offset : entry.data_offset])
        header = tensorizer_format._TensorHeaderDeserializer(raw, check_crypt_info=True)
        found[str(entry.name.normalize_())] = (entry, header)
    return found


Span = tuple[int, int]


def spans(entry: Any, header: Any) -> dict[str, Span]:
    """Where what belongs to the encryption of a tensor is, and its SHA-256."""
    (method,) = header.crypt_info.chunks
    macs = entry.data_offset - 8 - 16 * method.num_macs
    # Before the size of a chunk: sizes of the whole and of the method, their number, its kind.
    return {
        "SHA-256": (macs - 92, macs - 60),
        "chunk size": (macs - 40, macs - 32),
        "nonce": (macs - 32, macs - 8),
        "number of MACs": (macs - 8, macs),
        "MAC": (macs, entry.data_offset - 8),
        "ciphertext": (entry.data_offset, entry.data_offset + entry.data_length),
    }


def masked(path: Path) -> str:
    """The digest of a file whose nonces, MACs and ciphertexts are blanked."""
    data = bytearray(path.read_bytes())
    for entry, header in headers(path).values():
        if header.crypt_info.num_chunks:
            found = spans(entry, header)
            for start, end in (found["nonce"], found["MAC"], found["ciphertext"]):
                data[start:end] = bytes(end - start)
    return hashlib.sha256(data).hexdigest()


def nonces(path: Path) -> list[bytes]:
    """Every nonce, counted as tensorizer counts them."""
    from tensorizer import _crypt

    return [
        bytes(nonce)
        for _, header in headers(path).values()
        for method in header.crypt_info.chunks
        for nonce in _crypt.ChunkedEncryption.sequential_nonces(method.nonce, method.num_macs)
    ]


def equality(out: Path) -> dict[str, Any]:
    model = everything()
    plain = written(out, "everything", model)
    tensors: list[TensorEntry] = []
    path = out / "store" / "encrypted.tensors"
    store = LocalStore(out / "store")
    size = encrypted_size(plain)
    digest = store.put_stream(path.name, encrypt_shard(plain, KEY, tensors), size=size)
    reference = written(out, "reference", everything(), encryption=EncryptionParams(key=KEY))
    originals: list[TensorEntry] = []
    for _ in read_back(plain, originals):
        pass
    again = out / "again.tensors"
    again.write_bytes(encrypted(plain, expected=originals, threads=1, share=8)[0])
    other = out / "other-key.tensors"
    other.write_bytes(encrypted(plain, OTHER_KEY)[0])
    changed = out / "changed-key.tensors"
    was: list[TensorEntry] = []
    for _ in read_back(other, was, key=OTHER_KEY):
        pass
    data, anew = encrypted(other, old_key=OTHER_KEY, expected=was)
    changed.write_bytes(data)
    direct = out / "direct.tensors"
    wrote = write_encrypted_shard(everything(), direct, KEY, lambda _: None)
    read: list[TensorEntry] = []
    handed_on = b"".join(read_back(direct, read, key=KEY))
    target = everything()
    target.register_parameter(MARKER, parameter(torch.zeros(1, dtype=torch.int64)))
    with torch.no_grad():
        for tensor in target.parameters():
            tensor.zero_()
    with TensorDeserializer(
        str(path), device="cpu", verify_hash=True, encryption=DecryptionParams.from_key(KEY)
    ) as reader:
        reader.load_into_module(target)
    source = dict(model.named_parameters()) | dict(model.named_buffers())
    into = dict(target.named_parameters()) | dict(target.named_buffers())
    found = nonces(path) + nonces(other) + nonces(changed) + nonces(reference)
    stored = {
        name: next(h.hash.hex() for h in header.hashes if h.type == 1)
        for name, (_, header) in headers(path).items()
    }
    return {
        "loads": same(loaded(plain, None), loaded(path)),
        "loads into a module": all(
            torch.equal(bits(source[name]), bits(into[name])) for name in source if name != MARKER
        ),
        "size": [size, path.stat().st_size, digest.size],
        "layout": [masked(file) for file in (reference, path, other, changed, direct)],
        "again": path.read_bytes() == again.read_bytes(),
        "changed key": {
            "loads": same(loaded(plain, None), loaded(changed)),
            "tensors": tensors == anew == was,
            "as written": changed.read_bytes() == direct.read_bytes(),
        },
        "direct": {
            "loads": same(loaded(plain, None), loaded(direct)),
            "tensors": list(wrote) == read == tensors,
            "handed on": handed_on == direct.read_bytes(),
        },
        "nonces": [len(found), len(set(found))],
        "key in file": KEY in path.read_bytes(),
        "described": [tensor.model_dump(mode="json", exclude={"sha256"}) for tensor in tensors],
        "originals": [tensor.model_dump(mode="json", exclude={"sha256"}) for tensor in originals],
        "hashes": {tensor.name: tensor.sha256 for tensor in tensors},
        "stored hashes": {n: h for n, h in stored.items() if n != f".{MARKER}"},
        "hashes of originals": {tensor.name: tensor.sha256 for tensor in originals},
        "marker": MARKER in {name.removeprefix(".") for name in headers(path)},
        "marker is known": f".{MARKER}" == MARKER_NAME,
    }


def empties(out: Path) -> dict[str, Any]:
    """A tensor without elements, which tensorizer itself cannot encrypt."""

    def model() -> torch.nn.Module:
        module = small()
        module.register_buffer("nothing", torch.empty(0, 3))
        return module

    plain = written(out, "empty", model())
    path = out / "empty-encrypted.tensors"
    path.write_bytes(encrypted(plain)[0])
    try:
        written(out, "empty-theirs", model(), encryption=EncryptionParams(key=KEY))
        theirs = "written"
    except Exception as error:  # noqa: BLE001 - which one is the finding
        theirs = type(error).__name__
    direct = out / "empty-direct.tensors"
    write_encrypted_shard(model(), direct, KEY, lambda _: None)
    return {
        "loads": same(loaded(plain, None), loaded(path)),
        "direct": same(loaded(plain, None), loaded(direct)),
        "tensorizer": theirs,
    }


def versions(out: Path) -> dict[str, list[int]]:
    """Versions of the plaintext and of the encrypted file, which also loads."""
    found = {}
    for name, tensor in (("numpy", torch.ones(2)), ("opaque", torch.ones(2).bfloat16())):
        plain = out / f"{name}.tensors"
        serializer = TensorSerializer(str(plain))
        serializer.write_state_dict({"lora": {"A.weight": tensor}, "B.weight": tensor})
        serializer.close()
        path = out / f"{name}-encrypted.tensors"
        path.write_bytes(encrypted(plain)[0])
        assert same(loaded(plain, None), loaded(path))
        found[name] = [struct.unpack_from("<I", p.read_bytes(), 5)[0] for p in (plain, path)]
    plain = written(out, "marked", small())
    path = out / "marked-encrypted.tensors"
    path.write_bytes(encrypted(plain)[0])
    found["marked"] = [struct.unpack_from("<I", p.read_bytes(), 5)[0] for p in (plain, path)]
    return found


def outcome(read: Callable[[], Tensors], whole: Tensors) -> str:
    """`same`, `other`, or the class and text of the error."""
    try:
        tensors = read()
    except Exception as error:  # noqa: BLE001 - which one is the finding
        return f"{type(error).__name__}: {error}"
    return "same" if same(tensors, whole) else "other"


def keys(out: Path) -> dict[str, Any]:
    path = out / "keys.tensors"
    plain = written(out, "keys-plain", small())
    path.write_bytes(encrypted(plain)[0])
    whole = loaded(path)
    secret = out / "keys-secret.tensors"
    secret.write_bytes(encrypted(plain, bytearray(KEY))[0])
    assert same(loaded(secret), whole)
    secret.write_bytes(encrypted(plain, memoryview(KEY))[0])
    assert same(loaded(secret), whole)
    told = []
    for key in (KEY[:31], KEY + b"x", b"", KEY[:16]):
        try:
            next(encrypt_shard(plain, key, []))
        except WorkerError as error:
            told.append(str(error))
    stream = encrypt_shard(plain, KEY, [])
    next(stream)
    # The frames of this traceback hold the key.
    broken = out / "keys-broken.tensors"
    broken.write_bytes(flipped(plain.read_bytes(), -20))
    try:
        for _ in encrypt_shard(broken, KEY, []):
            pass
        text = "not refused"
    except WorkerError:
        text = traceback.format_exc()
    shown = [*told, repr(stream), text]
    return {
        "none": outcome(lambda: loaded(path, None), whole),
        "wrong": outcome(lambda: loaded(path, OTHER_KEY), whole),
        "short": outcome(lambda: loaded(path, KEY[:31]), whole),
        "plain with key": outcome(lambda: loaded(plain), whole),
        "plain": str(plain),
        "ours": told,
        "refused": text.splitlines()[-1],
        "shows the key": [
            form
            for form in (repr(KEY), repr(KEY[:16]), KEY.hex(), KEY[:8].hex(), KEY[:8].decode())
            for line in shown
            if form in line
        ],
    }


def flipped(data: bytes, position: int, bit: int = 0x41) -> bytes:
    changed = bytearray(data)
    changed[position] ^= bit
    return bytes(changed)


def exchanged(data: bytes, *pairs: tuple[Span, Span]) -> bytes:
    changed = bytearray(data)
    for (a, a_end), (b, b_end) in pairs:
        changed[a:a_end], changed[b:b_end] = data[b:b_end], data[a:a_end]
    return bytes(changed)


def attacks(out: Path) -> dict[str, dict[str, str]]:
    """What tensorizer says of each attack, with and without verifying hashes."""
    path = out / "attacked-whole.tensors"
    path.write_bytes(encrypted(written(out, "attacked", small()))[0])
    raw, whole = path.read_bytes(), loaded(path)
    chunked = out / "chunked-whole.tensors"
    chunked.write_bytes(encrypted(written(out, "chunked", two_chunks()))[0])
    chunks, chunks_whole = chunked.read_bytes(), loaded(chunked)
    target = out / "target.tensors"
    found_headers = headers(path)
    entry = found_headers[".a"][0]
    start = entry.offset
    index = raw.index(b".a", 73)
    a, b = spans(*found_headers[".a"]), spans(*found_headers[".b"])
    w = spans(*headers(chunked)[".w"])
    first, middle, end = w["ciphertext"][0], w["ciphertext"][0] + CHUNK_BYTES, w["ciphertext"][1]
    mac = w["MAC"][0]
    # tensorizer's nonces are random.
    other = written(out, "other", small(), encryption=EncryptionParams(key=KEY)).read_bytes()

    def two(data: bytes, tensors: Tensors) -> dict[str, str]:
        target.write_bytes(data)
        return {
            "verified": outcome(lambda: loaded(target), tensors),
            "not verified": outcome(lambda: loaded(target, verify_hash=False), tensors),
        }

    small_ones = {
        "magic": flipped(raw, 1),
        "version": flipped(raw, 5, 1),
        "flag": flipped(raw, 9, 1),
        "size of data": flipped(raw, 41),
        "a tensor more": raw[:57] + bytes([raw[57] + 1]) + raw[58:],
        "a tensor fewer": raw[:57] + bytes([raw[57] - 1]) + raw[58:],
        "name in the index": flipped(raw, index + 1, 1),
        "kind in the index": flipped(raw, index + 2, 1),
        "shape in the index": flipped(raw, index + 4 + len(entry.dtype) + 1, 1),
        "offset in the index": flipped(raw, index + 4 + len(entry.dtype) + 9, 1),
        "unused index": flipped(raw, HEADER - 1),
        "header size": flipped(raw, start, 1),
        "header size beyond the file": flipped(raw, start + 2, 1),
        "header module": flipped(raw, start + 8, 1),
        "header kind": flipped(raw, start + 10, 1),
        "header name": flipped(raw, start + 14, 1),
        "header hash": flipped(raw, a["SHA-256"][0]),
        "chunk size": flipped(raw, a["chunk size"][0] + 2, 1),
        "nonce": flipped(raw, a["nonce"][0]),
        "MAC": flipped(raw, a["MAC"][0]),
        "ciphertext": flipped(raw, a["ciphertext"][0]),
        "end": flipped(raw, len(raw) - 1),
        "cut in the last tensor": raw[: len(raw) - 9],
        "cut at the end": raw[:-8],
        "longer": raw + b"x",
        "data of two tensors exchanged": exchanged(raw, (a["ciphertext"], b["ciphertext"])),
        "tensors exchanged with nonce and MAC": exchanged(
            raw, *((a[what], b[what]) for what in ("nonce", "MAC", "ciphertext"))
        ),
        "tensors exchanged with hashes too": exchanged(
            raw, *((a[what], b[what]) for what in ("SHA-256", "nonce", "MAC", "ciphertext"))
        ),
        "another encryption of it": other,
        "a tensor of another encryption": raw[: a["chunk size"][0]]
        + other[a["chunk size"][0] : a["ciphertext"][1]]
        + raw[a["ciphertext"][1] :],
    }
    chunked_ones = {
        "chunks exchanged": exchanged(chunks, ((first, middle), (middle, end))),
        "chunks exchanged with MACs": exchanged(
            chunks, ((first, middle), (middle, end)), ((mac, mac + 16), (mac + 16, mac + 32))
        ),
        "cut by a chunk": chunks[:middle],
        "second MAC": flipped(chunks, mac + 16),
        "second chunk": flipped(chunks, end - 1),
    }
    found = {name: two(data, whole) for name, data in small_ones.items()}
    found |= {name: two(data, chunks_whole) for name, data in chunked_ones.items()}
    for name, data in (small_ones | chunked_ones).items():
        assert data not in (raw, chunks), name
    return found


def every_flip(out: Path) -> dict[str, Any]:
    """Each byte that tensorizer reads, one after another, hashes verified."""
    path = out / "flipped-whole.tensors"
    path.write_bytes(encrypted(written(out, "flipped", small()))[0])
    raw, whole = path.read_bytes(), loaded(path)
    used = 73 + len(raw[73:HEADER].rstrip(b"\0"))
    target = out / "flipped-target.tensors"
    positions = [*range(used), *range(HEADER, len(raw))]
    sizes: set[int] = set()
    for entry, _ in headers(path).values():
        sizes |= {*range(entry.offset, entry.offset + 8)}
    entry = headers(path)[f".{MARKER}"][0]
    marker = range(entry.offset + 8, entry.data_offset)
    silent = {"same": 0, "other": 0, "other, in the size of a header": 0, "other, marker": 0}
    with less_memory(512 << 20):
        for position in positions:
            target.write_bytes(flipped(raw, position, 1))
            found = outcome(lambda: loaded(target), whole)
            if found == "other" and position in sizes:
                found = "other, in the size of a header"
            if found == "other" and position in marker:
                found = "other, marker"
            if found in silent:
                silent[found] += 1
    return {"flipped": len(positions), "silent": silent}


@contextmanager
def less_memory(left: int) -> Iterator[None]:
    """tensorizer asks for as much memory as a damaged size says."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + left, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def plain_damage(out: Path) -> dict[str, Any]:
    """What our own reading says of a plaintext file that is not whole."""
    plain = written(out, "plain", small())
    raw = plain.read_bytes()
    originals: list[TensorEntry] = []
    for _ in read_back(plain, originals):
        pass
    whole = encrypted(plain)[1]
    path = out / "damaged.tensors"

    def told(data: bytes, **options: Any) -> str:
        path.write_bytes(data)
        try:
            tensors = encrypted(path, **options)[1]
        except WorkerError as error:
            return f"WorkerError: {error}"
        except Exception as error:  # noqa: BLE001 - a test says that there is none
            return f"{type(error).__name__}: {error}"
        return "same" if tensors == whole else "other"

    def cut(data: bytes) -> str:
        """A file that gets shorter after its index was read."""
        path.write_bytes(data)
        stream = encrypt_shard(path, KEY, [])
        next(stream)
        os.truncate(path, len(data) - CHUNK_BYTES)
        try:
            for _ in stream:
                pass
        except WorkerError as error:
            return str(error)
        return "not refused"

    used = 73 + len(raw[73:HEADER].rstrip(b"\0"))
    start = raw.index(struct.pack("<q", 48), HEADER) + 8
    flips: dict[str, int] = {}
    positions = [*range(used), *range(HEADER, len(raw))]
    for position in positions:
        answer = told(flipped(raw, position)).partition(":")[0]
        flips[answer] = flips.get(answer, 0) + 1
    other = small()
    with torch.no_grad():
        other.a[0, 0] = 7
    theirs = written(out, "theirs", other).read_bytes()
    return {
        "data": told(flipped(raw, start + 3)),
        "index": told(flipped(raw, 75)),
        "header": told(flipped(raw, HEADER + 12)),
        "longer": told(raw + b"x"),
        "cut": told(raw[:-20]),
        "cut while read": cut(written(out, "chunks", two_chunks()).read_bytes()),
        "empty": told(b""),
        "not tensorizer's": told(b"PK\3\4" * 100),
        "encrypted already": told(encrypted(plain)[0]),
        "not encrypted": told(raw, old_key=OTHER_KEY),
        "flipped": len(positions),
        "flips": flips,
        "cuts": sorted({told(raw[:end]).partition(":")[0] for end in range(0, len(raw), 997)}),
        "put in its place": [told(theirs), told(theirs, expected=originals)],
        "expected": told(raw, expected=originals),
        "expected more": told(
            raw, expected=[*originals, originals[0].model_copy(update={"name": "more"})]
        ),
        "expected less": told(raw, expected=originals[1:]),
    }


def hidden_damage(out: Path) -> dict[str, Any]:
    """What is said of an encrypted file that is not whole, when it gets a new key or is read."""
    plain = written(out, "plain", small())
    raw, whole = encrypted(plain, OTHER_KEY)
    path = out / "damaged.tensors"

    def anew(data: bytes, old_key: bytes = OTHER_KEY, **options: Any) -> str:
        path.write_bytes(data)
        try:
            tensors = encrypted(path, old_key=old_key, **options)[1]
        except WorkerError as error:
            return f"WorkerError: {error}"
        except Exception as error:  # noqa: BLE001 - a test says that there is none
            return f"{type(error).__name__}: {error}"
        return "same" if tensors == whole else "other"

    def read(data: bytes, key: bytes = OTHER_KEY) -> str:
        path.write_bytes(data)
        tensors: list[TensorEntry] = []
        try:
            for _ in read_back(path, tensors, key=key):
                pass
        except WorkerError as error:
            return f"WorkerError: {error}"
        except Exception as error:  # noqa: BLE001 - a test says that there is none
            return f"{type(error).__name__}: {error}"
        return "same" if tensors == whole else "other"

    used = 73 + len(raw[73:HEADER].rstrip(b"\0"))
    path.write_bytes(raw)
    found = headers(path)
    a, b = spans(*found[".a"]), spans(*found[".b"])
    exchange = exchanged(raw, *((a[what], b[what]) for what in ("nonce", "MAC", "ciphertext")))
    flips: dict[str, dict[str, int]] = {"anew": {}, "read": {}}
    for position in [*range(used), *range(HEADER, len(raw))]:
        data = flipped(raw, position)
        for name, answer in (("anew", anew(data)), ("read", read(data))):
            kind = answer.partition(":")[0]
            flips[name][kind] = flips[name].get(kind, 0) + 1
    return {
        "whole": [anew(raw), read(raw)],
        "flips": flips,
        "cuts": sorted({anew(raw[:end]).partition(":")[0] for end in range(0, len(raw), 997)}),
        "wrong key": [anew(raw, KEY), read(raw, KEY)],
        "no key": anew(raw, cast("bytes", None)),
        "short key": anew(raw, KEY[:31]),
        "exchanged": [anew(exchange), read(exchange)],
        "put in its place": anew(encrypted(written(out, "two", two_chunks()), OTHER_KEY)[0]),
        "another": anew(encrypted(written(out, "two", two_chunks()), OTHER_KEY)[0], expected=whole),
    }


def bytes_read() -> int:
    line = next(x for x in Path("/proc/self/io").read_text().splitlines() if "rchar" in x)
    return int(line.split()[1])


def resources(out: Path) -> dict[str, Any]:
    """What is read, and what is left behind, also by one who stops in the middle."""
    model = torch.nn.Module()
    for number in range(5):
        data = torch.randint(0, 256, (3 * CHUNK_BYTES + 1,), dtype=torch.uint8)
        model.register_parameter(f"w{number}", parameter(data))
    plain = written(out, "resources", model)
    before = bytes_read()
    total = sum(len(chunk) for chunk in encrypt_shard(plain, KEY, []))
    read = bytes_read() - before
    folder = out / "scratch"
    folder.mkdir()
    big = torch.nn.Module()
    size = ours.HELD_BYTES + 1
    big.register_parameter("big", parameter(torch.zeros(size, dtype=torch.uint8)))
    big.register_parameter("next", parameter(torch.zeros(size, dtype=torch.uint8)))
    path = written(folder, "big", big)
    largest = max(map(len, encrypt_shard(path, KEY, [])))
    stream = encrypt_shard(path, KEY, [])
    for _ in range(4):
        next(stream)
    stream.close()
    left = [thread.name for thread in threading.enumerate() if "hash" in thread.name]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        full = "not refused"
        for _ in encrypt_shard(path, KEY, []):
            pass
    except WorkerError as error:
        full = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return {
        "file": plain.stat().st_size,
        "read": read,
        "yielded": total,
        "largest chunk": largest,
        "left": [p.name for p in folder.iterdir()],
        "threads": left,
        "full": full,
    }


_ALONE = """
import sys
from pathlib import Path
from tensorize_assets.worker.encrypt_shard import encrypt_shard
from tensorize_assets.worker.tensor_file import read_index
path = Path(sys.argv[1])
with path.open("rb") as file:
    index = read_index(file, str(path))
    made = encrypt_shard(file, index, str(path), bytes(32), [], scratch=path.parent)
    size = sum(len(chunk) for chunk in made)
peak = next(x for x in open("/proc/self/status") if x.startswith("VmHWM")).split()[1]
print(size, int(peak) * 1024, "torch" in sys.modules)
"""


def memory(out: Path) -> dict[str, Any]:
    """A process of its own that encrypts one large tensor and many that are held in memory."""
    model = torch.nn.Module()
    model.register_parameter("big", parameter(torch.zeros(200 << 20, dtype=torch.uint8)))
    for number in range(4):
        data = torch.zeros(ours.HELD_BYTES, dtype=torch.uint8)
        model.register_parameter(f"held{number}", parameter(data))
    plain = written(out, "memory", model)
    command = [sys.executable, "-c", _ALONE, str(plain)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    size, peak, torch_too = done.stdout.split()
    plain.unlink()
    return {"size": int(size), "peak": int(peak), "torch": torch_too == "True"}


def main(out: Path, cases: Path) -> None:
    out.mkdir()
    tempfile.tempdir = str(out)
    parts: Iterable[Callable[[Path], Any]] = (
        equality,
        empties,
        versions,
        keys,
        attacks,
        every_flip,
        plain_damage,
        hidden_damage,
        resources,
        memory,
    )
    found = {}
    for part in parts:
        folder = out / part.__name__
        folder.mkdir()
        found[part.__name__] = part(folder)
    cases.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
