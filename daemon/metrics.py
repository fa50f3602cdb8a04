"""The node's counters as plain numbers, added to once a step or request, and rendered for Prometheus only when asked."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(slots=True)
class Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(TTFT_BUCKETS_S) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(TTFT_BUCKETS_S, seconds)] += 1
        self.total_s += seconds


def _counts() -> defaultdict[str, int]:
    return defaultdict(int)


def _pairs() -> defaultdict[tuple[str, str], int]:
    return defaultdict(int)


@dataclass(slots=True)
class Metrics:
    """Counters since start. Keys: model, (model, outcome) or device, as named."""

    requests: defaultdict[tuple[str, str], int] = field(default_factory=_pairs)
    prompt_tokens: defaultdict[str, int] = field(default_factory=_counts)
    cached_tokens: defaultdict[str, int] = field(default_factory=_counts)
    generated_tokens: defaultdict[str, int] = field(default_factory=_counts)
    steps: defaultdict[str, int] = field(default_factory=_counts)
    step_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    ttft: defaultdict[str, Histogram] = field(default_factory=lambda: defaultdict(Histogram))
    loads: defaultdict[tuple[str, str], int] = field(default_factory=_pairs)
    load_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    evictions: defaultdict[str, int] = field(default_factory=_counts)
    engine_restarts: defaultdict[str, int] = field(default_factory=_counts)
    resubmitted: int = 0
    scheduler_errors: int = 0


@dataclass(slots=True)
class Gauges:
    """What is true now; gathered by the node when somebody asks."""

    model_states: dict[str, str]  # model -> state
    queued: dict[str, int]
    active: dict[str, int]
    kv_bytes: dict[str, int]
    device_budget_bytes: dict[str, int]
    device_kv_used_bytes: dict[str, int]
    loop_stall_s: float
    draining: bool


STATES = ("cold", "warm", "loading", "ready", "paused", "draining", "failed", "refused", "disabled", "incomplete")


def render(metrics: Metrics, gauges: Gauges) -> bytes:
    """Prometheus text, version 0.0.4."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)

    class Collector:
        def collect(self) -> Iterator[Metric]:
            yield from _families(metrics, gauges)

    registry.register(Collector())
    return generate_latest(registry)


def _families(metrics: Metrics, gauges: Gauges) -> Iterator[Metric]:
    yield _counter("hearth_requests", "Requests ended, by outcome", ("model", "outcome"), metrics.requests.items())
    yield _counter("hearth_prompt_tokens", "Prompt tokens of accepted requests", ("model",), metrics.prompt_tokens.items())
    yield _counter("hearth_cached_tokens", "Prompt tokens found in the prefix cache", ("model",), metrics.cached_tokens.items())
    yield _counter("hearth_generated_tokens", "Tokens generated", ("model",), metrics.generated_tokens.items())
    yield _counter("hearth_steps", "Engine steps", ("model",), metrics.steps.items())
    yield _counter("hearth_step_seconds", "Device time of engine steps", ("model",), metrics.step_seconds.items())
    yield _counter("hearth_model_loads", "Loads, by outcome", ("model", "outcome"), metrics.loads.items())
    yield _counter("hearth_model_load_seconds", "Time spent loading", ("model",), metrics.load_seconds.items())
    yield _counter("hearth_model_evictions", "Evictions", ("model",), metrics.evictions.items())
    yield _counter("hearth_engine_restarts", "Engine processes started again", ("device",), metrics.engine_restarts.items())
    yield _counter("hearth_requests_resubmitted", "Requests continued after an engine's death", (), [((), metrics.resubmitted)])
    yield _counter("hearth_scheduler_errors", "Events the scheduler failed on", (), [((), metrics.scheduler_errors)])
    ttft = HistogramMetricFamily("hearth_time_to_first_token_seconds", "From acceptance to the first token", labels=("model",))
    for model, histogram in metrics.ttft.items():
        total, buckets = 0, []
        for edge, count in zip((*TTFT_BUCKETS_S, "+Inf"), histogram.counts, strict=True):
            total += count
            buckets.append((str(edge), total))
        ttft.add_metric((model,), buckets, histogram.total_s)
    yield ttft
    states = GaugeMetricFamily("hearth_model_state", "1 for the state the model is in", labels=("model", "state"))
    for model, state in gauges.model_states.items():
        for name in STATES:
            states.add_metric((model, name), float(name == state))
    yield states
    yield _gauge("hearth_requests_queued", "Requests waiting", "model", gauges.queued)
    yield _gauge("hearth_requests_active", "Sequences in the engine", "model", gauges.active)
    yield _gauge("hearth_kv_bytes", "KV in use", "model", gauges.kv_bytes)
    yield _gauge("hearth_device_budget_bytes", "The device's whole budget", "device", gauges.device_budget_bytes)
    yield _gauge("hearth_device_kv_used_bytes", "KV chunks in use", "device", gauges.device_kv_used_bytes)
    yield GaugeMetricFamily(
        "hearth_event_loop_stall_seconds_max", "Longest time the event loop was held", value=gauges.loop_stall_s
    )
    yield GaugeMetricFamily("hearth_draining", "1 while no new request is accepted", value=float(gauges.draining))


def _counter(
    name: str, text: str, labels: tuple[str, ...], rows: Iterable[tuple[str | tuple[str, ...], float]]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in rows:
        family.add_metric((key,) if isinstance(key, str) else key, value)
    return family


def _gauge(name: str, text: str, label: str, rows: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=(label,))
    for key, value in rows.items():
        family.add_metric((key,), value)
    return family
