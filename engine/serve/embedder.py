"""Queues and computes the requests of one encoder. Tenants get a fair share (scheduler/fair_queue.py). A step takes as many
texts as its limit of tokens allows; while other models are busy, only as many as fit a turn (scheduler/batch/step_limits.py).

Each request is computed whole, in one step, so nothing of it is kept between steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.contracts.steps import HostedEncoder
from engine.protocol import SCORE, EmbeddingsOut, LoadModel, RequestFailed, Submit
from scheduler.batch.plan import IntArray
from scheduler.batch.step_costs import StepCosts
from scheduler.batch.step_limits import NEARLY_FREE
from scheduler.fair_queue import FairQueue

MAX_TEXTS = 4096  # most texts in one step: as many requests as the step journal can name


@dataclass(slots=True)
class Embedder:
    """A loaded encoder and the requests that wait for it. max_tokens: most tokens of one step; a step of a single text may have
    more. turn_s: length of a turn (a model's time slice) in device seconds."""

    spec: LoadModel
    hosted: HostedEncoder
    max_tokens: int
    turn_s: float
    waiting: dict[int, IntArray] = field(default_factory=dict)  # request id -> token ids
    _second_at: dict[int, int] = field(default_factory=dict)  # request id -> Submit.second_at, for waiting pairs of texts
    _queue: FairQueue = field(default_factory=FairQueue)
    _costs: StepCosts = field(default_factory=StepCosts)

    def submit(self, message: Submit) -> str:
        """Queues a request for vectors or scores. Returns why it is refused, or "" if it is queued."""
        limit, vocab_size = self.spec.max_model_len, self.hosted.vocab_size
        if message.task != self.hosted.task:
            return f"model {self.spec.model} does not do task {message.task}"
        if not message.prompt:
            return "the text has no tokens"
        if len(message.prompt) > limit:
            return f"{len(message.prompt)} tokens are more than max_model_len {limit} of {self.spec.model}"
        if min(message.prompt) < 0 or max(message.prompt) >= vocab_size:
            return f"token ids must be from 0 to below vocab_size {vocab_size} of {self.spec.model}"
        if not 0 <= message.second_at <= len(message.prompt):
            return f"second_at {message.second_at} is not within the pair's {len(message.prompt)} tokens"
        self.waiting[message.request_id] = np.array(message.prompt, np.int32)
        if message.second_at:
            self._second_at[message.request_id] = message.second_at
        weight = message.tenant_weight if message.tenant_weight > 0 else 1.0
        self._queue.add(message.request_id, len(message.prompt), message.tenant, weight, message.priority)
        return ""

    def next_texts(self, others_busy: bool) -> list[int]:
        """Takes the next step's requests out of the queue and returns their ids, for `step`. others_busy: whether other models on
        the device have steps to run. Then the step takes no longer than a turn (a model's time slice), unless its first text alone
        takes longer."""
        chosen: list[int] = []
        room = 0
        while len(chosen) < MAX_TEXTS and (request_id := self._queue.first()) is not None:
            num_tokens = len(self.waiting[request_id])
            if not chosen:
                room = self._tokens_of_turn(num_tokens) if others_busy else self.max_tokens
            elif num_tokens > room:
                break
            self._queue.take(request_id)
            chosen.append(request_id)
            room -= num_tokens
        return chosen

    def _tokens_of_turn(self, first: int) -> int:
        """Returns how many tokens a step may have; 0 if no step has run yet. The step may take as long as a turn (a model's time
        slice) or, if that is longer, 1.25 times as long as the cheapest measured step (NEARLY_FREE). If even the cheapest measured
        step takes longer than a turn, and the first text is shorter than all measured steps, the result is the number of tokens of
        the smallest measured step times the turn's length over the cheapest step's time. first: number of tokens of the step's
        first text."""
        costs = self._costs
        fewest, least_s = costs.fewest_tokens, costs.least()
        if least_s > self.turn_s and costs.filled(first) < fewest:  # whether fewer tokens take less time has not been measured yet
            return int(fewest * self.turn_s / least_s)
        return costs.tokens_within(max(self.turn_s, NEARLY_FREE * least_s), self.max_tokens, one_more=True)

    def expected_s(self, request_ids: list[int]) -> float:
        """Returns the usual device seconds of a step that computes these waiting requests; 0.0 if too few steps of about as many
        tokens have run."""
        return self._costs.firm_seconds(self._num_tokens(request_ids))

    def forget_costs(self) -> None:
        """Drops the costs of steps that were learned from earlier steps. Called when other kernels are put into use, which change
        how long steps take."""
        self._costs = StepCosts()

    def _num_tokens(self, request_ids: list[int]) -> int:
        return sum(len(self.waiting[request_id]) for request_id in request_ids)

    def step(self, request_ids: list[int], step_id: int) -> tuple[EmbeddingsOut, list[RequestFailed]]:
        """Computes requests that next_texts has returned. Returns the message with the vectors or scores, and the failures:
        requests whose result is not finite. Each request is in one of the two."""
        num_tokens = self._num_tokens(request_ids)
        second_at = [self._second_at.pop(request_id, 0) for request_id in request_ids]
        vectors, seconds = self.hosted.embed([self.waiting.pop(request_id) for request_id in request_ids], second_at)
        self._costs.note(num_tokens, seconds)
        out = EmbeddingsOut(self.spec.model, step_id, seconds, [], [])
        failed: list[RequestFailed] = []
        what = "score" if self.hosted.task == SCORE else "vector"
        for request_id, vector in zip(request_ids, vectors, strict=True):
            if np.isfinite(vector).all():
                out.request_ids.append(request_id)
                out.values.append(vector.astype("<f4").tobytes())
            else:
                failed.append(RequestFailed(request_id, "nan_logits", f"model {self.spec.model}: the {what} is not finite"))
        return out, failed

    def abort(self, request_id: int) -> None:
        self._second_at.pop(request_id, None)
        if self.waiting.pop(request_id, None) is not None:
            self._queue.withdraw(request_id)
