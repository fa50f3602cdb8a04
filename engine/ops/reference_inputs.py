"""Computes the inputs of a recorded step in numpy. These are the reference implementations of the kernels in
engine/cpu/kernels/inputs.py, and run in their place without Numba.

The arrays of R rows and of T tokens are as long as the largest step needs. counts[ROWS] and counts[TOKENS] are the numbers of rows
and tokens of this step; entries after these are padding. A step's tokens lie end to end, row after row.

Shapes: S slots, L tokens of a sequence, B blocks of the longest context, P pairs of a head's dimensions that are rotated."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.ops.step_counts import APART, ATTENDED, GREEDY, ROWS, SAMPLING, TOKENS

# splitmix64's numbers. They are arrays, because numpy takes twice as long to combine a short array with a number.
_STEP = np.array(0x9E3779B97F4A7C15, np.uint64)
_FACTORS = (np.array(0xBF58476D1CE4E5B9, np.uint64), np.array(0x94D049BB133111EB, np.uint64))
_SHIFTS = tuple(np.array(bits, np.uint64) for bits in (30, 27, 31))
_HALF = np.array(32, np.uint64)


def step_tokens(
    counts: Any,
    slots: Any,  # [R] int32: each row's slot
    computed: Any,  # [R] int32: number of positions of the row whose KV is stored before the step
    num_new: Any,  # [R] int32: tokens of the row in the step
    long_row: int,  # a row with more tokens than this is computed as a whole in attention, others token by token
    tokens: Any,  # [S, L] int32
    input_ids: Any,  # [T] int64; padding is left unchanged
    positions: Any,  # [T] int32; padding is left unchanged
    starts: Any,  # [R] int32: index of the row's first token in the step; padding is left unchanged
    contexts: Any,  # [R] int32: number of positions whose KV is stored after the step; padding is left unchanged
    paged_rows: Any,  # [T] int32: the token's row, 0 for padding
    paged_contexts: Any,  # [T] int32: positions the token attends to by itself; -1 in a long row, 0 for padding
) -> None:
    """Computes a step's inputs for each token (id, position, and the positions to which the token attends) from the step's rows and
    the sequences' tokens [S, L]. slots, computed, num_new [R]: each row's slot, its number of positions stored before the step, and
    its number of tokens in the step. long_row: the most tokens of a row whose attention is computed token by token; paged_contexts
    is -1 for the tokens of longer rows.
    Fills the arrays from input_ids to paged_contexts. Also sets counts[ATTENDED], an upper bound on the number of positions that
    all tokens together attend to."""
    num_rows, num_tokens = counts[ROWS], counts[TOKENS]
    first, new, own = computed[:num_rows], num_new[:num_rows], slots[:num_rows]
    starts[:num_rows] = np.cumsum(new) - new
    contexts[:num_rows] = first + new
    rows = np.repeat(np.arange(num_rows, dtype=np.int32), new)
    at = positions[:num_tokens]
    at[:] = np.arange(num_tokens) + (first - starts[:num_rows])[rows]
    input_ids[:num_tokens] = tokens[own[rows], at]
    paged_rows[:num_tokens], paged_rows[num_tokens:] = rows, 0
    paged_contexts[:num_tokens], paged_contexts[num_tokens:] = np.where(new[rows] > long_row, -1, at + 1), 0
    counts[ATTENDED] = int((new.astype(np.int64) * contexts[:num_rows]).sum())


def step_blocks(
    counts: Any,
    slots: Any,
    contexts: Any,
    positions: Any,
    paged_rows: Any,
    block_tables: Any,
    block_tokens: int,
    block_table: Any,
    places: Any,
) -> None:
    """Computes where the tokens of one KV group (the layers that share block tables) are stored.

    block_tables: [S, B] int32, the block tables of all sequences, which are read. block_table: [R, B], filled with each row's block
    table up to the block of its last token. places: [T] int64, filled with block * block_tokens + place in the block of each token;
    -1 for padding. counts, slots, contexts, positions, paged_rows: as for step_tokens, which has filled them."""
    num_rows, num_tokens = counts[ROWS], counts[TOKENS]
    most = -(-int(contexts[:num_rows].max()) // block_tokens)
    block_table[:num_rows, :most] = block_tables[slots[:num_rows], :most]
    blocks, rest = np.divmod(positions[:num_tokens], block_tokens)
    places[:num_tokens] = block_table[paged_rows[:num_tokens], blocks].astype(np.int64) * block_tokens + rest
    places[num_tokens:] = -1


def sampling_settings(
    counts: Any,
    slots: Any,  # [R]; this and the next two as in step_tokens
    computed: Any,
    num_new: Any,
    starts: Any,  # [R], as step_tokens leaves it
    samples: Any,  # [R] bool: whether the row samples
    temperature: Any,  # [S]; this and the settings up to prompt_logprobs are columns of the sequence table
    top_p: Any,
    top_k: Any,
    min_p: Any,
    seed: Any,
    num_logprobs: Any,
    min_tokens_until: Any,
    edits_logits: Any,
    prompt_logprobs: Any,
    row_temperature: Any,  # [R]; this and what follows have an entry for each row that samples, in order
    row_top_p: Any,
    row_top_k: Any,
    row_min_p: Any,
    key0: Any,  # uint32
    key1: Any,
    last_tokens: Any,  # int64: index of the row's last token in the step; 0 for padding
) -> None:
    """Collects the sampling settings of the rows that sample. Fills the arrays from row_temperature to last_tokens with one entry
    for each of these rows, in order: its settings, copied from the columns of the sequence table, the keys of its random noise, and
    the index of its last token in the step. Also sets counts[SAMPLING], counts[GREEDY] and counts[APART]
    (engine/ops/step_counts.py). samples [R]: whether a row samples. slots to starts: as for step_tokens."""
    num_rows = counts[ROWS]
    own = np.flatnonzero(samples[:num_rows])
    num, rows = len(own), slots[own]
    for column, to in ((temperature, row_temperature), (top_p, row_top_p), (top_k, row_top_k), (min_p, row_min_p)):
        to[:num] = column[rows]
    position = computed[own] + num_new[own]
    key0[:num], key1[:num] = noise_keys(seed[rows], position)
    last_tokens[:num], last_tokens[num:] = starts[own] + num_new[own] - 1, 0
    counts[SAMPLING], counts[GREEDY] = num, np.count_nonzero(row_temperature[:num] <= 0.0)
    edited = edits_logits[rows] | (position < min_tokens_until[rows])
    apart = np.count_nonzero(edited | (num_logprobs[rows] >= 0))
    counts[APART] = apart + np.count_nonzero(prompt_logprobs[slots[:num_rows]])


def noise_keys(seed: npt.NDArray[np.uint64], position: npt.NDArray[Any]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Returns two 32-bit keys for each (seed, position). The random noise with which the token at that position is sampled is made
    from them. They are the halves of splitmix64(splitmix64(seed) xor position), the lower half first."""
    mixed = _splitmix64(_splitmix64(seed) ^ position.astype(np.uint64))
    return mixed.astype(np.uint32), (mixed >> _HALF).astype(np.uint32)  # the first keeps the lower half


def _splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Returns the splitmix64 hash of x, modulo 2**64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    2014)."""
    x = x + _STEP
    x = (x ^ (x >> _SHIFTS[0])) * _FACTORS[0]
    x = (x ^ (x >> _SHIFTS[1])) * _FACTORS[1]
    return x ^ (x >> _SHIFTS[2])


def rotary_turns(positions: Any, inv_freq: Any, scale: float, turns: Any) -> None:
    """Fills turns [T, 2 P] float32 with the cosines, then the sines, of position * inv_freq, all times scale. The angle is rounded
    to float32 first. positions: [T] int32. inv_freq: [P] float32."""
    angles = torch.from_numpy(positions).float().unsqueeze(1) * torch.from_numpy(inv_freq)
    torch.from_numpy(turns).copy_(torch.cat((angles.cos(), angles.sin()), dim=1) * scale)
