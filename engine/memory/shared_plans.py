"""Holds the plans of a split model's steps in memory that the model's engines share, in one place for each step that may be under
way.

A place holds the plan's single values (such as the step's id), then its arrays (one value for each row of the plan) without gaps.
So a plan of a few rows takes few cache lines to reach another core. An engine keeps the views that it has made of a place for each
number of rows, because numpy takes longer to make four views than to fill them.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.exchange import PLAN_HEAD_BYTES, PLAN_ROW_BYTES
from scheduler.batch.plan import BatchPlan, BoolArray, IntArray

_head = struct.Struct("<qi??")  # step_id, rows, all_decode, drafted
assert _head.size <= PLAN_HEAD_BYTES


class _Columns(NamedTuple):
    """Views of the arrays in one place, for one number of rows: the arrays of BatchPlan that have a value for each row. memory: the
    same four arrays as memoryviews, because writing to a memoryview takes half as long as writing to a numpy array."""

    slots: IntArray
    num_computed: IntArray
    num_new: IntArray
    samples: BoolArray
    memory: tuple[Any, ...]


class SharedPlans:
    """One engine's view of the plans that the engines of a split model share. memory: [places, bytes] uint8, with the number of
    bytes that engine.exchange.plan_bytes returns. num_rows: the most rows of a plan. No engine may read a place while rank 0 writes
    it; the engines' queues (engine/exchange.py) ensure that."""

    def __init__(self, memory: npt.NDArray[np.uint8], num_rows: int) -> None:
        self._memory, self._num_rows = memory, num_rows
        self._heads = [memoryview(place)[:PLAN_HEAD_BYTES] for place in memory]
        self._columns: list[dict[int, _Columns]] = [{} for _ in memory]

    def write(self, at: int, plan: BatchPlan) -> None:
        """Writes a plan to place `at`. Raises ValueError for a plan with too many rows or for a step with a predictor, which the
        other engines of the split model cannot run."""
        num = len(plan.slots)
        if num > self._num_rows or plan.to_propose is not None:
            what = f"a step of {num} rows, to be told to a group with room for {self._num_rows}"
            raise ValueError(f"model {plan.model}: {what}")
        slots, num_computed, num_new, samples = (self._columns[at].get(num) or self._view(at, num)).memory
        slots[:], num_computed[:], num_new[:], samples[:] = plan.slots, plan.num_computed, plan.num_new, plan.samples
        _head.pack_into(self._heads[at], 0, plan.step_id, num, plan.all_decode, plan.drafted)

    def read(self, at: int, model: str) -> BatchPlan:
        """Returns a copy of the plan in place `at`. model: the model's name, which is put into the copy."""
        step_id, num, all_decode, drafted = _head.unpack_from(self._heads[at])
        slots, num_computed, num_new, samples, _ = self._columns[at].get(num) or self._view(at, num)
        copies = (slots.copy(), num_computed.copy(), num_new.copy(), samples.copy())
        return BatchPlan(step_id, model, *copies, all_decode, drafted)

    def _view(self, at: int, num: int) -> _Columns:
        place, samples_at = self._memory[at], PLAN_HEAD_BYTES + num * (PLAN_ROW_BYTES - 1)
        slots, num_computed, num_new = place[PLAN_HEAD_BYTES:samples_at].view(np.int32).reshape(3, num)
        samples = place[samples_at : samples_at + num].view(np.bool_)
        memory = tuple(column.data for column in (slots, num_computed, num_new, samples))
        columns = self._columns[at][num] = _Columns(slots, num_computed, num_new, samples, memory)
        return columns
