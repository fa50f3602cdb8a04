"""Tokens from logits on the CPU (Numba). Shapes: N rows, V vocabulary. Twins: reference.greedy, reference.sample.

Floats compare as integers once the magnitude bits of negative ones are flipped, and an exponent of all ones is NaN or infinity;
integer maxima vectorise, and NaN can't mislead them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import boolean, float32, int16, int32, int64, njit, prange, types, uint32, void

from engine.kernels.cpu_bits import (
    FASTMATH,
    bits_of_float,
    exp,
    exponential,
    float_of_bits,
    hash32,
    magnitude,
    named,
    ordered,
    widen,
)
from engine.kernels.cpu_lanes import bits_of, counted_from, floats_of, hashed, kept, lanes_of, least_of, load, lower, store
from engine.kernels.cpu_vectors import LANES

# Python's error model puts a branch for zero before each division, which keeps loops from being vectorised.
_OPTIONS: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy", "cache": True, "nogil": True}
GREEDY_FLOAT32 = void(float32[:, ::1], int32[::1], boolean[::1])
GREEDY_BFLOAT16 = void(int16[:, ::1], int32[::1], boolean[::1])
_STRIPE = 1024  # logits between two comparisons of the running maximum; the winner's stripe is searched again for its index
_ONE_BITS, _INFINITY_BITS = 0x3F800000, 0x7F800000


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
    """logits: bfloat16 bits as int16."""
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
def _ends(weights: Any, low: Any, high: Any) -> tuple[Any, Any]:
    """Bits of the smallest weight from low on, and of the largest up to high."""
    least, most = int32(_INFINITY_BITS), int32(0)
    for i in range(weights.shape[0]):
        bits = bits_of_float(weights[i])
        least = min(least, bits if bits >= low else int32(_INFINITY_BITS))
        most = max(most, bits if bits <= high else int32(0))
    return least, most


@njit(fastmath=FASTMATH, error_model="numpy")
def _top_p_cutoff(weights: Any, floor: Any, top_p: Any) -> Any:
    """Bits that part the weights as the largest cutoff does whose weights still hold top_p of the mass at or above `floor`.

    Halves what may be it until the ends, which become weights that there are now and then, meet."""
    total = _mass(weights, floor)
    target = float32(top_p) * total
    low, high = floor, int32(_ONE_BITS)
    # weights smaller than this hold too little to matter
    middle = max(low, min(high, bits_of_float((total - target) / float32(2 * weights.shape[0]))))
    turn = 0
    while low < high:
        if _mass(weights, middle) >= target:
            low = middle
        else:
            high = int32(middle - 1)
        turn += 1
        if turn >= 10 and turn % 3 == 1:
            low, high = _ends(weights, low, high)
        middle = int32(low + (high - low + 1) // 2)
    return low


@njit(inline="always", fastmath=FASTMATH)
def _reciprocal_below(x: Any) -> Any:
    """1 / x or up to 0.3 % less, of normal x (lanes) from 2**-126 to 1, and something large of 0: the exponent negated in the bits,
    then a step of Newton's method, which comes from below. A third of what a division costs."""
    guess = floats_of(int32(0x7EF311C7) - bits_of(x))
    return guess * (float32(2.0) - x * guess)


@njit(inline="always", fastmath=FASTMATH)
def _bound_lanes(weights: Any, cutoff: Any, first: Any, second: Any, bounds: Any, at: int, count: int) -> Any:
    weight = load(weights, at, count)  # 0 behind the last: later than the likeliest, which has 1
    draw = (hashed(counted_from(at), first, second) + float32(0.5)) * float32(2.0**-32)
    bound = kept(bits_of(draw * _reciprocal_below(weight)), bits_of(weight), cutoff, int32(_INFINITY_BITS))
    store(bounds, at, count, bound)
    return bound


@njit(fastmath=FASTMATH, error_model="numpy")
def _race(weights: Any, cutoff: Any, first: Any, second: Any, bounds: Any) -> int:
    """Which token at or above the cutoff comes first: its time is an exponential draw over its weight. A uniform draw in its place
    (bounds [V] int32: work space) is never later, costs half, and leaves few to look at."""
    vocab = weights.shape[0]
    earliest = np.empty((vocab + _STRIPE - 1) // _STRIPE, np.int32)  # bounds' bits, of each stripe
    for stripe in range(earliest.shape[0]):
        begin, end = _STRIPE * stripe, min(_STRIPE * (stripe + 1), vocab)
        whole = end - (end - begin) % LANES
        soonest = lanes_of(int32(0x7FFFFFFF))  # of positive numbers bits sort as these do
        for i in range(begin, whole, LANES):
            soonest = lower(soonest, _bound_lanes(weights, cutoff, first, second, bounds, i, LANES))
        if whole < end:
            soonest = lower(soonest, _bound_lanes(weights, cutoff, first, second, bounds, whole, end - whole))
        earliest[stripe] = least_of(soonest)
    start = int(np.argmin(earliest))
    winner = _STRIPE * start
    while bounds[winner] != earliest[start]:
        winner += 1
    best = exponential(hash32(uint32(winner), first, second)) / weights[winner]
    limit = bits_of_float(best * float32(1.00001))  # rounding must not hide one that is as early
    for stripe in range(earliest.shape[0]):
        if earliest[stripe] <= limit:
            for token in range(_STRIPE * stripe, min(_STRIPE * (stripe + 1), vocab)):
                if bounds[token] <= limit:
                    time = exponential(hash32(uint32(token), first, second)) / weights[token]
                    if time < best or (time == best and token < winner):
                        best, winner = time, token
    return winner


@njit(inline="always", fastmath=FASTMATH)
def _weigh_lanes(row: Any, largest: Any, factor: Any, weights: Any, at: int, count: int) -> None:
    store(weights, at, count, exp((load(row, at, count) - largest) * factor))


@njit(fastmath=FASTMATH, error_model="numpy")
def _sample_row(
    row: Any, temperature: Any, top_p: Any, top_k: Any, min_p: Any, first: Any, second: Any, weights: Any, bounds: Any
) -> int:
    """The row's token; -1 if it is bad. weights [V] float32, bounds [V] int32: work space."""
    vocab = row.shape[0]
    size = int32(0)
    top = int32(-0x80000000)
    for i in range(vocab):
        bits = bits_of_float(widen(row[i]))
        size = max(size, magnitude(bits))
        top = max(top, ordered(bits))
    if size >= int32(0x7F800000):
        return -1
    if temperature <= float32(0.0):
        likeliest = 0
        while ordered(bits_of_float(widen(row[likeliest]))) != top:
            likeliest += 1
        return likeliest
    largest = float_of_bits(ordered(top))
    factor = float32(1.0) / temperature
    whole = vocab - vocab % LANES
    for i in range(0, whole, LANES):
        _weigh_lanes(row, largest, factor, weights, i, LANES)
    if whole < vocab:
        _weigh_lanes(row, largest, factor, weights, whole, vocab - whole)
    floor = int32(0)
    if 0 < top_k < vocab:
        floor = _top_k_cutoff(weights, top_k)
    if min_p > float32(0.0):
        floor = max(floor, min(bits_of_float(min_p), int32(_ONE_BITS)))
    winner = _race(weights, floor, first, second, bounds)
    if top_p >= float32(1.0):
        return winner
    # Who wins among all wins among the likeliest, too, if it is one of them. It mostly is: where they end need not be found then.
    if _mass(weights, bits_of_float(weights[winner]) + int32(1)) < float32(top_p) * _mass(weights, floor):
        return winner
    return _race(weights, _top_p_cutoff(weights, floor, top_p), first, second, bounds)


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
    """Each of [N] rows draws from softmax(logits / temperature) cut to top_k and to min_p of the likeliest, then to top_p (0, 0
    and 1: off); of temperature 0 takes its likeliest. num_shares: that rows are dealt out to.

    An exponential race: token i's time is an exponential draw keyed by (key0, key1, i) over its weight; the first wins. Which
    token that is depends on the row alone, and hardly ever on the last bits of the logits.
    """
    for share in prange(num_shares):
        weights, bounds = np.empty(logits.shape[1], np.float32), np.empty(logits.shape[1], np.int32)
        for n in range(share, logits.shape[0], num_shares):
            drawn = _sample_row(logits[n], temperature[n], top_p[n], top_k[n], min_p[n], key0[n], key1[n], weights, bounds)
            bad[n] = drawn < 0
            ids[n] = max(drawn, 0)


sample_serial = njit(**_OPTIONS)(_sample)
sample_parallel = njit(**_OPTIONS, parallel=True)(named("_sample_parallel", _sample))
