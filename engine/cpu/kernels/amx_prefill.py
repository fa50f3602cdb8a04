"""Computes the attention of prompts on the CPU with AMX (Numba), as prefill.py does, for bfloat16 and for blocks whose keys are
whole tiles (amx.fits_tiles).

About 64 rows (query tokens times the heads that share a KV head) are computed at a time, so that the pairs that are made of a
chunk's values serve four tiles of rows. Reference implementations: reference.gather_context and reference.causal_attention."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, njit, prange

from engine.cpu.kernels.amx import configure_tiles, release_tiles, tile_configuration
from engine.cpu.kernels.amx_attention import LEAST_TOP, TILE_TOKENS, add_rows, pack_queries, pair_values, place_chunk, score_rows
from engine.cpu.kernels.amx_softmax import CHUNK_TOKENS, weigh_row
from engine.cpu.kernels.attention_blocks import HELPER, OPTIONS, add_sinks, first_seen, write_heads
from engine.cpu.kernels.bits import named

_ROWS = 64
_LN_2 = float32(0.6931471805599453)
_LOG2_E = 1.4426950408889634
_CONFIGURATION = tile_configuration()


@njit(**HELPER)
def _attend_tokens(
    qkv: Any,
    first_token: int,  # index in the step
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
    queries: Any,  # [rows / 16, C, 16, 16] uint32, flat: work space, as are the next eight
    places: Any,  # [4 + 64]
    scores: Any,  # [64 * 16]
    spread: Any,  # [16 * 64]
    weights: Any,  # [2, 16, 16] uint32, flat
    pairs: Any,  # [32 * D] uint32
    tops: Any,  # [rows]
    totals: Any,  # [rows, 16]
    sums: Any,  # [rows, width]
    out: Any,
) -> None:
    plane = block_tokens * head_dim
    num_rows = num_tokens * group
    width = sums.shape[1]
    unit = float32(scale) if softcap > 0.0 else float32(scale * _LOG2_E)
    queries[:] = 0
    tops[:] = LEAST_TOP
    totals[:, :] = float32(0.0)
    sums[:, :] = float32(0.0)
    for n in range(num_tokens):
        at = (first_token + n) * np.int64(qkv.shape[1]) + kv_head * group * head_dim
        pack_queries(qkv, at, group, n * group, head_dim, queries)
    keys_at = layer_at + kv_head * plane
    values_at = keys_at + kv_heads * plane
    first = first_seen(context, reach)
    stop = context + num_tokens - 1
    base = first // TILE_TOKENS * TILE_TOKENS
    while base < stop:
        place_chunk(blocks, base, first, stop, block_tokens, block_stride, head_dim, places)
        pair_values(kv, places, values_at, head_dim, pairs, None, 0)
        for row in range(0, num_rows, 16):
            rows = min(16, num_rows - row)
            score_rows(queries, row, 16, kv, places, keys_at, head_dim, scores, spread, None, 0)
            for r in range(rows):
                last = context + (row + r) // group  # the first position that the row does not see
                begin = max(first_seen(last, reach) - base, 0)
                end = min(last - base, CHUNK_TOKENS)
                weigh_row(spread, r, begin, end, unit, float32(softcap), weights, row + r, tops, totals, sums, width)
            add_rows(weights, pairs, head_dim, sums, row, kv, None, 0)
        base += CHUNK_TOKENS
    for n in range(num_tokens):
        to = kv_head * group * head_dim
        for row in range(n * group, (n + 1) * group):
            totals[row, 0] = totals[row].sum()
            tops[row] *= _LN_2
        own_rows = slice(n * group, (n + 1) * group)
        add_sinks(sinks, kv_head * group, tops[own_rows], totals[own_rows, 0])
        write_heads(sums[own_rows], totals[own_rows, 0], out[first_token + n, to : to + group * head_dim], head_dim)


@njit(**HELPER)
def _attend_share(
    qkv: Any,
    kv: Any,
    layers: int,
    layer: int,
    kv_heads: int,
    block_tokens: int,
    head_dim: int,
    block_table: Any,
    starts: Any,
    num_new: Any,
    contexts: Any,
    longer_than: int,
    reach: int,
    scale: float,
    softcap: float,
    sinks: Any,
    group: int,
    share: int,
    num_shares: int,
    out: Any,
) -> None:
    """Computes one share (`share` of num_shares) of the attention of a step's long rows, and writes it to out [T, H * D]. The
    queries are in qkv [T, (H + 2 G) * D], and the keys and values of all positions in kv. The work is cut into items, each of a few
    tokens of a row and one KV head, which are dealt out to the shares in turn. group: number of query heads that share a KV head.
    Comments in prefill._prefill_attention explain all other parameters."""
    at_once = max(1, _ROWS // group)
    num_rows = (at_once * group + 15) // 16 * 16
    plane = block_tokens * head_dim
    queries = np.empty(num_rows * head_dim // 2, np.uint32)
    places = np.empty(4 + CHUNK_TOKENS, np.int64)
    scores, spread = np.empty(CHUNK_TOKENS * 16, np.float32), np.empty(CHUNK_TOKENS * 16, np.float32)
    weights, pairs = np.zeros(CHUNK_TOKENS // 2 * 16, np.uint32), np.empty(CHUNK_TOKENS // 2 * head_dim, np.uint32)
    tops, totals = np.empty(num_rows, np.float32), np.empty((num_rows, 16), np.float32)
    sums = np.empty((num_rows, head_dim), np.float32)
    configure_tiles(_CONFIGURATION)
    passed = 0
    for row in range(num_new.shape[0]):
        num_tokens = num_new[row]
        if num_tokens <= longer_than:
            continue
        num_items = (num_tokens + at_once - 1) // at_once * kv_heads
        for item in range((share - passed) % num_shares, num_items, num_shares):
            token = item // kv_heads * at_once
            _attend_tokens(
                qkv,
                starts[row] + token,
                min(at_once, num_tokens - token),
                contexts[row] - num_tokens + token + 1,
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
                places,
                scores,
                spread,
                weights,
                pairs,
                tops,
                totals,
                sums,
                out,
            )
        passed += num_items
    release_tiles()


def _prefill_attention_tiles(
    qkv: Any,
    kv: Any,
    layers: int,
    layer: int,
    heads: int,
    kv_heads: int,
    block_tokens: int,  # a multiple of 16
    head_dim: int,  # a multiple of 32
    block_table: Any,
    starts: Any,
    num_new: Any,
    contexts: Any,
    longer_than: int,
    reach: int,
    scale: float,
    softcap: float,
    sinks: Any,
    num_shares: int,
    out: Any,
) -> None:
    """Computes the attention of rows with more than longer_than new tokens with AMX tiles, in bfloat16, from the queries in qkv and
    the keys and values in kv, and writes it to out. It is the counterpart of prefill._prefill_attention, where a comment explains
    each parameter."""
    for share in prange(num_shares):
        _attend_share(
            qkv,
            kv,
            layers,
            layer,
            kv_heads,
            block_tokens,
            head_dim,
            block_table,
            starts,
            num_new,
            contexts,
            longer_than,
            reach,
            scale,
            softcap,
            sinks,
            heads // kv_heads,
            share,
            num_shares,
            out,
        )


prefill_tiles_serial = njit(**OPTIONS)(_prefill_attention_tiles)
prefill_tiles_parallel = njit(**OPTIONS, parallel=True)(named("_prefill_attention_tiles_parallel", _prefill_attention_tiles))
