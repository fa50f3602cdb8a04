"""Tracks the steps that have started and whose tokens are not known yet, so that the next step can be planned before they end.

Shapes: S slots, R rows of a step, N of them sampling.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from scheduler.batch.plan import BatchPlan, BoolArray, IntArray, LongArray, SequenceTable


class TokensNeeded(Exception):
    """Raised if the next plan depends on tokens that a started step has not reported yet."""


class StepsAhead:
    """The steps that have started and not ended, and what they will add to a SequenceTable. The table's own counts include only
    ended steps.

    num_new [S]: tokens that started steps compute; num_sampled [S]: tokens that they sample. apart: True: a sequence whose next
    token a started step samples is left out of the next plan, which then never depends on unknown tokens (for pipeline stages).
    False: it may be in the next plan before that token is known."""

    def __init__(self, table: SequenceTable, apart: bool = False) -> None:
        self._table, self.apart = table, apart
        num_slots = len(table.request_id)
        self._waits: BoolArray = np.zeros(num_slots, np.bool_)
        self._num_new: IntArray = np.zeros(num_slots, np.int32)
        self._num_sampled: IntArray = np.zeros(num_slots, np.int32)
        self._steps: deque[tuple[BatchPlan, LongArray]] = deque()  # oldest first, each with the request ids of its rows

    def __len__(self) -> int:
        return len(self._steps)

    def join(self, slot: int) -> None:
        """Registers the sequence in a slot, whose settings are in the table already. Determines whether its next step must wait
        until its last token is known. This is so if the host changes the sequence's logits after each token, or if its
        log-probabilities are reported with the tokens."""
        table = self._table
        masked = table.constrained[slot] | table.limited[slot]
        told = table.prompt_logprobs[slot] | (table.num_logprobs[slot] >= 0)
        self._waits[slot] = masked | table.edits_logits[slot] | told
        self.leave(slot)

    def leave(self, slot: int) -> None:
        """Removes a sequence that has left its slot from the counts of the started steps."""
        self._num_new[slot] = self._num_sampled[slot] = 0

    def computed(self) -> IntArray:
        """Returns [S]: each sequence's number of tokens whose KV will be stored once all started steps have run."""
        return self._table.num_computed + self._num_new if self._steps else self._table.num_computed

    def total(self) -> IntArray:
        """Returns [S]: each sequence's number of tokens once all started steps have run."""
        return self._table.num_tokens + self._num_sampled if self._steps else self._table.num_tokens

    def going_on(self, running: IntArray) -> IntArray:
        """Returns those of the slots `running` whose sequences may be in the next step; all of them if no step is under way.

        If this object was made with apart=True, these are the sequences whose next token is not sampled by a started step. If it
        was made with apart=False, they are the sequences that will still be below their greatest length when all started steps have
        run. With apart=False, TokensNeeded is raised if the next step of a running sequence must wait for its last token (for
        example because of a grammar), or if the latest started step has drafted tokens or lets the predictor draft some."""
        if not self._steps:
            return running
        if self.apart:
            return running[self._num_sampled[running] == 0]
        last = self._steps[-1][0]
        drafting = last.drafted or (last.to_propose is not None and last.to_propose.any())
        if drafting or self._waits[running].any():
            raise TokensNeeded
        return running[self.total()[running] < self._table.max_total_tokens[running]]

    def start(self, plan: BatchPlan) -> None:
        self._num_new[plan.slots] += plan.num_new
        self._num_sampled[plan.slots] += plan.samples
        self._steps.append((plan, self._table.request_id[plan.slots]))

    def finish(self, plan: BatchPlan, ids: IntArray, bad: BoolArray) -> tuple[BatchPlan, IntArray, BoolArray]:
        """Ends the oldest started step, which must be `plan`; else raises RuntimeError. Returns the plan, ids [N] and bad [N] (of
        its N sampling rows) without the rows whose request has ended meanwhile."""
        started, request_ids = self._steps.popleft()
        if started is not plan:
            raise RuntimeError(f"step {plan.step_id} ends before step {started.step_id}")
        alive = self._table.request_id[plan.slots] == request_ids
        if not alive.all():
            ids, bad = ids[alive[plan.samples]], bad[alive[plan.samples]]
            plan = replace(
                plan,
                slots=plan.slots[alive],
                num_computed=plan.num_computed[alive],
                num_new=plan.num_new[alive],
                samples=plan.samples[alive],
            )
        self._num_new[plan.slots] -= plan.num_new
        self._num_sampled[plan.slots] -= plan.samples
        return plan, ids, bad
