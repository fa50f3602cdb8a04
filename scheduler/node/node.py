"""Holds the state of the node: models, devices, requests, copies and placements.

Handlers change the state and mark the models and devices that they changed. `settle` then handles the consequences for those alone,
so the cost of an event depends only on how much it changes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from scheduler.node import residency
from scheduler.node.actions import Action, CommandDone, GrantLease, Refusal, Reject, StateChanged
from scheduler.node.costs import LoadCosts, Rate
from scheduler.node.events import ExpertCopies, ModelFacts, RequestFacts
from scheduler.node.groups import joined, pools
from scheduler.node.history import History
from scheduler.node.host_tier import HostTierAccount, Slots
from scheduler.node.kernel_waits import KernelWaits
from scheduler.node.lazy_heap import LazyHeap
from scheduler.node.ledger import NOTHING, DeviceLedger, Size
from scheduler.node.settings import SchedulerSettings
from scheduler.node.story import EndedRequests, Story
from scheduler.shares import Shares

# Stages of a placement, in order. It ends with the load; the copy remains.
VICTIMS_DRAIN, VICTIMS_LEAVE, WAITS_FOR_LOADER, LOADS = "victims drain", "victims leave", "waits for another load", "loads"


@dataclass(slots=True, eq=False)
class Request:
    """A request that waits or runs. model: the model in whose queue it waits, or the replica in whose engine it runs."""

    facts: RequestFacts
    arrived: float
    model: Model
    device: str = ""  # the device whose engine has it; "" while queued
    submitted_at: float = 0.0
    resubmission: bool = False  # it was submitted before, so no wait limit and no queue bound apply
    paused_at: float | None = None  # when it began to wait for its model to come back
    crashes: int = 0

    @property
    def waits_since(self) -> float:
        """The time, in monotonic seconds, since which the request has waited: that of its pause if it was paused, else that of its
        arrival."""
        return self.arrived if self.paused_at is None else self.paused_at


@dataclass(slots=True, eq=False)
class TenantQueue:
    """One tenant's waiting requests in a model's queue, by id, in the order of that queue."""

    requests: OrderedDict[int, Request] = field(default_factory=OrderedDict)
    num_resubmissions: int = 0

    @property
    def num_new(self) -> int:
        """Number of requests that count against the queue's bounds: all but those that ran before and wait to continue."""
        return len(self.requests) - self.num_resubmissions


@dataclass(slots=True, eq=False)
class Copy:
    """A model's memory on its device or devices, from the Load action until the eviction is answered. facts: the model's facts when
    it was loaded.

    devices: the devices that hold it, by rank. The first one leads: requests are submitted to its engine. A device whose engine
    dies is removed from the list, and the copy is then evicted from the others. keep_slots: slots of the host tier that the load is
    to fill with the weights; from_host: whether the weights were to be loaded from the host tier. expert_copies: the most copies of
    experts that a device has in a layer; 0: none. counted_to: the time up to which long steps of its engines have been added to the
    deadline of its load or eviction (engines.step_lasts)."""

    placement_id: int
    devices: tuple[str, ...]
    facts: ModelFacts
    size: Size
    keep_slots: Slots = ()
    from_host: bool = False
    streams: bool = False  # it still loads, and prompts may run as its weights arrive
    requested: bool = False  # a request asked for it, or will, so keep_alive applies; False: only a command or a pin did
    ready_at: float | None = None
    tenure_ends: float = 0.0  # rule 9: from when on it may be made to leave although it is busy
    evict_sent: bool = False
    rolling_back: bool = False
    overdue: bool = False
    expert_copies: int = 0
    counted_to: float = 0.0

    @property
    def leader(self) -> str:
        return self.devices[0]

    @property
    def is_whole(self) -> bool:
        """Returns whether the copy still has its share on each of the devices onto which it was loaded. A model that is not split
        has one share."""
        return len(self.devices) == self.facts.num_ranks


@dataclass(slots=True, eq=False)
class Placement:
    """One attempt to bring a model onto a device, or onto several (by rank) if it is split. size, facts: those of the model when
    the placement began; if its load takes copies of experts, they include these copies. forced: whether busy models have to be
    evicted. stage: what the placement waits for, from VICTIMS_DRAIN to LOADS."""

    id: int
    model: str
    devices: tuple[str, ...]
    size: Size
    facts: ModelFacts
    cause: str
    forced: bool
    victims: dict[str, None]  # models that still hold memory that it needs
    stage: str = VICTIMS_DRAIN
    copies: ExpertCopies | None = None


@dataclass(slots=True, eq=False)
class Model:
    facts: ModelFacts
    size: Size
    devices: tuple[str, ...]  # allowed devices on which it (or a share, if it is split) fits when they are empty
    too_large: str = ""  # the arithmetic, if it fits on no device
    state: str = ""
    reason: str = ""
    copy: Copy | None = None
    placement: Placement | None = None
    queue: OrderedDict[int, Request] = field(default_factory=OrderedDict)  # waiting requests by id, the oldest first
    num_resubmissions: int = 0  # queued requests that were submitted before
    queue_of: dict[str, TenantQueue] = field(default_factory=dict)  # tenant with queued requests -> its part of the queue
    shares: Shares = field(default_factory=Shares)  # the tenants' shares of running requests, in all replicas
    running: dict[int, Request] = field(default_factory=dict)
    pinned: bool = False
    home: tuple[str, ...] = ()  # the device or devices that keep room for a pinned model
    enabled: bool = True
    closed: bool = False  # the operator drains it: it takes no new requests
    removed: bool = False
    removed_at: float = 0.0  # when its folder went, in monotonic seconds
    victim_of: int = 0  # id of the placement for which it leaves; 0: none
    load_causes: list[str] = field(default_factory=list)  # causes of commands that wait until it is ready
    expected: dict[str, None] = field(default_factory=dict)  # causes of the RequestExpected events whose requests have not arrived
    unload_causes: list[str] = field(default_factory=list)
    asked_at: float = 0.0  # when a command, a pin or a request that is being read began to want it
    arrivals: Rate = field(default_factory=Rate)
    served: Rate = field(default_factory=Rate)
    loads: Rate = field(default_factory=Rate)  # loads, whether from disk or from host memory
    last_used: float | None = None
    failure: str = ""  # why its state is failed
    failed_loads: int = 0  # number of failed loads in a row
    num_quarantines: int = 0
    quarantined_until: float | None = None
    retry_at: float = 0.0
    faults: list[float] = field(default_factory=list)
    progress: tuple[int, int] | None = None
    paused: bool = False  # it was preempted, and requests wait for it to come back
    gives_kv: bool = False  # it leaves so that others have more room for KV
    leaves_by: str = ""  # the rule of leave_rules.py by which it leaves; "": none
    asked_keep_alive_s: float | None = None  # what a request asked for; replaces the configured one during this stay
    unload_to: str = ""  # state after the operator's unload that is under way: cold or warm
    kv_bytes: int = 0  # KV of the copy, last reported by its engine: running sequences and cached prefixes
    kv_running_bytes: int = 0  # the part of kv_bytes that running sequences hold
    mean_prompt_tokens: float = 0.0
    expert_copies: ExpertCopies | None = None  # those that loads take if there is room; only in a primary
    story: Story = field(default_factory=Story)
    # the model of which this is a further replica, else this model itself: it has the queue and the statistics of all replicas
    primary: Model = field(init=False)
    others: list[Model] = field(default_factory=list)  # for a primary: its further replicas, by number

    def __post_init__(self) -> None:
        self.primary = self

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def window(self) -> int:
        """The most sequences that one batch of the model can have. The limit of requests in the model's engine is derived from it
        (Node.window)."""
        return (self.copy.facts if self.copy else self.facts).max_sequences

    @property
    def keep_alive_s(self) -> float:
        """The seconds for which the model may stay on its device after its last request; inf: until its memory is needed. A value
        that a client asked for replaces the configured one."""
        asked_s = self.primary.asked_keep_alive_s
        return self.facts.keep_alive_s if asked_s is None else asked_s

    @property
    def replicas(self) -> tuple[Model, ...]:
        """All replicas of the model, the primary first."""
        return (self.primary, *self.primary.others)

    @property
    def occupies(self) -> tuple[str, ...]:
        """The devices that hold the model, or its remaining shares after an engine has died. If it has no copy, the devices onto
        which it is being placed; () if there are none."""
        if self.copy is not None:
            return self.copy.devices
        return () if self.placement is None else self.placement.devices

    @property
    def is_spare(self) -> bool:
        """Returns whether another replica goes on serving the model if this one is evicted. This is so for all ready replicas but
        the first, except pinned ones."""
        if not self.primary.others or self.pinned:
            return False
        return next((one for one in self.replicas if one.state == residency.READY and not one.leaves), self) is not self

    @property
    def is_used(self) -> bool:
        """Returns whether the model has requests, in this replica or in another one."""
        if not self.primary.others:
            return bool(self.running or self.queue)
        return bool(self.primary.queue) or any(one.running for one in self.replicas)

    @property
    def served_elsewhere(self) -> bool:
        """Returns whether another replica of the model takes requests."""
        return bool(self.primary.others) and any(one.takes_requests for one in self.replicas if one is not self)

    @property
    def takes_requests(self) -> bool:
        """Returns whether requests can be submitted to the engine of this replica: it is ready, or it is loading and computes
        prompts as weights arrive, or it is disabled and completes its requests. A disabled model is given only requests that ran
        before."""
        streams = self.state == residency.LOADING and self.copy is not None and self.copy.streams
        return self.state == residency.READY or streams or (self.runs_out and not self.removed)

    @property
    def leaves(self) -> bool:
        """Returns whether the model is to be evicted for good, because its folder is gone or the operator has disabled it."""
        return self.removed or not self.enabled

    @property
    def why_leaves(self) -> str:
        """The reason, for operators, why the model is to be evicted."""
        return "its folder is gone" if self.removed else "disabled by the operator"

    @property
    def runs_out(self) -> bool:
        """Returns whether the model stays on its device only until its requests have ended, because its folder is gone or the
        operator has disabled it. False if it is being evicted for a placement."""
        copy = self.copy
        ends = self.state == residency.DRAINING and self.leaves and not self.victim_of
        return ends and copy is not None and copy.ready_at is not None and not copy.evict_sent

    @property
    def comes_back(self) -> bool:
        """Returns whether the model, although it is disabled, will be loaded again to complete waiting requests that ran before."""
        return not self.enabled and not self.removed and self.primary.num_resubmissions > 0

    def enqueue(self, request: Request, first: bool = False) -> None:
        request_id, tenant = request.facts.request_id, request.facts.tenant
        request.model = self
        if tenant not in self.queue_of:
            self.queue_of[tenant] = TenantQueue()
        own = self.queue_of[tenant]
        self.queue[request_id] = own.requests[request_id] = request
        self.num_resubmissions += request.resubmission
        own.num_resubmissions += request.resubmission
        if first:
            self.queue.move_to_end(request_id, last=False)
            own.requests.move_to_end(request_id, last=False)

    def dequeue(self, request_id: int) -> Request:
        request = self.queue.pop(request_id)
        own = self.queue_of[request.facts.tenant]
        del own.requests[request_id]
        self.num_resubmissions -= request.resubmission
        own.num_resubmissions -= request.resubmission
        if not own.requests:
            del self.queue_of[request.facts.tenant]
        return request

    def dequeue_next(self) -> Request:
        """Removes and returns the next waiting request: the oldest one of the tenant that has the fewest running requests for its
        weight. At least one request must wait. O(tenants)."""
        if len(self.queue_of) == 1:
            return self.dequeue(next(iter(self.queue)))
        firsts = {tenant: next(iter(own.requests.values())) for tenant, own in self.queue_of.items()}
        tenant = self.shares.least((tenant, each.facts.weight, each.facts.request_id) for tenant, each in firsts.items())
        return self.dequeue(firsts[tenant].facts.request_id)

    def start(self, request: Request) -> None:
        request.model = self
        self.running[request.facts.request_id] = request
        self.primary.shares.start(request.facts.tenant, request.facts.weight)

    def stop(self, request_id: int) -> Request:
        request = self.running.pop(request_id)
        self.primary.shares.stop(request.facts.tenant)
        return request


@dataclass(slots=True, eq=False)
class Device:
    name: str
    budget_bytes: int
    ledger: DeviceLedger
    costs: LoadCosts
    up: bool = False
    lost_at: float = -inf  # when its engine last ended
    resident: dict[str, Model] = field(default_factory=dict)  # models with a copy here
    placements: dict[int, Placement] = field(default_factory=dict)  # by id, under way; at most one loads, one drains busy victims
    loading: Placement | None = None
    by_age: LazyHeap[str] = field(default_factory=LazyHeap)  # cold models in line for this device, by when they are overdue
    by_work: LazyHeap[str] = field(default_factory=LazyHeap)  # the same, by waiting work per reload second
    crowded_out: dict[str, None] = field(default_factory=dict)  # models for which pins leave no room here
    pinned: Size = NOTHING  # room kept for the pinned models whose home this is
    lease_sent_chunks: int = 0  # the lease that its engine was last sent
    held_for: str = ""  # the overdue model that waits for this device, so that nothing else may begin here (look.py); "": none
    problem: str = ""
    kv_short_at: float = -inf  # when requests in its engine last waited for KV
    left: set[str] = field(default_factory=set)  # models whose weights a dead engine or group has left here, not loaded since

    @property
    def draining(self) -> Placement | None:
        """The placement on this device that waits until busy models here have finished their requests; None if there is none. Other
        placements may begin on the device before it."""
        for placement in self.placements.values():
            if placement.stage == VICTIMS_DRAIN:
                return placement
        return None

    @property
    def available(self) -> bool:
        """Returns whether a placement may begin on the device: its engine is up, and each placement under way there still waits for
        busy models to drain."""
        return self.up and all(placement.stage == VICTIMS_DRAIN for placement in self.placements.values())


class Node:
    """The whole state of a node scheduler, and the actions to which the event that is being handled has led so far."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.now = 0.0
        self.cause = "boot"
        self.actions: list[Action] = []
        self.host = HostTierAccount(settings.host_tier_slots)
        self.models: dict[str, Model] = {}
        self.devices: dict[str, Device] = {}
        self.requests: dict[int, Request] = {}
        self.copies: dict[int, str] = {}  # placement id -> model
        self.placements: dict[int, Placement] = {}
        self.pinned: dict[str, Model] = {}
        self.deadlines: LazyHeap[tuple[str, str]] = LazyHeap()  # keys: (kind of deadline, model or device)
        self.waits: LazyHeap[int] = LazyHeap()  # request id -> when it has waited too long, not counting waits for kernels
        self.kernel_waits = KernelWaits()
        self.touched: dict[str, None] = {}  # models to settle
        self.stirred: dict[str, None] = {}  # devices on which a placement may fit now
        self.released: dict[str, None] = {}  # devices that were held for a model when this event came and need not be any more
        self.newcomers: dict[str, None] = {}  # models whose demand has changed while their devices have not
        self.crowded_replicas: dict[str, object] = {}  # model whose further replica found no room -> what room there was
        self.ended = EndedRequests()
        self.history = History()
        self.draining = self.stopping = False  # whether it takes no new requests, and whether that is for good
        self.num_placements = 0

    # ---- reporting

    def emit(self, action: Action) -> None:
        self.actions.append(action)

    def set_state(self, model: Model, state: str, reason: str) -> None:
        old, model.state, model.reason = model.state, state, reason
        if old == state:
            return
        if model.primary.others:
            self.touch(model)
            if state == residency.READY:  # its other replicas may leave now
                self.stir(name for one in model.replicas if one.copy is not None for name in one.copy.devices)
        device = joined(model.copy.devices) if model.copy else ""
        model.story.tell(self.now, self.cause, f"{old or 'new'} -> {state}: {reason}")
        self.emit(StateChanged(cause=self.cause, model=model.name, old=old, new=state, reason=reason, device=device))

    def reject(self, request: Request, refusal: Refusal) -> None:
        """Ends a request that is in no queue any more, and reports the reason to its client by a Reject action."""
        request_id = request.facts.request_id
        del self.requests[request_id]
        self.waits.discard(request_id)
        self.ended.note(request_id, self.now, request.facts.model, refusal.code)
        self.emit(Reject(cause=self.cause, request_id=request_id, refusal=refusal))

    def reject_queue(self, model: Model, refusal: Refusal) -> None:
        while model.queue:
            self.touch(model)
            self.reject(model.dequeue(next(iter(model.queue))), refusal)

    def reject_new(self, model: Model, refusal: Refusal) -> None:
        """Rejects the model's waiting requests, except those that ran before: their clients have been promised an answer."""
        for request in [request for request in model.queue.values() if not request.resubmission]:
            self.touch(model)
            self.reject(model.dequeue(request.facts.request_id), refusal)

    def answer(self, causes: list[str], model: str, refusal: Refusal | None) -> None:
        """Answers the commands with the ids `causes`, which are about `model`, and empties the list. refusal: why the commands were
        not carried out; None: they were."""
        for cause in causes:
            self.emit(CommandDone(cause=cause, model=model, refusal=refusal))
        causes.clear()

    def answer_loads(self, model: Model, refusal: Refusal | None) -> None:
        """Answers the commands that wait until the model is ready, and drops the announcements of requests for it. refusal: why the
        model cannot be loaded; None: it is ready."""
        self.answer(model.load_causes, model.name, refusal)
        model.expected.clear()

    def grant(self, device: Device) -> None:
        """Sends the engine of a device the current size of its KV lease (the chunks that it may use for KV beyond its models'
        reserves), by a GrantLease action."""
        device.lease_sent_chunks = device.ledger.lease_chunks
        self.emit(GrantLease(cause=self.cause, device=device.name, lease_chunks=device.lease_sent_chunks))

    # ---- touching

    def touch(self, model: Model) -> None:
        """Marks the model and all its replicas as changed, so that `settle` carries out each step that has become possible for
        them. A change of one replica may cause another one to be loaded, be evicted or take requests."""
        for one in model.replicas if model.primary.others else (model,):
            self.touched[one.name] = None

    def stir(self, names: Iterable[str]) -> None:
        for name in names:
            self.stirred[name] = None

    def stir_held(self) -> None:
        """Marks all devices that are held for a model, so that the placement of that model is tried again: another device that it
        waits for may have become free. (No other model's placement begins on a held device.)"""
        self.stir(device.name for device in self.devices.values() if device.held_for)

    # ---- queries

    def window(self, model: Model) -> int:
        """Returns the most requests that a replica may have in its engine at a time. For a model with a single replica it is a
        multiple of the batch (setting window_per_sequence). With several replicas it is one batch, because a request that waits in
        one engine cannot move to another that has become free."""
        return model.window * (1 if model.primary.others else self.settings.window_per_sequence)

    def has_engines(self, model: Model) -> bool:
        """Returns whether enough engines are up to load at least one replica of the model, among the devices on which the replica
        may be."""
        return any(
            pools((name for name in one.devices if self.devices[name].up), one.facts.num_ranks, one.facts.num_stages)
            for one in model.replicas
        )

    def is_warm(self, model: Model) -> bool:
        """Returns whether the host tier holds a complete copy of the weights in the model's present files."""
        kept = self.host.weights.get(model.name)
        return kept is not None and not kept.void and kept.fingerprint == model.facts.fingerprint

    def reload_s(self, model: Model, device: Device) -> float:
        costs, weights_bytes = device.costs, model.facts.weights_bytes
        if self.host.weights and self.is_warm(model):
            return costs.predict_from_host_s(model.facts.costs_name, weights_bytes)
        return costs.predict_s(model.facts.costs_name, weights_bytes)

    def slowest_reload_s(self, model: Model, devices: Iterable[str]) -> float:
        """Returns the predicted seconds of a load of the model onto all of these devices: those of the slowest one."""
        return max(self.reload_s(model, self.devices[name]) for name in devices)

    def tenure_s(self, model: Model, devices: Iterable[str]) -> float:
        """Returns for how many seconds after its load onto these devices a model may stay although overdue work wants its room
        (rule 9 of docs/design/models.md)."""
        return max(self.settings.tenure_s, self.settings.tenure_reloads * self.slowest_reload_s(model, devices))

    def wanted(self, model: Model) -> bool:
        """Returns whether the model is to be loaded for a waiting or announced request, a command or a pin. (A request is announced
        while its prompt is still being read and tokenized.) Requests that wait because another replica is full do not count; for
        them a further replica is loaded only into free memory (replicas.py)."""
        return bool(model.queue and not model.served_elsewhere) or self.wanted_ahead(model)

    def wanted_ahead(self, model: Model) -> bool:
        """Returns whether the model is to be loaded for something other than a waiting request: a command, a pin or an announced
        request."""
        return bool(model.load_causes or model.expected or model.pinned)

    def waits_since(self, model: Model) -> float:
        """Returns since when work has waited for the model, in monotonic seconds: the wait of its oldest request, or of a command,
        a pin or an announced request if that began earlier."""
        since = next(iter(model.queue.values())).waits_since if model.queue else self.now
        return min(since, model.asked_at) if self.wanted_ahead(model) else since

    def overdue_at(self, model: Model, reload_s: float) -> float:
        """Returns when the model's waiting work becomes overdue, in monotonic seconds: the time at which it began to wait, plus
        overdue_after_s, plus reload_s, the seconds of a load. If their work is equally old, a model that loads slowly therefore
        ranks behind one that loads fast (rule 8 of docs/design/models.md)."""
        return self.waits_since(model) + reload_s + self.settings.overdue_after_s

    def resting(self, model: Model) -> bool:
        """Returns whether a placement of the model may begin: it is cold, warm or paused, and no placement is under way for it."""
        return model.state in residency.PLACEABLE and model.placement is None
