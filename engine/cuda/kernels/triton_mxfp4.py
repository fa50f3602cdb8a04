"""Weights in MXFP4 on the GPU (Triton): widened in registers, a tile at a time. Reference implementation: reference.mxfp4_values.

Shapes: B bytes of a tile's inputs, two weights each, G = B / 16 groups of 32 inputs with one scale, N outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP_BYTES = tl.constexpr(16)  # bytes of the weights that have one scale


@triton.jit
def _numbers(code):
    """Returns the numbers that four bits stand for, as float32. code: int32 from 0 to 15."""
    low = code & 7
    # an exponent of two bits and one digit, which from 2 on lie as those of a float32 do
    magnitude = tl.where(low < 2, low.to(tl.float32) * 0.5, ((low << 22) + (126 << 23)).to(tl.float32, bitcast=True))
    return tl.where(code < 8, magnitude, -magnitude)


@triton.jit
def widened_mxfp4(blocks, scales, at, group_at, seen, seen_groups, B: tl.constexpr, N: tl.constexpr):
    """Returns the weights of even inputs and those of odd inputs, each [B, N] float32.

    at: [B, N], where the bytes are in blocks. group_at: [B / 16, N], where their scales are in scales. seen, seen_groups: which of
    these are there; the others' weights are 0."""
    packed = tl.load(blocks + at, mask=seen, other=0).to(tl.int32)
    exponent = tl.load(scales + group_at, mask=seen_groups, other=0).to(tl.int32)
    # 2**-127 has no exponent of its own
    factor = tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)
    factor = tl.reshape(tl.broadcast_to(factor[:, None, :], [B // GROUP_BYTES, GROUP_BYTES, N]), [B, N])
    return _numbers(packed & 15) * factor, _numbers(packed >> 4) * factor
