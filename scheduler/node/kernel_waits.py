"""Records when loads waited for their kernels to be compiled. This time does not count as a request's waiting time, because
compilation happens only once on a machine and takes longer than a load."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from scheduler.report_intervals import KERNEL_WAIT_EVERY_S

LAPSE_S = 2.0  # a load for which no wait was reported for so long does not wait any more
MOST_KEPT = 64  # most waits remembered; each kind of model is compiled once, for some seconds at least


@dataclass(slots=True)
class KernelWait:
    devices: tuple[str, ...]
    since: float
    until: float


class KernelWaits:
    """The latest periods in which loads waited for their kernels to be compiled, in the order of their beginnings. All times are
    monotonic seconds."""

    def __init__(self) -> None:
        self._waits: deque[KernelWait] = deque(maxlen=MOST_KEPT)

    def reported(self, devices: tuple[str, ...], now: float) -> None:
        """Records that a load on these devices has reported, at the time `now`, that it waits for its kernels to be compiled."""
        for wait in self._waits:
            if wait.devices == devices and wait.until >= now:
                wait.until = now + LAPSE_S
                return
        self._waits.append(KernelWait(devices, now - KERNEL_WAIT_EVERY_S, now + LAPSE_S))

    def seconds(self, devices: Collection[str], since: float) -> float:
        """Returns for how many seconds after the time `since` loads on any of the devices have waited for kernels. A wait that
        still continues counts until its next report is due, so the result may include up to LAPSE_S that have not passed yet."""
        total_s, counted_to = 0.0, since
        for wait in self._waits:
            if wait.until > counted_to and any(name in wait.devices for name in devices):
                total_s += wait.until - max(wait.since, counted_to)
                counted_to = wait.until
        return total_s
