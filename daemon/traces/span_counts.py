"""Counts spans, for /metrics."""

from __future__ import annotations


class SpanCounts:
    """The numbers of spans since the start. num_dropped: not taken by the collector."""

    __slots__ = ("num_dropped", "num_sent")

    def __init__(self) -> None:
        self.num_sent = self.num_dropped = 0
