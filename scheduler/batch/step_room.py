"""What one step has room for: rows that decode, and tokens of prompts, of which each costs by its own context."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.batch.plan import IntArray
from scheduler.batch.step_limits import LEAST_CHUNK_TOKENS, StepLimits
from scheduler.batch.tenant_time import TenantLoad


class StepRoom:
    """Of one step. `open` says what it decodes, then prompts take one after the other.

    limits: None for none but max_tokens (of prompts) and max_rows. turns: how many the step may take while other models wait; 0: no
    other does. strict: prompts keep within them, too (StepLimits.longest_s). backlogged: afterwards, whether there were more rows
    than fit one turn, or a prompt's part is left."""

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
        self._contexts = (0.0, 0.0, 0.0)  # StepLimits.prompting has the meanings
        self._taken = False

    def rows(self, most: int, contexts: IntArray, running: IntArray, num_waiting: int = 0) -> int:
        """How many sequences may decode, `most` at most. contexts: the positions of each slot; running: slots."""
        if self._turns and self._limits is not None:
            context = float(contexts[running].mean()) if len(running) else 0.0
            of_one = self._limits.max_rows(most, context)
            self.backlogged = of_one < min(most, len(running) + num_waiting)
            return of_one if self._turns == 1 else self._limits.max_rows(most, context, self._turns)
        return most if self._max_rows is None else min(most, self._max_rows)

    def rows_beside_prompt(self, most: int, contexts: IntArray) -> int:
        """As rows, of a step that a prompt has a part of: while other models wait, room for its smallest chunk is kept. contexts:
        of the sequences that want to decode."""
        if self._limits is None or not len(contexts):
            return most
        return self._limits.rows_beside_prompt(min(most, len(contexts)), float(contexts.mean()), self._turns, self._strict)

    def rows_beside(self, loads: Sequence[TenantLoad], most: int, contexts: IntArray) -> int:
        """As rows, of several tenants' sequences."""
        if self._turns or self._limits is None or not len(contexts):
            return most
        return self._limits.rows_beside(loads, most, float(contexts.mean()))

    def open(self, max_tokens: int, contexts: IntArray, loads: Sequence[TenantLoad]) -> None:
        """contexts: the positions of each sequence that decodes. max_tokens: of the whole step."""
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
        """Tokens for a prompt of which num_computed are stored; 0: the step is full, which it is once one got less than wanted.
        Where there is no room, the first gets LEAST_CHUNK_TOKENS, and what costs no more: prompts go on, if slowly."""
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
        """Tokens of a prompt of which num_computed are stored, `most` at most, that a step of longest_s has room for."""
        assert self._limits is not None
        before = self._tokens
        tokens = self._limits.prompting.tokens_within(
            longest_s, before + most, lambda all_: self._with(num_computed, all_ - before)
        )
        return tokens - before

    def _with(self, num_computed: int, num: int) -> tuple[float, float, float]:
        decoding, read, pairs = self._contexts
        return decoding, read + num_computed + num, pairs + num * (num_computed + num / 2)
