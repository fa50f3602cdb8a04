"""Computes log-probabilities and penalties on the CPU (Numba), for the rows of requests that want them. Reference implementations:
reference.top_logprobs, reference.penalise.

Shapes: N rows, M rows whose log-probabilities are computed, V vocabulary, K most likely tokens of a row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import float32, float64, int32, int64, njit, types, void

from engine.cpu.kernels.bits import FASTMATH, bits_of_float, exp, float_of_bits, ordered, widen

_OPTIONS: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy", "cache": True, "nogil": True}
_STRIPE = 1024  # logits between two comparisons with the least likely alternative so far


def top_logprobs_signature(element: types.Type) -> Any:
    ints = int32[::1]
    return void(element[:, ::1], ints, ints, float32[::1], int32[:, ::1], float32[:, ::1])


@njit(fastmath=FASTMATH, inline="always")
def _ordered(value: Any) -> Any:
    """Returns an int32 that has the same order as this float32."""
    return ordered(bits_of_float(value))


@njit(**_OPTIONS)
def top_logprobs(logits: Any, rows: Any, chosen: Any, picked: Any, top_ids: Any, top: Any) -> None:
    """Computes log-softmax values of those M rows of logits [N, V] whose indices are rows [M]. Writes the value of each row's token
    in chosen [M] to picked [M], and the ids and values of the row's K most likely tokens to top_ids and top [M, K], the most likely
    first; of equal logits the lower id comes first. K may be 0."""
    vocab, num_top = logits.shape[1], top.shape[1]
    for m in range(rows.shape[0]):
        row = logits[rows[m]]
        most = int32(-0x80000000)
        for i in range(vocab):
            most = max(most, _ordered(widen(row[i])))
        largest = float_of_bits(ordered(most))
        total = float64(0.0)
        held = 0
        for start in range(0, vocab, _STRIPE):
            end = min(start + _STRIPE, vocab)
            mass, stripe_most = float32(0.0), int32(-0x80000000)
            for i in range(start, end):
                value = widen(row[i])
                mass += exp(value - largest)
                stripe_most = max(stripe_most, _ordered(value))
            total += float64(mass)
            if num_top == 0 or (held == num_top and stripe_most <= _ordered(top[m, num_top - 1])):
                continue
            for i in range(start, end):
                value = widen(row[i])
                if held == num_top and value <= top[m, num_top - 1]:
                    continue
                if held < num_top:
                    held += 1
                at = held - 1
                while at > 0 and top[m, at - 1] < value:
                    top[m, at], top_ids[m, at] = top[m, at - 1], top_ids[m, at - 1]
                    at -= 1
                top[m, at], top_ids[m, at] = value, i
        log_total = float64(largest) + math.log(total)
        picked[m] = float32(float64(widen(row[chosen[m]])) - log_total)
        for k in range(num_top):
            top[m, k] = float32(float64(top[m, k]) - log_total)


PENALISE = void(float32[::1], int32[::1], int64, float64, float64, float64, int32[::1])


@njit(**_OPTIONS)
def penalise(row: Any, tokens: Any, num_prompt: int, presence: float, frequency: float, repetition: float, counts: Any) -> None:
    """Applies penalties to the logits row [V] float32 in place, as reference.penalise does. tokens: the num_prompt tokens of the
    prompt, then those of the output.

    The logits of all these tokens are divided by `repetition` if positive, else multiplied by it. For tokens of the output,
    `frequency` times the token's count in the output, and `presence`, are then subtracted. Logits that are not finite stay
    unchanged. counts: [V] int32, work space that must be zeros, and is zeros again afterwards. The work grows with the number of
    tokens, not with V."""
    limit = float32(1e30)  # a strong penalty must not make an infinity, which would mark the row's logits as bad
    for i in range(num_prompt, tokens.shape[0]):
        counts[tokens[i]] += 1
    for i in range(tokens.shape[0]):
        token = tokens[i]
        count = counts[token]
        if count < 0:
            continue
        counts[token] = -1
        value = row[token]
        if not np.isfinite(value):
            continue
        wide = float64(value) / repetition if value > 0.0 else float64(value) * repetition
        if count > 0:
            wide -= frequency * count + presence
        row[token] = max(-limit, min(limit, float32(wide)))
    for i in range(tokens.shape[0]):
        counts[tokens[i]] = 0
