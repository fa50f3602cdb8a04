"""Attention with AMX (Numba), in bfloat16: query heads that share a KV head, of one token or several, against a chunk of 64
positions at a time. Such heads are called rows.

Keys are read in place: 16 positions of a block are a tile. Queries are the other side of the product, as pairs, so that a tile of
scores has a position in each row and a query in each column. Values are combined into pairs of two positions once a chunk, for all
rows.

Memory should be busy all the time, and what waits for it must not hold up what computes. So what is needed later is prefetched
evenly between the steps of all the work for a chunk, a few lines at a time. The argument `ahead` lists the indices in kv that are
prefetched (prefetching as much in one go, or in parts of the work only, gains nothing), and `number` is the first entry that a call
uses. If `ahead` is None, nothing is prefetched.

Shapes: D head size, a multiple of 32; C = D / 32; rows in tiles of 16 or fewer. bfloat16 is passed as uint16 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, njit, uint32

from engine.cpu.kernels.amx import dot, load, store, zero
from engine.cpu.kernels.amx_softmax import CHUNK_TOKENS, by_rows, pair_positions
from engine.cpu.kernels.attention_blocks import HELPER
from engine.cpu.kernels.bits import FETCHED_BYTES, fetch_lines

LEAST_TOP = float32(-1e30)
TILE_TOKENS = 16
FETCHED = FETCHED_BYTES // 2  # elements that are prefetched at a time
# While a chunk's keys and values of one head are processed, D / 2 times FETCHED elements are prefetched. These are the prefetches
# of each part of that work, for each 32 of D, in proportion to the time that the part takes.
SCORE_FETCHES, WEIGH_FETCHES, PAIR_FETCHES, ADD_FETCHES = 4, 2, 6, 4
_TILE = 16 * 16  # elements of 32 bits
# Tiles 0 and 1 hold scores, 2 and 3 factors, 4 and 5 sums, 6 and 7 weights. Decode configures 4 to 7 with as many rows as it has.
_zero_0, _zero_1 = zero(0), zero(1)
_load_2, _load_3, _load_4, _load_5, _load_6, _load_7 = (load(tile) for tile in range(2, 8))
_store_0, _store_1, _store_4, _store_5 = (store(tile) for tile in (0, 1, 4, 5))
_dot_0_2_3, _dot_1_2_3 = dot(0, 2, 3), dot(1, 2, 3)
_dot_4_6_2, _dot_5_6_3, _dot_4_7_2, _dot_5_7_3 = dot(4, 6, 2), dot(5, 6, 3), dot(4, 7, 2), dot(5, 7, 3)
_four_rows, _eight_rows, _sixteen_rows = by_rows(4), by_rows(8), by_rows(16)


@njit(**HELPER)
def pack_queries(qkv: Any, at: int, num_rows: int, row: int, head_dim: int, queries: Any) -> None:
    """Copies num_rows query heads of D elements, which lie end to end from flat index `at` of qkv on, to the rows from `row` on of
    queries [tiles, C, 16, 16] uint32 (flat). Element [tile, c, i, r] is the pair of dimensions 32 c + 2 i and 32 c + 2 i + 1 of row
    16 tile + r."""
    chunks = head_dim // 32
    flat = qkv.reshape(-1)
    for r in range(num_rows):
        to = (row + r) // 16 * chunks * _TILE + (row + r) % 16
        own = at + r * head_dim
        for pair in range(head_dim // 2):
            left, right = uint32(flat[own + 2 * pair]), uint32(flat[own + 2 * pair + 1])
            queries[to + pair * 16] = left | (right << uint32(16))


@njit(**HELPER)
def place_chunk(
    blocks: Any,
    base: int,  # the chunk's first position, a multiple of 16
    begin: int,  # positions are read from this one
    end: int,  # to below this one
    block_tokens: int,  # a multiple of 16
    block_stride: int,
    head_dim: int,
    places: Any,  # [4 + 64], result: where the tiles of 16 positions begin, then where the positions do
) -> None:
    """Fills `places` with the flat indices in kv where the keys of a chunk of 64 positions begin, for the first KV head of the
    first layer; the caller adds the offset of its layer and head in a block. blocks: the sequence's block table. block_stride:
    elements from one block to the next.

    A position outside of begin to end, which is not read, gets the index of one inside, because its own memory may hold
    anything."""
    for number in range(CHUNK_TOKENS // TILE_TOKENS):
        at = base + number * TILE_TOKENS
        tile = min(max(at, begin), end - 1) // TILE_TOKENS * TILE_TOKENS
        block = tile // block_tokens
        place = np.int64(blocks[block]) * block_stride + (tile - block * block_tokens) * head_dim
        places[number] = place
        for t in range(TILE_TOKENS):
            places[4 + number * TILE_TOKENS + t] = place + (min(max(at + t, begin), end - 1) - tile) * head_dim


@njit(**HELPER)
def place_ahead(places: Any, layer_at: int, kv_heads: int, plane: int, head_dim: int, ahead: Any) -> None:
    """Computes the addresses that other functions prefetch while they work: writes to ahead [G * D / 2] an index in kv for each
    FETCHED elements of the keys and values of one chunk, for all G KV heads of size D. places: the tiles' places, as place_chunk
    fills them. layer_at: the index of the layer within a block. plane: the number of elements from one KV head's keys to the
    next's.

    Consecutive indices are in different tiles (the chunk has four), so that several pages of memory are read at a time and their
    delays overlap."""
    number = 0
    for head in range(2 * kv_heads):
        for begin in range(0, TILE_TOKENS * head_dim, FETCHED):
            for tile in range(CHUNK_TOKENS // TILE_TOKENS):
                ahead[number] = layer_at + places[tile] + head * plane + begin
                number += 1


@njit(**HELPER)
def _score(
    queries: Any, queries_at: int, kv: Any, places: Any, keys_at: int, head_dim: int, scores: Any, ahead: Any, number: int
) -> None:
    """Computes scores [64, 16] (position, row) as the dot products, not yet scaled, of a chunk's keys with one tile of 16 query
    heads.

    queries_at: the index of that tile in the result of pack_queries. places: as place_chunk fills them. keys_at: added to each of
    them. Meanwhile prefetches kv at SCORE_FETCHES * C indices from ahead[number] on, unless `ahead` is None."""
    stride = 2 * head_dim
    for half in range(2):
        _zero_0()
        _zero_1()
        left, right = keys_at + places[2 * half], keys_at + places[2 * half + 1]
        for d in range(0, head_dim, 32):
            if ahead is not None:
                fetch_lines(kv, ahead[number])
            _load_3(queries, queries_at + d // 32 * _TILE, 64)
            _load_2(kv, left + d, stride)
            _dot_0_2_3()
            if ahead is not None:
                fetch_lines(kv, ahead[number + 1])
                number += 2
            _load_2(kv, right + d, stride)
            _dot_1_2_3()
        _store_0(scores, 2 * half * _TILE, 64)
        _store_1(scores, (2 * half + 1) * _TILE, 64)


@njit(**HELPER)
def add_rows(weights: Any, pairs: Any, head_dim: int, sums: Any, row: int, kv: Any, ahead: Any, number: int) -> None:
    """Adds the product of weights [2, 16, 16] uint32 (pairs of bfloat16, as weigh_row writes them) and the chunk's values to the 16
    rows of sums [rows, width] from `row` on. pairs: the values, as pair_values writes them. Of each 32 columns of sums, those of
    even dimensions come first.

    Meanwhile prefetches kv at ADD_FETCHES * C indices from ahead[number] on, unless `ahead` is None."""
    _load_6(weights, 0, 64)
    _load_7(weights, _TILE, 64)
    width = sums.shape[1]
    stride = 4 * head_dim
    second = 16 * head_dim
    flat = sums.reshape(-1)
    for d in range(0, head_dim, 32):
        at = row * width + d
        if ahead is not None:
            fetch_lines(kv, ahead[number])
        _load_4(flat, at, 4 * width)
        _load_5(flat, at + 16, 4 * width)
        _load_2(pairs, d, stride)
        _dot_4_6_2()
        if ahead is not None:
            fetch_lines(kv, ahead[number + 1])
        _load_3(pairs, d + 16, stride)
        _dot_5_6_3()
        if ahead is not None:
            fetch_lines(kv, ahead[number + 2])
        _load_2(pairs, second + d, stride)
        _dot_4_7_2()
        if ahead is not None:
            fetch_lines(kv, ahead[number + 3])
            number += ADD_FETCHES
        _load_3(pairs, second + d + 16, stride)
        _dot_5_7_3()
        _store_4(flat, at, 4 * width)
        _store_5(flat, at + 16, 4 * width)


@njit(**HELPER)
def pair_values(kv: Any, places: Any, values_at: int, head_dim: int, pairs: Any, ahead: Any, number: int) -> None:
    """Fills pairs [32, D] uint32 (flat) with a chunk's values in bfloat16: row 16 half + i, for half 0 and 1, pairs the values of
    positions 32 half + i and 32 half + i + 16. Of each 32 columns, those of even dimensions come first. places: as place_chunk
    fills them. values_at: added to each of them.

    Meanwhile prefetches kv at PAIR_FETCHES * C indices from ahead[number] on, unless `ahead` is None."""
    begin, num_fetches = number, head_dim // 32 * PAIR_FETCHES
    for half in range(2):
        for i in range(16):
            t = 4 + 32 * half + i
            if ahead is not None:
                while (number - begin) * 32 < num_fetches * (16 * half + i + 1):
                    fetch_lines(kv, ahead[number])
                    number += 1
            pair_positions(kv, values_at + places[t], values_at + places[t + 16], head_dim, pairs, (16 * half + i) * head_dim)


@njit(**HELPER)
def score_rows(
    queries: Any,
    row: int,
    num_rows: int,
    kv: Any,
    places: Any,
    keys_at: int,
    head_dim: int,
    scores: Any,
    spread: Any,
    ahead: Any,
    number: int,
) -> None:
    """Fills spread [rows, 64] with the scores, not yet scaled, of num_rows query heads (16 at most) with a chunk's 64 positions.
    row: the first of these heads in `queries`, a multiple of 16. scores [64 * 16] float32 is work space; the other arguments are
    those of _score."""
    _score(queries, row * (head_dim // 2), kv, places, keys_at, head_dim, scores, ahead, number)
    if num_rows <= 4:
        _four_rows(scores, spread)
    elif num_rows <= 8:
        _eight_rows(scores, spread)
    else:
        _sixteen_rows(scores, spread)
