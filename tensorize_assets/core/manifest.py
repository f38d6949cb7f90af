"""The manifest: what an artifact directory holds, to the byte, signed.

It has no timestamp: the same build writes the same manifest, so a half-finished build can be
completed and compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from typing import Annotated, Literal, NamedTuple, cast

from pydantic import Field, JsonValue, field_validator, model_validator

from tensorize_assets.core import jsonio, layout, signing
from tensorize_assets.core.build import BuildInputs, build_id
from tensorize_assets.core.catalog import TensorFormat
from tensorize_assets.core.errors import ManifestError
from tensorize_assets.core.store import Reader

Size = Annotated[int, Field(ge=0)]

_VERSIONS = frozenset({"vllm", "torch", "tensorizer", "tensorize_assets", "python"})


class FileEntry(jsonio.Record):
    """One file: its path below the directory, its size in bytes, its SHA-256."""

    path: jsonio.RelativePath
    size: Size
    sha256: jsonio.Sha256


class TensorEntry(jsonio.Record):
    """One tensor as tensorizer stored it; `size` in bytes, `sha256` of its plain content."""

    name: str
    kind: Literal["parameter", "buffer"]
    dtype: str
    shape: tuple[Size, ...]
    size: Size
    sha256: jsonio.Sha256


class ShardEntry(jsonio.Record):
    """The tensors of one tensor-parallel rank, in the order of their file."""

    rank: Size
    file: jsonio.RelativePath
    tensors: tuple[TensorEntry, ...]

    @field_validator("tensors")
    @classmethod
    def _unique_names(cls, tensors: tuple[TensorEntry, ...]) -> tuple[TensorEntry, ...]:
        _refuse_repeats("tensor", (tensor.name for tensor in tensors))
        return tensors


class EncryptionEntry(jsonio.Record):
    """How every tensor file of the directory is encrypted: libsodium's secretbox, per 2 MiB.

    `plaintext` is the SHA-256 of the manifest of the plaintext build that the files were made of;
    None where there never was one.
    """

    key_id: jsonio.KeyId
    method: Literal["xsalsa20-poly1305"] = "xsalsa20-poly1305"
    plaintext: jsonio.Sha256 | None = None


class DtypeCount(jsonio.Record):
    """How many tensors, and how many bytes of them, have one dtype."""

    tensors: Size
    bytes: Size


class CastEntry(jsonio.Record):
    """A tensor that stock vLLM casts when it loads the shard; `lossy` when values change."""

    name: str
    from_dtype: str
    to_dtype: str
    lossy: bool
    rank: Size


class DtypeCensus(jsonio.Record):
    """The dtypes of all ranks' tensors, and what stock vLLM's cast to `model_dtype` changes."""

    by_dtype: dict[str, DtypeCount]
    model_dtype: str
    cast_by_stock: tuple[CastEntry, ...] = ()


class SnapshotEntry(jsonio.Record):
    """The Hub files a build was made from: the revision asked for, the commit it was."""

    revision: str
    commit: jsonio.Commit
    files: tuple[FileEntry, ...]
    weights_format: Literal["safetensors", "bin"]

    @field_validator("files")
    @classmethod
    def _ordered(cls, files: tuple[FileEntry, ...]) -> tuple[FileEntry, ...]:
        return _ordered(files)


class AdapterEntry(jsonio.Record):
    """A LoRA adapter: where it is from, and its tensors as they lie in `file`.

    `config` is its adapter_config.json; both are paths below the directory.
    """

    name: jsonio.PathPart
    repo: jsonio.ModelId
    snapshot: SnapshotEntry
    rank: Annotated[int, Field(ge=1)]
    file: jsonio.RelativePath
    config: jsonio.RelativePath
    tensors: tuple[TensorEntry, ...]

    @field_validator("tensors")
    @classmethod
    def _unique_names(cls, tensors: tuple[TensorEntry, ...]) -> tuple[TensorEntry, ...]:
        _refuse_repeats("tensor", (tensor.name for tensor in tensors))
        return tensors


class StockVllm(jsonio.Record):
    """Whether vLLM without our plugin can load the build, and if not, why.

    Where it can but slowly, `reasons` say how.
    """

    loadable: bool
    reasons: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _says_why(self) -> StockVllm:
        if not self.loadable and not self.reasons:
            raise ValueError("a build that stock vLLM cannot load needs reasons")
        return self


class TiedGroup(jsonio.Record):
    """Tensors that share their values, and whether these are stored once or for each name."""

    names: Annotated[tuple[str, ...], Field(min_length=2)]
    stored_once: bool


class Manifest(jsonio.Record):
    """Everything a reader must know to load a build, and to tell that it is unchanged.

    `files` are all files of the directory but the manifest itself; `profile` is the whole
    profile as it was; `dtype` is the one vLLM resolved, such as `bfloat16`; `versions` are whole,
    with local parts. `tensor_format` hf: `model.tensors` has the names of the repo's own weights,
    and vLLM loads it on its slow path.
    """

    format: Literal[1] = 1
    model: jsonio.ModelId
    suffix: jsonio.Suffix
    build_id: jsonio.BuildId
    inputs: BuildInputs
    snapshot: SnapshotEntry
    profile: dict[str, JsonValue]
    sharding: Literal["virtual", "executor"]
    tensor_parallel_size: Annotated[int, Field(ge=1)]
    dtype: str
    architecture: str
    dtype_census: DtypeCensus
    stock_vllm: StockVllm
    tied: tuple[TiedGroup, ...] = ()
    versions: dict[str, str]
    files: tuple[FileEntry, ...]
    shards: tuple[ShardEntry, ...]
    adapters: tuple[AdapterEntry, ...] = ()
    encryption: EncryptionEntry | None = None
    tensor_format: TensorFormat = "vllm"

    @property
    def tensor_files(self) -> tuple[str, ...]:
        """Paths of the files that hold tensors: shards, and the adapters'."""
        shards = (shard.file for shard in self.shards)
        return (*shards, *(adapter.file for adapter in self.adapters))

    @field_validator("files")
    @classmethod
    def _ordered(cls, files: tuple[FileEntry, ...]) -> tuple[FileEntry, ...]:
        if any(entry.path == layout.MANIFEST for entry in files):
            raise ValueError(f"{layout.MANIFEST} cannot list itself")
        return _ordered(files)

    @field_validator("versions")
    @classmethod
    def _complete(cls, versions: dict[str, str]) -> dict[str, str]:
        if missing := _VERSIONS - versions.keys():
            raise ValueError(f"the versions of {', '.join(sorted(missing))} are missing")
        return versions

    @model_validator(mode="after")
    def _names_its_build(self) -> Manifest:
        found = build_id(self.inputs)
        if self.inputs.profile.get("format", "vllm") != self.tensor_format:
            raise ValueError("the format of tensors differs between the inputs and the rest")
        if self.build_id != found:
            raise ValueError(f"build_id is {self.build_id}, but its inputs give {found}")
        if (self.inputs.model, self.inputs.commit) != (self.model, self.snapshot.commit):
            raise ValueError("model and commit differ between the inputs and the rest")
        adapters = tuple((adapter.name, adapter.snapshot.commit) for adapter in self.adapters)
        if tuple(sorted(adapters)) != self.inputs.adapters:
            raise ValueError("the adapters differ between the inputs and the rest")
        key_id = self.encryption.key_id if self.encryption else None
        if key_id != self.inputs.data_key:
            raise ValueError("the data key differs between the inputs and the rest")
        return self

    @model_validator(mode="after")
    def _has_every_shard(self) -> Manifest:
        ranks = [shard.rank for shard in self.shards]
        # Counted first: a hostile size must not be spelled out as a list.
        if len(ranks) != self.tensor_parallel_size or ranks != list(range(len(ranks))):
            raise ValueError(
                f"shards are of ranks {ranks}; tensor_parallel_size {self.tensor_parallel_size} "
                f"has ranks 0 to {self.tensor_parallel_size - 1}, each once and in order"
            )
        paths = {entry.path for entry in self.files}
        for shard in self.shards:
            name = layout.shard_name(shard.rank, self.tensor_parallel_size)
            if shard.file != name:
                raise ValueError(f"the shard of rank {shard.rank} is {shard.file}, not {name}")
            if name not in paths:
                raise ValueError(f"the shard {name} is not among the files")
        for adapter in self.adapters:
            for file, own in (
                (adapter.file, layout.ADAPTER_TENSORS),
                (adapter.config, layout.ADAPTER_CONFIG),
            ):
                place = layout.adapter_file(adapter.name, len(self.adapters), own)
                if file != place or file not in paths:
                    raise ValueError(f"adapter {adapter.name}: {place} is not among the files")
        return self


class StoredManifest(NamedTuple):
    """A manifest that was read, and the SHA-256 of its bytes, by which evidence names it."""

    manifest: Manifest
    sha256: str


class SignedManifest(NamedTuple):
    """A manifest that was read, the SHA-256 of its bytes, and the key that signed."""

    manifest: Manifest
    sha256: str
    key_id: str
    public_key: str


def encode(manifest: Manifest, key: signing.SecretKey) -> bytes:
    """Return the signed bytes of a manifest: the same for the same manifest and key."""
    payload = jsonio.dump_record(manifest)
    # Builds without one of these keep the bytes that they had in releases that did not know it.
    if manifest.tensor_format == "vllm":
        del payload["tensor_format"]
    if not manifest.adapters:
        del payload["adapters"]
    if manifest.encryption is None:
        del payload["encryption"]
        del cast("dict[str, JsonValue]", payload["inputs"])["data_key"]
    return signing.sign("manifest", payload, key)


def decode(data: bytes, trusted: Collection[str] | None, where: str = "the manifest") -> Manifest:
    """Return the manifest in `data`, signed by one of the `trusted` public keys (None: any).

    Raises SignatureError for a signature that is missing, wrong or not trusted, ManifestError for
    content that no build writes.
    """
    return _from_payload(signing.verify("manifest", data, trusted, where).payload, where)


def manifest_sha256(data: bytes) -> str:
    """Return the SHA-256 (hex) of a manifest's bytes."""
    return hashlib.sha256(data).hexdigest()


def read_manifest(
    store: Reader, directory: str, trusted: Collection[str] | None
) -> StoredManifest | None:
    """Return the manifest of an artifact directory of the store, or None when it has none.

    Raises SignatureError and ManifestError as `decode` does, naming the URI, and ManifestError
    for a manifest that was written for another directory.
    """
    found = read_placed(store, directory, trusted)
    return StoredManifest(found.manifest, found.sha256) if found else None


def read_placed(
    store: Reader, directory: str, trusted: Collection[str] | None
) -> SignedManifest | None:
    """As `read_manifest`, with the key that signed."""
    found = read_unplaced(store, directory, trusted)
    if found:
        uri = store.uri(layout.manifest_key(directory))
        _require_place(found.manifest, directory, uri)
    return found


def read_unplaced(
    store: Reader, directory: str, trusted: Collection[str] | None
) -> SignedManifest | None:
    """As `read_placed`, for a directory that was copied elsewhere and may have any name."""
    key = layout.manifest_key(directory)
    found = store.get_bytes(key)
    if found is None:
        return None
    verified = signing.verify("manifest", found.data, trusted, store.uri(key))
    manifest = _from_payload(verified.payload, store.uri(key))
    sha256 = manifest_sha256(found.data)
    return SignedManifest(manifest, sha256, verified.key_id, verified.public_key)


def _from_payload(payload: dict[str, JsonValue], where: str) -> Manifest:
    return jsonio.load_record(Manifest, jsonio.canonical(payload, where), where, ManifestError)


def places(manifest: Manifest) -> tuple[str, ...]:
    """Return the directories that a manifest may be of: a build's own, and a one-shot's.

    A one-shot that is encrypted as vLLM's script does it lies where a plaintext one would.
    """
    where_to = (manifest.model, manifest.suffix)
    oneshot = layout.oneshot_dir(*where_to)
    if manifest.encryption is None:
        return (layout.artifact_dir(*where_to, manifest.build_id), oneshot)
    return (
        layout.encrypted_dir(*where_to, manifest.build_id),
        layout.oneshot_encrypted_dir(*where_to),
        oneshot,
    )


def _require_place(manifest: Manifest, directory: str, where: str) -> None:
    """A valid manifest, put into another build's directory, must not speak for that build."""
    allowed = places(manifest)
    if directory not in allowed:
        raise ManifestError(
            f"{where} belongs to {allowed[0]}: it was moved or put back; restore this directory or "
            "build it again"
        )


def _ordered(files: tuple[FileEntry, ...]) -> tuple[FileEntry, ...]:
    _refuse_repeats("file", (entry.path for entry in files))
    # The order of a folder listing is not the build's: sorted, one build has one manifest.
    return tuple(sorted(files, key=lambda entry: entry.path))


def _refuse_repeats(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{what} {name!r} is listed twice")
        seen.add(name)
