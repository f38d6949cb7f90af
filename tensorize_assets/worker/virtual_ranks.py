"""Tensor-parallel ranks without devices: each is built alone, in this process, on the CPU.

vLLM's layers ask `vllm.distributed.parallel_state` for their rank and the number of ranks, and
slice their weights by it while they load. Nothing is communicated until a forward pass. So a
stand-in group that answers those two questions makes one process build any rank, byte for byte
as a real rank does (tests hold the two equal).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm.distributed import parallel_state


class _StandInGroup:
    """What layers read of a `GroupCoordinator` while they are built and loaded."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.rank_in_group = rank
        self.local_rank = rank
        self.world_size = world_size
        self.ranks = list(range(world_size))
        self.first_rank = 0
        self.last_rank = world_size - 1
        self.is_first_rank = rank == 0
        self.is_last_rank = rank == world_size - 1
        self.device = torch.device("cpu")
        self.use_custom_op_call = False
        self.device_communicator = None

    def __getattr__(self, name: str) -> object:
        raise NotImplementedError(
            f"a virtual rank has no communication, and this model asks for `{name}` of its "
            "parallel group while it is built; use `sharding: executor`"
        )


# Expert groups stay unset, as on a real rank of a dense model: a model that asks for one fails
# with vLLM's own message, and preflight refuses mixtures of experts before that.
_ALONE = ("_PP", "_DP", "_DCP", "_PCP")


@contextmanager
def virtual_rank(rank: int, world_size: int) -> Iterator[None]:
    """Make this process rank `rank` of `world_size` for everything built inside."""
    stand_ins = {name: _StandInGroup(0, 1) for name in _ALONE}
    stand_ins["_TP"] = _StandInGroup(rank, world_size)
    stand_ins["_WORLD"] = _StandInGroup(rank, world_size)
    before = {name: getattr(parallel_state, name) for name in stand_ins}
    for name, group in stand_ins.items():
        setattr(parallel_state, name, group)
    try:
        yield
    finally:
        for name, group in before.items():
            setattr(parallel_state, name, group)
