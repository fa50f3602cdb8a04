"""Computes matrix products with weights of one byte, FP8 or int8, on the GPU (Triton). Codes are read once and converted in
registers, so the GPU needs no instructions for FP8. Sums are float32. Reference implementations: reference.fp8_linear,
reference.int8_linear.

For up to MAX_ROWS rows a program adds products up across lanes, as triton_linear does. More rows are multiplied in tiles by tensor
cores. Grids and tiles depend on shapes alone, so that graphs can hold the launches.

Shapes: M rows, K inputs, N outputs, G groups of GROUP inputs that share a scale.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels.sizes import ceil_div, power_of_two
from engine.cuda.kernels.triton_fp8 import code_factor, codes_as
from engine.cuda.kernels.triton_linear import with_products

MAX_ROWS = 4
TILE_ROWS = (16, 64)  # the rows of a tile, which one program multiplies by tensor cores, for products of few rows and of many
_FEW_TILE_ROWS = 32  # up to so many rows tiles have the first size
BLOCK = 128  # inputs of a tile; all of them share a scale, because a group is a multiple of this, or a whole row


@triton.jit
def store_sums(sums0, sums1, sums2, sums3, scale, bias, output, there, out, N, M: tl.constexpr, BIAS: tl.constexpr):
    """Adds up the sums of M rows (1 to 4) over lanes, and stores the results of some adjacent outputs to out [M, N]: the total
    times scale [outputs], plus bias [N] if BIAS. sums0 to sums3 [outputs, lanes]: one for each row; those after the M-th are not
    read. output: the outputs' indices. there: which of the outputs are below N."""
    added = tl.zeros(scale.shape, tl.float32)
    if BIAS:
        added = tl.load(bias + output, mask=there, other=0.0).to(tl.float32)
    narrow: tl.constexpr = out.dtype.element_ty
    tl.store(out + output, (tl.sum(sums0, axis=1) * scale + added).to(narrow), mask=there)
    if M > 1:
        tl.store(out + N + output, (tl.sum(sums1, axis=1) * scale + added).to(narrow), mask=there)
    if M > 2:
        tl.store(out + 2 * N + output, (tl.sum(sums2, axis=1) * scale + added).to(narrow), mask=there)
    if M > 3:
        tl.store(out + 3 * N + output, (tl.sum(sums3, axis=1) * scale + added).to(narrow), mask=there)


@triton.jit
def store_tile(total, bias, row, output, is_row, there, out, N, BIAS: tl.constexpr):
    """Stores a tile of results, total [rows, outputs] plus bias [N] if BIAS, to out [M, N]. row, output: the indices of the tile's
    rows and outputs. is_row, there: which of these rows and outputs exist."""
    if BIAS:
        total += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)[None, :]
    place = out + row.to(tl.int64)[:, None] * N + output[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=is_row[:, None] & there[None, :])


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=["bias"])
def _fp8_few_rows_kernel(
    x,  # [M, K]
    weight,  # [N, K] codes
    scales,  # [N, G]
    bias,  # [N]
    out,  # [M, N]
    N,
    K: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
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
    factors = scales + output.to(tl.int64)[:, None] * G
    for start in range(0, K, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        seen = there[:, None] & (at < K)[None, :]
        codes = tl.load(rows + at[None, :], mask=seen, other=0, eviction_policy="evict_first")
        factor = codes_as(codes, tl.float32)
        if G > 1:
            factor *= tl.load(factors + (at // GROUP)[None, :], mask=seen, other=0.0)
        sums0, sums1, sums2, sums3 = with_products(sums0, sums1, sums2, sums3, factor, x, start, K, M, BLOCK_K)
    scale = tl.full([BLOCK_N], code_factor(weight.dtype.element_ty), tl.float32)
    if G == 1:
        scale *= tl.load(scales + output, mask=there, other=0.0)
    store_sums(sums0, sums1, sums2, sums3, scale, bias, output, there, out, N, M, BIAS)


@triton.jit(do_not_specialize=["M", "N"], do_not_specialize_on_alignment=["bias"])
def _fp8_tile_kernel(
    x,  # [M, K]
    weight,  # [N, K] codes
    scales,  # [N, G]
    bias,  # [N]
    out,  # [M, N]
    M,
    N,
    K: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row, output = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, there, inner = row < M, output < N, tl.arange(0, BLOCK_K)
    rows_at = x + row.to(tl.int64)[:, None] * K
    columns_at = weight + output.to(tl.int64)[None, :] * K
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        at = start + inner
        rows = tl.load(rows_at + at[None, :], mask=is_row[:, None] & (at < K)[None, :], other=0.0)
        codes = tl.load(columns_at + at[:, None], mask=there[None, :] & (at < K)[:, None], other=0)
        if WIDEN:
            rows = rows.to(tl.float32)
        part = tl.dot(rows, codes_as(codes, rows.dtype), input_precision="ieee")
        if G > 1:
            part *= tl.load(scales + output.to(tl.int64) * G + start // GROUP, mask=there, other=0.0)[None, :]
        total += part
    scale = tl.full([BLOCK_N], code_factor(weight.dtype.element_ty), tl.float32)
    if G == 1:
        scale *= tl.load(scales + output, mask=there, other=0.0)
    store_tile(total * scale[None, :], bias, row, output, is_row, there, out, N, BIAS)


def tile_rows(num_rows: int) -> int:
    return TILE_ROWS[0] if num_rows <= _FEW_TILE_ROWS else TILE_ROWS[1]


def few_rows_linear(x: Tensor, weight: Tensor, scales: Tensor, group: int, bias: Tensor | None, out: Tensor) -> None:
    """Writes x [M, K] @ the transposed weights, plus bias [N] (None: no bias), to out [M, N]. M is at most MAX_ROWS. weight: codes
    [N, K]. scales: [N, G] float32. group: number of inputs that share a scale."""
    (rows, inputs), outputs = x.shape, len(weight)
    block_n, block_k = 4, min(power_of_two(inputs), 2048 if rows == 1 else 512 if rows > 2 else 1024)
    _fp8_few_rows_kernel[(ceil_div(outputs, block_n),)](
        x,
        weight,
        scales,
        x if bias is None else bias,
        out,
        outputs,
        K=inputs,
        G=scales.shape[1],
        GROUP=group,
        M=rows,
        BIAS=bias is not None,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
    )


def tile_linear(
    x: Tensor, weight: Tensor, scales: Tensor, group: int, bias: Tensor | None, tile: int, widen: bool, out: Tensor
) -> None:
    """Writes the same product as few_rows_linear to out [M, N], for any number of rows M. tile: number of rows in a tile, one of
    TILE_ROWS. widen: products are computed in float32 (where kernels are interpreted)."""
    (rows, inputs), outputs = x.shape, len(weight)
    wide_items, few = x.element_size() == 4, tile == TILE_ROWS[0]
    block_n, block_k = (32, 64 if wide_items else BLOCK) if few else (32 if wide_items else 64, 32 if wide_items else 64)
    _fp8_tile_kernel[(ceil_div(outputs, block_n), ceil_div(rows, tile))](
        x,
        weight,
        scales,
        x if bias is None else bias,
        out,
        rows,
        outputs,
        K=inputs,
        G=scales.shape[1],
        GROUP=group,
        BIAS=bias is not None,
        WIDEN=widen,
        BLOCK_M=tile,
        BLOCK_N=block_n,
        BLOCK_K=min(block_k, max(16, power_of_two(inputs))),
        num_warps=4,
        num_stages=2 if wide_items else 3,
    )
