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
_RETRIES = 3
_FIRST_WAIT_S = 5.0


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

    def encrypted_directory(self, build_id: str) -> str:
        """The key of the directory of an encrypted build."""
        if self.oneshot:
            return layout.oneshot_encrypted_dir(self.model, self.suffix)
        return layout.encrypted_dir(self.model, self.suffix, build_id)

    def record_key(self, asset: str) -> str:
        """The key of an asset's record of this partition, in the catalog's root."""
        partition = layout.ONESHOT_PARTITION if self.oneshot else self.suffix
        return layout.record_key(asset, self.model, partition)


def target_of(context: dg.AssetExecutionContext, catalog: CatalogResource) -> Target:
    """The target of this run.

    Raises:
        CatalogError: the pair is not in the catalog, or the one-shot tag is missing or wrong, or
            names a suffix of the catalog.
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
    entry = catalog.catalog().models.get(model)
    if entry is not None and oneshot.suffix in entry.profiles:
        raise CatalogError(
            f"{model} has a profile {oneshot.suffix!r} in the catalog, whose channel is not a "
            "one-shot build's to move: choose another suffix for it"
        )
    return Target(
        model=model,
        suffix=oneshot.suffix,
        profile=oneshot.profile,
        root=oneshot.root or catalog.root(),
        oneshot=True,
    )


def require_one_build(
    context: dg.AssetExecutionContext, target: Target, *records: BuildRecord
) -> None:
    """Refuse records of another build than this run's, of each other's, or of another one-shot.

    Raises:
        BuildMismatchError: names both and what to materialize.
    """
    run = context.instance.get_run_by_id(context.run.run_id)
    build = (run.tags.get(BUILD_TAG) if run else None) or records[0].build_id
    for record in records:
        # One-shot builds of a model share a partition, and with it the places of their records.
        if (record.model, record.suffix, record.build_id) != (target.model, target.suffix, build):
            raise BuildMismatchError(
                f"{target.model} {target.suffix}: a {type(record).__name__} of {record.model} "
                f"{record.suffix}, build {record.build_id}, was handed to a run of build {build}; "
                "another run has replaced it. Materialize this partition from hf_snapshot on"
            )


def set_build(context: dg.AssetExecutionContext, build_id: str) -> None:
    """Tag the run with the build that everything in it is of."""
    context.instance.add_run_tags(context.run.run_id, {BUILD_TAG: build_id})


@contextmanager
def failures(context: dg.AssetExecutionContext) -> Generator[None]:
    """Show an error of ours as its message, and try the step again only if that can help.

    No RetryPolicy: under one Dagster also retries a step that a person cancelled (Ctrl-C would
    start the worker anew), and every error that nobody foresaw.
    """
    try:
        yield
    except TensorizeAssetsError as error:
        failure = failure_of(error)
        attempt = context.retry_number
        if error.retryable and attempt < _RETRIES:
            raise dg.RetryRequested(
                max_retries=_RETRIES, seconds_to_wait=_FIRST_WAIT_S * 2**attempt
            ) from failure
        raise failure from error


def failure_of(error: TensorizeAssetsError) -> dg.Failure:
    """`error` as Dagster shows it: its message as the description, and no retry."""
    failure = dg.Failure(
        description=str(error), metadata={"error": type(error).__name__}, allow_retries=False
    )
    failure.__cause__ = error
    return failure


def _dimensions(context: dg.AssetExecutionContext) -> dict[str, str]:
    key: Any = context.partition_key
    return dict(key.keys_by_dimension)
