"""catalog_partitions: the dynamic partitions are the catalog's models and suffixes."""

import time
from collections.abc import Collection, Iterable
from functools import partial

import dagster as dg
from pydantic import Field

from tensorize_assets.assets.hf_snapshot import hf_snapshot
from tensorize_assets.automation.retention import busy
from tensorize_assets.core import jsonio, layout
from tensorize_assets.core.builds import in_parallel
from tensorize_assets.core.catalog import from_partition_key, to_partition_key
from tensorize_assets.core.errors import CatalogError, StoreError, TensorizeAssetsError
from tensorize_assets.core.store import Store
from tensorize_assets.partitions import MODEL, SUFFIX, add_requests, models, suffixes
from tensorize_assets.resources.catalog import CatalogResource
from tensorize_assets.resources.store import StoreResource

# A one-shot build adds its partition before its run exists; an editor may save half a catalog.
_PATIENCE_S = 60.0
# What keeps a key is looked for by listing the store.
_LOOK_AGAIN_S = 600.0
_LISTED = 20


class _Outside(jsonio.Record):
    """The keys that are in no catalog, since when, and when it was looked last which can go.

    Times are seconds since 1970.
    """

    format: int = Field(default=1, ge=1, le=1)
    models: dict[str, float] = Field(default={})
    suffixes: dict[str, float] = Field(default={})
    looked: float = 0


# Its signature holds types that Dagster leaves open.
@dg.sensor(  # pyright: ignore[reportUnknownMemberType]
    name="catalog_partitions",
    minimum_interval_seconds=30,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Keeps models and suffixes as dynamic partitions equal to the catalog. What leaves "
    "the catalog stays a partition as long as it has artifacts, a channel or a run under way.",
)
def catalog_partitions(
    context: dg.SensorEvaluationContext,
    tensorize_catalog: CatalogResource,
    tensorize_store: StoreResource,
) -> dg.SensorResult | dg.SkipReason:
    """Adds what is new in the catalog, and removes what left no trace."""
    try:
        pairs = list(tensorize_catalog.catalog().pairs())
    except CatalogError as error:
        return dg.SkipReason(f"the catalog has mistakes, partitions stay as they are:\n{error}")
    instance, now = context.instance, time.time()
    known_models = models.get_partition_keys(dynamic_partitions_store=instance)
    known_suffixes = suffixes.get_partition_keys(dynamic_partitions_store=instance)
    adding = add_requests(instance, (model for model, _ in pairs), (suffix for _, suffix in pairs))
    added = [key for request in adding for key in request.partition_keys]
    before = _load(context.cursor)
    wanted_models = {to_partition_key(model) for model, _ in pairs}
    wanted_suffixes = {suffix for _, suffix in pairs} | {layout.ONESHOT_PARTITION}
    outside = _Outside(
        models=_since(known_models, wanted_models, before.models, now),
        suffixes=_since(known_suffixes, wanted_suffixes, before.suffixes, now),
        looked=before.looked,
    )
    gone: dict[str, list[str]] = {}
    if _is_time(outside, now):
        outside = outside.model_copy(update={"looked": now})
        gone = _without_trace(context, tensorize_store, outside, known_models)
    said = f"{len(wanted_models)} models and {len(wanted_suffixes)} suffixes are partitions"
    if added:
        said = f"added {_some(added)}"
    if any(gone.values()):
        said += f"; removed {_some([*gone[MODEL], *gone[SUFFIX]])}"
    return dg.SensorResult(
        dynamic_partitions_requests=[
            *adding,
            *(
                definition.build_delete_request(gone[name])
                for definition, name in ((models, MODEL), (suffixes, SUFFIX))
                if gone.get(name)
            ),
        ],
        cursor=context.cursor if outside == before else outside.model_dump_json(),
        skip_reason=said,
    )


def _load(cursor: str | None) -> _Outside:
    try:
        return jsonio.load_record(_Outside, (cursor or "{}").encode(), "the cursor")
    except StoreError:
        # Of another release: what it knew is found again.
        return _Outside()


def _since(
    known: Iterable[str], wanted: Collection[str], before: dict[str, float], now: float
) -> dict[str, float]:
    return {key: before.get(key, now) for key in known if key not in wanted}


def _is_time(outside: _Outside, now: float) -> bool:
    """Whether a key has been outside for long enough and was not looked at, or long ago."""
    ripe = [
        since + _PATIENCE_S
        for since in (*outside.models.values(), *outside.suffixes.values())
        if since + _PATIENCE_S <= now
    ]
    return bool(ripe) and (max(ripe) > outside.looked or now >= outside.looked + _LOOK_AGAIN_S)


def _without_trace(
    context: dg.SensorEvaluationContext,
    artifact_store: StoreResource,
    outside: _Outside,
    known_models: Iterable[str],
) -> dict[str, list[str]]:
    """The keys, by dimension, that nothing is left of; the log names those that are kept."""
    ripe = {
        MODEL: [k for k, since in outside.models.items() if since + _PATIENCE_S <= outside.looked],
        SUFFIX: [
            k for k, since in outside.suffixes.items() if since + _PATIENCE_S <= outside.looked
        ],
    }
    try:
        store = artifact_store.open(artifact_store.root())
        kept = _in_use(context.instance)
        kept[MODEL] |= _models_left(store, ripe[MODEL])
        kept[SUFFIX] |= _suffixes_left(store, known_models, ripe[SUFFIX])
    except TensorizeAssetsError as error:
        context.log.warning(f"keys that are in no catalog stay, the store cannot be read: {error}")
        return {}
    gone: dict[str, list[str]] = {}
    for name, keys in ripe.items():
        gone[name] = [key for key in keys if key not in kept[name]]
        stay = [key for key in keys if key in kept[name]]
        if stay:
            context.log.info(
                f"{name} partitions that are in no catalog, and stay for their artifacts or "
                f"runs: {_some(stay)}"
            )
        if gone[name]:
            context.log.info(f"{name} partitions removed, in no catalog: {_some(gone[name])}")
    return gone


def _in_use(instance: dg.DagsterInstance) -> dict[str, set[str]]:
    """Models and suffixes of runs that have not ended, and models of one-shot builds."""
    pairs = busy(instance).pairs
    found = {
        MODEL: {to_partition_key(model) for model, _ in pairs},
        SUFFIX: {suffix for _, suffix in pairs},
    }
    # What a one-shot build left may lie in a root of its own.
    for key in instance.get_materialized_partitions(hf_snapshot.key):
        model, _, suffix = key.partition("|")
        if suffix == layout.ONESHOT_PARTITION:
            found[MODEL].add(model)
    return found


def _models_left(store: Store, keys: Iterable[str]) -> set[str]:
    """Those of the models that the store has something of."""
    return {key for key, found in in_parallel(partial(_listed, store), keys) if found}


def _suffixes_left(store: Store, known_models: Iterable[str], keys: Collection[str]) -> set[str]:
    """Those of the suffixes that the store has a build or a channel of, of any model."""
    if not keys:
        return set()
    left: set[str] = set()
    for model_key, found in in_parallel(partial(_listed, store), known_models):
        folder = f"{layout.model_folder(from_partition_key(model_key))}/"
        names = {key.removeprefix(folder).partition("/")[0] for key in found}
        left |= {_suffix_of(name) for name in names}
    return left & set(keys)


def _listed(store: Store, model_key: str) -> tuple[str, tuple[str, ...]]:
    return model_key, store.list(f"{layout.model_folder(from_partition_key(model_key))}/")


def _suffix_of(name: str) -> str:
    """The suffix of a channel or a build by its name in the model's folder; of others the name."""
    build = layout.build_name(name)
    return build.suffix if build else name.removesuffix(".json")


def _some(keys: Collection[str]) -> str:
    listed = ", ".join(list(keys)[:_LISTED])
    return f"{listed} and {len(keys) - _LISTED} more" if len(keys) > _LISTED else listed
