"""Gives each engine of a pipeline a core of its own.

Pipeline stages wake each other: one sends its states and goes on with its next step, while the stage that it has woken begins.
Linux often wakes a thread on the core of the thread that wakes it, even if another core is idle (threads_apart.py). Two stages that
sleep in turn may then stay on one core: of two engines with a thread each, on 2 cores, each was busy for 47 % of the time, both on
one core, and for 92 % with a core of its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger("engine")
Result = TypeVar("Result")


class OwnCore:
    """Gives an engine with one compute thread a core of its own for its steps of pipelines. Between these steps the engine's
    threads may run anywhere."""

    def __init__(self, number: int, num_engines: int) -> None:
        """number: the engine's number among the num_engines of the node. With fewer cores than engines no engine has a core of its
        own."""
        cores = sorted(os.sched_getaffinity(0))
        self._core: int | None = cores[number] if num_engines <= len(cores) else None

    def run(self, step: Callable[[], Result]) -> Result:
        """Calls `step` with the calling thread bound to the engine's core, and returns its result. Afterwards the thread may run
        where it could before. If the engine has no core of its own, or if the thread cannot be bound (logged once), the step runs
        on any core."""
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
