"""Computes log-probabilities of sampled tokens and of prompt tokens, for rows whose request asks for them. They are the log-softmax
of the model's own logits, before bias, penalties, temperature and cuts such as top_p.

Shapes: N sampling rows (those after which a token is sampled), T tokens of a step, V vocabulary, K alternatives (the most likely
tokens).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from engine.ops.ops import LogprobOps
from engine.protocol import PromptLogprobs, SamplingParams, TokenLogprobs
from scheduler.batch.plan import BatchPlan, BoolArray, FloatArray, IntArray, LongArray, SequenceTable

DECIMALS = 6  # decimals to which a log-probability is rounded before it leaves the engine


class LogprobCollector:
    """Collects the log-probabilities of the tokens that one step samples. num_top [N]: how many alternatives each row wants besides
    the sampled token; -1: no log-probabilities. request_ids [N]: the rows' requests."""

    def __init__(self, num_top: IntArray, request_ids: LongArray) -> None:
        self._num_top, self._request_ids = num_top, request_ids
        # For each added part: its rows, the log-probabilities of their tokens, the number of alternatives of each, and all these.
        self._added: list[tuple[IntArray, FloatArray, IntArray, IntArray, FloatArray]] = []

    def compute(self, ops: LogprobOps, logits: Tensor, first: int, ids: IntArray, bad: BoolArray) -> None:
        """Computes and adds the log-probabilities of the rows that want them, except rows with bad logits. logits [n, V]: the
        logits of the sampling rows from `first` on. ids, bad [N]: for all sampling rows of the step, the sampled token, and whether
        the logits were not finite."""
        end = first + len(logits)
        num_top = self._num_top[first:end]
        rows = np.flatnonzero((num_top >= 0) & ~bad[first:end]).astype(np.int32)
        if len(rows):
            self.add(rows + np.int32(first), *ops.top_logprobs(logits, rows, ids[first:end][rows], int(num_top[rows].max())))

    def add(self, rows: IntArray, chosen: FloatArray, top_ids: IntArray, top: FloatArray) -> None:
        """Adds the log-probabilities of M sampling rows. rows [M]: the rows' indices. chosen [M]: the log-probabilities of the
        sampled tokens. top_ids, top [M, K]: ids and log-probabilities of the most likely tokens, of which each row keeps only as
        many as it wants."""
        counts = np.minimum(self._num_top.take(rows), np.int32(top.shape[1]))
        if len(rows) and np.count_nonzero(counts == counts[0]) == len(rows):  # slices take a fraction of the time of picked items
            top_ids, top = top_ids[:, : counts[0]].reshape(-1), top[:, : counts[0]].reshape(-1)
        else:
            wanted = np.arange(top.shape[1]) < counts[:, np.newaxis]
            top_ids, top = top_ids[wanted], top[wanted]
        self._added.append((rows, chosen, counts, top_ids, top))

    def result(self) -> TokenLogprobs | None:
        """Returns the log-probabilities added so far, or None if no row has any."""
        if not self._added:
            return None
        rows, chosen, counts, top_ids, top = self._added[0]
        if len(self._added) > 1:
            rows, chosen, counts, top_ids, top = (np.concatenate([part[k] for part in self._added]) for k in range(5))
        if not len(rows):
            return None
        return TokenLogprobs(
            request_ids=self._request_ids.take(rows).tolist(),
            chosen=_rounded(chosen).tolist(),
            counts=counts.tolist(),
            top_ids=top_ids.tolist(),
            top=_rounded(top).tolist(),
        )


@dataclass(slots=True)
class OwedRow:
    """Prompt tokens of one request whose log-probabilities a step can compute: `count` tokens, from index `first` of the prompt on.
    num_top: number of alternatives wanted for each token. ranked: whether the tokens' ranks are wanted, too."""

    request_id: int
    first: int
    count: int
    num_top: int
    ranked: bool


@dataclass(slots=True)
class OwedPrompts:
    """The P prompt tokens, of all requests of a step, whose log-probabilities are wanted and can be computed in the step.

    rows: for each request, which and how many of the P tokens are its own. chosen [P]: the tokens' ids.
    tokens [P]: for each of these prompt tokens, the index among the step's T tokens of the token before it, whose logits predict
    it."""

    rows: list[OwedRow]
    tokens: LongArray
    chosen: IntArray

    def logprobs(
        self, ops: LogprobOps, hidden: Tensor, logits_of: Callable[[Tensor], Tensor], max_rows: int
    ) -> list[PromptLogprobs]:
        """Computes the log-probabilities. Returns one PromptLogprobs for each request of `rows`, in order. hidden [>= P, W]: the
        hidden states of `tokens`, then padding, which is ignored. logits_of: computes the logits [n, V] of hidden states [n, W].
        max_rows: the most rows whose logits are computed at a time, because the work space has memory for no more."""
        num_top = max(row.num_top for row in self.rows)
        ranked = any(row.ranked for row in self.rows)
        parts: list[tuple[Any, Any, Any, Any]] = []
        for at in range(0, len(self.tokens), max_rows):
            chosen = self.chosen[at : at + max_rows]
            logits = logits_of(hidden[at : at + max_rows])
            told = ops.top_logprobs(logits, np.arange(len(chosen), dtype=np.int32), chosen, num_top)
            parts.append((*told, ops.ranks(logits[: len(chosen)], chosen) if ranked else chosen))
            del logits
        picked, top_ids, top, ranks = (np.concatenate([part[k] for part in parts]) for k in range(4))
        messages, at = [], 0
        for row in self.rows:
            own = slice(at, at + row.count)
            k = min(row.num_top, top.shape[1])
            at += row.count
            messages.append(
                PromptLogprobs(
                    request_id=row.request_id,
                    first=row.first,
                    num_top=k,
                    chosen=_rounded(picked[own]).tolist(),
                    top_ids=top_ids[own, :k].reshape(-1).tolist(),
                    top=_rounded(top[own, :k]).reshape(-1).tolist(),
                    ranks=ranks[own].tolist() if row.ranked else [],
                )
            )
        return messages


def owed_prompt_rows(plan: BatchPlan, table: SequenceTable) -> OwedPrompts | None:
    """Returns the prompt tokens whose log-probabilities are wanted and can be computed in this step; None: there are none."""
    owing = table.prompt_logprobs.take(plan.slots)
    if not np.count_nonzero(owing):
        return None
    starts = np.cumsum(plan.num_new) - plan.num_new
    rows: list[OwedRow] = []
    tokens, chosen = [], []
    for row in np.flatnonzero(owing).tolist():
        slot, computed = int(plan.slots[row]), int(plan.num_computed[row])
        count = min(int(plan.num_new[row]), int(table.num_prompt[slot]) - 1 - computed)
        if count > 0:
            num_top = max(0, int(table.num_prompt_logprobs[slot]))
            params = table.params[slot]
            ranked = isinstance(params, SamplingParams) and params.prompt_ranks
            rows.append(OwedRow(int(table.request_id[slot]), computed + 1, count, num_top, ranked))
            tokens.append(np.arange(starts[row], starts[row] + count, dtype=np.int64))
            chosen.append(table.tokens[slot, computed + 1 : computed + 1 + count])
    if not rows:
        return None
    return OwedPrompts(rows, np.concatenate(tokens), np.concatenate(chosen))


def _rounded(values: FloatArray) -> Any:
    """Returns the values as float64, rounded to DECIMALS decimal places, so that they print with no more digits."""
    return values.astype(np.float64).round(DECIMALS)
