"""A component's attributes as they are written: with their lines, and their templates filled in."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import dagster as dg
import yaml
from pydantic import BaseModel, ValidationError
from yaml.nodes import MappingNode, Node, SequenceNode

from tensorize_assets.core.catalog import Catalog, resolve_bundle, resolve_root
from tensorize_assets.core.catalog_check import read_node
from tensorize_assets.core.errors import CatalogError

_Model = TypeVar("_Model", bound=BaseModel)

_TEMPLATES = ("{{", "{%")


@dataclass(frozen=True)
class Written:
    """Keys with what stands under them, in a file."""

    file: Path
    line: int
    node: MappingNode

    def split(self, names: Collection[str]) -> tuple[Written, Written]:
        """The keys of these names, and the others."""
        ours = [pair for pair in self.node.value if pair[0].value in names]
        return self._of(ours), self._of([pair for pair in self.node.value if pair not in ours])

    def refuse(self, why: str) -> None:
        """Raise CatalogError with the line of every key, if there is any."""
        said = [f"{self.file}:{_line(key)}: {key.value}: {why}" for key, _ in self.node.value]
        if said:
            raise CatalogError("\n".join(said))

    def _of(self, pairs: list[Any]) -> Written:
        node = MappingNode(self.node.tag, pairs, self.node.start_mark, self.node.end_mark)
        return replace(self, node=node)


def as_written(context: dg.ResolutionContext, attributes: dict[str, Any]) -> Written:
    """The attributes in the file that they stand in, or else as Python gave them."""
    tree = context.source_position_tree
    if tree is None:
        root = dg.ComponentLoadContext.from_resolution_context(context).project_root
        (node,) = _nodes(yaml.safe_dump(attributes))
        return Written(root / "attributes", 1, _mapping(node))
    file, line = Path(tree.position.filename), tree.position.start.line
    for document in _nodes(file.read_text(encoding="utf-8")):
        if _line(document) != line:
            continue
        for key, value in _mapping(document).value:
            if key.value == "attributes" and isinstance(value, MappingNode):
                return Written(file, _line(key), value)
        # None, or an empty one.
        return Written(file, line, _mapping(document)).split(())[0]
    raise CatalogError(f"{file} was changed while it was read; load the project again")


def rendered(written: Written, context: dg.ResolutionContext) -> Written:
    """With every template filled in, where it stood. Raises CatalogError for one that gives none.

    Also Dagster's ResolutionException, for one that cannot be rendered.
    """

    def fill(node: Node) -> Node:
        if isinstance(node, MappingNode):
            value: Any = [(key, fill(below)) for key, below in node.value]
        elif isinstance(node, SequenceNode):
            value = [fill(item) for item in node.value]
        elif any(sign in node.value for sign in _TEMPLATES):
            return _moved(_filled(written.file, node, context), node)
        else:
            return node
        return type(node)(node.tag, value, node.start_mark, node.end_mark)

    return replace(written, node=_mapping(fill(written.node)))


def record_of(model: type[_Model], written: Written) -> _Model:
    """The pydantic record. Raises CatalogError with every mistake, one a line."""
    constructor: Any = yaml.constructor.SafeConstructor()
    plain = constructor.construct_document(written.node)
    try:
        return model.model_validate(plain)
    except ValidationError as invalid:
        lines = {key.value: _line(key) for key, _ in written.node.value}
        said: list[str] = []
        for error in invalid.errors(include_url=False):
            name = str(error["loc"][0])
            message = error["msg"]
            if error["type"] == "missing":
                message = f"is missing: {model.model_fields[name].description}"
            said.append(f"{written.file}:{lines.get(name, written.line)}: {name}: {message}")
        raise CatalogError("\n".join(said)) from None


def catalog_of(written: Written) -> Catalog:
    """The catalog; what is relative in it is relative to the file.

    Raises CatalogError with every mistake, one a line: `FILE:LINE: FIELD: what is wrong`.
    """
    file = written.file
    found, problems = read_node(str(file), written.node)
    if found is None:
        raise CatalogError("\n".join(map(str, problems)))
    return resolve_bundle(found, file).model_copy(update={"root": resolve_root(found, file)})


def _nodes(text: str) -> Iterator[Node]:
    """The documents of a YAML text."""
    loader = yaml.SafeLoader(text)
    while loader.check_node():
        node = loader.get_node()
        if node is not None:
            yield node


def _mapping(node: Node) -> MappingNode:
    assert isinstance(node, MappingNode)  # Dagster has read it before.
    return node


def _line(node: Node) -> int:
    return node.start_mark.line + 1


def _filled(file: Path, node: Node, context: dg.ResolutionContext) -> Node:
    value: object = context.resolve_value(node.value, as_type=object)  # pyright: ignore[reportUnknownMemberType]
    place = f"{file}:{_line(node)}: {node.value}"
    if value is None:
        raise CatalogError(
            f"{place} gives nothing; set the variable, or write a default: "
            "{{ env('NAME', 'default') }}"
        )
    try:
        (new,) = _nodes(yaml.safe_dump(value))
    except yaml.YAMLError:
        raise CatalogError(
            f"{place} gives a {type(value).__name__}, and plain values stand here"
        ) from None
    return new


def _moved(node: Node, to: Node) -> Node:
    """The node and all below it at the place of another."""
    value: Any = node.value
    if isinstance(node, MappingNode):
        value = [(_moved(key, to), _moved(below, to)) for key, below in value]
    elif isinstance(node, SequenceNode):
        value = [_moved(item, to) for item in value]
    return type(node)(node.tag, value, to.start_mark, to.end_mark)
