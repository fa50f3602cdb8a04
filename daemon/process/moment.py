"""A point in time by both clocks."""

from __future__ import annotations

import time
from typing import NamedTuple


class Moment(NamedTuple):
    """A point in time. monotonic_s: by the clock that nobody sets, for durations. unix_s: for dates."""

    monotonic_s: float
    unix_s: float


def now() -> Moment:
    return Moment(time.monotonic(), time.time())
