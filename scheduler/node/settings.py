"""The settings of the node scheduler that an operator can change."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class SchedulerSettings:
    """The settings of a node scheduler, with units in the fields' names. All but chunk_bytes and host_tier_slots may change while
    it runs (`NodeScheduler.reconfigure`)."""

    chunk_bytes: int = 2 * 1024 * 1024
    load_deadline_s: float | None = None  # None: max(20, 4 x predicted)
    overdue_after_s: float = 10.0
    max_wait_s: float = 60.0
    max_queued_per_model: int = 256  # for models whose own max_queued is 0
    max_queued_per_tenant: int = 0  # most of these requests that one named tenant may have; 0: half of them
    window_per_sequence: int = 2  # a model has at most that many times max_sequences requests in its engine
    tenure_s: float = 0.5  # a busy model is not made to leave before max(tenure_s, tenure_reloads x its reload) after it came
    tenure_reloads: float = 2.0
    evict_deadline_s: float = 10.0  # time for an eviction or a roll-back, after which the engine is restarted
    retry_load_s: float = 1.0  # wait after the first failed load; doubles with each further one
    failed_loads: int = 3  # failed loads in a row after which a model is quarantined
    quarantine_s: float = 60.0  # length of the first quarantine; doubles with each further one
    max_quarantine_s: float = 3600.0
    max_crashes: int = 2  # a request ends after it was running in so many engine crashes
    crash_faults: int = 2  # so many such requests within crash_window_s quarantine the model
    crash_window_s: float = 600.0
    drain_retry_after_s: float = 5.0
    bandwidth_bytes_per_s: float = 1e9  # bandwidth of loads from disk until it has been measured
    load_overhead_s: float = 0.2
    copy_bytes_per_s: float = 4e9  # bandwidth between host memory and a device until it has been measured
    host_tier_slots: int = 0  # host memory for weights and saved KV, in slots of chunk_bytes
    drain_timeout_s: float = 30.0  # requests of a model whose folder is gone run at least so long before overdue work ends them
    preempt_after_s: float = 1.0  # a busy victim may drain at least so long before it is paused
    preempt_after_swaps: float = 0.5  # and until the work it leaves for is overdue by so many times what its pause costs
