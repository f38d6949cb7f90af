"""The catalog file, as Dagster hands it to assets."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
from pydantic import Field

from tensorize_assets.core.catalog import Catalog, load_catalog, resolve_root


class CatalogResource(dg.ConfigurableResource["CatalogResource"]):
    """Reads the catalog anew for each use, so that an edit needs no reload of the location."""

    path: str = Field(description="The catalog file (models.yaml).")

    def catalog(self) -> Catalog:
        """The catalog as it is now. Raises CatalogError with every mistake in it."""
        return load_catalog(Path(self.path))

    def root(self) -> str:
        """Where artifacts go: an s3:// URI, or an absolute folder."""
        return resolve_root(self.catalog(), Path(self.path))
