"""Keeps copies of split models' regions on a host that lends devices. A region is the part of the engines' shared memory through
which the engines of one split model run its steps (engine/memory/group_region.py).

All devices that are lent to one daemon share one copy of a model's region. The proxies of these devices each send every step; the
first one that arrives is written, and the others are ignored.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import msgspec
import numpy as np

from daemon.engines.exchange_memory import ExchangeMemory
from engine.exchange import Exchange
from engine.memory.group_region import GroupRegion, open_region
from engine.protocol import Group, LoadModel
from engine.remote.frames import Step
from engine.remote.table_rows import TableRows, write_rows
from scheduler.batch.plan import BatchPlan


@dataclass(slots=True)
class _RegionCopy:
    """The copy of one split model's region, the part of the engines' shared memory for that model. writer: writes the plans of
    steps, and the rows of the table of running sequences, to it. holders: numbers of the engines that may use the copy. num_steps:
    number of steps whose plans have been written to it."""

    writer: GroupRegion
    holders: set[int]
    num_steps: int = 0
    writing: threading.Lock = field(default_factory=threading.Lock)


class LentRegions:
    """The regions of all split models with shares on a lender's devices: for each model a part of `memory`, which the engines of
    this host share. Methods may be called by any thread. Their parameter `number` identifies an engine, by its number in that
    memory; `leader` and `placement_id` identify a model, by the daemon whose model it is and by its placement there."""

    def __init__(self, memory: ExchangeMemory) -> None:
        self.memory = memory
        self._exchange = Exchange(memory.fd, memory.doorbells)
        self._copies: dict[tuple[str, int], _RegionCopy] = {}
        self._changing = threading.Lock()

    def hold(self, leader: str, message: LoadModel, number: int, block_tokens: int) -> tuple[Group, GroupRegion]:
        """Prepares an engine's load of its share of a split model (the part on its device). Makes the model's region (its part of
        the engines' shared memory) unless another engine on this host already uses it. Returns (the Group for the engine's
        LoadModel, with the numbers and the region that the model's engines have on this host; the region). leader: identifies the
        daemon. message: the load as the daemon sent it. number: the engine's number in the shared memory. block_tokens: tokens in a
        KV block. Raises ValueError for a region that does not fit the model, and OSError if there is no room."""
        assert message.group is not None
        key, group = (leader, message.placement_id), message.group
        with self._changing:
            copy = self._copies.get(key)
            offset = self.memory.allocate(group.region_bytes) if copy is None else copy.writer.offset
            own = msgspec.structs.replace(group, members=self._members(group, number), region_offset=offset)
            try:
                region = open_region(self._exchange, msgspec.structs.replace(message, group=own), block_tokens)
            except (ValueError, OSError):
                if copy is None:
                    self.memory.free(offset)
                raise
            if copy is None:
                copy = self._copies[key] = _RegionCopy(region, set())
            copy.holders.add(number)
            return own, region

    def leave(self, leader: str, placement_id: int, number: int) -> None:
        """Ends an engine's use of a split model's region (the part of the engines' shared memory for that model), because the
        engine has evicted its share of the model or has died. The region is freed when no engine on this host uses it any more."""
        with self._changing:
            copy = self._copies.get((leader, placement_id))
            if copy is None:
                return
            copy.holders.discard(number)
            self._exchange.break_group(copy.writer.offset)
            if not copy.holders:
                del self._copies[leader, placement_id]
                self.memory.free(copy.writer.offset)

    def break_group(self, leader: str, placement_id: int) -> None:
        """Ends the steps of a split model, one of whose engines has gone, so that no engine on this host waits in a step."""
        with self._changing:
            if (copy := self._copies.get((leader, placement_id))) is not None:
                self._exchange.break_group(copy.writer.offset)

    def post(self, leader: str, step: Step, number: int) -> int:
        """Appends a step of a split model to the queue of the engine `number` on this host. Before that, writes the step's plan and
        rows to the model's region (its part of the engines' shared memory), unless the proxy of another engine has sent the same
        step already. Returns how many tokens the step computes. Raises ValueError for a step that does not follow the last one."""
        copy = self._copies.get((leader, step.placement_id))
        if copy is None:
            return 0  # the share has left meanwhile
        plan = _plan_of(step)
        with copy.writing:
            if step.number > copy.num_steps:
                raise ValueError(f"step {step.number} of placement {step.placement_id} came after {copy.num_steps} steps")
            if step.number == copy.num_steps:
                write_rows(copy.writer.table, plan, TableRows(step.columns, step.tokens, step.cells))
                copy.writer.write_plan(plan)
                copy.num_steps += 1
        if self._exchange.post([number], copy.writer.offset):
            self._exchange.ring(number)
        return int(plan.num_new.sum())

    def _members(self, group: Group, number: int) -> list[int]:
        """Returns, for each engine of a split model by rank, its number in the shared memory of this host's engines. Only the
        number of the engine itself (`number`) is real. The other ranks get numbers that no engine on this host has, since only the
        engine of rank 0, which is on another host, uses them."""
        others = self._exchange.num_engines
        return [number if rank == group.rank else others + rank for rank in range(len(group.members))]


def _plan_of(step: Step) -> BatchPlan:
    slots, num_computed, num_new = (np.frombuffer(data, np.int32) for data in (step.slots, step.num_computed, step.num_new))
    how = (np.frombuffer(step.samples, np.bool_), step.all_decode, step.drafted)
    return BatchPlan(step.step_id, "", slots, num_computed, num_new, *how)
