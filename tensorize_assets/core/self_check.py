"""What `tensorize reload` finds before vLLM loads: files, ranks, and what vouches for them.

The directory may be anybody's, vLLM's own script's for instance, which writes no manifest.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from tensorize_assets.core import hub, layout
from tensorize_assets.core.copy import copy_file
from tensorize_assets.core.errors import CatalogError, ManifestError, StoreError
from tensorize_assets.core.http_folder import HttpFolder
from tensorize_assets.core.hub_access import HubAccess
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.manifest import Manifest, SignedManifest, read_unplaced
from tensorize_assets.core.served import small_files
from tensorize_assets.core.store import CHUNK_BYTES, Store, digest

# What vLLM takes for a template of ranks' files.
_TEMPLATE = re.compile(r"(.*)%0(\d)d(.*)")
# Over HTTP nothing is listed: a hole of fewer ranks than this is seen as one.
_GAP = 4

_CONFIG = "config.json"
# What vLLM reads beside the weights; over HTTP, where nothing is listed, these are asked for.
_SMALL_FILES = (
    _CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "preprocessor_config.json",
)
_SMALL_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".spm", ".bpe")
_WEIGHTS = (".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json")


Directory = Store | HttpFolder
"""An artifact directory: the root of a store of its own, or at a URL, where nothing is listed."""


class Found(NamedTuple):
    """Tensor files of one model: `name` is a file, or a template of ranks' files.

    `manifest` is that of the directory, if it is of these files.
    """

    name: str
    tensor_parallel_size: int
    manifest: SignedManifest | None


def find(
    reader: Directory, name: str | None, size: int | None, trusted: Collection[str] | None
) -> Found:
    """Look at the directory that is the root of `reader`: for a file, a template, or its own names.

    `size` is the tensor_parallel_size that was asked for. A manifest's signature is verified, and
    the size of every file that it names.

    Raises:
        CatalogError: there are other ranks than were asked for.
        StoreError: a rank, or the whole model, is missing.
        ManifestError, SignatureError: as `manifest.read_unplaced`; or a file is not the manifest's.
    """
    signed = read_unplaced(reader, "", trusted)
    if signed is not None:
        manifest = signed.manifest
        own = layout.tensorizer_uri_name(manifest.tensor_parallel_size)
        if name in (None, own):
            _require_size(reader, manifest.tensor_parallel_size, size)
            _require_files(reader, manifest)
            return Found(own, manifest.tensor_parallel_size, signed)
    if name is None:
        single = layout.tensorizer_uri_name(1)
        alone = reader.stat(single) is not None and size in (None, 1)
        name = single if alone else layout.tensorizer_uri_name(2)
    template = _TEMPLATE.fullmatch(name)
    if template is None:
        _require_size(reader, 1, size)
        if reader.stat(name) is None:
            raise StoreError(f"{reader.uri(name)} does not exist; correct the name")
        return Found(name, 1, None)
    ranks = _ranks(reader, template)
    if not ranks:
        raise StoreError(
            f"{reader.uri('')} holds neither {layout.tensorizer_uri_name(1)} nor "
            f"{_rank(template, 0)}; correct the place"
        )
    count = max(max(ranks) + 1, size or 0)
    # Not a list of them: a name may have any number.
    if missing := count - len(ranks):
        lacking = (rank for rank in range(count) if rank not in ranks)
        names = ", ".join(_rank(template, rank) for rank in islice(lacking, 5))
        raise StoreError(
            f"{reader.uri('')} lacks {names}: of {count} ranks, {missing} are missing, and "
            "the model cannot be loaded without; restore them, or write all of them again"
        )
    _require_size(reader, count, size)
    return Found(name, count, None)


def gather(reader: Directory, manifest: Manifest | None, folder: Path) -> Path | None:
    """Return a local folder with config and tokenizer; None where the directory has no config.

    It is the directory itself, where that is on this disk, and else `folder`, filled. With a
    manifest each file has its hash.

    Raises ManifestError for one that has not, and StoreError.
    """
    local = None if isinstance(reader, HttpFolder) else reader.local_path(_CONFIG)
    if manifest is not None:
        for file in small_files(manifest):
            if local is None:
                copy_file(reader, file.path, LocalStore(folder), file.path, file)
            elif digest(reader, file.path) != (file.size, file.sha256):
                raise ManifestError(
                    f"{reader.uri(file.path)} is not what the manifest says; `tensorize verify` "
                    "names every such file"
                )
        return local.parent if local else folder
    if reader.stat(_CONFIG) is None:
        return None
    if local is not None:
        return local.parent
    for name in _small_names(reader):
        with reader.open_read(name) as source, (folder / name).open("wb") as target:
            while chunk := source.read(CHUNK_BYTES):
                target.write(chunk)
    return folder


def from_hub(access: HubAccess, model: str, revision: str) -> Path:
    """Return the folder of a Hub repo's config and tokenizer. Raises as `hub.resolve`."""
    listing = hub.resolve(access, model, revision)
    small = tuple(file for file in listing.files if not file.path.endswith(_WEIGHTS))
    return hub.download(access, model, listing.model_copy(update={"files": small}))[1]


def _small_names(reader: Directory) -> list[str]:
    if isinstance(reader, HttpFolder):
        return [name for name in _SMALL_FILES if reader.stat(name) is not None]
    return [key for key in reader.list("") if "/" not in key and key.endswith(_SMALL_SUFFIXES)]


def _ranks(reader: Directory, template: re.Match[str]) -> set[int]:
    if isinstance(reader, HttpFolder):
        found: set[int] = set()
        rank = 0
        while rank - max(found, default=-1) <= _GAP:
            if reader.stat(_rank(template, rank)) is not None:
                found.add(rank)
            rank += 1
        return found
    before, width, after = template.groups()
    name = re.compile(rf"{re.escape(before)}(\d{{{width},}}){re.escape(after)}")
    keys = reader.list("")
    return {int(match[1]) for key in keys if (match := name.fullmatch(key))}


def _rank(template: re.Match[str], rank: int) -> str:
    before, width, after = template.groups()
    return f"{before}{rank:0{width}d}{after}"


def _require_size(reader: Directory, found: int, asked: int | None) -> None:
    if asked not in (None, found):
        raise CatalogError(
            f"{reader.uri('')} holds tensor_parallel_size {found}, and {asked} was asked for; "
            "leave --tensor-parallel-size out"
        )


def _require_files(reader: Directory, manifest: Manifest) -> None:
    wrong: list[str] = []
    for file in manifest.files:
        size = reader.stat(file.path)
        if size != file.size:
            has = "is missing" if size is None else f"has {size:,} bytes"
            wrong.append(f"{file.path} {has} (the manifest says {file.size:,})")
    if wrong:
        raise ManifestError(
            f"{reader.uri('')} is not what its manifest says: {'; '.join(wrong[:5])}; restore it"
        )
