"""Does an engine's idle work while nothing runs and no message arrives: captures steps, collects garbage and prepares memory."""

from __future__ import annotations

from engine.lifecycle.lifecycle import Lifecycle
from engine.loop.garbage_collector import GarbageCollector
from engine.loop.pulse import Doing
from engine.loop.step_journal import StepJournal
from engine.memory.preparing import Preparer
from engine.serve.served_models import ServedModels

COLLECT_AFTER_IDLE_S = 1.0
CAPTURE_AFTER_IDLE_S = 0.02


class IdleWork:
    """The work that one engine's loop does while the engine is idle. preparer: prepares memory in huge pages; None for null models,
    which have no memory."""

    def __init__(
        self,
        models: ServedModels,
        collector: GarbageCollector,
        preparer: Preparer | None,
        lifecycle: Lifecycle,
        journal: StepJournal,
    ) -> None:
        self._models, self._collector, self._preparer = models, collector, preparer
        self._lifecycle, self._journal = lifecycle, journal

    def wait_s(self, num_steps: int) -> float | None:
        """Returns how many seconds the engine must have been idle before the next part of its idle work is done; None if there is
        no idle work. num_steps: how many steps the engine has run, which decides whether garbage collection is due."""
        if self._models.uncaptured() is not None:
            return CAPTURE_AFTER_IDLE_S
        if self._collector.wanted(num_steps):
            return COLLECT_AFTER_IDLE_S
        return None if self._preparer is None or self._lifecycle.busy else self._preparer.wait_s()

    def step(self, num_steps: int) -> None:
        """Does a small part of the engine's idle work: captures steps, if there are any to capture; else collects garbage, if that
        is due; else prepares memory. num_steps: how many steps the engine has run."""
        self._journal.beat(Doing.TURN)
        if self._models.uncaptured() is not None:
            self._journal.beat(Doing.CAPTURE)
            self._models.capture_next()
        elif self._collector.wanted(num_steps):
            self._collector.collect(num_steps, bool(self._models.busy()))
        elif self._preparer is not None:
            self._preparer.step()
