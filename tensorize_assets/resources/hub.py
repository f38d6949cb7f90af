"""Access to the Hugging Face Hub."""

from __future__ import annotations

import os
from pathlib import Path

import dagster as dg
from pydantic import Field, SecretStr

from tensorize_assets.core.hub_access import HubAccess


class HubResource(dg.ConfigurableResource["HubResource"]):
    """Where the Hub is and where its files are kept. The token comes from HF_TOKEN alone."""

    endpoint: str | None = Field(
        default=None, description="URL of the Hub; HF_ENDPOINT or huggingface.co if not set."
    )
    cache_dir: str = Field(
        description="Folder for downloaded snapshots, in the layout of the Hub's own cache. "
        "Needs room for the largest model."
    )

    def access(self) -> HubAccess:
        """What core/hub needs."""
        token = os.environ.get("HF_TOKEN")
        return HubAccess(
            endpoint=self.endpoint or os.environ.get("HF_ENDPOINT"),
            token=SecretStr(token) if token else None,
            cache_dir=Path(self.cache_dir),
        )
