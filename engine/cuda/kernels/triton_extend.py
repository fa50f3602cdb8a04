"""Computes the attention of rows with several new tokens on the GPU (Triton), over paged KV. It serves prompts that are computed at
once or in several chunks.

A program computes M query tokens of one head, which are a tile of the step or a part of one. No mask is computed for positions to
which all M queries attend; in a long context these are most positions.

Shapes: T tokens, R rows, I tiles of queries, H query heads, G KV heads, D head size. Reference implementation:
reference.paged_attention.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels import tiles
from engine.cuda.kernels.sizes import power_of_two
from engine.cuda.kernels.triton_decode import first_seen
from engine.cuda.kernels.triton_fp8 import as_words, block_of, rows_factor, rows_of, scales_at
from engine.cuda.kernels.triton_softmax import LOG2_E, accumulate, log2_factor, scores_of


def tile_tokens(head_dims: Iterable[int], dtype: torch.dtype, fp8: bool) -> int:
    """Returns the number of query tokens in each tile of a step. head_dims: the head sizes of the model's layers. dtype: the
    queries' dtype. fp8: whether KV is stored as FP8 codes."""
    return tiles.step_tokens(head_dims, dtype.itemsize, fp8)


@triton.jit
def _attend(
    query, top, total, sums, kv, scales, table, position_of_query, lowest_of_query, low, begin, end,
    keys_at, values_at, block_stride, scale, softcap,
    D: tl.constexpr, BLOCK_TOKENS: tl.constexpr, N: tl.constexpr, PADDED_D: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, WIDEN: tl.constexpr, FP8: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """Adds the positions from `begin` to `end` - 1 to the running softmax of M queries. Returns its new state (top [M], total [M],
    sums [M, PADDED_D]), as triton_softmax.accumulate does.

    table: the row's block table. keys_at, values_at: where the head's keys and values begin in a block.
    MASKED: positions are masked out if they are below `low`, from `end` on, after the query's own position (position_of_query [M])
    or, with WINDOW, below lowest_of_query [M]. False: the caller promises that there are no such positions."""
    part, place = tl.arange(0, PADDED_D // WORD), tl.arange(0, N)
    factor = log2_factor(scale, SOFTCAP)
    if FP8:
        position = begin + place
        there = (position >= low) & (position < end)
        block = block_of(table, position, there, BLOCK_TOKENS)
        key_scale, value_scale = scales_at(scales, block, position, there, keys_at // D, values_at // D, block_stride, BLOCK_TOKENS)
        next_block = block_of(table, position + N, position + N < end, BLOCK_TOKENS)
    for start in range(begin, end, N):
        position = start + place
        unsigned = position.to(tl.uint32)  # a division of unsigned numbers by a power of two is one instruction
        if MASKED:
            there = (position >= low) & (position < end)
            block = tl.load(table + unsigned // BLOCK_TOKENS, mask=there, other=0).to(tl.int64)
            seen = there[:, None] & (part < D // WORD)[None, :]
        else:
            block = tl.load(table + unsigned // BLOCK_TOKENS).to(tl.int64)
            seen = (place >= 0)[:, None] & (part < D // WORD)[None, :] if D < PADDED_D else None  # None: all are loaded
        cell = kv + (block * (block_stride // WORD) + unsigned % BLOCK_TOKENS * (D // WORD))[:, None]
        key = tl.load(cell + keys_at // WORD + part[None, :], mask=seen, other=None if seen is None else 0)
        if FP8:
            key = rows_of(key, key_scale, query.dtype)
        scores = scores_of(query, key, scale, softcap, SOFTCAP, WIDEN)
        if MASKED:
            visible = there[None, :] & (position[None, :] <= position_of_query[:, None])
            if WINDOW:
                visible &= position[None, :] >= lowest_of_query[:, None]
            scores = tl.where(visible, scores, float("-inf"))
        value = tl.load(cell + values_at // WORD + part[None, :], mask=seen, other=None if seen is None else 0)
        if FP8:
            value = rows_of(value, value_scale, query.dtype)
            later = position + N
            key_scale, value_scale = scales_at(
                scales, next_block, later, later < end, keys_at // D, values_at // D, block_stride, BLOCK_TOKENS
            )
            next_block = block_of(table, later + N, later + N < end, BLOCK_TOKENS)
        top, total, sums = accumulate(scores, factor, value, 1.0, top, total, sums, WIDEN)
    return top, total, sums


# Which strides are specialised: see triton_decode._piece_kernel.
@triton.jit(do_not_specialize=["layer", "reach", "table_stride"])
def _extend_kernel(
    qkv,  # [T, WIDTH], of which the first H D columns are queries
    kv,
    scales,  # the scales of fp8 KV
    block_table,  # [S, B] int32
    table_rows,  # [R] int32: each row's index in block_table
    tile_rows,  # [I] int32
    tile_firsts,  # [I] int32: the tile's first query among the row's new tokens
    starts,  # [R] int32: index in T of the row's first token
    num_new,  # [R] int32
    contexts,  # [R] int32
    sinks,  # [H] float32
    out,  # [T, H D]
    layer,
    reach,
    table_stride,
    block_stride,
    scale,
    softcap,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    M: tl.constexpr,
    PARTS: tl.constexpr,  # parts of M queries in a tile of the step
    N: tl.constexpr,
    PADDED_D: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WIDEN: tl.constexpr,
    FP8: tl.constexpr,
    WORD: tl.constexpr,  # numbers in an element of kv
):
    head = tl.program_id(0)
    tile = tl.program_id(1) // PARTS
    part = PARTS - 1 - tl.program_id(1) % PARTS  # later parts begin first, because they have longer contexts and take longer
    row, first = tl.load(tile_rows + tile), tl.load(tile_firsts + tile) + part * M
    new, context = tl.load(num_new + row), tl.load(contexts + row)
    if first >= new:
        return
    before = context - new
    member, dim = first + tl.arange(0, M), tl.arange(0, PADDED_D)
    token = (tl.load(starts + row) + member).to(tl.int64)
    inside = (member < new)[:, None] & (dim < D)[None, :]
    query = tl.load(qkv + token[:, None] * WIDTH + head * D + dim[None, :], mask=inside, other=0.0)
    if WIDEN:
        query = query.to(tl.float32)
    if FP8:
        scale *= rows_factor(query.dtype)
    kv_head = head // (H // G)
    keys_at = (layer * 2 * G + kv_head) * (BLOCK_TOKENS * D)
    values_at = keys_at + G * BLOCK_TOKENS * D
    table = block_table + tl.load(table_rows + row).to(tl.int64) * table_stride
    own = before + member  # position of each query
    end = tl.minimum(before + first + M, context)
    common = (before + first + 1) // N * N  # every query sees the positions from `clear` to here
    low, clear, lowest = 0, 0, own
    if WINDOW:
        low, lowest = first_seen(before + first, reach), first_seen(own, reach)
        clear = tl.minimum((first_seen(end - 1, reach) + N - 1) // N * N, common)
    if SINKS:
        top = tl.zeros([M], tl.float32) + tl.load(sinks + head) * LOG2_E
        total = tl.full([M], 1.0, tl.float32)
    else:
        top = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, PADDED_D], tl.float32)
    if WINDOW:
        top, total, sums = _attend(
            query, top, total, sums, kv, scales, table, own, lowest, low, low // N * N, clear,
            keys_at, values_at, block_stride, scale, softcap,
            D, BLOCK_TOKENS, N, PADDED_D, True, WINDOW, SOFTCAP, WIDEN, FP8, WORD,
        )  # fmt: skip
    top, total, sums = _attend(
        query, top, total, sums, kv, scales, table, own, lowest, low, clear, common,
        keys_at, values_at, block_stride, scale, softcap,
        D, BLOCK_TOKENS, N, PADDED_D, False, WINDOW, SOFTCAP, WIDEN, FP8, WORD,
    )  # fmt: skip
    top, total, sums = _attend(
        query, top, total, sums, kv, scales, table, own, lowest, low, common, end,
        keys_at, values_at, block_stride, scale, softcap,
        D, BLOCK_TOKENS, N, PADDED_D, True, WINDOW, SOFTCAP, WIDEN, FP8, WORD,
    )  # fmt: skip
    if FP8:
        sums *= rows_factor(query.dtype)
    result = sums / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out + (token[:, None] * H + head) * D + dim[None, :], result.to(out.dtype.element_ty), mask=inside)


def extend_attention(
    qkv: Tensor,
    kv: Tensor,
    scales: Tensor | None,
    layer: int,
    heads: int,
    block_table: Tensor,
    table_rows: Tensor,
    tile_rows: Tensor,
    tile_firsts: Tensor,
    tokens: int,
    starts: Tensor,
    num_new: Tensor,
    contexts: Tensor,
    reach: int,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    widen: bool,
    out: Tensor,
) -> None:
    """Computes the attention of rows with several new tokens, whose queries are divided into I tiles of `tokens` each, and writes
    the results of the tiles' tokens to out [T, H D].

    tile_rows, tile_firsts [I] int32: each tile's row, and the index of its first query among the row's new tokens. A tile whose
    first query is not among the row's new tokens is padding, for which nothing is computed.
    tokens: the result of tile_tokens for the head sizes of all layers; several programs compute a tile if each computes fewer
    queries. Raises ValueError if they cannot divide it evenly.
    starts, num_new, contexts [R] int32: the index of each row's first token in the step, its number of new tokens, and its number
    of positions after the step. reach: see triton_decode.first_seen. All other arguments, with the arena and the block tables, are
    those of triton_decode.decode_attention."""
    kv_heads, block_tokens, head_dim = kv.shape[3:]
    padded, stored = max(16, power_of_two(head_dim)), kv if scales is None else as_words(kv)
    tile = tiles.extend_tile(head_dim, qkv.element_size(), scales is not None)
    parts, rest = divmod(tokens, tile.tokens)
    if rest:
        raise ValueError(f"tiles of {tokens} queries cannot be cut into such of {tile.tokens}, as heads of {head_dim} take")
    _extend_kernel[(heads, len(tile_rows) * parts)](
        qkv,
        stored,
        kv if scales is None else scales,
        block_table,
        table_rows,
        tile_rows,
        tile_firsts,
        starts,
        num_new,
        contexts,
        contexts if sinks is None else sinks,
        out,
        layer,
        reach,
        block_table.stride(0),
        kv.stride(0),
        scale,
        softcap,
        H=heads,
        G=kv_heads,
        D=head_dim,
        WIDTH=qkv.shape[1],
        BLOCK_TOKENS=block_tokens,
        M=tile.tokens,
        PARTS=parts,
        N=tile.positions,
        PADDED_D=padded,
        WINDOW=reach != 0,
        SINKS=sinks is not None,
        SOFTCAP=softcap > 0,
        WIDEN=widen,
        FP8=scales is not None,
        WORD=head_dim // stored.shape[-1],
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
