"""Steps of a model launched as the engine's loop launches them: the next one before the last is read."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.gpu_shapes import Bench
from scheduler.batch.plan import BatchPlan

IN_FLIGHT = 2


class StepSeconds(NamedTuple):
    """Holds the mean seconds of a step. wall: by the clock. device: between its first and its last work there, with what the device
    waits for the host in between. host: until it was launched."""

    wall: float
    device: float
    host: float


def pipelined(bench: Bench, plan: Callable[[int], BatchPlan], steps: int) -> StepSeconds:
    """Runs steps; plan: of step number n."""
    pending: list[Any] = []
    device_s = host_s = 0.0
    began_s = time.perf_counter()
    for number in range(steps):
        if len(pending) == IN_FLIGHT:
            device_s += pending.pop(0).wait().seconds
        launched_s = time.perf_counter()
        pending.append(bench.model.launch(plan(number), bench.table))
        host_s += time.perf_counter() - launched_s
    device_s += sum(step.wait().seconds for step in pending)
    return StepSeconds((time.perf_counter() - began_s) / steps, device_s / steps, host_s / steps)
