"""Pieces of the kernels that write and read fp8 KV (Triton): codes of float8_e4m3fn, and one scale for each head of a token, a
power of two kept as its exponent (E8M0 of the OCP's microscaling formats). Twins: reference.quantize_fp8, reference.widen_fp8.

Numbers are rounded by their bits and not by a cast: Triton's interpreter rounds its casts to fp8 in another way than a GPU does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels import reference

_MIN_SCALE = tl.constexpr(reference.MIN_FP8_SCALE)


@triton.jit
def shared_scale(largest):
    """Largest magnitudes, float32 -> the exponents (with float32's bias) of the scales that bring them to between 224 and 448."""
    bits = largest.to(tl.int32, bitcast=True)
    return tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, _MIN_SCALE)


@triton.jit
def scale_of(exponent):
    """Exponents as `shared_scale` gives them, of any integer type -> scales, float32."""
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_of(x):
    """float32 -> codes uint8: to nearest, ties to even; what is beyond 464, infinities and NaN: NaN."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # from 2**-6 on: the bias goes from 127 to 7, the mantissa from 23 bits to 3
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # below: multiples of 2**-9, which are the last places of float32 at 2**14 = 16384
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal)
    code = tl.where(size > 0x43E80000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def block_of(table, position, there, BLOCK_TOKENS: tl.constexpr):
    """Block numbers [N] of those positions [N] that are `there`."""
    return tl.load(table + position // BLOCK_TOKENS, mask=there, other=0).to(tl.int64)


@triton.jit
def scales_at(scales, block, position, there, keys_at, values_at, block_stride, BLOCK_TOKENS: tl.constexpr):
    """The exponents [N] of keys' and of values' scales; keys_at, values_at: of the KV head's in a block of scales.

    Attention asks for them a tile ahead, and for their blocks two tiles ahead: Triton does not bring loads of single bytes forward
    by itself, and products would wait for two loads, one after the other."""
    own = scales + block * block_stride + position % BLOCK_TOKENS
    return tl.load(own + keys_at, mask=there, other=0), tl.load(own + values_at, mask=there, other=0)


@triton.jit
def widened(codes, dtype: tl.constexpr):
    """Codes uint8 -> float16, bfloat16 or float32, without error."""
    return codes.to(tl.float8e4nv, bitcast=True).to(dtype)
