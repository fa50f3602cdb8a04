"""Drafts tokens with a model's predictor (multi-token prediction or EAGLE-3 head), after each step and from the step's hidden
states.

Shapes: R rows of the step, T its tokens, N sampling rows, W width."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.contracts.steps import Proposed
from engine.cpu.batch import HostBatch
from engine.cpu.sliced import slices
from engine.models.registry import CausalLM
from engine.ops.ops import SamplingOps
from engine.sampling.proposing import following_tokens, sampled_sequences
from engine.sampling.sampler import SamplingRows, plain_rows, sample_tokens
from scheduler.batch.plan import BatchPlan, IntArray, LongArray, SequenceTable


class CpuPredicting:
    """Drafts tokens with a model's predictor, which reads the hidden states of each step after the step. batch: returns the inputs
    of a plan's step. logits_rows: number of rows whose logits are computed at a time."""

    def __init__(
        self,
        ops: SamplingOps,
        model: CausalLM[HostBatch],
        batch: Callable[[BatchPlan, SequenceTable], HostBatch],
        logits_rows: int,
    ) -> None:
        self._ops, self._model, self._batch, self._logits_rows = ops, model, batch, logits_rows

    def after(
        self, plan: BatchPlan, table: SequenceTable, kept: Sequence[Tensor], ids: IntArray, max_tokens: int | None = None
    ) -> Proposed:
        """Runs the predictor on the hidden states of a step, and returns its drafts: for each sequence that sampled, as many tokens
        as plan.to_propose says. Stores the predictor's keys and values of all tokens of the step, and of all drafted tokens but the
        last.
        kept [>= T, W] each: the hidden states that the step kept for the predictor.
        ids [N]: the tokens that the step sampled.
        max_tokens: the most tokens that the predictor reads at once; a longer step is cut into slices. None: there is no limit.

        Drafts are sampled with the same random noise that the model will use at their positions, so that the model will sample the
        same tokens wherever the predictor's distribution is close to its own."""
        assert plan.to_propose is not None
        began_s = time.perf_counter()
        last = np.cumsum(plan.num_new, dtype=np.int64) - 1  # each row's last token in the step
        follow = following_tokens(plan, table).astype(np.int64)
        follow[last[plan.samples]] = ids
        sliced = max_tokens is not None and len(follow) > max_tokens
        own: list[Tensor] = []
        begin = 0
        for part in slices(plan, max_tokens) if sliced and max_tokens is not None else (plan,):
            batch, num = self._batch(part, table), int(part.num_new.sum())
            batch.input_ids[:num] = torch.from_numpy(follow[begin : begin + num])
            states = self._model.read([one[begin : begin + len(batch.input_ids)] for one in kept])
            made = self._model.predict(states, batch)
            own.append(made[torch.from_numpy(last[(last >= begin) & (last < begin + num)] - begin)])
            begin += num
        seen_s = time.perf_counter()
        rows = np.flatnonzero(plan.samples)[sampled_sequences(plan, table).newest(ids)]
        slots, counts = plan.slots[rows], plan.to_propose[rows]
        computed = (plan.num_computed + plan.num_new)[rows]
        tokens = np.zeros((len(rows), int(counts.max(initial=0))), np.int32)
        states = torch.cat(own)[torch.from_numpy(rows)]
        for number in range(tokens.shape[1]):
            going: LongArray = np.flatnonzero(counts > number).astype(np.int64)
            if number:  # the token drafted last is the next one to read
                step = _one_token(plan, slots[going], computed[going] + number - 1)
                batch = self._batch(step, table)
                batch.input_ids[: len(going)] = torch.from_numpy(tokens[going, number - 1].astype(np.int64))
                states[torch.from_numpy(going)] = self._model.predict(_padded(states, going, len(batch.input_ids)), batch)[
                    : len(going)
                ]
            tokens[going, number] = self._sampled(states, going, plain_rows(table, slots[going], computed[going] + number + 1))
        return Proposed(slots, counts, tokens, seen_s - began_s, time.perf_counter() - seen_s)

    def _sampled(self, states: Tensor, going: LongArray, rows: SamplingRows) -> IntArray:
        """Returns tokens [n], sampled from n of the predictor's hidden states: those with the indices going [n] in states [Q, W],
        where Q is the number of sequences. rows: the sampling settings of each of the n sequences."""
        ids = np.empty(len(going), np.int32)
        for first in range(0, len(going), self._logits_rows):
            part = going[first : first + self._logits_rows]
            logits = self._model.predicted_logits(states[torch.from_numpy(part)])
            ids[first : first + len(part)] = sample_tokens(self._ops, logits, rows, first)[0]
        return ids


def _one_token(plan: BatchPlan, slots: IntArray, computed: IntArray) -> BatchPlan:
    """Returns a plan of a decode step with one row for each slot: row i computes the token at position computed[i] of slot slots[i]
    and samples the next one. plan: the plan from which the model and the step's id are taken."""
    ones = np.ones(len(slots), np.int32)
    return BatchPlan(plan.step_id, plan.model, slots, computed.astype(np.int32), ones, ones.astype(np.bool_), True)


def _padded(states: Tensor, going: LongArray, num_rows: int) -> Tensor:
    """Returns the rows of states [Q, W] with the indices `going`, followed by rows of zeros, as [num_rows, W]. Q: number of
    sequences."""
    out = states.new_zeros(num_rows, states.shape[1])
    out[: len(going)] = states[torch.from_numpy(going)]
    return out
