"""Asset records as JSON files in the store. Nothing is pickled, and nothing unpickled."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import dagster as dg
from upath import UPath

from tensorize_assets.assets.target import failure_of
from tensorize_assets.core import jsonio, layout
from tensorize_assets.core.catalog import from_partition_key
from tensorize_assets.core.errors import StoreError, TensorizeAssetsError
from tensorize_assets.core.store import open_store
from tensorize_assets.partitions import MODEL, SUFFIX
from tensorize_assets.resources.catalog import CatalogResource


class RecordIOManager(dg.UPathIOManager):
    """Writes each partition's record where `layout.record_key` says, whole or not at all."""

    extension = ".json"

    def __init__(self, root: str) -> None:
        self._store = open_store(root)
        self._root = UPath(root)
        super().__init__(base_path=self._root)

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        with _failures():
            super().handle_output(context, obj)

    def load_input(self, context: dg.InputContext) -> Any:
        with _failures():
            return super().load_input(context)

    def _get_path(self, context: dg.InputContext | dg.OutputContext) -> UPath:
        raise StoreError(
            f"{context.get_identifier()} has no partition; this IO manager keeps the records of "
            f"assets that are partitioned by {MODEL} and {SUFFIX}"
        )

    def _get_paths_for_partitions(
        self, context: dg.InputContext | dg.OutputContext
    ) -> dict[str, UPath]:
        return {key: self._root / self._key(context, key) for key in context.asset_partition_keys}

    def _key(self, context: dg.InputContext | dg.OutputContext, partition: str) -> str:
        dimensions = getattr(partition, "keys_by_dimension", None)
        if dimensions is None or set(dimensions) != {MODEL, SUFFIX}:
            raise StoreError(
                f"{context.asset_key.to_user_string()}: partition {partition!r} is not a "
                f"{MODEL} and a {SUFFIX}; this IO manager keeps only tensorize_assets' records"
            )
        asset = context.asset_key.path[-1]
        return layout.record_key(asset, from_partition_key(dimensions[MODEL]), dimensions[SUFFIX])

    def _handle_transition_to_partitioned_asset(
        self, context: dg.OutputContext, path: UPath
    ) -> None:
        """Delete nothing: the stock method removes what stood at the unpartitioned path."""

    def make_directory(self, path: UPath) -> None:
        """The store makes folders itself, each durable before its content."""

    def dump_to_path(self, context: dg.OutputContext, obj: Any, path: UPath) -> None:
        if not isinstance(obj, jsonio.Record):
            raise StoreError(f"{path} keeps records, not {type(obj).__name__}")
        key = path.relative_to(self._root).as_posix()
        data = jsonio.canonical(jsonio.dump_record(obj), self._store.uri(key))
        self._store.put_bytes(key, data)

    def load_from_path(self, context: dg.InputContext, path: UPath) -> Any:
        key = path.relative_to(self._root).as_posix()
        stored = self._store.get_bytes(key)
        if stored is None:
            raise StoreError(
                f"{self._store.uri(key)} does not exist: materialize the asset "
                f"{context.asset_key.to_user_string()} for this partition first"
            )
        expected = context.dagster_type.typing_type
        if not (isinstance(expected, type) and issubclass(expected, jsonio.Record)):
            raise StoreError(f"the input for {path} needs a record type as its annotation")
        return jsonio.load_record(expected, stored.data, self._store.uri(key))


@contextmanager
def _failures() -> Generator[None]:
    try:
        yield
    except TensorizeAssetsError as error:
        raise failure_of(error) from error


class RecordIOManagerResource(dg.ConfigurableIOManagerFactory[RecordIOManager]):
    """`RecordIOManager` at the catalog's root."""

    catalog: dg.ResourceDependency[CatalogResource]

    def create_io_manager(self, context: dg.InitResourceContext) -> RecordIOManager:
        return RecordIOManager(self.catalog.root())
