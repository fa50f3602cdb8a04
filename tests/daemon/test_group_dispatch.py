"""A split model between the real node scheduler and two engines that only note what they are sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from config.schema import NodeConfig
from daemon.contracts import Generation
from daemon.engines.engine_events import EngineEvents
from daemon.engines.exchange_memory import ExchangeMemory
from daemon.engines.kernels import Kernels
from daemon.metrics.counters import Metrics
from daemon.models.entry import LoadSource
from daemon.process.loop_watch import LoopWatch
from daemon.record.event_ring import EventRing
from daemon.requests.dispatcher import Dispatcher
from engine import protocol
from engine.exchange import Exchange, GroupForm
from engine.protocol import Abort, Evicted, EvictModel, LoadDone, LoadFailed, LoadModel, SamplingParams, Submit
from loader.shapes.model_shape import Division
from scheduler.node import events
from scheduler.node.node_scheduler import NodeScheduler
from scheduler.node.settings import SchedulerSettings
from tests.daemon.test_dispatcher import Engine, Sink, entry

MIB = 1 << 20
DEVICES = ("cpu:0", "cpu:1")
BOTH = "cpu:0+cpu:1"


class TwoDevices:
    """Model s is split over both devices."""

    def __init__(self) -> None:
        budgets = dict.fromkeys(DEVICES, 64 * MIB)
        self.scheduler = NodeScheduler(SchedulerSettings(chunk_bytes=MIB), budgets)
        self.ring, self.metrics, self.entry = EventRing(), Metrics(), entry("s")
        self.dispatcher = Dispatcher(
            self.scheduler,
            NodeConfig(),
            lambda name: LoadSource("/models/s", "float32", self.entry, form=GroupForm(Division(2))) if name == "s" else None,
            self.ring,
            self.metrics,
            LoopWatch(asyncio.get_running_loop()),
        )
        self.exchange = ExchangeMemory(DEVICES)
        self.seen = Exchange(self.exchange.fd)
        self.told = EngineEvents(self.dispatcher, budgets, Kernels(self.ring), self.exchange)
        self.engines = {device: Engine() for device in DEVICES}
        self.dispatcher.engines = dict(self.engines)
        facts = events.ModelFacts(
            name="s",
            weights_bytes=8 * MIB,
            kv_bytes_per_token=1024,
            work_space_bytes=MIB,
            max_model_len=2048,
            devices=DEVICES,
            num_ranks=2,
        )
        self.dispatcher.post(events.ModelRegistered(now=0.0, cause="scan", facts=facts))
        for device in DEVICES:
            self.up(device)

    def up(self, device: str) -> None:
        self.told.engine_up(device, protocol.EngineReady(pid=1, version=1, num_chunks=64))

    def request(self) -> tuple[Generation, Sink]:
        sink = Sink()
        generation = Generation(self.entry, [1, 2, 3], SamplingParams(max_tokens=8, seed=7), sink)
        self.dispatcher.submit(generation)
        return generation, sink

    def take(self, kind: type) -> dict[str, Any]:
        """Returns the only message of this kind that each engine was sent."""
        found = {}
        for device, engine in self.engines.items():
            if sent := engine.take(kind):
                (found[device],) = sent
        return found

    def load(self) -> int:
        """Has both devices load their shares, and returns the region's offset."""
        loads = self.take(LoadModel)
        assert list(loads) == list(DEVICES)
        for device, load in loads.items():
            self.told.engine_message(device, LoadDone(load.placement_id, "s", 1.0 if device == "cpu:0" else 2.0, 100))
        return int(loads["cpu:0"].group.region_offset)

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.ring.history() if event["event"] == kind]

    def state(self) -> str:
        view = self.scheduler.model("s")
        assert view is not None
        return view.state


@pytest.fixture
async def node() -> AsyncIterator[TwoDevices]:
    made = TwoDevices()
    yield made
    made.scheduler.validate()
    made.seen.close()
    made.exchange.close()


async def test_all_load_and_the_leader_gets_the_requests(node: TwoDevices) -> None:
    generation, sink = node.request()
    loads = {device: list(engine.sent) for device, engine in node.engines.items()}
    assert [message.group.rank for device in DEVICES for message in loads[device] if isinstance(message, LoadModel)] == [0, 1]
    node.load()
    submits = node.take(Submit)
    assert list(submits) == ["cpu:0"]
    assert generation.submitted_device == "cpu:0"
    assert node.metrics.loads == {("s", "done"): 1}
    assert node.metrics.load_seconds["s"] == 2.0
    (loaded,) = node.events_of("loaded")
    assert (loaded["device"], loaded["bytes_read"]) == (BOTH, 200)
    assert {event["device"] for event in node.events_of("state") if event["new"] == "ready"} == {BOTH}
    node.told.engine_message("cpu:0", protocol.TokensOut("s", 1, 0.001, [generation.request_id], [9]))
    assert sink.ids == [9]
    node.dispatcher.cancel(generation)
    assert list(node.take(Abort)) == ["cpu:0"]


async def test_copies_of_experts_are_chosen_before_it_is_loaded_again(node: TwoDevices) -> None:
    """The engines are told of the table, and get memory for it."""
    table = (((2,), (0,)),)
    copies = events.CopiesChosen(now=0.0, cause="experts", model="s", copies=events.ExpertCopies(1, 12 * MIB, table))
    asked: list[str] = []

    def chosen(model: str) -> events.CopiesChosen:
        asked.append(model)
        return copies

    node.told.chosen_copies = chosen
    node.request()
    loads = node.take(LoadModel)
    assert [(load.weights_chunks, load.group.copies) for load in loads.values()] == [(8, ()), (8, ())]
    for device, load in loads.items():
        node.told.engine_message(device, LoadDone(load.placement_id, "s", 1.0, 100))
    (submit,) = node.take(Submit).values()
    node.told.engine_message("cpu:0", protocol.TokensOut("s", 1, 0.001, [submit.request_id], [9], finish=[protocol.FINISH_LENGTH]))
    node.dispatcher.post(events.UnloadRequested(now=0.0, cause="cli-1", model="s", to="cold"))
    assert not asked
    for device, evict in node.take(EvictModel).items():
        node.told.engine_message(device, Evicted(evict.placement_id, "s"))
    assert asked == ["s"]
    node.request()
    loads = node.take(LoadModel)
    assert [(load.weights_chunks, load.group.copies) for load in loads.values()] == [(12, table), (12, table)]


async def test_one_that_cannot_load(node: TwoDevices) -> None:
    node.request()
    loads = node.take(LoadModel)
    placement_id = loads["cpu:0"].placement_id
    node.told.engine_message("cpu:0", LoadDone(placement_id, "s", 1.0, 100))
    node.told.engine_message("cpu:1", LoadFailed(placement_id, "s", "MemoryError: no room", False))
    evicts = node.take(EvictModel)
    assert list(evicts) == ["cpu:0"]
    assert node.state() == "loading"
    node.told.engine_message("cpu:0", Evicted(placement_id, "s"))
    assert node.metrics.loads == {("s", "failed"): 1}
    assert node.metrics.swaps.out_of_memory == {"cpu:1": 1}
    assert any("MemoryError: no room (on cpu:1)" in line for line in node.scheduler.why("s"))
    node.scheduler.validate()


@pytest.mark.parametrize("dead", DEVICES)
async def test_a_death_brings_the_model_back_on_both(node: TwoDevices, dead: str) -> None:
    (other,) = {*DEVICES} - {dead}
    generation, sink = node.request()
    region = node.load()
    node.take(Submit)
    node.told.engine_message("cpu:0", protocol.TokensOut("s", 1, 0.001, [generation.request_id], [9]))
    node.told.engine_ended(dead)
    assert node.seen.is_broken(region), "before anybody is told"
    node.told.engine_down(dead, (generation.request_id,), "was ended by SIGKILL")
    evicts = node.take(EvictModel)
    assert list(evicts) == [other]
    assert sink.error is None
    node.up(dead)
    assert node.take(LoadModel) == {}, "the other share is not gone yet"
    node.told.engine_message(other, Evicted(evicts[other].placement_id, "s"))
    assert not node.seen.is_broken(region), "its memory was given back"
    node.load()
    (again,) = node.take(Submit).values()
    assert (again.request_id, again.output) == (generation.request_id, [9])
    assert node.metrics.resubmitted == 1


async def test_both_die(node: TwoDevices) -> None:
    generation, _ = node.request()
    node.load()
    node.take(Submit)
    for device in DEVICES:
        node.told.engine_ended(device)
        node.told.engine_down(device, (), "was ended by SIGKILL")
    for device in DEVICES:
        node.take(EvictModel)
        node.up(device)
    node.load()
    assert [message.request_id for message in node.take(Submit).values()] == [generation.request_id]


async def test_a_death_while_it_leaves(node: TwoDevices) -> None:
    node.request()
    node.load()
    (request,) = node.take(Submit).values()
    node.told.engine_message("cpu:0", protocol.TokensOut("s", 1, 0.001, [request.request_id], [9], [], [2]))
    unloaded = node.dispatcher.command(lambda now, cause: events.UnloadRequested(now=now, cause=cause, model="s"))
    evicts = node.take(EvictModel)
    assert list(evicts) == list(DEVICES)
    node.told.engine_message("cpu:0", Evicted(evicts["cpu:0"].placement_id, "s"))
    assert not unloaded.done()
    node.told.engine_ended("cpu:1")
    node.told.engine_down("cpu:1", (), "was ended by SIGKILL")
    assert await unloaded is None
    assert node.state() == "cold"
    assert [event["device"] for event in node.events_of("evicted")] == [BOTH]


async def test_the_last_share_dies_while_it_leaves(node: TwoDevices) -> None:
    """The first device is up again by then, so that the model could be placed but for the one that has just died."""
    generation, _ = node.request()
    node.load()
    node.take(Submit)
    node.told.engine_ended("cpu:0")
    node.told.engine_down("cpu:0", (), "was ended by SIGKILL")
    assert list(node.take(EvictModel)) == ["cpu:1"]
    node.up("cpu:0")
    node.told.engine_ended("cpu:1")
    node.told.engine_down("cpu:1", (), "was ended by SIGKILL")
    assert node.take(LoadModel) == {}, "for an engine that is dead"
    node.up("cpu:1")
    node.load()
    assert [message.request_id for message in node.take(Submit).values()] == [generation.request_id]


async def test_no_room_in_the_exchange_memory(node: TwoDevices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daemon.engines.exchange_memory.MOST_BYTES", 1 << 16)
    node.request()
    assert node.take(LoadModel) == {}
    assert any("parallel: the exchange memory has no room" in line for line in node.scheduler.why("s"))
