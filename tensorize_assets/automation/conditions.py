"""Which assets follow by themselves when something before them was materialized."""

from collections.abc import Sequence

import dagster as dg

from tensorize_assets.assets.target import CHAIN_TAG, ONESHOT_TAG

_EVERY_S = 30

# As `any_deps_updated`, but for two kinds of runs. The runs of the job `build` go on by themselves,
# which Dagster sees only of runs that were given a selection of assets. And one-shot builds: only
# the run that carries its profile can go on with one, and its partition is in no catalog.
_UPDATED = dg.AutomationCondition.any_deps_match(  # pyright: ignore[reportUnknownMemberType]
    (
        dg.AutomationCondition.newly_updated()
        & ~dg.AutomationCondition.executed_with_root_target()
        & ~dg.AutomationCondition.executed_with_tags(tag_keys={CHAIN_TAG})
        & ~dg.AutomationCondition.executed_with_tags(tag_keys={ONESHOT_TAG})
    )
    | dg.AutomationCondition.will_be_requested()
).with_label("updated by a run that did not go on to this")

# As `eager`, but for what is missing: every pair of a model and a suffix is when its keys become
# partitions, also one that is in no catalog, and so is the rest of a build that failed, which the
# revision sensor tries again.
FOLLOWS = (
    _UPDATED.since_last_handled()
    & ~dg.AutomationCondition.any_deps_missing()
    & ~dg.AutomationCondition.any_deps_in_progress()
    & ~dg.AutomationCondition.in_progress()
    & dg.AutomationCondition.all_deps_blocking_checks_passed()
).with_label("follows what is before it")
"""Eager, across runs, and waits for the blocking checks of what is before it.

It follows materializations, and nothing materializes for a pair outside the catalog.
"""

FLEET = (
    dg.AutomationCondition.cron_tick_passed("0 * * * *").since_last_handled()
    & (
        dg.AutomationCondition.any_deps_updated().since_last_handled()
        | dg.AutomationCondition.cron_tick_passed("0 6 * * *").since_last_handled()
    )
    & ~dg.AutomationCondition.in_progress()
).with_label("after a channel was published to, once an hour at most, and daily")
"""After something was published, at most once in each hour of the clock, and daily at 06:00 UTC.

The table of a large fleet is some megabytes, and Dagster keeps every one.
"""


def conditions_sensor(
    assets: Sequence[dg.AssetsDefinition],
) -> dg.AutomationConditionSensorDefinition:
    """The sensor that requests what the conditions of `assets` ask for."""
    return dg.AutomationConditionSensorDefinition(
        "tensorize_conditions",
        target=dg.AssetSelection.assets(*assets),
        description="Runs what is after an asset that was materialized alone, once its blocking "
        "checks have passed, and keeps fleet_status.",
        default_status=dg.DefaultSensorStatus.RUNNING,
        minimum_interval_seconds=_EVERY_S,
        # A run a partition, as the revision sensor asks for: the queue then keeps one of each.
        emit_backfills=False,
    )
