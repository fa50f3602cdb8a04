"""Records the outcome of each simulated request, and computes the figures that summarise a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import ceil
from typing import Any

from scheduler.simulate.trace import TraceRequest


@dataclass(slots=True, eq=False)
class RequestOutcome:
    request_id: int
    request: TraceRequest
    missed: bool = False  # its model was not ready when it arrived: it waited for a load
    submitted_s: float | None = None  # time when it was first submitted to an engine
    began_s: float = 0.0  # time when the engine last began to compute its prompt
    first_token_s: float | None = None
    finished_s: float | None = None
    refusal: str = ""
    tokens_done: int = 0
    num_resubmissions: int = 0

    @property
    def wait_s(self) -> float:
        """Seconds from arrival to first token. It is infinite for a request without a first token, so that a policy does not seem
        fast because it refuses requests."""
        return float("inf") if self.first_token_s is None else self.first_token_s - self.request.time_s


@dataclass(slots=True)
class Swaps:
    """Counts of a run's loads and evictions, of the bytes that the loads moved, and of the tokens whose KV was saved and
    restored."""

    num_disk_loads: int = 0
    num_host_loads: int = 0
    num_evictions: int = 0
    num_preemptions: int = 0  # evictions of models with running requests
    disk_bytes: int = 0
    host_bytes: int = 0  # bytes copied from host memory instead of being read
    saved_kv_tokens: int = 0  # tokens of preempted requests whose KV was saved in host memory
    restored_kv_tokens: int = 0


@dataclass(slots=True)
class ModelFigures:
    num_requests: int
    miss_rate: float
    mean_wait_s: float | None
    p99_wait_s: float | None
    slo_attainment: float


@dataclass(slots=True)
class Figures:
    """The figures of one run. Waits are from arrival to first token. A refused request counts as an infinite wait; figures that
    would be infinite are None."""

    policy: str
    num_requests: int
    num_refused: int
    miss_rate: float
    mean_wait_s: float | None
    p50_wait_s: float | None
    p99_wait_s: float | None
    mean_queue_s: float | None  # mean time from arrival to submission to an engine
    slo_attainment: float
    worst_model: str
    worst_slo_attainment: float
    swaps: Swaps
    duration_s: float  # time from the first arrival to the last end
    models: dict[str, ModelFigures] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def figures(policy: str, outcomes: Sequence[RequestOutcome], swaps: Swaps, slo_s: float) -> Figures:
    """Returns the figures of a policy's run, computed from the outcomes of all its requests. slo_s: the objective: the seconds
    within which the first token of a request must come."""
    by_model: dict[str, list[RequestOutcome]] = defaultdict(list)
    for outcome in outcomes:
        by_model[outcome.request.model].append(outcome)
    models = {name: _model_figures(some, slo_s) for name, some in sorted(by_model.items())}
    worst = min(models, key=lambda name: (models[name].slo_attainment, name), default="")
    waits = sorted(outcome.wait_s for outcome in outcomes)
    queued = [one.submitted_s - one.request.time_s for one in outcomes if one.submitted_s is not None]
    ends = [one.finished_s for one in outcomes if one.finished_s is not None]
    return Figures(
        policy=policy,
        num_requests=len(outcomes),
        num_refused=sum(bool(one.refusal) for one in outcomes),
        miss_rate=_share(sum(one.missed for one in outcomes), len(outcomes)),
        mean_wait_s=finite(_mean(waits)),
        p50_wait_s=finite(percentile(waits, 0.50)),
        p99_wait_s=finite(percentile(waits, 0.99)),
        mean_queue_s=finite(_mean(queued)),
        slo_attainment=_share(sum(wait <= slo_s for wait in waits), len(waits)),
        worst_model=worst,
        worst_slo_attainment=models[worst].slo_attainment if worst else 0.0,
        swaps=swaps,
        duration_s=max(ends, default=0.0) - min((one.request.time_s for one in outcomes), default=0.0),
        models=models,
    )


def _model_figures(outcomes: Sequence[RequestOutcome], slo_s: float) -> ModelFigures:
    waits = sorted(outcome.wait_s for outcome in outcomes)
    return ModelFigures(
        num_requests=len(outcomes),
        miss_rate=_share(sum(one.missed for one in outcomes), len(outcomes)),
        mean_wait_s=finite(_mean(waits)),
        p99_wait_s=finite(percentile(waits, 0.99)),
        slo_attainment=_share(sum(wait <= slo_s for wait in waits), len(waits)),
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Returns the smallest value that is at least as large as the given share (0 to 1) of all values; 0.0 if there are none.
    ordered: the values in ascending order."""
    if not ordered:
        return 0.0
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


def finite(value: float) -> float | None:
    """Returns the value, or None if it is infinite, because JSON has no infinity."""
    return None if value == float("inf") else value


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
