"""Tokens from logits on the CPU (Numba). Shapes: N rows, V vocabulary. Twins: reference.greedy, reference.sample.

Floats compare as integers once the magnitude bits of negative ones are flipped, and an exponent of all ones is NaN or infinity;
integer maxima vectorise, and NaN can't mislead them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import boolean, float32, int16, int32, njit, types, uint32, void

from engine.kernels.cpu_bits import FASTMATH, bits_of_float, exp, exponential, float_of_bits, hash32, widen

# Python's error model puts a branch for zero before each division, which keeps loops from being vectorised.
_OPTIONS: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy", "cache": True, "nogil": True}
GREEDY_FLOAT32 = void(float32[:, ::1], int32[::1], boolean[::1])
GREEDY_BFLOAT16 = void(int16[:, ::1], int32[::1], boolean[::1])
_STRIPE = 1024  # logits between two comparisons of the running maximum; the winner's stripe is searched again for its index
_ONE_BITS = 0x3F800000  # 1.0


@njit(**_OPTIONS)
def greedy_float32(logits: Any, ids: Any, bad: Any) -> None:
    vocab = logits.shape[1]
    for n in range(logits.shape[0]):
        row = logits[n]
        top, size, best = int32(-0x80000000), int32(0), 0
        for start in range(0, vocab, _STRIPE):
            stripe = row[start : min(start + _STRIPE, vocab)]
            stripe_top = int32(-0x80000000)
            for i in range(stripe.shape[0]):
                bits = bits_of_float(stripe[i])
                size = max(size, bits & int32(0x7FFFFFFF))
                stripe_top = max(stripe_top, bits ^ ((bits >> int32(31)) & int32(0x7FFFFFFF)))
            if stripe_top > top:
                top, best = stripe_top, start
        bad[n] = size >= int32(0x7F800000)
        for i in range(best, vocab):
            bits = bits_of_float(row[i])
            if bits ^ ((bits >> int32(31)) & int32(0x7FFFFFFF)) == top:
                ids[n] = i
                break


@njit(**_OPTIONS)
def greedy_bfloat16(logits: Any, ids: Any, bad: Any) -> None:
    """logits: bfloat16 bits as int16."""
    vocab = logits.shape[1]
    for n in range(logits.shape[0]):
        row = logits[n]
        top, size, best = int16(-0x8000), int16(0), 0
        for start in range(0, vocab, _STRIPE):
            stripe = row[start : min(start + _STRIPE, vocab)]
            stripe_top = int16(-0x8000)
            for i in range(stripe.shape[0]):
                bits = stripe[i]
                size = max(size, int16(bits & int16(0x7FFF)))
                stripe_top = max(stripe_top, int16(bits ^ ((bits >> int16(15)) & int16(0x7FFF))))
            if stripe_top > top:
                top, best = stripe_top, start
        bad[n] = size >= int16(0x7F80)
        for i in range(best, vocab):
            if int16(row[i] ^ ((row[i] >> int16(15)) & int16(0x7FFF))) == top:
                ids[n] = i
                break


@njit(fastmath=FASTMATH)
def _top_k_cutoff(weights: Any, top_k: int) -> Any:
    """Bits of the k-th largest weight; ties with it stay in."""
    low, high = int32(0), int32(_ONE_BITS)  # every weight is between 0 and 1, so their bits sort as they do
    while low < high:
        middle = int32(low + (high - low + 1) // 2)
        count = 0
        for i in range(weights.shape[0]):
            count += bits_of_float(weights[i]) >= middle
        if count >= top_k:
            low = middle
        else:
            high = int32(middle - 1)
    return low


@njit(fastmath=FASTMATH)
def _mass(weights: Any, cutoff: Any) -> Any:
    total = float32(0.0)
    for i in range(weights.shape[0]):
        total += weights[i] if bits_of_float(weights[i]) >= cutoff else float32(0.0)
    return total


@njit(fastmath=FASTMATH)
def _top_p_cutoff(weights: Any, floor: Any, top_p: Any) -> Any:
    """Bits of the largest cutoff whose weights still hold top_p of the mass at or above `floor`."""
    target = float32(top_p) * _mass(weights, floor)
    low, high = floor, int32(_ONE_BITS)
    while low < high:
        middle = int32(low + (high - low + 1) // 2)
        if _mass(weights, middle) >= target:
            low = middle
        else:
            high = int32(middle - 1)
    return low


def sample_signature(element: types.Type) -> Any:
    floats, keys = float32[::1], uint32[::1]
    return void(element[:, ::1], floats, floats, int32[::1], floats, keys, keys, int32[::1], boolean[::1])


@njit(**_OPTIONS)
def sample(logits: Any, temperature: Any, top_p: Any, top_k: Any, min_p: Any, key0: Any, key1: Any, ids: Any, bad: Any) -> None:
    """Each of [N] rows draws from softmax(logits / temperature) cut to top_k and to min_p of the likeliest, then to top_p (0, 0
    and 1: off); temperature > 0.

    An exponential race: token i's time is an exponential draw keyed by (key0, key1, i) over its weight; the first wins. Which
    token that is depends on the row alone, and hardly ever on the last bits of the logits.
    """
    vocab = logits.shape[1]
    weights = np.empty(vocab, np.float32)
    for n in range(logits.shape[0]):
        row = logits[n]
        size = int32(0)
        top = int32(-0x80000000)
        for i in range(vocab):
            bits = bits_of_float(widen(row[i]))
            size = max(size, bits & int32(0x7FFFFFFF))
            top = max(top, bits ^ ((bits >> int32(31)) & int32(0x7FFFFFFF)))
        bad[n] = size >= int32(0x7F800000)
        if bad[n]:
            ids[n] = 0
            continue
        largest = float_of_bits(top ^ ((top >> int32(31)) & int32(0x7FFFFFFF)))
        factor = float32(1.0) / temperature[n]
        for i in range(vocab):
            weights[i] = exp((widen(row[i]) - largest) * factor)
        cutoff = int32(0)
        if 0 < top_k[n] < vocab:
            cutoff = _top_k_cutoff(weights, top_k[n])
        if min_p[n] > float32(0.0):
            cutoff = max(cutoff, min(bits_of_float(min_p[n]), int32(_ONE_BITS)))
        if top_p[n] < float32(1.0):
            cutoff = _top_p_cutoff(weights, cutoff, top_p[n])
        first, second = key0[n], key1[n]
        for i in range(vocab):
            weight = weights[i]
            time = exponential(hash32(uint32(i), first, second)) / weight
            weights[i] = time if bits_of_float(weight) >= cutoff else float32(np.inf)
        best, start = float32(np.inf), 0
        for stripe in range(0, vocab, _STRIPE):
            stripe_best = float32(np.inf)
            for i in range(stripe, min(stripe + _STRIPE, vocab)):
                stripe_best = min(stripe_best, weights[i])
            if stripe_best < best:
                best, start = stripe_best, stripe
        winner = start
        while weights[winner] != best:
            winner += 1
        ids[n] = winner
