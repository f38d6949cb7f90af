"""The header Retry-After (RFC 9110, 10.2.3)."""

from __future__ import annotations

import time
from contextlib import suppress
from email.utils import mktime_tz, parsedate_tz


def retry_after(said: str | None) -> float | None:
    """Return the seconds until the server wants to be asked again; None where it does not say."""
    said = (said or "").strip()
    if said.isdecimal():
        return float(said[:9])
    with suppress(ValueError, OverflowError):
        date = parsedate_tz(said)
        if date is not None:
            return max(0.0, mktime_tz(date) - time.time())
    return None
