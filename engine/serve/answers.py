"""Makes the message that reports a step's results to the daemon: tokens, or the vectors of texts whose last chunk the step
computed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import accumulate

from engine.contracts.steps import StepResult
from engine.protocol import EmbeddingsOut, TokenLogprobs, TokensOut
from engine.serve.served_models import ServedModel
from scheduler.batch.plan import BatchPlan, LongArray, StepOutcome


def answer(
    served: ServedModel, plan: BatchPlan, result: StepResult, outcome: StepOutcome, asked: LongArray
) -> TokensOut | EmbeddingsOut:
    """Returns the message to the daemon about a step: TokensOut, or EmbeddingsOut if the model embeds texts.
    outcome: the step's results as the scheduler has processed them: for each request its tokens, and whether it has ended.
    asked [N]: the request ids of the plan's N sampling rows, including requests that have ended since the plan; `outcome` does not
    have these. Read only if the model embeds texts."""
    name = served.spec.model
    steps, seconds = served.take_steps()
    if result.vectors is not None:
        vectors = dict(zip(asked.tolist(), result.vectors.astype("<f4"), strict=True))
        values = [vectors[request_id].tobytes() for request_id in outcome.request_ids]
        return EmbeddingsOut(name, plan.step_id, seconds, outcome.request_ids, values, steps)
    logprobs = result.logprobs
    if logprobs is not None and outcome.counts:  # rows after a wrong draft have log-probabilities, too
        logprobs = of_first_tokens(logprobs, dict(zip(outcome.request_ids, outcome.counts, strict=True)))
    now = time.monotonic() if outcome.began_s else 0.0
    return TokensOut(
        name,
        plan.step_id,
        seconds,
        outcome.request_ids,
        outcome.ids,
        outcome.counts,
        outcome.finish,
        cached=outcome.cached,
        resumed=outcome.resumed,
        logprobs=logprobs,
        steps=steps,
        drafted=outcome.drafted,
        prompt_s={request_id: now - began_s for request_id, began_s in outcome.began_s.items()},
    )


def of_first_tokens(told: TokenLogprobs, counts: Mapping[int, int]) -> TokenLogprobs | None:
    """Returns a step's log-probabilities without those of tokens that do not count: of each request, only the first
    counts[request_id] tokens count; later ones follow a rejected draft. Returns None if no token counts. told: the
    log-probabilities of all tokens of the step."""
    left, ends = dict(counts), list(accumulate(told.counts))
    kept = []
    for at, request_id in enumerate(told.request_ids):
        if (num := left.get(request_id, 0)) > 0:
            left[request_id] = num - 1
            kept.append(at)
    if not kept:
        return None
    parts = [slice(ends[at] - told.counts[at], ends[at]) for at in kept]
    return TokenLogprobs(
        request_ids=[told.request_ids[at] for at in kept],
        chosen=[told.chosen[at] for at in kept],
        counts=[told.counts[at] for at in kept],
        top_ids=[token_id for part in parts for token_id in told.top_ids[part]],
        top=[value for part in parts for value in told.top[part]],
    )
