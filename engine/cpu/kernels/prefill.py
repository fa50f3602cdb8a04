"""Computes the attention of prompts on the CPU (Numba): many query tokens of a sequence against its KV blocks, which are read in
place.

Shapes: T tokens of the step, R rows, B blocks of a row, H query heads, G KV heads, D head size; KV as in attention.py. Reference
implementations: reference.gather_context and reference.causal_attention.

The work is cut into tiles. A tile is a few query tokens with all query heads that share a KV head, about 32 heads in all, which use
a chunk of keys and values while it is in the cache. A tile reads only the positions to which its last token attends. Tiles are
dealt out to the threads in turn, because those of later tokens attend to more positions and take longer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, float64, int32, int64, njit, prange, types, void

from engine.cpu.kernels.attention_blocks import (
    CHUNK_TOKENS,
    HELPER,
    OPTIONS,
    add_block,
    add_sinks,
    first_seen,
    score_block,
    soften_row,
    write_heads,
)
from engine.cpu.kernels.bits import named

_TILE_ROWS = 32  # query tokens of a tile times the heads that share a KV head


@njit(**HELPER)
def _attend_tile(
    qkv: Any,
    first_token: int,  # index of the tile's first token in the step
    num_tokens: int,
    context: int,  # positions that the first token attends to, its own included
    kv_head: int,
    kv: Any,
    layer_at: int,
    kv_heads: int,
    block_stride: int,
    blocks: Any,
    block_tokens: int,
    head_dim: int,
    reach: int,
    scale: float,
    softcap: float,
    sinks: Any,
    group: int,
    queries: Any,  # [rows * D]: work space, as are the next five
    scores: Any,  # [rows, chunk]
    weights: Any,
    tops: Any,  # [rows]
    totals: Any,
    sums: Any,  # [rows, width]
    out: Any,
) -> None:
    plane = block_tokens * head_dim
    chunk_blocks = scores.shape[1] // block_tokens
    num_rows = num_tokens * group
    width = qkv.shape[1]
    flat = qkv.reshape(-1)
    for n in range(num_tokens):
        at = (first_token + n) * width + kv_head * group * head_dim
        for d in range(group * head_dim):
            queries[n * group * head_dim + d] = flat[at + d]
    tops[:] = float32(-np.inf)
    totals[:] = float32(0.0)
    sums[:, :] = float32(0.0)
    keys_at = layer_at + kv_head * plane
    values_at = keys_at + kv_heads * plane
    first_block = first_seen(context, reach) // block_tokens
    end_block = (context + num_tokens - 1 + block_tokens - 1) // block_tokens
    for chunk in range(first_block, end_block, chunk_blocks):
        chunk_end = min(chunk + chunk_blocks, end_block)
        base = chunk * block_tokens
        stop_all = min(chunk_end * block_tokens, context + num_tokens - 1) - base
        for block in range(chunk, chunk_end):
            at = np.int64(blocks[block]) * block_stride
            stop = min(block_tokens, stop_all - (block - chunk) * block_tokens)
            ahead = np.int64(blocks[min(block + 1, chunk_end - 1)]) * block_stride - at
            to = (block - chunk) * block_tokens
            score_block(queries, 0, kv, at + keys_at, ahead, stop, head_dim, float32(scale), scores[:num_rows], to)
        start_all = stop_all
        for n in range(num_tokens):
            end = min(context + n - base, stop_all)
            begin = max(first_seen(context + n, reach) - base, 0)
            if begin < end:
                start_all = min(start_all, begin)
            for g in range(n * group, (n + 1) * group):
                if begin < end:
                    weights[g, :begin] = 0
                    weights[g, max(end, 0) : stop_all] = 0
                    soften_row(scores, g, begin, end, softcap, weights, g, tops, totals, sums)
                else:
                    weights[g, :stop_all] = 0
        for block in range(chunk, chunk_end):
            at = np.int64(blocks[block]) * block_stride
            place = (block - chunk) * block_tokens
            start, stop = max(start_all - place, 0), min(block_tokens, stop_all - place)
            ahead = np.int64(blocks[min(block + 1, chunk_end - 1)]) * block_stride - at
            if start < stop:
                add_block(weights[:num_rows], start, stop, place + start, kv, at + values_at, ahead, head_dim, sums, 0)
    for n in range(num_tokens):
        own = slice(n * group, (n + 1) * group)
        at = kv_head * group * head_dim
        add_sinks(sinks, kv_head * group, tops[own], totals[own])
        write_heads(sums[own], totals[own], out[first_token + n, at : at + group * head_dim], head_dim)


def _prefill_attention(
    qkv: Any,  # [T, (H + 2 G) * D]
    kv: Any,  # [elements]
    layers: int,
    layer: int,
    heads: int,
    kv_heads: int,
    block_tokens: int,  # a multiple of 4
    head_dim: int,
    block_table: Any,  # [R, B] int32
    starts: Any,  # [R] int32: index of the row's first token in the step
    num_new: Any,  # [R] int32: tokens of the row in the step
    contexts: Any,  # [R] int32: positions stored for the row, those of these tokens included
    longer_than: int,  # rows of more tokens than this are served, no others
    reach: int,  # how far back a token sees (attention_blocks.first_seen)
    scale: float,
    softcap: float,  # scores become softcap * tanh(score / softcap); 0: unchanged
    sinks: Any,  # [H]: one more score for each head, without a value; or [0]: there are none
    num_shares: int,
    out: Any,  # [T, H * D]; only these rows' tokens are written
) -> None:
    group = heads // kv_heads
    at_once = max(1, _TILE_ROWS // group)
    width = (head_dim + 63) // 64 * 64
    plane = block_tokens * head_dim
    for share in prange(num_shares):
        queries = np.empty(at_once * group * head_dim, kv.dtype)
        scores = np.empty((at_once * group, max(CHUNK_TOKENS, block_tokens)), np.float32)
        weights = np.empty(scores.shape, kv.dtype)
        tops, totals = np.empty(at_once * group, np.float32), np.empty(at_once * group, np.float32)
        sums = np.empty((at_once * group, width), np.float32)
        passed = 0
        for row in range(num_new.shape[0]):
            num_tokens = num_new[row]
            if num_tokens <= longer_than:
                continue
            num_items = (num_tokens + at_once - 1) // at_once * kv_heads
            for item in range((share - passed) % num_shares, num_items, num_shares):
                tile = item // kv_heads * at_once
                _attend_tile(
                    qkv,
                    starts[row] + tile,
                    min(at_once, num_tokens - tile),
                    contexts[row] - num_tokens + tile + 1,
                    item % kv_heads,
                    kv,
                    layer * 2 * kv_heads * plane,
                    kv_heads,
                    layers * 2 * kv_heads * plane,
                    block_table[row],
                    block_tokens,
                    head_dim,
                    reach,
                    scale,
                    softcap,
                    sinks,
                    group,
                    queries,
                    scores,
                    weights,
                    tops,
                    totals,
                    sums,
                    out,
                )
            passed += num_items


def prefill_attention_signature(element: types.Type) -> Any:
    return void(
        element[:, ::1],
        element[::1],
        *(int64,) * 6,
        int32[:, ::1],
        *(int32[::1],) * 3,
        *(int64,) * 2,
        float64,
        float64,
        float32[::1],
        int64,
        element[:, ::1],
    )


prefill_attention_serial = njit(**OPTIONS)(_prefill_attention)
prefill_attention_parallel = njit(**OPTIONS, parallel=True)(named("_prefill_attention_parallel", _prefill_attention))
