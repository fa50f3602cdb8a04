"""A tenant that floods does not slow another's streams beyond its share of the device. Time is counted, nobody sleeps."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from scheduler.batch.plan import BatchPlan
from scheduler.batch.step_limits import StepLimits
from scheduler.batch.step_room import StepRoom
from scheduler.batch.tenant_time import FORGIVEN_S, TenantLoad, TenantTime
from tests.scheduler.batch.fake_model import Harness, Params

LONG = Params(max_tokens=400, ignore_eos=True)


def device_s(plan: BatchPlan) -> float:
    """Weights for 5 ms, then 4 tokens a millisecond."""
    return 0.005 + 0.00025 * int(plan.num_new.sum())


class Device:
    """Steps of one model in virtual time, as the engine drives them."""

    def __init__(self, stretch: float = 2.0, max_sequences: int = 64) -> None:
        self.harness = Harness(
            reserved_chunks=6000, max_sequences=max_sequences, max_model_len=512, max_num_batched_tokens=512, block_bytes=16
        )
        self.scheduler = self.harness.scheduler
        self.limits = StepLimits(0.001, stretch)
        self.other_models_wait = False
        self.now_s = 0.0
        self.tenant: dict[int, str] = {}
        self.used_s: dict[str, float] = defaultdict(float)
        self.at_s: dict[int, list[float]] = defaultdict(list)  # when each request's tokens came

    def submit(self, tenant: str, num: int, prompt_tokens: int = 4, params: Params = LONG, weight: float = 1.0) -> list[int]:
        ids = [len(self.tenant) + 1 + each for each in range(num)]
        for request_id in ids:
            self.tenant[request_id] = tenant
            prompt = np.random.default_rng(request_id).integers(0, 90, prompt_tokens).tolist()
            self.harness.submit(request_id, prompt, params, tenant=tenant, weight=weight)
        return ids

    def step(self) -> None:
        plan = self.scheduler.plan(0, StepRoom(self.limits, self.other_models_wait))
        assert plan is not None
        seconds = device_s(plan)
        self.now_s += seconds
        for slot, num in zip(plan.slots.tolist(), plan.num_new.tolist(), strict=True):
            tenant = self.tenant[int(self.scheduler.table.request_id[slot])]
            self.used_s[tenant] += seconds * num / int(plan.num_new.sum())
        self.limits.note(plan, seconds)
        self.scheduler.tenants.charge(plan, seconds)
        # what the model says is no matter here; the fake one checks every block and is slow
        ids = np.full(int(plan.samples.sum()), 1, np.int32)
        outcome = self.scheduler.finish_step(plan, ids, np.zeros(len(ids), np.bool_))
        for request_id in outcome.request_ids:
            self.at_s[request_id].append(self.now_s)

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.step()

    def worst_gap_s(self, request_ids: list[int], since_s: float) -> float:
        gaps = [b - a for each in request_ids for a, b in zip(self.at_s[each], self.at_s[each][1:], strict=False) if a >= since_s]
        return max(gaps)


def test_a_flood_of_streams_leaves_another_tenants_stream_its_share() -> None:
    device = Device()
    (quiet,) = device.submit("quiet", 1)
    device.run(0.2)
    alone_s = device.worst_gap_s([quiet], 0.05)
    device.submit("flood", 60)
    device.run(0.4)  # its prompts are computed
    since_s = device.now_s
    device.run(0.5)
    assert device.worst_gap_s([quiet], since_s) <= 2 * 1.1 * alone_s, "half the device is its own"
    # all of the flood goes on, by turns
    counts = [sum(at > since_s for at in device.at_s[each]) for each, tenant in device.tenant.items() if tenant == "flood"]
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= 2


def test_a_flood_of_prompts_leaves_another_tenants_stream_its_share() -> None:
    device = Device()
    (quiet,) = device.submit("quiet", 1)
    device.run(0.2)
    alone_s = device.worst_gap_s([quiet], 0.05)
    since_s = device.now_s
    device.submit("flood", 60, prompt_tokens=300, params=Params(max_tokens=2, ignore_eos=True))
    device.run(0.8)
    # the first steps of all are learning what a chunk costs
    assert device.worst_gap_s([quiet], since_s) <= 2 * 1.25 * alone_s
    # the same, were they its own prompts: who waits for a first token waits too
    device = Device()
    (quiet,) = device.submit("quiet", 1)
    device.run(0.2)
    since_s = device.now_s
    device.submit("quiet", 60, prompt_tokens=300, params=Params(max_tokens=2, ignore_eos=True))
    device.run(0.8)
    assert device.worst_gap_s([quiet], since_s) > 6 * alone_s


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_who_floods_alike_gets_device_time_by_weight(weight: float) -> None:
    device = Device(stretch=0.0)
    device.submit("light", 30)
    device.run(0.1)
    device.submit("heavy", 30, weight=weight)
    device.run(0.3)
    device.limits.turn_s, device.other_models_wait = 0.010, True  # a turn has room for 20 of their 60 rows
    device.run(1.0)  # what heavy had too little of while all rows ran is made up for
    before = dict(device.used_s)
    device.run(2.0)
    got = {tenant: device.used_s[tenant] - before[tenant] for tenant in before}
    assert got["heavy"] / got["light"] == pytest.approx(weight, rel=0.05)


def test_a_tenant_of_greater_weight_may_slow_others_more() -> None:
    device = Device()
    (quiet,) = device.submit("quiet", 1)
    device.run(0.2)
    alone_s = device.worst_gap_s([quiet], 0.05)
    device.submit("flood", 60, weight=4.0)
    device.run(0.6)
    since_s = device.now_s
    device.run(0.5)
    assert 2 * 1.1 * alone_s < device.worst_gap_s([quiet], since_s) <= 5 * 1.1 * alone_s, "a fifth of the device is its own"


def test_a_short_prompt_does_not_wait_for_the_end_of_another_tenants_long_one() -> None:
    device = Device()
    device.submit("long", 1)
    device.run(0.2)
    (long,) = device.submit("long", 1, prompt_tokens=500, params=Params(max_tokens=2, ignore_eos=True))
    device.run(0.03)
    since_s = device.now_s
    (short,) = device.submit("short", 1, prompt_tokens=10)
    while not device.at_s[long]:
        device.step()
    assert device.at_s[short][0] - since_s < (device.now_s - since_s) / 4


def test_one_tenant_alone_is_not_limited() -> None:
    device = Device()
    device.submit("", 1)
    device.run(0.1)
    device.submit("", 60)
    device.run(1.0)
    plan = device.scheduler.plan(0, StepRoom(device.limits))
    assert plan is not None
    assert len(plan.slots) == 61


def plan_of(slots: list[int], num_new: list[int]) -> BatchPlan:
    array = np.array(slots, np.int32)
    return BatchPlan(0, "m", array, array * 0, np.array(num_new, np.int32), array == array)


def test_time_is_divided_by_tokens_and_weight() -> None:
    time = TenantTime(4)
    time.join(0, "a", 1.0)
    time.charge(plan_of([0], [1]), 9.0)  # alone: not counted
    time.join(1, "b", 2.0)
    slots = np.array([0, 1], np.int32)
    time.charge(plan_of([0, 1], [1, 3]), 0.04)  # a: 0.01, b: 0.03 / 2
    assert time.in_order(slots).tolist() == [0, 1]
    time.charge(plan_of([0], [1]), 0.008)
    assert time.in_order(slots[::-1]).tolist() == [1, 0]


def test_little_is_saved_up_and_who_comes_new_begins_with_the_least() -> None:
    time = TenantTime(4)
    time.join(0, "busy", 1.0)
    time.join(1, "idle", 1.0)
    for _ in range(100):
        time.charge(plan_of([0], [1]), 0.1)
    time.join(2, "new", 1.0)
    time.charge(plan_of([1, 2], [1, 1]), 2 * FORGIVEN_S * 1.01)
    assert time.in_order(np.array([0, 1, 2], np.int32)).tolist()[0] == 0
    time.leave("new")
    time.join(2, "newest", 1.0)
    assert time.in_order(np.array([1, 2, 0], np.int32)).tolist() == [2, 0, 1]


def test_of_one_tenant_those_that_waited_longest_run() -> None:
    time = TenantTime(8)
    for slot in range(6):
        time.join(slot, "a", 1.0)
    slots = np.arange(6, dtype=np.int32)
    chosen = [time.choose(slots, 4).tolist() for _ in range(3)]
    assert chosen == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]
    assert time.choose(slots, 6) is slots


def test_loads() -> None:
    time = TenantTime(8)
    time.join(0, "a", 1.0)
    time.join(1, "a", 1.0)
    both, none = np.array([0, 1], np.int32), np.zeros(0, np.int32)
    assert time.loads(both, none, {}) == [TenantLoad(2, 0)]
    assert time.loads(both[:1], both[1:], {"a": (5, 1.0)}) == [TenantLoad(1, 6)]
    assert time.loads(both, none, {"b": (5, 3.0)}) == [TenantLoad(2, 0, 0.25), TenantLoad(0, 5, 0.75)]
    assert time.loads(none, none, {"b": (5, 3.0)}) == [TenantLoad(0, 0, 0.25), TenantLoad(0, 5, 0.75)]
