"""Generates the inner loop of the linear kernels: sums of products of a few rows with a few weight rows, which are kept in vector
registers.

The loop is generated as LLVM code because Numba's vectoriser does not keep a tile's sums in registers (see vectors.py)."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.cpu.kernels.vectors import I64, LANES, PAIRS, SUMS, Loader, add_products, fold, for_pieces


def dot_tile(num_rows: int, num_outputs: int) -> Any:
    """Returns a function (x, x_at, x_stride, weight, weight_at, weight_stride, length, ahead, fetched, sums, sums_at) for kernels
    that multiplies num_rows rows of x with num_outputs rows of weight.

    For row r and output n it multiplies `length` elements of x from x_at + r * x_stride on with those of weight from weight_at + n
    * weight_stride on, and adds the products to the 16 partial sums at sums_at + 16 * (r * num_outputs + n).

    It also prefetches `fetched` (1 to num_outputs) weight rows that lie `ahead` elements after these. Tiles that use the same
    weights divide this prefetching among them, so that memory is busy during all of them."""

    @intrinsic
    def tile(
        typing_context: Any,
        x: Any,
        x_at: Any,
        x_stride: Any,
        weight: Any,
        weight_at: Any,
        weight_stride: Any,
        length: Any,
        ahead: Any,
        fetched: Any,
        sums: Any,
        sums_at: Any,
    ) -> Any:
        paired = types.float32 not in (x.dtype, weight.dtype)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def data(position: int) -> Any:
                return context.make_array(signature.args[position])(context, builder, args[position]).data

            load_x = Loader(builder, data(0), x.dtype, paired)
            load_weight = Loader(builder, data(3), weight.dtype, paired)
            _, x_begin, x_step, _, weight_begin, weight_step, count, ahead_by, num_fetched, _, sums_begin = args
            rows_at = [builder.add(x_begin, builder.mul(x_step, ir.Constant(I64, r))) for r in range(num_rows)]
            weights_at = [builder.add(weight_begin, builder.mul(weight_step, ir.Constant(I64, n))) for n in range(num_outputs)]
            fetch_at = []
            for n in range(num_outputs):
                row = builder.udiv(builder.mul(num_fetched, ir.Constant(I64, n)), ir.Constant(I64, num_outputs))
                fetch_at.append(builder.add(builder.add(weight_begin, ahead_by), builder.mul(row, weight_step)))
            places = []
            for number in range(num_rows * num_outputs):
                at = builder.gep(data(9), [builder.add(sums_begin, ir.Constant(I64, number * LANES))])
                places.append(builder.bitcast(at, SUMS.as_pointer()))
            totals = [cgutils.alloca_once(builder, SUMS) for _ in places]
            for place, total in zip(places, totals, strict=True):
                builder.store(builder.load(place, align=4), total)

            def add(k: Any, some: Any = None) -> None:
                columns = [load_weight(builder.add(at, k), some) for at in weights_at]
                if some is None:
                    for at in fetch_at:
                        load_weight.prefetch(builder.add(at, k))
                for r, row_at in enumerate(rows_at):
                    row = load_x(builder.add(row_at, k), some)
                    for n, column in enumerate(columns):
                        total = totals[r * num_outputs + n]
                        builder.store(add_products(builder, builder.load(total), row, column, paired), total)

            for_pieces(builder, count, load_x.step, add)
            for place, total in zip(places, totals, strict=True):
                builder.store(builder.load(total), place, align=4)
            return context.get_dummy_value()

        sizes = (types.int64,)
        return types.void(x, *sizes * 2, weight, *sizes * 5, sums, types.int64), generate

    return tile


@intrinsic
def fold_sums(typing_context: Any, sums: Any, at: Any, out: Any) -> Any:
    """Adds up 16 groups of 16 partial sums (float32 or int32), which lie end to end from index `at` of sums on, and writes the 16
    results to out from index 0 on, in the same type."""
    kind = PAIRS if sums.dtype == types.int32 else SUMS

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        vectors = []
        for number in range(LANES):
            address = builder.gep(data, [builder.add(args[1], ir.Constant(I64, number * LANES))])
            vectors.append(builder.load(builder.bitcast(address, kind.as_pointer()), align=4))
        folded = context.make_array(signature.args[2])(context, builder, args[2]).data
        builder.store(fold(builder, vectors), builder.bitcast(folded, kind.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(sums, types.int64, out), generate
