"""Implements placement rules of other systems, to compare the node scheduler with them. All of them load a model when a request for
it arrives, in the order of the oldest waiting request, one placement at a time on each device. They differ in which models are
evicted to make room.

Requests for a ready model are submitted at once. A busy victim is evicted only after it has drained. A split model is loaded onto
several devices of one kind ("cpu" or "cuda") at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from scheduler.node import events
from scheduler.node.actions import Action, Evict, GrantLease, Load, Refusal, Reject, Submit
from scheduler.node.events import Event
from scheduler.node.groups import groups, num_other_hosts
from scheduler.node.ledger import Size, size_of
from scheduler.simulate.trace import TraceRequest


@dataclass(slots=True, eq=False)
class Resident:
    name: str
    size: Size
    placement_id: int
    last_used: float
    ready: bool = False
    drains: bool = False
    running: dict[int, None] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        return bool(self.running)


@dataclass(slots=True, eq=False)
class Place:
    """A device and the models on it, each with a record of its state (Resident). The record of a split model is in the `residents`
    of each of its devices. coming: the name of the model that is being placed there; "": none."""

    name: str
    total_chunks: int
    residents: dict[str, Resident] = field(default_factory=dict)
    coming: str = ""

    def free_chunks(self, work_space_chunks: int = 0, without: Sequence[Resident] = ()) -> int:
        """Returns how many chunks would be free if the models in `without` were gone; negative if too few. The largest work space
        of the models that stay, or work_space_chunks if that is more, counts as used."""
        gone = {one.name for one in without}
        staying = [one.size for one in self.residents.values() if one.name not in gone]
        work = max([work_space_chunks, *(size.work_space_chunks for size in staying)])
        return self.total_chunks - work - sum(size.chunks for size in staying)


class Rule(Protocol):
    """Decides which models are evicted first from a device, and whose weights are dropped first from host memory. max_residents:
    the most models on a device; 0: no limit. idle_s: the seconds after which an idle model is evicted; 0: never."""

    name: str
    max_residents: int
    idle_s: float

    def rank(self, model: str, last_used: float, now: float) -> float | str:
        """Returns the rank of a model on a device, comparable with other ranks of the rule. The model with the lowest rank is
        evicted first. last_used, now: seconds."""

    def rank_in_host(self, model: str, last_used: float, now: float) -> float:
        """Returns the rank of a model whose weights are in host memory. The weights with the lowest rank are dropped first.
        last_used, now: seconds."""


class LeastRecentlyUsed:
    name = "lru"
    max_residents, idle_s = 0, 0.0

    def rank(self, model: str, last_used: float, now: float) -> float:
        return last_used

    rank_in_host = rank


class Ollama:
    """Ollama's rule, with its defaults: victims in the order of their names (it sorts by keep-alive, which is the same for all,
    then by path), at most three models on a device, and an idle model is evicted after five minutes.

    The time to start Ollama's process is not simulated, so loads and evictions cost the same as for the other rules. Host memory
    takes the place of the system's page cache, which drops what was read longest ago."""

    name = "ollama"
    max_residents, idle_s = 3, 300.0

    def rank(self, model: str, last_used: float, now: float) -> str:
        return model

    def rank_in_host(self, model: str, last_used: float, now: float) -> float:
        return last_used


class Clairvoyant:
    """Belady's rule, which knows all requests in advance: the model whose next request is the latest is evicted first. Models are
    nevertheless loaded on demand, in the order of their requests."""

    name = "clairvoyant"
    max_residents, idle_s = 0, 0.0

    def __init__(self, trace: Sequence[TraceRequest]) -> None:
        self._times: dict[str, list[float]] = {}
        for request in trace:
            self._times.setdefault(request.model, []).append(request.time_s)

    def rank(self, model: str, last_used: float, now: float) -> float:
        times = self._times.get(model, [])
        at = bisect_left(times, now)
        return -(times[at] if at < len(times) else float("inf"))

    rank_in_host = rank


class OnDemand:
    """A decider (simulation.Decider) that loads models on demand, with a Rule for which models to evict. It keeps the weights that
    it reads from disk in host memory, as far as there is room. It preempts no running request and saves no KV."""

    def __init__(self, rule: Rule, chunk_bytes: int, host_tier_slots: int = 0) -> None:
        self.rule, self.chunk_bytes = rule, chunk_bytes
        self.host_tier_slots = host_tier_slots
        self.kept: dict[str, int] = {}  # model -> slots of host memory that hold its weights
        self.last_used: dict[str, float] = {}
        self.now = 0.0
        self.places: dict[str, Place] = {}
        self.sizes: dict[str, Size] = {}
        self.divisions: dict[str, tuple[int, int]] = {}  # model -> its num_ranks and num_stages
        self.where: dict[str, list[Place]] = {}  # model -> the devices it is on or comes to, by rank
        self.queues: dict[str, list[int]] = {}
        self.waiting: OrderedDict[str, None] = OrderedDict()  # models to be placed, by their oldest request
        self.models: dict[int, str] = {}  # id of a running request -> model
        self.copies: dict[int, str] = {}  # placement id -> model
        self.num_placements = 0
        self.actions: list[Action] = []

    def handle(self, event: Event) -> list[Action]:
        self.now, self.actions = event.now, []
        match event:
            case events.EngineUp():
                self.places[event.device] = Place(event.device, event.budget_bytes // self.chunk_bytes)
            case events.ModelRegistered():
                self.sizes[event.facts.name] = size_of(event.facts, self.chunk_bytes)
                self.divisions[event.facts.name] = event.facts.num_ranks, event.facts.num_stages
            case events.RequestArrived():
                self._arrived(event)
            case events.RequestFinished():
                self._finished(event.request_id)
            case events.LoadFinished():
                self._loaded(self.copies[event.placement_id])
            case events.EvictFinished():
                self._evicted(self.copies.pop(event.placement_id))
            case events.TimePassed():
                self._expire()
        self._place()
        return self.actions

    def next_deadline(self) -> float | None:
        if not self.rule.idle_s:
            return None
        idle = (one.last_used for one in self._residents() if one.ready and not one.busy and not one.drains)
        return min((since + self.rule.idle_s for since in idle), default=None)

    def _residents(self) -> list[Resident]:
        return [one for place in self.places.values() for one in place.residents.values()]

    def _resident(self, name: str) -> Resident | None:
        places = self.where.get(name)
        return None if places is None else places[0].residents.get(name)

    def _groups(self, name: str, places: Iterable[Place]) -> list[list[Place]]:
        """Returns the devices, or the groups of devices for a split model, onto which a model may be loaded. Each is a list of
        places, by rank, on which the model or its share fits when they are empty."""
        size = self.sizes[name]
        roomy = [place.name for place in places if size.chunks + size.work_space_chunks <= place.total_chunks]
        return [[self.places[device] for device in group] for group in groups(roomy, *self.divisions[name])]

    # ---- requests

    def _arrived(self, event: events.RequestArrived) -> None:
        request_id, name = event.request.request_id, event.request.model
        if not self._groups(name, self.places.values()):
            refusal = Refusal("model_too_large", f"{name} can never fit")
            self.actions.append(Reject(cause=event.cause, request_id=request_id, refusal=refusal))
            return
        resident = self._resident(name)
        if resident is not None and resident.ready and not resident.drains:
            self._submit(resident, request_id)
            return
        self.queues.setdefault(name, []).append(request_id)
        if name not in self.where or (resident is not None and resident.drains):
            self.waiting.setdefault(name)

    def _submit(self, resident: Resident, request_id: int) -> None:
        resident.last_used = self.last_used[resident.name] = self.now
        resident.running[request_id] = None
        self.models[request_id] = resident.name
        device = self.where[resident.name][0].name
        self.actions.append(Submit(cause=f"req-{request_id}", request_id=request_id, model=resident.name, device=device))

    def _finished(self, request_id: int) -> None:
        resident = self._resident(self.models.pop(request_id))
        assert resident is not None
        del resident.running[request_id]
        resident.last_used = self.last_used[resident.name] = self.now
        if resident.drains and not resident.busy:
            self._evict(resident)

    def _loaded(self, name: str) -> None:
        resident = self._resident(name)
        assert resident is not None
        resident.ready = True
        for place in self.where[name]:
            place.coming = ""
        for request_id in self.queues.pop(name, []):
            self._submit(resident, request_id)

    # ---- placing

    def _place(self) -> None:
        for place in self.places.values():
            if place.coming and place.coming not in place.residents:
                self._load_if_room(place.coming)
        for name in list(self.waiting):
            if name in self.where:  # it is still draining
                continue
            if not self._begin(name):
                return  # models are placed in order, so those behind wait, too

    def _begin(self, name: str) -> bool:
        size = self.sizes[name]
        options = []
        for group in self._groups(name, (place for place in self.places.values() if not place.coming)):
            victims: dict[str, Resident] | None = {}
            for place in group:
                found = self._victims(place, size)
                victims = None if victims is None or found is None else victims | {one.name: one for one in found}
            if victims is not None:
                worst = max((self._rank(one) for one in victims.values()), default=None)
                names = [place.name for place in group]
                options.append((worst is not None, worst or (False, 0.0), num_other_hosts(names), names, group, victims))
        if not options:
            return False
        *_, group, chosen = min(options, key=lambda option: option[:4])
        del self.waiting[name]
        self.where[name] = group
        for place in group:
            place.coming = name
        for victim in chosen.values():
            victim.drains = True
            if not victim.busy:
                self._evict(victim)
        self._load_if_room(name)
        return True

    def _victims(self, place: Place, size: Size) -> list[Resident] | None:
        """Returns the models to evict from a device so that a model of this size fits, in addition to those that drain already:
        idle ones before busy ones, and both in the order of the rule's rank. Returns None if the evictions cannot free enough,
        because other models are still loading."""
        order = sorted(
            (one for one in place.residents.values() if one.ready and not one.drains),
            key=self._rank,
        )
        leaving = [one for one in place.residents.values() if one.drains]
        chosen: list[Resident] = []
        most = self.rule.max_residents or len(place.residents) + 1
        while (
            place.free_chunks(size.work_space_chunks, [*leaving, *chosen]) < size.chunks
            or len(place.residents) - len(leaving) - len(chosen) >= most
        ):
            if not order:
                return None
            chosen.append(order.pop(0))
        return chosen

    def _rank(self, one: Resident) -> tuple[bool, float | str]:
        return one.busy, self.rule.rank(one.name, one.last_used, self.now)

    def _keep(self, name: str, num_slots: int) -> bool:
        """Reserves num_slots slots of host memory for a model's weights. If too few are free, drops weights of models that the rule
        ranks lower. Returns whether the slots were reserved; if not, nothing is dropped."""
        if not num_slots or num_slots > self.host_tier_slots:
            return False
        rank = {one: self.rule.rank_in_host(one, self.last_used.get(one, 0.0), self.now) for one in (*self.kept, name)}
        losable = sorted((one for one in self.kept if rank[one] < rank[name]), key=rank.__getitem__)
        free = self.host_tier_slots - sum(self.kept.values())
        if free + sum(self.kept[one] for one in losable) < num_slots:
            return False
        for one in losable:
            if free >= num_slots:
                break
            free += self.kept.pop(one)
        self.kept[name] = num_slots
        return True

    def _load_if_room(self, name: str) -> None:
        size, places = self.sizes[name], self.where[name]
        if any(place.free_chunks(size.work_space_chunks) < size.chunks for place in places):
            return
        if any(one.drains for place in places for one in place.residents.values()):
            return
        self.num_placements += 1
        resident = Resident(name, size, self.num_placements, self.now)
        for place in places:
            place.residents[name] = resident
        self.copies[self.num_placements] = name
        self.last_used[name] = self.now
        slots = tuple(range(size.weights_chunks * len(places)))
        is_here = not num_other_hosts(place.name for place in places)
        warm = is_here and name in self.kept
        keep = is_here and name not in self.kept and self._keep(name, len(slots))
        leader, *others = places
        self.actions.append(
            Load(
                cause="load",
                placement_id=self.num_placements,
                model=name,
                device=leader.name,
                weights_chunks=size.weights_chunks,
                kv_reserved_chunks=size.kv_chunks,
                lease_chunks=max(0, leader.free_chunks()),
                further=tuple((place.name, max(0, place.free_chunks())) for place in others),
                deadline_s=float("inf"),
                source_slots=slots if warm else (),
                keep_slots=slots if keep else (),
            )
        )

    def _evict(self, resident: Resident) -> None:
        leader, *others = self.where[resident.name]
        self.actions.append(
            Evict(
                cause="evict",
                placement_id=resident.placement_id,
                model=resident.name,
                device=leader.name,
                lease_chunks=max(0, leader.free_chunks()),
                further=tuple((place.name, max(0, place.free_chunks())) for place in others),
            )
        )

    def _evicted(self, name: str) -> None:
        for place in self.where.pop(name):
            del place.residents[name]
            self.actions.append(GrantLease(cause="evict", device=place.name, lease_chunks=max(0, place.free_chunks())))

    def _expire(self) -> None:
        """Evicts models that have been idle for the rule's idle_s."""
        for one in self._residents():
            if one.ready and not one.busy and not one.drains and one.last_used + self.rule.idle_s <= self.now:
                one.drains = True
                self._evict(one)
