"""Computes matrix products of one to four rows on the GPU (Triton). The weights are read once, as fast as memory delivers them.
Reference implementation: torch's linear. Of a matrix of gates and ups the kernel can also apply the activation, as
triton_rows.gate_and_mul does to the same product.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels import triton_overlap
from engine.cuda.kernels.sizes import ceil_div, power_of_two
from engine.cuda.kernels.triton_overlap import await_earlier
from engine.cuda.kernels.triton_rows import activated

MAX_ROWS = 4


@triton.jit
def _finished(sums, added, narrow: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr):
    """Returns what a program stores of one row: the sums of [BLOCK_N, BLOCK_K] plus `added` [BLOCK_N], in the dtype `narrow`. If
    GATED these are gates and ups in turn, and become activation(gate) * up, half as many."""
    outputs = (tl.sum(sums, axis=1) + added).to(narrow)
    if GATED:
        gate, up = tl.split(tl.reshape(outputs, [outputs.shape[0] // 2, 2]))
        active = activated(gate.to(tl.float32), GELU).to(narrow).to(tl.float32)
        outputs = (active * up.to(tl.float32)).to(narrow)
    return outputs


@triton.jit
def _weights_at(rows, there, start, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Loads the weights [BLOCK_N, BLOCK_K] of inputs `start` and following. rows: pointers to rows of the weights. there: which of
    the rows exist."""
    at = start + tl.arange(0, BLOCK_K)
    mask = there[:, None] & (at < K)[None, :]
    return tl.load(rows + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def with_products(sums0, sums1, sums2, sums3, weights, x, start, K: tl.constexpr, M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Adds to the sums of up to four rows, each [BLOCK_N, BLOCK_K], the products of weights [BLOCK_N, BLOCK_K] with inputs `start`
    and following, and returns them."""
    at = start + tl.arange(0, BLOCK_K)
    inside = at < K
    factor = weights.to(tl.float32)
    sums0 += factor * tl.load(x + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    if M > 1:
        sums1 += factor * tl.load(x + K + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    if M > 2:
        sums2 += factor * tl.load(x + 2 * K + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    if M > 3:
        sums3 += factor * tl.load(x + 3 * K + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    return sums0, sums1, sums2, sums3


# A program reads four values of the bias and stores two or four outputs a row. How x and the weights are aligned decides how fast
# they are read.
@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=["bias"])
def _few_rows_kernel(
    x,  # [M, K]
    weight,  # [N, K]
    bias,  # [N]
    out,  # [M, N], or [M, N / 2] if GATED
    N,
    K: tl.constexpr,
    M: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,  # else SiLU, if GATED
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    number = tl.arange(0, BLOCK_N)
    if GATED:  # a gate and its up are neighbours among a program's sums; in the weights they are N / 2 rows apart
        width = N // 2
        pair = tl.program_id(0) * (BLOCK_N // 2) + number // 2
        there, output = pair < width, pair + number % 2 * width
        column = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        width = N
        output = tl.program_id(0) * BLOCK_N + number
        there, column = output < N, output
    sums0 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    sums1, sums2, sums3 = sums0, sums0, sums0
    rows = weight + output.to(tl.int64)[:, None] * K
    if OVERLAPS:  # no kernel writes weights, so the first ones are read before the kernel before this one has ended
        weights = _weights_at(rows, there, 0, K, BLOCK_K)
        await_earlier(OVERLAPS)
        sums0, sums1, sums2, sums3 = with_products(sums0, sums1, sums2, sums3, weights, x, 0, K, M, BLOCK_K)
    for start in range(BLOCK_K if OVERLAPS else 0, K, BLOCK_K):
        weights = _weights_at(rows, there, start, K, BLOCK_K)
        sums0, sums1, sums2, sums3 = with_products(sums0, sums1, sums2, sums3, weights, x, start, K, M, BLOCK_K)
    added = tl.zeros([BLOCK_N], tl.float32)
    if BIAS:
        added = tl.load(bias + output, mask=there, other=0.0).to(tl.float32)
    narrow: tl.constexpr = out.dtype.element_ty
    stored = column < width
    tl.store(out + column, _finished(sums0, added, narrow, GATED, GELU), mask=stored)
    if M > 1:
        tl.store(out + width + column, _finished(sums1, added, narrow, GATED, GELU), mask=stored)
    if M > 2:
        tl.store(out + 2 * width + column, _finished(sums2, added, narrow, GATED, GELU), mask=stored)
    if M > 3:
        tl.store(out + 3 * width + column, _finished(sums3, added, narrow, GATED, GELU), mask=stored)


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, gelu: bool | None = None) -> None:
    """Writes x [M, K] @ weight [N, K] transposed, plus bias [N] (or None), to out [M, N]. M is at most MAX_ROWS. Sums are float32.

    If gelu is not None, the weight has N / 2 gates, then as many ups, and what triton_rows.gate_and_mul makes of the product is
    written to out [M, N / 2]."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    block_k = min(power_of_two(inputs), 2048 if rows == 1 else 512 if rows > 2 else 1024)
    block_n = 4  # two gates and their ups, if gated
    _few_rows_kernel[(ceil_div(outputs, block_n),)](
        x,
        weight,
        x if bias is None else bias,
        out,
        outputs,
        K=inputs,
        M=rows,
        BIAS=bias is not None,
        GATED=gelu is not None,
        GELU=bool(gelu),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
        **triton_overlap.options(),
    )
