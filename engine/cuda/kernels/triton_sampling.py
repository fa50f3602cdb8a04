"""Samples tokens from logits on the GPU (Triton), without a sort. Reference implementations: reference.{greedy, sample, hash32}.

A row is cut into tiles, and each tile has a program of its own. The tiles depend on the vocabulary alone, so a row gets the same
token, and every sum the same bits, alone or in any batch.

Sampling is an exponential race (reference.sample): each token has a weight (its probability, up to a factor) and a random time, and
the earliest token that top_k, top_p and min_p keep is sampled. These settings keep the heaviest tokens. So a token cannot be
sampled if a heavier token is earlier. The other tokens, in the order of their times, are called the row's front; each is heavier
than the one before. The first token of the front that is kept is the sampled one. A token is kept if fewer than top_k tokens are
heavier than it, or if the weights of these tokens are less than top_p of the sum of all weights (the mass).

1. `_survey_kernel` reads all logits once and finds each tile's largest logit, mass and front. A tile's front has some ten tokens.
2. `_propose_kernel` merges the results of a row's tiles. Greedy rows, and rows without top_k and top_p, are then finished.
3. `_weigh_kernel` adds up, for each token of the front, how many tokens are heavier, or what they weigh; it skips tiles without
   such tokens.
4. `_choose_kernel` takes the first token that is kept.

With both top_k and top_p, the mass is that of the k heaviest tokens. The second step then searches for the k-th largest weight. It
reads only those stripes (parts of a tile) that may have heavier tokens, once where these tokens are at most as many as all stripes.

A front may be longer than the part of it that is stored (MOST_FRONT tokens of a tile, MOST_PIVOTS of a row). If none of the stored
tokens is kept, which is rare, the fourth step continues alone, with two passes over the logits for each further token of the front.

Shapes: N rows, V vocabulary, S tiles of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels.sizes import ceil_div, power_of_two

TILE_TOKENS = 4096
MOST_FRONT, MOST_PIVOTS = 32, 31  # at most LANES, and one less
# Each tile has a record of numbers and one of integers, and so has each row, behind its tiles'. A record has four parts of LANES.
LANES = 32
RECORD = 4 * LANES
# The first part holds what has a number below, the second the front, the third largest logits of stripes (of integers: stripes
# that a search looks at), the fourth the sums above each pivot, of which the last is the mass that is kept.
FRONT_PART, STRIPES_PART, SUMS_PART = tl.constexpr(LANES), tl.constexpr(2 * LANES), tl.constexpr(3 * LANES)
LANE, RECORD_SIZE = tl.constexpr(LANES), tl.constexpr(RECORD)
TOP, MASS, CUTOFF = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # numbers
TOP_AT, IS_BAD, NUM_FRONT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # integers of a tile
IS_OPEN, NUM_PIVOTS = tl.constexpr(0), tl.constexpr(1)  # integers of a row
NOWHERE = tl.constexpr(0x7FFFFFFF)
ONE = tl.constexpr(0x3F800000)  # the bits of 1.0, the largest weight


@triton.jit
def hash32(index, key0, key1):
    """Returns 32 pseudorandom bits as uint32: a hash of (index, key0, key1), each uint32, by two rounds of a multiply-xorshift
    finaliser. The CPU computes the same bits."""
    h = (index * 0x9E3779B1).to(tl.uint32) ^ key0
    h = ((h ^ (h >> 16)) * 0x85EBCA6B).to(tl.uint32)
    h = ((h ^ (h >> 13)) * 0xC2B2AE35).to(tl.uint32)
    h = ((h ^ (h >> 16)) + key1).to(tl.uint32)
    h = ((h ^ (h >> 15)) * 0x2C1B3C6D).to(tl.uint32)
    h = ((h ^ (h >> 12)) * 0x297A2D39).to(tl.uint32)
    return h ^ (h >> 15)


@triton.jit
def exponential(bits):
    """Returns -log(1 - (bits + 1/2) / 2**32) in float32, never 0: an exponentially distributed random number with mean 1 from
    uniform bits (uint32). Below 1/64 it is computed by a series, because small numbers need their relative precision."""
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = u * (1.0 + u * (0.5 + u * (0.33333334 + u * 0.25)))
    return tl.where(u < 0.015625, series, -tl.log(tl.maximum(1.0 - u, 2.9802322e-8)))


@triton.jit
def _weights(logits, at, inside, top, factor):
    """Returns the weights exp((logit - top) * factor) of the tokens `at` of a row, in float32; 0 where `inside` is false. top: the
    logit whose weight is 1. factor: 1 / temperature."""
    logit = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.exp((logit - top) * factor)


@triton.jit
def _times(at, own, first, second):
    """Returns the random times of the tokens `at` in the exponential race, in float32; the earliest token wins. own: the tokens'
    weights. first, second: the row's keys key0 and key1."""
    return exponential(hash32(at.to(tl.uint32), first, second)) / own


# V is specialised: a multiple of 16 tells that every row is aligned.
@triton.jit
def _survey_kernel(
    logits,  # [N, V]
    temperature,  # [N] float32; 0 and below: the largest logit wins
    top_p,  # [N] float32
    top_k,  # [N] int32
    min_p,  # [N] float32
    key0,  # [N] int64 below 2**32
    key1,
    numbers,  # [N, S + 1, RECORD] float32
    integers,  # [N, S + 1, RECORD] int32
    V,
    TILE: tl.constexpr,
    STRIPE: tl.constexpr,
    FRONT: tl.constexpr,
):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = (row * (tl.num_programs(1) + 1) + tile) * RECORD_SIZE
    numbers += place
    integers += place
    at = tile * TILE + tl.arange(0, TILE)
    logit = tl.load(logits + row * V + at, mask=at < V, other=float("-inf")).to(tl.float32)
    finite = (logit == logit) & (tl.abs(logit) != float("inf"))
    is_bad = tl.max(((at < V) & ~finite).to(tl.int32), axis=0)
    logit = tl.where(finite, logit, float("-inf"))
    top = tl.max(logit, axis=0)
    tl.store(numbers + TOP, top)
    tl.store(integers + TOP_AT, tl.min(tl.where(logit == top, at, NOWHERE), axis=0))
    tl.store(integers + IS_BAD, is_bad)
    warmth = tl.load(temperature + row)
    if (warmth > 0.0) & (is_bad == 0):
        k, p = tl.load(top_k + row), tl.load(top_p + row)
        is_cut = (k > 0) & (k < V)
        if is_cut & (p < 1.0):
            stripes = tl.max(tl.reshape(logit, [TILE // STRIPE, STRIPE]), axis=1)
            tl.store(numbers + STRIPES_PART + tl.arange(0, TILE // STRIPE), stripes)
        own = tl.exp((logit - top) * (1.0 / warmth))
        tl.store(numbers + MASS, tl.sum(own, axis=0))
        times = _times(at, own, tl.load(key0 + row).to(tl.uint32), tl.load(key1 + row).to(tl.uint32))
        most = tl.where(is_cut | (p < 1.0) | (tl.load(min_p + row) > 0.0), FRONT, 1)
        num, floor, running = 0, float("-inf"), 1
        while running > 0:
            open_times = tl.where(logit > floor, times, float("inf"))
            earliest = tl.min(open_times, axis=0)  # finite, as the tile's heaviest token is among them
            winner = tl.min(tl.where(open_times == earliest, at, NOWHERE), axis=0)
            floor = tl.max(tl.where(at == winner, logit, float("-inf")), axis=0)
            tl.store(numbers + FRONT_PART + num, floor)
            tl.store(integers + FRONT_PART + num, winner)
            num += 1
            running = ((num < most) & (floor < top)).to(tl.int32)
        tl.store(integers + NUM_FRONT, num)


@triton.jit
def _added(above, unit, count1, count2, count3, count4, count5, count6, count7):
    """Returns the seven counters (int32 tensors), of which the n-th is increased by 1 where `above` is at least n times unit."""
    count1 += (above >= unit).to(tl.int32)
    count2 += (above >= 2 * unit).to(tl.int32)
    count3 += (above >= 3 * unit).to(tl.int32)
    count4 += (above >= 4 * unit).to(tl.int32)
    count5 += (above >= 5 * unit).to(tl.int32)
    count6 += (above >= 6 * unit).to(tl.int32)
    count7 += (above >= 7 * unit).to(tl.int32)
    return count1, count2, count3, count4, count5, count6, count7


@triton.jit
def _digit(k, count1, count2, count3, count4, count5, count6, count7):
    """Returns for how many of the seven counters (tensors) the sum over the tensor is at least k. This number is the next three
    bits of the weight for which _kth_weight searches."""
    digit = (tl.sum(count1) >= k).to(tl.int32) + (tl.sum(count2) >= k).to(tl.int32) + (tl.sum(count3) >= k).to(tl.int32)
    digit += (tl.sum(count4) >= k).to(tl.int32) + (tl.sum(count5) >= k).to(tl.int32) + (tl.sum(count6) >= k).to(tl.int32)
    return digit + (tl.sum(count7) >= k).to(tl.int32)


@triton.jit
def _stripe_bits(numbers, start, num_stripes, top, factor, PER_TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the largest weight of each of BLOCK stripes (parts of a tile), from stripe `start` on, as the bits of a float32
    (int32); -1 for stripes after the last. numbers: the row's records, in which _survey_kernel has stored the stripes' largest
    logits. PER_TILE: number of stripes in a tile."""
    stripe = start + tl.arange(0, BLOCK)
    at = stripe // PER_TILE * RECORD_SIZE + STRIPES_PART + stripe % PER_TILE
    return tl.where(stripe < num_stripes, _weights(numbers, at, stripe < num_stripes, top, factor).to(tl.int32, bitcast=True), -1)


@triton.jit
def _place(records, entry, PART: tl.constexpr):
    """Returns where an entry of a list is kept that has LANE places in each of a row's records. records: the row's numbers or
    integers. entry: its index in the list. PART: where the places of a record begin."""
    return records + entry // LANE * RECORD_SIZE + PART + entry % LANE


@triton.jit
def _kth_weight(
    logits, V, top, factor, k, numbers, integers, num_stripes, STRIPE: tl.constexpr, PER_TILE: tl.constexpr, BLOCK: tl.constexpr
):
    """Returns the k-th largest weight of a row. Weights are between 0 and 1, so they sort as their bits do; each round of a search
    finds three bits.

    The first search looks at the largest weight of each stripe. The k-th largest of these is a lower bound of the result, because
    at least k tokens are as heavy. Fewer than k stripes have a heavier token. These stripes are read, and the weights above the
    bound are listed, in the part of the tiles' records that later holds sums. If the list has a place for each of them, the last
    search looks at the list alone. If not, the same reading has found three bits of the result, and with them a higher bound."""
    bound = 0
    unit = 1 << 27
    for _ in range(0, 10):
        c1 = tl.zeros([BLOCK], tl.int32)
        c2, c3, c4, c5, c6, c7 = c1, c1, c1, c1, c1, c1
        for start in range(0, num_stripes, BLOCK):
            bits = _stripe_bits(numbers, start, num_stripes, top, factor, PER_TILE, BLOCK)
            c1, c2, c3, c4, c5, c6, c7 = _added(bits - bound, unit, c1, c2, c3, c4, c5, c6, c7)
        bound += _digit(k, c1, c2, c3, c4, c5, c6, c7) * unit
        unit = unit >> 3
    num = 0
    for start in range(0, num_stripes, BLOCK):
        found = (_stripe_bits(numbers, start, num_stripes, top, factor, PER_TILE, BLOCK) > bound).to(tl.int32)
        place = num + tl.cumsum(found, axis=0) - found
        tl.store(_place(integers, place, STRIPES_PART), start + tl.arange(0, BLOCK), mask=found > 0)
        num += tl.sum(found, axis=0)
    tl.debug_barrier()  # other threads than those that listed the stripes read them
    low, width = bound, ONE - bound + 1  # the result's bits are among `width` numbers from `low` on
    num_places = num_stripes // PER_TILE * LANE
    size = num_places + 1
    while (width > 1) & (size > num_places):
        unit = (width + 7) // 8
        size = 0  # number of weights above `low`
        c1 = tl.zeros([BLOCK], tl.int32)
        c2, c3, c4, c5, c6, c7 = c1, c1, c1, c1, c1, c1
        for start in range(0, num * STRIPE, BLOCK):
            entry = start + tl.arange(0, BLOCK)
            place = entry // STRIPE
            stripe = tl.load(_place(integers, place, STRIPES_PART), mask=place < num, other=0)
            at = stripe * STRIPE + entry % STRIPE
            inside = (place < num) & (at < V)
            weight = _weights(logits, at, inside, top, factor)
            bits = tl.where(inside, weight.to(tl.int32, bitcast=True), -1)
            c1, c2, c3, c4, c5, c6, c7 = _added(bits - low, unit, c1, c2, c3, c4, c5, c6, c7)
            found = (bits > low).to(tl.int32)
            place = size + tl.cumsum(found, axis=0) - found
            tl.store(_place(numbers, place, SUMS_PART), weight, mask=(found > 0) & (place < num_places))
            size += tl.sum(found, axis=0)
        low += _digit(k, c1, c2, c3, c4, c5, c6, c7) * unit
        width = tl.where(size < k, 1, unit)  # with fewer than k above it, `low` is the result
    tl.debug_barrier()  # other threads than those that listed the weights read them
    while width > 1:
        unit = (width + 7) // 8
        c1 = tl.zeros([BLOCK], tl.int32)
        c2, c3, c4, c5, c6, c7 = c1, c1, c1, c1, c1, c1
        for start in range(0, size, BLOCK):
            entry = start + tl.arange(0, BLOCK)
            weight = tl.load(_place(numbers, entry, SUMS_PART), mask=entry < size, other=0.0)
            bits = tl.where(entry < size, weight.to(tl.int32, bitcast=True), -1)
            c1, c2, c3, c4, c5, c6, c7 = _added(bits - low, unit, c1, c2, c3, c4, c5, c6, c7)
        low += _digit(k, c1, c2, c3, c4, c5, c6, c7) * unit
        width = unit
    return tl.cast(low, tl.float32, bitcast=True)


# The number of tiles is V's. Results may begin anywhere in memory that has those of more rows.
@triton.jit(do_not_specialize=["num_tiles"], do_not_specialize_on_alignment=["ids", "bad"])
def _propose_kernel(
    logits,  # [N, V]
    temperature,  # [N], as of _survey_kernel
    top_p,
    top_k,
    min_p,
    key0,
    key1,
    numbers,  # [N, S + 1, RECORD] float32
    integers,  # [N, S + 1, RECORD] int32
    ids,  # [N] int32
    bad,  # [N] int32
    V,
    num_tiles,
    STRIPE: tl.constexpr,
    PER_TILE: tl.constexpr,
    PIVOTS: tl.constexpr,
    TILES: tl.constexpr,  # that are looked at together
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = row * (num_tiles + 1) * RECORD_SIZE
    numbers += place
    integers += place
    own_numbers, own_integers = numbers + num_tiles * RECORD_SIZE, integers + num_tiles * RECORD_SIZE
    largest = tl.full([TILES], float("-inf"), tl.float32)
    largest_at = tl.full([TILES], 0, tl.int32)
    odd = tl.zeros([TILES], tl.int32)
    for start in range(0, num_tiles, TILES):
        tile = start + tl.arange(0, TILES)
        logit = tl.load(numbers + tile * RECORD_SIZE + TOP, mask=tile < num_tiles, other=float("-inf"))
        odd |= tl.load(integers + tile * RECORD_SIZE + IS_BAD, mask=tile < num_tiles, other=0)
        at = tl.load(integers + tile * RECORD_SIZE + TOP_AT, mask=tile < num_tiles, other=NOWHERE)
        largest_at = tl.where(logit > largest, at, largest_at)
        largest = tl.maximum(largest, logit)
    top, is_bad = tl.max(largest, axis=0), tl.max(odd, axis=0)
    drawn = tl.min(tl.where(largest == top, largest_at, NOWHERE), axis=0)
    is_open = 0
    warmth = tl.load(temperature + row)
    if (warmth > 0.0) & (is_bad == 0):
        factor = 1.0 / warmth
        k, p, cutoff = tl.load(top_k + row), tl.load(top_p + row), tl.minimum(tl.load(min_p + row), 1.0)
        first, second = tl.load(key0 + row).to(tl.uint32), tl.load(key1 + row).to(tl.uint32)
        is_cut = (k > 0) & (k < V)
        if is_cut & (p < 1.0):
            num_stripes = num_tiles * PER_TILE
            kth = _kth_weight(logits + row * V, V, top, factor, k, numbers, integers, num_stripes, STRIPE, PER_TILE, BLOCK)
            cutoff = tl.maximum(cutoff, kth)
        mass = tl.zeros([TILES], tl.float32)
        for start in range(0, num_tiles, TILES):
            tile = start + tl.arange(0, TILES)
            own = _weights(numbers, tile * RECORD_SIZE + TOP, tile < num_tiles, top, factor)
            mass += own * tl.load(numbers + tile * RECORD_SIZE + MASS, mask=tile < num_tiles, other=0.0)
        num, floor, running = 0, float("-inf"), 1
        while running > 0:
            least = tl.full([BLOCK], float("inf"), tl.float32)
            least_at = tl.full([BLOCK], NOWHERE, tl.int32)
            height = tl.full([BLOCK], float("-inf"), tl.float32)
            known_until = tl.full([BLOCK], float("inf"), tl.float32)  # until when no token is missing
            for start in range(0, num_tiles * LANE, BLOCK):
                entry = start + tl.arange(0, BLOCK)
                tile, number = entry // LANE * RECORD_SIZE, entry % LANE
                length = tl.load(integers + tile + NUM_FRONT, mask=entry < num_tiles * LANE, other=0)
                inside = number < length
                logit = tl.load(numbers + tile + FRONT_PART + number, mask=inside, other=float("-inf"))
                at = tl.load(integers + tile + FRONT_PART + number, mask=inside, other=NOWHERE)
                own = tl.exp((logit - top) * factor)
                time = _times(at, own, first, second)
                ends = inside & (number + 1 == length) & (logit < tl.load(numbers + tile + TOP, mask=inside, other=0.0))
                known_until = tl.where(ends, tl.minimum(known_until, time), known_until)
                faster = inside & (logit > floor) & (own >= cutoff) & ((time < least) | ((time == least) & (at < least_at)))
                faster &= time < float("inf")
                least = tl.where(faster, time, least)
                least_at = tl.where(faster, at, least_at)
                height = tl.where(faster, logit, height)
            best = tl.min(least, axis=0)
            winner = tl.min(tl.where(least == best, least_at, NOWHERE), axis=0)
            is_cut_short = is_cut | (p < 1.0) | (cutoff > 0.0)
            if (winner == NOWHERE) | (is_cut_short & (best > tl.min(known_until, axis=0))):
                running, is_open = 0, 1  # tiles have not stored what comes next
            else:
                floor = tl.max(tl.where(least_at == winner, height, float("-inf")), axis=0)
                weight = tl.exp((floor - top) * factor)
                tl.store(own_numbers + FRONT_PART + num, weight)
                tl.store(own_integers + FRONT_PART + num, winner)
                num += 1
                if (num == 1) & ((weight >= 1.0) | ~(is_cut | (p < 1.0))):
                    drawn, running = winner, 0
                else:
                    is_open = 1
                    running = ((num < PIVOTS) & (weight < 1.0)).to(tl.int32)
        tl.store(own_numbers + TOP, top)
        tl.store(own_numbers + MASS, tl.sum(mass, axis=0))
        tl.store(own_numbers + CUTOFF, cutoff)
        tl.store(own_integers + NUM_PIVOTS, num)
    tl.store(own_integers + IS_OPEN, is_open)
    tl.store(ids + row, drawn)
    tl.store(bad + row, is_bad.to(tl.int32))


@triton.jit
def _weigh_kernel(
    logits,  # [N, V]
    temperature,  # [N], as of _survey_kernel
    top_p,
    numbers,  # [N, S + 1, RECORD] float32
    integers,  # [N, S + 1, RECORD] int32
    V,
    TILE: tl.constexpr,
):
    row, tile, num_tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    place = row * (num_tiles + 1) * RECORD_SIZE
    own_numbers, own_integers = numbers + place + num_tiles * RECORD_SIZE, integers + place + num_tiles * RECORD_SIZE
    if tl.load(own_integers + IS_OPEN) == 0:
        return
    sums = numbers + place + tile * RECORD_SIZE + SUMS_PART
    num = tl.load(own_integers + NUM_PIVOTS)
    top, cutoff = tl.load(own_numbers + TOP), tl.load(own_numbers + CUTOFF)
    factor, by_mass = 1.0 / tl.load(temperature + row), tl.load(top_p + row) < 1.0
    heaviest = tl.exp((tl.load(numbers + place + tile * RECORD_SIZE + TOP) - top) * factor)
    lightest = tl.load(own_numbers + FRONT_PART, mask=num > 0, other=1.0)
    if (heaviest > lightest) | (by_mass & (cutoff > 0.0) & (heaviest >= cutoff)):
        at = tile * TILE + tl.arange(0, TILE)
        own = _weights(logits + row * V, at, at < V, top, factor)
        value = tl.where(by_mass, own, 1.0)
        for pivot in range(0, num):
            weight = tl.load(own_numbers + FRONT_PART + pivot)
            tl.store(sums + pivot, tl.sum(tl.where(own > weight, value, 0.0), axis=0))
        tl.store(sums + LANE - 1, tl.sum(tl.where(own >= cutoff, own, 0.0), axis=0))
    else:
        tl.store(sums + tl.arange(0, LANE), tl.zeros([LANE], tl.float32))


@triton.jit
def _above(logits, V, top, factor, floor, by_mass, BLOCK: tl.constexpr):
    """Returns, in float32, how many tokens of a row are heavier than `floor`; with by_mass, the sum of their weights instead."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        own = _weights(logits, at, at < V, top, factor)
        total += tl.where(own > floor, tl.where(by_mass, own, 1.0), 0.0)
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["num_tiles"], do_not_specialize_on_alignment=["ids"])
def _choose_kernel(
    logits,  # [N, V]
    temperature,  # [N], as of _survey_kernel
    top_p,
    top_k,
    key0,
    key1,
    numbers,  # [N, S + 1, RECORD] float32
    integers,  # [N, S + 1, RECORD] int32
    ids,  # [N] int32
    V,
    num_tiles,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = row * (num_tiles + 1) * RECORD_SIZE
    own_numbers, own_integers = numbers + place + num_tiles * RECORD_SIZE, integers + place + num_tiles * RECORD_SIZE
    if tl.load(own_integers + IS_OPEN) == 0:
        return
    logits += row * V
    num = tl.load(own_integers + NUM_PIVOTS)
    top, cutoff = tl.load(own_numbers + TOP), tl.load(own_numbers + CUTOFF)
    k, p, factor = tl.load(top_k + row), tl.load(top_p + row), 1.0 / tl.load(temperature + row)
    by_mass, is_cut = p < 1.0, (k > 0) & (k < V)
    lane = tl.arange(0, LANE)
    above = tl.zeros([LANE], tl.float32)
    for start in range(0, num_tiles, TILES):
        tile = start + tl.arange(0, TILES)
        at = (tile * RECORD_SIZE + SUMS_PART)[:, None] + lane[None, :]
        there = (tile < num_tiles)[:, None] & ((lane < num) | (lane == LANE - 1))[None, :]
        above += tl.sum(tl.load(numbers + place + at, mask=there, other=0.0), axis=0)
    kept = tl.where(cutoff > 0.0, tl.sum(tl.where(lane == LANE - 1, above, 0.0), axis=0), tl.load(own_numbers + MASS))
    target = tl.where(by_mass, p * kept, tl.where(is_cut, k.to(tl.float32), float("inf")))
    weight = tl.load(own_numbers + FRONT_PART + lane, mask=lane < num, other=0.0)
    is_kept = (lane < num) & ((above < target) | (weight >= 1.0))
    chosen = tl.min(tl.where(is_kept, lane, LANE), axis=0)
    if chosen < LANE:
        tl.store(ids + row, tl.load(own_integers + FRONT_PART + chosen))
    else:
        first, second = tl.load(key0 + row).to(tl.uint32), tl.load(key1 + row).to(tl.uint32)
        floor = tl.max(tl.where(lane < num, weight, -1.0), axis=0)  # tokens of this weight or less are not kept
        winner = 0
        running = 1
        while running > 0:
            least = tl.full([BLOCK], float("inf"), tl.float32)
            least_at = tl.zeros([BLOCK], tl.int32)
            least_weight = tl.zeros([BLOCK], tl.float32)
            for start in range(0, V, BLOCK):
                at = start + tl.arange(0, BLOCK)
                own = _weights(logits, at, at < V, top, factor)
                time = _times(at, own, first, second)
                faster = (own >= cutoff) & (own > floor) & (time < least)
                least = tl.where(faster, time, least)
                least_at = tl.where(faster, at, least_at)
                least_weight = tl.where(faster, own, least_weight)
            best = tl.min(least, axis=0)
            winner = tl.min(tl.where(least == best, least_at, NOWHERE), axis=0)
            floor = tl.max(tl.where((least == best) & (least_at == winner), least_weight, 0.0), axis=0)
            running = 0
            if floor < 1.0:
                running = (_above(logits, V, top, factor, floor, by_mass, BLOCK) >= target).to(tl.int32)
        tl.store(ids + row, winner)


def empty_records(rows: int, vocab: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Allocates the memory through which the kernels pass results on, for `rows` rows: numbers (float32) and integers (int32), each
    [N, S + 1, RECORD], with one record for each tile and one for the row. The memory is not initialised."""
    shape = (rows, ceil_div(vocab, _tile_tokens(vocab)) + 1, RECORD)
    return torch.empty(shape, dtype=torch.float32, device=device), torch.empty(shape, dtype=torch.int32, device=device)


def _tile_tokens(vocab: int) -> int:
    return min(TILE_TOKENS, max(16, power_of_two(vocab)))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    min_p: Tensor,
    key0: Tensor,
    key1: Tensor,
    ids: Tensor,
    bad: Tensor,
    *,
    is_cut: bool = True,
) -> None:
    """Samples a token for each row of logits [N, V], as reference.sample does. All settings are [N]; at temperature 0 the largest
    logit wins. Writes to ids [N] int32 the tokens, and to bad [N] int32 a number that is not 0 for rows with NaN or an infinity.
    is_cut: False promises that no row has a top_k, top_p or min_p, which saves two launches."""
    rows, vocab = logits.shape
    tile = _tile_tokens(vocab)
    num_tiles = ceil_div(vocab, tile)
    stripe, per_tile = max(1, tile // LANES), min(tile, LANES)
    settings, found = (temperature, top_p, top_k, min_p, key0, key1), empty_records(rows, vocab, logits.device)
    warps = 16 if tile == 4096 else 4
    _survey_kernel[(rows, num_tiles)](logits, *settings, *found, vocab, TILE=tile, STRIPE=stripe, FRONT=MOST_FRONT, num_warps=warps)
    _propose_kernel[(rows,)](
        logits,
        *settings,
        *found,
        ids,
        bad,
        vocab,
        num_tiles,
        STRIPE=stripe,
        PER_TILE=per_tile,
        PIVOTS=MOST_PIVOTS,
        TILES=64,
        BLOCK=2048,
        num_warps=16,
    )
    if not is_cut:
        return
    _weigh_kernel[(rows, num_tiles)](logits, temperature, top_p, *found, vocab, TILE=tile, num_warps=warps)
    _choose_kernel[(rows,)](
        logits, temperature, top_p, top_k, key0, key1, *found, ids, vocab, num_tiles, TILES=64, BLOCK=2048, num_warps=8
    )
