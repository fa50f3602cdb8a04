"""Any order of events, from engines that are slow, fail and die: the invariants hold after each, and what was accepted ends."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.node import events
from scheduler.node.events import ModelFacts
from tests.scheduler.node.fake_node import MIB, FakeNode, facts

NAMES = ["a", "b", "c", "d", "e", "pair", "pair of two", "three", "pipe", "pipe of four", "huge"]
# Together far more than all devices; "c" may live on one only, "e" brings a large work space, "d" leaves when it is idle. Some are
# split over several devices: "pair" over any two, "three" over any three; the pipelines also over those of other hosts.
MODELS = {
    "a": facts("a", 40),
    "b": facts("b", 50, max_sequences=1, max_queued=3),
    "c": facts("c", 60, devices=("cpu:1",), priority=5.0),
    "d": facts("d", 10, max_sequences=2, keep_alive_s=5.0),
    "e": facts("e", 30, work_space_bytes=30 * MIB),
    "pair": facts("pair", 30, num_ranks=2),
    "pair of two": facts("pair of two", 40, num_ranks=2, devices=("cpu:0", "cpu:1"), keep_alive_s=20.0),
    "three": facts("three", 25, num_ranks=3, max_sequences=1),
    "pipe": facts("pipe", 35, num_ranks=2, num_stages=2),
    "pipe of four": facts("pipe of four", 20, num_ranks=4, num_stages=2, max_sequences=2),
    "huge": facts("huge", 200),
}
DEVICES = [
    {"cpu:0": 100},
    {"cpu:0": 100, "cpu:1": 80},
    {"cpu:0": 100, "cpu:1": 80, "cpu:2": 70, "cpu:3": 90},
    {"cpu:0": 100, "cpu:1": 80, "cuda:0": 90, "cuda:1": 70, "cpu:2": 60},
    {"cpu:0@b": 100, "cpu:0": 80, "cpu:1": 60, "cpu:1@b": 70, "cpu:0@c": 90, "cuda:0@b": 90, "cuda:0": 90},
]


def change(model: str, fingerprint: str, incomplete: str, unusable: str) -> ModelFacts:
    """The model with other files: a little larger, now and then with more KV kept, and some split otherwise. "2": the same files,
    which other settings split."""
    old = MODELS[model]
    return replace(
        old,
        weights_bytes=old.weights_bytes + int(fingerprint) * MIB,
        kv_floor_tokens=4096 if fingerprint == "3" else 0,
        num_ranks={"d": 2, "pair": 1}.get(model, old.num_ranks) if fingerprint == "2" else old.num_ranks,
        num_stages=1 if fingerprint == "2" else old.num_stages,
        fingerprint=old.fingerprint if fingerprint == "2" else fingerprint,
        incomplete=incomplete,
        unusable=unusable,
    )


class Node(RuleBasedStateMachine):
    @initialize(
        devices=st.sampled_from(DEVICES), pinned=st.sampled_from(["", "d", "pair"]), host_slots=st.sampled_from([0, 25, 70])
    )
    def start(self, devices: dict[str, int], pinned: str, host_slots: int) -> None:
        self.node = FakeNode(devices, max_wait_s=40.0, host_tier_slots=host_slots)
        self.node.register(*MODELS.values())
        self.expected: list[tuple[str, str]] = []  # model, expectation
        if pinned:
            self.node.register(replace(MODELS[pinned], pinned=True))

    # ---- clients

    @rule(model=st.sampled_from(NAMES), num=st.integers(1, 4), tenant=st.sampled_from(["", "t"]))
    def arrive(self, model: str, num: int, tenant: str) -> None:
        for _ in range(num):
            self.node.arrive(model, tenant)

    @rule(model=st.sampled_from(NAMES), num=st.integers(2, 12), tenant=st.sampled_from(["", "t"]))
    def arrive_whole(self, model: str, num: int, tenant: str) -> None:
        self.node.arrive_whole(model, num, tenant)

    @rule(model=st.sampled_from(NAMES), seconds=st.sampled_from([0.0, 1.0, 10.0, math.inf]), answers=st.booleans())
    def keep_alive(self, model: str, seconds: float, answers: bool) -> None:
        if answers:
            self.node.arrive(model, keep_alive_s=seconds)
        else:
            self.node.post(events.KeepAliveSet, model=model, keep_alive_s=seconds)

    @rule(model=st.sampled_from(NAMES), tenant=st.sampled_from(["", "t"]))
    def expect(self, model: str, tenant: str) -> None:
        self.expected.append((model, self.node.expect(model, tenant)))

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), arrives=st.booleans())
    def over(self, data: st.DataObject, arrives: bool) -> None:
        model, expectation = self.expected.pop(data.draw(st.integers(0, len(self.expected) - 1)))
        if arrives:
            self.node.arrive(model)
        self.node.over(model, expectation)

    @precondition(lambda self: self.node.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.node.cancel(data.draw(st.sampled_from(sorted(self.node.open))))

    # ---- engines

    @precondition(lambda self: self.node.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.node.finish(data.draw(st.sampled_from(sorted(self.node.running))))

    @rule()
    def quick(self) -> None:
        """Engines catch up with all they were told."""
        for _ in range(5):
            self.node.evicted()
            for load in list(self.node.loads.values()):
                self.node.loaded(load.model)

    @precondition(lambda self: self.node.running)
    @rule()
    def finish_all(self) -> None:
        self.node.finish()

    @precondition(lambda self: self.node.loads)
    @rule(data=st.data(), rejected=st.sampled_from(["", "", "checksum"]))
    def loaded(self, data: st.DataObject, rejected: str) -> None:
        load = data.draw(st.sampled_from(sorted(self.node.loads)))
        self.node.loaded(self.node.loads[load].model, rejected=rejected)

    @precondition(lambda self: self.node.copies)
    @rule(data=st.data(), mib=st.integers(0, 8))
    def kv(self, data: st.DataObject, mib: int) -> None:
        device, model = data.draw(st.sampled_from(sorted(self.node.copies)))
        self.node.note_kv(device, model, mib * MIB)

    @precondition(lambda self: self.node.loads)
    @rule(permanent=st.booleans())
    def load_fails(self, permanent: bool) -> None:
        self.node.load_fails(permanent=permanent)

    @precondition(lambda self: self.node.evicts)
    @rule(data=st.data())
    def evicted(self, data: st.DataObject) -> None:
        evict = data.draw(st.sampled_from(sorted(self.node.evicts)))
        self.node.evicted(self.node.evicts[evict].model)

    @precondition(lambda self: self.node.up)
    @rule(data=st.data(), in_flight=st.booleans())
    def crash(self, data: st.DataObject, in_flight: bool) -> None:
        device = data.draw(st.sampled_from(sorted(self.node.up)))
        running = tuple(self.node.running_on(device))
        self.node.engine_down(device, running if in_flight else ())

    @precondition(lambda self: len(self.node.up) < len(self.node.budgets))
    @rule()
    def engine_up(self) -> None:
        for device in self.node.budgets:
            if device not in self.node.up:
                self.node.engine_up(device)

    @rule(seconds=st.sampled_from([0.1, 2.0, 11.0, 31.0]))
    def sleep(self, seconds: float) -> None:
        self.node.sleep(seconds)

    @rule(placement=st.integers(1, 30))
    def stale(self, placement: int) -> None:
        """Answers that a death or a roll-back has overtaken."""
        node = self.node
        if placement not in node.memory:
            node.post(events.EvictFinished, placement_id=placement)
            node.post(events.LoadFailed, placement_id=placement, reason="stale", permanent=True)
        if placement not in node.loads:
            node.post(events.LoadFinished, placement_id=placement, seconds=1.0)
        node.post(events.RequestFinished, request_id=10_000)

    # ---- the operator

    @rule(verb=st.sampled_from(["load", "unload", "pin", "unpin", "enable", "disable"]), model=st.sampled_from(NAMES))
    def command(self, verb: str, model: str) -> None:
        self.node.command(verb, model)

    @rule(model=st.sampled_from(NAMES))
    def unload_to_warm(self, model: str) -> None:
        self.node.command("unload", model, to="warm")

    @rule(model=st.sampled_from(["", "a"]))
    def drain_and_resume(self, model: str) -> None:
        self.node.command("drain", model)
        self.node.arrive("a")
        self.node.command("resume", model)

    @rule(
        model=st.sampled_from(NAMES),
        fingerprint=st.sampled_from("123"),
        incomplete=st.sampled_from(["", "", "no config"]),
        unusable=st.sampled_from(["", "", "another architecture"]),
        removed=st.booleans(),
    )
    def folder(self, model: str, fingerprint: str, incomplete: str, unusable: str, removed: bool) -> None:
        if removed:
            self.node.remove(model)
        self.node.register(change(model, fingerprint, incomplete, unusable))

    @invariant()
    def shows(self) -> None:
        if not hasattr(self, "node"):
            return
        for name in NAMES:
            self.node.scheduler.why(name)
        for request in list(self.node.open)[:3]:
            assert self.node.scheduler.why(str(request)), f"nothing to say of request {request}"

    def teardown(self) -> None:
        if hasattr(self, "node"):
            for model, expectation in self.expected:
                self.node.over(model, expectation)
            self.node.finish_all()


Node.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestNode = Node.TestCase
