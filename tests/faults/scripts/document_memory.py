"""Have hostile documents read, each in a process of its own; writes what came of it to CASES.

    python document_memory.py FOLDER CASES few|all

Of each: the error's name, and by how much the process grew at its peak. The documents are as large
as is read at all, or hold as many values.
"""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tensorize_assets.core import (
    audit_record,
    block_hashes,
    build_keys,
    channel,
    evidence,
    jsonio,
    layout,
    manifest,
    sealing,
    signing,
)
from tensorize_assets.core.errors import TensorizeAssetsError
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.manifest import FileEntry, ShardEntry, TensorEntry
from tensorize_assets.core.verify import verify_place

KEY = signing.SecretKey(bytes(range(32)))
STRANGER = signing.SecretKey(bytes(range(1, 33)))
TRUSTED = {KEY.public_key}
GOLDEN = manifest.decode(
    (Path(__file__).parents[2] / "core/golden/manifest.json").read_bytes(), TRUSTED
)
SHA = "ab" * 32
MODEL, SUFFIX = GOLDEN.model, GOLDEN.suffix
KEY_ID = "0123456789abcdef"
PRIVATE = sealing.PrivateKey(b"anna" * 8)
ANNA = json.dumps({"name": "anna", "public_key": PRIVATE.public_key}, separators=(",", ":"))

# As much as is read, less what stands around it.
VALUES = jsonio._MAX_VALUES - 500
NAMES = jsonio._MAX_NAMES - 500
BYTES = jsonio.MAX_BYTES - 20_000


def _many(item: str, count: int) -> str:
    return ",".join([item] * count)


# Of each kind of document a field that may be long.
LONG: dict[signing.DocumentType, str] = {
    "manifest": "shards",
    "channel": "entries",
    "evidence": "checks",
    "recipients": "changes",
    "build-key": "choices",
    "audit": "damage",
    "seal": "sealed",
    "blocks": "hashes",
}

# What is tried where there is little time: the worst of each kind.
FEW = (
    "unsigned: objects of one name",
    "unsigned: one wide string",
    "unsigned: lists beyond what is read",
    "unsigned: names beyond what is read",
    "unsigned: bytes beyond what is read",
    "by a stranger: objects of one name",
    "by anybody: objects of one name as versions",
    "by anybody: objects of one name in profile",
    "by anybody: one wide string as unknown",
    "by anybody: channel, numbers",
    "by anybody: evidence, one wide string",
    "by anybody: files that are all wrong",
    "by anybody: recipients, objects",
    "ours: the largest manifest",
    "ours: the largest list of blocks",
)


def _bombs() -> dict[str, str]:
    unlike = ",".join(f'{{"{number:x}":1000}}' for number in range(NAMES))
    names = ",".join(f'"{number:x}":1000' for number in range(NAMES))
    return {
        "lists": f"[{_many('[]', VALUES // 2)}]",
        "objects": f"[{_many('{}', VALUES // 2)}]",
        "objects of one name": "[" + _many('{"a":1000}', VALUES // 2) + "]",
        "numbers": f"[{_many('12345678901234567', VALUES)}]",
        "short strings": "[" + _many('"éü"', VALUES) + "]",
        "names of their own": f"[{unlike},{_many('{}', VALUES // 2 - NAMES)}]",
        "one object of many names": f"{{{names}}}",
        "one wide string": '"😀' + "a" * (BYTES - 500) + '"',
        "one long string": '"' + "a" * (BYTES - 500) + '"',
        "escapes": '"' + "\\n" * (BYTES // 2 - 500) + '"',
    }


def _beyond() -> dict[str, str]:
    names = ",".join(f'"{number:x}":1000' for number in range(NAMES + 1000))
    return {
        "lists beyond what is read": f"[{_many('[]', BYTES // 3)}]",
        "names beyond what is read": f"{{{names}}}",
        "bytes beyond what is read": '"' + "a" * (BYTES + 30_000) + '"',
    }


def _object(fields: dict[str, str]) -> str:
    return "{" + ",".join(f'"{name}":{text}' for name, text in sorted(fields.items())) + "}"


def _signed(kind: signing.DocumentType, fields: dict[str, str], key: signing.SecretKey) -> bytes:
    """A signed document of fields that are JSON already."""
    message = f"tensorize_assets/{kind}/1\n{_object(fields)}\n".encode()
    signature = {
        "key_id": key.key_id,
        "public_key": key.public_key,
        "signature": base64.b64encode(key.sign(message)).decode(),
    }
    own = {**fields, "signature": json.dumps(signature, separators=(",", ":"))}
    return f"{_object(own)}\n".encode()


def _fields(record: jsonio.Record) -> dict[str, str]:
    found = jsonio.dump_record(record)
    return {name: jsonio.canonical({"": value})[4:-2].decode() for name, value in found.items()}


# Each kind of document: where it lies and what reads it.
READ: dict[signing.DocumentType, tuple[str, Callable[[LocalStore, set[str] | None], object]]] = {
    "manifest": (layout.MANIFEST, verify_place),
    "channel": (
        layout.channel_key(MODEL, SUFFIX),
        lambda store, trusted: channel.read_channel(store, MODEL, SUFFIX, trusted),
    ),
    "evidence": (
        layout.evidence_key(SHA, "cpu", "0.31.0"),
        lambda store, trusted: evidence.read_evidence(store, SHA, "cpu", "0.31.0", trusted),
    ),
    "recipients": (
        layout.key_record_key(KEY_ID),
        lambda store, trusted: sealing.read_record(store, KEY_ID, trusted),
    ),
    "build-key": (
        layout.build_key_key(MODEL, SUFFIX, GOLDEN.build_id),
        lambda store, trusted: build_keys.read_keys(store, MODEL, SUFFIX, GOLDEN.build_id, trusted),
    ),
    "audit": (
        layout.audit_key(SHA),
        lambda store, trusted: audit_record.read_record(store, SHA, trusted),
    ),
    "seal": (
        layout.seal_key(KEY_ID, "anna"),
        lambda store, trusted: sealing.unseal(store, KEY_ID, PRIVATE, trusted=trusted),
    ),
    "blocks": (
        "blocks.json",
        lambda store, trusted: block_hashes.decode(
            (store.root / "blocks.json").read_bytes(),
            SHA,
            block_hashes.LARGEST_FILE,
            trusted or {STRANGER.public_key},
            "blocks.json",
        ),
    ),
}


def _large_manifest() -> bytes:
    """One of as many tensors as fit, of names as long as a large model's."""
    ranks, tensors = 16, 3300
    shards = tuple(
        ShardEntry(
            rank=rank,
            file=layout.shard_name(rank, ranks),
            tensors=tuple(
                TensorEntry(
                    name=f"model.layers.{number}.self_attn.weight",
                    kind="parameter",
                    dtype="bfloat16",
                    shape=(7168, 2048),
                    size=number,
                    sha256=f"{number:064x}",
                )
                for number in range(tensors)
            ),
        )
        for rank in range(ranks)
    )
    files = tuple(FileEntry(path=shard.file, size=1, sha256=SHA) for shard in shards)
    update = {"tensor_parallel_size": ranks, "shards": shards, "files": files}
    return manifest.encode(GOLDEN.model_copy(update=update), KEY)


def _large_list() -> bytes:
    hashes = bytes(block_hashes.LARGEST_FILE // block_hashes.BLOCK_BYTES * 32)
    return block_hashes.encode(SHA, block_hashes.LARGEST_FILE, hashes, KEY)


def documents() -> Iterator[tuple[str, signing.DocumentType, Callable[[], bytes]]]:
    """The name of each case, the kind of document, and what makes the document."""
    bombs = _bombs()

    def unsigned(bomb: str) -> bytes:
        return f'{{"a":{bomb}}}\n'.encode()

    def by_a_stranger(kind: signing.DocumentType, field: str, bomb: str) -> bytes:
        fields = _fields(GOLDEN) if kind == "manifest" else {"format": "1"}
        return _signed(kind, fields | {field: bomb}, STRANGER)

    for name, bomb in {**bombs, **_beyond()}.items():
        yield f"unsigned: {name}", "manifest", partial(unsigned, bomb)
    for name, bomb in bombs.items():
        inside = f'{{"a":{bomb}}}'
        made = partial(by_a_stranger, "manifest", "profile", inside)
        yield f"by a stranger: {name}", "manifest", made
        yield f"by anybody: {name} in profile", "manifest", made
        for field in ("unknown", "profile", "inputs", "shards", "files", "versions"):
            made = partial(by_a_stranger, "manifest", field, bomb)
            yield f"by anybody: {name} as {field}", "manifest", made
        for kind, field in LONG.items():
            yield f"by anybody: {kind}, {name}", kind, partial(by_a_stranger, kind, field, bomb)
    entry = '{"path":"a","sha256":"","size":0}'
    wrong = f"[{_many(entry, VALUES // 4)}]"
    made = partial(by_a_stranger, "manifest", "files", wrong)
    yield "by anybody: files that are all wrong", "manifest", made
    yield "ours: the largest manifest", "manifest", _large_manifest
    yield "ours: the largest list of blocks", "blocks", _large_list


def _grown(kind: signing.DocumentType, folder: Path, trusted: set[str] | None) -> dict[str, Any]:
    """What came of reading it, and by how many bytes this process grew meanwhile."""
    store = LocalStore(folder)
    Path("/proc/self/clear_refs").write_text("5")
    before, start = _status("VmRSS"), time.perf_counter()
    try:
        found = READ[kind][1](store, trusted)
        said = str(getattr(found, "problems", found))
        outcome = "read"
    except TensorizeAssetsError as error:
        outcome, said = type(error).__name__, str(error)
    except Exception as error:  # noqa: BLE001 - a test says that there is none
        outcome, said = f"crashed: {type(error).__name__}", str(error)
    return {
        "outcome": outcome,
        "said": said[:400],
        "grown": _status("VmHWM") - before,
        "seconds": time.perf_counter() - start,
    }


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def _write(folder: Path, few: bool) -> list[tuple[str, signing.DocumentType]]:
    cases: list[tuple[str, signing.DocumentType]] = []
    for name, kind, made in documents():
        if not few or name in FEW:
            path = folder / name / READ[kind][0]
            path.parent.mkdir(parents=True)
            path.write_bytes(made())
            cases.append((name, kind))
    return cases


def main() -> None:
    folder, out = map(Path, sys.argv[1:3])
    # Made in another process: memory that one is done with, its children would have for nothing.
    with get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        cases = pool.apply(_write, (folder, sys.argv[3] == "few"))
    found: dict[str, Any] = {}
    with get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for name, kind in cases:
            trusted = None if name.startswith("by anybody") else TRUSTED
            found[name] = pool.apply(_grown, (kind, folder / name, trusted))
            print(name, found[name], file=sys.stderr)
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
