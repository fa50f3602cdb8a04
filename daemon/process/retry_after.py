"""Reads the header Retry-After (RFC 9110, section 10.2.3) of other servers' answers."""

from __future__ import annotations

import math
import time
from email.utils import parsedate_to_datetime


def seconds(header: str | None) -> float | None:
    """Returns the seconds that the server asks to wait, 0 or more; the header may be a number or a date. None: the header is
    missing or invalid."""
    if not header:
        return None
    try:
        wait_s = float(header)
    except ValueError:
        try:
            wait_s = parsedate_to_datetime(header.strip()).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return max(0.0, wait_s) if math.isfinite(wait_s) else None
