"""The files of a repo: what the Hub declares of them, and which of them a model is loaded from."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any, Literal

from huggingface_hub.hf_api import RepoSibling
from pydantic import Field, ValidationError

from tensorize_assets.core import jsonio, layout
from tensorize_assets.core.errors import HubError, StoreError
from tensorize_assets.core.hub_access import HubAccess, endpoint_of, not_a_hub
from tensorize_assets.core.jsonio import Commit, Record, RelativePath, Sha256
from tensorize_assets.core.printable import printable

WeightsFormat = Literal["safetensors", "bin"]

INDEXES: dict[WeightsFormat, str] = {
    "safetensors": "model.safetensors.index.json",
    "bin": "pytorch_model.bin.index.json",
}

# What vLLM reads of a model beside its weights. Python code is left out: it would run.
_TEXT_SUFFIXES = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".md", ".spm", ".vocab", ".bpe")
# Mistral numbers its tokenizers: tokenizer.model.v3.
_TEXT_PREFIXES = ("tokenizer.model.",)
_TEXT_NAMES = ("LICENSE", "LICENCE", "NOTICE", "README", "USE_POLICY")
# Tokenizers end at about 40 MB; a "text" larger than this is a data set.
_TEXT_MAX_BYTES = 256 * 1024 * 1024
# The largest models come as a thousand files. Each is a request or two, of a few thousand that the
# Hub allows in five minutes.
_MAX_FILES = 4096
# Files that are parsed as a whole, wherever they are read. Lists of modules make the largest real
# ones a megabyte; an index has 100 bytes a tensor.
_CONFIG_ENDING = "config.json"
_CONFIG_MAX_BYTES = 16 * 1024 * 1024
_INDEX_MAX_BYTES = 64 * 1024 * 1024
_OTHER_FORMAT_FOLDERS = ("original", "onnx", "openvino", "coreml", "metal", "gguf")
_OTHER_FORMAT_PREFIXES = ("consolidated.", "flax_model", "tf_model")
_WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".onnx",
    ".gguf",
)


class HubFile(Record):
    """One file as the Hub declares it. `size` in bytes; LFS files have `lfs_sha256`."""

    path: RelativePath
    size: int = Field(ge=0)
    lfs_sha256: Sha256 | None
    git_blob_id: Commit

    @property
    def blob(self) -> str:
        """The name of its content in the cache, which is the Hub's ETag."""
        return self.lfs_sha256 or self.git_blob_id


class RevisionListing(Record):
    """What a revision was when it was resolved: its commit, and the files chosen of it."""

    model: str
    revision: str
    commit: Commit
    files: tuple[HubFile, ...]
    weights_format: WeightsFormat

    @property
    def size(self) -> int:
        """Bytes of all chosen files."""
        return sum(file.size for file in self.files)


class SnapshotFile(Record):
    """One checked file. `size` in bytes."""

    path: RelativePath
    size: int = Field(ge=0)
    sha256: Sha256


class Snapshot(Record):
    """The files of one commit, each with the hash of what is on the disk; sorted by path."""

    model: str
    revision: str
    commit: Commit
    files: tuple[SnapshotFile, ...]
    weights_format: WeightsFormat


def declared(access: HubAccess, model: str, sibling: RepoSibling) -> HubFile:
    """Return a file as the Hub declares it, unchecked but for its name.

    Raises:
        HubError: the name leads out of the folder, or is none.
    """
    path: Any = sibling.rfilename
    if not isinstance(path, str):
        raise not_a_hub(access, TypeError(f"a file is named {path!r}"))
    if path.startswith("/") or ".." in path.replace("\\", "/").split("/"):
        raise HubError(
            f"{model} on {endpoint_of(access)} lists the file {path!r}, which would be written "
            "outside its folder: this repo is broken or hostile, do not use it"
        )
    lfs = sibling.lfs
    size: object = lfs.size if lfs else sibling.size
    # Built without checks: names and sizes of files that are not chosen do not matter.
    return HubFile.model_construct(
        path=path,
        size=size if isinstance(size, int) else None,
        lfs_sha256=lfs.sha256 if lfs else None,
        git_blob_id=sibling.blob_id,
    )


def choose(
    access: HubAccess, model: str, revision: str, files: Sequence[HubFile]
) -> tuple[tuple[HubFile, ...], WeightsFormat]:
    """Return the files that a model is loaded from, sorted by path, and the format of its weights.

    Raises:
        HubError: there are no weights, or a chosen file is declared in a way that cannot be used.
    """
    top_level = [file for file in files if "/" not in file.path and not _other_format(file.path)]
    safetensors = [file for file in top_level if file.path.endswith(".safetensors")]
    bins = [
        file
        for file in top_level
        if file.path.startswith("pytorch_model") and file.path.endswith(".bin")
    ]
    weights_format: WeightsFormat = "safetensors" if safetensors else "bin"
    weights = safetensors or bins
    if not weights:
        others = [file.path for file in files if file.path.endswith(_WEIGHT_SUFFIXES)]
        found = f"only {printable(', '.join(others[:5]))}" if others else "no weights at all"
        raise HubError(
            f"{model}@{revision} on {endpoint_of(access)} has no weights to load: safetensors or "
            f"pytorch_model*.bin at its top level are needed, it has {found}; "
            "convert the model or choose another repo or revision"
        )
    texts = [file for file in files if _is_text(file) and not _other_index(file, weights_format)]
    texts = _without_twins(texts)
    if len(weights) + len(texts) > _MAX_FILES:
        # Results of evaluations, for instance: nothing below the top level is vLLM's to read.
        texts = [file for file in texts if "/" not in file.path]
    chosen = sorted([*weights, *texts], key=lambda file: file.path)
    return tuple(_checked(access, model, file) for file in chosen), weights_format


def choose_adapter(
    access: HubAccess, model: str, revision: str, files: Sequence[HubFile]
) -> tuple[tuple[HubFile, ...], WeightsFormat]:
    """As `choose`, of a LoRA adapter of PEFT: its configuration and its weights.

    Raises:
        HubError: it is no adapter, or one of the two is declared in a way that cannot be used.
    """
    by_path = {file.path: file for file in files}
    config = by_path.get(layout.ADAPTER_CONFIG)
    # As vLLM prefers them.
    formats: tuple[WeightsFormat, ...] = ("safetensors", "bin")
    for weights_format in formats:
        weights = by_path.get(f"adapter_model.{weights_format}")
        if config is not None and weights is not None:
            chosen = (config, weights)
            return tuple(_checked(access, model, file) for file in chosen), weights_format
    near = [path for path in by_path if path.rpartition("/")[2].startswith("adapter_")]
    found = f"only {printable(', '.join(sorted(near)[:5]))}" if near else "neither"
    raise HubError(
        f"{model}@{revision} on {endpoint_of(access)} is no LoRA adapter of PEFT: it needs "
        "adapter_config.json and adapter_model.safetensors or .bin at its top level, and has "
        f"{found}; choose another repo or revision"
    )


def check_names(access: HubAccess, model: str, revision: str, files: Sequence[HubFile]) -> None:
    """Refuse what could not lie in one folder on every disk, and what is no model's by number."""
    where = f"{model}@{revision} on {endpoint_of(access)}"
    if len(files) > _MAX_FILES:
        raise HubError(
            f"{where} has {len(files):,} files to load, from {files[0].path} to {files[-1].path}, "
            f"and models have {_MAX_FILES:,} at most: choose another repo or revision"
        )
    seen: dict[str, str] = {}
    for file in files:
        folded = _folded(file.path)
        if folded in seen:
            raise _same_place(where, seen[folded], file.path)
        seen[folded] = file.path
    for file in files:
        for folder in PurePosixPath(_folded(file.path)).parents:
            if str(folder) in seen:
                raise _same_place(where, seen[str(folder)], file.path)


def _checked(access: HubAccess, model: str, file: HubFile) -> HubFile:
    try:
        layout.check_key(file.path)
        checked = HubFile.model_validate(dict(file))
    except (StoreError, ValidationError) as error:
        said = jsonio.describe(error) if isinstance(error, ValidationError) else str(error)
        raise HubError(
            f"{model} on {endpoint_of(access)} declares {file.path!r} in a way that cannot be "
            f"used: {said}; choose another repo or revision"
        ) from None
    most = _most_bytes(checked.path)
    if most is not None and checked.size > most:
        raise HubError(
            f"{checked.path} of {model} on {endpoint_of(access)} has {checked.size:,} bytes, and "
            f"files of that name end at {most:,}: it is broken or hostile; choose another repo or "
            "revision"
        )
    return checked


def _most_bytes(path: str) -> int | None:
    if path in INDEXES.values():
        return _INDEX_MAX_BYTES
    return _CONFIG_MAX_BYTES if path.endswith(_CONFIG_ENDING) and "/" not in path else None


def _without_twins(texts: Sequence[HubFile]) -> list[HubFile]:
    """Leave out prose that some disks would take for other prose: nobody parses it."""
    kept: list[HubFile] = []
    seen: set[str] = set()
    for file in sorted(texts, key=lambda file: file.path):
        prose = file.path.endswith(".md") or PurePosixPath(file.path).name in _TEXT_NAMES
        if not prose or _folded(file.path) not in seen:
            kept.append(file)
            seen.add(_folded(file.path))
    return kept


def _folded(path: str) -> str:
    return unicodedata.normalize("NFC", path.casefold())


def _same_place(where: str, first: str, second: str) -> HubError:
    return HubError(
        f"{where} lists {first!r} and {second!r}, and one would take the other's place, at least "
        "on disks that do not tell large letters from small: choose another repo or revision"
    )


def _is_text(file: HubFile) -> bool:
    name = file.path.rsplit("/", 1)[-1]
    return (
        (name.endswith(_TEXT_SUFFIXES) or name.startswith(_TEXT_PREFIXES) or name in _TEXT_NAMES)
        and not _other_format(file.path)
        and ((file.size or 0) <= _TEXT_MAX_BYTES or _most_bytes(file.path) is not None)
    )


def _other_format(path: str) -> bool:
    *folders, name = path.split("/")
    return name.startswith(_OTHER_FORMAT_PREFIXES) or any(
        folder in _OTHER_FORMAT_FOLDERS or folder.startswith("checkpoint-") for folder in folders
    )


def _other_index(file: HubFile, weights_format: WeightsFormat) -> bool:
    return any(file.path == index for kind, index in INDEXES.items() if kind != weights_format)
