"""A histogram with cumulative buckets, as Prometheus expects it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

WAIT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    __slots__ = ("counts", "edges_s", "total_s")

    def __init__(self, edges_s: Sequence[float] = WAIT_BUCKETS_S) -> None:
        """Makes an empty histogram. edges_s: the buckets' upper edges, in seconds; values above the last one are counted too."""
        self.edges_s = edges_s
        self.counts = [0] * (len(edges_s) + 1)
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.edges_s, seconds)] += 1
        self.total_s += seconds
