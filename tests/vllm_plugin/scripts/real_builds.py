"""Make real builds of a small model, with manifests, in a root of their own.

    python real_builds.py MODELS OUT

Below the root in OUT, vllm/tiny/plain and secret (encrypted with KEY) are at TP=1 and have
adapters: pirate and late of rank 4, poet of rank 12, and two that were changed after the manifest
was written: cut in its tensors, other in its config. `two` is at TP=2. The adapters' sources are in
OUT/adapters.
"""

import sys
from pathlib import Path
from typing import Any

from building import artifact
from lora_cases import KEY, encrypted, hand_over, snapshot, written

from tensorize_assets.core import layout, signing
from tensorize_assets.core import manifest as manifests
from tensorize_assets.core.build import build_id
from tensorize_assets.core.manifest import FileEntry, Manifest
from tensorize_assets.core.store import digest, open_store
from tensorize_assets.core.tasks import DATA_KEY, AdaptersResult, ShardResult

GOLDEN = manifests.decode(
    (Path(__file__).parents[2] / "core" / "golden" / "manifest.json").read_bytes(), None
)
SIGNER = signing.SecretKey(bytes(range(32)))
RANKS = {"pirate": 4, "late": 4, "poet": 12, "cut": 4, "other": 4}


def write_manifest(
    folder: Path,
    built: ShardResult,
    with_: AdaptersResult | None = None,
    key_id: str | None = None,
) -> None:
    """Describe a directory as it lies there."""
    store = open_store(str(folder))
    files = [
        FileEntry(path=key, size=found.size, sha256=found.sha256)
        for key in store.list("")
        for found in [digest(store, key)]
    ]
    adapters = with_.adapters if with_ else ()
    inputs = GOLDEN.inputs.model_copy(
        update={
            "model": "tiny/llama",
            "adapters": tuple(sorted((one.name, one.snapshot.commit) for one in adapters)),
            "data_key": key_id,
        }
    )
    changes: dict[str, Any] = {
        "model": inputs.model,
        "suffix": "v1",
        "inputs": inputs.model_dump(),
        "build_id": build_id(inputs),
        "tensor_parallel_size": len(built.shards),
        "dtype": built.dtype,
        "files": [file.model_dump() for file in files],
        "shards": [shard.model_dump() for shard in built.shards],
        "adapters": [adapter.model_dump() for adapter in adapters],
        "tied": (),
        "encryption": key_id and {"key_id": key_id},
    }
    manifest = Manifest.model_validate({**GOLDEN.model_dump(), **changes})
    (folder / layout.MANIFEST).write_bytes(manifests.encode(manifest, SIGNER))


def damage(folder: Path) -> None:
    tensors = folder / "adapters" / "cut" / layout.ADAPTER_TENSORS
    data = bytearray(tensors.read_bytes())
    data[-100] ^= 1
    tensors.write_bytes(data)
    config = folder / "adapters" / "other" / layout.ADAPTER_CONFIG
    config.write_bytes(config.read_bytes().replace(b'"lora_alpha": 8', b'"lora_alpha": 9'))


def main(models: Path, out: Path) -> None:
    llama = models / "llama"
    sources = [
        snapshot(llama, out / "adapters" / name, seed, rank)
        for seed, (name, rank) in enumerate(RANKS.items(), 1)
    ]
    plain, built = artifact(llama, out / "root", "plain")
    adapters = written(llama, plain, *sources)
    hand_over(**{DATA_KEY: KEY})
    secret, there = encrypted(plain, "secret", built, adapters)
    write_manifest(plain, built, adapters)
    write_manifest(secret, there, adapters, "0123456789abcdef")
    for folder in (plain, secret):
        damage(folder)
    two, built = artifact(llama, out / "root", "two", tensor_parallel_size=2)
    write_manifest(two, built)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
