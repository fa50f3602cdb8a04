"""Keeps account of what still fits into one step of a model: how many sequences may decode, and how many tokens of prompts may be
computed. What a sequence or token costs depends on its context, that is, the number of positions it attends to."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.batch.plan import IntArray
from scheduler.batch.step_limits import LEAST_CHUNK_TOKENS, StepLimits
from scheduler.batch.tenant_time import TenantLoad


class StepRoom:
    """Limits what one step of a model computes, while the step is being planned: `open` sets the sequences that decode, then `take`
    adds tokens of one prompt after the other, as long as there is room.

    limits: the model's step limits; None: only max_tokens (tokens of prompts) and max_rows (sequences that decode) apply. turns:
    how many turns (time slices of the device, of StepLimits.turn_s seconds each) the step may take while other models wait; 0: no
    other model waits. strict: True: the step must end within these turns. False: it may also take as long as the cheapest step with
    a chunk of a prompt, up to two turns, if that is longer.

    The attribute `backlogged` is set during planning: whether more sequences want to decode than fit one turn, or part of a prompt
    does not fit."""

    def __init__(
        self,
        limits: StepLimits | None = None,
        turns: int = 0,
        max_tokens: int | None = None,
        max_rows: int | None = None,
        strict: bool = False,
    ) -> None:
        self._limits, self._turns, self._max_tokens, self._max_rows = limits, turns, max_tokens, max_rows
        self._strict = strict
        self.backlogged = False
        self._left = self._tokens = 0
        self._longest_s: float | None = None
        self._contexts = (0.0, 0.0, 0.0)  # contexts of the step; StepLimits explains those of `prompting`
        self._taken = False

    def rows(self, most: int, contexts: IntArray, running: IntArray, num_waiting: int = 0) -> int:
        """Returns how many sequences may decode in the step, at most `most`. contexts [S]: number of positions of the sequence in
        each of S slots. running: slots of the running sequences. num_waiting: requests that could be admitted."""
        if self._turns and self._limits is not None:
            context = float(contexts[running].mean()) if len(running) else 0.0
            of_one = self._limits.max_rows(most, context)
            self.backlogged = of_one < min(most, len(running) + num_waiting)
            return of_one if self._turns == 1 else self._limits.max_rows(most, context, self._turns)
        return most if self._max_rows is None else min(most, self._max_rows)

    def rows_beside_prompt(self, most: int, contexts: IntArray) -> int:
        """Returns how many sequences, at most `most`, may decode in a step that also computes a prompt. While other models wait,
        room for the prompt's smallest chunk is kept. contexts: number of positions of each sequence that wants to decode."""
        if self._limits is None or not len(contexts):
            return most
        return self._limits.rows_beside_prompt(min(most, len(contexts)), float(contexts.mean()), self._turns, self._strict)

    def rows_beside(self, loads: Sequence[TenantLoad], most: int, contexts: IntArray) -> int:
        """Returns how many sequences, at most `most`, may decode in a step of several tenants, so that no tenant's sequences are
        slowed down too much by the others (StepLimits.rows_beside). loads: one for each tenant. contexts: number of positions of
        each sequence that wants to decode."""
        if self._turns or self._limits is None or not len(contexts):
            return most
        return self._limits.rows_beside(loads, most, float(contexts.mean()))

    def worth_drafting(self, contexts: IntArray, worths: Sequence[float]) -> int:
        """Returns how many of the drafted tokens, taken in the order of `worths`, are worth their cost in a step that only decodes.
        contexts: number of positions of each sequence. worths: for each drafted token the chance that it is what the model samples,
        in descending order."""
        if self._limits is None:
            return len(worths)
        return self._limits.worth_drafting(len(contexts), float(contexts.mean()), worths, self._turns)

    def worth_proposing(self, num_rows: int, num_drafting: int, spare: int, context: float, chance: float, most: int) -> int:
        """Returns how many tokens, at most `most`, a model's predictor is to draft for each sequence that uses drafts. num_rows:
        decoding sequences. num_drafting: those of them that use drafts. spare: rows that the next step has for drafted tokens.
        context: average number of positions of a sequence. chance: that a drafted token is what the model samples."""
        if self._limits is None:
            return min(most, -(-spare // num_drafting))
        return self._limits.worth_proposing(num_rows, num_drafting, spare, context, chance, most, self._turns)

    def predictor_share(self, num_rows: int, context: float) -> float:
        """Returns the predictor's time to process a step of num_rows decoding sequences, before it drafts anything, as a share of
        the step's time; 0.0 if that is not known. context: average number of positions of a sequence."""
        return 0.0 if self._limits is None else self._limits.predictor_share(num_rows, context)

    def predictor_is_too_slow(self, num_rows: int, context: float, most: int) -> bool:
        """Returns whether the predictor takes at least as long to draft `most` tokens for each of num_rows sequences as the model
        takes to decode them in `most` steps, so that drafting is never worth its cost. False while these times are not known.
        context: average number of positions of a sequence."""
        return self._limits is not None and self._limits.predictor_is_too_slow(num_rows, context, most)

    def forget_predictor(self) -> None:
        """Drops the learned costs of the model's predictor, so that they are measured anew."""
        if self._limits is not None:
            self._limits.forget_predictor()

    def open(self, max_tokens: int, contexts: IntArray, loads: Sequence[TenantLoad]) -> None:
        """Begins the account of a step, and takes room for its decoding sequences. contexts: for each of them, the number of
        positions it attends to. max_tokens: the most tokens of the whole step. loads: what each tenant wants computed."""
        num_rows, context = len(contexts), float(contexts.sum())
        self._left = max_tokens - num_rows
        if self._max_tokens is not None:
            self._left = min(self._left, max(1, self._max_tokens))
        self._tokens, self._contexts, self._taken = num_rows, (context, 0.0, 0.0), False
        if self._limits is not None:
            context /= max(1, num_rows)
            self._longest_s = self._limits.longest_s(loads, context, self._turns, self._strict)

    @property
    def is_full(self) -> bool:
        return self._left <= 0

    def take(self, num_computed: int, wanted: int) -> int:
        """Takes room in the step for tokens of a prompt, and returns for how many; 0: the step is full. num_computed: number of the
        prompt's tokens whose KV is stored. wanted: number of its tokens that are still to be computed.

        The step is full once a prompt got fewer tokens than it wanted. The first prompt gets at least LEAST_CHUNK_TOKENS tokens
        even if the step's time is used up, so that prompts always progress; more, if a larger chunk costs the same."""
        most = min(wanted, self._left)
        if most <= 0:
            return 0
        num = most
        if self._longest_s is not None:
            num = max(self._within(num_computed, most, self._longest_s), 0 if self._taken else min(most, self._least_chunk()))
        if self._turns and num < wanted:
            self.backlogged = True
        self._contexts = self._with(num_computed, num)
        self._tokens += num
        self._left = self._left - num if num == wanted else 0
        self._taken = True
        return num

    def _least_chunk(self) -> int:
        assert self._limits is not None
        return self._limits.prompting.filled(self._tokens + LEAST_CHUNK_TOKENS) - self._tokens

    def _within(self, num_computed: int, most: int, longest_s: float) -> int:
        """Returns how many tokens of a prompt with num_computed stored tokens, at most `most`, fit a step of longest_s seconds."""
        assert self._limits is not None
        before = self._tokens
        tokens = self._limits.prompting.tokens_within(
            longest_s, before + most, lambda all_: self._with(num_computed, all_ - before)
        )
        return tokens - before

    def _with(self, num_computed: int, num: int) -> tuple[float, float, float]:
        decoding, read, pairs = self._contexts
        return decoding, read + num_computed + num, pairs + num * (num_computed + num / 2)
