"""Interprets and checks the setting `warm`, which says when a model is loaded ahead of its requests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import time

AT_START = "start"
FORM = 'must be a time of day such as "08:00", "start", or a list of those'
_TIME = re.compile(r"([01]\d|2[0-3]):([0-5]\d)\Z")


def check(value: str | list[str]) -> None:
    """Checks the entries of the setting `warm`. Raises ValueError unless each is "start" or a time of day (HH:MM) and all of them
    differ."""
    entries = _entries(value)
    if not all(each == AT_START or _TIME.match(each) for each in entries):
        raise ValueError(FORM)
    if len(set(entries)) < len(entries):
        raise ValueError("names a time twice")


def is_at_start(value: str | list[str] | None) -> bool:
    return AT_START in _entries(value)


def times(value: str | list[str] | None) -> list[time]:
    """Returns the times of day in the setting `warm`, in ascending order; the entry "start" is left out."""
    return sorted(time(int(found[1]), int(found[2])) for each in _entries(value) if (found := _TIME.match(each)) is not None)


def _entries(value: str | list[str] | None) -> Sequence[str]:
    return [] if value is None else [value] if isinstance(value, str) else value
