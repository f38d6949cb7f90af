from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from tensorize_assets.core import jsonio, layout, signing
from tensorize_assets.core import manifest as manifests
from tensorize_assets.core.build import BuildInputs, build_id
from tensorize_assets.core.errors import ManifestError, SignatureError
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.manifest import (
    CastEntry,
    DtypeCensus,
    DtypeCount,
    FileEntry,
    Manifest,
    ShardEntry,
    SnapshotEntry,
    StockVllm,
    TensorEntry,
    TiedGroup,
)

GOLDEN = Path(__file__).parent / "golden" / "manifest.json"
KEY = signing.SecretKey(bytes(range(32)))
COMMIT = "27dcfa74d334bc871f3234de431e71c6eeba5dd6"
INPUTS = BuildInputs(
    model="org/tiny-é",
    commit=COMMIT,
    profile={"tensor_parallel_size": 2, "dtype": "auto"},
    vllm="0.31.0",
    torch="2.13.0+cpu",
    tensorizer="2.10.1",
)


def shard(rank: int) -> ShardEntry:
    weight = TensorEntry(
        name="lm_head.weight",
        kind="parameter",
        dtype="bfloat16",
        shape=(8, 4),
        size=64,
        sha256=f"{rank}" * 64,
    )
    scale = TensorEntry(
        name="scale", kind="buffer", dtype="float32", shape=(), size=4, sha256="a" * 64
    )
    return ShardEntry(rank=rank, file=f"model-rank-00{rank}.tensors", tensors=(weight, scale))


def file(path: str, size: int = 1) -> FileEntry:
    return FileEntry(path=path, size=size, sha256="f" * 64)


MANIFEST = Manifest(
    model="org/tiny-é",
    suffix="v1-tp2",
    build_id=build_id(INPUTS),
    inputs=INPUTS,
    snapshot=SnapshotEntry(
        revision="main",
        commit=COMMIT,
        files=(file("model.safetensors", 132), file("1_Pooling/config.json", 2)),
        weights_format="safetensors",
    ),
    profile={"revision": "main", "dtype": "auto", "prompts": ["Hi, →"], "max_perplexity": 500.0},
    sharding="virtual",
    tensor_parallel_size=2,
    dtype="bfloat16",
    architecture="LlamaForCausalLM",
    dtype_census=DtypeCensus(
        by_dtype={
            "float32": DtypeCount(tensors=2, bytes=8),
            "bfloat16": DtypeCount(tensors=2, bytes=128),
        },
        model_dtype="bfloat16",
        cast_by_stock=(
            CastEntry(name="scale", from_dtype="float32", to_dtype="bfloat16", lossy=False, rank=0),
        ),
    ),
    stock_vllm=StockVllm(loadable=True),
    tied=(TiedGroup(names=("lm_head.weight", "embed.weight"), stored_once=True),),
    versions={
        "vllm": "0.31.0",
        "torch": "2.13.0+cpu",
        "tensorizer": "2.10.1",
        "tensorize_assets": "0.1.0",
        "python": "3.11.7",
    },
    files=(
        file("model-rank-000.tensors", 4096),
        file("model-rank-001.tensors", 4096),
        file("config.json", 2),
    ),
    shards=(shard(0), shard(1)),
)
DIRECTORY = layout.artifact_dir(MANIFEST.model, MANIFEST.suffix, MANIFEST.build_id)


def changed(**fields: object) -> dict[str, object]:
    """The manifest as JSON with some fields replaced."""
    return {**jsonio.dump_record(MANIFEST), **fields}


def hand_signed(**fields: object) -> bytes:
    """A validly signed manifest that this package would never write."""
    return signing.sign("manifest", changed(**fields), KEY)  # pyright: ignore[reportArgumentType]


def test_a_manifest_is_the_same_to_the_byte_in_every_release() -> None:
    """Evidence and channels name it by hash. A change of format needs a new format number.

    To accept one on purpose, write what `encode` returns to the golden file.
    """
    assert GOLDEN.read_bytes() == manifests.encode(MANIFEST, KEY)
    assert MANIFEST == manifests.decode(GOLDEN.read_bytes(), {KEY.public_key})


def test_tensors_of_the_repos_own_names_are_labelled() -> None:
    """Whoever loads them must know beforehand that vLLM takes its slow path to them."""
    inputs = INPUTS.model_copy(update={"profile": {**INPUTS.profile, "format": "hf"}})
    labelled = Manifest.model_validate(
        {
            **MANIFEST.model_dump(),
            "inputs": inputs,
            "build_id": build_id(inputs),
            "stock_vllm": {"loadable": True, "reasons": ("by its slow path",)},
            "tensor_format": "hf",
        }
    )
    data = manifests.encode(labelled, KEY)
    assert "hf" == json.loads(data)["tensor_format"]
    assert labelled == manifests.decode(data, {KEY.public_key})
    with pytest.raises(ManifestError, match="the format of tensors differs"):
        manifests.decode(hand_signed(tensor_format="hf"), {KEY.public_key})


def test_the_order_files_were_found_in_does_not_matter() -> None:
    """A half-finished build that is completed must write the manifest that it would have."""
    other = Manifest.model_validate(
        {**MANIFEST.model_dump(), "files": MANIFEST.model_dump()["files"][::-1]}
    )
    assert manifests.encode(MANIFEST, KEY) == manifests.encode(other, KEY)


def test_a_manifest_is_read_from_its_directory(tmp_path: Path) -> None:
    """Readers get its hash with it, by which they find the evidence."""
    store = LocalStore(tmp_path)
    assert manifests.read_manifest(store, DIRECTORY, None) is None
    data = manifests.encode(MANIFEST, KEY)
    store.put_bytes(layout.manifest_key(DIRECTORY), data, if_absent=True)
    expected = (MANIFEST, manifests.manifest_sha256(data))
    assert expected == manifests.read_manifest(store, DIRECTORY, {KEY.public_key})


def test_a_tampered_manifest_is_refused_by_its_path(tmp_path: Path) -> None:
    """The message must lead to the file."""
    store = LocalStore(tmp_path)
    key = layout.manifest_key(DIRECTORY)
    data = manifests.encode(MANIFEST, KEY)
    store.put_bytes(key, data.replace(b"bfloat16", b"bfloat17", 1))
    with pytest.raises(SignatureError, match=f"{store.root / key}"):
        manifests.read_manifest(store, DIRECTORY, None)
    store.put_bytes(key, data)
    with pytest.raises(SignatureError, match="not trusted"):
        manifests.read_manifest(store, DIRECTORY, ())


@pytest.mark.parametrize(
    "directory",
    [
        "vllm/org/tiny-é/v1-tp2-000000000000",
        f"vllm/org/other/v1-tp2-{MANIFEST.build_id}",
        f"vllm/org/tiny-é/v2-{MANIFEST.build_id}",
        f"elsewhere/v1-tp2-{MANIFEST.build_id}",
    ],
)
def test_a_manifest_of_another_build_is_refused(tmp_path: Path, directory: str) -> None:
    """An old build's manifest, put back in place of a new one's, has a valid signature."""
    store = LocalStore(tmp_path)
    store.put_bytes(layout.manifest_key(directory), manifests.encode(MANIFEST, KEY))
    with pytest.raises(ManifestError, match=f"belongs to {DIRECTORY}: it was moved or put back"):
        manifests.read_manifest(store, directory, None)


def test_a_one_shot_directory_has_the_name_its_user_gave(tmp_path: Path) -> None:
    """Its suffix names the folder, and no other folder."""
    store = LocalStore(tmp_path)
    for suffix in ("my-run", "adhoc"):
        store.put_bytes(f"vllm/org/tiny-é/{suffix}/manifest.json", hand_signed(suffix=suffix))
        found = manifests.read_manifest(store, f"vllm/org/tiny-é/{suffix}", None)
        assert found
        assert suffix == found.manifest.suffix
    store.put_bytes("vllm/org/tiny-é/my-run/manifest.json", hand_signed(suffix="adhoc"))
    with pytest.raises(ManifestError, match="was moved or put back"):
        manifests.read_manifest(store, "vllm/org/tiny-é/my-run", None)


SHARDS = [jsonio.dump_record(entry) for entry in MANIFEST.shards]
FILES = [jsonio.dump_record(entry) for entry in MANIFEST.files]


def with_path(path: str) -> list[object]:
    return [*FILES, {"path": path, "size": 1, "sha256": "f" * 64}]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"files": with_path("../../../.ssh/authorized_keys")}, r"files\.3\.path: .*'\.\.'"),
        ({"files": with_path("/etc/passwd")}, r"files\.3\.path: "),
        ({"files": with_path("a\\..\\b")}, r"files\.3\.path: "),
        ({"files": with_path(".tmp-hidden")}, r"files\.3\.path: "),
        ({"files": with_path("config.json")}, "'config.json' is listed twice"),
        ({"files": with_path("manifest.json")}, "cannot list itself"),
        ({"files": FILES[:2]}, "the shard model-rank-001.tensors is not among the files"),
        ({"files": [{**FILES[0], "sha256": "F" * 64}, *FILES[1:]]}, r"files\.0\.sha256"),
        ({"files": [{**FILES[0], "size": -1}, *FILES[1:]]}, r"files\.0\.size"),
        ({"files": [{**FILES[0], "size": "1"}, *FILES[1:]]}, r"files\.0\.size"),
        ({"shards": SHARDS[:1]}, r"shards are of ranks \[0\]"),
        ({"shards": [SHARDS[0], SHARDS[0]]}, r"shards are of ranks \[0, 0\]"),
        ({"shards": SHARDS[::-1]}, r"shards are of ranks \[1, 0\]"),
        ({"tensor_parallel_size": 3}, r"tensor_parallel_size 3 has ranks 0 to 2"),
        ({"tensor_parallel_size": 10**30}, "tensor_parallel_size"),
        (
            {"shards": [SHARDS[0], {**SHARDS[1], "file": "model-rank-000.tensors"}]},
            "the shard of rank 1 is model-rank-000.tensors, not model-rank-001.tensors",
        ),
        (
            {"shards": [{**SHARDS[0], "tensors": [SHARDS[0]["tensors"][0]] * 2}, SHARDS[1]]},  # pyright: ignore
            "tensor 'lm_head.weight' is listed twice",
        ),
        ({"build_id": "0" * 12}, "build_id is 000000000000, but its inputs give"),
        ({"model": "org/other"}, "model and commit differ"),
        ({"model": "../other"}, "model: "),
        ({"suffix": "a/b"}, "suffix: "),
        ({"format": 2}, "format: Input should be 1"),
        ({"created_at": "2025-01-01"}, "created_at: Extra inputs"),
        ({"stock_vllm": {"loadable": False, "reasons": []}}, "needs reasons"),
        ({"versions": {"vllm": "0.31.0"}}, "versions of python, tensorize_assets, tensorizer, to"),
        ({"tied": [{"names": ["one"], "stored_once": True}]}, r"tied\.0\.names"),
    ],
)  # fmt: skip
def test_a_validly_signed_manifest_is_still_checked(
    fields: dict[str, object], message: str
) -> None:
    """A trusted key may be stolen, or its owner's tools wrong: readers follow no such path."""
    with pytest.raises(ManifestError, match=message) as caught:
        manifests.decode(hand_signed(**fields), {KEY.public_key}, "root/manifest.json")
    assert "root/manifest.json is not a valid Manifest" in str(caught.value)


def test_an_evidence_cannot_be_put_in_a_manifests_place() -> None:
    """One key may sign both; the type is part of what it signs."""
    data = signing.sign("evidence", jsonio.dump_record(MANIFEST), KEY)
    with pytest.raises(SignatureError, match="a document of another type"):
        manifests.decode(data, {KEY.public_key})


def test_a_manifest_has_no_timestamp_and_no_secret() -> None:
    """Two builds of the same inputs write the same bytes."""
    document = json.loads(manifests.encode(MANIFEST, KEY))
    unsaid = {"adapters", "encryption", "tensor_format"}
    assert {*Manifest.model_fields, "signature"} - unsaid == document.keys()
    with pytest.raises(ValidationError):
        MANIFEST.model = "other"  # pyright: ignore[reportAttributeAccessIssue]
