"""The node's counters as plain numbers, increased once per step or request; daemon/metrics/page.py renders them when asked."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from daemon.access.tenant import OTHER
from daemon.contracts import Generation
from daemon.metrics.expert_counts import ExpertCounts
from daemon.metrics.families import NUM_TENANTS
from daemon.metrics.histogram import WAIT_BUCKETS_S, Histogram
from daemon.metrics.swaps import SwapCounts

TOKEN_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)
REQUEST_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


def _counts() -> defaultdict[str, int]:
    return defaultdict(int)


def _pairs() -> defaultdict[tuple[str, str], int]:
    return defaultdict(int)


def _histograms(edges_s: Sequence[float]) -> defaultdict[str, Histogram]:
    return defaultdict(lambda: Histogram(edges_s))


@dataclass(slots=True)
class TenantCounts:
    """Counters by tenant, for /metrics. The NUM_TENANTS tenants with the most tokens have labels of their own in the metrics; all
    others share one label. A request is counted once, under the label that its tenant has when the request ends, so the count of a
    label never falls."""

    requests: defaultdict[tuple[str, str], int] = field(default_factory=_pairs)  # (label, outcome)
    prompt_tokens: defaultdict[str, int] = field(default_factory=_counts)
    cached_tokens: defaultdict[str, int] = field(default_factory=_counts)
    generated_tokens: defaultdict[str, int] = field(default_factory=_counts)
    limit_refused: defaultdict[tuple[str, str], int] = field(default_factory=_pairs)  # (label, limit)
    named: set[str] = field(default_factory=set)
    _tokens: defaultdict[str, int] = field(default_factory=_counts)  # tokens of each tenant, for `rank`

    def label(self, tenant: str) -> str:
        if tenant not in self.named:
            if len(self.named) >= NUM_TENANTS:
                return OTHER
            self.named.add(tenant)
        return tenant

    def rank(self) -> None:
        """Gives labels of their own to the tenants with the most tokens. It is called once for each scrape of /metrics."""
        if len(self._tokens) > NUM_TENANTS:
            self.named = set(sorted(self._tokens, key=lambda tenant: -self._tokens[tenant])[:NUM_TENANTS])

    def over_limit(self, tenant: str, limit: str) -> None:
        """Counts a request that was refused because of a tenant's limit. limit: the limit's name in the keys file."""
        self.limit_refused[self.label(tenant), limit] += 1

    def ended(self, generation: Generation) -> None:
        if not generation.tenant:
            return
        num_prompt, num_generated = generation.num_prompt_tokens, generation.num_output_tokens
        self._tokens[generation.tenant] += num_prompt + num_generated
        label = self.label(generation.tenant)
        self.requests[label, generation.outcome] += 1
        self.prompt_tokens[label] += num_prompt
        self.cached_tokens[label] += generation.num_cached
        self.generated_tokens[label] += num_generated


@dataclass(slots=True)
class Metrics:
    """All counters since the daemon's start. Most are dicts by model, and requests and loads by (model, outcome). engine_restarts
    and engine_stalls are by device, access_refused by reason, reloads by outcome; comments name the keys of others. queue, ttft,
    per_token, request_time: histograms of seconds, by model. tenants: counters by tenant. swaps: the costs of swapping models.
    experts: how many tokens have passed through the experts of models."""

    requests: defaultdict[tuple[str, str], int] = field(default_factory=_pairs)
    prompt_tokens: defaultdict[str, int] = field(default_factory=_counts)
    cached_tokens: defaultdict[str, int] = field(default_factory=_counts)
    generated_tokens: defaultdict[str, int] = field(default_factory=_counts)
    drafted_tokens: defaultdict[str, int] = field(default_factory=_counts)  # and the accepted ones among them
    accepted_tokens: defaultdict[str, int] = field(default_factory=_counts)
    adapter_loads: defaultdict[str, int] = field(default_factory=_counts)
    adapter_load_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    steps: defaultdict[str, int] = field(default_factory=_counts)
    step_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    queue: defaultdict[str, Histogram] = field(default_factory=lambda: _histograms(WAIT_BUCKETS_S))
    ttft: defaultdict[str, Histogram] = field(default_factory=lambda: _histograms(WAIT_BUCKETS_S))
    per_token: defaultdict[str, Histogram] = field(default_factory=lambda: _histograms(TOKEN_BUCKETS_S))
    request_time: defaultdict[str, Histogram] = field(default_factory=lambda: _histograms(REQUEST_BUCKETS_S))
    loads: defaultdict[tuple[str, str], int] = field(default_factory=_pairs)
    load_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    evictions: defaultdict[str, int] = field(default_factory=_counts)
    engine_restarts: defaultdict[str, int] = field(default_factory=_counts)
    engine_stalls: defaultdict[str, int] = field(default_factory=_counts)
    text_deaths: defaultdict[str, int] = field(default_factory=_counts)  # by cause
    gpu_faults: defaultdict[tuple[str, str], int] = field(default_factory=_pairs)  # (device, xid)
    answers: defaultdict[tuple[str, str], int] = field(default_factory=_pairs)  # (endpoint, status)
    access_refused: defaultdict[str, int] = field(default_factory=_counts)
    reloads: defaultdict[str, int] = field(default_factory=_counts)
    tenants: TenantCounts = field(default_factory=TenantCounts)
    swaps: SwapCounts = field(default_factory=SwapCounts)
    experts: ExpertCounts = field(default_factory=ExpertCounts)
    resubmitted: int = 0
    scheduler_errors: int = 0

    def count_answer(self, endpoint: str, status: int) -> None:
        self.answers[endpoint or "unknown", str(status)] += 1

    def count_refused(self, reason: str) -> None:
        self.access_refused[reason] += 1

    def submitted(self, generation: Generation) -> None:
        """Counts the time that a request has waited until it was submitted to an engine for the first time."""
        self.queue[generation.model.name].add(generation.submitted_s - generation.arrived_s)

    def ended(self, generation: Generation) -> None:
        """Counts a request that has ended, with its outcome, tokens and times."""
        model, num_output = generation.model.name, generation.num_output_tokens
        self.requests[model, generation.outcome] += 1
        self.tenants.ended(generation)
        now = time.monotonic()
        if generation.outcome != "refused":
            self.request_time[model].add(now - generation.arrived_s)
        if generation.reported is not None:
            self.prompt_tokens[model] += generation.num_prompt_tokens
            self.cached_tokens[model] += generation.num_cached
            self.generated_tokens[model] += num_output
            if generation.first_token_s:
                self.ttft[model].add(generation.first_token_s - generation.arrived_s)
        if num_output > 1 and generation.first_token_s:
            self.per_token[model].add((now - generation.first_token_s) / (num_output - 1))
