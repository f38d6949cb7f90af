"""The JSON schema of the component's attributes, for `dg check yaml` and for editors."""

from __future__ import annotations

from typing import Any, cast

from pydantic import BaseModel

from tensorize_assets.core.catalog import Catalog
from tensorize_assets.core.sealing import KEY_PATTERN

Schema = dict[str, Any]

# {{ env.ROOT }} and the like are rendered before anything is checked.
_TEMPLATE: Schema = {"type": "string", "pattern": r"\{[{%]"}
_NOTES = ("title", "description", "default")


def attributes_schema(beside: type[BaseModel]) -> Schema:
    """The schema of a catalog whose mapping has the fields of `beside` too.

    Either `catalog` is there, which names a file, or what every catalog must have. There are no
    references in it, since `dg` puts it into larger schemas.
    """
    catalog, ours = _whole(Catalog), _whole(beside)
    return {
        "type": "object",
        "properties": {**ours["properties"], **catalog["properties"]},
        "additionalProperties": False,
        "required": ours["required"],
        "if": {"required": ["catalog"]},
        "else": {"required": catalog["required"]},
    }


def _whole(model: type[BaseModel]) -> Schema:
    schema = model.model_json_schema()
    return _inlined(schema, schema.get("$defs", {}))


def _inlined(schema: Schema, definitions: Schema) -> Schema:
    """The schema with its references filled in, and a template allowed for every plain value."""

    def below(value: Any) -> Any:
        return _inlined(cast("Schema", value), definitions) if isinstance(value, dict) else value

    notes = {name: schema[name] for name in _NOTES if name in schema}
    rest = {name: value for name, value in schema.items() if name not in (*_NOTES, "$defs")}
    if "$ref" in rest:
        return below(definitions[rest["$ref"].rpartition("/")[2]]) | notes
    if "anyOf" in rest:
        # Always "or nothing". As anyOf, a message would show the whole value.
        some, nothing = rest["anyOf"]
        assert nothing == {"type": "null"}
        return notes | {"if": nothing, "else": below(some)}
    if rest.get("pattern") == KEY_PATTERN:
        # A message would show the value, which may be a secret key put there by mistake. The
        # catalog's own check does not.
        return notes | {"type": "string"}
    if rest.get("type") not in ("object", "array"):
        return notes | {"if": _TEMPLATE, "else": rest}
    for name in ("properties", "patternProperties"):
        if name in rest:
            rest[name] = {key: below(value) for key, value in rest[name].items()}
    for name in ("items", "additionalProperties"):
        if name in rest:
            rest[name] = below(rest[name])
    return notes | rest
