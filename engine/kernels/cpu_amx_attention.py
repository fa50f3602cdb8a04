"""Attention with AMX (Numba): rows (query heads of one token or several) of one KV head, chunks of 64 positions, of bfloat16.

Keys are taken from where they lie: 16 positions of a block are a tile. Queries are the other side, as pairs, so that a tile of
scores has a position in each row and a query in each column; values are made pairs of two positions once a chunk, for all rows.

Memory is to have something to do all the time, and what waits for it must not hold up what computes: what is needed later is asked
for between the steps of all that is done for a chunk, evenly, a few lines at a time (`ahead`; asking for as much in one go, or in
parts of the work only, gains nothing). Without `ahead`, nothing is.

Shapes: D head size, a multiple of 32, C = D / 32; rows in tiles of 16 or fewer. bfloat16 as uint16 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, njit, uint32

from engine.kernels.cpu_amx import dot, load, store, zero
from engine.kernels.cpu_amx_softmax import CHUNK_TOKENS, by_rows, pair_positions
from engine.kernels.cpu_attention_blocks import HELPER
from engine.kernels.cpu_bits import FETCHED_BYTES, fetch_lines

LEAST_TOP = float32(-1e30)
TILE_TOKENS = 16
FETCHED = FETCHED_BYTES // 2  # elements that are asked for at a time
# What a step over a chunk's keys and values of one head asks for, D / 2 times FETCHED: each part as much of it as of the time
SCORE_FETCHES, WEIGH_FETCHES, PAIR_FETCHES, ADD_FETCHES = 4, 2, 6, 4  # for each 32 of D
_TILE = 16 * 16  # elements of 32 bits
# Tiles 0 and 1 hold scores; 2 and 3 what is multiplied; 4 and 5 sums, and 6 and 7 weights, of as many rows as there are.
_zero_0, _zero_1 = zero(0), zero(1)
_load_2, _load_3, _load_4, _load_5, _load_6, _load_7 = (load(tile) for tile in range(2, 8))
_store_0, _store_1, _store_4, _store_5 = (store(tile) for tile in (0, 1, 4, 5))
_dot_0_2_3, _dot_1_2_3 = dot(0, 2, 3), dot(1, 2, 3)
_dot_4_6_2, _dot_5_6_3, _dot_4_7_2, _dot_5_7_3 = dot(4, 6, 2), dot(5, 6, 3), dot(4, 7, 2), dot(5, 7, 3)
_four_rows, _eight_rows, _sixteen_rows = by_rows(4), by_rows(8), by_rows(16)


@njit(**HELPER)
def pack_queries(qkv: Any, at: int, num_rows: int, row: int, head_dim: int, queries: Any) -> None:
    """queries [tile, C, 16, 16] uint32 (flat): pair i of 32 dimensions, row r; from the rows of qkv that begin at `at`."""
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
    begin: int,  # positions that are read: from here
    end: int,  # to below here
    block_tokens: int,  # a multiple of 16
    block_stride: int,
    head_dim: int,
    places: Any,  # [4 + 64]: where tiles of 16 positions begin, and where positions do; results
) -> None:
    """Elements of keys of the layer's first head, of a layer that begins at 0. Positions that are not read have the place of one
    that is: what lies there may be anything."""
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
    """ahead [G * D / 2]: all keys and values of place_chunk's chunk, FETCHED elements each, the four tiles by turns: several pages
    are read at a time, and what the memory takes to begin with one passes while it reads the others."""
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
    """scores [64, 16] of the chunk's positions with one tile of rows. Asks for ahead[number ...]."""
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
    """sums [rows, width] from `row` on += weights [2, 16, 16] times the chunk's values. Asks for ahead[number ...] of kv."""
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
    """pairs [32, D] uint32 (flat) of the chunk's values: of positions 32 half + i and 16 behind it. Asks for ahead[number ...]."""
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
    """spread [rows, 64]: scores of num_rows (16 at most) rows from `row` on, a multiple of 16. Asks for ahead[number ...]."""
    _score(queries, row * (head_dim // 2), kv, places, keys_at, head_dim, scores, ahead, number)
    if num_rows <= 4:
        _four_rows(scores, spread)
    elif num_rows <= 8:
        _eight_rows(scores, spread)
    else:
        _sixteen_rows(scores, spread)
