"""Renders /metrics as text: the counters (`counters.py`) and the current values, in the families of `families.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from daemon.access.tenant import OTHER
from daemon.metrics.counters import Metrics, TenantCounts
from daemon.metrics.families import BY_NAME, COUNTER, HISTOGRAM
from daemon.metrics.histogram import Histogram

STATES = ("cold", "warm", "loading", "ready", "paused", "draining", "failed", "refused", "head", "disabled", "incomplete")
Key = str | tuple[str, ...]


@dataclass(slots=True)
class ModelNow:
    """A model's current values for /metrics. queued: requests that wait. active: requests that were handed to the engine. running:
    the requests among `active` that are in the engine's batch. kv_bytes: KV in use by running sequences. kv_cached_bytes: KV of
    cached prefixes. kv_share: kv_bytes as a share, from 0 to 1, of the KV that the model could have. host_bytes: weights in the
    host tier."""

    state: str
    device: str = ""
    weights_bytes: int = 0
    kv_bytes: int = 0
    kv_cached_bytes: int = 0
    kv_share: float = 0.0
    queued: int = 0
    active: int = 0
    running: int = 0
    host_bytes: int = 0
    saved_kv_tokens: int = 0
    adapters: int = 0  # LoRA adapters in the device's memory
    adapter_bytes: int = 0


@dataclass(slots=True)
class DeviceNow:
    up: bool
    budget_bytes: int
    work_space_bytes: int = 0
    held_bytes: int = 0
    lease_bytes: int = 0
    kv_used_bytes: int = 0
    preemptions: int = 0
    kv_moved_bytes: int = 0
    chunks: dict[str, int] = field(default_factory=dict)  # by state
    planned_bytes: int = 0
    measured_bytes: int = 0


@dataclass(slots=True)
class UpstreamNow:
    """Current values, for /metrics, of a model name that another server answers. up: whether that server can be used. active:
    requests that run on it. queued: requests that wait on this node."""

    up: bool
    active: int
    queued: int


@dataclass(slots=True)
class Now:
    """The node's current values, gathered for one scrape of /metrics. models, devices, upstreams: by name. tenants_open: the number
    of open requests, by tenant. loop_stall_s: the longest time, in seconds, for which the event loop was blocked."""

    version: str
    models: dict[str, ModelNow]
    devices: dict[str, DeviceNow] = field(default_factory=dict)
    tenants_open: dict[str, int] = field(default_factory=dict)
    tenants_today: Mapping[str, int] = field(default_factory=dict)  # tokens of each tenant
    started_unix_s: float = 0.0
    cpu_s: float = 0.0
    loop_stall_s: float = 0.0
    text_jobs: int = 0
    draining: bool = False
    reload_refused: bool = False
    state_not_saved: bool = False
    audit_dropped: int = 0
    tls_expiry_unix_s: float | None = None  # None without TLS
    spans_sent: int = 0
    spans_dropped: int = 0
    host_tier_bytes: dict[str, int] = field(default_factory=dict)  # by kind
    upstreams: dict[str, UpstreamNow] = field(default_factory=dict)  # by model


def render(metrics: Metrics, now: Now, model: str | None = None) -> bytes:
    """Returns /metrics: the counters and current values in Prometheus' text format, version 0.0.4. model: the only model to
    include, without metrics that have no label for a model; None: everything."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)

    class ScrapedMetrics:
        def collect(self) -> Iterator[Metric]:
            for name, rows in _all(metrics, now):
                if model is None:
                    yield _family(name, rows)
                elif BY_NAME[name].labels[:1] in (("model",), ("model_name",)):
                    yield _family(name, ((key, value) for key, value in rows if _first(key) == model))

    registry.register(ScrapedMetrics())
    return generate_latest(registry)


Rows = Iterable[tuple[Key, float | Histogram]]


def _all(metrics: Metrics, now: Now) -> Iterator[tuple[str, Rows]]:
    tenants = metrics.tenants
    tenants.rank()
    yield "hearth_requests_total", metrics.requests.items()
    yield "hearth_prompt_tokens_total", metrics.prompt_tokens.items()
    yield "hearth_cached_tokens_total", metrics.cached_tokens.items()
    yield "hearth_generated_tokens_total", metrics.generated_tokens.items()
    yield "hearth_drafted_tokens_total", metrics.drafted_tokens.items()
    yield "hearth_accepted_tokens_total", metrics.accepted_tokens.items()
    yield "hearth_queue_seconds", metrics.queue.items()
    yield "hearth_time_to_first_token_seconds", metrics.ttft.items()
    yield "hearth_time_per_output_token_seconds", metrics.per_token.items()
    yield "hearth_request_seconds", metrics.request_time.items()
    busy: Mapping[str, ModelNow | UpstreamNow] = {**now.models, **now.upstreams}
    yield "hearth_requests_queued", ((name, one.queued) for name, one in busy.items())
    yield "hearth_requests_active", ((name, one.active) for name, one in busy.items())
    yield "hearth_upstream_up", ((name, one.up) for name, one in now.upstreams.items())
    yield "hearth_model_state", (((name, state), one.state == state) for name, one in now.models.items() for state in STATES)
    placed = {(name, one.device): one for name, one in now.models.items() if one.device}
    yield "hearth_model_weights_bytes", ((key, one.weights_bytes) for key, one in placed.items())
    yield "hearth_kv_bytes", ((key, one.kv_bytes) for key, one in placed.items())
    yield "hearth_kv_cached_bytes", ((key, one.kv_cached_bytes) for key, one in placed.items())
    yield "hearth_model_loads_total", metrics.loads.items()
    yield "hearth_model_load_seconds_total", metrics.load_seconds.items()
    yield "hearth_model_adapters", ((name, one.adapters) for name, one in now.models.items())
    yield "hearth_model_adapter_bytes", ((name, one.adapter_bytes) for name, one in now.models.items())
    yield "hearth_adapter_loads_total", metrics.adapter_loads.items()
    yield "hearth_adapter_load_seconds_total", metrics.adapter_load_seconds.items()
    yield "hearth_model_evictions_total", metrics.evictions.items()
    yield "hearth_steps_total", metrics.steps.items()
    yield "hearth_step_seconds_total", metrics.step_seconds.items()
    yield "hearth_expert_tokens_total", metrics.experts.of_device.items()
    yield "hearth_expert_imbalance", metrics.experts.imbalances()
    devices = now.devices.items()
    yield "hearth_device_up", ((name, one.up) for name, one in devices)
    yield "hearth_device_budget_bytes", ((name, one.budget_bytes) for name, one in devices)
    yield "hearth_device_work_space_bytes", ((name, one.work_space_bytes) for name, one in devices)
    yield "hearth_device_held_bytes", ((name, one.held_bytes) for name, one in devices)
    yield "hearth_device_lease_bytes", ((name, one.lease_bytes) for name, one in devices)
    yield "hearth_device_kv_used_bytes", ((name, one.kv_used_bytes) for name, one in devices)
    yield "hearth_device_preemptions_total", ((name, one.preemptions) for name, one in devices)
    yield "hearth_kv_moved_bytes_total", ((name, one.kv_moved_bytes) for name, one in devices)
    yield "hearth_device_chunks", (((name, state), num) for name, one in devices for state, num in one.chunks.items())
    yield "hearth_device_planned_bytes", ((name, one.planned_bytes) for name, one in devices)
    yield "hearth_device_measured_bytes", ((name, one.measured_bytes) for name, one in devices)
    swaps = metrics.swaps
    yield "hearth_out_of_memory_total", ((name, swaps.out_of_memory[name]) for name in now.devices)
    yield "hearth_model_host_bytes", ((name, one.host_bytes) for name, one in now.models.items())
    yield "hearth_model_saved_kv_tokens", ((name, one.saved_kv_tokens) for name, one in now.models.items())
    yield "hearth_model_preemptions_total", ((name, swaps.pauses[name]) for name in now.models)
    yield "hearth_requests_paused_total", ((name, swaps.paused_requests[name]) for name in now.models)
    yield "hearth_kv_tokens_total", swaps.kv_tokens.items()
    yield "hearth_host_tier_bytes", now.host_tier_bytes.items()
    yield "hearth_swap_ins_total", swaps.ins.items()
    yield "hearth_swap_outs_total", swaps.outs.items()
    yield "hearth_swap_seconds_total", swaps.phase_seconds.items()
    yield "hearth_eviction_age_seconds", [((), swaps.age)]
    yield "hearth_engine_restarts_total", metrics.engine_restarts.items()
    yield "hearth_engine_stalls_total", metrics.engine_stalls.items()
    yield "hearth_text_worker_deaths_total", metrics.text_deaths.items()
    yield "hearth_text_jobs", [((), now.text_jobs)]
    yield "hearth_gpu_faults_total", metrics.gpu_faults.items()
    shown = {*tenants.named, OTHER}
    yield "hearth_tenant_requests_total", ((key, value) for key, value in tenants.requests.items() if key[0] in shown)
    yield "hearth_tenant_prompt_tokens_total", _of(shown, tenants.prompt_tokens)
    yield "hearth_tenant_cached_tokens_total", _of(shown, tenants.cached_tokens)
    yield "hearth_tenant_generated_tokens_total", _of(shown, tenants.generated_tokens)
    yield "hearth_tenant_requests_open", _by_label(tenants, now.tenants_open)
    yield "hearth_tenant_limit_refused_total", ((key, value) for key, value in tenants.limit_refused.items() if key[0] in shown)
    yield "hearth_tenant_tokens_today", _by_label(tenants, now.tenants_today)
    yield "hearth_http_answers_total", metrics.answers.items()
    yield "hearth_requests_resubmitted_total", [((), metrics.resubmitted)]
    yield "hearth_access_refused_total", metrics.access_refused.items()
    yield "hearth_reloads_total", metrics.reloads.items()
    yield "hearth_config_reload_failing", [((), now.reload_refused)]
    yield "hearth_state_not_saved", [((), now.state_not_saved)]
    yield "hearth_tls_certificate_expiry_time_seconds", [] if now.tls_expiry_unix_s is None else [((), now.tls_expiry_unix_s)]
    yield "hearth_audit_dropped_total", [((), now.audit_dropped)]
    yield "hearth_trace_spans_sent_total", [((), now.spans_sent)]
    yield "hearth_trace_spans_dropped_total", [((), now.spans_dropped)]
    yield "hearth_scheduler_errors_total", [((), metrics.scheduler_errors)]
    yield "hearth_cpu_seconds_total", [((), now.cpu_s)]
    yield "hearth_event_loop_stall_seconds_max", [((), now.loop_stall_s)]
    yield "hearth_draining", [((), now.draining)]
    yield "hearth_start_time_seconds", [((), now.started_unix_s)]
    yield "hearth_info", [(now.version, 1)]
    yield "vllm:num_requests_running", ((name, one.running) for name, one in now.models.items())
    yield "vllm:num_requests_waiting", ((name, one.queued + one.active - one.running) for name, one in now.models.items())
    yield "vllm:kv_cache_usage_perc", ((name, one.kv_share) for name, one in now.models.items())


def _by_label(tenants: TenantCounts, numbers: Mapping[str, int]) -> Rows:
    """Returns, for each label of tenants in the metrics, (label, the sum of its tenants' numbers), where a label without any has 0.
    numbers: tenant -> number."""
    found = dict.fromkeys(tenants.named, 0)
    for tenant, number in numbers.items():
        label = tenants.label(tenant)
        found[label] = found.get(label, 0) + number
    return found.items()


def _of(shown: set[str], counts: Mapping[str, int]) -> Rows:
    return ((key, value) for key, value in counts.items() if key in shown)


def _first(key: Key) -> str:
    return key if isinstance(key, str) else key[0]


def _family(name: str, rows: Rows) -> Metric:
    kind, labels, meaning = BY_NAME[name].kind, BY_NAME[name].labels, BY_NAME[name].meaning
    if kind == HISTOGRAM:
        histograms = HistogramMetricFamily(name, meaning, labels=labels)
        for key, value in rows:
            assert isinstance(value, Histogram)
            histograms.add_metric(_values(key), _buckets(value), value.total_s)
        return histograms
    family = CounterMetricFamily(name.removesuffix("_total"), meaning, labels=labels) if kind == COUNTER else None
    one: CounterMetricFamily | GaugeMetricFamily = family or GaugeMetricFamily(name, meaning, labels=labels)
    for key, value in rows:
        assert not isinstance(value, Histogram)
        one.add_metric(_values(key), float(value))
    return one


def _values(key: Key) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Returns (upper edge in seconds, count) of each bucket. A bucket's count includes those of all lower buckets, as Prometheus
    requires; the last edge is "+Inf"."""
    total, buckets = 0, []
    for edge, count in zip((*histogram.edges_s, "+Inf"), histogram.counts, strict=True):
        total += count
        buckets.append((str(edge), float(total)))
    return buckets
