"""Computes a step's result from its hidden states on devices whose logits the host samples: sampled ids, bad rows,
log-probabilities.

Shapes: N sampling rows, V vocabulary, W width.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from torch import Tensor

from engine.contracts.steps import StepResult
from engine.ops.ops import SamplingOps
from engine.sampling.logprobs import LogprobCollector, OwedPrompts
from engine.sampling.sampler import SamplingRows, sample_tokens
from scheduler.batch.plan import BatchPlan, SequenceTable


def sampled_outputs(
    ops: SamplingOps,
    hidden: Tensor,
    num_sampling: int,
    rows: SamplingRows | None,
    owed: OwedPrompts | None,
    plan: BatchPlan,
    table: SequenceTable,
    logits: Callable[[Tensor], Tensor],
    logits_rows: int,
    began_s: float,
) -> StepResult:
    """Samples from a step's hidden states and returns the step's result.

    hidden [>= N, W]: first the hidden states of the N = num_sampling sampling rows; then, if `owed` is given, those of its
    `tokens`; then padding.
    rows: the settings of the sampling rows; None: no row samples. owed: the prompt tokens whose log-probabilities are wanted; None:
    there are none.
    logits: computes the logits [n, V] of hidden states [n, W]; called with at most logits_rows rows. began_s: when the step began,
    by time.perf_counter()."""
    ids, bad = np.empty(num_sampling, np.int32), np.empty(num_sampling, np.bool_)
    wanted: LogprobCollector | None = None
    if rows is not None:
        if rows.num_top is not None:
            wanted = LogprobCollector(rows.num_top, table.request_id[plan.slots[plan.samples]])
        for first in range(0, num_sampling, logits_rows):
            part = logits(hidden[first : first + logits_rows])[: num_sampling - first]
            raw = part.clone() if wanted is not None and rows.allowed is not None else part  # sample_tokens writes masks into part
            ids[first : first + len(part)], bad[first : first + len(part)] = sample_tokens(ops, part, rows, first)
            if wanted is not None:
                wanted.compute(ops, raw, first, ids, bad)
            del part, raw  # before the next part is made, because the work space has room for only one
    result = StepResult(ids, bad, time.perf_counter() - began_s)
    if wanted is not None:
        result.logprobs = wanted.result()
    if owed is not None:
        result.prompt_logprobs = owed.logprobs(ops, hidden[num_sampling:], logits, logits_rows)
        result.seconds = time.perf_counter() - began_s
    return result
