"""Computes the attention of one query token with AMX (Numba). attention.py calls attend_tiles, instead of its own function _attend,
where AMX tiles can be used."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, njit

from engine.cpu.kernels.amx import TILE_ROW_BYTES, configure_tiles, release_tiles
from engine.cpu.kernels.amx_attention import (
    LEAST_TOP,
    PAIR_FETCHES,
    SCORE_FETCHES,
    WEIGH_FETCHES,
    add_rows,
    pack_queries,
    pair_values,
    place_ahead,
    place_chunk,
    score_rows,
)
from engine.cpu.kernels.amx_softmax import CHUNK_TOKENS, weigh_row
from engine.cpu.kernels.attention_blocks import HELPER
from engine.cpu.kernels.bits import fetch_lines

_LN_2 = float32(0.6931471805599453)
_LOG2_E = 1.4426950408889634


@njit(**HELPER)
def attend_tiles(
    qkv: Any,
    query_at: int,
    kv: Any,
    layer_at: int,
    kv_heads: int,
    block_stride: int,
    blocks: Any,
    begin_block: int,
    end_block: int,
    next_blocks: Any,
    next_begin: int,
    next_end: int,
    first: int,
    context: int,
    block_tokens: int,
    head_dim: int,
    scale: float,
    softcap: float,
    no_scores: Any,  # _attend's work space, not used here
    no_weights: Any,
    tops: Any,  # [H], result, as _attend's
    totals: Any,  # [H], result
    sums: Any,  # [H, width], result
) -> None:
    """Computes the attention of one query token to the blocks from begin_block to below end_block of its block table, with AMX
    tiles. Also prefetches the first chunk of the blocks from next_begin to below next_end of next_blocks. Arguments and results are
    those of attention._attend, where comments describe each. The caller must merge tops, totals and sums with those of the token's
    other parts, and divide the sums by the totals."""
    heads = tops.shape[0]
    group = heads // kv_heads
    plane, pieces = block_tokens * head_dim, head_dim // 32
    width = sums.shape[1]
    unit = float32(scale) if softcap > 0.0 else float32(scale * _LOG2_E)
    queries = np.zeros(kv_heads * 8 * head_dim, np.uint32)
    scores, spread = np.empty(CHUNK_TOKENS * 16, np.float32), np.empty(CHUNK_TOKENS * 16, np.float32)
    weights, pairs = np.empty(CHUNK_TOKENS // 2 * 16, np.uint32), np.empty(CHUNK_TOKENS // 2 * head_dim, np.uint32)
    parts = np.zeros((heads, 16), np.float32)
    places, soon = np.empty(4 + CHUNK_TOKENS, np.int64), np.empty(4 + CHUNK_TOKENS, np.int64)
    ahead = np.empty(kv_heads * (head_dim // 2), np.int64)
    configuration = np.zeros(64, np.uint8)
    configuration[0] = 1
    for tile in range(8):
        configuration[16 + 2 * tile] = TILE_ROW_BYTES
        configuration[48 + tile] = group if tile >= 4 else 16
    tops[:] = LEAST_TOP
    sums[:, :] = float32(0.0)
    for kv_head in range(kv_heads):
        pack_queries(qkv, query_at + kv_head * group * head_dim, group, kv_head * 16, head_dim, queries)
    begin_position = max(first, begin_block * block_tokens)
    stop = min(context, end_block * block_tokens)
    configure_tiles(configuration)
    place_chunk(blocks, begin_block * block_tokens, begin_position, stop, block_tokens, block_stride, head_dim, soon)
    for chunk in range(begin_block * block_tokens, stop, CHUNK_TOKENS):
        places, soon = soon, places
        if chunk + CHUNK_TOKENS < stop:
            place_chunk(blocks, chunk + CHUNK_TOKENS, begin_position, stop, block_tokens, block_stride, head_dim, soon)
        elif next_begin < next_end:
            at, end = next_begin * block_tokens, next_end * block_tokens
            place_chunk(next_blocks, at, at, end, block_tokens, block_stride, head_dim, soon)
        else:  # nothing follows: prefetch this chunk again, which is in the caches already
            for at in range(places.shape[0]):
                soon[at] = places[at]
        place_ahead(soon, layer_at, kv_heads, plane, head_dim, ahead)
        begin, end = max(begin_position - chunk, 0), min(stop - chunk, CHUNK_TOKENS)
        for kv_head in range(kv_heads):
            keys_at = layer_at + kv_head * plane
            head = kv_head * group
            number = kv_head * (head_dim // 2)
            score_rows(queries, kv_head * 16, group, kv, places, keys_at, head_dim, scores, spread, ahead, number)
            number += pieces * SCORE_FETCHES
            for g in range(group):
                for fetch in range(pieces * WEIGH_FETCHES * g // group, pieces * WEIGH_FETCHES * (g + 1) // group):
                    fetch_lines(kv, ahead[number + fetch])
                weigh_row(spread, g, begin, end, unit, float32(softcap), weights, head + g, tops, parts, sums, width)
            number += pieces * WEIGH_FETCHES
            pair_values(kv, places, keys_at + kv_heads * plane, head_dim, pairs, ahead, number)
            add_rows(weights, pairs, head_dim, sums, head, kv, ahead, number + pieces * PAIR_FETCHES)
    release_tiles()
    for head in range(heads):
        tops[head] *= _LN_2
        totals[head] = parts[head].sum()
