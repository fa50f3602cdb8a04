"""The headers that tell a client what is left of its tenant's limits, under OpenAI's and Anthropic's names.

Sources: https://platform.openai.com/docs/guides/rate-limits and https://platform.claude.com/docs/en/api/rate-limits. Neither has
names for tokens per day; the names for those follow the same pattern.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from daemon.access.quotas import Left, Standing
from daemon.access.tenant import utc_text

_OPENAI = {"requests_per_minute": "requests", "tokens_per_minute": "tokens", "tokens_per_day": "tokens-day"}


def openai(standing: Standing, unix_s: float) -> Mapping[str, str]:
    """Returns OpenAI's headers for what is left of a tenant's limits: x-ratelimit-limit-requests and the like. The times until a
    limit is fully available again are durations such as 6m0s. unix_s: not used; the parameter makes the signature equal to that of
    `anthropic`."""
    found = {}
    for name, left in _there(standing):
        found[f"x-ratelimit-limit-{name}"] = str(left.limit)
        found[f"x-ratelimit-remaining-{name}"] = str(left.remaining)
        found[f"x-ratelimit-reset-{name}"] = duration(left.full_in_s)
    return found


def anthropic(standing: Standing, unix_s: float) -> Mapping[str, str]:
    """Returns Anthropic's headers for what is left of a tenant's limits: anthropic-ratelimit-requests-limit and the like. The times
    at which a limit is fully available again are in the form of RFC 3339. unix_s: the time now."""
    found = {}
    for name, left in _there(standing):
        found[f"anthropic-ratelimit-{name}-limit"] = str(left.limit)
        found[f"anthropic-ratelimit-{name}-remaining"] = str(left.remaining)
        found[f"anthropic-ratelimit-{name}-reset"] = utc_text(math.ceil(unix_s + left.full_in_s))
    return found


def duration(seconds: float) -> str:
    """Returns a duration in OpenAI's form: 120ms, 1s, 6m0s, 1h0m5s; rounded up."""
    if seconds < 1:
        num_ms = math.ceil(1000 * seconds)
        return f"{num_ms}ms" if 0 < num_ms < 1000 else f"{num_ms // 1000}s"
    minutes, whole_s = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{whole_s}s"
    return f"{minutes}m{whole_s}s" if minutes else f"{whole_s}s"


def _there(standing: Standing) -> list[tuple[str, Left]]:
    pairs = zip(Standing._fields, standing, strict=True)
    return [(_OPENAI[name], left) for name, left in pairs if left is not None]
