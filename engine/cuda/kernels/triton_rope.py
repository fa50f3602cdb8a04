"""Computes the rotary embedding on the GPU (Triton): one pass normalises queries and keys, rotates them, and stores keys and
values. Reference implementations: reference.rope_and_store; of cos_sin CpuOps.cos_sin (engine/cpu/ops.py).

Shapes: T tokens, H query heads, G KV heads, D head size, P pairs of a head's dimensions that are rotated.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels import triton_overlap
from engine.cuda.kernels.sizes import ceil_div, power_of_two
from engine.cuda.kernels.triton_fp8 import e4m3_of, scale_of, shared_scale, size_bits
from engine.cuda.kernels.triton_overlap import await_earlier
from engine.ops.ops import Rotary


@triton.jit
def _cos_sin_kernel(
    positions,  # [T]
    inv_freq,  # [P] float32
    out,  # [T, 2 P] float32
    scale,
    temperature,
    temperature_tokens,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < P
    position = tl.load(positions + row).to(tl.float32)
    scale *= 1.0 + temperature * tl.log(1.0 + tl.floor((position + 1.0) / temperature_tokens))
    angle = position * tl.load(inv_freq + at, mask=inside, other=0.0)
    tl.store(out + row * 2 * P + at, tl.cos(angle) * scale, mask=inside)
    tl.store(out + row * 2 * P + P + at, tl.sin(angle) * scale, mask=inside)


def cos_sin(positions: Tensor, rotary: Rotary, out: Tensor) -> None:
    """Writes to out [T, 2 P] float32 the cosines, then the sines, of position * inv_freq for each of positions [T]. They are
    multiplied by the scale of `rotary` (a layer's rotary embedding) and by its temperature at the position."""
    pairs = len(rotary.inv_freq)
    heat = rotary.temperature
    _cos_sin_kernel[(len(positions),)](
        positions,
        rotary.inv_freq,
        out,
        float(rotary.scale),
        0.0 if heat is None else float(heat.scale),
        1.0 if heat is None else float(heat.tokens),
        P=pairs,
        BLOCK=power_of_two(pairs),
        num_warps=1,
    )


@triton.jit
def _normed(value, total, factor, AROUND_ONE: tl.constexpr, D: tl.constexpr, eps, narrow):
    """Returns the RMS norm of a part of each head, `value` [heads, dimensions] float32, rounded to the dtype `narrow` where
    reference.rms_norm rounds. total [heads]: the sum of the squares of all D dimensions of the head. factor: the norm's weights;
    with AROUND_ONE, their difference from 1."""
    wide = value * tl.rsqrt(total / D + eps)[:, None]
    if AROUND_ONE:
        factor += 1.0
    else:
        wide = wide.to(narrow).to(tl.float32)
    return (wide * factor[None, :]).to(narrow).to(tl.float32)


# The norms' weights are a head's; block_stride is specialised, because it tells that what is stored is aligned to 16 bytes.
@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["query_norm", "key_norm", "value_norm"])
def _rope_and_store_kernel(
    qkv,  # [T, (H + 2 G) D]; queries are rotated in place
    cos_sin,  # [T, 2 P] float32
    query_norm,  # [D]
    key_norm,  # [D]
    value_norm,  # [D]
    kv,  # the arena as one group sees it
    scales,  # the scales of fp8 KV
    slots,  # [T] int64; below 0: the token is not stored
    eps,
    layer,
    block_stride,  # elements from one block to the next
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    NORMS: tl.constexpr,
    AROUND_ONE: tl.constexpr,
    HEADS: tl.constexpr,  # heads that a program computes
    PAIRS: tl.constexpr,  # P, padded
    REST: tl.constexpr,  # D - 2 P, padded; 0: every dimension is rotated
    FP8: tl.constexpr,
    INTERLEAVED: tl.constexpr,  # pairs are neighbouring dimensions, else i and P + i
    TURNED: tl.constexpr,  # heads that are rotated, the first ones
    VALUES: tl.constexpr,  # whether values have norms
    OVERLAPS: tl.constexpr,
):
    await_earlier(OVERLAPS)
    narrow: tl.constexpr = qkv.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_query, is_value = head < H, head >= H + G
    at = tl.arange(0, PAIRS)
    first = 2 * at if INTERLEAVED else at
    second = first + 1 if INTERLEAVED else P + at
    inside = (head < H + 2 * G)[:, None] & (at < P)[None, :]
    row = qkv + token * ((H + 2 * G) * D) + head[:, None] * D
    left = tl.load(row + first[None, :], mask=inside, other=0.0).to(tl.float32)
    right = tl.load(row + second[None, :], mask=inside, other=0.0).to(tl.float32)
    if REST > 0:
        beyond = 2 * P + tl.arange(0, REST)
        inside_rest = (head < H + 2 * G)[:, None] & (beyond < D)[None, :]
        rest = tl.load(row + beyond[None, :], mask=inside_rest, other=0.0).to(tl.float32)
    if NORMS:
        total = tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)
        if REST > 0:
            total += tl.sum(rest * rest, axis=1)
        for_query = tl.load(query_norm + first, mask=at < P, other=0.0).to(tl.float32)
        for_key = tl.load(key_norm + first, mask=at < P, other=0.0).to(tl.float32)
        as_query = _normed(left, total, for_query, AROUND_ONE, D, eps, narrow)
        as_key = _normed(left, total, for_key, AROUND_ONE, D, eps, narrow)
        as_value = left
        if VALUES:
            for_value = tl.load(value_norm + first, mask=at < P, other=0.0).to(tl.float32)
            as_value = _normed(left, total, for_value, False, D, eps, narrow)
        left = tl.where(is_value[:, None], as_value, tl.where(is_query[:, None], as_query, as_key))
        for_query = tl.load(query_norm + second, mask=at < P, other=0.0).to(tl.float32)
        for_key = tl.load(key_norm + second, mask=at < P, other=0.0).to(tl.float32)
        as_query = _normed(right, total, for_query, AROUND_ONE, D, eps, narrow)
        as_key = _normed(right, total, for_key, AROUND_ONE, D, eps, narrow)
        as_value = right
        if VALUES:
            for_value = tl.load(value_norm + second, mask=at < P, other=0.0).to(tl.float32)
            as_value = _normed(right, total, for_value, False, D, eps, narrow)
        right = tl.where(is_value[:, None], as_value, tl.where(is_query[:, None], as_query, as_key))
        if REST > 0:
            for_query = tl.load(query_norm + beyond, mask=beyond < D, other=0.0).to(tl.float32)
            for_key = tl.load(key_norm + beyond, mask=beyond < D, other=0.0).to(tl.float32)
            as_query = _normed(rest, total, for_query, AROUND_ONE, D, eps, narrow)
            as_key = _normed(rest, total, for_key, AROUND_ONE, D, eps, narrow)
            as_value = rest
            if VALUES:
                for_value = tl.load(value_norm + beyond, mask=beyond < D, other=0.0).to(tl.float32)
                as_value = _normed(rest, total, for_value, False, D, eps, narrow)
            rest = tl.where(is_value[:, None], as_value, tl.where(is_query[:, None], as_query, as_key))
    cosine = tl.load(cos_sin + token * 2 * P + at, mask=at < P, other=0.0)[None, :]
    sine = tl.load(cos_sin + token * 2 * P + P + at, mask=at < P, other=0.0)[None, :]
    turns = (head < TURNED)[:, None]
    turned_left = tl.where(turns, left * cosine - right * sine, left).to(narrow)
    turned_right = tl.where(turns, right * cosine + left * sine, right).to(narrow)
    # each element is loaded and stored by the same thread, so writing in place is no race
    keep = is_query[:, None] & (at < P)[None, :]
    tl.store(row + first[None, :], turned_left, mask=keep)
    tl.store(row + second[None, :], turned_right, mask=keep)
    if REST > 0:
        rest = rest.to(narrow)
        if NORMS:
            tl.store(row + beyond[None, :], rest, mask=is_query[:, None] & (beyond < D)[None, :])
    slot = tl.load(slots + token)
    which = layer * 2 * G + head - H  # values follow keys, in the block as in qkv
    place = which * BLOCK_TOKENS + slot % BLOCK_TOKENS
    block_at = (slot // BLOCK_TOKENS) * block_stride
    kept = (head >= H) & (head < H + 2 * G) & (tl.zeros_like(head) + slot >= 0)
    if FP8:
        left, right = turned_left.to(tl.float32), turned_right.to(tl.float32)
        largest = tl.max(tl.maximum(size_bits(left), size_bits(right)), axis=1)
        if REST > 0:
            rest = rest.to(tl.float32)
            largest = tl.maximum(largest, tl.max(size_bits(rest), axis=1))
        exponent = shared_scale(largest)
        tl.store(scales + block_at + place, exponent.to(tl.uint8), mask=kept)
        inverse = scale_of(254 - exponent)[:, None]
        turned_left, turned_right = e4m3_of(left * inverse), e4m3_of(right * inverse)
        if REST > 0:
            rest = e4m3_of(rest * inverse)
    cell = kv + block_at + (place * D)[:, None]
    stored = kept[:, None] & (at < P)[None, :]
    tl.store(cell + first[None, :], turned_left, mask=stored)
    tl.store(cell + second[None, :], turned_right, mask=stored)
    if REST > 0:
        tl.store(cell + beyond[None, :], rest, mask=kept[:, None] & (beyond < D)[None, :])


def rope_and_store(
    qkv: Tensor,
    turns: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    around_one: bool,
    eps: float,
    kv: Tensor,
    scales: Tensor | None,
    layer: int,
    heads: int,
    slots: Tensor,
    interleaved: bool = False,
    num_turned: int | None = None,
    value_norm: Tensor | None = None,
) -> None:
    """Rotates the queries of qkv [T, (H + 2 G) D] in place, and stores the rotated keys and the values in the KV slots `slots` [T]
    (below 0: nothing is stored) of layer `layer`. Queries and keys are normalised first if norms are given; values may have a norm
    only if queries and keys have. Unlike reference.rope_and_store, leaves the keys in qkv as they are.

    turns [T, 2 P] float32: cosines, then sines. scales: the scales of fp8 KV; None: KV is not fp8. interleaved: the two dimensions
    of a rotated pair are neighbours. num_turned: how many heads are rotated, from the first query head on; None: all queries and
    keys."""
    kv_heads, block_tokens, head_dim = kv.shape[3:]
    pairs = turns.shape[1] // 2
    padded = power_of_two(pairs)
    most = 1024 if scales is None else 512  # fewer for fp8, because rounding takes registers
    per_program = max(1, min(power_of_two(heads + 2 * kv_heads), most // padded))
    beyond = head_dim - 2 * pairs
    _rope_and_store_kernel[(qkv.shape[0], ceil_div(heads + 2 * kv_heads, per_program))](
        qkv,
        turns,
        qkv if query_norm is None else query_norm,
        qkv if key_norm is None else key_norm,
        qkv if value_norm is None else value_norm,
        kv,
        kv if scales is None else scales,
        slots,
        eps,
        layer,
        kv.stride(0),
        H=heads,
        G=kv_heads,
        D=head_dim,
        P=pairs,
        BLOCK_TOKENS=block_tokens,
        NORMS=query_norm is not None,
        AROUND_ONE=around_one,
        HEADS=per_program,
        PAIRS=padded,
        REST=power_of_two(beyond) if beyond else 0,
        FP8=scales is not None,
        INTERLEAVED=interleaved,
        TURNED=heads + kv_heads if num_turned is None else num_turned,
        VALUES=value_norm is not None,
        num_warps=4,
        **triton_overlap.options(),
    )


def rope(
    queries: Tensor,
    turns: Tensor,
    norm: Tensor | None,
    around_one: bool,
    eps: float,
    heads: int,
    slots: Tensor,
    interleaved: bool,
) -> None:
    """Rotates queries [T, H D] in place, after normalising them if a norm is given. Nothing is stored. turns [T, 2 P] float32:
    cosines, then sines. slots [T]: read by the kernel, but without effect. interleaved: the two dimensions of a rotated pair are
    neighbours."""
    head_dim, pairs = queries.shape[1] // heads, turns.shape[1] // 2
    padded, beyond = power_of_two(pairs), head_dim - 2 * pairs
    per_program = max(1, min(power_of_two(heads), 1024 // padded))
    _rope_and_store_kernel[(len(queries), ceil_div(heads, per_program))](
        queries,
        turns,
        queries if norm is None else norm,
        queries if norm is None else norm,
        queries,
        queries,
        queries,
        slots,
        eps,
        0,
        queries.stride(0),
        H=heads,
        G=0,
        D=head_dim,
        P=pairs,
        BLOCK_TOKENS=1,
        NORMS=norm is not None,
        AROUND_ONE=around_one,
        HEADS=per_program,
        PAIRS=padded,
        REST=power_of_two(beyond) if beyond else 0,
        FP8=False,
        INTERLEAVED=interleaved,
        TURNED=heads,
        VALUES=False,
        num_warps=4,
        **triton_overlap.options(),
    )
