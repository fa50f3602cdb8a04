"""The plans of a group's steps in the memory that its members share, also where the process that writes them dies."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from engine.exchange import Exchange, RegionSizes, first_region, make_exchange, plan_bytes, region_bytes
from engine.memory.group_region import GroupRegion
from engine.memory.shared_plans import SharedPlans
from engine.protocol import Group
from scheduler.batch.plan import BatchPlan
from tests.engine.engine_process import ROOT

COLUMNS = ("slots", "num_computed", "num_new", "samples")


def drawn(choose: np.random.Generator, step_id: int, num: int) -> BatchPlan:
    slots, num_computed, num_new = choose.integers(0, 1 << 31, (3, num)).astype(np.int32)
    samples = choose.integers(0, 2, num).astype(np.bool_)
    return BatchPlan(step_id, "m", slots, num_computed, num_new, samples, bool(step_id % 2), bool(step_id % 3))


def assert_equal(read: BatchPlan, plan: BatchPlan) -> None:
    assert (read.step_id, read.all_decode, read.drafted) == (plan.step_id, plan.all_decode, plan.drafted)
    for name in COLUMNS:
        got, want = getattr(read, name), getattr(plan, name)
        assert got.dtype == want.dtype
        assert got.tolist() == want.tolist(), name


def test_plans_of_any_size_come_through_every_place() -> None:
    """Each place holds its plan until it is written again, whatever the sizes of the plans before and beside it."""
    choose, num_places, most = np.random.default_rng(3), 3, 40
    memory = np.zeros((num_places, plan_bytes(most)), np.uint8)
    leader, follower = SharedPlans(memory, most), SharedPlans(memory, most)
    held: dict[int, BatchPlan] = {}
    for step_id in range(400):
        num = int(choose.choice([0, 1, most, choose.integers(0, most + 1)]))
        held[step_id % num_places] = drawn(choose, (1 << 40) + step_id, num)
        leader.write(step_id % num_places, held[step_id % num_places])
        for at, plan in held.items():
            assert_equal(follower.read(at, "m"), plan)


def test_what_was_read_stays_as_it_was() -> None:
    choose, memory = np.random.default_rng(4), np.zeros((1, plan_bytes(8)), np.uint8)
    leader, follower = SharedPlans(memory, 8), SharedPlans(memory, 8)
    first = drawn(choose, 1, 8)
    leader.write(0, first)
    read = follower.read(0, "m")
    leader.write(0, drawn(choose, 2, 8))
    follower.read(0, "m")
    assert_equal(read, first)


def test_a_plan_with_too_many_rows_is_refused_and_writes_nothing() -> None:
    choose, memory = np.random.default_rng(5), np.zeros((2, plan_bytes(8)), np.uint8)
    plans = SharedPlans(memory, 8)
    with pytest.raises(ValueError, match="a step of 9 rows, to be told to a group with room for 8"):
        plans.write(0, drawn(choose, 1, 9))
    assert not memory.any()


SIZES = RegionSizes(num_ranks=2, max_sequences=64, max_model_len=100, block_tokens=16)
LEADER = """
import sys
import numpy as np
from engine.exchange import Exchange, first_region, region_bytes
from engine.memory.group_region import GroupRegion
from engine.protocol import Group
from scheduler.batch.plan import BatchPlan
from tests.engine.test_shared_plans import SIZES
fd, bells, step_id = int(sys.argv[1]), [int(bell) for bell in sys.argv[2].split(",")], 0
exchange = Exchange(fd, bells)
exchange.reset(0)
region = GroupRegion(exchange, Group(0, [0, 1], first_region(2), region_bytes(SIZES)), SIZES)
print("leads", flush=True)
while True:
    column = np.full(step_id % 64 + 1, step_id, np.int32)
    region.post(BatchPlan(step_id, "m", column, column, column, column % 2 == 0, all_decode=True))
    exchange.queue(0).take()
    while region.table.num_tokens[0] == step_id:  # the follower has not read the plan
        pass
    step_id += 1
"""


def test_a_follower_reads_whole_plans_in_order_from_a_leader_that_is_killed() -> None:
    """The leader dies anywhere between two plans, within one or with the lock in its hands. What it has not posted is not seen, and
    the lock is free."""
    choose = random.Random(6)
    fd, bells = make_exchange(2), [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
    exchange, offset = Exchange(fd, bells), first_region(2)
    environment, told = {**os.environ, "PYTHONPATH": str(ROOT)}, ",".join(map(str, bells))
    for _ in range(4):
        exchange.clear(offset, region_bytes(SIZES))
        exchange.reset(1)
        region = GroupRegion(exchange, Group(1, [0, 1], offset, region_bytes(SIZES)), SIZES)
        command = [sys.executable, "-P", "-c", LEADER, str(fd), told]
        with subprocess.Popen(command, env=environment, pass_fds=(fd, *bells), stdout=subprocess.PIPE) as leader:
            assert leader.stdout is not None
            assert leader.stdout.readline() == b"leads\n"
            at, killed, num = choose.randint(65, 120), False, 0
            while exchange.queue(1).comes_within(0.2) or not killed:
                if exchange.queue(1).take() is not None:
                    plan = region.read_plan("m")
                    column = np.full(num % 64 + 1, num, np.int32)
                    assert_equal(plan, BatchPlan(num, "m", column, column, column, column % 2 == 0, all_decode=True))
                    num += 1
                    region.table.num_tokens[0] = num
                if num == at and not killed:
                    time.sleep(choose.random() * 1e-4)  # the leader writes or posts the next plan
                    leader.send_signal(signal.SIGKILL)
                    leader.wait(10)
                    killed = True
            assert at <= num <= at + 1, "plans of every size were read"
            assert exchange.queue(1).take() is None
            with exchange.locked():
                pass
    exchange.close()
    for each in (fd, *bells):
        os.close(each)
