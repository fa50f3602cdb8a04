"""Computes attention to latents on the GPU (Triton). Queries [T, H, L + E] have already been multiplied by each head's key matrix,
so they are compared with the latents as stored. Each tile of latents is loaded once and used as keys and as values. Decode steps
are divided into the pieces of triton_decode; rows with several new tokens into the tiles of triton_extend.

Shapes: T tokens, R rows, I pieces of work, H heads, L numbers of a latent, E rotated dimensions of keys and queries. Reference
implementation: reference.latent_attention.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels import triton_decode
from engine.cuda.kernels.sizes import ceil_div, power_of_two
from engine.cuda.kernels.triton_decode import DecodeWork
from engine.cuda.kernels.triton_fp8 import scale_of, widened
from engine.cuda.kernels.triton_softmax import accumulate, log2_factor, scores_of

QUERIES = 32  # query tokens of a program, 16 of float32: with 64, accumulators of 512 numbers each leave the registers


@triton.jit
def _read(
    latents, turned, top, total, sums, kv, scales, table, own, begin, end, layer, block_stride, scale,
    L: tl.constexpr, E: tl.constexpr, BLOCK_TOKENS: tl.constexpr, N: tl.constexpr, PADDED_L: tl.constexpr, PADDED_E: tl.constexpr,
    MASKED: tl.constexpr, WIDEN: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Adds the positions from `begin` to `end` - 1 to the running softmax of M queries. Returns its new state (top [M], total [M],
    sums [M, PADDED_L]), as triton_softmax.accumulate does.

    latents [M, PADDED_L], turned [M, PADDED_E]: the parts of the queries for latents and for rotated keys. table: the row's block
    table.
    MASKED: positions are masked out if they are after the query's own (own [M]) or from `end` on. False: the caller promises that
    there are no such positions."""
    number, dim, place = tl.arange(0, PADDED_L), tl.arange(0, PADDED_E), tl.arange(0, N)
    factor = log2_factor(scale, False)
    for start in range(begin, end, N):
        position = start + place
        there = position < end if MASKED else place >= 0
        block = tl.load(table + position // BLOCK_TOKENS, mask=there, other=0).to(tl.int64)
        slot = layer * BLOCK_TOKENS + position % BLOCK_TOKENS
        cell = kv + (block * block_stride + slot * (L + E))[:, None]
        latent = tl.load(cell + number[None, :], mask=there[:, None] & (number < L)[None, :], other=0)
        key = tl.load(cell + L + dim[None, :], mask=there[:, None] & (dim < E)[None, :], other=0)
        if FP8:
            by_row = scale_of(tl.load(scales + block * block_stride + slot, mask=there, other=0)).to(latents.dtype)[:, None]
            latent, key = widened(latent, latents.dtype) * by_row, widened(key, latents.dtype) * by_row
        scores = scores_of(latents, latent, scale, 0.0, False, WIDEN) + scores_of(turned, key, scale, 0.0, False, WIDEN)
        if MASKED:
            scores = tl.where(there[None, :] & (position[None, :] <= own[:, None]), scores, float("-inf"))
        top, total, sums = accumulate(scores, factor, latent, 1.0, top, total, sums, WIDEN)
    return top, total, sums


# Which strides are specialised: see triton_decode._piece_kernel.
@triton.jit(do_not_specialize=["layer", "table_stride"])
def _latent_piece_kernel(
    queries,  # [T, H, L + E]; row r's query is token r
    kv,
    scales,  # the scales of fp8 KV
    block_table,  # [S, B] int32
    table_rows,  # [R] int32: each row's index in block_table
    rows,  # [I]
    begins,
    ends,
    partial,  # [I, H, L] float32
    partial_log,  # [I, H] float32: log2 of a piece's sum of weights
    layer,
    table_stride,
    block_stride,
    scale,
    H: tl.constexpr,
    L: tl.constexpr,
    E: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    PADDED_L: tl.constexpr,
    PADDED_E: tl.constexpr,
    WIDEN: tl.constexpr,
    FP8: tl.constexpr,
):
    item = tl.program_id(0)
    begin, end = tl.load(begins + item), tl.load(ends + item)
    if begin >= end:
        return
    row = tl.load(rows + item).to(tl.int64)
    head, number, dim = tl.program_id(1) * M + tl.arange(0, M), tl.arange(0, PADDED_L), tl.arange(0, PADDED_E)
    is_head, is_number = head < H, number < L
    query = queries + (row * H + head[:, None]) * (L + E)
    latents = tl.load(query + number[None, :], mask=is_head[:, None] & is_number[None, :], other=0.0)
    turned = tl.load(query + L + dim[None, :], mask=is_head[:, None] & (dim < E)[None, :], other=0.0)
    if WIDEN:
        latents, turned = latents.to(tl.float32), turned.to(tl.float32)
    table = block_table + tl.load(table_rows + row).to(tl.int64) * table_stride
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, PADDED_L], tl.float32)
    top, total, sums = _read(
        latents, turned, top, total, sums, kv, scales, table, tl.zeros([M], tl.int32) + end, begin, end, layer, block_stride, scale,
        L, E, BLOCK_TOKENS, N, PADDED_L, PADDED_E, True, WIDEN, FP8,
    )  # fmt: skip
    at = (item * H + head).to(tl.int64)
    tl.store(partial + at[:, None] * L + number[None, :], sums / total[:, None], mask=is_head[:, None] & is_number[None, :])
    tl.store(partial_log + at, top + tl.log2(total), mask=is_head)


@triton.jit(do_not_specialize=["layer", "table_stride", "first_token", "num_tokens"])
def _latent_extend_kernel(
    queries,  # [T', H, L + E]: those of the step's tokens from first_token on
    kv,
    scales,  # the scales of fp8 KV
    block_table,  # [S, B] int32
    table_rows,  # [R] int32: each row's index in block_table
    tile_rows,  # [I] int32
    tile_firsts,  # [I] int32: the tile's first query among the row's new tokens
    starts,  # [R] int32: index in T of the row's first token
    num_new,  # [R] int32
    contexts,  # [R] int32
    out,  # [T', H, L]
    layer,
    table_stride,
    block_stride,
    scale,
    first_token,
    num_tokens,  # T'
    H: tl.constexpr,
    L: tl.constexpr,
    E: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    PADDED_L: tl.constexpr,
    PADDED_E: tl.constexpr,
    WIDEN: tl.constexpr,
    FP8: tl.constexpr,
):
    head = tl.program_id(0)
    tile, part = tl.program_id(1), tl.program_id(2)
    row = tl.load(tile_rows + tile)
    first = tl.load(tile_firsts + tile) + part * M
    new, context = tl.load(num_new + row), tl.load(contexts + row)
    begins_at = tl.load(starts + row) + first - first_token  # the index of the first query among those at hand
    if (first >= new) | (begins_at >= num_tokens) | (begins_at + M <= 0):
        return
    before = context - new
    member, number, dim = tl.arange(0, M), tl.arange(0, PADDED_L), tl.arange(0, PADDED_E)
    token = (begins_at + member).to(tl.int64)
    inside, is_number = (first + member < new) & (token >= 0) & (token < num_tokens), number < L
    query = queries + (token[:, None] * H + head) * (L + E)
    latents = tl.load(query + number[None, :], mask=inside[:, None] & is_number[None, :], other=0.0)
    turned = tl.load(query + L + dim[None, :], mask=inside[:, None] & (dim < E)[None, :], other=0.0)
    if WIDEN:
        latents, turned = latents.to(tl.float32), turned.to(tl.float32)
    table = block_table + tl.load(table_rows + row).to(tl.int64) * table_stride
    own = before + first + member  # position of each query
    end = tl.minimum(before + first + M, context)
    common = (before + first + 1) // N * N  # every query sees the positions to here
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, PADDED_L], tl.float32)
    top, total, sums = _read(
        latents, turned, top, total, sums, kv, scales, table, own, 0, common, layer, block_stride, scale,
        L, E, BLOCK_TOKENS, N, PADDED_L, PADDED_E, False, WIDEN, FP8,
    )  # fmt: skip
    top, total, sums = _read(
        latents, turned, top, total, sums, kv, scales, table, own, common, end, layer, block_stride, scale,
        L, E, BLOCK_TOKENS, N, PADDED_L, PADDED_E, True, WIDEN, FP8,
    )  # fmt: skip
    result = sums / tl.where(total > 0.0, total, 1.0)[:, None]
    at = out + (token[:, None] * H + head) * L + number[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=inside[:, None] & is_number[None, :])


def decode_attention(
    queries: Tensor,
    kv: Tensor,
    scales: Tensor | None,
    layer: int,
    block_table: Tensor,
    table_rows: Tensor,
    work: DecodeWork,
    scale: float,
    tile_heads: int,
    widen: bool,
    out: Tensor,
) -> None:
    """Computes the attention of R rows with one new token each, and writes it to out [T, H, L]. The queries are the first R tokens
    of queries [T, H, L + E]. Rows without a context get zeros. tile_heads: the most heads that read a tile of latents together. All
    other arguments, with the arena and the block tables, are those of triton_decode.decode_attention."""
    heads, rank = queries.shape[1], out.shape[2]
    num_items, wide_items = len(work.rows), queries.element_size() == 4
    partial = torch.empty(num_items, heads, rank, dtype=torch.float32, device=queries.device)
    partial_log = torch.empty(num_items, heads, dtype=torch.float32, device=queries.device)
    tile = min(tile_heads, max(16, power_of_two(heads)))
    _latent_piece_kernel[(num_items, ceil_div(heads, tile))](
        queries,
        kv,
        kv if scales is None else scales,
        block_table,
        table_rows,
        work.rows,
        work.begins,
        work.ends,
        partial,
        partial_log,
        layer,
        block_table.stride(0),
        kv.stride(0),
        scale,
        **_sizes(queries, kv, rank),
        M=tile,
        N=16 if wide_items else 32,
        WIDEN=widen,
        FP8=scales is not None,
        num_warps=8 if tile > 16 else 4,
        num_stages=2,
    )
    triton_decode.combine(partial, partial_log, work, None, out)


def extend_attention(
    queries: Tensor,
    first_token: int,
    kv: Tensor,
    scales: Tensor | None,
    layer: int,
    block_table: Tensor,
    table_rows: Tensor,
    tile_rows: Tensor,
    tile_firsts: Tensor,
    tile_tokens: int,
    starts: Tensor,
    num_new: Tensor,
    contexts: Tensor,
    scale: float,
    widen: bool,
    out: Tensor,
) -> None:
    """Computes the attention of rows with several new tokens, whose queries are divided into tiles of tile_tokens each, and writes
    the results to out [T', H, L]. queries [T', H, L + E]: T' of the step's tokens, from first_token on; tiles or parts of tiles
    outside of these tokens are skipped. All other arguments, with the arena and the block tables, are those of
    triton_extend.extend_attention."""
    wide_items = queries.element_size() == 4
    num_queries = min(tile_tokens, 16 if wide_items else QUERIES)
    _latent_extend_kernel[(queries.shape[1], len(tile_rows), ceil_div(tile_tokens, num_queries))](
        queries,
        kv,
        kv if scales is None else scales,
        block_table,
        table_rows,
        tile_rows,
        tile_firsts,
        starts,
        num_new,
        contexts,
        out,
        layer,
        block_table.stride(0),
        kv.stride(0),
        scale,
        first_token,
        len(queries),
        **_sizes(queries, kv, out.shape[2]),
        M=num_queries,
        N=16 if wide_items else 32,
        WIDEN=widen,
        FP8=scales is not None,
        num_warps=4 if wide_items else 8,
        num_stages=2,
    )


def _sizes(queries: Tensor, kv: Tensor, rank: int) -> dict[str, int]:
    heads, width = queries.shape[1:]
    padded = {"PADDED_L": max(16, power_of_two(rank)), "PADDED_E": max(16, power_of_two(width - rank))}
    return {"H": heads, "L": rank, "E": width - rank, "BLOCK_TOKENS": kv.shape[4]} | padded
