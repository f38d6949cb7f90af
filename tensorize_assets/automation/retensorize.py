"""Builds are made again whose profile or tools are others now; and reloaded again on request."""

import random
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import dagster as dg

from tensorize_assets import partitions
from tensorize_assets.assets.published import published
from tensorize_assets.assets.reference_outputs import reference_outputs
from tensorize_assets.assets.reload_check import reload_check
from tensorize_assets.assets.target import CHAIN_TAG, COMMIT_TAG, EXECUTOR, MODEL_TAG, SUFFIX_TAG
from tensorize_assets.core import wanted
from tensorize_assets.core.build import build_id, differences
from tensorize_assets.core.builds import Pair, in_parallel
from tensorize_assets.core.catalog import Profile
from tensorize_assets.core.channel import ChannelEntry, read_channel
from tensorize_assets.core.errors import StoreError, TensorizeAssetsError
from tensorize_assets.core.manifest import read_manifest
from tensorize_assets.core.store import Reader
from tensorize_assets.resources.catalog import CatalogResource
from tensorize_assets.resources.keyring import KeyringResource
from tensorize_assets.resources.launchers.base import Launcher
from tensorize_assets.resources.store import StoreResource

# Dagster ends a tick after 60 s, and of these it needs some to make the runs.
_BUDGET_S = 40.0
_NO_TIME = "there was no time to look at it; it may be among the first of the next tick"

reverify = dg.define_asset_job(  # pyright: ignore[reportUnknownMemberType]
    "reverify",
    selection=dg.AssetSelection.assets(reference_outputs, reload_check, published),
    config={"ops": {"reload_check": {"config": {"again": True}}}},
    tags={CHAIN_TAG: "true"},
    executor_def=EXECUTOR,
    description="Reloads what the last run of a model and suffix has built once more, and "
    "publishes it on that evidence.",
)


class Outdated(NamedTuple):
    """A published build that would be another one now: its id would be `build_id`."""

    entry: ChannelEntry
    build_id: str
    changed: tuple[str, ...]


def schedule(cron: str) -> dg.ScheduleDefinition:
    """Requests a run of the job `build` for each published build that would be another one now.

    `cron` is the catalog's `automation.retensorize`.
    """

    @dg.schedule(  # pyright: ignore[reportUnknownMemberType]
        name="retensorize_schedule",
        job_name="build",
        cron_schedule=cron,
        execution_timezone="UTC",
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description="Builds again what was published with another profile, or by other versions "
        "of vLLM, torch or tensorizer (catalog: automation.retensorize).",
    )
    def retensorize_schedule(
        context: dg.ScheduleEvaluationContext,
        tensorize_catalog: CatalogResource,
        tensorize_store: StoreResource,
        tensorize_keyring: KeyringResource,
        tensorize_launcher: Launcher,
    ) -> list[dg.RunRequest] | dg.SkipReason:
        until = time.monotonic() + _BUDGET_S
        try:
            found = tensorize_catalog.catalog()
            store, trusted = (
                tensorize_store.open(tensorize_catalog.root()),
                tensorize_keyring.trusted(),
            )
            versions, seen = tensorize_launcher.versions(), tensorize_keyring.seen()
        except TensorizeAssetsError as error:
            if error.retryable:
                raise  # a tick that fails is had again; one that skips is over for a week
            return dg.SkipReason(str(error))

        def look(pair: Pair) -> Outdated | str | None:
            if time.monotonic() > until:
                return _NO_TIME
            try:
                return outdated(store, pair, found.profile(*pair), versions, trusted, seen)
            except TensorizeAssetsError as error:
                return str(error)

        pairs = list(found.pairs())
        # So that what there is no time for is not the same each time.
        random.shuffle(pairs)
        due: dict[Pair, Outdated] = {}
        unread: list[str] = []
        left = 0
        for pair, result in zip(pairs, in_parallel(look, pairs), strict=True):
            if isinstance(result, Outdated):
                due[pair] = result
            elif result == _NO_TIME:
                left += 1
            elif result is not None:
                unread.append(f"{pair[0]} {pair[1]}: {result}")
                context.log.warning(unread[-1])
        if left:
            context.log.warning(f"{left} of {len(pairs)} pairs: {_NO_TIME}")
        for (model, suffix), one in sorted(due.items()):
            context.log.info(
                f"{model} {suffix}: differs from the published build {one.entry.build_id}: "
                + "; ".join(one.changed)
            )
        if unread and not due:
            raise StoreError(
                f"{len(unread)} of {len(pairs)} pairs could not be compared with what is "
                f"published, and of the others none is to be built again; the first: {unread[0]}"
            )
        if not due:
            return dg.SkipReason(
                f"of {len(pairs) - left} pairs of the catalog that were looked at, none was "
                "published with another profile or other tools"
            )
        # A channel may be older than this instance, and a run needs its partition.
        partitions.add_pairs(context.instance, [m for m, _ in due], [suffix for _, suffix in due])
        day = f"{context.scheduled_execution_time:%Y-%m-%d}"
        return [_run_request(pair, one, day) for pair, one in sorted(due.items())]

    return retensorize_schedule


def outdated(
    store: Reader,
    pair: Pair,
    profile: Profile,
    versions: Mapping[str, str],
    trusted: Collection[str],
    seen: Path,
) -> Outdated | None:
    """What differs between a published build and one of the same commits now; None for nothing.

    Compared is what is current for today's vLLM, if anything is. None also where nothing was
    published.

    Raises as `read_channel` and `read_manifest` do.
    """
    history = read_channel(store, *pair, trusted, seen)
    if history is None:
        return None
    plain = wanted.inputs(pair[0], profile, history.channel.current.commit, {}, versions)
    entry = history.channel.current_for(plain.vllm) or history.channel.current
    plain = plain.model_copy(update={"commit": entry.commit})
    published_as = "both" if entry.encrypted else "none"
    if (build_id(plain), profile.encryption, ()) == (
        entry.build_id,
        published_as,
        profile.adapters,
    ):
        # A manifest is a thousand times as large as this.
        return None
    stored = read_manifest(store, entry.directory, trusted)
    if stored is None:
        return Outdated(entry, build_id(plain), ("its manifest is gone",))
    before = stored.manifest.inputs.model_copy(update={"data_key": None})
    commits = dict(before.adapters)
    now = wanted.inputs(
        pair[0],
        profile,
        entry.commit,
        {one.name: commits[one.name] for one in profile.adapters if one.name in commits},
        versions,
    )
    repos = {adapter.name: adapter.repo for adapter in stored.manifest.adapters}
    if stored.manifest.encryption is not None:
        published_as = "only"
    changed = (
        *differences(before, now),
        *(
            [f"encryption: {published_as} → {profile.encryption}"]
            if published_as != profile.encryption
            else []
        ),
        *(
            f"adapter {one.name}: {repos.get(one.name, '(absent)')} → {one.repo}"
            for one in profile.adapters
            if repos.get(one.name) != one.repo
        ),
    )
    return Outdated(entry, build_id(now), changed) if changed else None


def _run_request(pair: Pair, one: Outdated, day: str) -> dg.RunRequest:
    model, suffix = pair
    return dg.RunRequest(
        run_key=f"retensorize {day} {model} {suffix} {one.build_id}",
        partition_key=partitions.partition_key(model, suffix),
        tags={MODEL_TAG: model, SUFFIX_TAG: suffix, COMMIT_TAG: one.entry.commit},
    )
