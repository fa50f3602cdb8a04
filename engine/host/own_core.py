"""Gives each engine of a pipeline a core of its own.

In a pipeline a stage sends its states, which wakes the next stage, and goes on with its own next step while the next stage begins.
Linux often wakes a thread on the core of the thread that wakes it, even if another core is idle (threads_apart.py). Two stages that
sleep in turn may then stay on one core. Measured with two engines of one thread each on 2 cores: both were busy for 47 % of the
time when they shared a core, and for 92 % with a core of their own."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger("engine")
Result = TypeVar("Result")


class OwnCore:
    """Binds an engine with one compute thread to a core of its own while it computes a step of a model that is split into pipeline
    stages. Between these steps the engine's threads may run on any core."""

    def __init__(self, number: int, num_engines: int) -> None:
        """number: the engine's number among the num_engines engines of the node. If there are fewer cores than engines, no engine
        has a core of its own."""
        cores = sorted(os.sched_getaffinity(0))
        self._core: int | None = cores[number] if num_engines <= len(cores) else None

    def run(self, step: Callable[[], Result]) -> Result:
        """Calls `step` with the calling thread bound to the engine's core, and returns its result. Afterwards the thread may run on
        the same cores as before the call. If the engine has no core of its own, or the thread cannot be bound (logged once), the
        step runs without binding."""
        if self._core is None:
            return step()
        free_to = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, {self._core})
        except OSError as error:
            log.warning("the stages of a pipeline stay on the cores where they wake: %s", error)
            self._core = None
            return step()
        try:
            return step()
        finally:
            os.sched_setaffinity(0, free_to)
