"""Defines the events, which are the only input of the node scheduler.

Every event carries `now` (monotonic seconds; the scheduler has no clock) and `cause` (a short id such as `req-42`, `cli-7`,
`boot`). The cause is copied to each action that follows from the event, and to each line of `hearth why` about it.
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
    """The facts about a model that are needed to place it. They come from the checkpoint's headers and the settings, never from a
    driver."""

    name: str
    weights_bytes: int
    kv_bytes_per_token: int
    work_space_bytes: int
    max_model_len: int  # tokens; one request of that length is the reserved KV (or kv_floor_tokens, if larger)
    kv_floor_tokens: int = 0
    kv_reserved_bytes: int = 0  # for a model with windows or states; 0: reserved tokens times kv_bytes_per_token
    max_sequences: int = 256
    max_queued: int = 256
    priority: float = 1.0
    pinned: bool = False
    enabled: bool = True
    devices: tuple[str, ...] = ()  # allowed devices; empty: any
    fingerprint: str = ""
    incomplete: str = ""  # which file is missing or too short; empty: complete
    keep_alive_s: float = inf  # how long it may stay on a device after its last request; inf: until its memory is needed
    # How many devices it is split over; 1: none. A split model's bytes are those of a share, and it has no KV beyond its reserve.
    num_ranks: int = 1
    num_stages: int = 1  # stages of its pipeline; each is on num_ranks // num_stages devices of one host, the last one on this host
    expert_parts: int = 1  # as in loader.shapes.model_shape.Division: which part of the weights a share is
    unusable: str = ""  # why its files or settings can never be served; empty: they can
    drafts: bool = False  # whether it is a head that drafts tokens for other models; `unusable` tells for which
    if_too_large: str = ""  # text that a refusal adds to the arithmetic if the model fits nowhere
    replica_of: str = ""  # the model whose further replica this is (replicas.py); "": it is a model itself
    # For a further replica: how many requests each loaded replica must have before this one is loaded; 0: any request will do.
    replica_at: int = 0
    expert_copies: int = 0  # for a split mixture: the most further experts that a load may give each device in each layer

    @property
    def is_split(self) -> bool:
        """Returns whether the model is split over several devices; it then has no KV beyond its reserve."""
        return self.num_ranks > 1

    @property
    def all_weights_bytes(self) -> int:
        """The bytes of the weights on all devices together."""
        return self.weights_bytes * self.num_ranks

    @property
    def keeps_weights(self) -> bool:
        """Returns whether host memory may hold the model's weights: False for a further replica (any replica of a model but the
        first)."""
        return not self.replica_of

    @property
    def saves_kv(self) -> bool:
        """Returns whether host memory may hold the model's KV: False for a split model, of whose KV each device has a part, and for
        a further replica (any replica of a model but the first)."""
        return not self.is_split and not self.replica_of

    @property
    def costs_name(self) -> str:
        """The name under which the costs of its loads are learned: that of the model, which all its replicas share."""
        return self.replica_of or self.name


@dataclass(slots=True, frozen=True)
class ExpertCopies:
    """The copies of experts that a load gives to the devices of a split mixture-of-experts model. number: the most copies that a
    device gets in a layer. weights_bytes: the most bytes that the copies take on one device. table: for each layer, and in it for
    each part (an equal share of the layer's experts, on one device or divided among several), the indices, within the layer, of the
    copied experts."""

    number: int
    weights_bytes: int
    table: tuple[tuple[tuple[int, ...], ...], ...]


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
    keep_alive_s: float | None = None  # how long the model may stay after this and later requests; None: as before
    part_of: int = 0  # if a client's request has several sequences, the request_id of the first; 0: this is the first
    was_accepted: bool = False  # accepted by the daemon before this one, so no queue is too full for it
    # For a model with several replicas: those known to have a prefix of the prompt cached, and the tokens of that prefix.
    cached: tuple[tuple[str, int], ...] = ()


# ---- models and devices


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelRegistered(Event):
    """A model's folder has appeared, or its configuration or files have changed under the same name."""

    facts: ModelFacts


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelRemoved(Event):
    """A model's folder is gone: its queued requests are refused, and its copy drains and is evicted."""

    model: str


@dataclass(slots=True, frozen=True, kw_only=True)
class CopiesChosen(Event):
    """Announces which copies of experts the next loads of a split mixture-of-experts model take. The copied experts are loaded a
    second time, on other devices of the model, to spread their work. A load takes no copies if one of its devices has no room for
    them when the load begins. copies: the chosen copies; None: loads take no copies."""

    model: str
    copies: ExpertCopies | None


@dataclass(slots=True, frozen=True, kw_only=True)
class HostCopiesFound(Event):
    """Reports copies in host memory that an earlier daemon has left. Posted before any engine is up. Copies of unknown models, or
    of files that have changed, are ignored, and their slots stay free."""

    copies: tuple[tuple[str, HostCopy], ...]  # (model, KeptWeights or SavedKV)


@dataclass(slots=True, frozen=True, kw_only=True)
class EngineUp(Event):
    device: str
    budget_bytes: int
    left: tuple[str, ...] = ()  # models whose weights are still on the device: loading them reads and copies nothing


@dataclass(slots=True, frozen=True, kw_only=True)
class EngineDown(Event):
    """A device's engine process has ended. running: ids of the requests of the step in flight (from its step journal). reason: how
    it ended, for operators."""

    device: str
    running: tuple[int, ...]
    reason: str


@dataclass(slots=True, frozen=True, kw_only=True)
class LoadFinished(Event):
    """A load has succeeded, and has ended its use of the host tier's slots that its Load action named. kept: whether the host tier
    holds a complete copy of the weights, in the keep_slots of the Load action or in the source_slots that the weights were read
    from."""

    placement_id: int
    seconds: float
    kept: bool = False  # a whole copy of the weights is in keep_slots, or in the source_slots that it was read from
    checksums: tuple[int, ...] = ()  # of the copy in host memory: those of the shares by rank, or that of a whole model
    copy_s: float = 0.0  # the part of `seconds` spent copying from host memory
    source_rejected: str = ""  # why the copy in source_slots was not used
    read_as: str = ""  # which of the model's files were read and why, if some are packed
    kernels_s: float = 0.0  # the part of `seconds` spent on kernels alone, while no weights were read
    restored_kv_tokens: int = 0
    adopted: bool = False  # the weights were on the device already, so nothing is learned about disk or host memory


@dataclass(slots=True, frozen=True, kw_only=True)
class LoadStreams(Event):
    """An engine accepts requests for a model that it is still loading, and computes their prompts as weights arrive. It samples
    their first tokens after the load has finished."""

    placement_id: int


@dataclass(slots=True, frozen=True, kw_only=True)
class LoadFailed(Event):
    placement_id: int
    reason: str
    permanent: bool


@dataclass(slots=True, frozen=True, kw_only=True)
class LoadProgressed(Event):
    """A load made progress: bytes_done of the bytes_total bytes of weights have arrived. bytes_total 0: the load waits for its
    kernels to be compiled."""

    placement_id: int
    bytes_done: int
    bytes_total: int


@dataclass(slots=True, frozen=True, kw_only=True)
class EvictFinished(Event):
    placement_id: int
    kv_slots: tuple[int, ...] = ()  # those of save_slots that hold KV now
    kv_index: bytes = b""  # the engine's index of the saved KV
    saved_kv_tokens: int = 0


@dataclass(slots=True, frozen=True, kw_only=True)
class KVNoted(Event):
    """Reports the KV of the models in a device's engine. kv_bytes: model -> (bytes of running sequences, bytes of cached prefixes).
    waiting: model -> number of its requests in the engine that have not started. without_room: model -> number of those requests
    that wait because their adapter finds no room. adapter_bytes: the bytes of all adapters that running requests use."""

    device: str
    kv_bytes: dict[str, tuple[int, int]]
    waiting: dict[str, int] = field(default_factory=dict)
    without_room: dict[str, int] = field(default_factory=dict)
    adapter_bytes: int = 0


@dataclass(slots=True, frozen=True, kw_only=True)
class StepLasts(Event):
    """A device's engine has been in one step since the time `since`, and the step has not exceeded its time limit. Until the step
    ends, the engine begins and answers no load and no eviction."""

    device: str
    since: float


@dataclass(slots=True, frozen=True, kw_only=True)
class PrefillMeasured(Event):
    """Reports how fast a model has computed a prompt: a request's first token came `seconds` after the engine had begun its prompt,
    of which num_tokens had to be computed. Time in which the request waited for a place in the engine's batch is not included."""

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
    """Announces that a request of the tenant for this model will arrive once its prompt is tokenized, so that the model's load may
    begin before that. If the load cannot begin at once, the model takes its place in the waiting line only when the request
    arrives. The event is not answered. Its `cause` identifies the announcement, so each of these events must have another one."""

    model: str
    tenant: str = ""


@dataclass(slots=True, frozen=True, kw_only=True)
class ExpectationOver(Event):
    """Reports that a request announced by RequestExpected has arrived, or will not arrive. expectation: the `cause` of that
    RequestExpected event; an unknown one is ignored."""

    model: str
    expectation: str


@dataclass(slots=True, frozen=True, kw_only=True)
class RequestCancelled(Event):
    """A request's client went away or its time is up, whether the request waits or runs."""

    request_id: int


@dataclass(slots=True, frozen=True, kw_only=True)
class RequestFinished(Event):
    """Reports that the engine has ended a request, successfully or not. Not sent for requests that the engine aborted for an Evict
    or AbortInEngine. Unknown ids are ignored."""

    request_id: int


@dataclass(slots=True, frozen=True, kw_only=True)
class KeepAliveSet(Event):
    """Sets, for a client, how long the model may stay on its device after its last request. 0: it is evicted as soon as it is idle.
    The event is not answered, and is ignored for an unknown model."""

    model: str
    keep_alive_s: float


# ---- the operator


@dataclass(slots=True, frozen=True, kw_only=True)
class LoadRequested(Event):
    """The operator's command `hearth load`: loads the model. It is answered by a CommandDone with this event's cause. The loaded
    model stays at least until its next request, whatever its keep_alive says."""

    model: str


@dataclass(slots=True, frozen=True, kw_only=True)
class WarmRequested(Event):
    """The command to load a model ahead of its requests (setting `warm`), answered by a CommandDone with this event's cause. It is
    refused if the load cannot begin at once, if another model waits for the device, or if a model would be evicted for it that is
    busy or has not been used since it was loaded."""

    model: str


@dataclass(slots=True, frozen=True, kw_only=True)
class UnloadRequested(Event):
    """The operator's command `hearth unload`: evicts the model now. to: "cold" (nothing of the model stays in host memory) or
    "warm" (its weights in host memory stay; refused if there are none). It is answered by a CommandDone with this event's cause."""

    model: str
    to: str = "cold"


@dataclass(slots=True, frozen=True, kw_only=True)
class PinRequested(Event):
    """The operator's command `hearth pin`: keeps room for the model on a device, loads the model, and never evicts it for others.
    It is answered by a CommandDone with this event's cause."""

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
    """The operator's command `hearth drain`: refuses new requests for the model (empty: for all models of the node); waiting and
    running requests continue. stopping: True if the daemon stops, so that the node never takes requests again."""

    model: str = ""
    stopping: bool = False


@dataclass(slots=True, frozen=True, kw_only=True)
class ResumeRequested(Event):
    model: str = ""


@dataclass(slots=True, frozen=True, kw_only=True)
class TimePassed(Event):
    """Reports that the time has come that `NodeScheduler.next_deadline()` returned. Whatever is due at the event's time is handled,
    such as the deadline of a load, or the end of a quarantine or of a request's longest wait."""
