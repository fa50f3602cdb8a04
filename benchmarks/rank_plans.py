"""Measures how long a step's plan takes from the rank that leads to one that follows, through what engines use for it
(engine/loop/group_steps.py, engine/memory/group_region.py, engine/exchange.py); benchmarks/ranks.py runs it in two processes."""

from __future__ import annotations

import mmap
import os
import select
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from engine.exchange import Exchange, RegionSizes, first_region, make_exchange, region_bytes
from engine.host.threads_apart import ThreadsApart
from engine.loop.group_steps import GroupSteps
from engine.loop.step_journal import StepJournal
from engine.memory.group_region import GroupRegion
from engine.protocol import JOURNAL_BYTES, Group
from scheduler.batch.plan import BatchPlan

SIZES = RegionSizes(num_ranks=2, max_sequences=64, max_model_len=4096, block_tokens=16)
GAP_S = 100e-6  # what a leader does between two steps: it takes in tokens and plans
SPINNING, AFTER_READING, FROM_SLEEP = "spinning", "spinning, caches filled with other data", "from sleep"
SLEPT_S = 0.002
READ_BYTES = 16 << 20  # read by each rank in a step, as weights are


def new_exchange(size: int) -> list[int]:
    """Returns the descriptor of an exchange memory of `size` engines with the region of one group of them, and those of the
    engines' doorbells."""
    fd = make_exchange(size)
    exchange = Exchange(fd)
    exchange.clear(first_region(size), region_bytes(SIZES))
    exchange.close()
    return [fd, *(os.eventfd(0) for _ in range(size))]


class PlanRank:
    """One rank of a group whose steps consist of `meet`, an exchange between the ranks that ends when both have called it.
    descriptors: those of new_exchange."""

    def __init__(self, rank: int, descriptors: list[int], meet: Callable[[], None]) -> None:
        self._rank, self._meet = rank, meet
        fd, *doorbells = descriptors
        exchange = Exchange(fd, doorbells)
        group = Group(rank, list(range(len(doorbells))), first_region(len(doorbells)), region_bytes(SIZES))
        self._region = region = GroupRegion(exchange, group, SIZES)
        read_plan: Callable[[str], BatchPlan] = region.read_plan

        def told(model: str) -> BatchPlan:
            plan = read_plan(model)
            self._told.append(time.perf_counter())
            return plan

        self._region.read_plan = told  # type: ignore[method-assign]
        share = SimpleNamespace(name="m", region=region, num_stages=1, is_broken=False, follow=self._follow, execute=self._lead)
        self._share: Any = share
        models: Any = SimpleNamespace(followed={"m": share} if rank else {}, by_name={}, threads=ThreadsApart(1))
        self._journal = StepJournal(mmap.mmap(-1, JOURNAL_BYTES), {})
        self._steps = GroupSteps(exchange, rank, doorbells[rank], models, self._journal, lambda name: None, 1)
        self._told: list[float] = []
        self._begun: list[float] = []
        self._reads: Any = np.empty(0)

    def measure(self, state: str, rows: int, num: int) -> dict[str, list[float]]:
        """Runs `num` steps of `rows` rows. Returns times by a clock that all processes share: `posted`, when the leader began to
        post each plan, or `told` and `begun`, when the follower had each plan and began to run its step."""
        self._reads = np.ones((READ_BYTES if state == AFTER_READING else 0) // 8)
        self._told, self._begun = [], []
        self._meet()  # both have begun
        if self._rank:
            self._run_queue(num)
            return {"told": self._told, "begun": self._begun}
        ones, when = np.ones(rows, np.int32), []
        for at in range(num):
            until_s = time.perf_counter() + GAP_S
            if state == FROM_SLEEP:
                time.sleep(SLEPT_S)
            while time.perf_counter() < until_s:
                pass
            plan = BatchPlan(at, "m", np.arange(rows, dtype=np.int32), ones * at, ones, ones.astype(np.bool_), all_decode=True)
            when.append(time.perf_counter())
            posted = self._steps.post(self._share, plan, self._region.table)
            posted.wait()
        return {"posted": when}

    def _lead(self, *_: Any) -> Any:
        self._step()
        return ()  # stands for the step's result

    def _follow(self, plan: BatchPlan) -> None:
        self._begun.append(time.perf_counter())
        if plan.step_id != len(self._begun) - 1 or plan.num_computed[-1] != plan.step_id:
            raise RuntimeError(f"plan {plan.step_id} came as number {len(self._begun) - 1}")
        self._step()

    def _step(self) -> None:
        self._reads.sum()
        self._meet()

    def _run_queue(self, num: int) -> None:
        """Follows, as an engine's loop does, until `num` steps have run."""
        poller = select.epoll()
        poller.register(self._steps.fileno(), select.EPOLLIN)
        has_followed = False
        while len(self._begun) < num:
            has_followed |= self._steps.run_queue()
            more_comes = self._steps.is_waiting or (has_followed and self._steps.comes_soon())
            has_followed = more_comes and self._steps.run_queue()
            for _ in poller.poll(0.0 if more_comes else 1.0):
                self._steps.awake()
        poller.close()
