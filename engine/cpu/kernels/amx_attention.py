"""Computes attention with AMX (Numba), in bfloat16: the query heads that share a KV head, of one token or several, against a chunk
of 64 positions at a time. These query heads are called rows.

Keys are read in place: 16 positions of a block are the first operand of a tile product. The second operand is a tile of queries,
packed as pairs of dimensions, so that a tile of scores has a position in each row and a query in each column. Values are combined
into pairs of two positions once for each chunk, for all rows.

Keys and values that are needed later are prefetched, a few cache lines at a time, evenly between the instructions of all work for a
chunk, so that memory is always busy and computation never waits for it. The argument `ahead` lists the indices in kv that are
prefetched, and `number` is the first entry of it that a call uses; if `ahead` is None, nothing is prefetched. (Prefetching the same
lines all at once, or during parts of the work only, was measured to gain nothing.)

Shapes: D head size, a multiple of 32; C = D / 32; rows in tiles of 16 or fewer. bfloat16 is passed as uint16 bits."""

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
    """Copies num_rows query heads of D elements, which lie end to end from flat index `at` of qkv on, to queries [tiles, C, 16, 16]
    uint32 (flat), where they become the rows from number `row` on. Element [tile, c, i, r] holds dimensions 32 c + 2 i and 32 c + 2
    i + 1 of row 16 tile + r."""
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

    Positions that are not read, those before `begin` or from `end` on, get the index of a position that is read, because their own
    memory may hold anything."""
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
    """Fills ahead [G * D / 2] with the places in kv at which other functions prefetch a chunk's keys and values, of all G KV heads
    of size D. A place is an index into kv as a flat array; there is one for each FETCHED elements.

    places: where the chunk's tiles of 16 positions begin in kv; the caller gets them from place_chunk. layer_at: the index of the
    layer within a block. plane: the number of elements from one KV head's keys to the next one's.

    Consecutive places are in different tiles (a chunk has four), so that several pages of memory are read at a time and their
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
    """Computes scores [64, 16] (position, row): the dot products, not yet scaled, of a chunk's keys with one tile of 16 query
    heads.

    queries: the query heads, as pack_queries writes them. queries_at: the index of the tile in queries. places: where the keys of
    the chunk's four tiles begin in kv; keys_at is added to each of these indices. Also prefetches kv at SCORE_FETCHES * C indices
    from ahead[number] on, unless `ahead` is None."""
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
    """Adds the product of weights [2, 16, 16] uint32 (pairs of bfloat16, as weigh_row writes them) and a chunk's values to the 16
    rows of sums [rows, width] from `row` on. pairs: the values, as pair_values writes them. In each 32 columns of sums, even
    dimensions come first, then odd ones.

    Also prefetches kv at ADD_FETCHES * C indices from ahead[number] on, unless `ahead` is None."""
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
    """Fills pairs [32, D] uint32 (flat) with a chunk's values in bfloat16. Row 16 half + i, for half 0 and 1, holds pairs of the
    values of positions 32 half + i and 32 half + i + 16. In each 32 columns, even dimensions come first, then odd ones. places: as
    place_chunk fills it. values_at: the offset that is added to each of the indices in places.

    Also prefetches kv at PAIR_FETCHES * C indices from ahead[number] on, unless `ahead` is None."""
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
    """Computes the scores (dot products, not yet scaled) of num_rows query heads, 16 at most, with the keys of a chunk's 64
    positions, into spread [rows, 64].

    queries: the query heads, as pack_queries writes them. row: the first of these heads in `queries`, a multiple of 16. places:
    where the keys of the chunk's tiles begin in kv. keys_at: the offset that is added to each of these indices. scores [64 * 16]
    float32: work space. ahead, number: the places that are prefetched meanwhile (see _score)."""
    _score(queries, row * (head_dim // 2), kv, places, keys_at, head_dim, scores, ahead, number)
    if num_rows <= 4:
        _four_rows(scores, spread)
    elif num_rows <= 8:
        _eight_rows(scores, spread)
    else:
        _sixteen_rows(scores, spread)
