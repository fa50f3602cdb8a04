"""Pieces of the attention kernels (Triton). The running softmax counts in log2, so that a single exp2 instruction turns a score
into a weight. Its state is top [M], the largest score so far in log2, total [M], the sum of the weights relative to it, and sums
[M, D], the values times these weights.

Shapes: M queries, N positions, D head size (padded to a power of two).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def scores_of(query, key, scale, softcap, SOFTCAP: tl.constexpr, WIDEN: tl.constexpr):
    """Returns the scores [M, N] float32 of query [M, D] and key [N, D], which become logarithms (base 2) of weights once they are
    multiplied by log2_factor: their dot products, or with SOFTCAP softcap * tanh(scale * dot product / softcap).

    WIDEN: products are computed in float32, because Triton's interpreter would multiply bfloat16 by its bits."""
    if WIDEN:
        key = key.to(tl.float32)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (e**2x + 1)
        scores = softcap - 2.0 * softcap / (tl.exp2(scores * (scale * 2.0 * LOG2_E / softcap)) + 1.0)
    return scores


@triton.jit
def log2_factor(scale, SOFTCAP: tl.constexpr):
    """Returns the factor by which the results of `scores_of` must be multiplied: log2(e), times scale unless SOFTCAP has applied it
    already."""
    return (1.0 if SOFTCAP else scale) * LOG2_E


@triton.jit
def accumulate(scores, factor, value, by_value, top, total, sums, WIDEN: tl.constexpr):
    """Adds N positions to the running softmax and returns its new state (top, total, sums). scores: [M, N], -inf where a position
    is not seen. factor: more than 0, multiplies the scores in the same instruction that subtracts the largest. value: [N, D].
    by_value: 1.0, or [1, N], by which the values are multiplied. WIDEN: as in scores_of."""
    new_top = tl.maximum(top, tl.max(scores, axis=1) * factor)
    seen = tl.where(new_top == float("-inf"), 0.0, new_top)  # while nothing is seen, because -inf minus -inf is NaN
    weights = tl.exp2(scores * factor - seen[:, None])
    kept = tl.exp2(top - seen)
    total = total * kept + tl.sum(weights, axis=1)
    weights = (weights * by_value).to(value.dtype)
    if WIDEN:
        weights, value = weights.to(tl.float32), value.to(tl.float32)
    return new_top, total, tl.dot(weights, value, sums * kept[:, None], input_precision="ieee")
