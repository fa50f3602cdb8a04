"""Limits the size of a step, so that neither its sequences nor the other models on the device wait long for its end.

While a model is alone on the device, a chunk of a prompt may make the step of its decoding sequences longer by a factor. The factor
grows with the number of prompts per decoding sequence, because requests that wait for a first token matter as well. If no sequence
decodes, prompts are computed at full speed. With several tenants, the factor applies to each tenant's own sequences and prompts.
The work of other tenants may make a step longer than a tenant's sequences alone would take: by the same factor, or until these
sequences take only the tenant's share of the step, whichever is longer.

While several models are busy, each step keeps within a turn: a time slice of the device, of a fixed length, which limits both the
decoding sequences and the chunks of prompts. All other work stays queued. If several models have more work than fits a turn, they
pool their turns: one of them uses all pooled turns in a single step, and the next time another model does. The models wait no
longer than before and keep their shares of the device, but a larger step computes more, since it reads the weights once for all its
rows.

The steps of a split model also wait for its other devices, which run steps of other models. These waits vary, so they are not added
to the learned costs of single step sizes; their average counts as a fixed cost of each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.batch.plan import BatchPlan
from scheduler.batch.proposing_costs import ProposingCosts
from scheduler.batch.step_costs import NEWEST, StepCosts
from scheduler.batch.tenant_time import TenantLoad

# Every step reads all weights, so a step that costs hardly more than the model's cheapest is allowed.
NEARLY_FREE = 1.25
LEAST_CHUNK_TOKENS = 8  # smallest chunk of a prompt: smaller ones would multiply the time of the whole prompt
SMALL_CHUNK_TOKENS = 16  # largest step that tells the cost of a small chunk, decoding rows included
CHUNK_STEP_TOKENS = 16  # steps with chunks are computed in whole tiles of this many tokens
PATIENT_STEPS = 32  # after so many steps the head of the queue no longer waits for a stream to end (most_running)
MOST_TURNS = 4  # most turns that one step may pool: its own streams wait for their next tokens until it ends


def turns_of_step(num_busy: int, num_backlogged: int, backlogged: bool) -> int:
    """Returns how many turns (time slices of the device) a model's next step may take; 0: unlimited, because no other model is
    busy. A model with more work than fits a turn may use, in one step, as many turns as there are such models, at most MOST_TURNS.
    Any other model may use one.

    num_busy: busy models, this one included. num_backlogged: busy models with more work than fits a turn. backlogged: whether this
    model is one of them."""
    if num_busy <= 1:
        return 0
    return min(max(1, num_backlogged), MOST_TURNS) if backlogged else 1


def most_running(max_rows: int, passed_over: int) -> int:
    """Returns the number of running sequences from which on no further request is admitted: max_rows, the number of sequences that
    fit one step, or a multiple of it. passed_over: for how many steps the first waiting request has waited while at least max_rows
    sequences ran.

    After every PATIENT_STEPS of these steps, max_rows more sequences may run; the running sequences then alternate in steps.
    Otherwise a request could wait for minutes until a long stream ends."""
    return max_rows * (1 + passed_over // PATIENT_STEPS)


@dataclass(slots=True)
class StepLimits:
    """The limits of one model's steps, from the step costs that it learns.

    turn_s: length of a turn (a time slice of the device) in device seconds. stretch: the factor by which a prompt's chunk may
    lengthen a step that also decodes while no other model waits; 0: unlimited. A step may always take one turn. wait_s: average
    time that the latest steps waited for other devices, which is not included in any of the costs.

    decoding: costs of steps in which every sequence has one token; their context (StepCosts) is the number of positions read.
    prompting: costs of steps with prompt tokens, by all their tokens; their contexts are the positions that decoding rows read, the
    positions that chunks read, and the pairs of a chunk's token with a position. proposing: the time that a model's predictor takes
    after a step."""

    turn_s: float
    stretch: float
    decoding: StepCosts = field(default_factory=lambda: StepCosts(1))
    prompting: StepCosts = field(default_factory=lambda: StepCosts(3, CHUNK_STEP_TOKENS))
    proposing: ProposingCosts = field(default_factory=ProposingCosts)
    wait_s: float = 0.0
    _told: tuple[BatchPlan, StepCosts, int, tuple[float, ...]] | None = None  # what _kind has told of the last plan

    def note(self, plan: BatchPlan, seconds: float) -> None:
        """Updates the learned costs of steps (`decoding` if every sequence had one token, else `prompting`) with the measured time
        of one step. plan: what the step computed. seconds: its device time without waits for other devices."""
        costs, num_tokens, contexts = self._kind(plan)
        costs.note(num_tokens, seconds, contexts)

    def note_wait(self, seconds: float) -> None:
        """Updates the average wait for other devices with that of one step. seconds: how long the step waited."""
        self.wait_s += NEWEST * (seconds - self.wait_s)

    def forget(self) -> None:
        """Drops all learned costs of steps and of the predictor, because their times have changed."""
        self.decoding, self.prompting, self._told = StepCosts(1), StepCosts(3, CHUNK_STEP_TOKENS), None
        self.forget_predictor()

    def forget_predictor(self) -> None:
        """Drops the learned costs of the model's predictor, so that they are measured anew."""
        self.proposing = ProposingCosts()

    def expected_s(self, plan: BatchPlan) -> float:
        """Returns the usual seconds of a step with as many tokens as the plan has, which attend to as many positions; 0.0 if too
        few steps of its size have run."""
        costs, num_tokens, contexts = self._kind(plan)
        seconds = costs.firm_seconds(num_tokens, contexts)
        return seconds + self.wait_s if seconds else 0.0

    def _kind(self, plan: BatchPlan) -> tuple[StepCosts, int, tuple[float, ...]]:
        """Returns the costs that apply to this plan (`decoding` or `prompting`), its number of tokens and its contexts (the numbers
        that say how much the tokens attend to, StepCosts). The result for the latest plan is cached, because it is needed before
        the plan's step and again after it."""
        if self._told is None or self._told[0] is not plan:
            self._told = plan, *self._kind_of(plan)
        return self._told[1:]

    def _kind_of(self, plan: BatchPlan) -> tuple[StepCosts, int, tuple[float, ...]]:
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
        """Returns how many of `most` sequences may decode in a step while other models wait. The result is never below 1, even if a
        step with one sequence takes too long. context: average number of positions a row attends to. turns: how many turns (time
        slices of the device) the step may take."""
        fewest = self.decoding.fewest_tokens
        if fewest > 1 and self.decoding.least() > self.turn_s:  # whether fewer rows take less time has not been measured yet
            return min(most, fewest // 2)
        return max(1, self.decoding.tokens_within(self._computing_s(turns), most, lambda rows: (rows * context,), one_more=True))

    def rows_beside_prompt(self, most: int, context: float, turns: int, strict: bool = False) -> int:
        """Returns how many of `most` sequences may decode in a step that also has room for the smallest chunk of a prompt. The
        result is never below 1, even if a step with one sequence takes too long. It is `most` while no step with a chunk of a
        prompt has been measured.

        context: average number of positions a row attends to. The chunk is assumed to be the beginning of a prompt, which attends
        to the fewest positions. turns: how many turns (time slices of the device) the step may take; 0: no limit. strict: True: the
        step may take `turns` turns. False: it may take max(`turns` turns, min(c, 2 turns)), where c is the time of the cheapest
        step with a chunk of a prompt, plus a small margin; c is 0 if no small step of this kind has been measured."""
        if not turns or not self.prompting.fewest_tokens:
            return most
        chunk, longest_s = LEAST_CHUNK_TOKENS, self._longest_turns_s(turns, strict)
        contexts = (float(chunk), chunk * chunk / 2)
        within = self.prompting.tokens_within(longest_s, most + chunk, lambda tokens: ((tokens - chunk) * context, *contexts))
        return min(most, max(1, within - chunk))

    def rows_beside(self, loads: Sequence[TenantLoad], most: int, context: float) -> int:
        """Returns the most rows of a step in which sequences of several tenants decode while no other model waits. The step must
        not take longer than `longest_s` allows for each of these tenants; if a tenant has prompts, a part of that time is left for
        a chunk of a prompt. loads: one entry for each tenant. most: upper limit of the result. context: average number of positions
        a row attends to."""
        longest_s = self.longest_s(loads, context, 0)
        if longest_s is None:
            return most
        fewest = min(load.num_rows for load in loads if load.num_rows)
        if fewest < self.decoding.fewest_tokens // 2:
            return min(most, fewest)  # running this many rows measures what they cost without a prompt
        if any(load.num_prompts for load in loads):
            longest_s = max(self.turn_s, longest_s / self.stretch)
        return max(1, self.decoding.tokens_within(longest_s, most, lambda rows: (rows * context,)))

    def worth_drafting(self, num_rows: int, context: float, worths: Sequence[float], turns: int) -> int:
        """Returns the number of drafted tokens with which a step of num_rows decoding sequences gives the most tokens a second; 0
        while the cost of such a step is not known. The tokens are added in the order of `worths`.

        context: average number of positions a row attends to. worths: for each drafted token the chance that it is what the model
        samples, in descending order. turns: how many turns (time slices of the device) the step may take; 0: no other model
        waits."""
        plain_s = self.decoding.hoped(num_rows, (num_rows * context,))
        if plain_s <= 0.0:
            return 0
        longest_s = self._computing_s(turns) if turns else float("inf")
        best, best_rate, expected = 0, num_rows / plain_s, float(num_rows)
        for number, worth in enumerate(worths, 1):
            expected += worth
            rows = num_rows + number
            if number < len(worths) and rows < self.decoding.filled(rows):
                continue  # one more row costs no more
            step_s = self.decoding.hoped(rows, (rows * context,))
            if step_s > longest_s:
                break
            if expected > best_rate * step_s:
                best, best_rate = number, expected / step_s
        return best

    def worth_proposing(
        self, num_rows: int, num_drafting: int, spare: int, context: float, chance: float, most: int, turns: int
    ) -> int:
        """Returns how many tokens, at most `most`, a predictor is to draft for each sequence that uses drafts, so that all
        sequences together get the most tokens a second. The result is 0 if drafting is not worth its cost, and at most 1 while the
        costs of steps are not known.

        num_rows: decoding sequences. num_drafting: those of them that use drafts. spare: rows that the next step has for drafted
        tokens, which limit how many are verified. context: average number of positions a row attends to. chance: that a drafted
        token is what the model samples, if those drafted before it are. turns: how many turns (time slices of the device) the step
        may take; 0: no other model waits."""
        plain_s = self.decoding.hoped(num_rows, (num_rows * context,))
        if plain_s <= 0.0:
            return min(1, most, spare)
        longest_s = self._computing_s(turns) if turns else float("inf")
        best, best_rate, expected = 0, num_rows / plain_s, float(num_rows)
        for number in range(1, most + 1):
            verified = min(num_drafting, spare - num_drafting * (number - 1))
            if verified <= 0:
                break
            rows = num_rows + min(num_drafting * number, spare)
            expected += verified * chance**number
            step_s = self.decoding.hoped(rows, (rows * context,)) + self.proposing.seconds(num_rows, number)
            if step_s > longest_s:
                break
            if expected > best_rate * step_s:
                best, best_rate = number, expected / step_s
        return best

    def predictor_share(self, num_rows: int, context: float) -> float:
        """Returns the predictor's time to process a step of num_rows decoding sequences, before it drafts anything, as a share of
        the step's time; 0.0 if that is not known. context: average number of positions a row attends to."""
        step_s = self.decoding.hoped(num_rows, (num_rows * context,))
        return self.proposing.seconds(num_rows, 0) / step_s if step_s > 0.0 else 0.0

    def predictor_is_too_slow(self, num_rows: int, context: float, most: int) -> bool:
        """Returns whether the predictor needs at least as long to draft `most` tokens for each of num_rows sequences as the model
        needs for `most` steps in which these sequences decode; False while that is not known. context: average number of positions
        a row attends to."""
        step_s = self.decoding.hoped(num_rows, (num_rows * context,))
        return self.proposing.knows(num_rows) and 0.0 < most * step_s <= self.proposing.seconds(num_rows, most)

    def turns_s(self, turns: int) -> float:
        """Returns the longest time, in seconds, of a step that uses `turns` turns (time slices of the device), including its wait
        for other devices. If even the model's cheapest step is longer than a turn, its time and a small margin replace the length
        of a turn."""
        return max(turns * self.turn_s, (turns - 1 + NEARLY_FREE) * (self.wait_s + self.decoding.least()))

    def longest_s(self, loads: Sequence[TenantLoad], context: float, turns: int, strict: bool = False) -> float | None:
        """Returns the longest time, in seconds and without its wait for other devices, of a step with prompt tokens in which each
        decoding row reads `context` positions; None: unlimited.

        loads: what each tenant wants computed. turns: how many turns (time slices of the device) the step may take; 0: no other
        model waits. strict: True: the step must end within its turns. False: it may also take as long as the cheapest step with a
        chunk of a prompt, up to two turns, if that is longer."""
        if turns:
            return self._longest_turns_s(turns, strict)
        decoding = [load for load in loads if load.num_rows]
        if not decoding or self.stretch <= 0:
            return None
        stretched_s = min(self._longest_s(load, context) for load in decoding)
        if len(loads) > 1:  # a tenant's prompt must not stretch another tenant's step
            return max(self.turn_s, stretched_s)
        return max(self.turn_s, stretched_s, self._little_more_s(loads[0].num_rows, context))

    def _little_more_s(self, num_rows: int, context: float) -> float:
        """Returns the seconds of a step with the smallest chunk of a prompt and num_rows decoding rows, with a small margin; 0.0 if
        they are not known. context: number of positions that each row reads.

        While one tenant has the device alone, a step may take this long even if the chunk makes it longer than the factor `stretch`
        allows. Smaller chunks would be many, and would delay the decoding rows more in sum."""
        tokens = num_rows + LEAST_CHUNK_TOKENS
        if not 0 < self.prompting.fewest_tokens <= tokens + LEAST_CHUNK_TOKENS:
            return 0.0
        return NEARLY_FREE * self.prompting.seconds(tokens, (num_rows * context, LEAST_CHUNK_TOKENS, LEAST_CHUNK_TOKENS**2 / 2))

    def _computing_s(self, turns: int) -> float:
        """Returns the longest time, in seconds and without its wait for other devices, of a step that may take `turns` turns (time
        slices of the device)."""
        return self.turns_s(turns) - self.wait_s

    def _longest_turns_s(self, turns: int, strict: bool) -> float:
        return self._computing_s(turns) if strict else max(self._computing_s(turns), self._chunk_s())

    def _longest_s(self, load: TenantLoad, context: float) -> float:
        times = max(self.stretch * max(1.0, load.num_prompts / load.num_rows), 1 / load.share)
        return times * self._decode_s(load.num_rows, load.num_rows * context)

    def _decode_s(self, num_rows: int, context: float) -> float:
        """Returns the seconds of a step in which num_rows rows decode. context: number of positions that all rows together read.
        The result is the smaller of two known costs: that of a step that only decodes, and that of a step with prompts and the same
        number of tokens. The first one may be a poor estimate if the rows have run only beside prompts so far."""
        alone = self.decoding.seconds(num_rows, (context,))
        with_prompts = self.prompting.seconds(num_rows, (context, 0.0, 0.0))
        return min(alone, with_prompts) if alone and with_prompts else alone

    def _chunk_s(self) -> float:
        """Returns the seconds that a step with a chunk of a prompt may take even if they exceed its turns (time slices of the
        device): those of the smallest chunk with a small margin, at most two turns; 0.0 if unknown. Smaller chunks are not worth
        planning: every chunk has a fixed cost, so many of them would delay the other models more in sum."""
        if not 0 < self.prompting.fewest_tokens <= SMALL_CHUNK_TOKENS:
            return 0.0
        return min(NEARLY_FREE * (self.wait_s + self.prompting.least()), 2 * self.turns_s(1)) - self.wait_s
