"""What the scheduler shows: plain values, copied on request."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(slots=True, frozen=True)
class ModelView:
    name: str
    state: str
    device: str  # "" when on none; of a model that is split, the names of its devices, such as "cpu:0+cpu:1"
    weights_bytes: int  # of a split model: of each share; so is the next
    kv_reserved_bytes: int
    active: int  # requests submitted to the engine
    queued: int
    pinned: bool
    last_used: float | None  # monotonic seconds of its last arrival or end of a request
    reason: str
    placement_id: int | None  # of its copy, else of the placement under way
    progress: tuple[int, int] | None  # bytes done and total of a load under way
    devices: tuple[str, ...] = ()  # those of `device`, by rank
    num_ranks: int = 1  # over how many devices it is split; 1: it is whole
    kept_bytes: int = 0  # of its weights in host memory
    saved_kv_tokens: int = 0  # whose KV is in host memory
    quarantined_until: float | None = None  # monotonic seconds
    keep_alive_s: float = inf  # how long it may stay after its last request; inf: until its memory is needed
    leaves_at: float | None = None  # monotonic seconds: when it leaves for having had no request so long; None: it does not

    @property
    def num_shares(self) -> int:
        """How many devices hold it, or would if it were loaded: how often the bytes of a share count."""
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


@dataclass(slots=True, frozen=True)
class VictimView:
    """A model that left for a placement, as it was when that was decided."""

    name: str
    score: float  # priority x requests/s x reload seconds / bytes freed
    chunks: int
    busy: bool  # it was forced out
    idle_s: float | None  # since its last request; None: it was busy


@dataclass(slots=True)
class PlacementView:
    """One placement from its decision to its end. Times are monotonic seconds."""

    id: int
    model: str
    device: str  # as in ModelView
    cause: str
    begun: float
    waited_s: float  # before it
    weights_bytes: int
    forced: bool
    victims: tuple[VictimView, ...]
    ended: float | None = None
    outcome: str = ""  # ready, or why not; "" while it is under way
    load_s: float = 0.0
    source: str = ""  # disk or host


@dataclass(slots=True, frozen=True)
class CandidateView:
    """A model on a device, and what speaks for or against evicting it."""

    name: str
    state: str
    score: float
    requests_per_s: float
    reload_s: float
    freed_bytes: int
    idle_s: float | None  # since its last request; None: busy or never used
    active: int
    queued: int
    victim: bool
    reason: str  # why it would leave, or stays


@dataclass(slots=True, frozen=True)
class DevicePlan:
    """What placing something on a device would take. verdict: fits, evicts, forces or waits."""

    device: str
    verdict: str
    reason: str
    needed_bytes: int  # beside its work space
    free_bytes: int  # of those, without anybody leaving
    total_bytes: int
    candidates: tuple[CandidateView, ...]  # by score, those that would leave first


@dataclass(slots=True, frozen=True)
class LoadPlan:
    """The answer to a dry run: what loading a model now would do. verdict: "there" (the model is on a device already), "refused"
    (it cannot be loaded), or the verdict of the chosen device's DevicePlan."""

    model: str
    state: str
    verdict: str
    reason: str
    device: str  # the chosen one, as in ModelView; "": none
    source: str  # disk or host
    load_s: float  # predicted
    devices: tuple[DevicePlan, ...]
