"""What a step of a simulated model takes, and how large the engine's own rules (scheduler/batch/step_limits.py) let it be.

What contexts cost is not told apart. The rules are asked with the costs known from the start: an engine learns them.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.batch.step_costs import StepCosts
from scheduler.batch.step_limits import CHUNK_STEP_TOKENS, LEAST_CHUNK_TOKENS, StepLimits
from scheduler.batch.tenant_time import TenantLoad

_CONTEXT = 1.0  # of every sequence, so that a step's context is how many sequences decode in it


@dataclass(slots=True, frozen=True)
class StepSettings:
    """An engine's: turn_budget_ms, max_step_stretch, max_num_batched_tokens of the node's configuration."""

    turn_s: float
    stretch: float
    max_tokens: int


# The configuration's defaults (a test holds them equal).
CPU_STEPS, CUDA_STEPS = StepSettings(0.010, 2.0, 512), StepSettings(0.005, 2.0, 4096)


@dataclass(slots=True, frozen=True)
class StepSeconds:
    """Of one model's steps: whatever is in it, for each sequence that decodes, and if there are tokens of prompts, so much more and
    so much for each of them (a few at a time cost more than many: other kernels run, with more to set up)."""

    fixed_s: float
    each_s: float
    prompt_s: float
    token_s: float

    def of(self, num_rows: float, num_tokens: int = 0) -> float:
        """A step in which so many sequences decode, beside so many tokens of prompts."""
        prompts_s = self.prompt_s + self.token_s * num_tokens if num_tokens else 0.0
        return self.fixed_s + self.each_s * num_rows + prompts_s


class ModelSteps:
    """Of one model. turns, everywhere: how many turns of the device a step may take; 0: no other model is busy."""

    def __init__(self, settings: StepSettings, seconds: StepSeconds) -> None:
        self.seconds = seconds.of
        self._max_tokens = settings.max_tokens
        beyond_token_s = max(0.0, seconds.each_s - seconds.token_s)
        self._limits = StepLimits(
            settings.turn_s,
            settings.stretch,
            StepCosts.known(seconds.of),
            StepCosts.known(lambda tokens: seconds.of(0, tokens), (beyond_token_s, 0.0, 0.0), CHUNK_STEP_TOKENS),
        )
        self._max_rows: dict[int, int] = {}  # by turns
        self._rows_beside_prompt: dict[tuple[int, int, bool], int] = {}  # by turns, rows and whether strict
        self._room: dict[tuple[int, int, int, bool], int] = {}  # by turns, rows, prompts and whether strict

    def max_rows(self, turns: int) -> int:
        """Sequences that may decode in one step."""
        if not turns:
            return self._max_tokens
        found = self._max_rows.get(turns)
        if found is None:
            found = self._max_rows[turns] = self._limits.max_rows(self._max_tokens, _CONTEXT, turns)
        return found

    def turns_s(self, turns: int) -> float | None:
        return self._limits.turns_s(turns) if turns else None

    def rows_beside_prompt(self, turns: int, num_rows: int, strict: bool = False) -> int:
        """Of num_rows that want to decode, how many may in a step that a prompt has a part of. strict: StepRoom has its meaning."""
        key = turns, num_rows, strict
        found = self._rows_beside_prompt.get(key)
        if found is None:
            found = self._rows_beside_prompt[key] = self._limits.rows_beside_prompt(num_rows, _CONTEXT, turns, strict)
        return found

    def prompt_tokens(self, turns: int, num_rows: int, num_prompts: int, strict: bool = False) -> int:
        """Tokens of prompts a step has room for beside num_rows that decode; num_prompts: under way or waiting. Where there is no
        room a few go in all the same. strict: StepRoom has its meaning."""
        key = turns, num_rows, num_prompts, strict
        found = self._room.get(key)
        if found is None:
            found = self._room[key] = max(min(LEAST_CHUNK_TOKENS, self._max_tokens - num_rows), self._tokens_within(*key))
        return found

    def _tokens_within(self, turns: int, num_rows: int, num_prompts: int, strict: bool) -> int:
        longest_s = self._limits.longest_s([TenantLoad(num_rows, num_prompts)], _CONTEXT, turns, strict)
        if longest_s is None:
            return self._max_tokens - num_rows
        contexts = (num_rows * _CONTEXT, 0.0, 0.0)
        return self._limits.prompting.tokens_within(longest_s, self._max_tokens, lambda tokens: contexts) - num_rows
