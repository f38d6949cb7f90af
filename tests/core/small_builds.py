"""Signed builds of a few bytes, published: what a channel leads to, without any tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from tensorize_assets.core import layout, provenance, sealing, signing
from tensorize_assets.core import manifest as manifests
from tensorize_assets.core.build import build_id
from tensorize_assets.core.channel import ChannelEntry, EncryptedVariant
from tensorize_assets.core.evidence import Evidence, write_evidence
from tensorize_assets.core.manifest import Manifest, StoredManifest
from tensorize_assets.core.publish import publish
from tensorize_assets.core.store import Store

KEY = signing.SecretKey(bytes(range(32)))
STRANGER = signing.SecretKey(bytes(range(1, 33)))
TRUSTED = {KEY.public_key}
PRIVATE = sealing.PrivateKey(b"anna" * 8)
GOLDEN = manifests.decode(
    (Path(__file__).parent / "golden" / "manifest.json").read_bytes(), TRUSTED
)
MODEL, SUFFIX = GOLDEN.model, GOLDEN.suffix
SMALL = {"config.json": b"{}", "1_Pooling/a b?c=%20#d.json": b"[]"}
SHARDS = {"model-rank-000.tensors": b"rank 0" * 100, "model-rank-001.tensors": b"rank 1" * 50}


class Build(NamedTuple):
    """A complete build in a store."""

    store: Store
    manifest: Manifest
    directory: str
    sha256: str

    def key(self, path: str) -> str:
        return layout.file_key(self.directory, path)

    def add_evidence(
        self, device: str = "cpu", *, passed: bool = True, key: signing.SecretKey = KEY
    ) -> str:
        check = {"name": "token_ids_equal", "passed": passed, "description": "as it is"}
        found = Evidence.model_validate(
            {
                "model": MODEL,
                "suffix": SUFFIX,
                "build_id": self.manifest.build_id,
                "manifest_sha256": self.sha256,
                "device": device,
                "device_name": f"a {device}",
                "vllm_version": self.manifest.inputs.vllm,
                "tensor_parallel_size": 2,
                "dtype": "bfloat16",
                "passed": passed,
                "checks": (check,),
                "perplexity": 12.5,
                "load": {
                    "bytes": 1,
                    "seconds": 1.0,
                    "bytes_per_second": 1.0,
                    "host_memory_before": 1,
                    "host_memory_after": 1,
                },
                "default_load_seconds": 1.0,
                "prompts_digest": "ff00",
                "when": datetime(2025, 11, 29, 15, 0, tzinfo=UTC),
            }
        )
        return write_evidence(self.store, key, found)


def build(
    store: Store,
    commit: str = "a",
    *,
    vllm: str = "0.31.0",
    devices: Sequence[str] = ("cpu",),
    adapters: Mapping[str, int] | None = None,
    data_key: str | None = None,
) -> Build:
    """A build of the commit named by one letter, reloaded on `devices`; adapters by their rank."""
    ranks = adapters or {}
    changes: dict[str, Any] = {
        "commit": commit * 40,
        "vllm": vllm,
        "data_key": data_key,
        "adapters": tuple((name, "c" * 40) for name in sorted(ranks)),
    }
    inputs = GOLDEN.inputs.model_copy(update=changes)
    content = {**SMALL, **{name: data + commit.encode() for name, data in SHARDS.items()}}
    if data_key is not None:
        content |= {name: b"sealed " + content[name] for name in SHARDS}
    entries: list[dict[str, Any]] = []
    for name, rank in ranks.items():
        file, config = (
            layout.adapter_file(name, len(ranks), own)
            for own in (layout.ADAPTER_TENSORS, layout.ADAPTER_CONFIG)
        )
        content |= {file: name.encode(), config: b"{}"}
        entries.append(
            {
                "name": name,
                "repo": f"org/{name}",
                "snapshot": {**GOLDEN.snapshot.model_dump(), "commit": "c" * 40},
                "rank": rank,
                "file": file,
                "config": config,
                "tensors": (),
            }
        )
    manifest = Manifest.model_validate(
        {
            **GOLDEN.model_dump(),
            "inputs": inputs.model_dump(),
            "build_id": build_id(inputs),
            "snapshot": {**GOLDEN.snapshot.model_dump(), "commit": inputs.commit},
            "files": [
                {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                for path, data in content.items()
            ],
            "adapters": entries,
            "encryption": data_key and {"key_id": data_key},
        }
    )
    folder = layout.encrypted_dir if data_key else layout.artifact_dir
    directory = folder(MODEL, SUFFIX, manifest.build_id)
    for path, data in content.items():
        store.put_bytes(layout.file_key(directory, path), data)
    encoded = manifests.encode(manifest, KEY)
    store.put_bytes(layout.manifest_key(directory), encoded)
    made = Build(store, manifest, directory, manifests.manifest_sha256(encoded))
    provenance.write(store, directory, StoredManifest(manifest, made.sha256), KEY, TRUSTED)
    for device in devices:
        made.add_evidence(device)
    return made


def put(made: Build, encrypted: Build | None = None, *, device: str = "cpu") -> ChannelEntry:
    """Publish a build, and with it its encrypted variant."""
    other = encrypted and EncryptedVariant(
        build_id=encrypted.manifest.build_id,
        directory=encrypted.directory,
        manifest_sha256=encrypted.sha256,
    )
    return publish(
        made.store,
        KEY,
        TRUSTED,
        model=MODEL,
        suffix=SUFFIX,
        build_id=made.manifest.build_id,
        directory=made.directory,
        device=device,
        encrypted=other or None,
    )


def new_key(store: Store) -> tuple[str, bytes]:
    """A data key that PRIVATE opens: its id, and itself."""
    made = sealing.new_data_key(store, {"anna": PRIVATE.public_key}, KEY)
    with made.data_key as key:
        return made.key_id, key.reveal()
