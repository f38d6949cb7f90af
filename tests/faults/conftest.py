"""Faults and attacks against the whole of it. The helpers of the chain's tests are at hand."""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = Path(__file__).parent
for _folder in (_HERE, _HERE.parent / "assets", _HERE.parent / "core"):
    sys.path.insert(0, str(_folder))
