"""Long simulated runs: models that compete for one device all make progress, and how much is evicted stays within bounds."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from itertools import pairwise

import pytest

from scheduler.node import actions, events
from scheduler.node.events import ModelFacts, RequestFacts
from scheduler.node.node_scheduler import NodeScheduler, SchedulerSettings
from tests.scheduler.node.fake_node import MIB, FakeNode, facts


class Simulation:
    """Arrivals at given rates; loads, evictions and requests take given times."""

    def __init__(
        self, models: dict[str, float], budget_mib: int = 100, weights_mib: int | dict[str, int] = 60, request_s: float = 2.0
    ) -> None:
        self.random = random.Random(7)
        self.rates, self.request_s = models, request_s
        self.now = 0.0
        self.due: list[tuple[float, int, events.Event]] = []
        self.order = 0
        self.num_requests = 0
        self.waits: dict[str, list[float]] = {name: [] for name in models}
        self.arrived: dict[int, float] = {}
        self.rejected: Counter[str] = Counter()
        self.evicts: list[tuple[float, str]] = []
        self.busy_evicts: dict[str, list[float]] = {name: [] for name in models}
        self.scheduler = NodeScheduler(SchedulerSettings())
        self.post(events.EngineUp(now=0, cause="sim", device="cpu:0", budget_bytes=budget_mib * MIB))
        for name in models:
            size = weights_mib if isinstance(weights_mib, int) else weights_mib[name]
            self.post(events.ModelRegistered(now=0, cause="sim", facts=facts(name, size, max_sequences=8)))
            self.next_arrival(name)

    def later(self, delay_s: float, event: events.Event) -> None:
        self.order += 1
        heapq.heappush(self.due, (self.now + delay_s, self.order, event))

    def next_arrival(self, name: str) -> None:
        self.num_requests += 1
        request = RequestFacts(self.num_requests, name, 10, 10)
        self.later(self.random.expovariate(self.rates[name]), events.RequestArrived(now=0, cause="sim", request=request))

    def post(self, event: events.Event) -> None:
        object.__setattr__(event, "now", self.now)
        if isinstance(event, events.RequestArrived):
            self.arrived[event.request.request_id] = self.now
            self.next_arrival(event.request.model)
        for action in self.scheduler.handle(event):
            match action:
                case actions.Load():
                    self.later(1.0, events.LoadFinished(now=0, cause="sim", placement_id=action.placement_id, seconds=1.0))
                case actions.Evict():
                    self.evicts.append((self.now, action.model))
                    self.later(0.1, events.EvictFinished(now=0, cause="sim", placement_id=action.placement_id))
                case actions.Submit():
                    self.waits[action.model].append(self.now - self.arrived[action.request_id])
                    duration_s = self.random.expovariate(1 / self.request_s)
                    self.later(duration_s, events.RequestFinished(now=0, cause="sim", request_id=action.request_id))
                case actions.Reject():
                    self.rejected[action.refusal.code] += 1
                case actions.StateChanged(old="ready", new="draining"):
                    view = self.scheduler.model(action.model)
                    assert view is not None
                    if view.active:
                        self.busy_evicts[action.model].append(self.now)

    def run(self, seconds: float) -> None:
        while self.due:
            at = self.due[0][0]
            deadline = self.scheduler.next_deadline()
            if deadline is not None and deadline < at:
                self.now = max(self.now, deadline)
                self.post(events.TimePassed(now=0, cause="sim"))
                continue
            self.now, _, event = heapq.heappop(self.due)
            if self.now > seconds:
                return
            self.post(event)
            if self.order % 50 == 0:
                self.scheduler.validate()


@pytest.mark.parametrize("num_models", [2, 3])
def test_busy_models_that_exclude_each_other_all_make_progress(num_models: int) -> None:
    simulation = Simulation({f"m{index}": 5.0 for index in range(num_models)})
    simulation.run(1000)
    for name, waits in simulation.waits.items():
        assert len(waits) > 1000, f"{name} starves: {len(waits)} requests in 1000 s"
    for name, times in simulation.busy_evicts.items():
        gaps = [later - earlier for earlier, later in pairwise(times)]
        # back in a second, then it has its tenure of 2 s, twice its load; in between the other one must have become overdue
        assert min(gaps, default=30) > 3, f"rule 9: {name} forced out after {min(gaps)} s"
        assert sum(gaps) / len(gaps) > 10
    assert not simulation.rejected["load_timeout"]


def test_a_rare_model_is_served_beside_a_busy_one() -> None:
    simulation = Simulation({"busy": 3.0, "rare": 0.02})
    simulation.run(2000)
    assert len(simulation.waits["rare"]) >= 20
    assert max(simulation.waits["rare"]) < 60
    assert sum(simulation.rejected.values()) == 0


def test_many_models_with_light_load_wait_little_and_fail_never() -> None:
    simulation = Simulation({f"m{index}": 0.05 for index in range(6)}, weights_mib=40, request_s=1.0)
    simulation.run(2000)
    waits = [wait for some in simulation.waits.values() for wait in some]
    assert sum(simulation.rejected.values()) == 0
    assert sum(waits) / len(waits) < 4
    assert max(waits) < 30


def test_what_fits_together_is_never_evicted() -> None:
    simulation = Simulation({f"m{index}": 1.0 for index in range(3)}, weights_mib=20)
    simulation.run(500)
    assert simulation.evicts == []
    assert sum(simulation.rejected.values()) == 0


def test_a_large_model_gets_its_turn_among_many_small_busy_ones() -> None:
    rates = {"large": 0.2, **{f"s{index}": 2.0 for index in range(5)}}
    simulation = Simulation(rates, weights_mib={"large": 85, **{f"s{index}": 15 for index in range(5)}})
    simulation.run(1000)
    for name, waits in simulation.waits.items():
        assert len(waits) > 0.7 * 1000 * rates[name], f"{name}: {len(waits)} requests served; {simulation.rejected}"


@pytest.mark.parametrize("large", [facts("large", 80), facts("large", 80, num_ranks=2)], ids=["whole", "split"])
def test_a_large_model_has_its_turn_among_small_ones_that_come_and_go(large: ModelFacts) -> None:
    devices = [f"cpu:{at}" for at in range(large.num_ranks)]
    node = FakeNode(dict.fromkeys(devices, 100))
    small = {device: [f"{device[-1]}{at}" for at in range(6)] for device in devices}
    node.register(large, *(facts(name, 20, devices=(device,)) for device, names in small.items() for name in names))
    for names in small.values():
        node.arrive(names[0])
    node.arrive("large")
    for at in range(40):
        for names in small.values():
            node.arrive(names[(at + 1) % 6])
        running = list(node.running)
        for device in devices:  # at each moment one of its models is being loaded, or has just been loaded and is busy
            node.sleep(1.0 / len(devices))
            if (load := next((load for load in node.loads.values() if load.device == device), None)) is not None:
                node.loaded(load.model, seconds=2.0)
        node.finish(*running) if running else None
        while node.evicts:
            node.evicted()
        if any(load.model == "large" for load in node.loads.values()):
            break
    assert any(load.model == "large" for load in node.loads.values()), "it starves"
    assert at < 30
    node.finish_all()
    assert set(node.ends.values()) == {"finished"}


def test_a_whole_model_holds_one_device_of_two() -> None:
    node = FakeNode({"cpu:0": 100, "cpu:1": 100}, overdue_after_s=2.0)
    node.register(*(facts(f"busy{at}", 60, devices=(f"cpu:{at}",)) for at in (0, 1)), facts("large", 80))
    node.register(*(facts(f"small{at}", 20, devices=(f"cpu:{at}",)) for at in (0, 1)))
    for at in (0, 1):
        node.arrive(f"busy{at}")
        node.loaded(f"busy{at}", seconds=20.0)  # each may stay for 40 s
    node.arrive("large")
    node.sleep(30)
    waiting = {f"small{at}": node.arrive(f"small{at}") for at in (0, 1)}
    (load,) = node.loads.values()
    (held,) = waiting.keys() - {load.model}
    told = node.scheduler.why(f"req-{waiting[held]}")
    assert any("large waits for it, and its requests are overdue" in line for line in told)
    node.finish_all()
    assert set(node.ends.values()) == {"finished"}


@pytest.mark.parametrize("line", ["by_age", "by_work"])
def test_a_line_with_a_model_that_nobody_waits_for_is_found(line: str) -> None:
    """Loads are chosen from both lines."""
    node = FakeNode()
    node.register(facts("a"))
    node.scheduler.validate()
    getattr(node.scheduler._node.devices["cpu:0"], line).set("a", 0.0)
    with pytest.raises(AssertionError, match="a"):
        node.scheduler.validate()
