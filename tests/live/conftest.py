"""The fixtures of live_fleet, whose helpers the tests import too."""

from __future__ import annotations

import sys
from pathlib import Path

# pytest does not put the folder on the path.
sys.path.insert(0, str(Path(__file__).parent))

from live_fleet import fleet, page, picture, snapshot

__all__ = ["fleet", "page", "picture", "snapshot"]
