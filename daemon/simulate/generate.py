"""Generates traces of requests: models are chosen by Zipf's law, and the requests for each model come in bursts or at random
moments over the whole time."""

from __future__ import annotations

import random
from bisect import bisect_left
from itertools import accumulate

from daemon.simulate.trace_shape import TraceShape
from scheduler.simulate.trace import TraceRequest


def generate(shape: TraceShape) -> list[TraceRequest]:
    """Returns the requests of a generated trace, in the order of time. The same shape, which includes the seed, gives the same
    trace on every machine."""
    draw = random.Random(shape.seed)
    ranked = list(shape.models)
    draw.shuffle(ranked)
    weights = [(rank + 1) ** -shape.zipf for rank in range(len(ranked))]
    found: list[TraceRequest] = []
    for model, weight in zip(ranked, weights, strict=True):
        own = random.Random(f"{shape.seed}:{model}")
        number = max(1, round(shape.requests_per_s * shape.duration_s * weight / sum(weights)))
        phases = _phases(own, shape) if shape.arrivals == "bursty" else [(0.0, shape.duration_s)]
        found += [
            TraceRequest(round(at, 3), model, own.randint(*shape.input_tokens), own.randint(*shape.output_tokens))
            for at in _times(own, phases, number)
        ]
    return sorted(found, key=lambda request: (request.time_s, request.model))


def _phases(draw: random.Random, shape: TraceShape) -> list[tuple[float, float]]:
    """Returns the phases in which a model is requested, at least one, as (begin, end) in seconds from the trace's begin. Their
    lengths and the pauses between them are exponentially distributed."""
    rest_s = shape.burst_s * (1 - shape.active_share) / shape.active_share
    phases: list[tuple[float, float]] = []
    while not phases:
        active = draw.random() < shape.active_share
        at = 0.0
        while at < shape.duration_s:
            mean_s = shape.burst_s if active else rest_s
            end = at + (draw.expovariate(1 / mean_s) if mean_s else 0.0)
            if active:
                phases.append((at, min(end, shape.duration_s)))
            at, active = end, not active
    return phases


def _times(draw: random.Random, phases: list[tuple[float, float]], number: int) -> list[float]:
    """Returns `number` moments in seconds, unsorted, sampled uniformly from all phases together."""
    ends = list(accumulate(end - begin for begin, end in phases))
    times = []
    for _ in range(number):
        at = draw.uniform(0.0, ends[-1])
        index = min(bisect_left(ends, at), len(phases) - 1)
        times.append(phases[index][1] - (ends[index] - at))
    return times
