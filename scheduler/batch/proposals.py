"""Tokens that a model's own predictor has drafted (engine/models/predictor.py), and how many it is asked for.

The predictor runs behind a step, on what the step computed, and drafts for the next one. It has keys and values of its own, at the
positions of the model's: where it did not see a step, it lacks those of the step's tokens for good, so it drafts nothing any more
for the sequences in it. It sees every step with parts of prompts, and others as long as drafting may pay before long.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scheduler.batch.plan import BatchPlan, BoolArray, IntArray, SequenceTable
from scheduler.batch.step_room import StepRoom

MOST_PROPOSED = 5  # tokens of a sequence: a predictor is less and less sure of what follows its own drafts
MOST_PAUSE = 64  # plans; after that many without a draft the predictor is left out


class Proposals:
    """The proposals of one model's predictor.

    lost [S]: sequences of which the predictor has not seen every token. tokens [S, K], counts [S], behind [S]: what it drafted for
    each, and how many tokens the sequence had then."""

    def __init__(self, table: SequenceTable) -> None:
        num_slots = len(table.request_id)
        self._table = table
        self._lost: BoolArray = np.zeros(num_slots, np.bool_)
        self._tokens: IntArray = np.zeros((num_slots, MOST_PROPOSED), np.int32)
        self._counts: IntArray = np.zeros(num_slots, np.int32)
        self._behind: IntArray = np.zeros(num_slots, np.int32)
        self._pause = self._paused = 0  # plans without drafts: how many there are to be, and how many there were

    def join(self, slot: int) -> None:
        """Registers a sequence. What of its prompt was cached counts as seen: it was when it was computed, but perhaps for a few
        tokens behind its end."""
        self._lost[slot] = False
        self._counts[slot] = 0

    def ask(self, plan: BatchPlan, drafting: BoolArray, chance: float, capacity: IntArray, room: StepRoom) -> BatchPlan:
        """Returns the plan, which is then run, with what the predictor is to draft after it, if it is to see it. drafting [R]: rows
        behind which drafts may be of use. chance: that a drafted token holds. capacity [R]: positions that the blocks of each row's
        sequence can hold."""
        drafting = drafting & plan.samples & ~self._lost[plan.slots]
        computed = plan.num_computed + plan.num_new
        slots = np.unique(plan.slots[drafting])
        num = 0
        if len(slots):
            context = float(computed[drafting].mean())
            num = self._depth(room, len(slots), context, chance)
        if not num and plan.all_decode and (not len(slots) or self._pause >= MOST_PAUSE):
            self._lost[plan.slots] = True  # now, because the next plan may be made before this step has ended
            return plan
        # the last drafted token is sampled, but not computed
        most = np.minimum(capacity - computed + 1, self._table.max_total_tokens[plan.slots] - computed - 2)
        return replace(plan, to_propose=np.where(drafting, np.clip(most, 0, num), 0).astype(np.int32))

    def _depth(self, room: StepRoom, num_sequences: int, context: float, chance: float) -> int:
        """Returns how many tokens to draft for each sequence. While nothing pays, one is drafted after a pause, twice as long each
        time, because texts and batches change."""
        num = room.worth_proposing(num_sequences, context, chance, MOST_PROPOSED)
        if num:
            self._pause = self._paused = 0
            return num
        self._paused += 1
        if self._paused < self._pause:
            return 0
        self._paused, self._pause = 0, min(MOST_PAUSE, max(1, 2 * self._pause))
        return 1

    def take(self, slots: IntArray, counts: IntArray, tokens: IntArray) -> None:
        """Takes what was drafted behind sequences whose newest tokens are in the table: counts[q] tokens of tokens[q]."""
        num = tokens.shape[1]
        self._tokens[slots, :num] = tokens
        self._counts[slots], self._behind[slots] = counts, self._table.num_tokens[slots]

    def of(self, slot: int, num_tokens: int) -> IntArray | None:
        """Returns the tokens drafted behind a slot's num_tokens; None: the predictor drafts nothing for it."""
        if self._lost[slot] or self._behind[slot] != num_tokens or not self._counts[slot]:
            return None
        return self._tokens[slot, : self._counts[slot]]
