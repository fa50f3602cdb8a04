"""Which token each sampling row gets. Noise is a function of (the request's seed, the token's position, the token id): the same
seed gives the same text alone, in any batch, and when a request is submitted again after a crash.

Shapes: N sampling rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine import ops
from engine.contracts import BatchPlan, BoolArray, FloatArray, IntArray, SequenceTable
from engine.grammar.row_masks import RowMasks
from engine.token_mask import apply_row_masks

KeyArray = npt.NDArray[np.uint32]


@dataclass(slots=True)
class SamplingRows:
    """Settings of the rows that sample, in plan order, each [N]. masks: row -> ids that may not come yet (min_tokens)."""

    greedy: BoolArray
    all_greedy: bool
    temperature: FloatArray
    top_p: FloatArray
    top_k: IntArray
    key0: KeyArray
    key1: KeyArray
    masks: dict[int, Tensor]
    allowed: RowMasks | None = None  # of the rows that follow a grammar; what may not come early is left out of it already


def noise_keys(seed: npt.NDArray[np.uint64], position: npt.NDArray[Any]) -> tuple[KeyArray, KeyArray]:
    """Two 32-bit keys for each (seed, position): splitmix64 of the seed, then of that and the position."""
    mixed = _splitmix64(_splitmix64(seed.astype(np.uint64)) ^ position.astype(np.uint64))
    return (mixed & np.uint64(0xFFFFFFFF)).astype(np.uint32), (mixed >> np.uint64(32)).astype(np.uint32)


def _splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014); arithmetic modulo 2**64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sampling_rows(plan: BatchPlan, table: SequenceTable, eos_token_ids: list[int], vocab_size: int) -> SamplingRows:
    """Reads the settings of the plan's sampling rows from the table's columns."""
    slots = plan.slots[plan.samples]
    position = (plan.num_computed + plan.num_new)[plan.samples]  # index of the token about to be sampled
    temperature = table.temperature[slots]
    greedy = temperature <= 0.0
    masks = {}
    early = position < table.min_tokens_until[slots]
    if early.any():
        for row in np.flatnonzero(early).tolist():
            params = table.params[slots[row]]
            ids = set(eos_token_ids) | set(params.stop_token_ids if params is not None else ())
            masks[row] = torch.tensor(sorted(i for i in ids if 0 <= i < vocab_size), dtype=torch.int64)
    empty = np.empty(0, np.uint32)
    if greedy.all():
        return SamplingRows(greedy, True, temperature, table.top_p[slots], table.top_k[slots], empty, empty, masks)
    key0, key1 = noise_keys(table.seed[slots], position)
    return SamplingRows(greedy, False, temperature, table.top_p[slots], table.top_k[slots], key0, key1, masks)


def constrain(rows: SamplingRows, allowed: RowMasks) -> None:
    """From here on the rows of `allowed` draw only what it allows."""
    rows.allowed = allowed
    for row in allowed.rows.tolist():
        rows.masks.pop(row, None)


def sample_tokens(logits: Tensor, rows: SamplingRows, first: int) -> tuple[IntArray, BoolArray]:
    """logits [n, V] of rows first to first + n; ids that may not come are masked in place. Bad rows hold NaN or an infinity."""
    end = first + len(logits)
    for row, ids in rows.masks.items():
        if first <= row < end:
            # finite, so that the check for infinities keeps its meaning; an infinity already there must not be hidden
            masked = logits[row - first, ids]
            logits[row - first, ids] = torch.where(torch.isfinite(masked), torch.finfo(logits.dtype).min, masked)
    if rows.allowed is not None:
        apply_row_masks(logits, rows.allowed, first)
    if rows.all_greedy:
        return ops.greedy(logits)
    drawn = np.flatnonzero(~rows.greedy[first:end])
    if len(drawn) == len(logits):
        return _draw(logits, rows, drawn + first)
    ids, bad = ops.greedy(logits)
    if len(drawn):
        ids[drawn], bad[drawn] = _draw(logits[torch.from_numpy(drawn)], rows, drawn + first)
    return ids, bad


def _draw(logits: Tensor, rows: SamplingRows, at: npt.NDArray[np.intp]) -> tuple[IntArray, BoolArray]:
    return ops.sample(logits, rows.temperature[at], rows.top_p[at], rows.top_k[at], rows.key0[at], rows.key1[at])
