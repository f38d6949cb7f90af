"""The JSON schema of the catalog, for editors that complete and check models.yaml.

`python -m tensorize_assets.core.catalog_schema [FILE]` writes it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tensorize_assets.core.catalog import Catalog

SCHEMA_FILE = Path("dagster_home/models.schema.json")


def catalog_json_schema() -> dict[str, Any]:
    """The schema of a catalog file."""
    return {
        # The newest draft that every editor's YAML support knows; nothing here needs a later one.
        "$schema": "http://json-schema.org/draft-07/schema#",
        **Catalog.model_json_schema(),
    }


def catalog_schema_text() -> str:
    """The schema as it stands in the file that editors read."""
    return json.dumps(catalog_json_schema(), indent=2) + "\n"


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else SCHEMA_FILE
    target.write_text(catalog_schema_text(), encoding="utf-8")
