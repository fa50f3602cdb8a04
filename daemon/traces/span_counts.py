"""Counts spans, for /metrics."""

from __future__ import annotations


class SpanCounts:
    """The numbers of spans since the daemon's start. num_sent: accepted by the collector. num_dropped: lost, because the queue was
    full or the collector did not accept them."""

    __slots__ = ("num_dropped", "num_sent")

    def __init__(self) -> None:
        self.num_sent = self.num_dropped = 0
