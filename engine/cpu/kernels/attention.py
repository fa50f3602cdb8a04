"""Computes paged attention on the CPU (Numba): any set of query tokens against their sequences' KV blocks, in one call.

Shapes: T tokens of the step, N query tokens served here, R rows, B blocks of a row, H query heads, G KV heads, D head size, width:
D padded to a multiple of 64. The KV arena is passed as a flat array. Block b starts at element b * layers * 2 * G * block_tokens *
D and holds, for each layer, keys then values as [G, block_tokens, D]. Reference implementation: reference.paged_attention.

The blocks of all query tokens are laid end to end and cut into equal shares, one for each thread, so that one long context keeps
all threads busy, even next to many short ones. A share's part of a token is added up chunk by chunk, and rescaled whenever a larger
score is found. The parts of a token that was cut are combined at the end. All heads process a chunk before the next one, so that a
block, whose heads lie end to end, is read in one go. The next chunk is prefetched meanwhile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import boolean, float32, float64, int32, int64, njit, prange, types, void
from numba.extending import overload

from engine.cpu.kernels.amx import HAS_TILES
from engine.cpu.kernels.amx_decode import attend_tiles
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
from engine.cpu.kernels.bits import exp, named


@njit(**HELPER)
def _attend(
    qkv: Any,
    query_at: int,  # index in qkv of the first query head
    kv: Any,
    layer_at: int,  # where the layer begins in a block
    kv_heads: int,
    block_stride: int,
    blocks: Any,  # the row's block table
    begin_block: int,  # from this block of the table
    end_block: int,  # to below this one
    next_blocks: Any,  # the block table whose blocks are attended to afterwards and are prefetched
    next_begin: int,
    next_end: int,
    first: int,  # from this position
    context: int,  # to below this one
    block_tokens: int,
    head_dim: int,
    scale: float,
    softcap: float,
    scores: Any,  # [group, chunk]: work space
    weights: Any,  # [group, chunk] elements: work space
    tops: Any,  # [H], result: largest scores
    totals: Any,  # [H], result: sums of e**(score - top)
    sums: Any,  # [H, width], result: values weighted with e**(score - top)
) -> None:
    group = scores.shape[0]
    chunk_blocks = scores.shape[1] // block_tokens
    plane = block_tokens * head_dim
    tops[:] = float32(-np.inf)
    totals[:] = float32(0.0)
    sums[:, :] = float32(0.0)
    for chunk in range(begin_block, end_block, chunk_blocks):
        chunk_end = min(chunk + chunk_blocks, end_block)
        base = chunk * block_tokens
        soon_blocks, soon, soon_end = blocks, chunk_end, end_block
        if chunk_end == end_block:
            soon_blocks, soon, soon_end = next_blocks, next_begin, next_end
        fetched = 0
        for kv_head in range(kv_heads):
            head = kv_head * group
            head_at = layer_at + kv_head * plane
            for to_values in range(2):
                if to_values == 1:
                    head_at += kv_heads * plane
                    begin, end = max(first - base, 0), min(chunk_end * block_tokens, context) - base
                    for g in range(group):
                        soften_row(scores, g, begin, end, softcap, weights, head + g, tops, totals, sums)
                for block in range(chunk, chunk_end):
                    at = np.int64(blocks[block]) * block_stride + head_at
                    ahead = np.int64(0)  # the next chunk is prefetched in the order of memory
                    if soon + fetched // (2 * kv_heads) < soon_end:
                        soon_at = np.int64(soon_blocks[soon + fetched // (2 * kv_heads)]) * block_stride
                        ahead = soon_at + layer_at + fetched % (2 * kv_heads) * plane - at
                    fetched += 1
                    start = max(first - block * block_tokens, 0)
                    stop = min(block_tokens, context - block * block_tokens)
                    to = (block - chunk) * block_tokens
                    if to_values == 0:
                        score_block(qkv, query_at + head * head_dim, kv, at, ahead, stop, head_dim, float32(scale), scores, to)
                    else:
                        add_block(weights, start, stop, to + start, kv, at, ahead, head_dim, sums, head)


def _attend_either(use_tiles: bool, qkv: Any, *rest: Any) -> None:
    """Computes a query token's attention to some blocks, by attend_tiles if use_tiles, else by _attend. qkv, rest: the arguments of
    both functions. attend_tiles exists only for bfloat16 on processors with AMX; elsewhere Numba compiles a call of this function
    as a call of _attend (see _attend_either_of)."""


@overload(_attend_either, jit_options=HELPER)
def _attend_either_of(use_tiles: Any, qkv: Any, *rest: Any) -> Any:
    if HAS_TILES and qkv.dtype == types.uint16:

        def either(use_tiles: Any, qkv: Any, *rest: Any) -> Any:
            if use_tiles:
                attend_tiles(qkv, *rest)
            else:
                _attend(qkv, *rest)

        return either

    def vectors(use_tiles: Any, qkv: Any, *rest: Any) -> Any:
        _attend(qkv, *rest)

    return vectors


@njit(**HELPER)
def _copy_part(tops: Any, totals: Any, sums: Any, to_tops: Any, to_totals: Any, to_sums: Any) -> None:
    """Copies tops [H], totals [H] and sums [H, width] to to_tops, to_totals and to_sums. The copies are loops because Numba would
    take four seconds to compile slice assignments with their error message."""
    for head in range(sums.shape[0]):
        to_tops[head], to_totals[head] = tops[head], totals[head]
        for at in range(sums.shape[1]):
            to_sums[head, at] = sums[head, at]


@njit(**HELPER)
def _add_cut(tops: Any, totals: Any, sums: Any, to_tops: Any, to_totals: Any, to_sums: Any) -> None:
    """Merges one part of a token's attention (tops [H], totals [H], sums [H, width], as _attend writes them) into another part of
    the same token (to_tops, to_totals, to_sums). Both are rescaled to the larger of their tops."""
    for g in range(tops.shape[0]):
        top = max(tops[g], to_tops[g])
        left, right = exp(to_tops[g] - top), exp(tops[g] - top)
        to_tops[g] = top
        to_totals[g] = to_totals[g] * left + totals[g] * right
        for d in range(sums.shape[1]):
            to_sums[g, d] = to_sums[g, d] * left + sums[g, d] * right


@njit(**HELPER)
def _blocks_of(context: int, reach: int, block_tokens: int) -> tuple[int, int]:
    """Returns the index in the block table of the first block that a query token reads, and the index after its last. context:
    number of positions up to the token's own, which is included. reach: how far back the token attends, as in first_seen."""
    first_block = first_seen(context, reach) // block_tokens
    return first_block, (context + block_tokens - 1) // block_tokens


@njit(**HELPER)
def _attend_share(
    qkv: Any,
    kv: Any,
    layers: int,
    layer: int,
    heads: int,
    kv_heads: int,
    block_tokens: int,
    head_dim: int,
    block_table: Any,
    tokens: Any,
    rows: Any,
    contexts: Any,
    reach: int,
    scale: float,
    softcap: float,
    sinks: Any,
    use_tiles: bool,
    share_begin: int,  # the share is the blocks of all work from this one
    share_end: int,  # to below this one
    out: Any,
    cut: Any,  # [2]: the index into tokens of the token that began before the share, and 1 if it ends in the share
    cut_tops: Any,  # [H], [H], [H, width]: that token's part in this share
    cut_totals: Any,
    cut_sums: Any,
    open_tops: Any,  # the same for the token that began in this share and continues after it
    open_totals: Any,
    open_sums: Any,
) -> None:
    plane = block_tokens * head_dim
    num_tokens = tokens.shape[0]
    scores = np.empty((heads // kv_heads, max(CHUNK_TOKENS, block_tokens)), np.float32)
    weights = np.empty(scores.shape, kv.dtype)
    tops, totals, sums = np.empty(heads, np.float32), np.empty(heads, np.float32), np.empty(cut_sums.shape, np.float32)
    passed = 0
    for n in range(num_tokens):
        context = contexts[n]
        first_block, end_block = _blocks_of(context, reach, block_tokens)
        begin = max(share_begin - passed, 0)
        end = min(share_end - passed, end_block - first_block)
        passed += end_block - first_block
        if begin >= end:
            continue
        follower = min(n + 1, num_tokens - 1)
        next_begin, next_end = _blocks_of(contexts[follower], reach, block_tokens)
        _attend_either(
            use_tiles,
            qkv,
            tokens[n] * np.int64(qkv.shape[1]),
            kv,
            layer * 2 * kv_heads * plane,
            kv_heads,
            layers * 2 * kv_heads * plane,
            block_table[rows[n]],
            first_block + begin,
            first_block + end,
            block_table[rows[follower]],
            next_begin,
            next_end if passed < share_end else next_begin,
            first_seen(context, reach),
            context,
            block_tokens,
            head_dim,
            scale,
            softcap,
            scores,
            weights,
            tops,
            totals,
            sums,
        )
        if begin > 0:
            cut[0], cut[1] = n, 1 if end == end_block - first_block else 0
            _copy_part(tops, totals, sums, cut_tops, cut_totals, cut_sums)
        elif end < end_block - first_block:
            _copy_part(tops, totals, sums, open_tops, open_totals, open_sums)
        else:
            add_sinks(sinks, 0, tops, totals)
            write_heads(sums, totals, out[tokens[n]], head_dim)


def _paged_attention(
    qkv: Any,  # [T, (H + 2 G) * D]
    kv: Any,  # [elements]
    layers: int,
    layer: int,
    heads: int,
    kv_heads: int,
    block_tokens: int,  # a multiple of 4
    head_dim: int,
    block_table: Any,  # [R, B] int32
    tokens: Any,  # [N] int32: index into T
    rows: Any,  # [N] int32: index into R
    contexts: Any,  # [N] int32: positions attended to, the token's own included; 0: padding, which gets zeros; -1: not served here
    reach: int,  # how far back a query sees (attention_blocks.first_seen)
    scale: float,
    softcap: float,  # scores become softcap * tanh(score / softcap); 0: unchanged
    sinks: Any,  # [H]: one more score for each head, without a value; or [0]: there are none
    use_tiles: bool,  # whether to use AMX tiles; fits_tiles tells whether they can be
    num_shares: int,
    out: Any,  # [T, H * D]; only the rows of tokens that are served are written
) -> None:
    width = (head_dim + 63) // 64 * 64
    work = np.int64(0)
    for n in range(tokens.shape[0]):
        if contexts[n] == 0:  # oneDNN multiplies what follows a row's end, the next row, by 0 in its products, so it must be finite
            out[tokens[n], :] = 0
        first_block, end_block = _blocks_of(contexts[n], reach, block_tokens)
        work += end_block - first_block
    cut = np.full((num_shares, 2), -1, np.int64)
    cut_tops, cut_totals = np.empty((num_shares, heads), np.float32), np.empty((num_shares, heads), np.float32)
    open_tops, open_totals = np.empty((num_shares, heads), np.float32), np.empty((num_shares, heads), np.float32)
    cut_sums, open_sums = np.empty((num_shares, heads, width), np.float32), np.empty((num_shares, heads, width), np.float32)
    for share in prange(num_shares):
        _attend_share(
            qkv,
            kv,
            layers,
            layer,
            heads,
            kv_heads,
            block_tokens,
            head_dim,
            block_table,
            tokens,
            rows,
            contexts,
            reach,
            scale,
            softcap,
            sinks,
            use_tiles,
            work * share // num_shares,
            work * (share + 1) // num_shares,
            out,
            cut[share],
            cut_tops[share],
            cut_totals[share],
            cut_sums[share],
            open_tops[share],
            open_totals[share],
            open_sums[share],
        )
    begun = -1  # the share in which the token that is being combined began
    for share in range(num_shares):
        if work * share // num_shares == work * (share + 1) // num_shares:
            continue
        if cut[share, 0] >= 0:
            to_tops, to_totals, to_sums = open_tops[begun], open_totals[begun], open_sums[begun]
            _add_cut(cut_tops[share], cut_totals[share], cut_sums[share], to_tops, to_totals, to_sums)
            if cut[share, 1] == 1:
                add_sinks(sinks, 0, to_tops, to_totals)
                write_heads(to_sums, to_totals, out[tokens[cut[share, 0]]], head_dim)
                begun = share
        else:
            begun = share


def paged_attention_signature(element: types.Type) -> Any:
    ints, table = int32[::1], int32[:, ::1]
    sizes = (int64,) * 6
    shape = (int64, float64, float64, float32[::1], boolean, int64)
    return void(element[:, ::1], element[::1], *sizes, table, ints, ints, ints, *shape, element[:, ::1])


paged_attention_serial = njit(**OPTIONS)(_paged_attention)
paged_attention_parallel = njit(**OPTIONS, parallel=True)(named("_paged_attention_parallel", _paged_attention))
