"""What a model's predictor reads behind a step, and which of a step's rows it drafts behind, on every device.

Shapes: R rows of the step, T its tokens, N sampling rows, Q sequences that sample, D tokens that were drafted for one of them at
most.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler.batch.plan import BatchPlan, IntArray, LongArray, SequenceTable


def following_tokens(plan: BatchPlan, table: SequenceTable) -> IntArray:
    """Returns [T]: the token that the table has behind each of a step's tokens. It is undefined behind those that are sampled from:
    there it is what the step samples."""
    ends = np.cumsum(plan.num_new, dtype=np.int64)
    rows = np.repeat(np.arange(len(plan.slots)), plan.num_new)
    positions = np.arange(len(rows)) + (plan.num_computed + plan.num_new - ends)[rows]
    last = table.tokens.shape[1] - 1
    return table.tokens[plan.slots[rows], np.minimum(positions + 1, last)]


@dataclass(slots=True, frozen=True)
class SampledSequences:
    """The sequences that sample in a step, each with one row or, where tokens were drafted, several: one behind the other, and all
    of them sample. firsts [Q]: the first row of each, of the N. expected [Q, D]: the token that was drafted behind each of its
    rows; -1: none was, or there is no such row. rows [Q, D]: those rows, of the N; any row where there is none."""

    firsts: LongArray
    expected: IntArray
    rows: LongArray

    def newest(self, ids: IntArray) -> LongArray:
        """Returns [Q]: the row of each sequence that sampled its newest token, the first one that sampled another token than was
        drafted behind it. ids [N]: what the rows sampled."""
        agrees = ids[self.rows] == self.expected
        return self.firsts + agrees.cumprod(axis=1).sum(axis=1)


def sampled_sequences(plan: BatchPlan, table: SequenceTable) -> SampledSequences:
    slots, computed = plan.slots[plan.samples], plan.num_computed[plan.samples]
    begins = np.ones(len(slots), np.bool_)
    if plan.drafted:
        begins[1:] = slots[1:] != slots[:-1]
    firsts = np.flatnonzero(begins)
    num_rows = np.diff(np.append(firsts, len(slots)))
    behind = firsts[:, None] + np.arange(1, num_rows.max(initial=1))
    exists = behind < (firsts + num_rows)[:, None]
    behind = np.where(exists, behind, 0)
    expected = np.where(exists, table.tokens[slots[behind], computed[behind]], np.int32(-1))
    return SampledSequences(firsts, expected, np.maximum(behind - 1, 0))
