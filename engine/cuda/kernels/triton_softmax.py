"""Pieces of the attention kernels (Triton). The running softmax counts in log2, so that a single exp2 instruction turns a score
into a weight.

Shapes: M queries, N positions, D head size (padded to a power of two).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def scores_of(query, key, scale, softcap, SOFTCAP: tl.constexpr, WIDEN: tl.constexpr):
    """Returns the scores [M, N] float32 of query [M, D] and key [N, D], which times `log2_factor` are logarithms of weights: the
    products of queries and keys, or with SOFTCAP what the cap makes of them times `scale`.

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
    """Returns what scores are to be multiplied by: log2(e), and the scale if `scores_of` has not used it."""
    return (1.0 if SOFTCAP else scale) * LOG2_E


@triton.jit
def accumulate(scores, factor, value, by_value, top, total, sums, WIDEN: tl.constexpr):
    """Does one step of the running softmax and returns the new (top, total, sums). scores: [M, N], -inf where a position is not
    seen. factor: more than 0, multiplies the scores in the same instruction that subtracts the largest. value: [N, D]. by_value:
    1.0, or [1, N] to multiply the values by. top, total: [M]. sums: [M, D]."""
    new_top = tl.maximum(top, tl.max(scores, axis=1) * factor)
    seen = tl.where(new_top == float("-inf"), 0.0, new_top)  # while nothing is seen, because -inf minus -inf is NaN
    weights = tl.exp2(scores * factor - seen[:, None])
    kept = tl.exp2(top - seen)
    total = total * kept + tl.sum(weights, axis=1)
    weights = (weights * by_value).to(value.dtype)
    if WIDEN:
        weights, value = weights.to(tl.float32), value.to(tl.float32)
    return new_top, total, tl.dot(weights, value, sums * kept[:, None], input_precision="ieee")
