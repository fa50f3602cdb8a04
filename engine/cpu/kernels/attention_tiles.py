"""Generates the inner loops of paged attention, for attention_blocks.py: one computes the scores of a few query heads, the other
adds up values times weights. Both keep their sums in vector registers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.cpu.kernels.vectors import (
    FLOAT,
    I32,
    I64,
    LANES,
    PAIRS,
    SUMS,
    Loader,
    add_products,
    fold,
    for_pieces,
    splat,
    token_pairs,
    vector,
)


def score_tile(num_rows: int, num_keys: int) -> Any:
    """Returns a function (x, x_at, keys, keys_at, ahead, length, scale, scores, scores_at, scores_stride) for kernels that computes
    the scores of num_rows query heads with num_keys keys. num_rows * num_keys must be at most 16.

    The score at scores_at + r * scores_stride + t is scale times the dot product of `length` elements of x from x_at + r * length
    on with those of keys from keys_at + t * length on. The keys that lie `ahead` elements after these are prefetched meanwhile."""

    @intrinsic
    def tile(
        typing_context: Any,
        x: Any,
        x_at: Any,
        keys: Any,
        keys_at: Any,
        ahead: Any,
        length: Any,
        scale: Any,
        scores: Any,
        scores_at: Any,
        scores_stride: Any,
    ) -> Any:
        paired = x.dtype != types.float32

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def data(position: int) -> Any:
                return context.make_array(signature.args[position])(context, builder, args[position]).data

            load_x = Loader(builder, data(0), x.dtype, paired)
            load_key = Loader(builder, data(2), keys.dtype, paired)
            _, x_begin, _, keys_begin, ahead_by, count, factor, _, scores_begin, stride = args
            rows_at = [builder.add(x_begin, builder.mul(count, ir.Constant(I64, r))) for r in range(num_rows)]
            keys_at_ = [builder.add(keys_begin, builder.mul(count, ir.Constant(I64, t))) for t in range(num_keys)]
            totals = [cgutils.alloca_once_value(builder, vector(SUMS, 0.0)) for _ in range(num_rows * num_keys)]
            for total in totals:
                builder.store(vector(SUMS, 0.0), total)

            def add(k: Any, some: Any = None) -> None:
                columns = [load_key(builder.add(at, k), some) for at in keys_at_]
                for at in keys_at_:
                    load_key.prefetch(builder.add(builder.add(at, k), ahead_by))
                for r, row_at in enumerate(rows_at):
                    row = load_x(builder.add(row_at, k), some)
                    for t, column in enumerate(columns):
                        total = totals[r * num_keys + t]
                        builder.store(add_products(builder, builder.load(total), row, column, paired), total)

            for_pieces(builder, count, load_x.step, add)
            folded = fold(builder, [builder.load(total) for total in totals])
            folded = builder.fmul(folded, splat(builder, factor, SUMS))
            part = ir.VectorType(FLOAT, num_keys)
            for r in range(num_rows):
                lanes = ir.Constant(ir.VectorType(I32, num_keys), list(range(r * num_keys, (r + 1) * num_keys)))
                own = builder.shuffle_vector(folded, folded, lanes)
                at = builder.add(scores_begin, builder.mul(stride, ir.Constant(I64, r)))
                builder.store(own, builder.bitcast(builder.gep(data(7), [at]), part.as_pointer()), align=4)
            return context.get_dummy_value()

        sizes = (types.int64,)
        return types.void(x, *sizes, keys, *sizes * 3, types.float32, scores, *sizes * 2), generate

    return tile


def value_tile(num_rows: int, whole: bool) -> Any:
    """Returns a function (weights, weights_at, weights_stride, values, values_at, stride, ahead, num_tokens, count, sums, sums_at,
    sums_stride) for kernels that adds weighted values to the sums of num_rows query heads.

    To the sums of head r, which begin at sums_at + r * sums_stride, it adds for each of num_tokens tokens t: weights[weights_at + r
    * weights_stride + t] times the elements of values from values_at + t * stride on. These are 64 elements if whole, else `count`
    elements, at most 32. The values that lie `ahead` elements after these are prefetched meanwhile.

    Weights have the values' element type. With bfloat16 two tokens are computed at a time, and in each 32 sums those of even places
    come first, then those of odd places."""

    @intrinsic
    def tile(
        typing_context: Any,
        weights: Any,
        weights_at: Any,
        weights_stride: Any,
        values: Any,
        values_at: Any,
        stride: Any,
        ahead: Any,
        num_tokens: Any,
        count: Any,
        sums: Any,
        sums_at: Any,
        sums_stride: Any,
    ) -> Any:
        paired = values.dtype != types.float32

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def data(position: int) -> Any:
                return context.make_array(signature.args[position])(context, builder, args[position]).data

            load = Loader(builder, data(3), values.dtype, paired)
            _, weights_begin, between, _, values_begin, token_stride, ahead_by, tokens, some, _, sums_begin, sums_between = args
            num_vectors = 4 if whole else 2
            places = []
            for r in range(num_rows):
                row_at = builder.add(sums_begin, builder.mul(sums_between, ir.Constant(I64, r)))
                for v in range(num_vectors):
                    at = builder.gep(data(9), [builder.add(row_at, ir.Constant(I64, v * LANES))])
                    places.append(builder.bitcast(at, SUMS.as_pointer()))
            totals = [cgutils.alloca_once(builder, SUMS) for _ in places]
            for place, total in zip(places, totals, strict=True):
                builder.store(builder.load(place, align=4), total)
            left = builder.trunc(some, I32)

            def add(first: Any, num: int) -> None:
                """Emits the addition of the weighted values of `num` tokens (1 or 2), from token number `first` on, to `totals`.
                The values of two tokens are combined into pairs."""
                token_at = [builder.add(values_begin, builder.mul(builder.add(first, I64(t)), token_stride)) for t in range(num)]
                vectors: list[Any] = []
                for piece in range(num_vectors // 2 if paired else num_vectors):
                    offset = I64(piece * load.step)
                    some_left = None if whole else builder.sub(left, I32(piece * load.step))
                    loaded = []
                    for at in token_at:
                        load.prefetch(builder.add(builder.add(at, offset), ahead_by))
                        loaded.append(load(builder.add(at, offset), some_left))
                    vectors += token_pairs(builder, loaded) if paired else loaded
                for r in range(num_rows):
                    at = builder.gep(data(0), [builder.add(builder.add(weights_begin, builder.mul(between, I64(r))), first)])
                    if not paired:
                        factor = splat(builder, builder.load(at), SUMS)
                    elif num == 2:
                        factor = splat(builder, builder.load(builder.bitcast(at, I32.as_pointer()), align=2), PAIRS)
                    else:
                        factor = splat(builder, builder.zext(builder.load(at), I32), PAIRS)
                    for v, values_of in enumerate(vectors):
                        total = totals[r * num_vectors + v]
                        builder.store(add_products(builder, builder.load(total), values_of, factor, paired), total)

            at_once = 2 if paired else 1
            pairs_end = builder.sub(tokens, builder.urem(tokens, I64(at_once)))
            with cgutils.for_range_slice(builder, I64(0), pairs_end, I64(at_once)) as (first, _):
                add(first, at_once)
            if paired:
                with builder.if_then(builder.icmp_signed("<", pairs_end, tokens)):
                    add(pairs_end, 1)
            for place, total in zip(places, totals, strict=True):
                builder.store(builder.load(total), place, align=4)
            return context.get_dummy_value()

        sizes = (types.int64,)
        return types.void(weights, *sizes * 2, values, *sizes * 5, sums, *sizes * 2), generate

    return tile
