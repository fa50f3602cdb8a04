"""Samples a token from one row of logits by an exponential race (Numba), and finds whether that token is within top_p.

Token i's time is an exponential random number keyed by (key0, key1, i), divided by its weight e**((logit - largest) / temperature).
The token with the earliest time wins.

The weights of nearly all tokens need not be computed. A uniform random number is below the exponential one made from the same bits.
So a token is certainly later if its uniform number is above (earliest time so far) times (an upper bound of its weight). The upper
bound comes from the largest logit of the token's stripe. For most tokens the only work is then the uniform number, which is a hash
of the token's index.

Weights are added up only for top_p: first approximately, with a known error, and exactly only in the rare cases in which that error
matters.

Arguments of the functions below: row [V] logits (float32 or bfloat16 bits), V vocabulary; tops [S] float32, the largest logit of
each of S stripes of STRIPE tokens; largest, that of the row; factor, 1 / temperature; heaviest [S] float32, an upper bound of the
weights in each stripe; floor, the bits (int32) of the least weight that takes part, 0 for all."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, float64, int32, int64, njit, uint32

from engine.cpu.kernels.bits import (
    FASTMATH,
    FETCHED_BYTES,
    UNMIXED_BITS,
    bits_of_element,
    bits_of_float,
    exp,
    exponential,
    fetch_lines,
    float_of_bits,
    magnitude,
    ordered,
    value_of_bits,
    widen,
)
from engine.cpu.kernels.lanes import (
    ROUGH_ERROR,
    at_least,
    bits_of,
    first_lanes,
    float_of_hashes,
    hashes,
    hashes_up_to,
    kept,
    kept_up_to,
    lanes_of,
    load,
    lower_hashes,
    rough_exp2,
    store,
    total_of,
    unmixed_hashes,
    up_to,
)
from engine.cpu.kernels.vectors import LANES

# Python's error model puts a branch for zero before each division, which keeps loops from being vectorised.
_HELPER: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy"}
STRIPE = 256  # tokens that share one upper bound, from their largest logit
_AT_ONCE = 4 * LANES  # random numbers between two comparisons with the earliest time
_ROUNDING = 1.00002  # factor that allows for the rounding of a bound
_LOG2_E = 1.4426950408889634
_INFINITY_BITS = 0x7F800000


@njit(**_HELPER)
def stripe_tops(row: Any, tops: Any) -> bool:
    """Fills tops [S] with the largest logit of each stripe of STRIPE tokens. Returns whether all logits of the row are finite; if
    they are not, tops has no meaning."""
    size = magnitude(bits_of_element(row[0]))
    for stripe in range(tops.shape[0]):
        own = row[STRIPE * stripe : min(STRIPE * (stripe + 1), row.shape[0])]
        top = ordered(bits_of_element(own[0]))  # as integers, whose maximum vectorises and is not misled by NaN
        for i in range(own.shape[0]):
            bits = bits_of_element(own[i])
            size = max(size, magnitude(bits))
            top = max(top, ordered(bits))
        tops[stripe] = value_of_bits(ordered(top))
    return value_of_bits(size) < float32(np.inf)


@njit(**_HELPER)
def first_of(row: Any, tops: Any, largest: Any) -> int:
    """Returns the lowest token whose logit is `largest`, the largest logit of the row. tops: as stripe_tops has filled it."""
    stripe = 0
    while tops[stripe] != largest:
        stripe += 1
    token = STRIPE * stripe
    while widen(row[token]) != largest:
        token += 1
    return token


@njit(**_HELPER)
def weigh_stripes(tops: Any, largest: Any, factor: Any, heaviest: Any) -> None:
    """Fills `heaviest` [S] with an upper bound of the weights in each stripe, from the stripes' largest logits, tops [S]."""
    for stripe in range(tops.shape[0]):
        heaviest[stripe] = exp((tops[stripe] - largest) * factor) * float32(_ROUNDING)


@njit(inline="always", **_HELPER)
def _weights(row: Any, at: int, count: int, largest: Any, factor: Any) -> Any:
    return exp((load(row, at, count) - largest) * factor)


@njit(inline="always", **_HELPER)
def _latest(best: Any, heaviest: Any) -> Any:
    """Returns the largest hash (uint32) with which a token of weight `heaviest` or less can have time `best` or an earlier one. The
    low UNMIXED_BITS bits are all set, because the result is compared with hashes that lack their last step, which changes only
    these bits."""
    limit = float64(best) * float64(heaviest) * float64(2.0**32) * _ROUNDING
    if not limit < 2.0**32 - 2.0**UNMIXED_BITS:
        return uint32(0xFFFFFFFF)
    return uint32(int64(limit) | int64(2**UNMIXED_BITS - 1))


@njit(**_HELPER)
def _look(
    row: Any,
    at: int,
    count: int,
    unmixed: Any,  # the tokens' hashes without the last step
    largest: Any,
    factor: Any,
    floor: Any,
    drawn: Any,  # [2, 16] int32: work space
    best: Any,
    winner: int,
) -> tuple[Any, int]:
    """Updates the winner of the race with `count` tokens from index `at` on, of which those with a weight of at least `floor` take
    part. best, winner: the earliest time so far and its token. Returns the new time and token; of equal times the lower token
    wins."""
    own, words = _weights(row, at, count, largest, factor), hashes(unmixed)
    uniform = (float_of_hashes(words) + float32(0.5)) * float32(2.0**-32)
    marks = up_to(uniform, own * (best * float32(_ROUNDING))) & at_least(bits_of(own), floor) & ((int64(1) << count) - int64(1))
    if marks == 0:
        return best, winner
    store(drawn, 0, LANES, bits_of(own))
    store(drawn, LANES, LANES, words)
    for lane in range(LANES):
        if (marks >> lane) & 1:
            time = exponential(uint32(drawn[1, lane])) / float_of_bits(drawn[0, lane])
            if time < best or (time == best and at + lane < winner):
                best, winner = time, at + lane
    return best, winner


@njit(inline="always", **_HELPER)
def _race_stripe(
    row: Any,
    begin: int,
    end: int,
    heaviest: Any,
    largest: Any,
    factor: Any,
    floor: Any,
    first: Any,
    second: Any,
    drawn: Any,
    best: Any,
    winner: int,
) -> tuple[Any, int]:
    """Updates the winner of the race with the tokens from begin to below end. best, winner: the earliest time so far and its token.
    Returns the new time and token. heaviest: a scalar, an upper bound of these tokens' weights. first, second: the keys key0 and
    key1. drawn: work space, as in _look."""
    latest = _latest(best, heaviest)
    whole = end - (end - begin) % _AT_ONCE
    for at in range(begin, whole, _AT_ONCE):
        at_1, at_2, at_3 = at + LANES, at + 2 * LANES, at + 3 * LANES
        words, words_1 = unmixed_hashes(at, first, second), unmixed_hashes(at_1, first, second)
        words_2, words_3 = unmixed_hashes(at_2, first, second), unmixed_hashes(at_3, first, second)
        if hashes_up_to(lower_hashes(lower_hashes(words, words_1), lower_hashes(words_2, words_3)), latest):
            if hashes_up_to(words, latest):
                best, winner = _look(row, at, int64(LANES), words, largest, factor, floor, drawn, best, winner)
            if hashes_up_to(words_1, latest):
                best, winner = _look(row, at_1, int64(LANES), words_1, largest, factor, floor, drawn, best, winner)
            if hashes_up_to(words_2, latest):
                best, winner = _look(row, at_2, int64(LANES), words_2, largest, factor, floor, drawn, best, winner)
            if hashes_up_to(words_3, latest):
                best, winner = _look(row, at_3, int64(LANES), words_3, largest, factor, floor, drawn, best, winner)
            latest = _latest(best, heaviest)
    for at in range(whole, end, LANES):
        words = unmixed_hashes(at, first, second)
        best, winner = _look(row, at, min(LANES, end - at), words, largest, factor, floor, drawn, best, winner)
    return best, winner


@njit(**_HELPER)
def _in_order(heaviest: Any, floor: Any, order: Any) -> int:
    """Writes to `order` [S] int32 the numbers of the stripes that may hold weights of at least `floor`, and returns the number of
    these stripes. Stripes whose upper bound is at least the mean come first, because heavy tokens give early times, which let more
    of the other tokens be skipped."""
    mean, num_heavy, num_light, last = heaviest.mean(), 0, 0, heaviest.shape[0] - 1
    for stripe in range(heaviest.shape[0]):  # without branches, because which stripe is heavy cannot be predicted
        order[num_heavy], order[last - num_light] = stripe, stripe
        takes_part, is_heavy = bits_of_float(heaviest[stripe]) >= floor, heaviest[stripe] >= mean
        num_heavy += int64(takes_part and is_heavy)
        num_light += int64(takes_part and not is_heavy)
    for number in range(num_light):
        order[num_heavy + number] = order[last + 1 - num_light + number]
    return num_heavy + num_light


@njit(**_HELPER)
def race(
    row: Any,
    heaviest: Any,
    largest: Any,
    factor: Any,
    floor: Any,  # bits of a weight: lighter tokens take no part
    first: Any,
    second: Any,
    order: Any,  # [stripes] int32, work space
    drawn: Any,  # [2, 16] int32, work space
    ahead: int,  # elements from this row to the row that is raced next, which is fetched meanwhile
) -> int:
    """Returns the token that wins the race among those with a weight of at least `floor`; 0 if there is none. first, second: the
    keys key0 and key1 of the random numbers."""
    vocab = row.shape[0]
    best, winner = float32(np.inf), 0
    for number in range(_in_order(heaviest, floor, order)):
        stripe = int64(order[number])
        begin, end = STRIPE * stripe, min(STRIPE * (stripe + 1), vocab)
        for at in range(begin, end, FETCHED_BYTES // row.itemsize):
            fetch_lines(row, at + ahead)
        heavy = heaviest[stripe]
        best, winner = _race_stripe(row, begin, end, heavy, largest, factor, floor, first, second, drawn, best, winner)
    return winner


@njit(**_HELPER)
def bits_of_weight(logit: Any, largest: Any, factor: Any, drawn: Any) -> Any:
    """Returns the bits (int32) of the weight of a token with this logit, as the race computes it. drawn: [2, 16] int32, work
    space."""
    store(drawn, 0, LANES, bits_of(exp((lanes_of(logit) - largest) * factor)))
    return drawn[0, 0]


@njit(inline="always", **_HELPER)
def _rough_masses(row: Any, begin: int, end: int, largest: Any, unit: Any, limit: Any) -> tuple[Any, Any]:
    """Returns two approximate sums of weights over a row's tokens from begin to below end: of all tokens, and of those whose logit
    is at most `limit`. A weight is 2 ** ((logit - largest) * unit), with a relative error up to ROUGH_ERROR."""
    total, light = lanes_of(float32(0.0)), lanes_of(float32(0.0))
    whole = end - (end - begin) % LANES
    for at in range(begin, whole, LANES):
        logits = load(row, at, LANES)
        own = rough_exp2((logits - largest) * unit)
        total += own
        light += kept_up_to(own, logits, limit)
    if whole < end:
        logits = load(row, whole, end - whole)
        own = first_lanes(rough_exp2((logits - largest) * unit), end - whole)
        total += own
        light += kept_up_to(own, logits, limit)
    return total_of(total), total_of(light)


@njit(**_HELPER)
def _roughly_within(row: Any, heaviest: Any, largest: Any, factor: Any, top_p: Any, winner: int) -> int:
    """Compares the mass (sum of weights) of the tokens heavier than `winner` with top_p times the mass of all tokens, by
    approximate weights. Returns 1 if it is less, 0 if it is not, and -1 if the two are too close to decide."""
    limit = widen(row[winner])
    unit, rest = factor * float32(_LOG2_E), 1.0 - float64(top_p)
    vocab = row.shape[0]
    ahead = float64(0.0)  # upper bound of the mass of the stripes that are not added up yet
    for stripe in range(heaviest.shape[0]):
        ahead += heaviest[stripe] * min(STRIPE, vocab - STRIPE * stripe)
    total, light = float64(0.0), float64(0.0)
    for stripe in range(heaviest.shape[0]):
        begin, end = STRIPE * stripe, min(STRIPE * (stripe + 1), vocab)
        masses = _rough_masses(row, begin, end, largest, unit, limit)
        total += masses[0]
        light += masses[1]
        ahead -= heaviest[stripe] * (end - begin)
        if light * (1.0 - ROUGH_ERROR) > rest * (total * (1.0 + ROUGH_ERROR) + max(ahead, 0.0)):
            return 1
    return 0 if light * (1.0 + ROUGH_ERROR) < rest * total * (1.0 - ROUGH_ERROR) else -1


@njit(**_HELPER)
def _mass(row: Any, heaviest: Any, largest: Any, factor: Any, floor: Any) -> Any:
    """Returns the sum (float64) of those of a row's weights whose bits are at least `floor`."""
    mass = float64(0.0)
    for stripe in range(heaviest.shape[0]):
        if bits_of_float(heaviest[stripe]) < floor:
            continue
        begin, end = STRIPE * stripe, min(STRIPE * (stripe + 1), row.shape[0])
        total = lanes_of(float32(0.0))
        for at in range(begin, end, LANES):
            count = min(LANES, end - at)
            own = first_lanes(_weights(row, at, count, largest, factor), count)
            total += kept(own, bits_of(own), floor, float32(0.0))
        mass += total_of(total)
    return mass


@njit(**_HELPER)
def is_within(row: Any, heaviest: Any, largest: Any, factor: Any, floor: Any, top_p: Any, winner: int, winner_bits: Any) -> bool:
    """Returns whether top_p keeps the winner: the tokens heavier than the winner hold less than top_p of the sum of all weights of
    at least `floor`. winner_bits: the bits of the winner's weight."""
    if floor == int32(0):
        found = _roughly_within(row, heaviest, largest, factor, top_p, winner)
        if found >= 0:
            return found == 1
    above = _mass(row, heaviest, largest, factor, winner_bits + int32(1))
    return above < float64(top_p) * _mass(row, heaviest, largest, factor, floor)


@njit(**_HELPER)
def _kth(values: Any, num: int, k: int) -> Any:
    """Returns the k-th largest of the first num values (float32), where equal values count separately. k is from 1 to num."""
    low, high = ordered(bits_of_float(values[0])), ordered(bits_of_float(values[0]))
    for i in range(num):
        bits = ordered(bits_of_float(values[i]))
        low, high = min(low, bits), max(high, bits)
    while low < high:
        middle = int32((int64(low) + int64(high) + 1) >> 1)
        limit, count = float_of_bits(ordered(middle)), float32(0.0)  # a float32 count is exact up to 2**24
        for i in range(num):
            count += float32(1.0) if values[i] >= limit else float32(0.0)
        if count >= k:
            low = middle
        else:
            high = int32(middle - 1)
    return float_of_bits(ordered(low))


@njit(**_HELPER)
def _gather_from(row: Any, tops: Any, bound: Any, values: Any) -> int:
    """Copies the logits of at least `bound` to the start of values [V + 1] float32, in the order of their tokens. Returns how many
    there are."""
    num, bounds = 0, lanes_of(bound)
    for stripe in range(tops.shape[0]):
        if tops[stripe] >= bound:
            end = min(STRIPE * (stripe + 1), row.shape[0])
            for at in range(STRIPE * stripe, end, LANES):
                if up_to(bounds, load(row, at, min(LANES, end - at))):
                    for token in range(at, min(at + LANES, end)):
                        values[num] = widen(row[token])
                        num += values[num] >= bound
    return num


@njit(**_HELPER)
def kth_logit(row: Any, tops: Any, k: int) -> Any:
    """Returns the k-th largest of a row's logits, for k from 1 to V, where equal logits count separately. tops: as stripe_tops
    fills it.

    To save work, it first collects only logits that are at least the k-th largest of tops (or the least of tops, if there are fewer
    than k). Only if these are fewer than k, it uses all logits."""
    values = np.empty(row.shape[0] + 1, np.float32)
    bound = _kth(tops, tops.shape[0], min(k, tops.shape[0]))
    num = _gather_from(row, tops, bound, values)
    if num < k:
        num = _gather_from(row, tops, float32(-np.inf), values)
    return _kth(values, num, k)
