"""Functions of the attention kernels (Triton) that compute a running softmax over positions. Scores are kept as base-2 logarithms,
so that a single exp2 instruction turns a score into a weight. The softmax has a state: top [M], the largest score so far; total
[M], the sum of the weights relative to it; sums [M, D], the sum of the values times these weights.

Shapes: M queries, N positions, D head size (padded to a power of two).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def scores_of(query, key, scale, softcap, SOFTCAP: tl.constexpr, WIDEN: tl.constexpr):
    """Returns the scores [M, N] float32 of query [M, D] and key [N, D]: their dot products, or with SOFTCAP softcap * tanh(scale *
    dot product / softcap). Multiplied by log2_factor they are base-2 logarithms of weights.

    WIDEN: products are computed in float32, because Triton's interpreter multiplies bfloat16 wrongly (as integers)."""
    if WIDEN:
        key = key.to(tl.float32)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (e**2x + 1)
        scores = softcap - 2.0 * softcap / (tl.exp2(scores * (scale * 2.0 * LOG2_E / softcap)) + 1.0)
    return scores


@triton.jit
def log2_factor(scale, SOFTCAP: tl.constexpr):
    """Returns the factor that makes results of `scores_of` base-2 logarithms of weights: log2(e), times scale unless SOFTCAP, with
    which scores_of has applied the scale."""
    return (1.0 if SOFTCAP else scale) * LOG2_E


@triton.jit
def accumulate(scores, factor, value, by_value, top, total, sums, WIDEN: tl.constexpr):
    """Adds N positions to the running softmax and returns its new state (top, total, sums). scores [M, N]: -inf where a query does
    not attend to a position. factor: the log2_factor by which the scores are multiplied here; above 0. value: [N, D]. by_value: a
    factor of the values, 1.0 or [1, N]. WIDEN: as in scores_of."""
    new_top = tl.maximum(top, tl.max(scores, axis=1) * factor)
    seen = tl.where(new_top == float("-inf"), 0.0, new_top)  # while nothing is seen, because -inf minus -inf is NaN
    weights = tl.exp2(scores * factor - seen[:, None])
    kept = tl.exp2(top - seen)
    total = total * kept + tl.sum(weights, axis=1)
    weights = (weights * by_value).to(value.dtype)
    if WIDEN:
        weights, value = weights.to(tl.float32), value.to(tl.float32)
    return new_top, total, tl.dot(weights, value, sums * kept[:, None], input_precision="ieee")
