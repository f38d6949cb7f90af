"""config.json of a model, and other JSON of its repo: somebody else's, and read with care."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

from huggingface_hub import try_to_load_from_cache
from pydantic import JsonValue

from tensorize_assets.core.errors import HubError

# Each value of a JSON text has a comma or a bracket before it; as an object it takes 100 bytes.
_JSON_MAX_VALUES = 2_000_000


def read_config(path: Path) -> dict[str, JsonValue]:
    """Return config.json as a dictionary; `path` is the file or the snapshot folder.

    Raises HubError when there is none or it is not a JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    return read_json(file)


def cached_config(cache_dir: Path, model: str, revision: str) -> dict[str, JsonValue] | None:
    """Return config.json of a revision that was downloaded before, or None; no network."""
    file = try_to_load_from_cache(model, "config.json", cache_dir=cache_dir, revision=revision)
    if not isinstance(file, str):
        return None
    try:
        return read_config(Path(file))
    except HubError:
        return None


def parse_config(data: bytes, where: str) -> dict[str, JsonValue]:
    """Return the JSON object in `data`.

    Raises HubError, naming `where`, when it is none, or fills the memory.
    """
    if sum(map(data.count, (b",", b"[", b"{"))) > _JSON_MAX_VALUES:
        raise HubError(
            f"{where} holds more than {_JSON_MAX_VALUES:,} values: it is broken or hostile; choose "
            "another repo or revision"
        )
    try:
        # Not jsonio: model configurations hold Infinity, and that is theirs to hold.
        value: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise HubError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise HubError(f"{where} is not a JSON object")
    return cast("dict[str, JsonValue]", value)


def read_json(file: Path) -> dict[str, JsonValue]:
    """Return the JSON object in a file.

    Raises:
        HubError: there is no such file, or it holds something else.
    """
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise HubError(
            f"{file} does not exist: the repo is not in the layout of transformers"
        ) from None
    return parse_config(data, str(file))
