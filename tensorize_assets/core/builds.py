"""Every channel and artifact directory of a root, from a few listings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

from tensorize_assets.core import layout
from tensorize_assets.core.channel import Channel, read_channel
from tensorize_assets.core.errors import TensorizeAssetsError
from tensorize_assets.core.store import ListedObject, Store

# What is read many at a time is small, and waits for the network.
_THREADS = 16

Pair = tuple[str, str]
"""A model and a suffix."""

_T = TypeVar("_T")
_Found = TypeVar("_Found")


class Directory(NamedTuple):
    """One artifact directory, as the listing shows it.

    `name` is None where it does not read as a build of a profile. `complete`: it has a manifest.
    """

    model: str
    directory: str
    name: layout.BuildName | None
    objects: tuple[ListedObject, ...]

    @property
    def complete(self) -> bool:
        manifest = layout.manifest_key(self.directory)
        return any(found.key == manifest for found in self.objects)

    @property
    def bytes(self) -> int:
        return sum(found.size for found in self.objects)

    @property
    def newest(self) -> float:
        """When the last of it was written, in seconds of the epoch by the store's clock."""
        return max(found.modified for found in self.objects)


class Inventory(NamedTuple):
    """What a root holds. `unread` says why a channel could not be read or is not believed.

    `strays` are objects below `vllm/` that belong to no model that is known.
    """

    channels: dict[Pair, Channel]
    unread: dict[Pair, str]
    directories: dict[str, Directory]
    strays: tuple[ListedObject, ...]


def take_inventory(
    store: Store,
    pairs: Iterable[Pair],
    trusted: Collection[str] | None,
    seen: Path | None = None,
) -> Inventory:
    """Return the channels and directories of every model that is known.

    Known are those of `pairs`, which are the catalog's, and those that a run of the chain left a
    record of: a path alone does not tell whether `a/b` is a model, or `b` a directory of model `a`.

    Raises StoreError where the root cannot be listed.
    """
    records = [
        pair
        for key in store.list(layout.BUILD_RECORDS_FOLDER)
        if (pair := layout.pair_of(key, layout.BUILD_RECORDS_FOLDER))
    ]
    wanted = list(dict.fromkeys(pairs))
    models = {model for model, _ in (*wanted, *records)}
    grouped: dict[str, list[ListedObject]] = {}
    owner: dict[str, str] = {}
    strays: list[ListedObject] = []
    found: list[Pair] = []
    for entry in store.listing(layout.ARTIFACTS_FOLDER):
        model = _model_of(entry.key, models)
        if model is None:
            strays.append(entry)
            continue
        folder = f"{layout.model_folder(model)}/"
        name, _, below = entry.key.removeprefix(folder).partition("/")
        if below:
            owner[f"{folder}{name}"] = model
            grouped.setdefault(f"{folder}{name}", []).append(entry)
        elif pair := layout.pair_of(entry.key, layout.ARTIFACTS_FOLDER):
            found.append(pair)
        else:
            strays.append(entry)
    directories = {
        directory: Directory(
            owner[directory], directory, layout.build_name(directory), tuple(objects)
        )
        for directory, objects in grouped.items()
    }
    # Those of the catalog that are gone too: one that was seen before and removed is no empty one.
    channels, unread = _channels(store, list(dict.fromkeys((*wanted, *found))), trusted, seen)
    return Inventory(channels, unread, directories, tuple(strays))


def in_parallel(call: Callable[[_T], _Found], over: Iterable[_T]) -> Iterator[_Found]:
    """Yield what `call` returns for each, in order; as `map`, many at a time."""
    with ThreadPoolExecutor(_THREADS) as pool:
        yield from pool.map(call, over)


def _model_of(key: str, models: set[str]) -> str | None:
    parts = key.split("/")
    # The longer one: a directory of `a` that is called as a model `a/b` is taken for that model's
    # folder, and nothing in it reads as a build.
    for length in (2, 1):
        model = "/".join(parts[1 : 1 + length])
        if len(parts) > 1 + length and model in models:
            return model
    return None


def _channels(
    store: Store, pairs: list[Pair], trusted: Collection[str] | None, seen: Path | None
) -> tuple[dict[Pair, Channel], dict[Pair, str]]:
    def read(pair: Pair) -> Channel | str | None:
        try:
            found = read_channel(store, *pair, trusted, seen)
        except TensorizeAssetsError as error:
            return str(error)
        return found and found.channel

    channels: dict[Pair, Channel] = {}
    unread: dict[Pair, str] = {}
    for pair, found in zip(pairs, in_parallel(read, pairs), strict=True):
        if isinstance(found, Channel):
            channels[pair] = found
        elif found is not None:
            unread[pair] = found
    return channels, unread
