"""Functions of kernels that widen weights of four bits (MXFP4, NVFP4 or INT4) in registers on the GPU (Triton), a tile at a time.
Reference implementations: reference.mxfp4_values, reference.nvfp4_rows, reference.int4_rows.

NVFP4 has a further factor for each output, which is not applied here: callers multiply the sums by it. Without this factor, the
product of a number and its scale has at most six significant bits, so bfloat16 and float16 hold it exactly.

Shapes: M rows, K inputs, B bytes of a tile's inputs (two weights each), S scales of a tile's inputs, N outputs of a tile, G scales
of an output.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.cuda.kernels.triton_fp8 import CODE_FACTOR, codes_as


@triton.jit
def four_bit_numbers(code, zero, INT4: tl.constexpr):
    """Returns the numbers, as float32, that codes of four bits (int32 from 0 to 15) stand for. With INT4 a number is code - zero;
    else codes are e2m1, the format of MXFP4 and NVFP4. zero: the zero points of INT4, int32; not read otherwise."""
    if INT4:
        return (code - zero).to(tl.float32)
    # a sign, an exponent of two bits and one digit: as a float16, whose bias is 14 higher, they follow the same rule
    halves = (((code & 8) << 12) | ((code & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True)
    return halves.to(tl.float32) * 16384.0


@triton.jit
def _widened(
    blocks, scales, zeros, at, scales_at, seen, seen_scales,
    B: tl.constexpr, S: tl.constexpr, N: tl.constexpr, INT4: tl.constexpr, ZEROS: tl.constexpr, E4M3: tl.constexpr,
):  # fmt: skip
    """Returns two tensors [B, N] float32: the weights of even inputs and those of odd inputs, times their scales.

    at [B, N]: indices of the bytes in `blocks`. scales_at [S, N]: indices of the scales in `scales`, and of the zero points in
    `zeros`. seen [B, N], seen_scales [S, N]: which bytes and scales exist; the weights of bytes that do not are 0. ZEROS: False:
    `zeros` is not read, and all zero points of INT4 are 8. E4M3: scales are e4m3 codes (NVFP4); False: they are numbers (INT4) or
    exponents (MXFP4)."""
    packed = tl.load(blocks + at, mask=seen, other=0x88 if INT4 else 0).to(tl.int32)
    scale = tl.load(scales + scales_at, mask=seen_scales, other=0)
    if INT4:
        factor = scale.to(tl.float32)
    elif E4M3:
        factor = codes_as(scale, tl.float32) * CODE_FACTOR
    else:
        exponent = scale.to(tl.int32)
        # 2**-127 has no exponent of its own
        factor = tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)
    factor = tl.reshape(tl.broadcast_to(factor[:, None, :], [S, B // S, N]), [B, N])
    if ZEROS:
        zero = tl.load(zeros + scales_at, mask=seen_scales, other=8).to(tl.int32)
        zero = tl.reshape(tl.broadcast_to(zero[:, None, :], [S, B // S, N]), [B, N])
    else:
        zero = 8
    return four_bit_numbers(packed & 15, zero, INT4) * factor, four_bit_numbers(packed >> 4, zero, INT4) * factor


@triton.jit
def add_four_bits(
    rows_at, blocks, scales, zeros, output, there, seen_output, inputs, total,
    K: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
    INT4: tl.constexpr, ZEROS: tl.constexpr, E4M3: tl.constexpr,
):  # fmt: skip
    """Returns total [M, N] plus the products of M rows with the weights of N outputs, for BLOCK_K inputs from `inputs` on. Weights
    are rounded to the rows' dtype.

    rows_at [M, 1]: pointers to the rows. output [N]: the outputs' indices among all outputs of the matrices. there [M], seen_output
    [N]: which rows and outputs exist.
    GROUP: number of inputs that share a scale: a power of two from 16 on, or K. ZEROS: False: `zeros` is not read, and all zero
    points of INT4 are 8. E4M3: the weights are NVFP4 (their scales are codes), without the factors of their outputs."""
    SCALES: tl.constexpr = BLOCK_K // GROUP if GROUP < BLOCK_K else 1
    place = inputs // 2 + tl.arange(0, BLOCK_K // 2)
    group = inputs // GROUP + tl.arange(0, SCALES)
    left, right = _widened(
        blocks,
        scales,
        zeros,
        output[None, :] * (K // 2) + place[:, None],
        output[None, :] * G + group[:, None],
        seen_output[None, :] & (place < K // 2)[:, None],
        seen_output[None, :] & (group < G)[:, None],
        BLOCK_K // 2,
        SCALES,
        BLOCK_N,
        INT4,
        ZEROS,
        E4M3,
    )
    seen = there[:, None] & (place < K // 2)[None, :]
    even = tl.load(rows_at + 2 * place[None, :], mask=seen, other=0.0)
    odd = tl.load(rows_at + 2 * place[None, :] + 1, mask=seen, other=0.0)
    left, right = left.to(even.dtype), right.to(even.dtype)
    if WIDEN:
        even, odd, left, right = even.to(tl.float32), odd.to(tl.float32), left.to(tl.float32), right.to(tl.float32)
    total = tl.dot(even, left, total, input_precision="ieee")
    return tl.dot(odd, right, total, input_precision="ieee")
