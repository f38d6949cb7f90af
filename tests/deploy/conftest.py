"""The helpers of these tests, and of the chain's; pytest does not put their folders on the path."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "assets")]
