"""The error for a request over one of its tenant's limits: it tells the limit, what is left of it, and when the request would
fit."""

from __future__ import annotations

import math

from daemon.access.limit_headers import duration
from daemon.access.quotas import OverLimit
from daemon.errors import BadRequest, HearthError, NotNow

_MAY = {
    "requests_per_minute": "may send {} requests a minute",
    "tokens_per_minute": "may use {} tokens a minute",
    "tokens_per_day": "may use {} tokens a day",
}


def error_of(over: OverLimit, tenant: str, field: str) -> HearthError:
    """Returns the error for a request over a limit: 429 with OpenAI's type for that limit (requests or tokens), or 400 for a
    request that can never fit. tenant: the tenant's name. field: the body's field that holds the prompt."""
    limit, left = over.left.limit, over.left.remaining
    may = f"The tenant {tenant!r} {_MAY[over.limit].format(limit)} ({over.limit})"
    if over.fits_in_s is None:
        more = over.needed - limit
        message = (
            f"{may}, and the prompt ({field}) has {over.needed} tokens, {more} more than all of that: it never fits. Send less."
        )
        return BadRequest("request_over_limit", message, param=field)
    wait_s = max(1, math.ceil(over.fits_in_s))
    if over.limit == "requests_per_minute":
        kind, why = "requests", "the next one fits"
    else:
        kind, why = "tokens", f"{left} are left, and the prompt ({field}) has {over.needed}; it fits"
    when = f"in {duration(wait_s)}" + (", at 00:00 UTC" if over.limit == "tokens_per_day" else "")
    return NotNow("rate_limit_exceeded", f"{may}; {why} {when}.", status=429, retry_after_s=wait_s, kind=kind)
