"""One random run of an engine that has shares of split models, beside whole models, and of another engine with the other shares.

The other engine has a device and a loop of its own. Both run engine/cuda's shares, connections and stages, and take steps from
their queues in the exchange memory by engine/loop/group_steps.py. On the one device models are loaded, evicted and captured as in
every run; the other one has shares alone, which it makes without reading anything, and captures nothing, so that one rank replays
what the other one launches. NCCL's library and the kernel of small sums are those of exchanges.py.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from engine import exchange
from engine.contracts.group_share import GroupShare
from engine.contracts.ranks import GroupBroken
from engine.cuda import begins, columns, connecting, link, nccl, peers, ranks, share, stages
from engine.cuda.backend import CudaBackend
from engine.cuda.kernels import triton_peers
from engine.cuda.peers import Peers
from engine.exchange import Exchange, RegionSizes, first_region, make_exchange, region_bytes
from engine.host import rendezvous
from engine.loading import runner
from engine.loop import group_steps
from engine.loop.group_steps import GroupSteps, PostedStep
from engine.memory import group_region, stage_link
from engine.memory.group_region import GroupRegion, open_region
from engine.protocol import Configure, Group, LoadModel
from loader.shapes.model_shape import ModelShape, SplitShape
from scheduler.batch.plan import BatchPlan
from tests.engine.races import schedule
from tests.engine.races.clocks import Clock
from tests.engine.races.device import Device, Here, Rules
from tests.engine.races.engine_run import (
    BLOCK_TOKENS,
    CHUNK,
    KV_CHUNKS,
    LENGTH,
    NUM_CHUNKS,
    SHAPE,
    WEIGHT_CHUNKS,
    EngineRun,
    Layers,
    Life,
)
from tests.engine.races.exchanges import Library, PeerMemory, Swaps, Word, sums_of_ranks
from tests.engine.races.schedule import Thread
from tests.engine.races.tensors import CUDA, Tensor, Torch, reads, writes

FORMS = triton_peers.FORMS[:2]
STATES = "the states that a stage passes on"
HANDED_BYTES = 1024  # of the states of a step
MOST_SEQUENCES = 4
OWN, OTHER = 0, 1  # numbers of the engines in the exchange memory


class Split(NamedTuple):
    """How a model is split. rank: of this engine's share; rank 0 leads. num_stages: 1: its matrices are divided."""

    rank: int
    num_stages: int = 1


SPLITS = {"s": Split(0), "t": Split(1), "u": Split(0), "p": Split(0, 2), "q": Split(1, 2)}


class SplitLayers(Layers):
    """The layers of a share, with exchanges where those of a decoder have them."""

    passes_second = True

    def __init__(self, on: Here, weights: Any, counts: Any, predicts: bool, ranks: Any, stages: Any) -> None:
        super().__init__(on, weights, counts, predicts)
        self._ranks, self._stages = ranks, stages
        self._is_first = stages is None or stages._taking.is_first
        self.makes_logits = stages is None or stages._taking.is_last

    def forward(self, batch: Any, wanted: Tensor | None) -> Tensor:
        if self.makes_logits:
            return super().forward(batch, wanted)
        out = self._computed(batch)
        self._stages.send(out, out)
        return out

    def _first_states(self, batch: Any) -> Tensor:
        if self._is_first:
            return self._summed(super()._first_states(batch))
        residual, update = self._stages.receive(len(batch.input_ids), True)
        self._on.launch("norm", [reads(residual), reads(update), writes(residual)])
        states: Tensor = residual
        return states

    def _choose_experts(self, states: Tensor) -> None:
        self._summed(states)
        if self._ranks is not None:
            scores = self._made(len(states))
            self._on.launch("router", [reads(states), writes(scores)])
            self._ranks.share_first(scores)
            self._on.launch("route", [reads(scores), writes(states)])

    def _computed(self, batch: Any) -> Tensor:
        return self._summed(super()._computed(batch))

    def logits(self, hidden: Tensor) -> Any:
        logits = super().logits(hidden)
        return logits if self._ranks is None else self._ranks.gather(logits)

    def _summed(self, x: Tensor) -> Tensor:
        if self._ranks is not None:
            self._ranks.sum(x)
        return x


def with_split(split_model: Callable[..., Any]) -> Callable[..., Any]:
    """Returns CudaBackend.split_model for shapes that do not say which share they are; the group does."""

    def of_share(self: CudaBackend, spec: LoadModel, whole: ModelShape, *rest: Any) -> Any:
        group = spec.group
        assert group is not None
        size, stage = len(group.members) // group.num_stages, group.rank * group.num_stages // len(group.members)
        ends = tuple(range(1, group.num_stages + 1)) if group.num_stages > 1 else ()
        split = SplitShape(group.rank % size, size, expert_parts=size, stage=stage, stage_ends=ends)  # so that all count experts
        return split_model(self, spec, replace(whole, split=split), *rest)

    return of_share


class RacingShare(GroupShare):
    """A share whose steps note what they access of its KV and of the group's table."""

    def execute(self, plan: BatchPlan, *arguments: Any) -> Any:
        self._noted()
        return super().execute(plan, *arguments)

    def follow(self, plan: BatchPlan) -> None:
        self._noted()
        super().follow(plan)

    def _noted(self) -> None:
        host, kv = RUNNING.schedule.host, getattr(self._unmap_kv, "__self__", None)
        host.kv = [] if kv is None else [((kv.address, kv.num_bytes), True)]
        host.group, host.device.refuses = self.region.offset, 0  # a step of a share that finds no memory ends its engine


def reading(columns: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that makes a step's columns from a plan and a table, with a note that it reads the table. It is called
    last of all that reads it."""

    def read(plan: BatchPlan, *arguments: Any) -> Any:
        host = RUNNING.schedule.host
        for slot in plan.slots.tolist():
            host.device.host_reads(("table", host.group, slot), "a row of a group's table", "a step")
        return columns(plan, *arguments)

    return read


class _Running:
    """Gives the run in progress to what its engines make by themselves."""

    schedule: schedule.Schedule


RUNNING = _Running()


class RacingRegion(GroupRegion):
    """A region whose plans and rendezvous hand clocks over as its memory does."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.rendezvous.of_group = self.offset  # type: ignore[attr-defined]

    def new_link(self, stage: int | None = None) -> Any:
        link: Any = super().new_link(stage)
        link.of_group = self.offset
        return link

    def write_plan(self, plan: BatchPlan) -> None:
        Here(RUNNING.schedule).host_uses(self._place, "a group's plan", "posting a step")
        super().write_plan(plan)

    def read_plan(self, model: str) -> BatchPlan:
        Here(RUNNING.schedule).host_reads(self._place, "a group's plan", "taking a step")
        return super().read_plan(model)

    @property
    def _place(self) -> Hashable:
        return "plan", self.offset, self._num_plans % self.num_stages


class RacingLink(stage_link.StageLink):
    """A link whose waits let other threads go on, and which hands over what the sender knows. of_group: the group's region.
    is_early, num_places: what a test changes to put a fault in: whether it takes what has not been sent, and how many places there
    are, if not one for each stage."""

    of_group = 0
    is_early, num_places = False, 0
    told: dict[tuple[int, int, int], Clock]  # by group, stage and number of the step

    def take(self) -> Any:
        line, stage, number = self._lines[self._stage - 1], self._stage - 1, self._num_taken
        if self.is_early:
            Here(RUNNING.schedule).host_reads(self._named(stage, number), STATES, "taking them")
        RUNNING.schedule.wait(lambda: line[0] > number or bool(self._broken[0]), "the states of a stage")
        place = super().take()
        if place is not None:
            RUNNING.schedule.host.clock.join(self.told[self.of_group, stage, number])
            Here(RUNNING.schedule).host_reads(self._named(stage, number), STATES, "taking them")
            RUNNING.schedule.point()
        return place

    def send(self) -> None:
        stage, number, host = self._stage, self._num_sent, RUNNING.schedule.host
        Here(RUNNING.schedule).host_uses(self._named(stage, number), STATES, "sending them")
        self.told[self.of_group, stage, number] = Clock(host.clock)
        host.tick()
        super().send()
        RUNNING.schedule.point()

    def _named(self, stage: int, number: int) -> Hashable:
        return "states", self.of_group, stage, number % (self.num_places or self._num_stages)


@dataclass(slots=True, eq=False)
class OtherLife:
    """A model of the other engine. share: once it is loaded. has_ended: whether its load has. adapters: it has none."""

    spec: LoadModel
    share: GroupShare | None = None
    has_ended: bool = False
    adapters: dict[int, int] = field(default_factory=dict)

    @property
    def has_failed(self) -> bool:
        return self.has_ended and self.share is None

    @property
    def table(self) -> Any:
        assert self.share is not None
        return self.share.region.table


class Steps:
    """The group steps of one engine, with the models that it has."""

    def __init__(self, exchange: Exchange, number: int, doorbell: int) -> None:
        threads = SimpleNamespace(run=lambda work: work())
        self.models: Any = SimpleNamespace(followed={}, by_name={}, threads=threads)
        journal: Any = SimpleNamespace(note=lambda ids: None)
        self.groups = GroupSteps(exchange, number, doorbell, self.models, journal, lambda model: None, num_threads=2)

    @property
    def has_entries(self) -> bool:
        return self.groups.is_waiting

    def has(self, name: str) -> bool:
        return name in self.models.by_name or name in self.models.followed

    def add(self, share: GroupShare) -> None:
        if share.leads:
            share.region.empty_table()
            self.models.by_name[share.name] = SimpleNamespace(share=share)
        else:
            self.models.followed[share.name] = share

    def remove(self, share: GroupShare) -> None:
        self.models.by_name.pop(share.name, None)
        self.models.followed.pop(share.name, None)

    def lead(self, share: GroupShare, plan: BatchPlan) -> PostedStep | None:
        """Posts a step; returns None if its group is broken."""
        try:
            return self.groups.post(share, plan, share.region.table)
        except GroupBroken as error:
            self._broke(share, error)
            return None

    def wait(self, share: GroupShare, posted: PostedStep) -> None:
        if share.is_broken:  # its steps are forgotten
            return
        try:
            posted.wait()
        except GroupBroken as error:
            self._broke(share, error)

    def _broke(self, share: GroupShare, error: GroupBroken) -> None:
        group_steps.broke(share, error)
        self.groups.forget(share)


class OtherEngine:
    """The engine of the other device."""

    def __init__(self, run: SplitRun, device: Device, steps: Steps) -> None:
        self._run, self.device, self.steps, self._schedule = run, device, steps, run.schedule
        self.lives: dict[str, OtherLife] = {}
        self.gone = Clock()  # what is known of all models that it has reported as evicted
        self._messages: deque[tuple[str, str, Clock]] = deque()
        self._under_way: deque[tuple[GroupShare, PostedStep]] = deque()
        self.ends = False
        self._begin("loop", self._loop)

    def begin(self) -> None:
        arena: Any = SimpleNamespace(arena=SimpleNamespace(is_cuda=False, device=CUDA))
        self._backend = CudaBackend(arena, self._run.options, self._run.connects)
        self._backend._ops, self._backend._load_stream = None, self.device.new_stream()  # type: ignore[assignment]

    def load(self, spec: LoadModel) -> None:
        life = self.lives[spec.model] = OtherLife(spec)
        self._begin(f"load {spec.model}", lambda: self._load(life))

    def tell(self, name: str, what: str) -> None:
        """Passes a message on to its loop. what: "loaded", "step" or "evict"."""
        self._messages.append((name, what, Clock(self._schedule.host.clock)))
        self._schedule.host.tick()

    def _begin(self, name: str, work: Callable[[], None]) -> None:
        thread = Thread(self._schedule, work, (), f"{self.device.prefix}{name}")
        thread.host.device = self.device
        thread.start()

    def _load(self, life: OtherLife) -> None:
        on = Torch(Here(self._schedule))
        weights: Any = SimpleNamespace(
            num_bytes=WEIGHT_CHUNKS * CHUNK,
            unmap=lambda: None,
            tensor=lambda offset, shape, dtype: on.empty(*shape, dtype=dtype, device=CUDA),
        )
        try:
            region = open_region(self._run.other_exchange, life.spec, BLOCK_TOKENS)
            memory = on.empty(KV_CHUNKS * CHUNK, dtype=torch.uint8, device=CUDA)
            hosted: Any = self._backend.split_model(life.spec, SHAPE, weights, memory, region)  # type: ignore[arg-type]
            life.share = RacingShare(hosted, region)
        except (GroupBroken, nccl.NcclError):
            # as the daemon does once it learns of it: the first engine's load may wait in an exchange
            self._run.other_exchange.break_group(life.spec.group.region_offset)
        finally:
            life.has_ended = True
            self.tell(life.spec.model, "loaded")

    def _loop(self) -> None:
        while not self.ends:
            self._schedule.wait(
                lambda: self.ends or self.steps.has_entries or bool(self._messages) or bool(self._under_way), "something to do"
            )
            if self._messages and self._schedule.random.random() < 0.5:
                name, what, clock = self._messages.popleft()
                self._schedule.host.clock.join(clock)
                if (life := self.lives.get(name)) is not None:
                    getattr(self, f"_{what}")(life)
            elif self._under_way and self._schedule.random.random() < 0.5:
                self.steps.wait(*self._under_way.popleft())
            else:
                self.steps.groups.run_queue()
                self.steps.groups.has_ended()

    def _loaded(self, life: OtherLife) -> None:
        if life.share is not None:
            self.steps.add(life.share)

    def _step(self, life: OtherLife) -> None:
        if life.share is not None and not life.share.is_broken:
            self._run.lead_step(self.steps, life, life.share, self._under_way)

    def _evict(self, life: OtherLife) -> None:
        self._schedule.wait(lambda: life.has_ended, "the end of a load")
        while self._under_way:
            self.steps.wait(*self._under_way.popleft())
        if life.share is not None:
            self.steps.remove(life.share)
            life.share.release()
        self.gone.join(self._schedule.host.clock)
        self._schedule.host.tick()
        del self.lives[life.spec.model]


class SplitRun(EngineRun):
    """A run with split models. steps, other: group steps of this engine, and the other engine. loads_one_at_a_time: whether split
    models are loaded so, as the daemon has them loaded. peer_memory, regions: what a test changes to put a fault in."""

    loads_one_at_a_time = True
    may_fail_with = (*EngineRun.may_fail_with, GroupBroken, nccl.NcclError)

    def __init__(self, seed: int, rules: Rules, monkeypatch: pytest.MonkeyPatch) -> None:
        fd = make_exchange(2)
        doorbells = [os.eventfd(0) for _ in range(2)]
        self._fds = [fd, *doorbells]
        self.exchange, self.other_exchange = Exchange(fd, doorbells), Exchange(fd, doorbells)
        self.options = Configure("cuda:0", NUM_CHUNKS, CHUNK, 0, 512, BLOCK_TOKENS, 5.0, 0)
        self._posted_clocks: dict[tuple[int, int], Clock] = {}
        self._posted: deque[tuple[GroupShare, PostedStep]] = deque()
        super().__init__(seed, rules, monkeypatch)
        self.backend._connects = self.connects
        self._runner._exchange = self.exchange
        other = Device(self.schedule, rules, self._driver.names_at, self._driver.mappings_at, self.device, "other ")
        self.steps = Steps(self.exchange, OWN, doorbells[OWN])
        self.other = OtherEngine(self, other, Steps(self.other_exchange, OTHER, doorbells[OTHER]))
        self.other.begin()
        sizes = RegionSizes(2, MOST_SEQUENCES, LENGTH, BLOCK_TOKENS, 1, 2, HANDED_BYTES)
        self._region_bytes = max(region_bytes(sizes), region_bytes(sizes._replace(num_stages=1)))

    def _patch(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        cuda_memory = super()._patch(monkeypatch)
        on, run = Here(self.schedule), self
        torch_on, RUNNING.schedule = Torch(on), self.schedule
        monkeypatch.setitem(sys.modules, "engine.cuda.peer_regions", ModuleType("engine.cuda.peer_regions"))
        del sys.modules["engine.cuda.peer_regions"]
        regions = importlib.import_module("engine.cuda.peer_regions")
        self.peer_memory, self.regions = PeerMemory(self.schedule, self._driver.place_in_region), regions
        self.swaps = Swaps(self.schedule)
        self.library = Library(self.schedule)
        self.connects = Peers(nccl.Nccl(self.library), regions.DeviceRegions)
        threads = SimpleNamespace(Lock=lambda: schedule.Lock(self.schedule), Event=lambda: schedule.KeptEvent(self.schedule))
        words = _TorchOfPeers(on)
        RacingLink.told = {}
        take, post = exchange.EngineQueue.take, exchange.Poster.post

        def taken(queue: exchange.EngineQueue, but: Any = ()) -> int | None:
            found = take(queue, but)
            if found is not None:
                run.schedule.host.clock.join(run._posted_clocks.get((queue.number, queue._words[queue._taken]), Clock()))
            return found

        def posted(poster: exchange.Poster) -> bool:
            for number, queue in zip(poster._members, poster._queues, strict=True):
                run.note_posted(number, poster._words[queue] + 1)
            is_posted = post(poster)
            run.schedule.point()
            return is_posted

        patches: list[tuple[Any, dict[str, Any]]] = [
            (regions, {"torch": torch_on}),
            (nccl, {"torch": torch_on}),
            (link, {"Thread": self.schedule.thread}),
            (ranks, {"torch": torch_on, "threading": threads}),
            (connecting, {"threading": threads, "Thread": self.schedule.thread}),
            (begins, {"torch": torch_on, "EventFence": self.copies.EventFence}),
            (begins, {"queue": SimpleNamespace(SimpleQueue=lambda: schedule.Queue(self.schedule))}),
            (peers, {"torch": words, "threading": threads, "Thread": self.schedule.thread}),
            (peers, {"triton_peers": sums_of_ranks(self.peer_memory), "PeerHandles": self.swaps, "_trials": words.trials}),
            (CudaBackend, {"split_model": with_split(CudaBackend.split_model)}),
            (share, {"torch": torch_on}),
            (share, {"extend_step": reading(columns.extend_step), "decode_columns": reading(columns.decode_columns)}),
            (stages, {"torch": torch_on, "EventFence": self.copies.EventFence}),
            (stages, {"queue": SimpleNamespace(SimpleQueue=lambda: schedule.Queue(self.schedule))}),
            (group_region, {"StageLink": RacingLink}),
            (runner, {"GroupShare": RacingShare}),
            (rendezvous.Rendezvous, {"meet": self._meet}),
            (exchange.EngineQueue, {"take": taken}),
            (exchange.Poster, {"post": posted}),
            (sys.modules[open_region.__module__], {"GroupRegion": RacingRegion}),
        ]
        for module, names in patches:
            for name, value in names.items():
                monkeypatch.setattr(module, name, value)
        self._meetings: dict[int, Clock] = {}
        return cuda_memory

    @property
    def _meet(self) -> Any:
        """Stands in for Rendezvous.meet."""
        run = self

        def meet(own: Any, new_id: Callable[[], bytes]) -> bytes | None:
            host, clock = run.schedule.host, run._meetings.setdefault(own.of_group, Clock())
            if own._rank == 0:
                clock.clear()
            own._arrived[own._rank] = 1
            clock.join(host.clock)
            host.tick()
            is_over = (lambda: own._arrived.all()) if own._rank == 0 else (lambda: own._is_told[0])
            run.schedule.wait(lambda: bool(is_over() or own._broken[0]), "the other ranks")
            if not is_over():
                return None
            if own._rank == 0:
                own._id[:] = np.frombuffer(new_id(), np.int64)
                clock.join(host.clock)
                own._is_told[0] = 1
            host.clock.join(clock)
            group_id: bytes = own._id.tobytes()
            return group_id

        return meet

    def note_posted(self, number: int, entry: int) -> None:
        """Notes that who takes this entry of an engine's queue knows what this thread knows. entry: counted from 1."""
        self._posted_clocks[number, entry] = Clock(self.schedule.host.clock)
        self.schedule.host.tick()

    def _layers(self, ops: Any, shape: Any, held: Any, ranks: Any, stages: Any) -> Any:
        if ranks is None and stages is None:
            return super()._layers(ops, shape, held, ranks, stages)
        return SplitLayers(Here(self.schedule), *held, shape.predicts, ranks, stages)

    # ---- the loop

    def _more_actions(self) -> list[Callable[[], None]]:
        return [*[self._start_share] * 4, *[self._ask_other] * 4, *[self._run_queue] * 4, self._evict_share, self._lose]

    def _copy(self, life: Life, save: bool) -> None:
        if life.is_split:  # none of its KV is saved
            life.served, life.becomes = True, ""
        else:
            super()._copy(life, save)

    def _run_queue(self) -> None:
        self.steps.groups.run_queue()

    def _take(self) -> None:
        super()._take()
        self.steps.groups.run_queue()
        if self.schedule.errors:
            raise self.schedule.errors[0]
        for name, life in list(self._lives.items()):
            if not life.is_split:
                continue
            if life.served and not self.steps.has(name):
                self.steps.add(life.hosted)
                life.table = life.hosted.region.table
            if self.other.lives[name].has_failed:
                self._leave(life)

    def _finish(self) -> None:
        super()._finish()
        while self._posted:
            self.steps.wait(*self._posted.popleft())

    def _start_share(self) -> None:
        name = self._random.choice(list(SPLITS))
        if name in self._lives or name in self.other.lives or len(self._free) < WEIGHT_CHUNKS + KV_CHUNKS:
            return
        if self.loads_one_at_a_time and self._is_loading_shares():
            return
        self._finish()
        self.schedule.host.clock.join(self.other.gone)
        place, split = self._taken_place(), SPLITS[name]
        offset = first_region(2) + list(SPLITS).index(name) * self._region_bytes
        self.exchange.clear(offset, self._region_bytes)
        members = [OWN, OTHER] if split.rank == 0 else [OTHER, OWN]
        of_pipeline = {"num_stages": split.num_stages, "handed_bytes": HANDED_BYTES if split.num_stages > 1 else 0}
        group = Group(split.rank, members, offset, self._region_bytes, **of_pipeline)
        limits = (WEIGHT_CHUNKS, KV_CHUNKS, NUM_CHUNKS, LENGTH, MOST_SEQUENCES, [])
        spec = LoadModel(1, name, "", "bfloat16", "f", *limits, group=group)
        self._lives[name] = Life(spec, place, self._loads.start(spec, place), None, is_split=True)
        self.other.load(msgspec.structs.replace(spec, group=msgspec.structs.replace(group, rank=1 - split.rank)))

    def _is_loading_shares(self) -> bool:
        own = any(life.is_split and not life.served for life in self._lives.values())
        return own or any(not life.has_ended for life in self.other.lives.values())

    def _step_of(self, life: Life) -> None:
        if not life.is_split:
            super()._step_of(life)
            return
        own: GroupShare = life.hosted
        if own.leads and self.other.steps.has(life.spec.model):
            if self._under_way is not None and own.num_stages == 1:
                EngineRun._finish(self)
            self.lead_step(self.steps, life, own, self._posted)

    def lead_step(self, steps: Steps, life: Any, own: GroupShare, under_way: deque[tuple[GroupShare, PostedStep]]) -> None:
        """Posts a step of a split model, and waits for others until as many are under way as the model has stages."""
        if own.is_broken:
            return
        half = MOST_SEQUENCES // own.num_stages  # its sequences are those of the step before the ones under way
        first = half * (own.region._num_plans % own.num_stages)
        for slot in range(first, first + half):
            Here(self.schedule).host_uses(("table", own.region.offset, slot), "a row of a group's table", "planning")
        plan = self._plan(life, first, min(half, 3))
        if (posted := steps.lead(own, plan)) is None:
            return
        under_way.append((own, posted))
        while [one for one, _ in under_way].count(own) > own.num_stages - 1:
            steps.wait(*under_way.popleft())

    def _ask_other(self) -> None:
        """Has the other engine lead a step of each model that it leads, if this one can follow."""
        for name, life in self._lives.items():
            if life.is_split and self.steps.has(name) and not life.hosted.leads and self.other.steps.has(name):
                self.other.tell(name, "step")

    # ---- ends

    def _cancel(self) -> None:
        super()._cancel()
        for life in self._lives.values():
            if life.is_split and life.load.cancelled.is_set():
                self.exchange.break_group(life.spec.group.region_offset)

    def _evict_share(self) -> None:
        served = [life for life in self._lives.values() if life.is_split and life.served]
        if served:
            self._finish()
            self._leave(self._random.choice(served))

    def _leave(self, life: Life) -> None:
        """Evicts a share, or cancels its load."""
        self._finish()
        if life.served:
            self._end(life)
        else:
            life.load.cancelled.set()
            self.exchange.break_group(life.spec.group.region_offset)

    def _lose(self) -> None:
        """Breaks a group, as the daemon does that has lost one of its devices."""
        served = [life for life in self._lives.values() if life.is_split and life.served]
        if served and self._random.random() < 0.3:
            self.exchange.break_group(self._random.choice(served).spec.group.region_offset)

    def _end(self, life: Life) -> None:
        if life.is_split:
            name = life.spec.model
            if life.hosted is not None:
                self.steps.remove(life.hosted)
            else:
                self.exchange.break_group(life.spec.group.region_offset)
            self.other.tell(name, "evict")
        super()._end(life)

    def _settle(self) -> None:
        self.schedule.go_on_until(lambda: not any(not life.served for life in self._lives.values()), self._take)
        for life in [life for life in self._lives.values() if life.is_split]:
            self._leave(life)
        self.schedule.go_on_until(lambda: not self.other.lives, self._take)
        self.other.ends = True
        super()._settle()

    def _close(self) -> None:
        with ExitStack() as closes:  # all that can be closed after a fault
            for fd in self._fds:
                closes.callback(os.close, fd)
            closes.callback(self.other_exchange.close)
            closes.callback(self.exchange.close)
            closes.callback(self.swaps.close)
            for _, kv in self._runner._kv_ranges._ranges.values():
                closes.callback(kv.close)
            closes.callback(super()._close)


class _TorchOfPeers(Torch):
    """Torch as engine/cuda/peers.py uses it."""

    def zeros(self, *shape: Any, dtype: Any = torch.float32, device: Any = None, pin_memory: bool = False) -> Any:
        return Word()

    def trials(self, rank: int, size: int, device: Any) -> list[tuple[Tensor, Any]]:
        """Stands in for engine.cuda.peers._trials."""
        on = Torch(self._on)
        return [(on.full((num,), 1.0, dtype=dtype, device=device), None) for dtype, num in FORMS]
