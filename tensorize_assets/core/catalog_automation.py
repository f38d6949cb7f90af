"""What a catalog says about the work that nobody starts by hand."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

_FIELDS = 5
_BUILD_ID = "^[0-9a-f]{12}$"

CRON_WANTED = (
    "a cron expression of five fields: minute, hour, day of the month, month, day of the week, "
    'such as "0 3 * * 0" for Sundays at 03:00 UTC'
)


def _cron(value: str) -> str:
    # Only catalogs that set one import it.
    from croniter import croniter

    # Dagster takes five fields; croniter would take seconds and years too.
    if len(value.split()) != _FIELDS or not croniter.is_valid(value):
        raise ValueError(f"is not {CRON_WANTED}")
    try:
        croniter(value, datetime.now(UTC)).get_next()
    except ValueError:
        raise ValueError("names a day that never comes, such as 31 February") from None
    return value


def _protected(value: str) -> str:
    if re.fullmatch(_BUILD_ID, value) is None:
        raise ValueError(
            "is not a build id: write its 12 hex digits, as `tensorize show` prints them, without "
            "the suffix"
        )
    return value


Cron = Annotated[
    str,
    AfterValidator(_cron),
    WithJsonSchema({"type": "string", "pattern": r"^\s*\S+(\s+\S+){4}\s*$"}),
]


ProtectedId = Annotated[
    str, AfterValidator(_protected), WithJsonSchema({"type": "string", "pattern": _BUILD_ID})
]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RevisionWatch(_Settings):
    """How new commits are found."""

    every_seconds: int = Field(
        default=300,
        strict=True,
        ge=5,
        le=86_400,
        description="How often, in seconds, the Hub is asked for each revision that a profile "
        "follows. A webhook of the Hub goes before it (`tensorize webhook`).",
    )
    alert_after: int = Field(
        default=3,
        strict=True,
        ge=1,
        le=1000,
        description="A repo that the Hub refuses or does not answer for is reported after this "
        "many failures in a row.",
    )


class Audit(_Settings):
    """How what is published is read again."""

    cron: Cron = Field(
        default="0 2 * * *", description="When published bytes are read and hashed again (UTC)."
    )
    within_days: int = Field(
        default=30,
        strict=True,
        ge=1,
        le=3650,
        description="Every published byte is read once in this many days, if the audit runs daily.",
    )


class Retention(_Settings):
    """How long builds are kept."""

    cron: Cron = Field(default="0 4 * * *", description="When it is looked for what can go (UTC).")
    keep: int = Field(
        default=3,
        strict=True,
        ge=1,
        le=1000,
        description="The newest builds of each channel that are kept, current ones included.",
    )
    days: int = Field(
        default=14,
        strict=True,
        ge=1,
        le=3650,
        description="Nothing younger than this many days is removed.",
    )
    delete: bool = Field(
        default=False,
        strict=True,
        description="false: only report what would be removed. true: remove it.",
    )


class Automation(_Settings):
    """Sensors and schedules. An edited cron counts when Dagster loads the code location again."""

    revisions: RevisionWatch = Field(
        default=RevisionWatch(), description="How new commits are found."
    )
    retensorize: Cron = Field(
        default="0 3 * * 0",
        description="When builds are made again whose profile or versions of vLLM, torch or "
        "tensorizer changed (UTC).",
    )
    audit: Audit = Field(default=Audit(), description="How what is published is read again.")
    retention: Retention = Field(default=Retention(), description="How long builds are kept.")
    protect: tuple[ProtectedId, ...] = Field(
        default=(),
        description="Builds, by their id of 12 hex digits, that retention never removes.",
    )
