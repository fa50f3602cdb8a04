"""Holds the drafted tokens of sequences with a grammar, allowed_token_ids or bad_words, whose logits are masked; code outside the
scheduler proposes them.

The mask for a token depends on the tokens before it, so drafted tokens need one mask each. Only code outside the scheduler can make
masks (engine/serve/constraints.py). It proposes drafts together with their masks after each token of the sequence; drafts of other
sequences are looked up when a step is planned.

Shapes: S slots, D drafted tokens of one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler.batch.plan import BoolArray, IntArray


@dataclass(slots=True, frozen=True)
class Proposal:
    """D drafted tokens of one sequence. tokens [D]: their ids. sure [D]: whether the grammar allows no other token there, so that
    the token is right if all before it are. guessed: True if guessed tokens (Drafts.guess) were tried, even if the grammar allowed
    none of them; False if there are only tokens that the grammar forces. num_tokens: the number of the sequence's tokens before the
    drafted ones."""

    tokens: IntArray
    sure: BoolArray
    guessed: bool
    num_tokens: int

    def worths(self, chance: float, most: int) -> list[float]:
        """Returns for each of the first `most` tokens the chance that the model samples it and all drafted tokens before it.
        chance: that the model samples a guessed token. For a token that the grammar forces the chance is 1 once those before it are
        sampled."""
        worths: list[float] = np.cumprod(np.where(self.sure[:most], 1.0, chance)).tolist()
        return worths


class MaskedDrafts:
    """The drafts (Proposal) of sequences whose logits are masked, by slot of a sequence table. A slot has at most two: one that
    waits for the slot's next step, and one whose tokens the running step computes."""

    def __init__(self) -> None:
        self._next: dict[int, Proposal] = {}  # slot -> the proposal for its next step
        self._drafted: dict[int, Proposal] = {}  # slot -> the proposal that the running step computes

    def __len__(self) -> int:
        return len(self._next)

    def put(self, slot: int, proposal: Proposal) -> None:
        self._next[slot] = proposal

    def take(self, slot: int, num_tokens: int) -> Proposal | None:
        """Returns the proposal for a slot, to be computed by the step that is being planned. Returns None if there is none, or if
        it was made for another number of tokens than num_tokens, the slot's current number."""
        proposal = self._next.pop(slot, None)
        if proposal is None or proposal.num_tokens != num_tokens:
            return None
        self._drafted[slot] = proposal
        return proposal

    def sure(self, slot: int) -> BoolArray | None:
        """Removes a slot's proposal, after the step that computed its tokens has ended. Returns [D] bool: for each of its tokens
        whether the grammar allowed no other (Proposal.sure); None if the slot had no proposal in that step."""
        proposal = self._drafted.pop(slot, None)
        return None if proposal is None else proposal.sure

    def drop(self, slot: int) -> None:
        self._next.pop(slot, None)
        self._drafted.pop(slot, None)
