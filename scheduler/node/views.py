"""Defines what the scheduler shows to others: plain values, which are copied from its state on request."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(slots=True, frozen=True)
class ModelView:
    name: str
    state: str
    device: str  # "" if on none; for a split model the names of its devices, such as "cpu:0+cpu:1"
    weights_bytes: int  # bytes of each share if the model is split; the same holds for the next field
    kv_reserved_bytes: int
    active: int  # requests submitted to the engine
    queued: int
    pinned: bool
    last_used: float | None  # monotonic seconds of the last arrival or end of one of its requests
    reason: str
    placement_id: int | None  # id of the placement of its copy, else of the placement under way
    progress: tuple[int, int] | None  # (bytes done, bytes in all) of a load under way
    devices: tuple[str, ...] = ()  # the devices named in `device`, by rank
    num_ranks: int = 1  # how many devices it is split over; 1: it is whole
    expert_copies: int = 0  # the most experts of other devices that a device holds copies of in a layer
    kept_bytes: int = 0  # bytes of its weights in host memory
    saved_kv_tokens: int = 0  # number of tokens whose KV is in host memory
    quarantined_until: float | None = None  # monotonic seconds
    keep_alive_s: float = inf  # how long it may stay after its last request; inf: until its memory is needed
    leaves_at: float | None = None  # monotonic seconds at which it leaves if no request comes; None: it stays
    closed: bool = False  # the operator drains it: it takes no new requests

    @property
    def num_shares(self) -> int:
        """The number of devices that hold a share of the model, or would if it were loaded; 1 for a model that is not split. The
        model's total bytes are the bytes of one share times this number."""
        return len(self.devices) or self.num_ranks


@dataclass(slots=True, frozen=True)
class DeviceView:
    name: str
    up: bool
    budget_bytes: int
    chunk_bytes: int
    total_chunks: int
    work_space_chunks: int
    held: dict[str, int]  # model -> chunks of weights and reserved KV
    weights_chunks: int  # how many of the held chunks are weights
    promised_chunks: int
    lease_chunks: int
    loading: str  # name of the model that is loading; "": none
    num_waiting: int  # number of models in line for this device
    problem: str  # an overdue roll-back, or ""


@dataclass(slots=True, frozen=True)
class HostTierView:
    num_slots: int
    slot_bytes: int
    slots: dict[str, int]  # number of slots by kind: free, transit, weights, kv


@dataclass(slots=True, frozen=True)
class QueuedView:
    request_id: int
    model: str
    tenant: str
    position: int  # in its model's queue, from 0
    arrived: float  # monotonic seconds
    resubmission: bool


@dataclass(slots=True, frozen=True)
class VictimView:
    """A model that was evicted for a placement, with its figures at the time of the decision."""

    name: str
    score: float  # priority x requests/s x reload seconds / bytes freed
    chunks: int
    busy: bool  # it was forced out
    idle_s: float | None  # seconds since its last request; None: it was busy


@dataclass(slots=True)
class PlacementView:
    """One placement from its decision to its end, for `hearth history`. Times are monotonic seconds."""

    id: int
    model: str
    device: str  # as in ModelView
    cause: str
    begun: float
    waited_s: float  # seconds from the oldest request or command to the placement
    weights_bytes: int
    forced: bool
    victims: tuple[VictimView, ...]
    ended: float | None = None
    outcome: str = ""  # ready, or why it did not become ready; "" while it is under way
    load_s: float = 0.0
    source: str = ""  # disk or host


@dataclass(slots=True, frozen=True)
class CandidateView:
    """A model on a device from which room is to be freed, and whether and why the model would be evicted for that."""

    name: str
    state: str
    score: float
    requests_per_s: float
    reload_s: float
    freed_bytes: int
    idle_s: float | None  # seconds since its last request; None: busy or never used
    active: int
    queued: int
    victim: bool
    reason: str  # why it would leave or would stay


@dataclass(slots=True, frozen=True)
class DevicePlan:
    """A description of what it would take to free room on a device. verdict: "fits" (there is room), "evicts" (idle models would be
    evicted), "forces" (busy ones would be, too) or "waits" (not possible now)."""

    device: str
    verdict: str
    reason: str
    needed_bytes: int  # bytes needed besides the work space
    free_bytes: int  # the part of needed_bytes that is free without any eviction
    total_bytes: int
    candidates: tuple[CandidateView, ...]  # models that would leave first, then by score


@dataclass(slots=True, frozen=True)
class LoadPlan:
    """The result of a dry run: what loading a model now would do. verdict: "there" (the model is on a device already, or being
    placed), "refused" (it cannot be loaded), or the verdict of the chosen device's DevicePlan."""

    model: str
    state: str
    verdict: str
    reason: str
    device: str  # the chosen device, as in ModelView; "": none
    source: str  # disk or host
    load_s: float  # predicted seconds of the load
    devices: tuple[DevicePlan, ...]
