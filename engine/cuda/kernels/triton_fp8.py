"""Functions of the kernels that write and read fp8 KV and FP8 weights (Triton). KV is stored as codes of float8_e4m3fn with one
scale for each head of a token. The scale is a power of two and is stored as its exponent (E8M0 of the OCP's microscaling formats).
Reference implementations: reference.quantize_fp8, reference.widen_fp8.

Numbers are rounded by bit operations and not by a cast, because Triton's interpreter rounds its casts to fp8 differently than a GPU
does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.ops import reference

CODE_FACTOR = tl.constexpr(256.0)  # the factor by which the numbers of FP8 codes that `codes_as` returns are too small
_ROWS_FACTOR = tl.constexpr(2.0**60)
# Factors of what is multiplied with `moved_codes`: of queries, up to 2**27, and of weights, which are also multiplied with the
# values' scales. They are so large that no product is too small for float32.
QUERIES_FACTOR = tl.constexpr(2.0**100)
WEIGHTS_FACTOR = tl.constexpr(2.0**90)
MOVED_FACTOR = tl.constexpr(2.0**120)
_MOST_SCALE = tl.constexpr(37)  # numbers up to 6e13
_MIN_SCALE = tl.constexpr(reference.MIN_FP8_SCALE)


@triton.jit
def size_bits(x):
    """Returns the bits of the magnitudes of float32 numbers, as int32. They sort as the magnitudes do; NaN is above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def shared_scale(largest):
    """Returns the exponents (int32, with float32's bias of 127) of the scales with which heads are stored. largest: each head's
    largest magnitude, as size_bits returns it. A scale makes its head's largest magnitude more than 224 and at most 448, or less if
    the scale is the smallest one. Heads with NaN or an infinity get the scale 2**120, by which they are recognised."""
    return tl.maximum(((largest + 0x1FFFFF) >> 23) - 8, _MIN_SCALE)


@triton.jit
def scale_of(exponent):
    """Returns the scales (float32) for exponents of any integer type, as `shared_scale` returns them."""
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def finite_scale_of(exponents):
    """Returns the scales (float32) of exponents as scale_of does, but NaN for scales above 2**_MOST_SCALE, which only heads with
    NaN or an infinity have."""
    return tl.where(exponents.to(tl.int32) > 127 + _MOST_SCALE, float("nan"), scale_of(exponents))


@triton.jit
def e4m3_of(x):
    """Returns float32 as codes of float8_e4m3fn (uint8), rounded to nearest, ties to even. Magnitudes above 464, infinities and NaN
    become NaN."""
    bits = x.to(tl.int32, bitcast=True)
    size = size_bits(x)
    # from 2**-6 on: the exponent's bias changes from 127 to 7, the mantissa from 23 bits to 3
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # below 2**-6: multiples of 2**-9, which is the last bit of a float32 near 2**14 = 16384
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal)
    code = tl.where(size > 0x43E80000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def block_of(table, position, there, BLOCK_TOKENS: tl.constexpr):
    """Returns the block numbers [N] int64 of positions [N], looked up in a row's block table; 0 where `there` [N] is false."""
    return tl.load(table + position.to(tl.uint32) // BLOCK_TOKENS, mask=there, other=0).to(tl.int64)


@triton.jit
def scales_at(scales, block, position, there, keys_at, values_at, block_stride, BLOCK_TOKENS: tl.constexpr):
    """Returns the exponents [N] of the scales of the keys, and those of the values, at positions [N] in blocks [N]; 0 where `there`
    [N] is false. keys_at, values_at: where the scales of the KV head's keys and values begin in a block of scales.

    Attention calls this one tile ahead, and block_of two tiles ahead, because Triton does not move loads of single bytes forward by
    itself. Otherwise products would wait for two loads, one after the other."""
    own = scales + block * block_stride + position.to(tl.uint32) % BLOCK_TOKENS
    return tl.load(own + keys_at, mask=there, other=0), tl.load(own + values_at, mask=there, other=0)


def as_words(kv: torch.Tensor) -> torch.Tensor:
    """Returns a view of codes [blocks, ..., D] as int32 [blocks, ..., D / 4], four codes each, or the codes themselves where D or
    the blocks' distance is not a multiple of 4. Words are faster to load, because single bytes are copied to shared memory and read
    from there one by one."""
    return kv.view(torch.int32) if kv.shape[-1] % 4 == 0 and kv.stride(0) % 4 == 0 else kv


@triton.jit
def rows_factor(dtype: tl.constexpr):
    """Returns the power of two by which results of `rows_of` in this dtype must still be multiplied."""
    return _ROWS_FACTOR if dtype == tl.bfloat16 else 1.0


@triton.jit
def rows_of(codes, exponents, dtype: tl.constexpr):
    """Returns keys or values [N, D] in `dtype`, divided by rows_factor(dtype). codes: uint8 [N, D], or int32 [N, D / 4] with four
    codes each. exponents [N]: those of the scales. The result is exact for scales up to 2**_MOST_SCALE; heads with larger scales
    have NaN or infinities."""
    if dtype == tl.bfloat16 and codes.dtype == tl.int32:
        rows, scale = moved_codes(codes), finite_scale_of(exponents) * (MOVED_FACTOR / _ROWS_FACTOR)
    else:
        scale = scale_of(exponents) / rows_factor(dtype)
        if codes.dtype == tl.int32:
            rows = _in_order(_nth(codes, 0, dtype), _nth(codes, 1, dtype), _nth(codes, 2, dtype), _nth(codes, 3, dtype))
        else:
            rows = widened(codes, dtype)
    return rows * scale.to(dtype)[:, None]


@triton.jit
def moved_codes(words):
    """Returns the numbers of the codes in words (int32 [N, W], four codes each) as bfloat16 [N, 4 W], divided by MOVED_FACTOR. The
    code of NaN becomes 480. The codes' bits are moved to their places in bfloat16, two codes at a time; a GPU's own conversion, by
    way of float16, takes several times as long."""
    first, second, third, fourth = tl.inline_asm_elementwise(
        asm="""{
        .reg .b32 low, high;
        prmt.b32 low, $4, 0, 0x9180;
        prmt.b32 high, $4, 0, 0xB3A2;
        shl.b32 low, low, 4;
        shl.b32 high, high, 4;
        and.b32 low, low, 0x87F087F0;
        and.b32 high, high, 0x87F087F0;
        mov.b32 {$0, $1}, low;
        mov.b32 {$2, $3}, high;
        }""",
        constraints="=h,=h,=h,=h,r",
        args=[words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )
    return _in_order(first, second, third, fourth)


@triton.jit
def _nth(words, number: tl.constexpr, dtype: tl.constexpr):
    """Returns the numbers, in `dtype`, of one code of each word (int32, four codes each): the code in byte `number`, 0 being the
    lowest."""
    return widened(((words >> (8 * number)) & 255).to(tl.uint8), dtype)


@triton.jit
def _in_order(first, second, third, fourth):
    """Interleaves four tensors [N, W] to [N, 4 W]: elements 4 w to 4 w + 3 of a row are the w-th elements of first, second, third
    and fourth."""
    joined = tl.join(tl.join(first, third), tl.join(second, fourth))
    return joined.reshape(first.shape[0], first.shape[1] * 4)


@triton.jit
def widened(codes, dtype: tl.constexpr):
    """Returns the numbers of float8_e4m3fn codes (uint8) as float16, bfloat16 or float32 (dtype). The conversion is exact."""
    return codes.to(tl.float8e4nv, bitcast=True).to(dtype)


@triton.jit
def code_factor(code_type: tl.constexpr):
    """Returns the factor by which results of `codes_as` for codes of this type must still be multiplied."""
    return 1.0 if code_type == tl.int8 else CODE_FACTOR


@triton.jit
def codes_as(codes, dtype: tl.constexpr):
    """Returns the numbers of a weight matrix's codes, divided by code_factor, as float16, bfloat16 or float32 (dtype); this is
    exact. codes: int8, which are the numbers themselves, or float8_e4m3fn (uint8) without NaN.

    The bits of float8_e4m3fn are moved to the places of sign, exponent and mantissa in float16, so the GPU needs no instructions
    for FP8. The factor arises because float16's exponent bias is larger by 8. Subnormal numbers follow the same rule."""
    if codes.dtype == tl.int8:
        return codes.to(dtype)
    wide = codes.to(tl.int8, bitcast=True).to(tl.int16)
    halves = ((wide << 7) & -16512).to(tl.float16, bitcast=True)  # -16512: the bits 0xBF80, sign, exponent and mantissa
    return halves if dtype == tl.float16 else halves.to(tl.float32).to(dtype)
