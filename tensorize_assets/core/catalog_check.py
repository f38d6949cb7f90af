"""Finds every mistake in a catalog file at once, each with its line and field.

The file is composed into YAML nodes, which know their lines, read into plain values by
`_read_node`, and validated by the models in catalog.py; errors find their lines back by path.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from tensorize_assets.core.catalog import (
    Catalog,
    ModelEntry,
    Profile,
    did_you_mean,
    tensor_parallel_problem,
)
from tensorize_assets.core.catalog_automation import CRON_WANTED
from tensorize_assets.core.layout import NO_STAGES
from tensorize_assets.core.rank_resources import RankResources
from tensorize_assets.core.s3 import S3Settings

# Thousands of models; a larger file would hold up whatever loads the catalog.
MAX_FILE_BYTES = 2 * 1024 * 1024
# Aliases let a small file stand for a huge one ("billion laughs").
MAX_VALUES = 250_000
MAX_DEPTH = 20
# Python reads base-60 numbers in quadratic time, and refuses decimal ones of 4,300 digits.
MAX_NUMBER_LENGTH = 100

KnownConfig = Callable[[str, str], Mapping[str, Any] | None]

_Path = tuple[str | int, ...]

_YAML = "tag:yaml.org,2002:"
_TEXT_TAGS = (f"{_YAML}str", f"{_YAML}value")
_PLAIN_TAGS = {
    f"{_YAML}bool": "a boolean",
    f"{_YAML}int": "a number",
    f"{_YAML}float": "a number",
    f"{_YAML}null": "no value",
}
_SHAPE = "a catalog is a mapping with the keys root and models"
# 32 bytes as text, and private keys: what may be a secret is in no message.
_SECRET = re.compile(
    r"X25519-PRIVATE-KEY:\S*|(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{43}=|(?<!\w)[0-9A-Fa-f]{64}(?!\w)",
    re.IGNORECASE,
)
_UNREADABLE_SCALAR = (ValueError, KeyError, IndexError, OverflowError)


class Problem(BaseModel):
    """One mistake in a catalog file. `str()` gives `FILE:LINE: FIELD: MESSAGE`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str = Field(description="The catalog file, as it was named.")
    line: int = Field(description="Line in the file, from 1; 0 when the file could not be read.")
    field: str = Field(description="Path of the field, joined by dots; empty for the whole file.")
    message: str = Field(description="What is wrong and what to do.")

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return ": ".join(part for part in (place, self.field, self.message) if part)


class _Spot(NamedTuple):
    line: int
    column: int
    node: Node


class _Mistake(NamedTuple):
    line: int
    column: int
    message: str
    path: _Path


@dataclass
class _Tree:
    """The value at a path of the file, and where its parts stand.

    The whole file is one tree; the second of two equal keys starts another, so that the
    mistakes below it are found too.
    """

    path: _Path
    value: JsonValue = None
    spots: dict[_Path, _Spot] = field(default_factory=dict[_Path, _Spot])
    # Already reported; what pydantic says about the gap there would be noise.
    unreadable: set[_Path] = field(default_factory=set[_Path])


@dataclass
class _Reading:
    mistakes: list[_Mistake] = field(default_factory=list[_Mistake])
    trees: list[_Tree] = field(default_factory=list[_Tree])
    values: int = 0


class _UnreadableError(Exception):
    """Ends the reading of a file; carries the line."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


def check_catalog(path: Path | str, known_config: KnownConfig | None = None) -> tuple[Problem, ...]:
    """Every mistake in a catalog file, in the file's order; empty when there is none.

    `known_config(model, revision)` gives a model's config.json when it is at hand, else None;
    with it, each tensor_parallel_size is held against the model's attention heads. Raises nothing
    of its own: a file that is missing or no YAML is a Problem too.
    """
    return read_catalog(path, known_config)[1]


def read_catalog(
    path: Path | str, known_config: KnownConfig | None = None
) -> tuple[Catalog | None, tuple[Problem, ...]]:
    """The catalog and no problems, or None and every problem: see `check_catalog`."""
    file = str(path)
    try:
        root = _compose(_text(Path(path)))
    except _UnreadableError as error:
        return None, (_problem(file, error.line, (), str(error)),)
    return read_node(file, root, known_config)


def read_node(
    file: str, root: Node, known_config: KnownConfig | None = None
) -> tuple[Catalog | None, tuple[Problem, ...]]:
    """As `read_catalog`, of a mapping in a larger YAML file, such as a component's attributes."""
    try:
        reading = _Reading()
        tree = _Tree((), spots={(): _Spot(_line(root), root.start_mark.column + 1, root)})
        reading.trees.append(tree)
        tree.value = _read_node(reading, tree, root, (), ())
    except _UnreadableError as error:
        return None, (_problem(file, error.line, (), str(error)),)

    catalog = None
    for tree in reading.trees:
        catalog = _validate(reading, tree) or catalog
        _check_names(reading, tree)
        if known_config:
            _check_tensor_parallel(reading, tree, known_config)
    _check_recipients(reading)
    if not reading.mistakes:
        return catalog, ()
    # The same mistake in a mapping that is merged into several is made, and mended, once.
    unique = {mistake[:3]: mistake for mistake in sorted(reading.mistakes, reverse=True, key=_key)}
    problems = tuple(
        _problem(file, m.line, m.path, m.message) for m in sorted(unique.values(), key=_key)
    )
    return None, problems


def _problem(file: str, line: int, path: _Path, message: str) -> Problem:
    field = ".".join(map(_shown, path))
    return Problem(file=file, line=line, field=field, message=_SECRET.sub("(not shown)", message))


def _key(mistake: _Mistake) -> tuple[int, int, tuple[str, ...], str]:
    return mistake.line, mistake.column, tuple(map(str, mistake.path)), mistake.message


def _text(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise _UnreadableError(
            0,
            "no such file; run in the folder that holds dagster_home, set DAGSTER_HOME or "
            "TENSORIZE_CATALOG, or create the catalog",
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "a path cannot contain NUL"
        raise _UnreadableError(0, f"cannot be read: {reason}") from None
    if len(content) > MAX_FILE_BYTES:
        raise _UnreadableError(
            0, f"larger than {MAX_FILE_BYTES // 1024} KiB; a catalog is a short, hand-made file"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise _UnreadableError(
            line, f"not UTF-8 (byte 0x{error.object[error.start]:02x}); save the file as UTF-8"
        ) from None


def _compose(text: str) -> Node:
    loader = None
    try:
        root = _composed_in_c(text)
        if root is None:
            # Ten times as slow, and better at saying what is wrong and where.
            loader = yaml.SafeLoader(text)
            root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        raise _not_yaml(error) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, int(error.position)) + 1
        raise _UnreadableError(line, f"not YAML: {error.reason}; remove the character") from None
    except (ValueError, OverflowError, IndexError, RecursionError) as error:
        # PyYAML recurses into brackets, and trusts escapes such as "\UFFFFFFFF".
        deep = isinstance(error, RecursionError)
        what = f"nested deeper than {MAX_DEPTH} levels" if deep else "an escape names no character"
        line = loader.line + 1 if loader else 1
        raise _UnreadableError(line, f"not YAML: {what}; {_SHAPE}") from None
    if root is None or (isinstance(root, ScalarNode) and root.tag == f"{_YAML}null"):
        raise _UnreadableError(1, f"empty; {_SHAPE}")
    if not isinstance(root, MappingNode):
        raise _UnreadableError(_line(root), f"holds {_got(root)}; {_SHAPE}")
    return root


def _composed_in_c(text: str) -> Node | None:
    """What libyaml makes of it; None where PyYAML has none, or it is not YAML to it."""
    if not yaml.__with_libyaml__:
        return None
    try:
        return cast("Node | None", yaml.CSafeLoader(text).get_single_node())  # pyright: ignore
    except (yaml.YAMLError, ValueError, OverflowError, IndexError, RecursionError):
        return None


def _not_yaml(error: yaml.MarkedYAMLError) -> _UnreadableError:
    what = error.problem or "cannot be parsed"
    hint = "; indent with spaces" if "'\\t'" in what else ""
    mark, start = error.problem_mark, error.context_mark
    line = mark.line + 1 if mark else 1
    # What is wrong often shows only lines later, where something else was expected.
    since = f" ({error.context} from line {start.line + 1})" if start and error.context else ""
    return _UnreadableError(line, f"not YAML: {what}{since}{hint}")


def _line(node: Node) -> int:
    return node.start_mark.line + 1


def _read_node(
    reading: _Reading, tree: _Tree, node: Node, path: _Path, above: tuple[int, ...]
) -> JsonValue:
    reading.values += 1
    if reading.values > MAX_VALUES:
        raise _UnreadableError(
            _line(node), f"more than {MAX_VALUES} values, aliases counted; use fewer aliases"
        )
    if id(node) in above:
        return _refuse(reading, tree, node, path, "an alias refers to what it stands in; remove it")
    if len(above) >= MAX_DEPTH:
        raise _UnreadableError(_line(node), f"nested deeper than {MAX_DEPTH} levels; {_SHAPE}")
    if isinstance(node, MappingNode) and node.tag == f"{_YAML}map":
        return _read_mapping(reading, tree, node, path, (*above, id(node)))
    if isinstance(node, SequenceNode) and node.tag == f"{_YAML}seq":
        items: list[JsonValue] = []
        for index, item in enumerate(node.value):
            here = (*path, index)
            tree.spots[here] = _Spot(_line(item), item.start_mark.column + 1, item)
            items.append(_read_node(reading, tree, item, here, (*above, id(node))))
        return items
    if isinstance(node, ScalarNode) and (node.tag in _TEXT_TAGS or node.tag in _PLAIN_TAGS):
        return _read_scalar(reading, tree, node, path)
    if node.tag == f"{_YAML}timestamp":
        return _refuse(reading, tree, node, path, _quote_it(node, "a date"))
    if node.tag == f"{_YAML}merge":
        return _refuse(reading, tree, node, path, 'write "<<" in quotes if it is meant as text')
    return _refuse(reading, tree, node, path, _refused_tag(node))


def _refused_tag(node: Node) -> str:
    tag = node.tag.replace(_YAML, "!!")
    return f"the tag {_shown(tag)} is not allowed: a catalog holds plain values; remove the tag"


def _read_scalar(reading: _Reading, tree: _Tree, node: ScalarNode, path: _Path) -> JsonValue:
    if node.tag in _TEXT_TAGS:
        return node.value
    try:
        if len(node.value) > MAX_NUMBER_LENGTH:
            raise ValueError
        return cast("JsonValue", yaml.constructor.SafeConstructor().construct_object(node))  # pyright: ignore[reportUnknownMemberType]
    except _UNREADABLE_SCALAR:
        message = f"{_shown(node.value)} cannot be read as {_PLAIN_TAGS[node.tag]}"
        return _refuse(reading, tree, node, path, message)


def _read_mapping(
    reading: _Reading, tree: _Tree, node: MappingNode, path: _Path, above: tuple[int, ...]
) -> dict[str, JsonValue]:
    value: dict[str, JsonValue] = {}
    merges: list[Node] = []
    for key_node, value_node in node.value:
        if key_node.tag == f"{_YAML}merge":
            if merges:
                message = "<< stands here twice; write one: <<: [*first, *second]"
                _report(reading, key_node, (*path, "<<"), message)
            merges.append(value_node)
            continue
        key = _read_key(reading, key_node, path)
        if key is None:
            continue
        here = (*path, key)
        spot = _Spot(_line(key_node), key_node.start_mark.column + 1, value_node)
        if key not in value:
            tree.spots[here] = spot
            value[key] = _read_node(reading, tree, value_node, here, above)
            continue
        first = tree.spots[here].line
        message = f"this {_kind(here)} stands here twice, first on line {first}; remove one"
        _report(reading, key_node, here, message)
        other = _Tree(here, spots={here: spot})
        reading.trees.append(other)
        other.value = _read_node(reading, other, value_node, here, above)
    for merge in merges:
        _merge(reading, tree, merge, path, above, value)
    return value


def _merge(
    reading: _Reading,
    tree: _Tree,
    merge: Node,
    path: _Path,
    above: tuple[int, ...],
    value: dict[str, JsonValue],
) -> None:
    """Adds what `<<` brings to `value`; keys that are there win, and earlier mappings."""
    for source in merge.value if isinstance(merge, SequenceNode) else [merge]:
        if not isinstance(source, MappingNode):
            message = f"merges {_got(source)}; name a mapping: <<: *anchor"
            _report(reading, source, (*path, "<<"), message)
            continue
        inner = _Tree(path)
        merged = _read_node(reading, inner, source, path, above)
        if not isinstance(merged, dict):
            tree.unreadable |= inner.unreadable
            continue
        new = merged.keys() - value.keys()
        value.update((key, item) for key, item in merged.items() if key in new)
        depth = len(path)
        tree.spots.update(kv for kv in inner.spots.items() if kv[0][depth] in new)
        tree.unreadable |= {p for p in inner.unreadable if p == path or p[depth] in new}


def _read_key(reading: _Reading, node: Node, path: _Path) -> str | None:
    if not isinstance(node, ScalarNode):
        _report(reading, node, path, f"a key must be text, not {_got(node)}")
        return None
    if node.tag in _TEXT_TAGS and node.value:
        return node.value
    if node.tag in _TEXT_TAGS or node.value == "":
        _report(reading, node, path, "a key is empty; write a name before the colon")
        return None
    if node.tag in _PLAIN_TAGS or node.tag == f"{_YAML}timestamp":
        kind = _PLAIN_TAGS.get(node.tag, "a date")
        _report(reading, node, (*path, node.value), _quote_it(node, kind))
        return node.value
    _report(reading, node, (*path, node.value), _refused_tag(node))
    return node.value


def _report(reading: _Reading, node: Node, path: _Path, message: str) -> None:
    mistake = _Mistake(_line(node), node.start_mark.column + 1, message, path)
    reading.mistakes.append(mistake)


def _refuse(reading: _Reading, tree: _Tree, node: Node, path: _Path, message: str) -> None:
    _report(reading, node, path, message)
    tree.unreadable.add(path)


def _kind(path: _Path) -> str:
    match path:
        case ("models", _):
            return "model"
        case ("models", _, "profiles", _):
            return "suffix"
        case _:
            return "key"


def _nest(tree: _Tree) -> JsonValue:
    """The tree's value inside the mappings that lead to it."""
    return functools.reduce(_under, reversed(tree.path), tree.value)


def _under(value: JsonValue, key: str | int) -> JsonValue:
    return {str(key): value}


def _spot(tree: _Tree, path: _Path) -> _Spot | None:
    """Where the deepest known part of a path stands."""
    for end in range(len(path), -1, -1):
        if spot := tree.spots.get(path[:end]):
            return spot
    return None


def _add(reading: _Reading, tree: _Tree, path: _Path, message: str) -> None:
    spot = _spot(tree, path)
    line, column = (spot.line, spot.column) if spot else (1, 1)
    reading.mistakes.append(_Mistake(line, column, message, path))


def _validate(reading: _Reading, tree: _Tree) -> Catalog | None:
    try:
        return Catalog.model_validate(_nest(tree))
    except ValidationError as invalid:
        errors = invalid.errors(include_url=False)
    depth = len(tree.path)
    for error in errors:
        path: _Path = error["loc"]
        if error["type"] == "value_error" and path[-1] == "[key]":
            path = path[:-1]
        if path[:depth] != tree.path or any(
            path[:end] in tree.unreadable for end in range(len(path) + 1)
        ):
            continue
        spot = tree.spots.get(path)
        if error["type"] == "too_short" and spot and spot.node.value:
            # Pydantic counts only the valid items, and the others have their own errors.
            continue
        _add(reading, tree, path, _explain(tree, path, error["type"], error))
    return None


def _explain(tree: _Tree, path: _Path, kind: str, error: Mapping[str, Any]) -> str:
    """Pydantic's error in the words of somebody who edits YAML."""
    spot = tree.spots.get(path)
    node = spot.node if spot else None
    limits: Mapping[str, Any] = error.get("ctx", {})
    match kind:
        case "missing":
            return _missing(path)
        case "extra_forbidden":
            return _unknown_key(path)
        case "literal_error":
            return _not_one_of(path, node)
        case "string_type" if path[:1] == ("automation",) and path[-1] in ("cron", "retensorize"):
            return (
                f"wants {CRON_WANTED}, not {_got(node)}; a schedule is switched off in the UI "
                "(Automation), not here"
            )
        case "string_type":
            return _not_text(node)
        case "bool_type" | "bool_parsing":
            return f"wants true or false, not {_got(node)}"
        case "int_type" | "float_type":
            return _not_number(node, "a whole number" if kind == "int_type" else "a number")
        case "dict_type" | "model_type":
            return f"wants a mapping (lines of {_lines(path)}), not {_got(node)}"
        case "tuple_type":
            return f"wants a list (lines of {_items(path)}), not {_got(node)}"
        case "string_too_short":
            return "is empty; write a value, or remove the key"
        case "string_too_long":
            return f"is longer than {limits['max_length']} characters"
        case "too_short":
            return "is empty; write at least one, or remove the key"
        case "greater_than" | "greater_than_equal" | "less_than_equal":
            bound = next(iter(limits.values()))
            words = {"greater_than": "more than", "greater_than_equal": "at least"}
            return f"must be {words.get(kind, 'at most')} {bound:g}, not {_got(node)}"
        case "finite_number":
            return f"must be a finite number, not {_got(node)}"
        case "value_error":
            return str(limits["error"])
        case "string_pattern_mismatch":
            return f"is not such a value: {_owner(path).model_fields[str(path[-1])].description}"
        case _:
            return str(error["msg"])


def _lines(path: _Path) -> str:
    match path:
        case ("recipients",):
            return "name: public key"
        case (*_, "adapters", _):
            return "name: and repo:"
        case _:
            return "key: value"


def _items(path: _Path) -> str:
    match path:
        case (*_, "adapters"):
            return "- name: and below it repo:"
        case ("trust",):
            return "- public key"
        case _:
            return "- text"


def _missing(path: _Path) -> str:
    match path:
        case (*_, "adapters", _, "name"):
            return "is missing: write name: and what the adapter is to be called when it is served"
        case (*_, "adapters", _, "repo"):
            return "is missing: write repo: and the adapter's Hub repo, org/name"
        case (*_, "reload_device"):
            return (
                "is missing: write reload_device: cuda or reload_device: cpu (no default, because "
                "it decides what proof the build gets)"
            )
        case ("root",):
            return "is missing: write root: artifacts, or another folder"
        case ("models",):
            return "is missing: write models: and under it a line org/name: for each model"
        case (*_, "profiles"):
            return "is missing: write profiles: and under it a line v1: for each suffix"
        case _:
            return f"is missing: write {path[-1]}: and its value"


def _unknown_key(path: _Path) -> str:
    key = str(path[-1])
    owner = _owner(path)
    known = owner.model_fields
    if owner is S3Settings and re.search(r"key|secret|token|password|credential", key):
        return (
            "credentials never stand in a catalog: set S3_ACCESS_KEY_ID and S3_SECRET_ACCESS_KEY, "
            "or name a `profile`; remove this line, and change the key if the file was shared"
        )
    if owner is RankResources and "gpu" in key:
        return "GPUs are not asked for here: a rank that computes on one gets one; remove this line"
    if owner is ModelEntry and key in Profile.model_fields:
        return "belongs to a profile: write it under profiles: and a suffix such as v1:"
    if owner is Catalog and "/" in key:
        return "is a model: write it under models:"
    if owner is Profile and key.startswith("pipeline_parallel"):
        return f"{NO_STAGES}; remove this line"
    return f"unknown key{did_you_mean(key, known)} (keys here: {', '.join(known)})"


def _owner(path: _Path) -> type[BaseModel]:
    """The model that the last part of `path` is a field of."""
    here: Any = Catalog
    for part in path[:-1]:
        if isinstance(here, type) and issubclass(here, BaseModel):
            field = here.model_fields.get(str(part))
            here = _one(field.annotation) if field else None
        else:
            # What a mapping's keys stand for, or the elements of a list.
            parts: tuple[Any, ...] = get_args(here)
            here = _one(parts[1] if get_origin(here) is dict else parts[0]) if parts else None
    return here if isinstance(here, type) and issubclass(here, BaseModel) else Profile


def _one(annotation: Any) -> Any:
    """The type of a field that may be None, or has more rules than its type."""
    parts: tuple[Any, ...] = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _one(parts[0])
    if type(None) in parts:
        return _one(next(part for part in parts if part is not type(None)))
    return annotation


def _not_one_of(path: _Path, node: Node | None) -> str:
    annotation = _owner(path).model_fields[str(path[-1])].annotation
    parts: tuple[Any, ...] = get_args(annotation)
    # Optional ones are a union of the literal and None.
    options: tuple[str, ...] = get_args(parts[0]) or parts
    near = ""
    if isinstance(node, ScalarNode) and node.tag in _TEXT_TAGS:
        # Nearest by its letters would be cpu.
        meant = "cuda" if node.value.lower() == "gpu" else node.value
        near = did_you_mean(meant, options)
    return f"must be one of {', '.join(options)}, not {_got(node)}{near}"


def _not_text(node: Node | None) -> str:
    if isinstance(node, ScalarNode) and node.value and node.tag in _PLAIN_TAGS:
        return _quote_it(node, _PLAIN_TAGS[node.tag])
    return f"wants text, not {_got(node)}"


def _not_number(node: Node | None, wanted: str) -> str:
    hint = ""
    if isinstance(node, ScalarNode) and node.tag in _TEXT_TAGS:
        try:
            number = float(node.value)
        except ValueError:
            pass
        else:
            hint = f"; write {number:g}" + (" without quotes" if node.style else "")
    return f"wants {wanted}, not {_got(node)}{hint}"


def _got(node: Node | None) -> str:
    """What stands there, shortened, for the end of a sentence."""
    if isinstance(node, MappingNode):
        return "a mapping"
    if isinstance(node, SequenceNode):
        return "a list"
    if not isinstance(node, ScalarNode) or (node.tag not in _TEXT_TAGS and node.value == ""):
        return "nothing"
    if node.tag in _TEXT_TAGS:
        return f"the text {_cut(node.value)!r}" if node.value.isprintable() else "such a text"
    if node.tag == f"{_YAML}bool":
        return f"{_shown(node.value)} (YAML reads it as a boolean)"
    return _shown(node.value)


def _quote_it(node: Node, kind: str) -> str:
    text = _shown(node.value)
    return f'YAML reads {text} as {kind}; quote it: "{text}"'


def _shown(value: object) -> str:
    text = _cut(str(value))
    return text if text.isprintable() else ascii(text)


def _cut(text: str) -> str:
    # Before it is cut: half a secret is not known for one.
    text = _SECRET.sub("(not shown)", text)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _profiles(value: JsonValue) -> Iterator[tuple[str, str, dict[str, JsonValue]]]:
    models = value.get("models") if isinstance(value, dict) else None
    for model, entry in models.items() if isinstance(models, dict) else ():
        profiles = entry.get("profiles") if isinstance(entry, dict) else None
        for suffix, profile in profiles.items() if isinstance(profiles, dict) else ():
            if isinstance(profile, dict):
                yield model, suffix, profile


def _check_names(reading: _Reading, tree: _Tree) -> None:
    """Names that differ as text but not as partitions, or as folders where case does not count."""
    root = _nest(tree)
    models = root.get("models") if isinstance(root, dict) else None
    if not isinstance(models, dict):
        return
    _check_alike(reading, tree, ("models",), list(models))
    for model, entry in models.items():
        profiles = entry.get("profiles") if isinstance(entry, dict) else None
        if isinstance(profiles, dict):
            _check_alike(reading, tree, ("models", model, "profiles"), list(profiles))


def _check_alike(reading: _Reading, tree: _Tree, path: _Path, names: list[str]) -> None:
    first: dict[str, str] = {}
    for name in names:
        other = first.setdefault(name.replace("/", "--").casefold(), name)
        if other == name:
            continue
        what = _kind((*path, name))
        if what == "suffix":
            why = "their folders are the same on disks that ignore case"
        elif other.casefold() == name.casefold():
            why = "the Hub takes both for one model, and their folders may be the same"
        else:
            why = "both have the partition key " + _shown(name.replace("/", "--"))
        spot = _spot(tree, (*path, other))
        line = f" (line {spot.line})" if spot else ""
        message = f"too much like the {what} {_shown(other)}{line}: {why}; keep one"
        _add(reading, tree, (*path, name), message)


def _check_recipients(reading: _Reading) -> None:
    """Encrypted profiles of a catalog that names nobody who could open them."""
    tree = reading.trees[0]
    root = tree.value
    if not isinstance(root, dict) or root.get("recipients"):
        return
    for model, suffix, profile in _profiles(root):
        if profile.get("encryption") in ("both", "only"):
            message = (
                "nobody could open it: write recipients: at the top, and under it name: public "
                "key (`tensorize keys generate` makes a pair of keys)"
            )
            _add(reading, tree, ("models", model, "profiles", suffix, "encryption"), message)


def _check_tensor_parallel(reading: _Reading, tree: _Tree, known_config: KnownConfig) -> None:
    for model, suffix, profile in _profiles(_nest(tree)):
        size = profile.get("tensor_parallel_size")
        revision = profile.get("revision", "main")
        if type(size) is not int or size < 2 or not isinstance(revision, str):
            continue
        config = known_config(model, revision)
        problem = tensor_parallel_problem(size, config) if config else None
        if problem:
            path = ("models", model, "profiles", suffix, "tensor_parallel_size")
            _add(reading, tree, path, problem)
