"""Adds the contributions of LoRA adapters to a layer's product (Numba): out += (x @ down.T) @ up, where each token has an adapter
of its own or none.

Adjacent tokens with the same adapter are computed together, in tiles of at most TILE_TOKENS, so that the adapter's matrices come
from memory for the first token only, and from the caches for the others. There are two stages: first the inputs of all tiles are
multiplied with their adapters' "down", then the results with "up". Each stage is cut into shares of equal cost, one for each
thread. A tile's cost is that of reading its adapter's matrices and of multiplying them with its tokens.

Shapes: T tokens, K inputs, N outputs in P parts (matrices that are joined to one, such as queries, keys and values), S adapters, r
ranks. Reference implementation: reference.add_adapters."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int32, int64, njit, prange, types, void

from engine.cpu.kernels.adapter_tiles import (
    COLUMNS,
    ONE_VECTORS,
    RANKS,
    ROWS,
    SOME_RANKS,
    SOME_VECTORS,
    UP_ROWS,
    down_step,
    down_tile,
    up_tile,
)
from engine.cpu.kernels.bits import FASTMATH, named, narrow, widen
from engine.cpu.kernels.widened_tiles import WIDTH

TILE_TOKENS = 16
_ROWS_AS_READING = 8  # the number of tokens whose products cost as much as reading the weights
_SHARED_ELEMENTS = 1 << 16  # of adapters' matrices that are read; below that waking the other threads costs more than they save
_OPTIONS: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy", "cache": True, "nogil": True}
_HELPER: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy"}
_ONE_COLUMNS, _SOME_COLUMNS = ONE_VECTORS * WIDTH, SOME_VECTORS * WIDTH
_down_step = njit(**_HELPER)(down_step)
_down_one, _down_some = down_tile(1, RANKS), down_tile(ROWS, SOME_RANKS)
_up_one, _up_some = up_tile(1, ONE_VECTORS), up_tile(UP_ROWS, SOME_VECTORS)


@njit(**_HELPER)
def _tiles_of(numbers: Any, places: Any, ranks: Any) -> Any:
    """Cuts a step's T tokens into tiles of adjacent tokens with the same LoRA adapter, and returns the tiles, [tiles, 4] int64: the
    index of a tile's first token, its number of tokens, the index in the adapters' memory where its adapter's matrices begin, and
    the adapter's rank. A token is in no tile if it has no adapter, or if its adapter does not change this product.

    numbers [T] int32: the adapter of each token, -1 for none. places [S] int64: where each adapter's matrices begin; -1: it has
    none for this product. ranks [S] int32: each adapter's rank."""
    num_tokens = numbers.shape[0]
    found = np.empty((num_tokens, 4), np.int64)
    num_tiles = token = 0
    while token < num_tokens:
        number = numbers[token]
        if number < 0 or places[number] < 0:
            token += 1
            continue
        end = token + 1
        while end < num_tokens and end - token < TILE_TOKENS and numbers[end] == number:
            end += 1
        found[num_tiles, 0], found[num_tiles, 1] = token, end - token
        found[num_tiles, 2], found[num_tiles, 3] = places[number], ranks[number]
        num_tiles, token = num_tiles + 1, end
    return found[:num_tiles]


@njit(**_HELPER)
def _items_up_to(cost: int, of_item: int, num_items: int) -> int:
    """Returns how many of num_items items of work begin before `cost`. Item i begins at cost i * of_item. A share that reaches from
    one cost to another computes the items between the two results."""
    return min(max(0, (cost + of_item - 1) // of_item), num_items)


@njit(**_HELPER)
def _down_block(x: Any, first: int, count: int, memory: Any, at: int, made: Any, column: int) -> None:
    """Computes the dot products of `count` tokens of x [T, K], from token `first` on, with the RANKS rows of "down" that begin at
    index `at` of memory. Writes them to made [T, P * r], to the RANKS columns from `column` on."""
    num_inputs, width = x.shape[1], made.shape[1]
    step = _down_step(memory.itemsize)
    whole = num_inputs // step * step
    in_tiles = first + count // ROWS * ROWS
    for row in range(first, in_tiles, ROWS):
        for rank in range(0, RANKS, SOME_RANKS):
            to = row * width + column + rank
            _down_some(x, row * num_inputs, memory, at + rank * num_inputs, num_inputs, whole, made, to, width)
    for row in range(in_tiles, first + count):
        _down_one(x, row * num_inputs, memory, at, num_inputs, whole, made, row * width + column, width)
    if whole < num_inputs:
        for row in range(first, first + count):
            for rank in range(RANKS):
                total = np.float32(0.0)
                for k in range(whole, num_inputs):
                    total += widen(x[row, k]) * widen(memory[at + rank * num_inputs + k])
                made[row, column + rank] += total


@njit(**_HELPER)
def _down_share(x: Any, memory: Any, tiles: Any, num_parts: int, share: int, num_shares: int, made: Any) -> None:
    """Computes one share (`share` of num_shares) of the products of all tiles with "down", and writes them to made [T, P * largest
    rank] float32. In a token's row of made, the products of part p begin at column p * (rank of the token's adapter). tiles: as
    _tiles_of returns them."""
    total = 0
    for tile in range(tiles.shape[0]):
        total += tiles[tile, 3] * (_ROWS_AS_READING + tiles[tile, 1])
    total *= num_parts  # RANKS times the cost of all items
    begin, end = total * share // num_shares, total * (share + 1) // num_shares
    at = 0
    for tile in range(tiles.shape[0]):
        first, count, place, rank = tiles[tile, 0], tiles[tile, 1], tiles[tile, 2], tiles[tile, 3]
        num_items, cost = num_parts * rank // RANKS, RANKS * (_ROWS_AS_READING + count)
        for item in range(_items_up_to(begin - at, cost, num_items), _items_up_to(end - at, cost, num_items)):
            _down_block(x, first, count, memory, place + item * RANKS * x.shape[1], made, item * RANKS)
        at += num_items * cost


@njit(**_HELPER)
def _up_columns(made: Any, rows: Any, column: int, rank: int, memory: Any, at: int, width: int, out: Any, begin: int) -> None:
    """Adds one tile's products with COLUMNS columns of "up" to out, in the columns from `begin` on.

    rows: the tile's first token, and the token after its last. column: where the part's products with "down" begin in a row of
    made. at: the index in memory of the first of these columns in the first row of "up". width: the number of columns of the part,
    which is the length of a row of "up"."""
    first, end = rows
    made_width, out_width = made.shape[1], out.shape[1]
    in_tiles = first + (end - first) // UP_ROWS * UP_ROWS
    for row in range(first, in_tiles, UP_ROWS):
        for n in range(0, COLUMNS, _SOME_COLUMNS):
            to = row * out_width + begin + n
            _up_some(made, row * made_width + column, made_width, rank, memory, at + n, width, out, to, out_width)
    for row in range(in_tiles, end):
        for n in range(0, COLUMNS, _ONE_COLUMNS):
            to = row * out_width + begin + n
            _up_one(made, row * made_width + column, made_width, rank, memory, at + n, width, out, to, out_width)


@njit(**_HELPER)
def _up_rest(
    made: Any, rows: Any, column: int, rank: int, memory: Any, at: int, width: int, out: Any, begin: int, num: int
) -> None:
    """Adds one tile's products with the last `num` columns of a part of "up" to out, where `num` is below COLUMNS; _up_columns does
    the same for COLUMNS columns.

    made: the tile's products with "down". rows: the tile's first token, and the token after its last. column: where the part's
    products begin in a row of made. rank: the adapter's rank. at: the index in memory of the first of these columns in the first
    row of "up". width: the number of columns of the part. begin: the column of out at which the results begin."""
    for row in range(rows[0], rows[1]):
        for n in range(num):
            total = np.float32(0.0)
            for j in range(rank):
                total += made[row, column + j] * widen(memory[at + j * width + n])
            out[row, begin + n] = narrow(widen(out[row, begin + n]) + total, out[0, 0])


@njit(**_HELPER)
def _up_share(made: Any, memory: Any, tiles: Any, parts: Any, num_inputs: int, share: int, num_shares: int, out: Any) -> None:
    """Adds one share (`share` of num_shares) of the products of all tiles with "up" to out. made: the products with "down", as
    _down_share writes them. parts [P]: number of outputs of each part. num_inputs: K, from which the place of "up" in memory, after
    "down", is computed."""
    num_parts, stripes = parts.shape[0], 0
    for part in range(num_parts):
        stripes += (parts[part] + COLUMNS - 1) // COLUMNS
    total = 0
    for tile in range(tiles.shape[0]):
        total += stripes * tiles[tile, 3] * (_ROWS_AS_READING + tiles[tile, 1])
    begin, end = total * share // num_shares, total * (share + 1) // num_shares
    at = 0
    for tile in range(tiles.shape[0]):
        first, count, place, rank = tiles[tile, 0], tiles[tile, 1], tiles[tile, 2], tiles[tile, 3]
        cost = rank * (_ROWS_AS_READING + count)
        item, last = _items_up_to(begin - at, cost, stripes), _items_up_to(end - at, cost, stripes)
        at += stripes * cost
        stripe = part = columns = 0  # columns: of the parts before
        while item < last:
            of_part = (parts[part] + COLUMNS - 1) // COLUMNS
            up_at = place + rank * (num_parts * num_inputs + columns)
            while item < last and item < stripe + of_part:
                n = (item - stripe) * COLUMNS
                rows, num = (first, first + count), parts[part] - n
                if num < COLUMNS:
                    _up_rest(made, rows, part * rank, rank, memory, up_at + n, parts[part], out, columns + n, num)
                else:
                    _up_columns(made, rows, part * rank, rank, memory, up_at + n, parts[part], out, columns + n)
                item += 1
            stripe, columns, part = stripe + of_part, columns + parts[part], part + 1


def add_adapters_signature(element: types.Type) -> Any:
    tables = (int32[::1], int64[::1], int32[::1], element[::1])
    return void(element[:, ::1], int64[::1], *tables, int64, element[:, ::1])


def _add_adapters(
    x: Any,  # [T, K]
    parts: Any,  # [P] int64: the outputs of each part
    numbers: Any,  # [T] int32: the adapter of each token, -1 for none
    places: Any,  # [S] int64: where each adapter's matrices of this product begin in memory, -1 where it has none
    ranks: Any,  # [S] int32
    memory: Any,  # of all adapters: down [P, r, K], and then up [r, n] of each part with n outputs
    num_shares: int,  # number of shares that the work is cut into, one for each thread
    out: Any,  # [T, N]
) -> None:
    tiles = _tiles_of(numbers, places, ranks)
    num_tiles, num_parts, num_inputs = tiles.shape[0], parts.shape[0], x.shape[1]
    if num_tiles == 0:
        return
    most, read = 0, 0
    for tile in range(num_tiles):
        most = max(most, tiles[tile, 3])
        read += tiles[tile, 3] * (_ROWS_AS_READING + tiles[tile, 1]) // _ROWS_AS_READING
    made = np.empty((x.shape[0], num_parts * most), np.float32)
    if num_shares == 1 or read * (num_parts * num_inputs + out.shape[1]) < _SHARED_ELEMENTS:
        _down_share(x, memory, tiles, num_parts, 0, 1, made)
        _up_share(made, memory, tiles, parts, num_inputs, 0, 1, out)
        return
    for share in prange(num_shares):
        _down_share(x, memory, tiles, num_parts, int64(share), num_shares, made)
    for share in prange(num_shares):
        _up_share(made, memory, tiles, parts, num_inputs, int64(share), num_shares, out)


add_adapters_serial = njit(**_OPTIONS)(_add_adapters)
add_adapters_parallel = njit(**_OPTIONS, parallel=True)(named("_add_adapters_parallel", _add_adapters))
