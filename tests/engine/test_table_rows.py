"""The rows of a step on another host are those of the leader's table, whatever steps came before."""

from __future__ import annotations

import numpy as np
import pytest

from engine.exchange import TABLE_COLUMNS
from engine.remote.table_rows import TableReader, TableRows, write_rows
from scheduler.batch.plan import BatchPlan, make_sequence_table

SLOTS, MAX_TOKENS, BLOCK_TOKENS = 6, 64, 4


def plan_of(slots: list[int], num_computed: list[int], num_new: list[int]) -> BatchPlan:
    arrays = (np.array(values, np.int32) for values in (slots, num_computed, num_new))
    return BatchPlan(1, "m", *arrays, np.ones(len(slots), np.bool_))


def test_random_steps() -> None:
    choose = np.random.default_rng(5)
    ours, theirs = (make_sequence_table(SLOTS, MAX_TOKENS, MAX_TOKENS // BLOCK_TOKENS, 2) for _ in range(2))
    reader, num_cells = TableReader(ours, BLOCK_TOKENS), 0
    for _ in range(300):
        slots = choose.permutation(SLOTS)[: choose.integers(1, SLOTS + 1)].tolist()
        begins = choose.integers(0, MAX_TOKENS - 8, len(slots)).tolist()
        nums = choose.integers(1, 8, len(slots)).tolist()
        for slot in slots:
            for name, code in TABLE_COLUMNS.items():
                getattr(ours, name)[slot] = choose.integers(0, 2 if code == "?" else 100)
            ours.tokens[slot] = choose.integers(0, 1000, MAX_TOKENS)
            for table in ours.block_tables:  # a few cells change from step to step
                table[slot, choose.integers(0, 16, 3)] = choose.integers(-1, 50, 3)
        plan = plan_of(slots, begins, nums)
        rows = reader.read(plan)
        num_cells += len(rows.cells) // 16
        write_rows(theirs, plan, rows)
        for slot, begin, num in zip(slots, begins, nums, strict=True):
            for name in TABLE_COLUMNS:
                assert getattr(theirs, name)[slot] == getattr(ours, name)[slot], name
            assert theirs.tokens[slot, begin : begin + num].tolist() == ours.tokens[slot, begin : begin + num].tolist()
            blocks = -(-(begin + num) // BLOCK_TOKENS)
            for own, other in zip(ours.block_tables, theirs.block_tables, strict=True):
                assert other[slot, :blocks].tolist() == own[slot, :blocks].tolist()
    assert num_cells < 300 * SLOTS * 2 * 8  # most cells were known


def test_a_slot_with_several_rows() -> None:
    """A drafted step has a row for each drafted token of a sequence."""
    ours, theirs = (make_sequence_table(SLOTS, MAX_TOKENS, MAX_TOKENS // BLOCK_TOKENS) for _ in range(2))
    ours.tokens[2] = np.arange(MAX_TOKENS)
    ours.block_tables[0][2, :4] = [9, 8, 7, 6]
    plan = plan_of([2, 2, 2], [10, 11, 12], [1, 1, 1])
    write_rows(theirs, plan, TableReader(ours, BLOCK_TOKENS).read(plan))
    assert theirs.tokens[2, 10:13].tolist() == [10, 11, 12]
    assert theirs.block_tables[0][2, :4].tolist() == [9, 8, 7, 6]


def test_rows_of_another_plan_are_refused() -> None:
    table = make_sequence_table(SLOTS, MAX_TOKENS, MAX_TOKENS // BLOCK_TOKENS)
    rows = TableReader(table, BLOCK_TOKENS).read(plan_of([1], [0], [5]))
    with pytest.raises(ValueError, match="a step of 6 tokens came with 5"):
        write_rows(table, plan_of([1], [0], [6]), TableRows(*rows))
