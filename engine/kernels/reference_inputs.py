"""What a recorded step's inputs must be, in numpy: the twins of cpu_inputs.py, which run where there is no Numba.

Arrays of R rows and of T tokens have a place for every one that a step may have; counts[ROWS] and counts[TOKENS] are the step's,
those behind are padding. A step's tokens lie end to end, row after row. Shapes: S slots, L tokens of a sequence, B blocks of the
longest context, P pairs of a head's dimensions that turn.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

# Of counts: rows and tokens of the step (given); rows that sample, and of these, those that take their likeliest token; rows that
# ask for more than a token drawn by its settings: logits edited, log-probabilities told; positions that all tokens attend to.
ROWS, TOKENS, SAMPLING, GREEDY, APART, ATTENDED = 0, 1, 2, 3, 4, 5
NUM_COUNTS = 6


def step_tokens(
    counts: Any,
    slots: Any,  # [R] int32, as what follows: of each row
    computed: Any,  # positions stored before the step
    num_new: Any,  # tokens of the step
    long_row: int,  # a row with more tokens attends as a whole, others token by token
    tokens: Any,  # [S, L] int32
    input_ids: Any,  # [T] int64; behind the step's tokens as they are
    positions: Any,  # [T] int32; behind the step's tokens as they are
    starts: Any,  # [R] int32: of each row, its first token in the step
    contexts: Any,  # [R] int32: positions stored after it; of padding as they are, as are starts
    paged_rows: Any,  # [T] int32: the token's row
    paged_contexts: Any,  # [T] int32: positions it attends to, by itself; -1 of a long row's, 0 of padding
) -> None:
    """The step's tokens, and counts[ATTENDED]."""
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
    """Of one KV group: block_tables [S, B] int32 -> block_table [R, B], each row's up to its last token's; places [T] int64:
    block * block_tokens + place of each token, -1 of padding. The rest as step_tokens leaves them."""
    num_rows, num_tokens = counts[ROWS], counts[TOKENS]
    most = -(-int(contexts[:num_rows].max()) // block_tokens)
    block_table[:num_rows, :most] = block_tables[slots[:num_rows], :most]
    blocks, rest = np.divmod(positions[:num_tokens], block_tokens)
    places[:num_tokens] = block_table[paged_rows[:num_tokens], blocks].astype(np.int64) * block_tokens + rest
    places[num_tokens:] = -1


def sampling_settings(
    counts: Any,
    slots: Any,  # [R] each; the first three as step_tokens takes them
    computed: Any,
    num_new: Any,
    starts: Any,  # as it leaves them
    samples: Any,  # bool
    temperature: Any,  # [S] each, as the sequence table has them
    top_p: Any,
    top_k: Any,
    min_p: Any,
    seed: Any,
    num_logprobs: Any,
    min_tokens_until: Any,
    edits_logits: Any,
    prompt_logprobs: Any,
    row_temperature: Any,  # [R] each, as what follows: of rows that sample, in order
    row_top_p: Any,
    row_top_k: Any,
    row_min_p: Any,
    key0: Any,  # uint32
    key1: Any,
    last_tokens: Any,  # int64: of each, its last token in the step; 0 behind them
) -> None:
    """The settings of the rows that sample, the keys of their noise, and counts[SAMPLING], counts[GREEDY] and counts[APART]."""
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
    """Two 32-bit keys for each (seed, position): splitmix64 of the seed, then of that and the position."""
    mixed = _splitmix64(_splitmix64(seed.astype(np.uint64)) ^ position.astype(np.uint64))
    return (mixed & np.uint64(0xFFFFFFFF)).astype(np.uint32), (mixed >> np.uint64(32)).astype(np.uint32)


def _splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014); arithmetic modulo 2**64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def rotary_turns(positions: Any, inv_freq: Any, scale: float, turns: Any) -> None:
    """positions [T] int32, inv_freq [P] float32 -> turns [T, 2 P] float32: cosines of position times inv_freq, then sines, times
    scale. The angle is rounded to float32 before."""
    angles = torch.from_numpy(positions).float().unsqueeze(1) * torch.from_numpy(inv_freq)
    torch.from_numpy(turns).copy_(torch.cat((angles.cos(), angles.sin()), dim=1) * scale)
