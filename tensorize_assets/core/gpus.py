"""How many GPUs a request for a worker takes, and how many a run of a profile does."""

from __future__ import annotations

from collections.abc import Collection

from tensorize_assets.core.catalog import Profile
from tensorize_assets.core.protocol import WorkerRequest
from tensorize_assets.core.tasks import (
    ReferenceRequest,
    ReloadRequest,
    SelfCheckRequest,
    ShardRequest,
)

GPUS_TAG = "gpus"
"""The tag of a run with the GPUs that it may hold at once; `tag_concurrency_limits` count it."""

# Assets whose worker is an engine on the profile's `reload_device`.
_ENGINES = frozenset({"reference_outputs", "reload_check"})
_SHARDS = "tensorized_shards"


def ranks_of(request: WorkerRequest) -> int:
    """How many ranks of a model compute at once in the worker of `request`."""
    if isinstance(request, ReferenceRequest | ReloadRequest | SelfCheckRequest):
        return request.tensor_parallel_size
    if isinstance(request, ShardRequest) and request.sharding == "executor":
        return request.tensor_parallel_size
    # Virtual ranks are built one after another, or in workers of their own; the others read files.
    return 1


def gpus_of(request: WorkerRequest) -> int:
    """How many GPUs the worker of `request` needs: one for each rank that computes on one."""
    if isinstance(request, ReferenceRequest | ReloadRequest | SelfCheckRequest):
        return ranks_of(request) if request.device == "cuda" else 0
    if isinstance(request, ShardRequest) and request.sharding == "executor":
        return ranks_of(request) if request.device == "cuda" else 0
    return 0


def gpus_of_run(profile: Profile, assets: Collection[str] | None) -> int:
    """The most GPUs that a run of these assets (None: the whole chain) holds at once."""
    on_gpus = _ENGINES | {_SHARDS} if profile.sharding == "executor" else _ENGINES
    if profile.reload_device != "cuda" or (assets is not None and on_gpus.isdisjoint(assets)):
        return 0
    return profile.tensor_parallel_size
