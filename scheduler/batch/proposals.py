"""Keeps the tokens that a model's own predictor has drafted (engine/models/predictor.py), and decides how many it is to draft next.

The predictor runs after a step, on the step's hidden states, and drafts for the next one. It has keys and values of its own for
every position. If it does not process a step, it lacks the keys and values of that step's positions, and cannot compute them later.
A sequence with such a hole gets no more drafts from the predictor, and neither does a sequence that begins with cached blocks that
contain a hole. The predictor processes every step with parts of prompts, and decode steps as long as drafting may soon be worth its
cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from scheduler.batch.plan import BatchPlan, BoolArray, IntArray, SequenceTable
from scheduler.batch.sequence_blocks import SequenceBlocks
from scheduler.batch.step_room import StepRoom

MOST_PROPOSED = 5  # most tokens drafted for a sequence: a predictor is less and less sure of what follows its own drafts
MOST_PAUSE = 64  # plans without a draft after which the predictor is left out; fewer if it costs much to see a step
WASTED_STEPS = 2.0  # the time, in steps, that a predictor may cost while no draft pays, before it is left out
RETRY_PLANS = 2_000  # plans for which a predictor counts as too slow before its time is measured anew
_NO_HOLE = np.iinfo(np.int32).max
_MOST_KEYS = 1 << 16  # most keys of cached blocks with holes; beyond that the oldest are forgotten and count as seen


class Proposals:
    """The tokens that one model's predictor has drafted. block_tokens: positions in a block of the prefix cache.

    on_trial: whether the tokens drafted now are verified even if they do not seem worth it, to learn what they are worth.

    hole [S]: for each of S slots (places of running sequences) the first position of its sequence that the predictor has not
    processed. asked [S]: whether the predictor drafts for the slot's sequence after the latest planned step.

    tokens [S, K], counts [S]: the tokens last drafted for each slot's sequence, at most K, and their number. behind [S]: how many
    tokens the sequence had when they were drafted.

    holed: keys of cached blocks with positions that the predictor has not processed."""

    def __init__(self, table: SequenceTable, block_tokens: int) -> None:
        num_slots = len(table.request_id)
        self._table, self._block_tokens = table, block_tokens
        self.on_trial = False
        self._hole: IntArray = np.full(num_slots, _NO_HOLE, np.int32)
        self._tokens: IntArray = np.zeros((num_slots, MOST_PROPOSED), np.int32)
        self._counts: IntArray = np.zeros(num_slots, np.int32)
        self._behind: IntArray = np.zeros(num_slots, np.int32)
        self._asked: BoolArray = np.zeros(num_slots, np.bool_)
        self._holed: dict[bytes, None] = {}
        self._pause = self._paused = 0  # plans without drafts: length of the pause, plans so far
        self._num_slow = 0  # plans for which the predictor was too slow

    def join(self, slot: int, cached: Sequence[bytes]) -> None:
        """Registers the sequence in a slot. cached: keys of the cached blocks that it begins with; the predictor drafts for the
        sequence only if it has processed all of their positions."""
        first = next((at for at, key in enumerate(cached) if key in self._holed), None) if self._holed else None
        self._hole[slot] = _NO_HOLE if first is None else first * self._block_tokens
        self._counts[slot], self._asked[slot] = 0, False

    def learned(self, slot: int, first: int, keys: Sequence[bytes], owned: Sequence[bool]) -> None:
        """Updates which blocks of the prefix cache have positions that the predictor has not processed, after blocks of a sequence
        were added to that cache. first: index of the first added block. keys: the keys of the added blocks. owned: for each key,
        whether the cache keeps this sequence's block; False if it had another block with this key already."""
        for at, (key, is_owned) in enumerate(zip(keys, owned, strict=True), first):
            if not is_owned:
                continue
            self._holed.pop(key, None)
            if self._hole[slot] < (at + 1) * self._block_tokens:
                self._holed[key] = None
        while len(self._holed) > _MOST_KEYS:
            del self._holed[next(iter(self._holed))]

    def minds(self, slot: int) -> bool:
        """Returns whether blocks that the slot's sequence adds to the prefix cache must be reported by `learned`: True if there is
        a position, of this sequence or of any cached block, that the predictor has not processed."""
        return bool(self._holed) or self._hole[slot] < _NO_HOLE

    def ask(
        self,
        plan: BatchPlan,
        drafting: BoolArray,
        chances: npt.NDArray[np.float64],
        blocks: SequenceBlocks,
        most_rows: int,
        room: StepRoom,
    ) -> BatchPlan:
        """Decides whether the predictor processes the planned step, and how many tokens it drafts after it. Returns the plan with
        `to_propose` set, the number of tokens for each row, or the plan unchanged if the predictor skips the step. It skips a step
        if it is too slow for drafts ever to be worth their cost. It also skips a step that only decodes if no sequence can use
        drafts, or if they have not been worth their cost for long.

        drafting [R]: whether the sequence of each of the plan's R rows can use drafts. chances [R]: the chance that the model
        samples a drafted token of each row's sequence. blocks: the blocks that sequences hold; a sequence whose blocks have no room
        for its drafts gets another block, if one is available. most_rows: upper limit of the rows of the next step. room: the
        limits and learned costs of steps."""
        self.on_trial = False
        self._asked[:] = False
        if self._is_too_slow(plan, room):
            np.minimum.at(self._hole, plan.slots, plan.num_computed)
            return plan
        drafting = drafting & plan.samples & (self._hole[plan.slots] == _NO_HOLE)
        computed = plan.num_computed + plan.num_new
        slots, num, longest = np.unique(plan.slots[drafting]), 0, MOST_PAUSE
        if len(slots):
            numbers = len(np.unique(plan.slots[plan.samples])), len(slots), most_rows - len(np.unique(plan.slots))
            context = float(computed[drafting].mean())
            num = self._depth(room, numbers, context, float(chances[drafting].mean()))
            share = room.predictor_share(numbers[0], context)
            longest = MOST_PAUSE if share <= 0.0 else min(MOST_PAUSE, max(2, int(WASTED_STEPS / share)))
        if not num and plan.all_decode and (not len(slots) or (self._pause >= longest and self._paused > 1)):
            np.minimum.at(self._hole, plan.slots, plan.num_computed)
            return plan
        ends = self._table.max_total_tokens[plan.slots]
        held = blocks.capacity[plan.slots]
        short = np.unique(plan.slots[drafting & (held < np.minimum(computed + 1 + num, ends))])
        if num and len(short) and not blocks.windowed:  # with windows, this step still reads blocks that extending would free
            blocks.extend(short, blocks.capacity)
        # the last drafted token is sampled, but not computed
        most = np.minimum(blocks.capacity[plan.slots] - computed + 1, ends - computed - 2)
        to_propose = np.where(drafting, np.clip(most, 0, num), 0).astype(np.int32)
        self._asked[plan.slots[to_propose > 0]] = True
        return replace(plan, to_propose=to_propose)

    def _is_too_slow(self, plan: BatchPlan, room: StepRoom) -> bool:
        """Returns whether the predictor is so slow that drafting cannot be worth its cost, even if every drafted token were right
        and verifying it cost nothing. After RETRY_PLANS plans with this result the predictor's costs are forgotten, so that they
        are measured again."""
        num_rows = len(np.unique(plan.slots))
        if not room.predictor_is_too_slow(num_rows, float(plan.num_computed.mean()), MOST_PROPOSED):
            return False
        self._num_slow += 1
        if self._num_slow >= RETRY_PLANS:
            self._num_slow = 0
            room.forget_predictor()
        return True

    def _depth(self, room: StepRoom, numbers: tuple[int, int, int], context: float, chance: float) -> int:
        """Returns how many tokens the predictor is to draft for each sequence. numbers: three numbers: how many sequences the step
        has, how many of them use drafts, and how many rows the next step has for drafted tokens. context: average number of
        positions of a sequence. chance: that a drafted token is what the model samples.

        While drafting is not worth its cost, the result is 0, but from time to time 1: texts and batches change, so drafting is
        tried again. Each interval between two of these trials is twice as long as the last."""
        num = room.worth_proposing(*numbers, context, chance, MOST_PROPOSED)
        if num:
            self._pause = self._paused = 0
            return num
        self._paused += 1
        if self._paused < self._pause:
            return 0
        self._paused, self._pause = 0, min(MOST_PAUSE, max(1, 2 * self._pause))
        self.on_trial = numbers[2] > 0
        return int(self.on_trial)

    def take(self, slots: IntArray, counts: IntArray, tokens: IntArray) -> None:
        """Stores the predictor's drafts: for the sequence in slots[q], whose newest tokens the table has already, the first
        counts[q] of tokens[q]."""
        num = tokens.shape[1]
        self._tokens[slots, :num] = tokens
        self._counts[slots], self._behind[slots] = counts, self._table.num_tokens[slots]

    def awaited(self, slots: IntArray) -> bool:
        """Returns whether the predictor was asked, in the latest planned step, to draft tokens for any of the slots' sequences."""
        return bool(self._asked[slots].any())

    def are_there(self, slots: IntArray, num_tokens: IntArray) -> BoolArray:
        """Returns, for the sequence in each slot, whether there are usable drafts that follow its first `num_tokens` tokens."""
        fits = (self._behind[slots] == num_tokens) & (self._counts[slots] > 0)
        return np.asarray(fits & (self._hole[slots] == _NO_HOLE))

    def of(self, slot: int) -> IntArray:
        """Returns the tokens that the predictor drafted last for a slot."""
        return self._tokens[slot, : self._counts[slot]]
