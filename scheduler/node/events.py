"""Events: the only input of the node scheduler.

Every event carries `now` (monotonic seconds; the scheduler has no clock) and `cause` (a short id such as `req-42`, `cli-7`,
`boot`), which is copied to each action and story line that follows from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from scheduler.node.host_tier import HostCopy


@dataclass(slots=True, frozen=True, kw_only=True)
class Event:
    now: float
    cause: str


@dataclass(slots=True, frozen=True)
class ModelFacts:
    """The facts about a model that placing it needs, from checkpoint headers and the config, never from a driver."""

    name: str
    weights_bytes: int
    kv_bytes_per_token: int
    work_space_bytes: int
    max_model_len: int  # tokens; one request of that length is the reserved KV (or kv_floor_tokens, if larger)
    kv_floor_tokens: int = 0
    kv_reserved_bytes: int = 0  # of a model with windows or states; 0: those tokens times kv_bytes_per_token
    max_sequences: int = 256
    max_queued: int = 256
    priority: float = 1.0
    pinned: bool = False
    enabled: bool = True
    devices: tuple[str, ...] = ()  # allowed devices; empty: any
    fingerprint: str = ""
    incomplete: str = ""  # which file is missing or too short; empty: complete
    keep_alive_s: float = inf  # how long it may stay on a device after its last request; inf: until its memory is needed
    # devices that it is split over; its bytes are then those of each share, and it has no KV but what is reserved. 1: it is whole
    num_ranks: int = 1
    unusable: str = ""  # why its files or settings can't be served however long one waits; empty: they can
    if_too_large: str = ""  # what a refusal tells behind the arithmetic of a model that fits nowhere
    replica_of: str = ""  # the model whose further replica this is (replicas.py); "": it is a model itself
    # of a further replica: it is loaded when the model has so many requests for each replica there is; 0: when it has any
    replica_at: int = 0

    @property
    def is_split(self) -> bool:
        """Whether it needs several devices. Then it has no KV beyond its reserve."""
        return self.num_ranks > 1

    @property
    def uses_host_tier(self) -> bool:
        """Whether host memory may hold its weights and KV: not those of shares, nor of further replicas."""
        return not self.is_split and not self.replica_of

    @property
    def costs_name(self) -> str:
        """The name by which its costs are learnt: replicas have theirs in common."""
        return self.replica_of or self.name


@dataclass(slots=True, frozen=True)
class RequestFacts:
    """The facts about a request that scheduling needs; its tokens stay with the dispatcher."""

    request_id: int
    model: str
    num_prompt_tokens: int
    max_tokens: int
    tenant: str = ""
    weight: float = 1.0  # the tenant's share
    priority: int = 0
    keep_alive_s: float | None = None  # how long the model may stay after it, from now on; None: as before
    part_of: int = 0  # request_id of the first sequence of a client's request that makes several; 0: it is the first
    was_accepted: bool = False  # by the daemon before this one: no queue is too full for it
    # of a model with several: the replicas that have computed a prefix of the prompt, as far as is known, and its tokens
    cached: tuple[tuple[str, int], ...] = ()


# ---- models and devices


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelRegistered(Event):
    """A folder appeared, or its config or files changed (with the same name)."""

    facts: ModelFacts


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelRemoved(Event):
    """A folder is gone: queued requests are refused, a loaded copy drains and is evicted."""

    model: str


@dataclass(slots=True, frozen=True, kw_only=True)
class HostCopiesFound(Event):
    """Host memory has outlived the daemon before this one: these copies are in its slots. Posted before any engine is up. Copies of
    unknown models and other files are ignored, and their slots stay free."""

    copies: tuple[tuple[str, HostCopy], ...]  # (model, KeptWeights or SavedKV)


@dataclass(slots=True, frozen=True, kw_only=True)
class EngineUp(Event):
    device: str
    budget_bytes: int
    left: tuple[str, ...] = ()  # models whose weights are on the device still: loading them reads and copies nothing


@dataclass(slots=True, frozen=True, kw_only=True)
class EngineDown(Event):
    """An engine process ended. `running` are the requests of the step in flight (from its step journal)."""

    device: str
    running: tuple[int, ...]
    reason: str


@dataclass(slots=True, frozen=True, kw_only=True)
class LoadFinished(Event):
    """A load has ended. Slots of Load may be written or given away again; those meant to keep the weights hold them if `kept`."""

    placement_id: int
    seconds: float
    kept: bool = False  # a whole copy of the weights is in keep_slots, or in the source_slots it came from
    checksum: int = 0  # of that copy
    copy_s: float = 0.0  # of the seconds, spent copying from host memory
    source_rejected: str = ""  # why the copy in source_slots was not used
    read_as: str = ""  # which of its files were read and why, where some are packed
    kernels_s: float = 0.0  # of the seconds, spent on kernels alone, while no weights were read
    restored_kv_tokens: int = 0
    adopted: bool = False  # the weights were on the device already: nothing is learnt of the disk or the host's memory


@dataclass(slots=True, frozen=True, kw_only=True)
class LoadStreams(Event):
    """An engine accepts requests for a model it still loads, and computes their prompts as weights arrive. First tokens follow
    LoadFinished."""

    placement_id: int


@dataclass(slots=True, frozen=True, kw_only=True)
class LoadFailed(Event):
    placement_id: int
    reason: str
    permanent: bool


@dataclass(slots=True, frozen=True, kw_only=True)
class LoadProgressed(Event):
    """A load made progress. bytes_total 0: it waits for kernels."""

    placement_id: int
    bytes_done: int
    bytes_total: int


@dataclass(slots=True, frozen=True, kw_only=True)
class EvictFinished(Event):
    placement_id: int
    kv_slots: tuple[int, ...] = ()  # of save_slots, those that hold KV now
    kv_index: bytes = b""  # the engine's account of them
    saved_kv_tokens: int = 0


@dataclass(slots=True, frozen=True, kw_only=True)
class KVNoted(Event):
    """KV of an engine's models: model -> bytes of (running sequences, cached prefixes). waiting: model -> requests in the engine
    that have not started."""

    device: str
    kv_bytes: dict[str, tuple[int, int]]
    waiting: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, frozen=True, kw_only=True)
class PrefillMeasured(Event):
    """A request's first token came `seconds` after it was submitted; num_tokens of its prompt had to be computed."""

    model: str
    device: str
    num_tokens: int
    seconds: float


# ---- requests


@dataclass(slots=True, frozen=True, kw_only=True)
class RequestArrived(Event):
    request: RequestFacts


@dataclass(slots=True, frozen=True, kw_only=True)
class RequestExpected(Event):
    """A request of the tenant for this model will arrive once its prompt is tokenized. Nothing answers it: if the load can begin at
    once, as for WarmRequested, it does; if not, the request will wait in line as any other. Each has a cause of its own."""

    model: str
    tenant: str = ""


@dataclass(slots=True, frozen=True, kw_only=True)
class ExpectationOver(Event):
    """A request that was expected has arrived, or will not. expectation: the cause of its RequestExpected; unknown ones are
    ignored."""

    model: str
    expectation: str


@dataclass(slots=True, frozen=True, kw_only=True)
class RequestCancelled(Event):
    """The client went away or its time is up, wherever the request was."""

    request_id: int


@dataclass(slots=True, frozen=True, kw_only=True)
class RequestFinished(Event):
    """The engine is done with a request, successfully or not. Not sent for requests it aborted for an Evict or AbortInEngine.
    Unknown ids are ignored."""

    request_id: int


@dataclass(slots=True, frozen=True, kw_only=True)
class KeepAliveSet(Event):
    """A client sets how long the model may stay on its device after its last request, without asking for an answer. 0: it leaves as
    soon as it is idle. Ignored for an unknown model."""

    model: str
    keep_alive_s: float


# ---- the operator


@dataclass(slots=True, frozen=True, kw_only=True)
class LoadRequested(Event):
    """`hearth load`; answered by CommandDone with this event's cause. The model then stays until it was requested, whatever its
    keep_alive says."""

    model: str


@dataclass(slots=True, frozen=True, kw_only=True)
class WarmRequested(Event):
    """A load ahead of requests (`warm`), answered like LoadRequested. It is refused unless it can begin at once, no other model
    waits for the device, and only idle models have to leave that have been used since they were loaded."""

    model: str


@dataclass(slots=True, frozen=True, kw_only=True)
class UnloadRequested(Event):
    """`hearth unload`. to: cold (nothing of it stays in host memory) or warm (its weights stay; refused if there are none)."""

    model: str
    to: str = "cold"


@dataclass(slots=True, frozen=True, kw_only=True)
class PinRequested(Event):
    """`hearth pin`: pins and loads."""

    model: str


@dataclass(slots=True, frozen=True, kw_only=True)
class UnpinRequested(Event):
    model: str


@dataclass(slots=True, frozen=True, kw_only=True)
class EnableRequested(Event):
    model: str


@dataclass(slots=True, frozen=True, kw_only=True)
class DisableRequested(Event):
    model: str


@dataclass(slots=True, frozen=True, kw_only=True)
class DrainRequested(Event):
    """`hearth drain`: no new request for `model` (empty: for the node); waiting and running ones continue."""

    model: str = ""


@dataclass(slots=True, frozen=True, kw_only=True)
class ResumeRequested(Event):
    model: str = ""


@dataclass(slots=True, frozen=True, kw_only=True)
class TimePassed(Event):
    """Posted when `NodeScheduler.next_deadline()` is reached: deadlines, overdue queues, quarantines, max waits."""
