"""Samples tokens from logits on the CPU (Numba). Reference implementations: reference.greedy, reference.sample.

Shapes: N rows, V vocabulary.

Floats are compared as integers: with the magnitude bits of negative floats flipped, the integers have the order of the floats.
Maxima of integers are vectorised, and NaN cannot disturb them. A float whose exponent bits are all ones is NaN or an infinity."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import boolean, float32, int16, int32, int64, njit, prange, types, uint32, void

from engine.cpu.kernels.bits import FASTMATH, bits_of_float, magnitude, named, ordered, widen
from engine.cpu.kernels.race import (
    STRIPE,
    bits_of_weight,
    first_of,
    is_within,
    kth_logit,
    race,
    stripe_tops,
    weigh_stripes,
)
from engine.cpu.kernels.vectors import LANES

# Python's error model puts a branch for zero before each division, which keeps loops from being vectorised.
_OPTIONS: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy", "cache": True, "nogil": True}
GREEDY_FLOAT32 = void(float32[:, ::1], int32[::1], boolean[::1])
GREEDY_BFLOAT16 = void(int16[:, ::1], int32[::1], boolean[::1])
_STRIPE = 1024  # logits between two updates of the running maximum; the winner's stripe is searched again for its index
_ONE_BITS = 0x3F800000


def _greedy_float32(logits: Any, ids: Any, bad: Any) -> None:
    vocab = logits.shape[1]
    for n in prange(logits.shape[0]):
        row = logits[n]
        top, size, best = int32(-0x80000000), int32(0), 0
        for start in range(0, vocab, _STRIPE):
            stripe = row[start : min(start + _STRIPE, vocab)]
            stripe_top = int32(-0x80000000)
            for i in range(stripe.shape[0]):
                bits = bits_of_float(stripe[i])
                size = max(size, magnitude(bits))
                stripe_top = max(stripe_top, ordered(bits))
            if stripe_top > top:
                top, best = stripe_top, start
        bad[n] = size >= int32(0x7F800000)
        for i in range(best, vocab):
            if ordered(bits_of_float(row[i])) == top:
                ids[n] = i
                break


def _greedy_bfloat16(logits: Any, ids: Any, bad: Any) -> None:
    """Finds the most likely token of each row of logits [N, V] (bfloat16 bits as int16), of equal ones the lowest, and writes it to
    ids [N]. Writes to bad [N] whether the row holds NaN or an infinity."""
    vocab = logits.shape[1]
    for n in prange(logits.shape[0]):
        row = logits[n]
        top, size, best = int16(-0x8000), int16(0), 0
        for start in range(0, vocab, _STRIPE):
            stripe = row[start : min(start + _STRIPE, vocab)]
            stripe_top = int16(-0x8000)
            for i in range(stripe.shape[0]):
                bits = stripe[i]
                size = max(size, magnitude(bits))
                stripe_top = max(stripe_top, ordered(bits))
            if stripe_top > top:
                top, best = stripe_top, start
        bad[n] = size >= int16(0x7F80)
        for i in range(best, vocab):
            if ordered(row[i]) == top:
                ids[n] = i
                break


greedy_float32_serial = njit(**_OPTIONS)(_greedy_float32)
greedy_float32_parallel = njit(**_OPTIONS, parallel=True)(named("_greedy_float32_parallel", _greedy_float32))
greedy_bfloat16_serial = njit(**_OPTIONS)(_greedy_bfloat16)
greedy_bfloat16_parallel = njit(**_OPTIONS, parallel=True)(named("_greedy_bfloat16_parallel", _greedy_bfloat16))


@njit(fastmath=FASTMATH, error_model="numpy")
def _sample_row(
    row: Any,
    temperature: Any,
    top_p: Any,
    top_k: Any,
    min_p: Any,
    first: Any,
    second: Any,
    stripes: Any,  # [2, stripes] float32, work space
    order: Any,  # [stripes] int32, work space
    drawn: Any,  # [2, 16] int32, work space
    ahead: int,  # elements from this row to the next, which is prefetched
) -> int:
    """Returns the token that is sampled from a row of logits [V], or -1 if the row holds NaN or an infinity. With a temperature of
    0 or less it is the most likely token. A top_p of 1 or more, a top_k of 0 or of at least V, and a min_p of 0 exclude no token.
    first, second: the keys of the row's random numbers."""
    tops, heaviest = stripes[0], stripes[1]
    if not stripe_tops(row, tops):
        return -1
    largest = tops.max()
    if temperature <= float32(0.0):
        return first_of(row, tops, largest)
    factor = float32(1.0) / temperature
    weigh_stripes(tops, largest, factor, heaviest)
    floor = int32(0)
    if 0 < top_k < row.shape[0]:
        floor = bits_of_weight(kth_logit(row, tops, top_k), largest, factor, drawn)
    if min_p > float32(0.0):
        floor = max(floor, min(bits_of_float(min_p), int32(_ONE_BITS)))
    cutoff = floor
    while True:
        winner = race(row, heaviest, largest, factor, cutoff, first, second, order, drawn, ahead)
        own = bits_of_weight(widen(row[winner]), largest, factor, drawn)
        if top_p >= float32(1.0) or own >= int32(_ONE_BITS) or is_within(row, heaviest, largest, factor, floor, top_p, winner, own):
            return winner
        # The winner among all tokens also wins among those within top_p, if it is one of them. If it is not, neither is any token
        # that is as light, so the race is repeated among the heavier ones.
        cutoff = int32(own + int32(1))  # of the same type as before, because `race` would be compiled twice otherwise
        ahead = 0


def sample_signature(element: types.Type) -> Any:
    floats, keys = float32[::1], uint32[::1]
    return void(element[:, ::1], floats, floats, int32[::1], floats, keys, keys, int64, int32[::1], boolean[::1])


def _sample(
    logits: Any,
    temperature: Any,
    top_p: Any,
    top_k: Any,
    min_p: Any,
    key0: Any,
    key1: Any,
    num_shares: int,
    ids: Any,
    bad: Any,
) -> None:
    """Samples a token for each row of logits [N, V] and writes it to ids [N]. reference.sample describes the settings temperature
    to key1 ([N] each) and the exponential race.

    num_shares: the number of shares into which the rows are divided, one for each thread. bad [N]: set to whether a row holds NaN
    or an infinity; its id is then 0.

    The token depends on the row and its settings alone, and hardly ever on the last bits of the logits."""
    for share in prange(num_shares):
        stripes = np.empty((2, (logits.shape[1] + STRIPE - 1) // STRIPE), np.float32)
        order, drawn = np.empty(stripes.shape[1], np.int32), np.empty((2, LANES), np.int32)
        for n in range(share, logits.shape[0], num_shares):
            settings = (temperature[n], top_p[n], top_k[n], min_p[n], key0[n], key1[n])
            ahead = num_shares * logits.shape[1] if n + num_shares < logits.shape[0] else 0
            token = _sample_row(logits[n], *settings, stripes, order, drawn, ahead)
            bad[n] = token < 0
            ids[n] = max(token, 0)


sample_serial = njit(**_OPTIONS)(_sample)
sample_parallel = njit(**_OPTIONS, parallel=True)(named("_sample_parallel", _sample))
