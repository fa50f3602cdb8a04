"""Steps of a model launched as the engine's loop launches them: the next one before the last is read; and how long the device
really works in them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

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


def busy_s(bench: Bench, plan: Callable[[int], BatchPlan], steps: int) -> float:
    """Runs steps under torch's profiler, and returns the mean seconds of a step in which the device executes something, which
    waits for the host are not; 0 if the profiler was told nothing. plan: of step number n."""
    with profiling(bench.device) as profiler:
        pipelined(bench, plan, steps)
    return executed_us(profiler, bench.device) * 1e-6 / steps


def profiling(device: str) -> profile:
    """Returns a profiler of what the device executes: kernels and copies of a GPU, torch's operations on a CPU."""
    return profile(activities=[ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU])


def executed_us(profiler: profile, device: str) -> float:
    """Returns the microseconds in which the device has executed something while a profiler ran, each of them counted once."""
    kind = DeviceType.CUDA if device == "cuda" else DeviceType.CPU
    ranges = [event.time_range for event in profiler.events() or () if event.device_type == kind]
    return covered((each.start, each.end) for each in ranges)


def covered(ranges: Iterable[tuple[float, float]]) -> float:
    """Returns how much of a line these ranges (begin, end) cover together."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(ranges):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
