"""The catalog, as Dagster hands it to assets."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import dagster as dg
from pydantic import Field

from tensorize_assets.core.catalog import Catalog, load_catalog, resolve_bundle, resolve_root


class CatalogResource(dg.ConfigurableResource["CatalogResource"]):
    """Reads the catalog file anew for each use, so that an edit needs no reload of the location."""

    path: str = Field(
        description="The catalog file (models.yaml); with `content`, a file that need not exist, "
        "in the folder that the catalog's paths are relative to."
    )
    content: str | None = Field(
        default=None,
        description="The catalog itself, as JSON, where it is in no file of its own. A change "
        "counts when Dagster loads the code location again.",
    )

    def catalog(self) -> Catalog:
        """The catalog as it is now. Raises CatalogError with every mistake in it."""
        if self.content is None:
            return load_catalog(Path(self.path))
        return _parsed(self.content, self.path)

    def root(self) -> str:
        """Where artifacts go: an s3:// URI, or an absolute folder."""
        return resolve_root(self.catalog(), Path(self.path))


@lru_cache(maxsize=4)
def _parsed(content: str, path: str) -> Catalog:
    """A catalog of thousands takes a second to parse, and a step asks for it often."""
    return resolve_bundle(Catalog.model_validate_json(content), Path(path))
