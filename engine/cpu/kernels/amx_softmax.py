"""Computes the vector part of attention with AMX: the softmax of a chunk's scores, row by row, and the rearrangement of a chunk's
values into pairs of two positions, as AMX reads them.

A chunk is 64 positions. The softmax is computed from chunk to chunk (Milakov & Gimelshein, "Online normalizer calculation for
softmax", 2018). Earlier sums are rescaled only when a score is more than _SLACK above the row's top, which is seldom, so a weight
may be as large as 2**_SLACK."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.cpu.kernels.vectors import FLOAT, I32, I64, LANES, PAIRS, SUMS, Loader, exp2, shuffle, splat, token_pairs, vector

CHUNK_TOKENS = 64
_VECTORS = CHUNK_TOKENS // LANES
_SLACK = 8.0
_LOG2_E = 1.4426950408889634


def _capped(builder: ir.IRBuilder, scores: Any, cap: Any) -> Any:
    """Returns cap * tanh(score / cap) * log2(e) of 16 float32 scores. cap: a positive float32."""
    # tanh(x) = 1 - 2 / (e**2x + 1); above 2**126 it is 1
    power = builder.fmul(scores, splat(builder, builder.fdiv(FLOAT(2.0 * _LOG2_E), cap), SUMS))
    limit = vector(SUMS, 126.0)
    power = exp2(builder, builder.select(builder.fcmp_ordered(">", power, limit), limit, power))
    rest = builder.fdiv(vector(SUMS, 2.0), builder.fadd(power, vector(SUMS, 1.0)))
    whole = splat(builder, builder.fmul(cap, FLOAT(_LOG2_E)), SUMS)
    return builder.fmul(whole, builder.fsub(vector(SUMS, 1.0), rest))


def _larger(builder: ir.IRBuilder, left: Any, right: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", left, right), left, right)


def _largest(builder: ir.IRBuilder, values: Any) -> Any:
    """Returns the largest of the 16 lanes of a float32 vector as a scalar."""
    for half in (8, 4, 2, 1):
        values = _larger(builder, shuffle(builder, values, values, [lane ^ half for lane in range(LANES)]), values)
    return builder.extract_element(values, I32(0))


def by_rows(num_rows: int) -> Callable[..., None]:
    """Returns a function (scores, spread) for kernels that transposes the first num_rows columns (4, 8 or 16) of scores [64
    positions, 16 rows] into spread [num_rows, 64]."""

    @intrinsic
    def transpose(typing_context: Any, scores: Any, spread: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            source, target = (context.make_array(signature.args[n])(context, builder, args[n]).data for n in range(2))
            part = ir.VectorType(FLOAT, num_rows)

            def load(token: Any) -> Any:
                at = builder.gep(source, [builder.mul(token, I64(LANES))])
                return builder.load(builder.bitcast(at, part.as_pointer()), align=4)

            with cgutils.for_range_slice(builder, I64(0), I64(CHUNK_TOKENS), I64(LANES)) as (begin, _):
                rows = []
                for j in range(num_rows):  # position begin + lane // num_rows * num_rows + j
                    parts = [load(builder.add(begin, I64(token))) for token in range(j, LANES, num_rows)]
                    while len(parts) > 1:
                        lanes = ir.Constant(ir.VectorType(I32, 2 * parts[0].type.count), list(range(2 * parts[0].type.count)))
                        pairs = zip(parts[::2], parts[1::2], strict=True)
                        parts = [builder.shuffle_vector(left, right, lanes) for left, right in pairs]
                    rows.append(parts[0])
                for row, scores_of in enumerate(_exchanged(builder, rows)):
                    at = builder.gep(target, [builder.add(begin, I64(row * CHUNK_TOKENS))])
                    builder.store(scores_of, builder.bitcast(at, SUMS.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(scores, spread), generate

    return transpose


def _exchanged(builder: ir.IRBuilder, rows: list[Any]) -> list[Any]:
    """Returns 2**n vectors transposed in blocks of 2**n lanes: lane j of a block in the returned vector i is lane i of the same
    block in the given vector j."""
    distance = len(rows) // 2
    while distance:
        left = [LANES + lane - distance if lane & distance else lane for lane in range(LANES)]
        right = [LANES + lane if lane & distance else lane + distance for lane in range(LANES)]
        exchanged = list(rows)
        for i in range(len(rows)):
            if not i & distance:
                exchanged[i] = shuffle(builder, rows[i], rows[i + distance], left)
                exchanged[i + distance] = shuffle(builder, rows[i], rows[i + distance], right)
        rows, distance = exchanged, distance // 2
    return rows


@intrinsic
def weigh_row(
    typing_context: Any,
    spread: Any,
    number: Any,
    begin: Any,
    end: Any,
    scale: Any,
    softcap: Any,
    weights: Any,
    row: Any,
    tops: Any,
    totals: Any,
    sums: Any,
    width: Any,
) -> Any:
    """Turns the scores of one query head with a chunk's 64 positions into weights, and adds these to the head's total.

    The scores are spread[number] [64] times scale, which includes the factor log2(e) unless softcap is used. softcap: scores become
    softcap * tanh(score / softcap); 0: they are unchanged. Positions before `begin` or from `end` on are excluded: their weight is
    2**-126, practically zero. weights: [2, 16, 16] uint32, where [half, number, i] becomes the bfloat16 pair of 2**(score -
    tops[row]) of positions 32 half + i and 32 half + i + 16. totals[row] [16]: sums of the weights, one for each lane. If the
    head's top grows, its totals and its sums [rows, width] are rescaled. Tops must be finite at the start."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        arrays = {n: context.make_array(signature.args[n])(context, builder, args[n]).data for n in (0, 6, 8, 9, 10)}
        _, which, first, last, factor, cap, _, own, _, _, _, row_width = args

        def at(array: int, index: Any, kind: Any = SUMS) -> Any:
            return builder.bitcast(builder.gep(arrays[array], [index]), kind.as_pointer())

        factors = splat(builder, factor, SUMS)
        spread_at = builder.mul(which, I64(CHUNK_TOKENS))
        held = []
        for v in range(_VECTORS):
            score = builder.load(at(0, builder.add(spread_at, I64(v * LANES))), align=4)
            held.append(cgutils.alloca_once_value(builder, builder.fmul(score, factors)))
        with builder.if_then(builder.fcmp_ordered(">", cap, FLOAT(0.0)), likely=False):
            for score in held:
                builder.store(_capped(builder, builder.load(score), cap), score)
        is_whole = builder.and_(builder.icmp_signed("<=", first, I64(0)), builder.icmp_signed(">=", last, I64(CHUNK_TOKENS)))
        with builder.if_then(builder.not_(is_whole), likely=False):
            from_, to = (splat(builder, builder.trunc(bound, I32), PAIRS) for bound in (first, last))
            for v, score in enumerate(held):
                positions = ir.Constant(PAIRS, list(range(v * LANES, (v + 1) * LANES)))
                inside = builder.and_(builder.icmp_signed(">=", positions, from_), builder.icmp_signed("<", positions, to))
                builder.store(builder.select(inside, builder.load(score), vector(SUMS, float("-inf"))), score)
        scores = [builder.load(score) for score in held]
        highest = _larger(builder, _larger(builder, scores[0], scores[1]), _larger(builder, scores[2], scores[3]))
        top_at = builder.gep(arrays[8], [own])
        total_at = at(9, builder.mul(own, I64(LANES)))
        top = builder.load(top_at)
        above = builder.fcmp_ordered(">", highest, splat(builder, builder.fadd(top, FLOAT(_SLACK)), SUMS))
        moves = builder.icmp_unsigned("!=", builder.bitcast(above, ir.IntType(LANES)), ir.IntType(LANES)(0))
        with builder.if_then(moves, likely=False):
            moved = _larger(builder, _largest(builder, highest), top)
            shrunk = exp2(builder, splat(builder, builder.fsub(top, moved), SUMS))
            builder.store(moved, top_at)
            builder.store(builder.fmul(builder.load(total_at, align=4), shrunk), total_at, align=4)
            sums_at = builder.mul(own, row_width)
            with cgutils.for_range_slice(builder, I64(0), row_width, I64(LANES)) as (d, _):
                place = at(10, builder.add(sums_at, d))
                builder.store(builder.fmul(builder.load(place, align=4), shrunk), place, align=4)
        top_of_all = splat(builder, builder.load(top_at), SUMS)
        weights_of = [exp2(builder, builder.fsub(score, top_of_all)) for score in scores]
        total = builder.load(total_at, align=4)
        for left, right in (weights_of[:2], weights_of[2:]):
            total = builder.fadd(total, builder.fadd(left, right))
        builder.store(total, total_at, align=4)
        for half in range(2):
            # weights are positive, so adding half of the last bit that is kept rounds to nearest
            low, high = (builder.add(builder.bitcast(w, PAIRS), vector(PAIRS, 0x8000)) for w in weights_of[2 * half : 2 * half + 2])
            pairs = builder.or_(builder.lshr(low, vector(PAIRS, 16)), builder.and_(high, vector(PAIRS, 0xFFFF0000)))
            to_at = builder.mul(builder.add(which, I64(half * LANES)), I64(LANES))
            builder.store(pairs, at(6, to_at, PAIRS), align=4)
        return context.get_dummy_value()

    sizes = (types.int64,)
    floats = (types.float32,) * 2
    return types.void(spread, *sizes * 3, *floats, weights, *sizes, tops, totals, sums, *sizes), generate


@intrinsic
def pair_positions(typing_context: Any, values: Any, left_at: Any, right_at: Any, length: Any, pairs: Any, at: Any) -> Any:
    """Writes pairs of bfloat16 elements of values to pairs (uint32) from index `at` on: elements left_at + d and right_at + d make
    a pair, for d from 0 to below length, a multiple of 32. In each 32 pairs, even d come first, then odd ones."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, target = (context.make_array(signature.args[n])(context, builder, args[n]).data for n in (0, 4))
        _, left, right, count, _, to = args
        load = Loader(builder, data, values.dtype, True)
        with cgutils.for_range_slice(builder, I64(0), count, I64(2 * LANES)) as (d, _):
            places = [builder.add(start, d) for start in (left, right)]
            for number, made in enumerate(token_pairs(builder, [load(place) for place in places])):
                place = builder.gep(target, [builder.add(builder.add(to, d), I64(number * LANES))])
                builder.store(made, builder.bitcast(place, PAIRS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(values, *(types.int64,) * 3, pairs, types.int64), generate
