"""Records and values of assets as JSON in the store. Nothing is pickled, and nothing unpickled."""

import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import dagster as dg
from pydantic import BaseModel, JsonValue, TypeAdapter, ValidationError
from upath import UPath

from tensorize_assets.assets.target import BUILD_TAG, retry_or_failure
from tensorize_assets.core import jsonio, layout
from tensorize_assets.core.catalog import from_partition_key
from tensorize_assets.core.errors import BuildMismatchError, StoreError, TensorizeAssetsError
from tensorize_assets.core.records import RECORDS, BuildRecord
from tensorize_assets.core.store import Store
from tensorize_assets.partitions import MODEL, SUFFIX
from tensorize_assets.resources.store import StoreResource

IOContext = dg.InputContext | dg.OutputContext


class MissingValueError(StoreError, FileNotFoundError):
    """Nothing was stored for this partition; `allow_missing_partitions` lets Dagster go on."""


class JsonIOManager(dg.UPathIOManager):
    """Writes each asset's record or JSON value where `layout` says, whole or not at all.

    Records of tensorize_assets' own assets, under any key prefix, go to `records/`; what other
    assets return (pydantic models and JSON values) goes to `values/`.
    """

    extension = ".json"

    def __init__(self, store: Store, root: str) -> None:
        self._store = store
        self._root = UPath(root)
        super().__init__(base_path=self._root)

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        with _failures(context):
            super().handle_output(context, obj)

    def load_input(self, context: dg.InputContext) -> Any:
        with _failures(context):
            return super().load_input(context)

    def _get_path(self, context: IOContext) -> UPath:
        parts = context.asset_key.path if context.has_asset_key else context.get_identifier()
        return self._root / layout.value_key(parts, ())

    def _get_paths_for_partitions(self, context: IOContext) -> dict[str, UPath]:
        return {
            key: self._root / _partition_key(context, key) for key in context.asset_partition_keys
        }

    def _get_multipartition_backcompat_paths(self, context: IOContext) -> dict[str, UPath]:
        """None: nothing was ever stored by the joined key of an old Dagster."""
        return {}

    def _handle_transition_to_partitioned_asset(
        self, context: dg.OutputContext, path: UPath
    ) -> None:
        """Delete nothing: the stock method removes what stood at the unpartitioned path."""

    def make_directory(self, path: UPath) -> None:
        """The store makes folders itself, each durable before its content."""

    def path_exists(self, path: UPath) -> bool:
        return self._store.stat(self._key(path)) is not None

    def unlink(self, path: UPath) -> None:
        self._store.delete(self._key(path))

    def dump_to_path(self, context: dg.OutputContext, obj: Any, path: UPath) -> None:
        key = self._key(path)
        uri = self._store.uri(key)
        record = RECORDS.get(context.asset_key.path[-1]) if context.has_asset_key else None
        if (
            record
            and context.has_asset_partitions
            and _pair(context.asset_partition_key)
            and (not isinstance(obj, record))
        ):
            raise StoreError(
                f"{uri} keeps a {record.__name__} of tensorize_assets, not {type(obj).__name__}: "
                "give the asset another name, or another io_manager_key"
            )
        self._store.put_bytes(key, _encoded(obj, uri))

    def load_from_path(self, context: dg.InputContext, path: UPath) -> Any:
        key = self._key(path)
        uri = self._store.uri(key)
        stored = self._store.get_bytes(key)
        if stored is None:
            raise MissingValueError(
                f"{uri} does not exist: materialize the asset "
                f"{context.asset_key.to_user_string()} for this partition first"
            )
        expected = context.dagster_type.typing_type
        value = _decoded(stored.data, expected, uri)
        if isinstance(value, BuildRecord):
            _require_this_build(context, value, uri)
        return value

    def _key(self, path: UPath) -> str:
        return path.relative_to(self._root).as_posix()


def _partition_key(context: IOContext, partition: str) -> str:
    asset = context.asset_key.path
    pair = _pair(partition)
    if pair and asset[-1] in RECORDS:
        return layout.record_key(asset[-1], from_partition_key(pair[MODEL]), pair[SUFFIX])
    dimensions: dict[str, str] | None = getattr(partition, "keys_by_dimension", None)
    parts = [partition] if dimensions is None else [dimensions[name] for name in sorted(dimensions)]
    return layout.value_key(asset, parts)


def _pair(partition: str) -> dict[str, str] | None:
    """The model and suffix of one of our partitions."""
    dimensions: dict[str, str] | None = getattr(partition, "keys_by_dimension", None)
    return dimensions if dimensions and set(dimensions) == {MODEL, SUFFIX} else None


def _encoded(value: Any, uri: str) -> bytes:
    if isinstance(value, jsonio.Record):
        return jsonio.canonical(jsonio.dump_record(value), uri)
    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    advice = "return a pydantic model or JSON values, or give the asset another io_manager_key"
    try:
        data = json.dumps(plain, allow_nan=False, ensure_ascii=False, sort_keys=True).encode()
        same = json.loads(data) == plain
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(
            f"{uri} keeps JSON, and {type(value).__name__} is none ({error}); {advice}"
        ) from None
    if not same:
        raise StoreError(
            f"{uri} keeps JSON, and what would be read back is not this {type(value).__name__} "
            f"(keys that are no text, or tuples); {advice}"
        )
    if len(data) > jsonio.MAX_BYTES:
        raise StoreError(
            f"{uri} keeps up to {jsonio.MAX_BYTES:,} bytes, and this value has {len(data):,}; put "
            "it into a file of its own and return where it is"
        )
    return data


def _decoded(data: bytes, expected: Any, uri: str) -> Any:
    if isinstance(expected, type) and issubclass(expected, jsonio.Record):
        return jsonio.load_record(expected, data, uri)
    try:
        if isinstance(expected, type) and issubclass(expected, BaseModel):
            return expected.model_validate_json(data)
        return TypeAdapter[Any](JsonValue).validate_json(data)
    except ValidationError as error:
        raise StoreError(f"{uri} is not what is read of it: {jsonio.describe(error)}") from None


def _require_this_build(context: dg.InputContext, record: BuildRecord, uri: str) -> None:
    """A run of one build reads no record of another, whichever project its assets are of."""
    try:
        step = context.step_context
    except dg.DagsterInvariantViolationError:
        return  # read outside of a run
    run = step.instance.get_run_by_id(step.run_id)
    build = run.tags.get(BUILD_TAG) if run else None
    if build is not None and build != record.build_id:
        raise BuildMismatchError(
            f"{uri} is of build {record.build_id} of {record.model} {record.suffix}, and this run "
            f"is of build {build}; another run has replaced it. Materialize this partition from "
            "hf_snapshot on"
        )


@contextmanager
def _failures(context: IOContext) -> Generator[None]:
    """As `target.failures`: the store may be in trouble here too."""
    try:
        yield
    except TensorizeAssetsError as error:
        raise retry_or_failure(error, _attempt(context)) from error


def _attempt(context: IOContext) -> int:
    try:
        return context.step_context.previous_attempt_count
    except dg.DagsterInvariantViolationError:
        return sys.maxsize  # outside of a run nothing is tried again


class ManifestIOManager(dg.ConfigurableIOManagerFactory[JsonIOManager]):
    """The IO manager of tensorize_assets' records, for local and S3 roots, at the catalog's root.

    Fits `Definitions(resources={"io_manager": …})` of any project: other assets may return
    pydantic models and JSON values.
    """

    store: dg.ResourceDependency[StoreResource]

    def create_io_manager(self, context: dg.InitResourceContext) -> JsonIOManager:
        root = self.store.root()
        return JsonIOManager(self.store.open(root), root)
