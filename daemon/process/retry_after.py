"""Reads the header Retry-After (RFC 9110, section 10.2.3) of other servers' answers."""

from __future__ import annotations

import math
import time
from email.utils import parsedate_to_datetime


def seconds(header: str | None) -> float | None:
    """Returns for how many seconds from now a server's header Retry-After asks to wait, 0 or more. The header may be a number of
    seconds or a date. None: the header is missing or invalid."""
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
