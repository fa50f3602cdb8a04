"""Pieces of the kernels that write and read fp8 KV and FP8 weights (Triton). KV is stored as codes of float8_e4m3fn with one scale
for each head of a token, a power of two that is kept as its exponent (E8M0 of the OCP's microscaling formats). Reference
implementations: reference.quantize_fp8, reference.widen_fp8.

Numbers are rounded by bit operations and not by a cast, because Triton's interpreter rounds its casts to fp8 differently than a GPU
does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops import reference

CODE_FACTOR = tl.constexpr(256.0)  # what `codes_as` leaves out
_MIN_SCALE = tl.constexpr(reference.MIN_FP8_SCALE)


@triton.jit
def shared_scale(largest):
    """Returns the exponents (with float32's bias) of the scales that bring these largest magnitudes (float32) to between 224 and
    448."""
    bits = largest.to(tl.int32, bitcast=True)
    return tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, _MIN_SCALE)


@triton.jit
def scale_of(exponent):
    """Returns the scales (float32) of exponents, of any integer type, as `shared_scale` returns them."""
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_of(x):
    """Converts float32 to codes (uint8), rounded to nearest, ties to even. Magnitudes above 464, infinities and NaN become NaN."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # from 2**-6 on: the exponent's bias changes from 127 to 7, the mantissa from 23 bits to 3
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # below 2**-6: multiples of 2**-9, which is the last bit of a float32 near 2**14 = 16384
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal)
    code = tl.where(size > 0x43E80000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def block_of(table, position, there, BLOCK_TOKENS: tl.constexpr):
    """Looks up the block numbers [N] of positions [N] in a row's block table. Returns 0 where `there` is false."""
    return tl.load(table + position // BLOCK_TOKENS, mask=there, other=0).to(tl.int64)


@triton.jit
def scales_at(scales, block, position, there, keys_at, values_at, block_stride, BLOCK_TOKENS: tl.constexpr):
    """Returns the exponents [N] of the keys' and of the values' scales. keys_at, values_at: where those of the KV head begin in a
    block of scales.

    Attention loads them one tile ahead, and their block numbers two tiles ahead. Triton does not move loads of single bytes forward
    by itself, so products would wait for two loads, one after the other."""
    own = scales + block * block_stride + position % BLOCK_TOKENS
    return tl.load(own + keys_at, mask=there, other=0), tl.load(own + values_at, mask=there, other=0)


@triton.jit
def widened(codes, dtype: tl.constexpr):
    """Converts codes (uint8) to float16, bfloat16 or float32, which is exact."""
    return codes.to(tl.float8e4nv, bitcast=True).to(dtype)


@triton.jit
def codes_as(codes, dtype: tl.constexpr):
    """Converts codes (uint8) to float16, bfloat16 or float32, exactly but CODE_FACTOR times too small, by float16's bits: their
    bias is 8 higher, and numbers without a leading one follow the same rule. No GPU needs FP8 of its own for it. No code may be
    NaN."""
    wide = codes.to(tl.int8, bitcast=True).to(tl.int16)
    halves = ((wide << 7) & -16512).to(tl.float16, bitcast=True)  # -16512: the bits 0xBF80, sign, exponent and mantissa
    return halves if dtype == tl.float16 else halves.to(tl.float32).to(dtype)
