"""What a run is asked to build: a catalog pair, or a one-shot from the command line."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import dagster as dg
from pydantic import ValidationError

from tensorize_assets.core import layout
from tensorize_assets.core.catalog import Profile, from_partition_key
from tensorize_assets.core.errors import BuildMismatchError, CatalogError, TensorizeAssetsError
from tensorize_assets.core.jsonio import Record
from tensorize_assets.core.records import BuildRecord
from tensorize_assets.partitions import MODEL, SUFFIX
from tensorize_assets.resources.catalog import CatalogResource

BUILD_TAG = "tensorize_assets/build_id"
ONESHOT_TAG = "tensorize_assets/oneshot"

# Waits of 5, 10 and 20 s: network trouble, and workers killed by a neighbour's memory.
RETRIES = dg.RetryPolicy(max_retries=3, delay=5, backoff=dg.Backoff.EXPONENTIAL)


class Oneshot(Record):
    """A build that is not in the catalog; travels as a run tag."""

    suffix: str
    profile: Profile
    root: str | None = None


class Target(Record):
    """Everything that the catalog (or the command line) says about a run's partition."""

    model: str
    suffix: str
    profile: Profile
    root: str
    oneshot: bool

    def directory(self, build_id: str) -> str:
        """The key of this build's artifact directory."""
        if self.oneshot:
            return layout.oneshot_dir(self.model, self.suffix)
        return layout.artifact_dir(self.model, self.suffix, build_id)


def target_of(context: dg.AssetExecutionContext, catalog: CatalogResource) -> Target:
    """The target of this run.

    Raises:
        CatalogError: the pair is not in the catalog, or the one-shot tag is missing or wrong.
    """
    keys = _dimensions(context)
    model, suffix = from_partition_key(keys[MODEL]), keys[SUFFIX]
    if suffix != layout.ONESHOT_PARTITION:
        return Target(
            model=model,
            suffix=suffix,
            profile=catalog.catalog().profile(model, suffix),
            root=catalog.root(),
            oneshot=False,
        )
    tag = context.run.tags.get(ONESHOT_TAG)
    if tag is None:
        raise CatalogError(
            f"{model}: the suffix partition {suffix!r} is for one-shot builds; start them with "
            "`tensorize build`, or choose a suffix of the catalog"
        )
    try:
        oneshot = Oneshot.model_validate_json(tag)
    except ValidationError as error:
        raise CatalogError(f"{model}: run tag {ONESHOT_TAG} is not valid: {error}") from error
    return Target(
        model=model,
        suffix=oneshot.suffix,
        profile=oneshot.profile,
        root=oneshot.root or catalog.root(),
        oneshot=True,
    )


def require_one_build(context: dg.AssetExecutionContext, *records: BuildRecord) -> None:
    """Refuse records of another build than this run's, or of each other's.

    Raises:
        BuildMismatchError: names both builds and what to materialize.
    """
    run = context.instance.get_run_by_id(context.run_id)
    expected = (run.tags.get(BUILD_TAG) if run else None) or records[0].build_id
    for record in records:
        if record.build_id != expected:
            raise BuildMismatchError(
                f"{record.model} {record.suffix}: a {type(record).__name__} of build "
                f"{record.build_id} was handed to a run of build {expected}; another run has "
                "replaced it. Materialize this partition from hf_snapshot on"
            )


def set_build(context: dg.AssetExecutionContext, build_id: str) -> None:
    """Tag the run with the build that everything in it is of."""
    context.instance.add_run_tags(context.run_id, {BUILD_TAG: build_id})


@contextmanager
def failures() -> Generator[None]:
    """Show an error of ours as its message, and retry it only if trying again can help."""
    try:
        yield
    except TensorizeAssetsError as error:
        raise dg.Failure(
            description=str(error),
            metadata={"error": type(error).__name__},
            allow_retries=error.retryable,
        ) from error


def _dimensions(context: dg.AssetExecutionContext) -> dict[str, str]:
    key: Any = context.partition_key
    return dict(key.keys_by_dimension)
