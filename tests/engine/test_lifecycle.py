"""Models' lives, with jobs that end in every possible order: after each event the lives are consistent, every message of the daemon
is answered once, and in the end all memory is free.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from engine.contracts.group_share import GroupShare
from engine.contracts.loads import KernelNews, LoadTask
from engine.contracts.steps import SplitModel
from engine.exchange import RegionSizes
from engine.lifecycle import kv_transfer
from engine.lifecycle.first_step import FirstStep
from engine.lifecycle.kv_transfer import KVTransfer
from engine.lifecycle.life import FOLLOWERS, Life, State
from engine.lifecycle.lifecycle import Lifecycle
from engine.lifecycle.loads import Begun, Load, Streams
from engine.memory.group_region import open_region
from engine.memory.weight_gate import WeightsWithdrawn
from engine.null.runner import NullModel, Pacer
from engine.protocol import (
    EMBED,
    Evicted,
    EvictModel,
    Group,
    KernelsTold,
    LoadDone,
    LoadFailed,
    LoadModel,
    LoadStreams,
    SamplingParams,
    Submit,
)
from engine.serve.embedder import Embedder
from engine.serve.served_models import Place, ServedModels
from loader.errors import CheckpointError
from scheduler.batch.request import BatchRequest
from tests.engine.engine_process import Node as SharedNode
from tests.engine.engine_process import load_message, null_configure
from tests.engine.test_served_models import Node

NAMES = ("a", "b", "c")
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # without shrinking, which takes minutes here
CONFIGURE = null_configure(num_chunks=64, chunk_bytes=1 << 16)


class EarlyModel(NullModel):
    """A null model whose first step may run while its weights arrive. released: how often its weights were given up."""

    released = 0

    def execute_behind(self, *args: Any) -> Any:
        raise AssertionError("the machine runs no step")

    def release(self) -> None:
        self.released += 1


class Gate:
    """Stands in for a WeightGate, of which the lives only know which one it is."""


class HandLoads:
    """Stands in for Loads: jobs end when the test says so."""

    def __init__(self) -> None:
        self.loads: list[Load] = []
        self.copies: list[KVTransfer] = []
        self.steps: list[FirstStep] = []
        self.reports: list[Any] = []

    def start(self, spec: LoadModel, place: Place) -> Load:
        cancelled = threading.Event()
        task = LoadTask(spec, place.weights, lambda done, total: None, cancelled.is_set, place.left)
        self.loads.append(Load(task, place, time.monotonic(), cancelled))
        return self.loads[-1]

    def copy(self, transfer: KVTransfer) -> None:
        self.copies.append(transfer)

    def step(self, work: Callable[[], None], first: FirstStep) -> None:
        self.steps.append(first)

    def take(self) -> list[Any]:
        reports, self.reports = self.reports, []
        return reports


def no_blocks(served: Any, save: bool, pieces: list[Any]) -> KVTransfer:
    return KVTransfer(served, [], [], np.zeros((0, 1), np.int32), save, pieces, None)


class LivesMachine(RuleBasedStateMachine):
    def __init__(self, seen: Counter[Any], patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.seen = seen
        patch.setattr(
            kv_transfer, "restoring", lambda served, *rest: no_blocks(served, False, []) if served.spec.kv_index else None
        )
        patch.setattr(kv_transfer, "saving", lambda served, slots, *rest: no_blocks(served, True, [[]] if slots else []))
        self.loads, self.sent, self.models = HandLoads(), list[Any](), ServedModels(CONFIGURE, None)
        self.lifecycle = Lifecycle(self.models, self.loads, self.sent.append, lambda name: None, resume=self.resume)  # type: ignore[arg-type]
        self.early: dict[int, EarlyModel] = {}  # placement id -> its model, once that exists
        self.next_id, self.next_request = 1, 1
        self.evictions: dict[int, str] = {}  # placement id -> model
        self.specs: list[LoadModel] = []

    def number(self) -> int:
        self.next_id += 1
        return self.next_id

    def resume(self, first: FirstStep) -> None:
        """Takes in a step's tokens, as the engine's loop does."""
        if first.plan is not None and first.result is not None:
            num = int(first.plan.samples.sum())
            first.served.scheduler.finish_step(first.plan, np.full(num, 7, np.int32), np.zeros(num, np.bool_))
            self.seen["step taken in"] += 1

    def report(self, item: Any) -> None:
        lives = self.lifecycle.lives.values()
        unwanted = {life.load.task.spec.placement_id for life in lives if life.evictions and life.first is None}
        num_sent = len(self.sent)
        self.loads.reports.append(item)
        self.lifecycle.take()
        self.check()
        done = {message.placement_id for message in self.sent[num_sent:] if isinstance(message, LoadDone)}
        assert not done & unwanted, "a model that is to be evicted, and has run nothing yet, was served first"

    def check(self) -> None:
        self.lifecycle.validate()
        self.seen.update(life.state for life in self.lifecycle.lives.values())
        answered = Counter(message.placement_id for message in self.sent if isinstance(message, Evicted))
        assert set(answered.values()) <= {1}, "an eviction was answered twice"
        waiting = {message.placement_id for life in self.lifecycle.lives.values() for message in life.evictions}
        assert set(self.evictions) == set(answered) | waiting, "an eviction is neither answered nor waits for its answer"
        ends = Counter(message.placement_id for message in self.sent if isinstance(message, LoadDone | LoadFailed))
        assert set(ends.values()) <= {1}, "a load was answered twice"

    # ---- the daemon

    @rule(name=st.sampled_from(NAMES), kv=st.booleans())
    def load(self, name: str, kv: bool) -> None:
        is_known = name in self.lifecycle.lives
        spec = load_message("", name, self.number(), kv_index=b"index" if kv else b"")
        self.specs.append(spec)
        self.lifecycle.load(spec)
        self.check()
        if is_known:
            assert isinstance(self.sent[-1], LoadFailed)
            assert name in self.sent[-1].error

    @rule(name=st.sampled_from(NAMES), saves=st.booleans())
    def evict(self, name: str, saves: bool) -> None:
        message = EvictModel(self.number(), name, 40, [0] if saves else [])
        self.evictions[message.placement_id] = name
        self.lifecycle.evict(message)
        self.check()

    @precondition(lambda self: self.lifecycle.first_steps)
    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        first = self.lifecycle.first_steps[data.draw(st.sampled_from(sorted(self.lifecycle.first_steps)))]
        spec = first.served.spec
        offered = any(isinstance(one, LoadStreams) and one.placement_id == spec.placement_id for one in self.sent)
        if offered and not first.running:
            params = SamplingParams(max_tokens=4, seed=1)
            first.served.scheduler.submit(BatchRequest(self.next_request, np.array([5, 6, 7], np.int32), 3, params))
            self.next_request += 1

    @precondition(lambda self: any(first.can_start for first in self.lifecycle.first_steps.values()))
    @rule()
    def start_steps(self) -> None:
        for first in self.lifecycle.first_steps.values():
            if first.can_start:
                self.lifecycle.start(first, self.number())
        self.check()

    # ---- the jobs

    def model_of(self, load: Load) -> EarlyModel:
        spec = load.task.spec
        return self.early.setdefault(spec.placement_id, EarlyModel(spec, {}, CONFIGURE, Pacer(0.0)))

    @precondition(lambda self: any(load.gate is None for load in self.loads.loads))
    @rule(data=st.data())
    def model_exists(self, data: st.DataObject) -> None:
        load = data.draw(st.sampled_from([load for load in self.loads.loads if load.gate is None]))
        load.gate = Gate()  # type: ignore[assignment]
        self.report(Begun(load, self.model_of(load)))

    @precondition(lambda self: any(load.gate is not None for load in self.loads.loads))
    @rule(data=st.data())
    def first_weights(self, data: st.DataObject) -> None:
        load = data.draw(st.sampled_from([load for load in self.loads.loads if load.gate is not None]))
        self.report(Streams(load))

    @precondition(lambda self: self.loads.loads)
    @rule(data=st.data(), fails=st.booleans())
    def load_ends(self, data: st.DataObject, fails: bool) -> None:
        load = data.draw(st.sampled_from(self.loads.loads))
        self.loads.loads.remove(load)
        if fails:
            load.error = CheckpointError("model.safetensors", "w", "is broken")
            if load.gate is not None:
                self.model_of(load).release()  # a runner does so before it raises
        else:
            load.hosted = self.model_of(load)
        self.report(load)

    @precondition(lambda self: self.loads.copies)
    @rule(data=st.data())
    def copy_ends(self, data: st.DataObject) -> None:
        transfer = data.draw(st.sampled_from(self.loads.copies))
        self.loads.copies.remove(transfer)
        self.report(transfer)

    @precondition(lambda self: self.loads.steps)
    @rule(data=st.data(), withdrawn=st.booleans())
    def step_ends(self, data: st.DataObject, withdrawn: bool) -> None:
        first = data.draw(st.sampled_from(self.loads.steps))
        self.loads.steps.remove(first)
        if withdrawn and not first.loaded:  # the weights of a load that has succeeded are not withdrawn
            first.error = WeightsWithdrawn("they are read again")
        else:
            first.result = object()  # type: ignore[assignment]
        self.report(first)

    def teardown(self) -> None:
        for load in list(self.loads.loads):
            self.loads.loads.remove(load)
            load.hosted = self.model_of(load)
            self.report(load)
        while self.loads.copies or self.loads.steps:
            while self.loads.copies:
                self.report(self.loads.copies.pop())
            while self.loads.steps:
                first = self.loads.steps.pop()
                first.result = object()  # type: ignore[assignment]
                self.report(first)
        for name in NAMES:
            self.evict(name, saves=False)
        assert not self.lifecycle.lives
        assert not self.lifecycle.busy
        chunks = self.models.chunks
        assert (chunks.num_drawn, chunks.num_reserved, chunks.num_weights, chunks.num_leaving) == (0, 0, 0, 0)
        assert chunks.free.all()
        assert all(model.released for model in self.early.values())
        answered = {message.placement_id for message in self.sent if isinstance(message, LoadDone | LoadFailed)}
        for spec in self.specs:  # a load that was never answered was withdrawn
            assert spec.placement_id in answered or spec.model in self.evictions.values()


MOST_ROUNDS = 5  # what is drawn differs from run to run, and one round may miss a rare event


def test_lives_stay_consistent_whatever_ends_first() -> None:
    seen: Counter[Any] = Counter()
    explored = settings(
        max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck), phases=PHASES
    )
    with pytest.MonkeyPatch.context() as patch:
        for _ in range(MOST_ROUNDS):
            run_state_machine_as_test(lambda: LivesMachine(seen, patch), settings=explored)
            if set(State) <= set(seen) and seen["step taken in"]:
                break
    assert set(State) <= set(seen), "a state was never reached"
    assert seen["step taken in"]


@pytest.mark.parametrize("state", State)
def test_a_state_that_cannot_follow_is_refused(state: State) -> None:
    life = Life(HandLoads().start(load_message("", "m"), Place(np.zeros(0, np.int32), np.zeros(0, np.int32))))
    for wanted in State:
        life.state = state
        if wanted in FOLLOWERS[state]:
            life.enter(wanted)
            assert life.state is wanted
        else:
            with pytest.raises(RuntimeError, match=f"model m: {wanted.value} cannot follow {state.value}"):
                life.enter(wanted)
            assert life.state is state


class Encoder:
    """A stand-in whose steps take a tenth of a second of device time."""

    name, task, weights_bytes, vocab_size = "e", EMBED, 0, 100

    def embed(self, texts: Sequence[Any], second_at: Sequence[int]) -> tuple[Any, float]:
        return np.ones((len(texts), 1), np.float32), 0.1

    def release(self) -> None:
        pass


def test_a_split_model_s_waits_are_charged_but_are_no_cost_of_its_steps(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.load("a")
    node.submit("a", 1, 20)
    served = node.models.by_name["a"]
    served.share = cast(GroupShare, object())
    plan = served.scheduler.plan(0)
    assert plan is not None
    for _ in range(9):
        node.models.charge(served, plan, 0.1, waited_s=0.06)
    assert served.limits.wait_s == pytest.approx(0.06 * (1 - 0.9**9))
    assert served.limits.expected_s(plan) == pytest.approx(0.04 + served.limits.wait_s)
    assert served.unreported_s == pytest.approx(0.9)


def test_steps_cost_something_else_once_other_kernels_compute_them(tmp_path: Path) -> None:
    node, loads, sent = Node(tmp_path), HandLoads(), list[Any]()
    lifecycle = Lifecycle(node.models, loads, sent.append, lambda name: None, resume=lambda first: None)  # type: ignore[arg-type]
    node.load("a")
    node.submit("a", 1, 20)
    served = node.models.by_name["a"]
    plan = served.scheduler.plan(0)
    assert plan is not None
    encoder = node.models.embedders["e"] = Embedder(load_message("", "e"), Encoder(), 256, 0.01)
    for request_id in range(9):
        node.models.charge(served, plan, 0.1)
        encoder.submit(Submit(request_id, "e", [1, 2, 3], SamplingParams(1), task=EMBED))
        encoder.step(encoder.next_texts(others_busy=False), request_id)
    encoder.submit(Submit(9, "e", [1, 2, 3], SamplingParams(1), task=EMBED))
    for spec in (served.spec, encoder.spec):
        load = loads.start(spec, Place(np.zeros(0, np.int32), np.zeros(0, np.int32)))
        lifecycle.lives[spec.model] = Life(load, State.SERVED, load_runs=False)

    def expected_s() -> tuple[float, float]:
        return served.limits.expected_s(plan), encoder.expected_s([9])

    assert expected_s() == pytest.approx((0.1, 0.1))
    progress, over = KernelsTold("float32", 1, 2, 3.0), KernelsTold("", 2, 2, 0.0)
    loads.reports = [KernelNews(progress)]
    lifecycle.take()
    assert expected_s() == pytest.approx((0.1, 0.1)), "the same kernels compute them still"
    changed: list[tuple[float, float]] = []
    loads.reports = [KernelNews(over, lambda: changed.append(expected_s()))]
    lifecycle.take()
    assert changed == [pytest.approx((0.1, 0.1))]
    assert expected_s() == (0.0, 0.0)
    assert sent == [progress, over]


def test_who_waits_for_memory_waits_for_loads_and_for_sequences_that_another_engine_leads() -> None:
    """A request whose adapter finds no room is refused only where nothing is under way that may make some."""
    loads, models, shared = HandLoads(), ServedModels(CONFIGURE, None), SharedNode(2)
    lifecycle = Lifecycle(models, loads, lambda message: None, lambda name: None)  # type: ignore[arg-type]
    assert not lifecycle.may_free_memory
    lifecycle.load(load_message("", "a"))
    assert lifecycle.may_free_memory
    lifecycle.evict(EvictModel(1, "a", 16))
    loads.reports.append(loads.loads[0])
    lifecycle.take()
    assert not lifecycle.may_free_memory
    sizes = RegionSizes(2, 32, 256, CONFIGURE.block_tokens)
    place = shared.region(sizes)
    leader, follower = (
        open_region(shared.exchange, load_message("", "b", group=Group(rank, [0, 1], *place)), CONFIGURE.block_tokens)
        for rank in range(2)
    )
    models.followed["b"] = GroupShare(cast(SplitModel, None), follower)
    assert not lifecycle.may_free_memory
    leader.table.request_id[3] = 7
    assert lifecycle.may_free_memory
    shared.exchange.break_group(place[0])
    assert not lifecycle.may_free_memory
    shared.close()
