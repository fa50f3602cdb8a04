"""How many of a model's drafted tokens were accepted, in words."""

from __future__ import annotations

from typing import Any


def acceptance(row: dict[str, Any], before: dict[str, Any] | None = None) -> str:
    """Returns the share of the drafted tokens that were accepted, as in "71 %"; "" if none were drafted. row: a model's, of the
    daemon. before: an earlier one, since which is counted; None: since the daemon's start."""
    drafted, accepted = (row.get(key, 0) - (before or {}).get(key, 0) for key in ("drafted_tokens", "accepted_tokens"))
    return f"{100 * accepted / drafted:.0f} %" if drafted > 0 else ""
