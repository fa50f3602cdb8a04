"""Lists all metrics of /metrics, each with its name, kind, unit, labels and meaning. docs/reference/metrics.md is made from this
table by `python -m daemon.metrics.families`, and /metrics contains only metrics of this table.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
NUM_TENANTS = 20  # that have a label of their own


class Family(NamedTuple):
    """One metric of /metrics. name: with _total for a counter, without _bucket for a histogram. kind: COUNTER, GAUGE or HISTOGRAM.
    unit: "" for plain numbers. labels: their names. meaning: the help text."""

    name: str
    kind: str
    unit: str
    labels: tuple[str, ...]
    meaning: str


def _of(kind: str, name: str, unit: str, labels: str, meaning: str) -> Family:
    return Family(name, kind, unit, tuple(labels.split()), meaning)


FAMILIES = (
    # requests, by model
    _of(COUNTER, "hearth_requests_total", "requests", "model outcome",
        "Sequences that ended: stop, length, cancelled, refused, failed or timeout. A request for several counts several times"),
    _of(COUNTER, "hearth_prompt_tokens_total", "tokens", "model", "Prompt tokens of accepted requests"),
    _of(COUNTER, "hearth_cached_tokens_total", "tokens", "model", "Of them, found in the prefix cache"),
    _of(COUNTER, "hearth_generated_tokens_total", "tokens", "model", "Tokens generated, counted with each step"),
    _of(COUNTER, "hearth_drafted_tokens_total", "tokens", "model",
        "Tokens that were guessed, or forced by a grammar, and computed before they were sampled"),
    _of(COUNTER, "hearth_accepted_tokens_total", "tokens", "model", "Of them, tokens that the model then chose itself"),
    _of(HISTOGRAM, "hearth_queue_seconds", "seconds", "model", "From acceptance until an engine has the request"),
    _of(HISTOGRAM, "hearth_time_to_first_token_seconds", "seconds", "model", "From acceptance to the first token"),
    _of(HISTOGRAM, "hearth_time_per_output_token_seconds", "seconds", "model",
        "A request's mean time between its tokens, for those with two or more"),
    _of(HISTOGRAM, "hearth_request_seconds", "seconds", "model", "From acceptance to the end"),
    _of(GAUGE, "hearth_requests_queued", "requests", "model", "Waiting for their model, or for a place in its engine"),
    _of(GAUGE, "hearth_requests_active", "requests", "model", "Handed to the engine and not ended"),
    # models
    _of(GAUGE, "hearth_model_state", "", "model state",
        "1 for the state the model is in, else 0: cold, warm, loading, ready, paused, draining, failed, refused, head, "
        "disabled, incomplete"),
    _of(GAUGE, "hearth_upstream_up", "", "model", "1 while the server that answers for the name (upstream) can be used"),
    _of(GAUGE, "hearth_model_weights_bytes", "bytes", "model device", "Weights in a device's memory"),
    _of(GAUGE, "hearth_kv_bytes", "bytes", "model device", "KV of running sequences"),
    _of(GAUGE, "hearth_kv_cached_bytes", "bytes", "model device", "KV kept for prefixes nobody uses now; given up when needed"),
    _of(COUNTER, "hearth_model_loads_total", "loads", "model outcome", "Loads: done or failed"),
    _of(COUNTER, "hearth_model_load_seconds_total", "seconds", "model", "Time spent in loads that were done"),
    _of(GAUGE, "hearth_model_adapters", "adapters", "model", "Its LoRA adapters in the device's memory"),
    _of(GAUGE, "hearth_model_adapter_bytes", "bytes", "model", "Memory of them, part of what KV may use"),
    _of(COUNTER, "hearth_adapter_loads_total", "loads", "model", "LoRA adapters that were read into the device's memory"),
    _of(COUNTER, "hearth_adapter_load_seconds_total", "seconds", "model", "Time that reading and copying them took"),
    _of(COUNTER, "hearth_model_evictions_total", "evictions", "model", "Evictions"),
    _of(GAUGE, "hearth_model_host_bytes", "bytes", "model", "Its weights kept in host memory, loaded or not"),
    _of(GAUGE, "hearth_model_saved_kv_tokens", "tokens", "model", "Whose KV was saved at an eviction and waits in host memory"),
    _of(COUNTER, "hearth_model_preemptions_total", "preemptions", "model",
        "Times the model was paused: taken from its device for overdue work while requests ran"),
    _of(COUNTER, "hearth_requests_paused_total", "requests", "model", "Requests that were paused with it, once for each time"),
    _of(COUNTER, "hearth_kv_tokens_total", "tokens", "model what",
        "Tokens whose KV was saved at an eviction; of requests that went on after a pause or a crash, those whose KV was restored, "
        "and those for which it was recomputed"),
    _of(COUNTER, "hearth_steps_total", "steps", "model", "Engine steps"),
    _of(COUNTER, "hearth_step_seconds_total", "seconds", "model", "Device time of engine steps"),
    _of(COUNTER, "hearth_expert_tokens_total", "tokens", "model device",
        "Tokens that passed through the model's experts on the device; a token counts once at each of its experts in each layer"),
    _of(GAUGE, "hearth_expert_imbalance", "", "model",
        "How many times as many tokens the busiest expert of a layer has as the mean one, both added up over the layers, since the "
        "daemon's start; 1: all have as many"),
    # devices
    _of(GAUGE, "hearth_device_up", "", "device", "1 while its engine is up"),
    _of(GAUGE, "hearth_device_budget_bytes", "bytes", "device", "All hearthd may use there"),
    _of(GAUGE, "hearth_device_work_space_bytes", "bytes", "device", "Of it, kept for what one step computes with"),
    _of(GAUGE, "hearth_device_held_bytes", "bytes", "device", "Of it, weights and reserved KV of the models there"),
    _of(GAUGE, "hearth_device_lease_bytes", "bytes", "device", "Of it, KV that all models there may draw on"),
    _of(GAUGE, "hearth_device_kv_used_bytes", "bytes", "device", "KV chunks in use, reserved or drawn"),
    _of(COUNTER, "hearth_device_preemptions_total", "preemptions", "device",
        "Sequences put back to make room, to be computed again; from 0 when the engine starts"),
    _of(COUNTER, "hearth_kv_moved_bytes_total", "bytes", "device",
        "KV copied within the device so that sparse chunks came free; from 0 when the engine starts"),
    _of(GAUGE, "hearth_device_chunks", "chunks", "device state",
        "Its chunks of memory: work_space, weights, kv (with a block in use or kept), free; together the budget"),
    _of(COUNTER, "hearth_engine_restarts_total", "restarts", "device", "Engine processes started again"),
    _of(COUNTER, "hearth_engine_stalls_total", "stalls", "device",
        "Of them, those that were killed because they gave no sign of life (engine_stall_s)"),
    _of(COUNTER, "hearth_text_worker_deaths_total", "deaths", "cause",
        "Processes for templates and tokenizers that ended unasked: stalled (killed after text_stall_s), memory, cpu_time, "
        "crashed, killed (by somebody else), helper (with the process that forks them), unknown"),
    _of(GAUGE, "hearth_text_jobs", "jobs", "", "Work on requests' texts that is not done yet"),
    _of(COUNTER, "hearth_gpu_faults_total", "faults", "device xid", "Faults (Xid) the driver has reported of a cuda device's GPU"),
    _of(GAUGE, "hearth_device_planned_bytes", "bytes", "device", "What the ledger says is in use: weights and KV chunks"),
    _of(GAUGE, "hearth_device_measured_bytes", "bytes", "device",
        "What its engine process really has in memory, host memory it has mapped and its libraries included"),
    _of(COUNTER, "hearth_out_of_memory_total", "failures", "device",
        "Loads that failed for want of memory, and engines the kernel killed for it; it stays 0"),
    # moving models
    _of(GAUGE, "hearth_host_tier_bytes", "bytes", "kind",
        "Host memory for weights and KV: free, in transit (being written), kept weights, saved kv"),
    _of(COUNTER, "hearth_swap_ins_total", "loads", "tier reason",
        "Loads that were done, by where the weights came from (disk, host; device: left there by an engine that died) and why: "
        "request, resumed (paused, or after a crash), operator, pinned"),
    _of(COUNTER, "hearth_swap_outs_total", "evictions", "tier reason",
        "Evictions, by where the weights are left (disk, host) and why: room, preempted, kv, operator, rolled_back, removed, "
        "idle (its keep_alive is over), share_lost (it was split, and the engine of another share died)"),
    _of(COUNTER, "hearth_swap_seconds_total", "seconds", "phase",
        "Time swaps took: drain (until a victim's requests had ended), save (KV to host memory), evict (the rest of an eviction), "
        "read (from disk), copy (from host memory), map (mapping calls)"),
    _of(HISTOGRAM, "hearth_eviction_age_seconds", "seconds", "", "How long a model had been ready when it was evicted"),
    # tenants
    _of(COUNTER, "hearth_tenant_requests_total", "requests", "tenant outcome", "Sequences that ended"),
    _of(COUNTER, "hearth_tenant_prompt_tokens_total", "tokens", "tenant", "Prompt tokens of sequences that ended"),
    _of(COUNTER, "hearth_tenant_cached_tokens_total", "tokens", "tenant", "Of them, found in the prefix cache"),
    _of(COUNTER, "hearth_tenant_generated_tokens_total", "tokens", "tenant", "Tokens generated by sequences that ended"),
    _of(GAUGE, "hearth_tenant_requests_open", "requests", "tenant", "Accepted and not ended"),
    _of(COUNTER, "hearth_tenant_limit_refused_total", "requests", "tenant limit",
        "Requests refused for a limit of the keys file: requests_per_minute, tokens_per_minute, tokens_per_day"),
    _of(GAUGE, "hearth_tenant_tokens_today", "tokens", "tenant",
        "Prompt and output tokens that count for this day (UTC), as tokens_per_day counts them"),
    # the node
    _of(COUNTER, "hearth_http_answers_total", "answers", "endpoint status",
        "HTTP answers by status; 499 where the client had gone before the end. A stream counts when it has ended"),
    _of(COUNTER, "hearth_requests_resubmitted_total", "requests", "",
        "Requests given to an engine again, after its death or an eviction"),
    _of(COUNTER, "hearth_access_refused_total", "requests", "reason",
        "Refused at the door: no_key, wrong_key, expired_key, no_admin, other_host, other_origin"),
    _of(COUNTER, "hearth_reloads_total", "reloads", "outcome", "Readings of the settings after the start: applied or refused"),
    _of(GAUGE, "hearth_config_reload_failing", "", "",
        "1 while the last reading of the settings or the keys was refused and older ones are in use; `hearth status` says why"),
    _of(GAUGE, "hearth_state_not_saved", "", "",
        "1 while pins, switched-off models and loaded adapters could not be written to state_dir; `hearth status` says why"),
    _of(GAUGE, "hearth_tls_certificate_expiry_time_seconds", "seconds", "",
        "Unix time at which the certificate of new connections expires; absent without TLS"),
    _of(COUNTER, "hearth_audit_dropped_total", "acts", "",
        "Acts that are not in the audit log, because its disk was too slow or could not be written"),
    _of(COUNTER, "hearth_trace_spans_sent_total", "spans", "", "Spans of traces that the collector has taken"),
    _of(COUNTER, "hearth_trace_spans_dropped_total", "spans", "",
        "Spans that it has not: it was away, too slow or did not want them; `hearth status` says why"),
    _of(COUNTER, "hearth_scheduler_errors_total", "events", "", "Events the node scheduler failed on; each is a fault of hearthd"),
    _of(COUNTER, "hearth_cpu_seconds_total", "seconds", "", "CPU time of the daemon's own process"),
    _of(GAUGE, "hearth_event_loop_stall_seconds_max", "seconds", "", "Longest time the event loop was held since the start"),
    _of(GAUGE, "hearth_draining", "", "", "1 while no new request is accepted"),
    _of(GAUGE, "hearth_start_time_seconds", "seconds", "", "When the daemon started, in Unix time"),
    _of(GAUGE, "hearth_info", "", "version", "1, with the version as a label"),
    # as vLLM calls it, for routers
    _of(GAUGE, "vllm:num_requests_running", "requests", "model_name", "In the engine's batch"),
    _of(GAUGE, "vllm:num_requests_waiting", "requests", "model_name", "Not in it yet, wherever they wait"),
    _of(GAUGE, "vllm:kv_cache_usage_perc", "", "model_name", "KV of running sequences over what the model could have; from 0 to 1"),
)  # fmt: skip
BY_NAME = {family.name: family for family in FAMILIES}

_INTRO = f"""# Metrics

Made from `daemon/metrics/families.py` by `python -m daemon.metrics.families`; do not edit by hand.

`GET /metrics` answers in Prometheus' text format. `GET /m/MODEL/metrics` has the same for one model: the families with a label
`model` or `model_name`. Where keys are set both need one (`Authorization: Bearer KEY`, or the key as the password of Basic
authentication; as soon as a tenant has `admin = true`, only keys of such tenants open them), unless `admin_listen` names a second
listener: then they are there, without a key if its address is this machine's own, and no longer on the first one.

Units are base units: seconds, bytes. Counters start at 0 with the daemon. A `model` is its name, never an alias. A `tenant` is one
of the {NUM_TENANTS} with most tokens, the others together are `other`; a tenant that becomes one of them starts at 0 (what it had
before stays with `other`), so `rate()` is right for all of them. Without keys there are no tenants. The names with `vllm:` are
those that routers read. [hearthd-dashboard.json](../hearthd-dashboard.json) is a Grafana dashboard made of these metrics.

| name | kind | unit | labels | meaning |
|---|---|---|---|---|
"""


def reference() -> str:
    rows = []
    for name, kind, unit, labels, meaning in FAMILIES:
        rows.append(f"| `{name}` | {kind} | {unit} | {', '.join(f'`{label}`' for label in labels)} | {meaning} |\n")
    return _INTRO + "".join(rows)


if __name__ == "__main__":
    sys.stdout.write(reference())
