"""How large a step may be, so that those who wait for its tokens or for the device do not wait long.

A model that has the device to itself computes prompts as fast as it can while nobody decodes. Beside decoding sequences a prompt's
chunk may stretch their step by a factor, and by more the more prompts there are for each of them: who waits for a first token waits
too. Of several tenants each has that for its own sequences and prompts: what others add may stretch the step its sequences would
have alone by the same factor, or to what its share of the device leaves it.

Where several models are busy each step keeps within a turn, batch and chunk alike, and what does not fit queues. Where several of
them have more to do than fits, they pool their turns: instead of a turn each between two steps of a neighbour, one of them takes
all those turns in one step, and the next time it is another's. A neighbour waits as long as before, each has as much of the device
as before, and in so much larger steps it computes more: weights are read once for all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.batch.plan import BatchPlan
from scheduler.batch.step_costs import StepCosts
from scheduler.batch.tenant_time import TenantLoad

# A step reads all weights whatever its size, so one that costs hardly more than the model's cheapest is let through.
NEARLY_FREE = 1.25
LEAST_CHUNK_TOKENS = 8  # of a prompt in one step: smaller chunks would cost a multiple of the prompt's time
SMALL_CHUNK_TOKENS = 16  # with the rows beside it
CHUNK_STEP_TOKENS = 16  # steps with chunks are computed in whole tiles of so many tokens: those in between cost as much
MOST_TURNS = 4  # pooled in one step: its own streams have their next tokens no sooner


def turns_of_step(num_busy: int, num_backlogged: int, backlogged: bool) -> int:
    """How many turns a model's next step may take; 0: as long as it likes, for no other model is busy. num_backlogged: of the busy
    models; backlogged: whether this one is."""
    if num_busy <= 1:
        return 0
    return min(max(1, num_backlogged), MOST_TURNS) if backlogged else 1


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
    prompting: StepCosts = field(default_factory=lambda: StepCosts(3, CHUNK_STEP_TOKENS))

    def note(self, plan: BatchPlan, seconds: float) -> None:
        """A step took `seconds` of the device."""
        costs, num_tokens, contexts = self._kind(plan)
        costs.note(num_tokens, seconds, contexts)

    def forget(self) -> None:
        """Steps will cost something else from here on."""
        self.decoding, self.prompting = StepCosts(1), StepCosts(3, CHUNK_STEP_TOKENS)

    def expected_s(self, plan: BatchPlan) -> float:
        """What such a step usually takes; 0.0 where too few of its size were seen."""
        costs, num_tokens, contexts = self._kind(plan)
        return costs.firm_seconds(num_tokens, contexts)

    def _kind(self, plan: BatchPlan) -> tuple[StepCosts, int, tuple[float, ...]]:
        """What knows the costs of such steps, its tokens and its contexts."""
        num_new, num_computed = plan.num_new, plan.num_computed
        num_tokens = len(num_new) if plan.all_decode else int(num_new.sum())
        if num_tokens == len(num_new):
            return self.decoding, num_tokens, (float(num_computed.sum()),)
        contexts = num_computed + num_new
        chunks = num_new > 1
        read = float(contexts[chunks].sum())
        pairs = float((num_new * (contexts - num_new // 2))[chunks].sum())
        return self.prompting, num_tokens, (float(contexts.sum()) - read, read, pairs)

    def max_rows(self, most: int, context: float, turns: int = 1) -> int:
        """Of `most` sequences, each of so many positions, how many may decode in a step of so many turns while others wait."""
        fewest = self.decoding.fewest_tokens
        if fewest > 1 and self.decoding.least() > self.turn_s:  # whether fewer take less is not known yet
            return min(most, fewest // 2)
        return max(1, self.decoding.tokens_within(self.turns_s(turns), most, lambda rows: (rows * context,), one_more=True))

    def rows_beside_prompt(self, most: int, context: float, turns: int, strict: bool = False) -> int:
        """As max_rows, of a step that a prompt has a part of: its smallest chunk finds room, too. Nothing is known of the prompt:
        it counts as one that begins. turns: StepRoom has its meaning; 0: any. strict: as in longest_s."""
        if not turns or not self.prompting.fewest_tokens:
            return most
        chunk, longest_s = LEAST_CHUNK_TOKENS, self._longest_turns_s(turns, strict)
        contexts = (float(chunk), chunk * chunk / 2)
        within = self.prompting.tokens_within(longest_s, most + chunk, lambda tokens: ((tokens - chunk) * context, *contexts))
        return min(most, max(1, within - chunk))

    def rows_beside(self, loads: Sequence[TenantLoad], most: int, context: float) -> int:
        """As max_rows, where several tenants' sequences want to decode and no other model waits. Prompts have their part of the
        step, too."""
        longest_s = self.longest_s(loads, context, 0)
        if longest_s is None:
            return most
        fewest = min(load.num_rows for load in loads if load.num_rows)
        if fewest < self.decoding.fewest_tokens // 2:
            return min(most, fewest)  # what its rows cost alone is learned by running as many
        if any(load.num_prompts for load in loads):
            longest_s = max(self.turn_s, longest_s / self.stretch)
        return max(1, self.decoding.tokens_within(longest_s, most, lambda rows: (rows * context,)))

    def turns_s(self, turns: int) -> float:
        """Of a step that takes so many turns; where a model's steps are longer than that, of as many of its cheapest, and a little
        more."""
        return max(turns * self.turn_s, (turns - 1 + NEARLY_FREE) * self.decoding.least())

    def longest_s(self, loads: Sequence[TenantLoad], context: float, turns: int, strict: bool = False) -> float | None:
        """Of a step with prompts' tokens, where each row that decodes reads `context` positions; None: any. turns: StepRoom has its
        meaning. strict: no longer than those turns, whatever chunks cost."""
        if turns:
            return self._longest_turns_s(turns, strict)
        decoding = [load for load in loads if load.num_rows]
        if not decoding or self.stretch <= 0:
            return None
        stretched_s = min(self._longest_s(load, context) for load in decoding)
        if len(loads) > 1:  # nobody's own prompt may stretch another's step
            return max(self.turn_s, stretched_s)
        return max(self.turn_s, stretched_s, self._little_more_s(loads[0].num_rows, context))

    def _little_more_s(self, num_rows: int, context: float) -> float:
        """Than the smallest chunk beside so many rows costs: where that is beyond what it may stretch their step already, many such
        steps would hold them up the more often. 0.0 where it is not known."""
        tokens = num_rows + LEAST_CHUNK_TOKENS
        if not 0 < self.prompting.fewest_tokens <= tokens + LEAST_CHUNK_TOKENS:
            return 0.0
        return NEARLY_FREE * self.prompting.seconds(tokens, (num_rows * context, LEAST_CHUNK_TOKENS, LEAST_CHUNK_TOKENS**2 / 2))

    def _longest_turns_s(self, turns: int, strict: bool) -> float:
        return self.turns_s(turns) if strict else max(self.turns_s(turns), self._chunk_s())

    def _longest_s(self, load: TenantLoad, context: float) -> float:
        times = max(self.stretch * max(1.0, load.num_prompts / load.num_rows), 1 / load.share)
        return times * self._decode_s(load.num_rows, load.num_rows * context)

    def _decode_s(self, num_rows: int, context: float) -> float:
        """Of a step that only decodes. As many rows may not have been seen without a prompt yet."""
        alone = self.decoding.seconds(num_rows, (context,))
        with_prompts = self.prompting.seconds(num_rows, (context, 0.0, 0.0))
        return min(alone, with_prompts) if alone and with_prompts else alone

    def _chunk_s(self) -> float:
        """Of a step with a prompt's chunk, which costs something whatever its size: it may take a little more than the smallest, or
        the prompt would hold up others the more often. At most two turns; 0.0 where small ones are not known."""
        if not 0 < self.prompting.fewest_tokens <= SMALL_CHUNK_TOKENS:
            return 0.0
        return min(NEARLY_FREE * self.prompting.least(), 2 * self.turns_s(1))
