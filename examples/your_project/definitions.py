"""Another Dagster project that builds models beside its own assets.

export DAGSTER_HOME=$PWD/dagster_home
tensorize catalog sync                  # the catalog's models and suffixes become partitions
dagster dev -f definitions.py           # job `build`, partition `facebook--opt-125m|v1`
"""

from pathlib import Path
from typing import Any

import dagster as dg

from tensorize_assets.core.records import PublishedRecord
from tensorize_assets.definitions import definitions
from tensorize_assets.partitions import model_suffix

FOLDER = Path(__file__).parent / "dagster_home"


@dg.asset(partitions_def=model_suffix)
def rollout_request(published: PublishedRecord) -> dict[str, Any]:
    """An asset of your own after one of ours. What it returns is kept as JSON in the same store.

    A run that is of one build never reads the record of another: it fails, naming both.
    """
    return {"model": published.model, "channel": published.channel, "entry": published.number}


@dg.asset
def served_models() -> list[str]:
    """An asset that has nothing to do with ours; same IO manager, no pickle."""
    return ["facebook/opt-125m"]


# `definitions` brings ManifestIOManager as "io_manager", for every asset here. To keep your own as
# the default, put ours under another name and give it to our assets with `with_attributes`.
defs = dg.Definitions.merge(
    definitions(FOLDER), dg.Definitions(assets=[rollout_request, served_models])
)
