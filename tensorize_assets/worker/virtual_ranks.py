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


class _StandInProcessGroup:
    """What mixtures of experts read of a group's process group."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world_size


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
        self.device_group = _StandInProcessGroup(rank, world_size)
        self.use_custom_op_call = False
        self.device_communicator = None

    def __getattr__(self, name: str) -> object:
        raise NotImplementedError(
            f"a virtual rank has no communication, and this model asks for `{name}` of its "
            "parallel group while it is built; use `sharding: executor`"
        )


_ALONE = ("_PP", "_DP", "_DCP", "_PCP")


@contextmanager
def virtual_rank(rank: int, world_size: int, *, experts: bool = False) -> Iterator[None]:
    """Make this process rank `rank` of `world_size` for everything built inside.

    `experts`: of a mixture of experts. Dense models have no expert group on a real rank either,
    and one that asks for it fails with vLLM's own message.
    """
    stand_ins = {name: _StandInGroup(0, 1) for name in _ALONE}
    # As vLLM makes it, also where each rank has its part of every expert.
    together = ("_TP", "_WORLD", "_EP") if experts else ("_TP", "_WORLD")
    stand_ins |= {name: _StandInGroup(rank, world_size) for name in together}
    before = {name: getattr(parallel_state, name) for name in stand_ins}
    for name, group in stand_ins.items():
        setattr(parallel_state, name, group)
    try:
        yield
    finally:
        for name, group in before.items():
            setattr(parallel_state, name, group)
