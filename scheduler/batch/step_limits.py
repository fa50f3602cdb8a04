"""How large a step may be, so that those who wait for its tokens or for the device do not wait long.

A model that has the device to itself computes prompts as fast as it can while nobody decodes. Beside decoding sequences a prompt's
chunk may stretch their step by a factor, and by more the more prompts there are for each of them: who waits for a first token waits
too. Where several models are busy each step keeps within a turn: batch and chunk alike, and
what does not fit queues.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.batch.step_costs import StepCosts

# A step reads all weights whatever its size, so one that costs hardly more than the model's cheapest is let through.
NEARLY_FREE = 1.25
# Least tokens of a prompt in one step: smaller chunks would cost a multiple of the prompt's time.
LEAST_CHUNK_TOKENS = 8


@dataclass(slots=True)
class StepLimits:
    """Of one model. turn_s: a turn's device seconds. stretch: a step with a prompt's chunk may take so many times the one without
    (at least a turn); 0: any."""

    turn_s: float
    stretch: float
    decoding: StepCosts = field(default_factory=StepCosts)  # steps in which every sequence had one token
    prompting: StepCosts = field(default_factory=StepCosts)  # steps with tokens of prompts, by all their tokens

    def note(self, num_sequences: int, num_tokens: int, seconds: float) -> None:
        """A step took `seconds` of the device."""
        (self.decoding if num_tokens == num_sequences else self.prompting).note(num_tokens, seconds)

    def max_rows(self) -> int:
        """Sequences that may decode in a step while other models wait."""
        return max(1, self.decoding.tokens_within(self._turn_s()))

    def max_prompt_tokens(self, num_decoding: int, num_prompts: int, shared: bool) -> int | None:
        """Tokens of prompts beside num_decoding sequences, where num_prompts wait or are under way; None: no limit. shared: other
        models wait."""
        if shared:
            longest_s = self._turn_s()
            num_decoding = min(num_decoding, self.max_rows())
        elif num_decoding and self.stretch > 0:
            times = self.stretch * max(1.0, num_prompts / num_decoding)
            longest_s = max(self.turn_s, times * self.decoding.seconds(num_decoding))
        else:
            return None
        return max(LEAST_CHUNK_TOKENS, self.prompting.tokens_within(longest_s) - num_decoding)

    def _turn_s(self) -> float:
        return max(self.turn_s, NEARLY_FREE * self.decoding.least())
