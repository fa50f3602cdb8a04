"""Tokens that a model's own predictor has drafted (engine/models/predictor.py), and how many it is asked for.

The predictor runs behind a step, on what the step computed, and drafts for the next one. It has keys and values of its own, at the
positions of the model's: where it did not see a step, it lacks those of the step's tokens for good. A sequence with such a hole is
not drafted for any more, nor is one that begins with cached blocks that have one. It sees every step with parts of prompts, and
others as long as drafting may pay before long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from scheduler.batch.plan import BatchPlan, BoolArray, IntArray, SequenceTable
from scheduler.batch.sequence_blocks import SequenceBlocks
from scheduler.batch.step_room import StepRoom

MOST_PROPOSED = 5  # tokens of a sequence: a predictor is less and less sure of what follows its own drafts
MOST_PAUSE = 64  # plans; after that many without a draft the predictor is left out, or after fewer if to see a step costs much
WASTED_STEPS = 2.0  # that a predictor may cost while no draft pays, before it is left out
RETRY_PLANS = 2_000  # for which a predictor is taken to be too slow before its time is measured anew
_NO_HOLE = np.iinfo(np.int32).max
_MOST_KEYS = 1 << 16  # of cached blocks with holes; the oldest are forgotten beyond, and count as seen


class Proposals:
    """The proposals of one model's predictor. block_tokens: positions in a block of the prefix cache.

    on_trial: whether what is proposed now is to be verified whatever it is worth, because that would not be learned otherwise.
    hole [S]: the first position of each sequence that the predictor has not seen. tokens [S, K], counts [S], behind [S]: what it
    drafted for each, and how many tokens the sequence had then. asked [S]: whether it drafts behind the latest planned step. holed:
    keys of cached blocks with positions that it has not seen."""

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
        self._pause = self._paused = 0  # plans without drafts: how many there are to be, and how many there were
        self._num_slow = 0  # plans for which the predictor was too slow

    def join(self, slot: int, cached: Sequence[bytes]) -> None:
        """Registers a sequence. cached: keys of the cached blocks that it begins with. The last position of each may have been
        seen beside another token than the sequence has behind it."""
        first = next((at for at, key in enumerate(cached) if key in self._holed), None) if self._holed else None
        self._hole[slot] = _NO_HOLE if first is None else first * self._block_tokens
        self._counts[slot], self._asked[slot] = 0, False

    def learned(self, slot: int, first: int, keys: Sequence[bytes], owned: Sequence[bool]) -> None:
        """Notes which blocks of a sequence, from its `first` one on, are in the prefix cache under these keys now. owned: those
        that are; of the others the cache had one already."""
        for at, (key, is_owned) in enumerate(zip(keys, owned, strict=True), first):
            if not is_owned:
                continue
            self._holed.pop(key, None)
            if self._hole[slot] < (at + 1) * self._block_tokens:
                self._holed[key] = None
        while len(self._holed) > _MOST_KEYS:
            del self._holed[next(iter(self._holed))]

    def minds(self, slot: int) -> bool:
        """Returns whether `learned` would change anything for a sequence."""
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
        """Returns the plan with what the predictor is to draft after it, if it is to see it. drafting [R]: rows behind which drafts
        may be of use. chances [R]: that a drafted token of each row's sequence holds. blocks: a sequence at the end of its last one
        gets another, if there is one to spare. most_rows: bound on the rows of the next step."""
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
        if num and len(short) and not blocks.windowed:  # what is behind a window then is still read in this step
            blocks.extend(short, blocks.capacity)
        # the last drafted token is sampled, but not computed
        most = np.minimum(blocks.capacity[plan.slots] - computed + 1, ends - computed - 2)
        to_propose = np.where(drafting, np.clip(most, 0, num), 0).astype(np.int32)
        self._asked[plan.slots[to_propose > 0]] = True
        return replace(plan, to_propose=to_propose)

    def _is_too_slow(self, plan: BatchPlan, room: StepRoom) -> bool:
        """Returns whether the predictor takes so long that drafts would not pay even if all of them held and cost no rows."""
        num_rows = len(np.unique(plan.slots))
        if not room.predictor_is_too_slow(num_rows, float(plan.num_computed.mean()), MOST_PROPOSED):
            return False
        self._num_slow += 1
        if self._num_slow >= RETRY_PLANS:
            self._num_slow = 0
            room.forget_predictor()
        return True

    def _depth(self, room: StepRoom, numbers: tuple[int, int, int], context: float, chance: float) -> int:
        """Returns how many tokens to draft for each sequence. numbers, context, chance: as StepRoom.worth_proposing takes
        them. While nothing pays, one is drafted and verified after a pause, twice as long each time, because texts and batches
        change. The predictor still sees the step after that, which verifies it."""
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
        """Takes what was drafted behind sequences whose newest tokens are in the table: counts[q] tokens of tokens[q]."""
        num = tokens.shape[1]
        self._tokens[slots, :num] = tokens
        self._counts[slots], self._behind[slots] = counts, self._table.num_tokens[slots]

    def awaited(self, slots: IntArray) -> bool:
        """Returns whether the predictor drafts behind the latest planned step for any of the slots."""
        return bool(self._asked[slots].any())

    def are_there(self, slots: IntArray, num_tokens: IntArray) -> BoolArray:
        """Returns for each slot whether tokens were drafted behind its num_tokens."""
        fits = (self._behind[slots] == num_tokens) & (self._counts[slots] > 0)
        return np.asarray(fits & (self._hole[slots] == _NO_HOLE))

    def of(self, slot: int) -> IntArray:
        """Returns what was drafted for a slot last."""
        return self._tokens[slot, : self._counts[slot]]
