"""What a tensorizer file can say of itself: more is damage, or an attack on whoever makes room.

tensorizer makes room for whatever a file says that its parts take.
"""

from __future__ import annotations

import re

MAX_HEADER_BYTES = 2 << 20
"""Of a tensor's header, which grows by 16 bytes for each 2 MiB of an encrypted tensor."""

DTYPE = re.compile(r"[<>=|]?[a-zA-Z?]\d{0,2}")
"""numpy's names of types that files have. Others are a language, and its parser's errors any."""
