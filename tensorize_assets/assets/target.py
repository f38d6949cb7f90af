"""What a run is asked to build: a catalog pair, or a one-shot from the command line."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import dagster as dg
from pydantic import ValidationError

from tensorize_assets.core import layout
from tensorize_assets.core.catalog import Profile, from_partition_key
from tensorize_assets.core.errors import (
    BuildMismatchError,
    CatalogError,
    HubUnavailableError,
    TensorizeAssetsError,
)
from tensorize_assets.core.hub_access import HubAccess
from tensorize_assets.core.jsonio import Record
from tensorize_assets.core.records import BuildRecord
from tensorize_assets.partitions import MODEL, SUFFIX
from tensorize_assets.resources.catalog import CatalogResource

# A project that has our assets beside its own keeps its own `io_manager`.
IO_MANAGER = "tensorize_io_manager"
BUILD_TAG = "tensorize_assets/build_id"
ONESHOT_TAG = "tensorize_assets/oneshot"
MODEL_TAG = "tensorize_assets/model"
SUFFIX_TAG = "tensorize_assets/suffix"
COMMIT_TAG = "tensorize_assets/commit"
ADAPTER_COMMITS_TAG = "tensorize_assets/adapter_commits"
# Of a job whose runs go on to the end by themselves: nothing that they update starts another run.
CHAIN_TAG = "tensorize_assets/whole_chain"

# One process a run: workers are processes of their own anyway, a process a step costs seconds each,
# and Dagster 1.13's multiprocess executor takes a whole core while it waits for a place in a pool.
EXECUTOR = dg.in_process_executor

# Waits of 5, 10 and 20 s: network trouble, and workers killed by a neighbour's memory.
_RETRIES = 3
_FIRST_WAIT_S = 5.0
# Where the Hub says how long to leave it alone; the revision sensor waits longer than a step can.
_LONGEST_WAIT_S = 300.0


class Oneshot(Record):
    """A build that is not in the catalog; travels as a run tag.

    `keyfile`: it is encrypted as vLLM's script does it, where a plaintext one would lie, and
    whoever asked for it gets the data key in a file.
    """

    suffix: str
    profile: Profile
    root: str | None = None
    keyfile: bool = False


class Target(Record):
    """Everything that the catalog (or the command line) says about a run's partition."""

    model: str
    suffix: str
    profile: Profile
    root: str
    oneshot: bool
    keyfile: bool = False

    def directory(self, build_id: str) -> str:
        """The key of this build's artifact directory."""
        if self.oneshot:
            return layout.oneshot_dir(self.model, self.suffix)
        return layout.artifact_dir(self.model, self.suffix, build_id)

    def encrypted_directory(self, build_id: str) -> str:
        """The key of the directory of an encrypted build."""
        if self.keyfile:
            return layout.oneshot_dir(self.model, self.suffix)
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
        keyfile=oneshot.keyfile,
    )


def require_one_build(
    context: dg.AssetExecutionContext, target: Target, *records: BuildRecord
) -> None:
    """Refuse records of another build than this run's, of each other's, or of another one-shot.

    A run that has no hf_snapshot to say which build it is of is of that of the first record.

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
    if run is not None and BUILD_TAG not in run.tags:
        set_build(context, target, build)


def set_build(
    context: dg.AssetExecutionContext,
    target: Target,
    build_id: str,
    commit: str | None = None,
    adapter_commits: Sequence[str] = (),
) -> None:
    """Tag the run with the build that everything in it is of, by which it is found."""
    tags = {BUILD_TAG: build_id, MODEL_TAG: target.model, SUFFIX_TAG: target.suffix}
    if commit is not None:
        tags[COMMIT_TAG] = commit
    if adapter_commits:
        tags[ADAPTER_COMMITS_TAG] = " ".join(adapter_commits)
    context.instance.add_run_tags(context.run.run_id, tags)


def commit_url(access: HubAccess, repo: str, commit: str) -> str:
    """Where a person reads a repo at a commit."""
    endpoint = (access.endpoint or "https://huggingface.co").rstrip("/")
    return f"{endpoint}/{repo}/tree/{commit}"


@contextmanager
def failures(context: dg.AssetExecutionContext) -> Generator[None]:
    """Show an error of ours as its message, and try the step again only if that can help.

    No RetryPolicy: under one Dagster also retries a step that a person cancelled (Ctrl-C would
    start the worker anew), and every error that nobody foresaw.
    """
    try:
        yield
    except TensorizeAssetsError as error:
        raise retry_or_failure(error, context.retry_number) from error


def retry_or_failure(error: TensorizeAssetsError, attempt: int) -> dg.RetryRequested | dg.Failure:
    """What a step raises for `error`; `attempt` counts those before, from 0."""
    if not error.retryable or attempt >= _RETRIES:
        return failure_of(error)
    wait = _FIRST_WAIT_S * 2**attempt
    if isinstance(error, HubUnavailableError) and error.retry_after_s is not None:
        wait = min(max(wait, error.retry_after_s), _LONGEST_WAIT_S)
    return dg.RetryRequested(max_retries=_RETRIES, seconds_to_wait=wait)


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
