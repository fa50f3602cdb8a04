"""Drafts tokens (speculative decoding): a cheap method guesses the next tokens of a sequence, and one step verifies them.

A sequence that decodes may bring drafted tokens along, each as one more row of the step, at the positions after its last token.
Every row samples its next token with the random numbers of its own position, as it would without drafts. As long as the sampled
tokens equal the drafted ones, all rows count; from the first difference on, rows are dropped. The text is the same as without
drafts, only in fewer steps.

The number of drafted tokens depends on the chance that the model samples them, learned from the sequence's earlier drafts, and on
the cost of a step with more rows (StepRoom.worth_drafting). Drafting is suspended for a sequence if it is not worth its cost, each
time for twice as long as the last time.

For a sequence with a grammar, allowed_token_ids or bad_words, the code that computes its masks also proposes its drafts
(masked_drafts.py), including the tokens that the grammar forces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from scheduler.batch.endings import Endings
from scheduler.batch.masked_drafts import MaskedDrafts, Proposal
from scheduler.batch.plan import BatchPlan, BoolArray, IntArray, LongArray, SequenceTable, StepOutcome
from scheduler.batch.prefix_cache import PrefixCache
from scheduler.batch.prompt_lookup import FEWEST_TOKENS
from scheduler.batch.proposals import Proposals
from scheduler.batch.sequence_blocks import SequenceBlocks
from scheduler.batch.step_room import StepRoom

Drafter = Callable[[IntArray, int], IntArray]  # (tokens of a sequence, how many to draft) -> that many drafted tokens, or none

MOST_DRAFTED = 15  # most drafted tokens of a sequence in a step
MOST_PAUSE = 64  # most plans for which a sequence is left alone
_NEVER = np.iinfo(np.int64).max  # next_plan of a sequence for which nothing is drafted
_PRIOR = 0.6  # the chance that a drafted token holds, before anything is learned
_NEWEST = 0.25  # weight of a new result in a sequence's chance, and in that of the model's new sequences
_NEWEST_OF_MODEL = 0.02


@dataclass(slots=True)
class Drafted:
    """A drafted token. row: the index of its sequence among the sequences that decode. worth: the chance that the model samples
    this token and all tokens drafted before it. guessed: False if only tokens that a grammar forces were drafted for the sequence;
    True if tokens were guessed. If none of a sequence's guesses is worth its row, drafting for the sequence is suspended."""

    row: int  # index among the rows that decode
    worth: float
    guessed: bool = True


class Drafts:
    """The drafts of one model's sequences, in S slots.

    chance [S]: that the model samples a drafted token, if it samples those before it. next_plan [S]: the index of the first plan in
    which tokens are drafted for a sequence again; pause [S]: for how many plans its drafting was last suspended. A masked sequence
    (with a grammar, allowed_token_ids or bad_words) gets drafts only when there is a proposal for it, and next_guess [S] is the
    index of the first plan whose proposal may contain guesses."""

    def __init__(self, table: SequenceTable, drafter: Drafter | None, proposals: Proposals | None = None) -> None:
        """drafter: drafts from a sequence's own text; None: only tokens that a grammar forces are drafted. proposals: the drafts of
        the model's own predictor, if it has one; they are preferred to the drafter's."""
        num_slots = len(table.request_id)
        self._table, self._drafter, self.proposals = table, drafter, proposals
        self._model_chance = _PRIOR
        self._chance: npt.NDArray[np.float64] = np.full(num_slots, _PRIOR)
        self._next_plan: LongArray = np.zeros(num_slots, np.int64)
        self._next_guess: LongArray = np.zeros(num_slots, np.int64)
        self._pause: IntArray = np.zeros(num_slots, np.int32)
        self._num_plans = 0
        self._predictions: dict[int, IntArray] = {}  # slot -> `prediction` of its request
        self._masked = MaskedDrafts()

    def join(self, slot: int, prediction: IntArray, cached: Sequence[bytes] = ()) -> None:
        """Registers the sequence in a slot, whose settings are in the table already. prediction: the tokens of a text, given by the
        client, of which the output may repeat parts; empty: none was given. cached: keys of the cached blocks that the sequence
        begins with."""
        self._chance[slot], self._pause[slot] = self._model_chance, 0
        self._next_plan[slot] = _NEVER if self._drafter is None or self._is_masked(slot) else 0
        self._next_guess[slot] = _NEVER if self._drafter is None else 0
        if len(prediction):
            self._predictions[slot] = prediction
        if self.proposals is not None:
            self.proposals.join(slot, cached)

    def learned(self, slot: int, first: int, keys: Sequence[bytes], prefixes: PrefixCache) -> None:
        """Tells the model's predictor, if it has one, that blocks of a sequence were added to the prefix cache `prefixes`. first:
        the index of the first added block. keys: the keys of the sequence's blocks, from its first block to the last one added."""
        if self.proposals is not None and self.proposals.minds(slot):
            own = self._table.block_tables[0][slot, first : len(keys)].tolist()
            owned = [prefixes.block_of(key) == block for key, block in zip(keys[first:], own, strict=True)]
            self.proposals.learned(slot, first, keys[first:], owned)

    def leave(self, slot: int) -> None:
        self._predictions.pop(slot, None)
        self._masked.drop(slot)

    def _is_masked(self, slot: int) -> bool:
        return bool(self._table.constrained[slot] or self._table.limited[slot])

    @property
    def are_none(self) -> bool:
        """Returns whether nothing can be drafted: there is no drafter, and no sequence with a grammar, allowed_token_ids or
        bad_words has a proposal."""
        return self._drafter is None and not len(self._masked)

    # ---- masked sequences

    def guess(self, slot: int) -> IntArray | None:
        """Returns tokens that may follow those of a masked sequence (with a grammar, allowed_token_ids or bad_words), to be checked
        against its grammar. Returns None while drafting for the sequence is suspended, or if the sequence may have only one more
        token."""
        if self._next_guess[slot] > self._num_plans + 1:
            return None
        end = int(self._table.num_tokens[slot])
        most = min(MOST_DRAFTED, int(self._table.max_total_tokens[slot]) - end - 1)
        proposed = bool(self._proposed(np.array([slot]), np.array([end]))[0])
        return self._of(slot, end, most, proposed) if most > 0 else None

    def propose(self, slot: int, tokens: IntArray, sure: BoolArray, guessed: bool) -> None:
        """Stores tokens that are to be drafted behind the tokens of a masked sequence (with a grammar, allowed_token_ids or
        bad_words), in place of any earlier proposal. sure: for each token whether the grammar allows no other at its place.
        guessed: True if tokens from `guess` were tried, even if the grammar allowed none of them; False if there are only tokens
        that the grammar forces."""
        self._masked.drop(slot)
        self._next_plan[slot] = _NEVER
        if len(tokens) or guessed:
            self._masked.put(slot, Proposal(tokens, sure, guessed, int(self._table.num_tokens[slot])))
            self._next_plan[slot] = 0

    # ---- planning

    def count_plan(self) -> None:
        """Counts one more plan in which tokens may be drafted. The time for which drafting is suspended for a sequence is counted
        in such plans."""
        self._num_plans += 1

    def may_come(self, slots: IntArray) -> bool:
        """Returns False if it is certain that no tokens are drafted for any of the slots in this plan, else True. For a model with
        a predictor the result is always True."""
        return self.proposals is not None or self._are_due(slots)

    def wanted(self, slots: IntArray) -> bool:
        """Returns whether tokens are to be drafted for any of the slots in this plan, that is, whether drafting is not suspended
        for the slot, or the predictor was asked to draft for it after the latest planned step. The caller must then wait until none
        of the slots' steps is under way, because drafting needs all tokens of a sequence."""
        return self._are_due(slots) or (self.proposals is not None and self.proposals.awaited(slots))

    def _are_due(self, slots: IntArray) -> bool:
        return bool(np.count_nonzero(self._next_plan.take(slots) <= self._num_plans))

    def draft(self, slots: IntArray, computed: IntArray, capacity: IntArray, most_rows: int, room: StepRoom) -> IntArray | None:
        """Writes drafted tokens behind the tokens of sequences that decode. Returns [R]: the number of drafted tokens for each of
        the R `slots`; None if there are none.

        computed [R]: positions of each sequence whose KV is stored. capacity [R]: positions that its blocks can hold. most_rows:
        upper limit of the step's rows, more than R. room: the step's limits (StepRoom), which decide how many drafted tokens are
        worth their rows."""
        spare = most_rows - len(slots)
        due = np.flatnonzero(self._next_plan[slots] <= self._num_plans)
        proposed = self._proposed(slots, computed + 1)
        if proposed.any():  # also during a pause: the predictor has drafted them already
            due = np.union1d(due, np.flatnonzero(proposed))
        if not len(due):
            return None
        table, found = self._table, []
        for row in due.tolist():
            slot, end = int(slots[row]), int(computed[row]) + 1  # the sequence has `end` tokens
            most = max(0, min(MOST_DRAFTED, spare, int(capacity[row]) - end, int(table.max_total_tokens[slot]) - end - 1))
            chance = float(self._chance[slot])
            if self._is_masked(slot):
                found += self._under_masks(row, slot, end, most, chance)
                continue
            drafted = self._of(slot, end, most, bool(proposed[row])) if most else ()
            if not len(drafted):
                self._leave_alone(slot)
                continue
            table.tokens[slot, end : end + len(drafted)] = drafted
            found += [Drafted(row, chance**number) for number in range(1, len(drafted) + 1)]
        found.sort(key=lambda one: -one.worth)  # stable: a sequence's own drafts stay in order
        num = room.worth_drafting(computed, [one.worth for one in found[:spare]]) if found else 0
        if self.proposals is not None and self.proposals.on_trial:
            found.sort(key=lambda one: not proposed[one.row])
            num = max(num, min(spare, sum(bool(proposed[one.row]) for one in found)))
        counts = np.bincount([one.row for one in found[:num]], minlength=len(slots)).astype(np.int32)
        for row in {one.row for one in found[num:] if one.guessed}:
            if not counts[row]:
                self._leave_alone(int(slots[row]))
        return counts if num else None

    def _under_masks(self, row: int, slot: int, num_tokens: int, most: int, chance: float) -> list[Drafted]:
        """Writes at most `most` of the tokens that are proposed for a masked sequence (with a grammar, allowed_token_ids or
        bad_words) behind its num_tokens tokens, and returns them; [] if there is no proposal for this number of tokens. row: the
        sequence's index among those that decode. chance: that a guessed token is what the model samples."""
        proposal = self._masked.take(slot, num_tokens)
        self._next_plan[slot] = _NEVER
        if proposal is None:
            return []
        tokens = proposal.tokens[:most]
        if proposal.guessed and not len(tokens):
            self._leave_alone(slot)
        self._table.tokens[slot, num_tokens : num_tokens + len(tokens)] = tokens
        return [Drafted(row, worth, proposal.guessed) for worth in proposal.worths(chance, most)]

    def _proposed(self, slots: IntArray, num_tokens: IntArray) -> BoolArray:
        """Returns for each slot whether the model's predictor has drafted tokens that follow the first num_tokens tokens of its
        sequence."""
        return np.zeros(len(slots), np.bool_) if self.proposals is None else self.proposals.are_there(slots, num_tokens)

    def _of(self, slot: int, num_tokens: int, most: int, proposed: bool) -> IntArray:
        """Returns at most `most` drafted tokens, which may follow the first num_tokens tokens of a slot's sequence. proposed: True:
        they are those that the model's predictor has drafted; False: they are looked up in the sequence's own text."""
        if proposed and self.proposals is not None:
            return self.proposals.of(slot)[:most]
        assert self._drafter is not None
        tokens, prediction = self._table.tokens[slot, :num_tokens], self._predictions.get(slot)
        if prediction is None:
            return self._drafter(tokens, most)
        output = tokens[self._table.num_prompt[slot] :]
        if len(output) <= FEWEST_TOKENS and np.array_equal(output, prediction[: len(output)]):
            return prediction[len(output) :][:most]  # the output is too short for a lookup
        return self._drafter(np.concatenate((prediction, tokens)), most)

    def ask(self, plan: BatchPlan, blocks: SequenceBlocks, most_rows: int, room: StepRoom) -> BatchPlan:
        """Asks the model's predictor, if it has one, for drafts. Returns the plan with `to_propose` set: how many tokens the
        predictor is to draft after the step, for each row. Returns the plan unchanged if the model has no predictor, or if the
        predictor is to skip this step, because it is too slow or its drafts have long not been worth their cost (Proposals.ask).

        blocks: the blocks that the sequences hold. most_rows: upper limit of the rows of the next step. room: the limits and
        learned costs of steps, by which it is decided how many drafts are worth their cost."""
        if self.proposals is None:
            return plan
        slots = plan.slots
        drafting = self._next_guess[slots] < _NEVER
        return self.proposals.ask(plan, drafting, self._chance[slots], blocks, most_rows, room)

    def verify(self, plan: BatchPlan, ids: IntArray, bad: BoolArray, endings: Endings) -> Verified:
        """Returns the tokens that each sequence gets from a step with drafts: its drafted tokens as far as the model sampled the
        same ones, and the token sampled after them. Updates the chances that drafts are right. ids, bad: the token that each row of
        the plan sampled, and whether its logits were not finite."""
        counting = _rows_that_count(plan, self._table, ids, bad, endings)
        slots, told = plan.slots[counting], ids[counting]
        last, counts = _lengths(slots)
        drafted = _lengths(plan.slots)[1] - 1
        own = slots[last]
        for slot, num_drafted, num in zip(own.tolist(), drafted.tolist(), counts.tolist(), strict=True):
            if num_drafted:
                self._learn(slot, num_drafted, num - 1)
        ones = np.ones(len(own), np.int32)
        newest = BatchPlan(plan.step_id, plan.model, own, plan.num_computed[counting][last], ones, ones.astype(np.bool_), True)
        return Verified(newest, told[last], bad[counting][last], counts, told, drafted)

    def _learn(self, slot: int, num_drafted: int, num_held: int) -> None:
        """Updates the chance that a sequence's drafts are right, after the model has sampled num_held of num_drafted drafted
        tokens. Tokens that a grammar forces are not counted, because they say nothing about guesses."""
        sure = self._masked.sure(slot)
        for number in range(min(num_held + 1, num_drafted)):
            if sure is not None and sure[number]:
                continue
            held = float(number < num_held)
            self._chance[slot] += _NEWEST * (held - self._chance[slot])
            self._model_chance += _NEWEST_OF_MODEL * (held - self._model_chance)
            if number < num_held:
                self._pause[slot] = 0

    def _leave_alone(self, slot: int) -> None:
        """Suspends drafting for the sequence in a slot, for twice as many plans as the last time. Drafting resumes when the count
        of plans is a multiple of this number, so that it resumes for several sequences together. This helps because, while tokens
        are drafted for any sequence, no step of its model can start before the last one has ended."""
        pause = self._pause[slot] = min(MOST_PAUSE, max(1, 2 * int(self._pause[slot])))
        ends = self._next_guess if self._is_masked(slot) else self._next_plan
        ends[slot] = (self._num_plans // pause + 1) * pause
        if pause == MOST_PAUSE:  # its text may have changed in that time
            self._chance[slot] += (self._model_chance - self._chance[slot]) / 4


def with_drafts(plan: BatchPlan, counts: IntArray) -> BatchPlan:
    """Returns the plan of decode rows with counts[i] more rows behind row i, one for each drafted token."""
    rows = np.repeat(np.arange(len(counts)), counts + 1)
    behind = (np.arange(len(rows)) - (np.cumsum(counts + 1) - counts - 1)[rows]).astype(np.int32)
    ones = np.ones(len(rows), np.int32)
    return replace(
        plan,
        slots=plan.slots[rows],
        num_computed=plan.num_computed[rows] + behind,
        num_new=ones,
        samples=ones.astype(np.bool_),
        drafted=True,
    )


@dataclass(slots=True)
class Verified:
    """The tokens that Q sequences get from a step with drafts.

    plan: the step's plan with one row for each sequence: the last of its rows whose sampled token counts. ids, bad [Q]: the token
    that this row sampled, and whether its logits were not finite.

    counts [Q]: how many tokens each sequence gets: its drafted tokens that were right, and the one sampled after them. told [sum of
    counts]: these tokens, one sequence after the other. drafted [Q]: how many tokens were drafted for each sequence."""

    plan: BatchPlan
    ids: IntArray
    bad: BoolArray
    counts: IntArray
    told: IntArray
    drafted: IntArray

    @property
    def most(self) -> int:
        return int(self.counts.max(initial=1))

    def complete(self, outcome: StepOutcome) -> None:
        """Completes an outcome that has only the last token of each sequence: sets all tokens of each sequence and their
        numbers."""
        outcome.ids = self.told[~np.repeat(self.bad, self.counts)].tolist()
        outcome.counts, outcome.drafted = self.counts[~self.bad].tolist(), self.drafted[~self.bad].tolist()


def _rows_that_count(plan: BatchPlan, table: SequenceTable, ids: IntArray, bad: BoolArray, endings: Endings) -> BoolArray:
    """Returns for each row of a plan with drafts whether its sampled token is used. The tokens of a sequence are used up to and
    including the first one that differs from the drafted token, ends the sequence, or has logits that are not finite. ids, bad: the
    token that each row sampled, and whether its logits were not finite."""
    slots, position = plan.slots, plan.num_computed + 1
    goes_on = ~bad & ~endings.ended(slots, ids, position + 1)
    goes_on[:-1] &= table.tokens[slots[:-1], position[:-1]] == ids[:-1]
    counts, before, counting = [], -1, True
    for slot, on in zip(slots.tolist(), goes_on.tolist(), strict=True):
        counting = counting or slot != before
        counts.append(counting)
        counting, before = counting and on, slot
    return np.array(counts, np.bool_)


def _lengths(slots: IntArray) -> tuple[BoolArray, IntArray]:
    """Returns for each row whether it is the last of its sequence, and for each sequence its number of rows. slots: the rows'
    slots; the rows of a sequence are adjacent."""
    last = np.ones(len(slots), np.bool_)
    last[:-1] = slots[1:] != slots[:-1]
    return last, np.diff(np.flatnonzero(last), prepend=-1).astype(np.int32)
