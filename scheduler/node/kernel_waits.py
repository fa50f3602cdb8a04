"""When loads waited for their kernels to be compiled. That is no part of the time that a request may wait: it comes once on a
machine, takes longer than a load and is nobody's turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

TOLD_EVERY_S = 1.0  # engines tell so often that a load waits, for the first time after so long
LAPSE_S = 2.0  # a load that was not told to wait for so long does not wait any more
MOST_KEPT = 64  # each kind of model is compiled once, for some seconds at least


@dataclass(slots=True)
class KernelWait:
    devices: tuple[str, ...]
    since: float
    until: float


class KernelWaits:
    """The last of these times, in the order of their beginnings."""

    def __init__(self) -> None:
        self._waits: deque[KernelWait] = deque(maxlen=MOST_KEPT)

    def told(self, devices: tuple[str, ...], now: float) -> None:
        """Notes that a load on these devices waits for kernels."""
        for wait in self._waits:
            if wait.devices == devices and wait.until >= now:
                wait.until = now + LAPSE_S
                return
        self._waits.append(KernelWait(devices, now - TOLD_EVERY_S, now + LAPSE_S))

    def seconds(self, devices: Collection[str], since: float) -> float:
        """Returns for how long since then loads on any of the devices have waited or, as long as they were just told to, will."""
        total_s, counted_to = 0.0, since
        for wait in self._waits:
            if wait.until > counted_to and any(name in wait.devices for name in devices):
                total_s += wait.until - max(wait.since, counted_to)
                counted_to = wait.until
        return total_s
