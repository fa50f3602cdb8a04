"""Copies the rows of a step from the sequence table on the host of rank 0, which plans the steps of a split model, to the table on
another host.

A step reads only the rows of its plan, and of the rows' tokens only those that it computes. Block tables grow with each sequence,
so only cells (block numbers) that have changed since the last step are copied.

Shapes: R rows of a plan, T tokens of a step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.exchange import TABLE_COLUMNS
from scheduler.batch.plan import BatchPlan, IntArray, SequenceTable


class TableRows(NamedTuple):
    """The contents of a plan's rows of the sequence table, as bytes. columns: for each array in TABLE_COLUMNS, its values in these
    rows [R]. tokens: int32 [T], the tokens that the step computes, row after row. cells: int32 [N, 4]: KV group, slot, index and
    value of each of the N cells of block tables that have changed."""

    columns: list[bytes]
    tokens: bytes
    cells: bytes


class TableReader:
    """Reads the rows of one model's steps from the sequence table, and remembers which cells of the block tables it has returned.
    block_tokens: tokens in a block."""

    def __init__(self, table: SequenceTable, block_tokens: int) -> None:
        self._table, self._block_tokens = table, block_tokens
        self._known = [np.zeros_like(cells) for cells in table.block_tables]  # as in a new region

    def read(self, plan: BatchPlan) -> TableRows:
        """Returns the contents of the sequence table in the rows of the next step's plan; of the block tables only cells that have
        changed since they were last returned."""
        columns = [getattr(self._table, name)[plan.slots].tobytes() for name in TABLE_COLUMNS]
        ends = plan.num_computed + plan.num_new
        rows = list(zip(plan.slots.tolist(), plan.num_computed.tolist(), ends.tolist(), strict=True))
        tokens = [self._table.tokens[slot, begin:end] for slot, begin, end in rows]
        cells = [
            self._changed(group, slot, -(-end // self._block_tokens)) for slot, _, end in rows for group in range(len(self._known))
        ]
        return TableRows(columns, np.concatenate(tokens or [_NONE]).tobytes(), np.concatenate(cells or [_NO_CELLS]).tobytes())

    def _changed(self, group: int, slot: int, num_blocks: int) -> IntArray:
        """Returns the cells of one row's block table that have changed since they were last returned, as int32 [N, 4] (KV group,
        slot, index, value), and remembers them. num_blocks: how many of the row's cells are compared, from the first on."""
        known, now = self._known[group][slot, :num_blocks], self._table.block_tables[group][slot, :num_blocks]
        at = np.flatnonzero(known != now)
        if not len(at):
            return _NO_CELLS
        found = np.empty((len(at), 4), np.int32)
        found[:, 0], found[:, 1], found[:, 2], found[:, 3] = group, slot, at, now[at]
        known[at] = found[:, 3]
        return found


def write_rows(table: SequenceTable, plan: BatchPlan, rows: TableRows) -> None:
    """Writes the rows of a plan, as TableReader.read returned them, into another table. Raises ValueError if the number of tokens
    is not the plan's."""
    for (name, code), values in zip(TABLE_COLUMNS.items(), rows.columns, strict=True):
        getattr(table, name)[plan.slots] = np.frombuffer(values, code)
    tokens, begin = np.frombuffer(rows.tokens, np.int32), 0
    if len(tokens) != int(plan.num_new.sum()):
        raise ValueError(f"a step of {plan.num_new.sum()} tokens came with {len(tokens)}")
    for slot, first, num in zip(plan.slots.tolist(), plan.num_computed.tolist(), plan.num_new.tolist(), strict=True):
        table.tokens[slot, first : first + num] = tokens[begin : begin + num]
        begin += num
    cells = np.frombuffer(rows.cells, np.int32).reshape(-1, 4)
    for group, block_table in enumerate(table.block_tables):
        own = cells[cells[:, 0] == group]
        block_table[own[:, 1], own[:, 2]] = own[:, 3]


_NONE, _NO_CELLS = np.empty(0, np.int32), np.empty((0, 4), np.int32)
