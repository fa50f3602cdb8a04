"""A point in time, read from both clocks."""

from __future__ import annotations

import time
from typing import NamedTuple


class Moment(NamedTuple):
    """A point in time. monotonic_s: by the monotonic clock, for durations. unix_s: by the system's clock, for dates."""

    monotonic_s: float
    unix_s: float


def now() -> Moment:
    return Moment(time.monotonic(), time.time())
