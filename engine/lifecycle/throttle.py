"""Slows reads and copies down for tests and benchmarks (Configure.test_disk_bytes_per_s and test_copy_bytes_per_s)."""

from __future__ import annotations

import time
from collections.abc import Callable

_LOOK_EVERY_S = 0.02


def hold(started_s: float, num_bytes: int, bytes_per_s: int, cancelled: Callable[[], bool]) -> None:
    """Sleeps until num_bytes bytes, moved at bytes_per_s from started_s (time.monotonic()) on, would have arrived, or until
    cancelled() returns True. bytes_per_s 0: there is no limit, and the call returns at once."""
    if not bytes_per_s:
        return
    due_s = started_s + num_bytes / bytes_per_s
    while (left_s := due_s - time.monotonic()) > 0 and not cancelled():
        time.sleep(min(left_s, _LOOK_EVERY_S))
