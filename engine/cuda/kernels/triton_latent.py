"""Computes multi-head latent attention on the GPU (Triton), except for the attention itself: latents are normalised, keys and
queries rotated, and both latents and keys stored; each head's queries and sums of latents are multiplied by the head's own part of
a matrix, which is quantised to FP8 or four bits. Reference implementations: reference.rope_and_store_latents, reference.fp8_rows,
reference.int4_rows, reference.nvfp4_rows.

Shapes: T tokens, H heads, K plain and R rotated dimensions of queries, V dimensions of values, L numbers of a latent, P pairs of
rotated dimensions, 2 P = R.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels.sizes import ceil_div, power_of_two
from engine.cuda.kernels.triton_four_bits import four_bit_numbers
from engine.cuda.kernels.triton_fp8 import CODE_FACTOR, code_factor, codes_as, e4m3_of, scale_of, shared_scale, size_bits
from engine.ops.ops import Fp8Matrix, Int4Matrix, Int8Matrix, LatentHeads, Nvfp4Matrix

_FEW_TOKENS = 32  # up to so many, products are computed in tiles of 16 tokens


# block_stride is specialised, because it tells that what is stored is aligned to 16 bytes
@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["down", "norm"])
def _store_latents_kernel(
    queries,  # [T, H (K + R)]; rotated in place
    down,  # [T, L + R]
    cos_sin,  # [T, R] float32: P cosines, P sines
    norm,  # [L]
    kv,  # the arena as one group sees it
    scales,  # the scales of fp8 KV
    slots,  # [T] int64; below 0: the token is not stored
    eps,
    layer,
    down_stride,  # elements from one token to the next
    block_stride,  # elements from one block to the next
    H: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    L: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,  # heads whose queries a program rotates
    PAIRS: tl.constexpr,  # P, padded
    PADDED_L: tl.constexpr,
    FP8: tl.constexpr,
    INTERLEAVED: tl.constexpr,  # pairs are neighbouring dimensions, else i and P + i
):
    narrow: tl.constexpr = queries.dtype.element_ty
    pairs: tl.constexpr = R // 2
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PAIRS)
    first = 2 * at if INTERLEAVED else at
    second = first + 1 if INTERLEAVED else pairs + at
    inside = at < pairs
    cosine = tl.load(cos_sin + token * R + at, mask=inside, other=0.0)
    sine = tl.load(cos_sin + token * R + pairs + at, mask=inside, other=0.0)
    if tl.program_id(1) > 0:
        head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)
        row = queries + token * (H * (K + R)) + head[:, None] * (K + R) + K
        there = (head < H)[:, None] & inside[None, :]
        left = tl.load(row + first[None, :], mask=there, other=0.0).to(tl.float32)
        right = tl.load(row + second[None, :], mask=there, other=0.0).to(tl.float32)
        # each element is loaded and stored by the same thread, so writing in place is no race
        tl.store(row + first[None, :], (left * cosine[None, :] - right * sine[None, :]).to(narrow), mask=there)
        tl.store(row + second[None, :], (right * cosine[None, :] + left * sine[None, :]).to(narrow), mask=there)
        return
    slot = tl.load(slots + token)
    if slot < 0:
        return
    own = down + token * down_stride
    number = tl.arange(0, PADDED_L)
    latent = tl.load(own + number, mask=number < L, other=0.0).to(tl.float32)
    normed = (latent * tl.rsqrt(tl.sum(latent * latent, axis=0) / L + eps)).to(narrow).to(tl.float32)
    normed = (normed * tl.load(norm + number, mask=number < L, other=0.0).to(tl.float32)).to(narrow)
    left = tl.load(own + L + first, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(own + L + second, mask=inside, other=0.0).to(tl.float32)
    turned_left, turned_right = (left * cosine - right * sine).to(narrow), (right * cosine + left * sine).to(narrow)
    place = layer * BLOCK_TOKENS + slot % BLOCK_TOKENS
    block_at = slot // BLOCK_TOKENS * block_stride
    if FP8:
        wide, left, right = normed.to(tl.float32), turned_left.to(tl.float32), turned_right.to(tl.float32)
        of_turned = tl.max(tl.maximum(size_bits(left), size_bits(right)), axis=0)
        exponent = shared_scale(tl.maximum(tl.max(size_bits(wide), axis=0), of_turned))
        tl.store(scales + block_at + place, exponent.to(tl.uint8))
        inverse = scale_of(254 - exponent)
        normed, turned_left, turned_right = e4m3_of(wide * inverse), e4m3_of(left * inverse), e4m3_of(right * inverse)
    cell = kv + block_at + place * (L + R)
    tl.store(cell + number, normed, mask=number < L)
    tl.store(cell + L + first, turned_left, mask=inside)
    tl.store(cell + L + second, turned_right, mask=inside)


def rope_and_store_latents(
    queries: Tensor,
    down: Tensor,
    turns: Tensor,
    norm: Tensor,
    eps: float,
    kv: Tensor,
    scales: Tensor | None,
    layer: int,
    heads: int,
    slots: Tensor,
    interleaved: bool,
) -> None:
    """Rotates queries [T, H (K + R)] in place, and stores normalised latents and rotated keys in the KV slots `slots` [T] (below 0:
    nothing is stored) of layer `layer`, as reference.rope_and_store_latents does.

    down [T, N]: the latents and keys, in its last L + R columns. turns [T, R] float32: cosines, then sines. norm, eps: weights and
    epsilon of the latents' norm. scales: the scales of fp8 KV; None: KV is not fp8. interleaved: the two dimensions of a rotated
    pair are neighbours."""
    block_tokens, token_values = kv.shape[4:]
    num_tokens, rope_dim = turns.shape
    padded = power_of_two(rope_dim // 2)
    per_program = max(1, min(power_of_two(heads), 1024 // padded))
    own = down[:, down.shape[1] - token_values :]
    _store_latents_kernel[(num_tokens, 1 + ceil_div(heads, per_program))](
        queries,
        own,
        turns,
        norm,
        kv,
        kv if scales is None else scales,
        slots,
        eps,
        layer,
        down.stride(0),
        kv.stride(0),
        H=heads,
        K=queries.shape[1] // heads - rope_dim,
        R=rope_dim,
        L=len(norm),
        BLOCK_TOKENS=block_tokens,
        HEADS=per_program,
        PAIRS=padded,
        PADDED_L=power_of_two(len(norm)),
        FP8=scales is not None,
        INTERLEAVED=interleaved,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_tokens", "x_stride", "x_head_stride", "out_stride", "out_head_stride"])
def _by_head_kernel(
    x,  # [T, H, INNER]
    codes,  # [H HEIGHT, L]; [H HEIGHT, L / 2] if FOUR_BITS
    scales,  # [H HEIGHT, G]
    zeros,  # [H HEIGHT, G], read if ZEROS
    factors,  # [H HEIGHT] float32, read if E4M3
    out,  # [T, H, OUTER]
    num_tokens,
    x_stride,
    x_head_stride,
    out_stride,
    out_head_stride,
    HEIGHT: tl.constexpr,  # rows of the matrix that a head has
    FIRST: tl.constexpr,  # of these, the first that the product reads
    L: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    SUMS_ROWS: tl.constexpr,  # the products are summed over rows of the matrix, else over its columns
    FOUR_BITS: tl.constexpr,  # weights are INT4 or NVFP4, else FP8 or int8
    ZEROS: tl.constexpr,
    E4M3: tl.constexpr,  # scales are codes: weights are NVFP4
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(2).to(tl.int64)
    is_token, is_output = token < num_tokens, output < OUTER
    tokens_at = x + token.to(tl.int64)[:, None] * x_stride + head * x_head_stride
    begin = head * HEIGHT + FIRST
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, INNER, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        rows = tl.load(tokens_at + at[None, :], mask=is_token[:, None] & (at < INNER)[None, :], other=0.0)
        seen = (at < INNER)[:, None] & is_output[None, :]
        if SUMS_ROWS:
            row, column = (begin + at)[:, None], output[None, :]
        else:
            row, column = (begin + output)[None, :], at[:, None]
        scale = tl.load(scales + row * G + column // GROUP, mask=seen, other=0)
        if E4M3:
            factor = tl.load(factors + row + column * 0, mask=seen, other=0.0)
            scale = codes_as(scale, tl.float32) * (factor * CODE_FACTOR)
        else:
            scale = scale.to(tl.float32)
        if FOUR_BITS:
            packed = tl.load(codes + row * (L // 2) + column // 2, mask=seen, other=0).to(tl.int32)
            zero = 8
            if ZEROS:
                zero = tl.load(zeros + row * G + column // GROUP, mask=seen, other=8).to(tl.int32)
            weights = four_bit_numbers((packed >> (column % 2 * 4)) & 15, zero, not E4M3) * scale
        else:
            code = tl.load(codes + row * L + column, mask=seen, other=0)
            weights = codes_as(code, tl.float32) * (scale * code_factor(code.dtype))
        if WIDEN:
            rows = rows.to(tl.float32)
        total += tl.dot(rows, weights.to(rows.dtype), input_precision="ieee")
    place = out + token.to(tl.int64)[:, None] * out_stride + head * out_head_stride + output[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=is_token[:, None] & is_output[None, :])


def product_by_head(x: Tensor, heads: LatentHeads, of_values: bool, widen: bool, out: Tensor) -> None:
    """Multiplies each head of x by its part of heads.up [H (K + V), L], a matrix of FP8, int8, INT4 or NVFP4, whose weights are
    rounded to x's dtype. of_values: multiplies by the value matrices: x [T, H, L] gives out [T, H, V]; False: by the key matrices:
    x [T, H, K] gives out [T, H, L]. The last dimension of x and of out must be contiguous. widen: products are computed in float32
    (where kernels are interpreted)."""
    up = heads.up
    assert isinstance(up, Fp8Matrix | Int4Matrix | Int8Matrix | Nvfp4Matrix)
    of_bytes = isinstance(up, Fp8Matrix | Int8Matrix)
    inner, outer = (heads.rank, heads.value_dim) if of_values else (heads.plain_dim, heads.rank)
    wide_items = x.element_size() == 4
    zeros = up.zeros if isinstance(up, Int4Matrix) else None
    block_m, block_k = 16 if len(x) <= _FEW_TOKENS else 64, 32 if wide_items else 64
    block_n = min(64, max(16, power_of_two(outer)))
    _by_head_kernel[(ceil_div(len(x), block_m), ceil_div(outer, block_n), heads.num_heads)](
        x,
        up.values if isinstance(up, Fp8Matrix | Int8Matrix) else up.packed,
        up.scales,
        up.scales if zeros is None else zeros,
        up.factors if isinstance(up, Nvfp4Matrix) else up.scales,
        out,
        len(x),
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        HEIGHT=heads.plain_dim + heads.value_dim,
        FIRST=heads.plain_dim if of_values else 0,
        L=heads.rank,
        G=1 if isinstance(up, Int8Matrix) else up.scales.shape[1],
        GROUP=up.group_inputs,
        INNER=inner,
        OUTER=outer,
        SUMS_ROWS=not of_values,
        FOUR_BITS=not of_bytes,
        ZEROS=zeros is not None,
        E4M3=isinstance(up, Nvfp4Matrix),
        WIDEN=widen,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=min(block_k, max(16, power_of_two(inner))),
        num_warps=8 if not of_bytes and block_m == 64 else 4,  # more threads, because widening needs registers
        num_stages=2,
    )
