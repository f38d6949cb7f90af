"""A LoRA adapter in a folder of this disk, taken into the Hub's cache as a repo that no Hub has.

From there on it is an adapter like any other: at a commit, which here is a hash of its files.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from tensorize_assets.core import hub_access, layout
from tensorize_assets.core.errors import HubError
from tensorize_assets.core.hub_access import HubAccess
from tensorize_assets.core.hub_files import HubFile, RevisionListing
from tensorize_assets.core.manifest import FileEntry
from tensorize_assets.core.store import Hasher, read_chunks

# No account of the Hub starts with an underscore.
_OWNER = "_local"
_NO_BLOB = "0" * 40


def take(access: HubAccess, folder: Path) -> tuple[str, str]:
    """Copy the adapter in `folder` into the cache; return its repo and its commit.

    Raises HubError where it is no adapter of PEFT.
    """
    names = [layout.ADAPTER_CONFIG, *_weights(folder)]
    if len(names) != 2 or not (folder / layout.ADAPTER_CONFIG).is_file():
        raise HubError(
            f"{folder} is no LoRA adapter of PEFT: it needs {layout.ADAPTER_CONFIG} and "
            "adapter_model.safetensors or .bin"
        )
    commit = commit_of(_entry(folder / name) for name in names)
    repo = f"{_OWNER}/{name_of(folder.resolve().name)}"
    target = hub_access.snapshot_dir(access, repo, commit)
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copyfile(folder / name, target / name)
    return repo, commit


def is_local(repo: str) -> bool:
    """Say whether `repo` is one that `take` made."""
    return repo.startswith(f"{_OWNER}/")


def resolve(access: HubAccess, repo: str, commit: str) -> RevisionListing:
    """As `hub.resolve_adapter`, of what `take` copied. Raises HubError where that is gone."""
    folder = hub_access.snapshot_dir(access, repo, commit)
    weights = _weights(folder)
    if not weights or not (folder / layout.ADAPTER_CONFIG).is_file():
        raise HubError(f"{folder} is gone from the cache; start `tensorize build --lora-path` anew")
    names = (layout.ADAPTER_CONFIG, *weights)
    return listing_of(repo, commit, [_entry(folder / name) for name in names])


def commit_of(files: Iterable[FileEntry]) -> str:
    """Return the commit that an adapter of these files is at."""
    whole = hashlib.sha1(usedforsecurity=False)
    # The config's name sorts before those of weights.
    for file in sorted(files, key=lambda file: file.path):
        whole.update(f"{file.path} {file.sha256}\n".encode())
    return whole.hexdigest()


def listing_of(repo: str, commit: str, files: Iterable[FileEntry]) -> RevisionListing:
    """Return an adapter's files as a Hub would declare them."""
    chosen = sorted(files, key=lambda file: file.path)
    return RevisionListing(
        model=repo,
        revision=commit,
        commit=commit,
        files=tuple(
            HubFile(path=file.path, size=file.size, lfs_sha256=file.sha256, git_blob_id=_NO_BLOB)
            for file in chosen
        ),
        weights_format="bin" if chosen[-1].path.endswith(".bin") else "safetensors",
    )


def name_of(text: str) -> str:
    """A name for an adapter, made of a folder's or a repo's."""
    name = re.sub(r"[^A-Za-z0-9_.-]|--+|\.\.+", "-", text)[:64].strip("-._")
    return name or "adapter"


def _weights(folder: Path) -> list[str]:
    """The one file of weights, as vLLM prefers them."""
    names = ("adapter_model.safetensors", "adapter_model.bin")
    return [name for name in names if (folder / name).is_file()][:1]


def _entry(path: Path) -> FileEntry:
    hasher = Hasher()
    for chunk in read_chunks(path):
        hasher.update(chunk)
    found = hasher.digest()
    return FileEntry(path=path.name, size=found.size, sha256=found.sha256)
