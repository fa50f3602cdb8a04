"""Computes the inputs of a recorded step from the sequence table, the arrays in which each running sequence has a slot (Numba). In
Python, array by array, this would take a third of a millisecond a step, because the products of the step displace the interpreter's
data from the caches.

engine/ops/reference_inputs.py has the reference implementations, and describes each argument."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import boolean, float32, float64, int32, int64, njit, uint32, uint64, void

from engine.ops.step_counts import APART, ATTENDED, GREEDY, ROWS, SAMPLING, TOKENS

# No reordering of sums, because the two parts of pi / 2 must not be combined.
_OPTIONS: dict[str, Any] = {"fastmath": {"contract"}, "error_model": "numpy", "cache": True, "nogil": True}
_HELPER: dict[str, Any] = {"fastmath": {"contract"}, "error_model": "numpy"}
_COLUMNS = (float32[::1], float32[::1], int32[::1], float32[::1])  # temperature, top_p, top_k, min_p
_ROWS = (int64[::1], int32[::1], int32[::1], int32[::1])  # counts, slots, then two columns with an entry for each row
STEP_TOKENS = void(*_ROWS, int64, int32[:, ::1], int64[::1], *(int32[::1],) * 5)
STEP_BLOCKS = void(*_ROWS, int32[::1], int32[:, ::1], int64, int32[:, ::1], int64[::1])
SAMPLING_SETTINGS = void(
    *_ROWS,
    *(int32[::1], boolean[::1]),
    *_COLUMNS,
    *(uint64[::1], int32[::1], int32[::1], boolean[::1], boolean[::1]),
    *_COLUMNS,
    *(uint32[::1], uint32[::1], int64[::1]),
)
ROTARY_TURNS = void(int32[::1], float32[::1], float64, float32[:, ::1])
# pi / 2 is the sum of these two. The first has 33 bits, so that its products with whole numbers below 2**20 are exact.
_QUARTER, _QUARTER_REST = 1.57079632673412561417, 6.07710050650619224932e-11


@njit(**_OPTIONS)
def step_tokens(
    counts: Any,
    slots: Any,
    computed: Any,
    num_new: Any,
    long_row: int,
    tokens: Any,
    input_ids: Any,
    positions: Any,
    starts: Any,
    contexts: Any,
    paged_rows: Any,
    paged_contexts: Any,
) -> None:
    at = attended = 0
    for row in range(counts[ROWS]):
        new, first, own = num_new[row], computed[row], tokens[slots[row]]
        starts[row], contexts[row] = at, first + new
        attended += int64(new) * contexts[row]
        for position in range(first, first + new):
            input_ids[at], positions[at] = own[position], position
            paged_rows[at], paged_contexts[at] = row, -1 if new > long_row else position + 1
            at += 1
    paged_rows[at:] = 0
    paged_contexts[at:] = 0
    counts[ATTENDED] = attended


@njit(**_OPTIONS)
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
    for row in range(counts[ROWS]):
        own, kept = block_tables[slots[row]], block_table[row]
        for block in range((contexts[row] + block_tokens - 1) // block_tokens):
            kept[block] = own[block]
    num_tokens = counts[TOKENS]
    for token in range(num_tokens):
        position = positions[token]
        places[token] = int64(block_table[paged_rows[token], position // block_tokens]) * block_tokens + position % block_tokens
    places[num_tokens:] = -1


@njit(**_HELPER)
def _mixed(x: Any) -> Any:
    """Returns the splitmix64 hash of x (both uint64). The keys of a token's random noise are made with it, as in
    reference_inputs.noise_keys."""
    x += uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> uint64(27))) * uint64(0x94D049BB133111EB)
    return x ^ (x >> uint64(31))


@njit(**_OPTIONS)
def sampling_settings(
    counts: Any,
    slots: Any,
    computed: Any,
    num_new: Any,
    starts: Any,
    samples: Any,
    temperature: Any,
    top_p: Any,
    top_k: Any,
    min_p: Any,
    seed: Any,
    num_logprobs: Any,
    min_tokens_until: Any,
    edits_logits: Any,
    prompt_logprobs: Any,
    row_temperature: Any,
    row_top_p: Any,
    row_top_k: Any,
    row_min_p: Any,
    key0: Any,
    key1: Any,
    last_tokens: Any,
) -> None:
    num = num_greedy = num_apart = 0
    for row in range(counts[ROWS]):
        slot, position = slots[row], computed[row] + num_new[row]
        num_apart += prompt_logprobs[slot]
        if not samples[row]:
            continue
        row_temperature[num], row_top_p[num] = temperature[slot], top_p[slot]
        row_top_k[num], row_min_p[num] = top_k[slot], min_p[slot]
        key = _mixed(_mixed(seed[slot]) ^ uint64(position))
        key0[num], key1[num] = uint32(key & uint64(0xFFFFFFFF)), uint32(key >> uint64(32))
        last_tokens[num] = starts[row] + num_new[row] - 1
        num_greedy += temperature[slot] <= float32(0.0)
        num_apart += edits_logits[slot] or position < min_tokens_until[slot] or num_logprobs[slot] >= 0
        num += 1
    last_tokens[num:] = 0
    counts[SAMPLING], counts[GREEDY], counts[APART] = num, num_greedy, num_apart


@njit(**_OPTIONS)
def rotary_turns(positions: Any, inv_freq: Any, scale: float, turns: Any) -> None:
    """Fills turns [T, 2 P] float32 with the cosines, then the sines, of position * inv_freq, all times scale. positions: [T] int32.
    inv_freq: [P] float32. The angle is rounded to float32 first.

    Cosine and sine are computed in float64 within a quarter turn, by Taylor series whose first omitted term is below 1e-11."""
    factor, pairs = float32(scale), inv_freq.shape[0]
    for row in range(positions.shape[0]):
        position = float32(positions[row])
        cosines, sines = turns[row, :pairs], turns[row, pairs:]
        for p in range(pairs):
            angle = float64(position * inv_freq[p])
            quarters = np.floor(angle * 0.6366197723675814 + 0.5)
            x = (angle - quarters * _QUARTER) - quarters * _QUARTER_REST
            square = x * x
            sine = 1.0 + square * (-1 / 6 + square * (1 / 120 + square * (-1 / 5040 + square * (1 / 362880 - square / 39916800))))
            sine *= x
            cosine = -1 / 720 + square * (1 / 40320 + square * (-1 / 3628800 + square / 479001600))
            cosine = 1.0 + square * (-1 / 2 + square * (1 / 24 + square * cosine))
            turned = int32(quarters)
            swapped = (turned & int32(1)) != 0
            first, second = (sine, cosine) if swapped else (cosine, sine)
            cosines[p] = float32(first * (1 - ((turned + int32(1)) & int32(2)))) * factor
            sines[p] = float32(second * (1 - (turned & int32(2)))) * factor
