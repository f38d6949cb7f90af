"""What the workers of another machine have installed."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class WorkerVersions(BaseModel):
    """Versions that are part of a build's id, as pip lists them where the workers run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    vllm: str = Field(min_length=1)
    torch: str = Field(min_length=1)
    tensorizer: str = Field(min_length=1)
