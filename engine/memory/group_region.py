"""Gives access to a region: the part of the engines' shared memory (engine/exchange.py) through which the engines of one split
model run their steps. It contains the arrays that these engines share.

Rank 0, the first engine of the model, writes the plan of each step and the model's sequence table. The other engines read both, but
only until the last exchange of results in the step, because rank 0 may write again after it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.exchange import PAGE_BYTES, TABLE_COLUMNS, Exchange, Poster, RegionSizes, region_layout
from engine.host.rendezvous import Rendezvous
from engine.memory import mappings
from engine.memory.shared_plans import SharedPlans
from engine.memory.stage_link import StageLink
from engine.protocol import Group, LoadModel
from loader.reading.shared_reads import SharedReads, leave, shared_by
from loader.reading.staging import SLOT_BYTES
from loader.shapes.model_shape import Division
from scheduler.batch.plan import BatchPlan, LongArray, SequenceTable, make_sequence_table


class GroupRegion:
    """One engine's view of a region: the part of the shared memory that belongs to one split model. The engines of the model are
    called a group, and each of them a member. Raises ValueError if the region is too small for `sizes`.

    broken [1] int64: not 0 once the group is broken (has lost a device, or a member has left).
    rank, stage: the member's rank (its index in the group) and its pipeline stage.
    stage_rank, stage_size: the member's index among the members of its stage, and how many these are.
    ranks uint8: the memory through which the members of its stage exchange partial results (engine/host/rank_memory.py).
    rendezvous: the point at which the members of its stage wait for each other.
    link: the member's connection to the other stages; None: there is only one stage.
    table: the model's sequences, without `params`, which only rank 0 has."""

    def __init__(self, exchange: Exchange, group: Group, sizes: RegionSizes) -> None:
        parts, num_bytes = region_layout(sizes)
        if num_bytes > group.region_bytes or group.region_offset % PAGE_BYTES:
            where = f"region {group.region_offset} of {group.region_bytes} bytes"
            raise ValueError(f"parallel: {where} is too small for a group of {sizes}: that takes {num_bytes} bytes")
        division = Division(sizes.num_ranks, num_stages=sizes.num_stages)
        self.offset, self.rank, self.num_stages = group.region_offset, group.rank, sizes.num_stages
        self.stage_rank, self.stage_size = group.rank % division.stage_size, division.stage_size
        self._expert_parts = sizes.expert_parts
        self._exchange, self._members, self._hosts = exchange, tuple(group.members), group.hosts
        memory = _mapped(exchange.fd, group.region_offset, num_bytes)
        arrays: dict[str, npt.NDArray[Any]] = {
            name: np.ndarray(part.shape, np.dtype(part.code), memory, part.begin) for name, part in parts.items()
        }
        self.broken: LongArray = arrays["broken"]
        self.stage = division.stage_of(group.rank)
        self.ranks: npt.NDArray[np.uint8] = arrays["ranks"][self.stage]
        self.rendezvous = Rendezvous(arrays["rendezvous"][self.stage], self.stage_rank, self.broken)
        self._reads: npt.NDArray[np.uint8] = arrays["reads"][self.stage]
        self._reads_at = group.region_offset + parts["reads"].begin + self.stage * self._reads.nbytes
        self._stages, self._handed_bytes = arrays["stages"][self.stage_rank], sizes.handed_bytes
        self.link = self.new_link() if sizes.num_stages > 1 else None
        self._num_plans = 0  # number of plans that this member has posted or read
        self._plans = SharedPlans(arrays["plans"], sizes.max_sequences)
        self._broken_word = self.broken.data
        columns: dict[str, Any] = {name: arrays[name] for name in TABLE_COLUMNS}
        columns |= {"block_tables": list(arrays["block_tables"]), "params": [None] * sizes.max_sequences}
        self.table = SequenceTable(tokens=arrays["tokens"], **columns)

    def empty_table(self) -> SequenceTable:
        """Empties the region's sequence table (no sequences, default values) and returns it. Only rank 0 calls it, before the first
        step."""
        one_block = make_sequence_table(len(self.table.request_id), 1, 1, len(self.table.block_tables))
        for column in fields(SequenceTable):
            value = getattr(one_block, column.name)
            if column.name not in ("tokens", "block_tables", "params"):  # the first two are zeros in a new region
                getattr(self.table, column.name)[:] = value
        return self.table

    def new_link(self, stage: int | None = None) -> StageLink:
        """Returns a new connection to the neighbours of a pipeline stage: the stage of this engine, or the one with the index
        `stage`."""
        of_stage = self.stage if stage is None else stage
        return StageLink(self._stages, of_stage, self.num_stages, self._handed_bytes, self.broken)

    @contextmanager
    def sharing_reads(self) -> Iterator[Sequence[SharedReads]]:
        """Returns a context manager whose value is the memory through which the engines of this pipeline stage pass each other the
        bytes of files that they all need, so that each byte is read by one engine only. The value is () if the engines are on
        several hosts, or if the stage has only one engine. The last engine to leave the context returns the memory to the
        system."""
        first = self.rank - self.stage_rank
        hosts = self._hosts[first : first + self.stage_size]
        if self.stage_size == 1 or len(set(hosts)) > 1:
            yield ()
            return
        shared = shared_by(self._reads, self.stage_rank, self.stage_size, self._expert_parts, SLOT_BYTES)
        try:
            yield shared
        finally:
            if leave(shared):
                with suppress(MemoryError):  # it is given back with the region at the latest
                    mappings.punch_hole(self._exchange.fd, self._reads_at, self._reads.nbytes)

    @property
    def is_broken(self) -> bool:
        return bool(self.broken[0])

    def leave(self) -> None:
        """Ends this engine's part in the split model, which marks the model as broken. No further steps are posted to this
        engine."""
        self._exchange.leave(self._members[self.rank], self.offset)

    def post(self, plan: BatchPlan) -> bool:
        """Writes the plan of the split model's next step, and adds the step to the queues of all its engines, which run steps in
        the order of their posting. Only rank 0 calls it. Returns False if the model is broken (has lost a device, or an engine has
        left).

        Raises ValueError for a plan with too many rows or for a step with a predictor, which the other engines cannot run. Raises
        ExchangeFull if an engine has too many steps in its queue."""
        self.write_plan(plan)
        return self._poster.post()

    @cached_property
    def _poster(self) -> Poster:  # made at the first step, because only the leader is sure to know all members' numbers
        return Poster(self._exchange, self._members, self.offset, self._broken_word)

    def write_plan(self, plan: BatchPlan) -> None:
        """Writes the plan of the split model's next step to the shared memory, where its other engines will read it. No step is
        added to any engine's queue. Raises ValueError for a plan with too many rows or for a step with a predictor, which the other
        engines cannot run."""
        self._plans.write(self._num_plans % self.num_stages, plan)
        self._num_plans += 1

    def read_plan(self, model: str) -> BatchPlan:
        """Returns a copy of the plan of the next step: the oldest one that rank 0 has posted and this engine has not read. model:
        the model's name, which is put into the copy."""
        plan = self._plans.read(self._num_plans % self.num_stages, model)
        self._num_plans += 1
        return plan


def _mapped(fd: int, offset: int, num_bytes: int) -> Any:
    """Maps num_bytes bytes of a file, from `offset` on. Returns an object that supports the buffer protocol; the memory is unmapped
    with its last view. Raises ValueError if the file is too short, MemoryError if it cannot be mapped.

    Unlike Python's mmap, the object holds no file descriptor. Descriptors of evicted models would stay open until the garbage
    collector runs, which an engine that is always busy puts off."""
    if os.fstat(fd).st_size < offset + num_bytes:
        raise ValueError(f"parallel: region {offset} of {num_bytes} bytes ends behind the exchange memory")
    address = mappings.reserve(num_bytes)
    try:
        mappings.map_file(address, num_bytes, fd, offset)
    except MemoryError:
        mappings.release(address, num_bytes)
        raise
    memory = mappings.bytes_at(address, num_bytes)
    weakref.finalize(memory, mappings.release, address, num_bytes).atexit = False
    return memory


def open_region(exchange: Exchange | None, spec: LoadModel, block_tokens: int) -> GroupRegion:
    """Returns this engine's view of the region of the split model that it is loading: the model's part of the engines' shared
    memory. block_tokens: number of tokens in a KV block. Raises ValueError if the load is not for a split model, if exchange is
    None, or if the region is too small for the model."""
    if exchange is None or spec.group is None:
        raise ValueError(f"model {spec.model}: parallel: this engine shares no memory with others")
    group = spec.group
    of_model = (spec.max_sequences, spec.max_model_len, block_tokens, group.num_kv_groups)
    sizes = RegionSizes(len(group.members), *of_model, group.num_stages, group.handed_bytes, group.expert_parts)
    return GroupRegion(exchange, spec.group, sizes)
