"""What one rank asks for of the cluster that it runs on."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

# The units of Kubernetes' quantities; Ray gets bytes.
_UNITS = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
}
QUANTITY_PATTERN = r"^[1-9][0-9]*(?:[kMGT]|[KMGT]i)?$"


def _quantity(value: str) -> str:
    if re.fullmatch(QUANTITY_PATTERN, value) is None:
        raise ValueError("is not an amount of bytes; write a number with its unit, such as 16Gi")
    return value


def bytes_of(quantity: str) -> int:
    """The bytes of a quantity such as `16Gi`."""
    number = re.match(r"[0-9]+", quantity)
    assert number is not None
    return int(number[0]) * _UNITS[quantity[number.end() :]]


Quantity = Annotated[
    str, AfterValidator(_quantity), WithJsonSchema({"type": "string", "pattern": QUANTITY_PATTERN})
]


class RankResources(BaseModel):
    """What each rank of a model gets where the launcher is a cluster.

    GPUs are not among them: a rank that computes on one gets one, and no other does.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu: float | None = Field(
        default=None, gt=0, le=1024, allow_inf_nan=False, description="CPU cores of each rank."
    )
    memory: Quantity | None = Field(
        default=None,
        description="Memory of each rank, such as 16Gi: the largest shard and half as much again.",
    )
    ephemeral_storage: Quantity | None = Field(
        default=None,
        description="Disk of each rank for scratch, such as 40Gi. Kubernetes only.",
    )
    custom: dict[str, float] = Field(
        default={},
        description="Other resources by name: Ray's custom resources, or Kubernetes' extended "
        "ones.",
    )

    def over(self, defaults: RankResources | None) -> RankResources:
        """These, and what they leave open of `defaults`."""
        if defaults is None:
            return self
        custom = {**defaults.custom, **self.custom}
        given = self.model_dump(exclude_none=True, exclude={"custom"})
        return defaults.model_copy(update={**given, "custom": custom})
