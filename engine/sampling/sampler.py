"""Picks the token of each sampling row. The random noise is a function of the request's seed, the token's position and the token
id. So the same seed gives the same text whether the request runs alone or in any batch, and when it is submitted again after a
crash.

Shapes: N sampling rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.grammar.row_masks import RowMasks
from engine.ops.ops import SamplingOps
from engine.ops.reference_inputs import noise_keys
from engine.protocol import SamplingParams
from engine.sampling.token_mask import apply_row_masks
from loader.sizes.work_space import sampler_rows
from scheduler.batch.plan import BatchPlan, BoolArray, FloatArray, IntArray, LongArray, SequenceTable

KeyArray = npt.NDArray[np.uint32]


@dataclass(slots=True)
class LogitEdit:
    """The changes that a cpu device makes to one row's logits before it samples. It adds the bias, then applies penalties, then
    rules out the banned ids.

    params: the request's settings, with bias and penalties; None: there are neither. tokens: the row's prompt and output so far, of
    which the first num_prompt are the prompt.
    banned: ids that end the text, while the request's min_tokens are not reached; None: no ids are banned."""

    params: SamplingParams | None
    tokens: IntArray
    num_prompt: int
    banned: Tensor | None  # [number of ids] int64

    def apply(self, ops: SamplingOps, row: Tensor) -> None:
        """Makes these changes (bias, penalties, banned ids) to the logits `row` [V] float32, in place. Logits that are not finite
        stay so, because they mark a bad row."""
        params = self.params
        if params is not None:
            if params.logit_bias:
                ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
                row[ids] += torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
            presence, frequency, repetition = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
            if presence != 0.0 or frequency != 0.0 or repetition != 1.0:
                ops.penalise(row, self.tokens, self.num_prompt, presence, frequency, repetition)
        if self.banned is not None:
            before = row[self.banned]
            row[self.banned] = torch.where(torch.isfinite(before), torch.finfo(row.dtype).min, before)


@dataclass(slots=True)
class LogitEdits:
    """The E sampling rows whose logits are changed before they sample; arrays are [E].

    rows: the rows' indices among the N, ascending. slots: the rows' slots in `table`, the table of sequences. positions: the index
    in the sequence of the token about to be sampled.
    early: whether the ids that end the text (end_ids and the request's own stop ids) are still forbidden because of min_tokens.
    end_ids: the model's end ids."""

    rows: npt.NDArray[np.intp]
    slots: IntArray
    positions: IntArray
    early: BoolArray
    table: SequenceTable
    end_ids: list[int]
    vocab_size: int

    def edit(self, at: int) -> LogitEdit:
        """Returns the changes to the logits of one row: the row with index rows[at] among the N."""
        slot, params = int(self.slots[at]), self.table.params[self.slots[at]]
        assert params is None or isinstance(params, SamplingParams)
        banned = None
        if self.early[at]:
            banned = torch.from_numpy(banned_ids(self.end_ids, params, self.vocab_size))
        return LogitEdit(params, self.table.tokens[slot, : self.positions[at]], int(self.table.num_prompt[slot]), banned)


@dataclass(slots=True)
class SamplingRows:
    """The settings of the rows that sample, in the order of the plan; arrays are [N].

    all_greedy: no row needs random noise. key0, key1: keys of the noise, empty if all_greedy.
    edits: the rows whose logits are changed before they sample; None: there are none.
    num_top: number of alternatives whose log-probabilities are wanted besides the sampled token's, -1 for no log-probabilities;
    None: no row wants any."""

    all_greedy: bool
    temperature: FloatArray
    top_p: FloatArray
    top_k: IntArray
    min_p: FloatArray
    key0: KeyArray
    key1: KeyArray
    edits: LogitEdits | None
    num_top: IntArray | None
    allowed: RowMasks | None = None  # for rows with a grammar or token limits


def sampling_rows(plan: BatchPlan, table: SequenceTable, eos_token_ids: list[int], vocab_size: int) -> SamplingRows:
    """Returns the settings of the plan's sampling rows from the table of sequences, without masks (`constrain` adds these)."""
    slots = plan.slots[plan.samples]
    position = (plan.num_computed + plan.num_new)[plan.samples]  # index of the token about to be sampled
    rows = plain_rows(table, slots, position)
    early = position < table.min_tokens_until.take(slots)
    (which,) = (early | table.edits_logits.take(slots)).nonzero()
    if len(which):
        of_rows = (slots, position, early) if len(which) == len(slots) else (slots[which], position[which], early[which])
        rows.edits = LogitEdits(which, *of_rows, table, eos_token_ids, vocab_size)
    num_top: IntArray = table.num_logprobs.take(slots)
    if np.count_nonzero(num_top >= 0):
        rows.num_top = num_top
    return rows


def plain_rows(table: SequenceTable, slots: IntArray, position: IntArray) -> SamplingRows:
    """Returns the settings with which the sequences in these slots sample their tokens at these positions, without edits of logits,
    log-probabilities and masks."""
    temperature = table.temperature.take(slots)  # numpy takes less time to `take` a few items than to index with an array
    key0 = key1 = np.empty(0, np.uint32)
    all_greedy = np.count_nonzero(temperature <= 0.0) == len(temperature)
    if not all_greedy:
        key0, key1 = noise_keys(table.seed.take(slots), position)
    return SamplingRows(
        all_greedy,
        temperature,
        table.top_p.take(slots),
        table.top_k.take(slots),
        table.min_p.take(slots),
        key0,
        key1,
        None,
        None,
    )


def banned_ids(end_ids: list[int], params: SamplingParams | None, vocab_size: int) -> LongArray:
    """Returns the ids that end a request's text, ascending: the model's end ids and the request's stop ids."""
    ids = set(end_ids) | set(params.stop_token_ids if params is not None else ())
    return np.array(sorted(i for i in ids if 0 <= i < vocab_size), np.int64)


def constrain(rows: SamplingRows, allowed: RowMasks) -> None:
    """Adds masks to the settings: each row that has a mask in `allowed` may sample only the tokens that the mask allows. While
    min_tokens are not reached, the end ids of such a row are banned by its mask alone, not by an edit of its logits, unless
    `allowed.banning` is true for the row."""
    rows.allowed = allowed
    if rows.edits is not None:
        may_ban = np.ones(len(rows.temperature), np.bool_)
        may_ban[allowed.rows] = False if allowed.banning is None else allowed.banning
        rows.edits.early &= may_ban[rows.edits.rows]


def sample_tokens(ops: SamplingOps, logits: Tensor, rows: SamplingRows, first: int) -> tuple[IntArray, BoolArray]:
    """Samples the tokens of the sampling rows `first` to `first` + n - 1 from their logits [n, V]. Returns (ids [n], bad [n]); bad:
    whether the row's logits hold NaN or an infinity. Changes `logits`: applies the rows' masks in place."""
    end = first + len(logits)
    if rows.allowed is not None:
        apply_row_masks(logits, rows.allowed, first)
    ids, bad = _draw(ops, logits, rows, slice(first, end))
    if (edits := rows.edits) is None:
        return ids, bad
    edited, step = np.flatnonzero((edits.rows >= first) & (edits.rows < end)), sampler_rows(logits.shape[1])
    for begin in range(0, len(edited), step):
        which = edited[begin : begin + step]
        part = edits.rows[which]
        at = part - first
        copy = logits[torch.from_numpy(at)].float()  # float32: in half precision a small penalty would be lost
        for row, number in zip(copy, which.tolist(), strict=True):
            edits.edit(number).apply(ops, row)
        ids[at], bad[at] = _draw(ops, copy, rows, part)
    return ids, bad


def _draw(ops: SamplingOps, logits: Tensor, rows: SamplingRows, at: npt.NDArray[np.intp] | slice) -> tuple[IntArray, BoolArray]:
    """Samples the rows `at` (indices among the N) from their logits [n, V], without edits and masks. Returns (ids [n], bad [n]);
    bad: whether the row's logits hold NaN or an infinity."""
    if rows.all_greedy:
        return ops.greedy(logits)
    return ops.sample(logits, rows.temperature[at], rows.top_p[at], rows.top_k[at], rows.min_p[at], rows.key0[at], rows.key1[at])
