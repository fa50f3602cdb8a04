"""Python's garbage collector, off the hot path: it runs when nothing else does, or every few thousand steps."""

from __future__ import annotations

import gc

EVERY_STEPS = 4096


class Collector:
    """What a load leaves and what an evicted model was is frozen: it is looked at once nothing runs. To look at a load's objects
    when it ends would hold up its first tokens, by a tenth of a second where kernels have just been imported."""

    def __init__(self) -> None:
        self._steps_at_last = 0
        self._must_thaw = False

    def start(self) -> None:
        """From now on nothing is collected but by `collect`."""
        gc.disable()
        gc.freeze()

    def loaded(self) -> None:
        gc.freeze()
        self.thaw_later()

    def thaw_later(self) -> None:
        self._must_thaw = True

    def wanted(self, num_steps: int) -> bool:
        """In idle time."""
        return num_steps > self._steps_at_last or self._must_thaw

    def overdue(self, num_steps: int) -> bool:
        return num_steps - self._steps_at_last >= EVERY_STEPS

    def collect(self, num_steps: int, busy: bool) -> None:
        self._steps_at_last = num_steps
        thaw = self._must_thaw and not busy
        if thaw:
            self._must_thaw = False
            gc.unfreeze()
        gc.collect()
        if thaw:
            gc.freeze()
