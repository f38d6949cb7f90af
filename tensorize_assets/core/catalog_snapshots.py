"""Where workers read the Hub's files, as the catalog says it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Snapshots(BaseModel):
    """Whether the Hub's files are kept in the root too, for workers on other machines."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mirror: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Whether the Hub's files are kept under snapshots/ in the root, each once. "
        "auto: where workers run on other machines, which read them there.",
    )
    encrypted_only: bool = Field(
        default=False,
        strict=True,
        description="true: also those of models and adapters that have a profile with encryption: "
        "only. They are as the Hub has them, not encrypted: whoever reads the root reads them.",
    )
