"""How large a step may be, so that those who wait for its tokens or for the device do not wait long.

A model that has the device to itself computes prompts as fast as it can while nobody decodes. Beside decoding sequences a prompt's
chunk may stretch their step by a factor, and by more the more prompts there are for each of them: who waits for a first token waits
too. Where several models are busy each step keeps within a turn: batch and chunk alike, and what does not fit queues.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.batch.plan import BatchPlan
from scheduler.batch.step_costs import StepCosts

# A step reads all weights whatever its size, so one that costs hardly more than the model's cheapest is let through.
NEARLY_FREE = 1.25


@dataclass(slots=True)
class StepLimits:
    """Of one model. turn_s: a turn's device seconds. stretch: a step with a prompt's chunk may take so many times the one without
    (at least a turn); 0: any.

    decoding: what steps cost in which every sequence had one token; their context is the positions they read. prompting: steps
    with tokens of prompts, by all their tokens; contexts: the positions that decoding rows read, those that chunks read, and the
    pairs of a chunk's token with a position."""

    turn_s: float
    stretch: float
    decoding: StepCosts = field(default_factory=lambda: StepCosts(1))
    prompting: StepCosts = field(default_factory=lambda: StepCosts(3))

    def note(self, plan: BatchPlan, seconds: float) -> None:
        """A step took `seconds` of the device."""
        num_new, num_computed = plan.num_new, plan.num_computed
        num_tokens = int(num_new.sum())
        if num_tokens == len(num_new):
            self.decoding.note(num_tokens, seconds, (float(num_computed.sum()),))
            return
        contexts = num_computed + num_new
        chunks = num_new > 1
        read = float(contexts[chunks].sum())
        pairs = float((num_new * (contexts - num_new // 2))[chunks].sum())
        self.prompting.note(num_tokens, seconds, (float(contexts.sum()) - read, read, pairs))

    def max_rows(self, most: int, context: float) -> int:
        """Of `most` sequences, each of so many positions, how many may decode in a step while other models wait."""
        return max(1, self.decoding.tokens_within(self._turn_s(), most, lambda rows: (rows * context,)))

    def longest_s(self, num_rows: int, context: float, num_prompts: int, shared: bool) -> float | None:
        """Of a step with prompts' tokens beside num_rows that decode and read `context` positions in all, where num_prompts wait or
        are under way; None: any. shared: other models wait."""
        if shared:
            return self._turn_s()
        if not num_rows or self.stretch <= 0:
            return None
        times = self.stretch * max(1.0, num_prompts / num_rows)
        return max(self.turn_s, times * self._decode_s(num_rows, context))

    def _decode_s(self, num_rows: int, context: float) -> float:
        """Of a step that only decodes. As many rows may not have been seen without a prompt yet."""
        alone = self.decoding.seconds(num_rows, (context,))
        with_prompts = self.prompting.seconds(num_rows, (context, 0.0, 0.0))
        return min(alone, with_prompts) if alone and with_prompts else alone

    def _turn_s(self) -> float:
        return max(self.turn_s, NEARLY_FREE * self.decoding.least())
