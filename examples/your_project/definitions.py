"""Another Dagster project that builds models beside its own assets.

export DAGSTER_HOME=$PWD/dagster_home
dagster dev -f definitions.py

The catalog's models and suffixes become partitions by themselves; job `build`, partition
`facebook--opt-125m|v1`, starts the first build at once.
"""

from pathlib import Path
from typing import Any

import dagster as dg

from tensorize_assets import build_defs
from tensorize_assets.core.records import PublishedRecord
from tensorize_assets.partitions import model_suffix

HOME = Path(__file__).parent / "dagster_home"


@dg.asset(partitions_def=model_suffix)
def rollout_request(published: PublishedRecord) -> dict[str, Any]:
    """An asset of your own after one of ours. What it returns goes to your own IO manager.

    A run that is of one build never reads the record of another: it fails, naming both.
    """
    return {"model": published.model, "channel": published.channel, "entry": published.number}


# Ours keeps pydantic models and JSON values in the catalog's root, on a disk or in S3; no pickle.
@dg.asset(io_manager_key="tensorize_io_manager")
def served_models() -> list[str]:
    """An asset that has nothing to do with ours, kept beside what we build."""
    return ["facebook/opt-125m"]


defs = dg.Definitions.merge(
    build_defs(HOME / "models.yaml", HOME),
    dg.Definitions(assets=[rollout_request, served_models]),
)
