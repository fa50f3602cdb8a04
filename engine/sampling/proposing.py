"""Makes the inputs of a model's predictor (which drafts tokens) after a step, and determines the row of each sequence after which
it drafts. Used on every kind of device.

Shapes: R rows of the step, T its tokens, N sampling rows, Q sequences that sample, D the most tokens that were drafted for one
sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler.batch.plan import BatchPlan, IntArray, LongArray, SequenceTable


def following_tokens(plan: BatchPlan, table: SequenceTable) -> IntArray:
    """Returns [T]: for each of a step's tokens, the token that follows it in its sequence. The value of a row's last token is
    undefined if the step samples after this token, because the sampled token follows."""
    ends = np.cumsum(plan.num_new, dtype=np.int64)
    rows = np.repeat(np.arange(len(plan.slots)), plan.num_new)
    positions = np.arange(len(rows)) + (plan.num_computed + plan.num_new - ends)[rows]
    last = table.tokens.shape[1] - 1
    return table.tokens[plan.slots[rows], np.minimum(positions + 1, last)]


@dataclass(slots=True, frozen=True)
class SampledSequences:
    """The Q sequences for which a step samples, with its N sampling rows. A sequence has one sampling row; if d tokens were drafted
    for it, it has d + 1 adjacent ones (d <= D).

    firsts [Q]: the index among the N of each sequence's first row.
    rows [Q, D]: the indices among the N of those rows of each sequence after which a token was drafted, in order.
    expected [Q, D]: the token that was drafted after each of `rows`; -1: the sequence has no such row, and the value in `rows` is
    arbitrary."""

    firsts: LongArray
    expected: IntArray
    rows: LongArray

    def newest(self, ids: IntArray) -> LongArray:
        """Returns [Q]: for each sequence, the index among the N of the row that sampled its newest token. That is the first row
        whose sampled token differs from the token drafted after the row, or the sequence's last row if none differs. ids [N]: the
        token that each row sampled."""
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
