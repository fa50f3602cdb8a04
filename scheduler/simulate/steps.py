"""Computes how long a step of a simulated model takes, and how large the engine's own rules (scheduler/batch/step_limits.py) allow
it to be.

The cost of attention, which grows with the positions that a sequence attends to, is not modelled. The rules know the true costs
from the start, while a real engine has to learn them. Only the waits of a split model's steps for other devices are learned during
the simulation.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.batch.step_costs import StepCosts
from scheduler.batch.step_limits import CHUNK_STEP_TOKENS, LEAST_CHUNK_TOKENS, StepLimits
from scheduler.batch.tenant_time import TenantLoad

_CONTEXT = 1.0  # context of every sequence, so that a step's context is the number of sequences that decode in it
_MOVED = 0.1  # results are computed again when the average wait has changed by this share of a step


@dataclass(slots=True, frozen=True)
class StepSettings:
    """The settings of an engine that limit its steps: turn_budget_ms (here in seconds), max_step_stretch and
    max_num_batched_tokens."""

    turn_s: float
    stretch: float
    max_tokens: int


@dataclass(slots=True, frozen=True)
class StepSeconds:
    """The parts of which the length of a model's step consists, in seconds. fixed_s: for every step. each_s: for each sequence that
    decodes. If the step has tokens of prompts: prompt_s once, and token_s for each of these tokens. (The first few tokens cost more
    than later ones, because other kernels run and there is more set-up; prompt_s stands for that.)"""

    fixed_s: float
    each_s: float
    prompt_s: float
    token_s: float

    def of(self, num_rows: float, num_tokens: int = 0) -> float:
        """Returns the seconds of a step in which num_rows sequences decode and num_tokens tokens of prompts are computed."""
        prompts_s = self.prompt_s + self.token_s * num_tokens if num_tokens else 0.0
        return self.fixed_s + self.each_s * num_rows + prompts_s


class ModelSteps:
    """Computes how large the steps of one model may be, by the engine's own rules and the true costs of steps. The parameter
    `turns` of its methods is the number of turns (time slices of the device) that a step may take; 0: any time, because no other
    model is busy."""

    def __init__(self, settings: StepSettings, seconds: StepSeconds) -> None:
        self.seconds = seconds.of
        self._max_tokens, self._fixed_s = settings.max_tokens, seconds.fixed_s
        beyond_token_s = max(0.0, seconds.each_s - seconds.token_s)
        self._limits = StepLimits(
            settings.turn_s,
            settings.stretch,
            StepCosts.known(seconds.of),
            StepCosts.known(lambda tokens: seconds.of(0, tokens), (beyond_token_s, 0.0, 0.0), CHUNK_STEP_TOKENS),
        )
        self._known_wait_s = 0.0  # the average wait with which the results below were computed
        self._max_rows: dict[int, int] = {}  # turns -> max_rows
        self._rows_beside_prompt: dict[tuple[int, int, bool], int] = {}  # (turns, rows, strict) -> result
        self._room: dict[tuple[int, int, int, bool], int] = {}  # (turns, rows, prompts, strict) -> result

    def note_wait(self, seconds: float) -> None:
        """Updates the average wait for other devices with that of one step. seconds: how long the step waited."""
        self._limits.note_wait(seconds)
        if abs(self._limits.wait_s - self._known_wait_s) > _MOVED * (self._fixed_s + self._known_wait_s):
            self._known_wait_s = self._limits.wait_s
            self._max_rows.clear()
            self._rows_beside_prompt.clear()
            self._room.clear()

    def max_rows(self, turns: int) -> int:
        """Returns how many sequences may decode in one step that takes `turns` turns (time slices of the device); 0: the step may
        take any time."""
        if not turns:
            return self._max_tokens
        found = self._max_rows.get(turns)
        if found is None:
            found = self._max_rows[turns] = self._limits.max_rows(self._max_tokens, _CONTEXT, turns)
        return found

    def turns_s(self, turns: int) -> float | None:
        return self._limits.turns_s(turns) if turns else None

    def rows_beside_prompt(self, turns: int, num_rows: int, strict: bool = False) -> int:
        """Returns how many of num_rows sequences, at least one, may decode in a step that also computes a chunk of a prompt. turns:
        how many turns (time slices of the device) the step may take; 0: any time. strict: True: the step must end within its turns.
        False: it may also take as long as the cheapest step with a chunk of a prompt, up to two turns, if that is longer."""
        key = turns, num_rows, strict
        found = self._rows_beside_prompt.get(key)
        if found is None:
            found = self._rows_beside_prompt[key] = self._limits.rows_beside_prompt(num_rows, _CONTEXT, turns, strict)
        return found

    def prompt_tokens(self, turns: int, num_rows: int, num_prompts: int, strict: bool = False) -> int:
        """Returns how many tokens of prompts a step may compute while num_rows sequences decode. The result is at least the
        smallest chunk, as far as the limit of the step's tokens allows. num_prompts: prompts that have begun or wait. turns: how
        many turns (time slices of the device) the step may take; 0: any time. strict: True: the step is to end within its turns.
        False: if even the cheapest step with a chunk of a prompt is longer, the step may take as long as that one (at most two
        turns)."""
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
