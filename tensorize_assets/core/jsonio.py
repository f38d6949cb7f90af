"""Canonical JSON: one byte string for one value, so that it can be hashed and signed.

Keys sorted by code point, no blanks, UTF-8 unescaped, Python's shortest float digits, no NaN or
Infinity, one newline at the end. (Close to RFC 8785, which orders keys and writes floats as
JavaScript does.)
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Any, NoReturn, TypeVar, cast, get_args, get_origin

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    JsonValue,
    StringConstraints,
    ValidationError,
)
from pydantic_core import CoreSchema

from tensorize_assets.core import layout
from tensorize_assets.core.errors import StoreError, TensorizeAssetsError
from tensorize_assets.core.printable import printable, quoted

MAX_BYTES = 14 * 1024 * 1024
"""The largest document, in bytes: a damaged or hostile store must not fill the memory."""

# Read, a document takes up to 50 times its bytes: it is refused by what it would hold, so that 256
# MiB are enough for any. A manifest has 12 values for each tensor of each rank.
_MAX_VALUES = 640 * 1024
# Of a name that no other object has, Python keeps 150 bytes more than of one that they share.
_MAX_NAMES = 64 * 1024
# Less is held against a record in one go, which finds all that is wrong: pydantic keeps a copy of
# what each of its findings is about.
_FEW_VALUES = 10_000
_FEW_BYTES = 1024 * 1024

_MAX_PROBLEMS = 8

# Each string is consumed, a name or not, whole or not: what is searched is passed once.
_STRING = re.compile(rb'"(?:[^"\\]|\\.?)*+(?:"(\s*+:)?)?', re.DOTALL)


def _fail_fast(schema: Any) -> None:
    """Have every list and dictionary of a record's own fields end at what is wrong first."""
    if isinstance(schema, dict):
        own = cast("dict[str, Any]", schema)
        if own.get("type") in ("tuple", "list", "dict"):
            own["fail_fast"] = True
        for part in own.values():
            _fail_fast(part)
    elif isinstance(schema, list | tuple):
        for part in cast("list[Any]", schema):
            _fail_fast(part)


class Record(BaseModel):
    """What every stored or exchanged record is: frozen, and without fields nobody knows.

    Of a list in it, the first thing that is wrong is found, not thousands.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema


R = TypeVar("R", bound=Record)


def _by(check: Callable[[str], str]) -> AfterValidator:
    """Return `check` of `layout` as pydantic wants it: it adds the place of a ValueError only."""

    def checked(value: str) -> str:
        try:
            return check(value)
        except StoreError as error:
            raise ValueError(str(error)) from None

    return AfterValidator(checked)


def _in_utc(when: datetime) -> datetime:
    try:
        return when.astimezone(UTC)
    except OverflowError:
        raise ValueError("in UTC it is before the year 1, or after 9999") from None


Instant = Annotated[AwareDatetime, AfterValidator(_in_utc)]
"""A time, which is kept in UTC."""
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Commit = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
BuildId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{12}$")]
# Random, and not a hash of the key: it could not be inverted, but would let anyone test whether a
# key that leaked, or that a bad generator may have made, is this one.
KeyId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
ModelId = Annotated[str, _by(layout.check_model)]
Suffix = Annotated[str, _by(layout.check_suffix)]
PathPart = Annotated[str, _by(layout.check_part)]
RelativePath = Annotated[str, _by(layout.check_key)]


def canonical(
    value: Mapping[str, JsonValue],
    where: str = "document",
    error: type[TensorizeAssetsError] = StoreError,
) -> bytes:
    """Return the canonical bytes of a JSON object.

    Raises `error`, naming `where` and the field, for what JSON does not have.
    """
    try:
        text = json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
        return text.encode() + b"\n"
    except RecursionError as cause:
        raise error(f"{where} cannot be written as JSON: it is nested too deeply") from cause
    except (ValueError, TypeError) as cause:
        field = _find_unwritable(cast("JsonValue", value), "") or "one of its fields"
        raise error(
            f"{where} cannot be written as JSON: {field} is NaN, infinite, not Unicode or no JSON "
            "value; record it as null or as text"
        ) from cause


def parse(
    data: bytes, where: str, error: type[TensorizeAssetsError] = StoreError
) -> dict[str, JsonValue]:
    """Return the JSON object in `data`.

    Raises `error`, naming `where`, for more than any document holds, bytes that are not UTF-8,
    anything but one JSON object, a key given twice (readers differ in which one they believe), and
    numbers that are not finite.
    """
    require_bounded(data, where, error)
    try:
        value = loads(data.decode("utf-8"))
    except ValueError as cause:
        raise error(
            f"{where} is not a valid JSON document ({cause}); restore it or build it again"
        ) from cause
    if not isinstance(value, dict):
        raise error(f"{where} is not a JSON object; restore it or build it again")
    return cast("dict[str, JsonValue]", value)


def require_bounded(
    data: bytes, where: str, error: type[TensorizeAssetsError] = StoreError
) -> None:
    """Raise `error`, naming `where`, for a document that nobody reads: it holds too much."""
    if len(data) > MAX_BYTES:
        raise error(f"{where} has {len(data)} bytes; documents end at {MAX_BYTES} bytes")
    if _values(data) > _MAX_VALUES:
        raise error(f"{where} holds more than {_MAX_VALUES} values, where documents end")
    if data.count(b":") > _MAX_NAMES:
        names: set[bytes] = set()
        for found in _STRING.finditer(data):
            if found[1] is None:
                continue
            names.add(found[0])
            if len(names) > _MAX_NAMES:
                raise error(f"{where} holds more than {_MAX_NAMES} names, where documents end")


def _values(data: bytes) -> int:
    """At least the number of JSON values in `data`: each has one of these before it."""
    return 1 + sum(map(data.count, (b",", b"[", b"{")))


def loads(text: str) -> object:
    """Return the JSON value in `text`. Raises ValueError, also for what `parse` refuses in it."""
    try:
        return json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
        )
    except RecursionError as cause:
        raise ValueError(str(cause)) from cause


def load_record(
    record: type[R], data: bytes, where: str, error: type[TensorizeAssetsError] = StoreError
) -> R:
    """Return the record in `data`; no value is converted to fit.

    Raises `error`, naming `where` and every field that is wrong; of a large one, some.
    """
    found = parse(data, where, error)
    problems = ""
    if len(data) > _FEW_BYTES or _values(data) > _FEW_VALUES:
        problems = "; ".join(islice(_other_fields(record, found, ""), _MAX_PROBLEMS))
    del found
    if not problems:
        try:
            return record.model_validate_json(data, strict=True)
        except ValidationError as cause:
            problems = describe(cause)
    raise error(f"{where} is not a valid {record.__name__}: {problems}")


def _other_fields(kind: Any, value: object, path: str) -> Iterator[str]:
    """Find what records in `value`, whose type is `kind`, lack or have too much.

    Each of these pydantic would report with a copy of all the record.
    """
    if isinstance(kind, type) and issubclass(kind, Record):
        if not isinstance(value, dict):
            return
        own = cast("dict[str, object]", value)
        fields = kind.model_fields
        for name, field in fields.items():
            if name in own:
                yield from _other_fields(field.annotation, own[name], f"{path}{name}.")
            elif field.is_required():
                yield f"{path}{name}: Field required"
        yield from (
            f"{path}{printable(name[:80])}: Extra inputs are not permitted"
            for name in own
            if name not in fields
        )
        return
    parts: Iterable[tuple[object, object]] = ()
    if get_origin(kind) not in (tuple, list, dict):
        # One of several types.
        for inner in get_args(kind):
            yield from _other_fields(inner, value, path)
    elif isinstance(value, list):
        parts = enumerate(cast("list[object]", value))
    elif isinstance(value, dict):
        parts = cast("dict[str, object]", value).items()
    for name, part in parts:
        for inner in get_args(kind):
            yield from _other_fields(inner, part, f"{path}{printable(str(name)[:80])}.")


def dump_record(record: Record) -> dict[str, JsonValue]:
    """Return the record as JSON values."""
    return cast("dict[str, JsonValue]", record.model_dump(mode="json"))


def describe(error: ValidationError) -> str:
    """Return pydantic's findings on one line: which field, and what is wrong with it."""
    findings = [
        f"{printable('.'.join(str(part)[:80] for part in finding['loc'])) or 'as a whole'}: "
        f"{finding['msg'].removeprefix('Value error, ')}"
        for finding in error.errors(include_url=False, include_context=False, include_input=False)
    ]
    more = len(findings) - _MAX_PROBLEMS
    return "; ".join(findings[:_MAX_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        # `add` returns None: the first key that was there already.
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {quoted(twice)} is given twice")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite_float(digits: str) -> float:
    # Python reads 1e999 as infinity, which no JSON can hold again.
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:40]} is too large")
    return value


def _find_unwritable(value: JsonValue, path: str) -> str | None:
    if isinstance(value, dict):
        parts = [(f"{path}.{key}".removeprefix("."), part) for key, part in value.items()]
    elif isinstance(value, list):
        parts = [(f"{path}[{index}]", part) for index, part in enumerate(value)]
    else:
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, TypeError):
            return path
        return None
    return next((found for name, part in parts if (found := _find_unwritable(part, name))), None)
