"""Computes matrix products of one to four rows on the GPU (Triton). The weights are read once, as fast as memory delivers them.
Reference implementation: torch's linear.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels.sizes import ceil_div, power_of_two

MAX_ROWS = 4


# A program reads four values of the bias and stores four outputs a row. How x and the weights are aligned decides how fast they
# are read.
@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=["bias"])
def _few_rows_kernel(
    x,  # [M, K]
    weight,  # [N, K]
    bias,  # [N]
    out,  # [M, N]
    N,
    K: tl.constexpr,
    M: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = output < N
    sums0 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    sums1, sums2, sums3 = sums0, sums0, sums0
    rows = weight + output.to(tl.int64)[:, None] * K
    for start in range(0, K, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        inside = at < K
        factor = tl.load(rows + at[None, :], mask=there[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first")
        factor = factor.to(tl.float32)
        sums0 += factor * tl.load(x + at, mask=inside, other=0.0).to(tl.float32)[None, :]
        if M > 1:
            sums1 += factor * tl.load(x + K + at, mask=inside, other=0.0).to(tl.float32)[None, :]
        if M > 2:
            sums2 += factor * tl.load(x + 2 * K + at, mask=inside, other=0.0).to(tl.float32)[None, :]
        if M > 3:
            sums3 += factor * tl.load(x + 3 * K + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    added = tl.zeros([BLOCK_N], tl.float32)
    if BIAS:
        added = tl.load(bias + output, mask=there, other=0.0).to(tl.float32)
    narrow: tl.constexpr = out.dtype.element_ty
    tl.store(out + output, (tl.sum(sums0, axis=1) + added).to(narrow), mask=there)
    if M > 1:
        tl.store(out + N + output, (tl.sum(sums1, axis=1) + added).to(narrow), mask=there)
    if M > 2:
        tl.store(out + 2 * N + output, (tl.sum(sums2, axis=1) + added).to(narrow), mask=there)
    if M > 3:
        tl.store(out + 3 * N + output, (tl.sum(sums3, axis=1) + added).to(narrow), mask=there)


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Writes x [M, K] @ weight [N, K] transposed, plus bias [N] (or None), to out [M, N]. M is at most MAX_ROWS. Sums are
    float32."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    block_k = min(power_of_two(inputs), 2048 if rows == 1 else 512 if rows > 2 else 1024)
    block_n = 4
    _few_rows_kernel[(ceil_div(outputs, block_n),)](
        x,
        weight,
        x if bias is None else bias,
        out,
        outputs,
        K=inputs,
        M=rows,
        BIAS=bias is not None,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
    )
