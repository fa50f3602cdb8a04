"""What the scheduler shows: plain values, copied when asked for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class ModelView:
    name: str
    state: str
    device: str  # "" when on none
    weights_bytes: int
    kv_reserved_bytes: int
    active: int  # requests submitted to the engine
    queued: int
    pinned: bool
    last_used: float | None  # monotonic seconds of its last arrival or end of a request
    reason: str
    placement_id: int | None  # of its copy, else of the placement under way
    progress: tuple[int, int] | None  # bytes done and total of a load under way
    kept_bytes: int = 0  # of its weights in host memory
    saved_kv_tokens: int = 0  # whose KV is in host memory
    quarantined_until: float | None = None  # monotonic seconds


@dataclass(slots=True, frozen=True)
class DeviceView:
    name: str
    up: bool
    budget_bytes: int
    chunk_bytes: int
    total_chunks: int
    work_space_chunks: int
    held: dict[str, int]  # model -> chunks of weights and reserved KV
    weights_chunks: int  # of the held ones
    promised_chunks: int
    lease_chunks: int
    loading: str  # model, or ""
    num_waiting: int  # models that want to come here
    problem: str  # an overdue roll-back, or ""


@dataclass(slots=True, frozen=True)
class HostTierView:
    num_slots: int
    slot_bytes: int
    slots: dict[str, int]  # by kind: free, transit, weights, kv


@dataclass(slots=True, frozen=True)
class QueuedView:
    request_id: int
    model: str
    tenant: str
    position: int  # in its model's queue, from 0
    arrived: float  # monotonic seconds
    resubmission: bool
