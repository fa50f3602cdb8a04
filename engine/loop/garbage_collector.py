"""Runs Python's garbage collector where it delays no step: when nothing else runs, or every few thousand steps."""

from __future__ import annotations

import gc

EVERY_STEPS = 4096


class GarbageCollector:
    """Decides when Python's garbage collector runs. The objects that a load has made are frozen (gc.freeze), so that collections
    skip them, until the first collection while nothing runs examines them. Examining them at the end of the load would delay the
    model's first tokens, by a tenth of a second if kernels have just been imported."""

    def __init__(self) -> None:
        self._steps_at_last = 0
        self._must_thaw = False

    def start(self) -> None:
        """Turns Python's automatic garbage collection off: from now on garbage is collected only by `collect`."""
        gc.disable()
        gc.freeze()

    def loaded(self) -> None:
        gc.freeze()
        self.thaw_later()

    def thaw_later(self) -> None:
        self._must_thaw = True

    def wanted(self, num_steps: int) -> bool:
        """Returns whether there is something to collect in idle time: steps have run since the last collection, or there are frozen
        objects to examine. num_steps: number of steps run so far."""
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
