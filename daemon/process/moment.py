"""A point in time, read from the monotonic clock and from the system's clock."""

from __future__ import annotations

import time
from typing import NamedTuple


class Moment(NamedTuple):
    """A point in time. monotonic_s: seconds of the monotonic clock, for durations. unix_s: Unix time by the system's clock, for
    dates."""

    monotonic_s: float
    unix_s: float


def now() -> Moment:
    return Moment(time.monotonic(), time.time())
