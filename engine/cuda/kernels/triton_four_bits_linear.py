"""Computes matrix products with INT4 and NVFP4 weights on the GPU (Triton). Weights are read once and widened in registers. Sums
are float32; in NVFP4 each output has a factor by which its sum is multiplied. Reference implementations: reference.int4_linear,
reference.nvfp4_linear.

For up to MAX_ROWS rows a program adds products up across lanes, in float32, as triton_fp8_linear does. More rows are multiplied in
tiles by tensor cores. Grids and tiles depend on shapes alone, so that graphs can hold the launches.

Shapes: M rows, K inputs, N outputs, G groups of GROUP inputs that share a scale.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels.sizes import ceil_div, power_of_two
from engine.cuda.kernels.triton_four_bits import add_four_bits, four_bit_numbers
from engine.cuda.kernels.triton_fp8 import CODE_FACTOR, codes_as
from engine.cuda.kernels.triton_fp8_linear import TILE_ROWS, store_sums, store_tile
from engine.ops.ops import Int4Matrix, Nvfp4Matrix


@triton.jit
def _products(x, at, inside, low, high):
    """Returns [N, B] float32: a row's even inputs times low [N, B], plus its odd inputs times high [N, B]. x: points to the row. at
    [B]: indices of bytes in an output's weights; byte b holds the weights of inputs 2 b and 2 b + 1. inside [B]: which of these
    bytes exist."""
    even = tl.load(x + 2 * at, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(x + 2 * at + 1, mask=inside, other=0.0).to(tl.float32)
    return low * even[None, :] + high * odd[None, :]


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=["bias"])
def _four_bits_few_rows_kernel(
    x,  # [M, K]
    packed,  # [N, K / 2]
    scales,  # [N, G]; codes of e4m3 if not INT4
    zeros,  # [N, G], read if ZEROS
    factors,  # [N] float32, read if not INT4
    bias,  # [N]
    out,  # [M, N]
    N,
    K: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    INT4: tl.constexpr,  # else NVFP4
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,  # bytes of an output that are multiplied at a time
):
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = output < N
    sums0 = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
    sums1, sums2, sums3 = sums0, sums0, sums0
    rows = packed + output.to(tl.int64)[:, None] * (K // 2)
    groups = output.to(tl.int64)[:, None] * G
    zero = tl.load(zeros + output, mask=there, other=8).to(tl.int32)[:, None] if ZEROS and G == 1 else 8
    for start in range(0, K // 2, BLOCK_B):
        at = start + tl.arange(0, BLOCK_B)
        inside = at < K // 2
        seen = there[:, None] & inside[None, :]
        codes = tl.load(rows + at[None, :], mask=seen, other=0, eviction_policy="evict_first").to(tl.int32)
        group = groups + (2 * at // GROUP)[None, :]
        own_zero = tl.load(zeros + group, mask=seen, other=8).to(tl.int32) if ZEROS and G > 1 else zero
        low, high = four_bit_numbers(codes & 15, own_zero, INT4), four_bit_numbers(codes >> 4, own_zero, INT4)
        if not INT4:
            factor = codes_as(tl.load(scales + group, mask=seen, other=0), tl.float32)
            low, high = low * factor, high * factor
        elif G > 1:
            factor = tl.load(scales + group, mask=seen, other=0.0).to(tl.float32)
            low, high = low * factor, high * factor
        sums0 += _products(x, at, inside, low, high)
        if M > 1:
            sums1 += _products(x + K, at, inside, low, high)
        if M > 2:
            sums2 += _products(x + 2 * K, at, inside, low, high)
        if M > 3:
            sums3 += _products(x + 3 * K, at, inside, low, high)
    scale = tl.full([BLOCK_N], 1.0, tl.float32)
    if not INT4:
        scale = tl.load(factors + output, mask=there, other=0.0) * CODE_FACTOR
    elif G == 1:
        scale = tl.load(scales + output, mask=there, other=0.0).to(tl.float32)
    store_sums(sums0, sums1, sums2, sums3, scale, bias, output, there, out, N, M, BIAS)


@triton.jit(do_not_specialize=["M", "N"], do_not_specialize_on_alignment=["bias"])
def _four_bits_tile_kernel(
    x,  # [M, K]
    packed,  # [N, K / 2]
    scales,  # [N, G]; codes of e4m3 if not INT4
    zeros,  # [N, G], read if ZEROS
    factors,  # [N] float32, read if not INT4
    bias,  # [N]
    out,  # [M, N]
    M,
    N,
    K: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    INT4: tl.constexpr,  # else NVFP4
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row, output = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, there = row < M, output < N
    rows_at, own = x + row.to(tl.int64)[:, None] * K, output.to(tl.int64)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        total = add_four_bits(
            rows_at, packed, scales, zeros, own, is_row, there, start, total,
            K, G, GROUP, BLOCK_N, BLOCK_K, WIDEN, INT4, ZEROS, not INT4,
        )  # fmt: skip
    if not INT4:
        total *= tl.load(factors + output, mask=there, other=0.0)[None, :]
    store_tile(total, bias, row, output, is_row, there, out, N, BIAS)


def _tensors(weight: Int4Matrix | Nvfp4Matrix) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns a matrix's tensors (packed, scales, zeros, factors) as the kernels take them. In place of zero points or factors that
    the matrix does not have stands another of its tensors, which the kernels do not read."""
    if isinstance(weight, Nvfp4Matrix):
        return weight.packed, weight.scales, weight.packed, weight.factors
    return weight.packed, weight.scales, weight.packed if weight.zeros is None else weight.zeros, weight.scales


def few_rows_linear(x: Tensor, weight: Int4Matrix | Nvfp4Matrix, bias: Tensor | None, out: Tensor) -> None:
    """Writes x [M, K] @ weight [N, K] transposed, plus bias [N] (None: no bias), to out [M, N]. M is at most
    triton_fp8_linear.MAX_ROWS. The caller has put the columns of x into the order in which the matrix stores its inputs."""
    (rows, inputs), outputs, block_n = x.shape, len(weight), 4
    of_nvfp4 = isinstance(weight, Nvfp4Matrix)  # more bytes at a time would take most registers
    _four_bits_few_rows_kernel[(ceil_div(outputs, block_n),)](
        x,
        *_tensors(weight),
        x if bias is None else bias,
        out,
        outputs,
        K=inputs,
        G=weight.scales.shape[1],
        GROUP=weight.group_inputs,
        M=rows,
        INT4=isinstance(weight, Int4Matrix),
        ZEROS=isinstance(weight, Int4Matrix) and weight.zeros is not None,
        BIAS=bias is not None,
        BLOCK_N=block_n,
        BLOCK_B=min(power_of_two(inputs // 2), 1024 if rows == 1 and not of_nvfp4 else 256 if rows > 2 else 512),
        num_warps=4,
    )


def tile_linear(x: Tensor, weight: Int4Matrix | Nvfp4Matrix, bias: Tensor | None, tile: int, widen: bool, out: Tensor) -> None:
    """Writes x [M, K] @ weight [N, K] transposed, plus bias [N] (None: no bias), to out [M, N], for any number of rows. Weights are
    rounded to x's dtype before they are multiplied, which changes those of INT4; few_rows_linear does not round them. tile: number
    of rows in a tile, one of TILE_ROWS. widen: products are computed in float32 (where kernels are interpreted)."""
    (rows, inputs), outputs = x.shape, len(weight)
    wide_items, few = x.element_size() == 4, tile == TILE_ROWS[0]
    block_n, block_k = (32, 64 if wide_items else 128) if few else (32 if wide_items else 64, 32 if wide_items else 64)
    _four_bits_tile_kernel[(ceil_div(outputs, block_n), ceil_div(rows, tile))](
        x,
        *_tensors(weight),
        x if bias is None else bias,
        out,
        rows,
        outputs,
        K=inputs,
        G=weight.scales.shape[1],
        GROUP=weight.group_inputs,
        INT4=isinstance(weight, Int4Matrix),
        ZEROS=isinstance(weight, Int4Matrix) and weight.zeros is not None,
        BIAS=bias is not None,
        WIDEN=widen,
        BLOCK_M=tile,
        BLOCK_N=block_n,
        BLOCK_K=min(block_k, power_of_two(inputs)),
        num_warps=4,
        num_stages=2 if wide_items else 3,
    )
