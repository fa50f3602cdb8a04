"""Shows how many of a model's drafted tokens were accepted."""

from __future__ import annotations

from typing import Any


def acceptance(row: dict[str, Any], before: dict[str, Any] | None = None) -> str:
    """Returns the share of a model's drafted tokens that were accepted, as in "71 %"; "" if none were drafted. row: the daemon's
    row of the model, which counts them since the daemon's start. before: an earlier row, whose counts are subtracted; None: nothing
    is."""
    drafted, accepted = (row.get(key, 0) - (before or {}).get(key, 0) for key in ("drafted_tokens", "accepted_tokens"))
    return f"{100 * accepted / drafted:.0f} %" if drafted > 0 else ""
