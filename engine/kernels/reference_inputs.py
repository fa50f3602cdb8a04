"""What a decode step's inputs must be, in numpy: the twins of cpu_inputs.py, which run where there is no Numba.

Arrays of R rows have a place for every row that a step may have; counts[ROWS] are the step's, those behind are padding. Shapes: S
slots, L tokens, B blocks of the longest context, P pairs of a head's dimensions that turn.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

# Of counts: rows of the step (given); of these, rows that take their likeliest token; and rows that ask for more than a token drawn
# by its settings: logits edited, log-probabilities told.
ROWS, GREEDY, APART = 0, 1, 2
NUM_COUNTS = 3


def decode_rows(counts: Any, slots: Any, computed: Any, tokens: Any, input_ids: Any, contexts: Any) -> None:
    """slots, computed [R] int32: of each row, and positions stored before the step. tokens [S, L] int32 -> input_ids [R] int64 (as
    they are behind the step's rows), contexts [R] int32: positions stored after it; 0 of padding."""
    num_rows = counts[ROWS]
    rows = slots[:num_rows]
    input_ids[:num_rows] = tokens[rows, computed[:num_rows]]
    contexts[:num_rows] = computed[:num_rows] + 1
    contexts[num_rows:] = 0


def decode_blocks(
    counts: Any, slots: Any, computed: Any, block_tables: Any, block_tokens: int, block_table: Any, places: Any
) -> None:
    """Of one KV group: block_tables [S, B] int32 -> block_table [R, B], each row's up to its new token's; places [R] int64: block *
    block_tokens + place of that token, -1 of padding."""
    num_rows = counts[ROWS]
    blocks, rest = np.divmod(computed[:num_rows], block_tokens)
    most = int(blocks.max()) + 1
    block_table[:num_rows, :most] = block_tables[slots[:num_rows], :most]
    places[:num_rows] = block_table[np.arange(num_rows), blocks].astype(np.int64) * block_tokens + rest
    places[num_rows:] = -1


def sampling_settings(
    counts: Any,
    slots: Any,
    computed: Any,
    temperature: Any,  # [S] each, as the sequence table has them
    top_p: Any,
    top_k: Any,
    min_p: Any,
    seed: Any,
    num_logprobs: Any,
    min_tokens_until: Any,
    edits_logits: Any,
    prompt_logprobs: Any,
    row_temperature: Any,  # [R] each
    row_top_p: Any,
    row_top_k: Any,
    row_min_p: Any,
    key0: Any,  # uint32
    key1: Any,
) -> None:
    """The step's rows of the first four, the keys of their noise, and counts[GREEDY] and counts[APART]."""
    num_rows = counts[ROWS]
    rows = slots[:num_rows]
    for column, own in ((temperature, row_temperature), (top_p, row_top_p), (top_k, row_top_k), (min_p, row_min_p)):
        own[:num_rows] = column[rows]
    position = computed[:num_rows] + 1
    key0[:num_rows], key1[:num_rows] = noise_keys(seed[rows], position)
    counts[GREEDY] = np.count_nonzero(row_temperature[:num_rows] <= 0.0)
    edited = edits_logits[rows] | (position < min_tokens_until[rows])
    counts[APART] = np.count_nonzero(edited | prompt_logprobs[rows] | (num_logprobs[rows] >= 0))


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
