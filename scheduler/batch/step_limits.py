"""How large a step may be, so that those who wait for its tokens or for the device do not wait long.

A model that has the device to itself computes prompts as fast as it can while nobody decodes. Beside decoding sequences a prompt's
chunk may stretch their step by a factor. Where several models are busy each step keeps within a turn: batch and chunk alike, and
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
    (at least a turn); 0: any. costs: told of every step by the caller."""

    turn_s: float
    stretch: float
    costs: StepCosts = field(default_factory=StepCosts)

    def max_rows(self) -> int:
        """Sequences that may decode in a step while other models wait."""
        return max(1, self.costs.tokens_within(self._turn_s()))

    def max_prompt_tokens(self, num_decoding: int, shared: bool) -> int | None:
        """Tokens of prompts beside num_decoding sequences; None: no limit. shared: other models wait."""
        if shared:
            longest_s = self._turn_s()
            num_decoding = min(num_decoding, self.max_rows())
        elif num_decoding and self.stretch > 0:
            longest_s = max(self.turn_s, self.stretch * self.costs.seconds(num_decoding))
        else:
            return None
        return max(LEAST_CHUNK_TOKENS, self.costs.tokens_within(longest_s) - num_decoding)

    def _turn_s(self) -> float:
        return max(self.turn_s, NEARLY_FREE * self.costs.least())
