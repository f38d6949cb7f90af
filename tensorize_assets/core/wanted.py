"""What a build of a profile would be made of now, and what the published one was made of."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from tensorize_assets.core.build import BuildInputs
from tensorize_assets.core.catalog import Profile, byte_fields
from tensorize_assets.core.channel import read_channel
from tensorize_assets.core.manifest import read_manifest
from tensorize_assets.core.store import Reader


class Published(NamedTuple):
    """A channel's current build; `inputs` is None when its manifest is gone."""

    build_id: str
    inputs: BuildInputs | None


def inputs(
    model: str,
    profile: Profile,
    commit: str,
    adapters: Mapping[str, str],
    versions: Mapping[str, str],
) -> BuildInputs:
    """The inputs of a plaintext build of these commits, `adapters` by their names.

    `versions` of vllm, torch and tensorizer, as `SubprocessLauncher.versions` gives them.
    """
    return BuildInputs(
        model=model,
        commit=commit,
        adapters=tuple(adapters.items()),
        profile=byte_fields(profile),
        vllm=versions["vllm"],
        torch=versions["torch"],
        tensorizer=versions["tensorizer"],
    )


def published(
    store: Reader,
    model: str,
    suffix: str,
    trusted: Collection[str] | None,
    seen: Path | None = None,
) -> Published | None:
    """The channel's current build, its inputs without a data key; None when nothing is published.

    So they compare with `inputs`, also where the published build is an encrypted one.

    Raises as `read_channel` and `read_manifest` do.
    """
    found = read_channel(store, model, suffix, trusted, seen)
    if found is None:
        return None
    current = found.channel.current
    stored = read_manifest(store, current.directory, trusted)
    made_of = stored and stored.manifest.inputs.model_copy(update={"data_key": None})
    return Published(current.build_id, made_of)
