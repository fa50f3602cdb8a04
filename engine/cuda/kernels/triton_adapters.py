"""Adds the products with LoRA adapters to matrix products on the GPU (Triton), for each token with its own adapter. The kernel
`shrink` multiplies a token's inputs by the adapter's first matrix ("down", with as many outputs as the rank). The kernel `expand`
multiplies the results by the second matrix ("up") and adds them to the outputs. Reference implementation: reference.add_adapters.

A program takes a tile of consecutive tokens and computes one after the other the adapters that occur among them. So the same
launches serve a prompt with one adapter and a decode step with many. If every row has one token, a tile is one token, and products
are added up across lanes; larger tiles are multiplied by tensor cores. Grids depend only on shapes and on an upper bound of the
ranks, so that graphs can hold the launches.

Shapes: T tokens, K inputs, N outputs, P parts of a product, M products, A adapters, R the bound of the ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels.sizes import ceil_div, power_of_two
from engine.ops.ops import AdaptedProduct, BatchAdapters

# tokens of a tile: of a step that decodes, of one with pieces of prompts, and of one with more than _FEW_TOKENS tokens
TILE_TOKENS = (1, 32, 64)
_EXPAND_TOKENS = (1, 16, 16)  # the same for `expand`, which mostly reads and writes outputs, in small tiles at the highest rate
_FEW_TOKENS = 512
MAX_PARTS = 4
RANK_BOUNDS = (16, 32, 64, 128, 256)
# The inputs are split over programs, into parts of so many at least for each of TILE_TOKENS, and into so many parts at most, which
# depends on sizes alone. The sums of all parts are read again for each block of outputs.
_SPLIT_INPUTS = (512, 2048, 2048)
_MAX_SPLITS = (16, 8, 8)
NOBODY = tl.constexpr(1 << 30)  # stands for a token's adapter where there is nothing to add


@triton.jit
def _adapter_of(numbers, places, product_at, token, T):
    """Returns the adapter number of each token. It is NOBODY for tokens from T on, for tokens without an adapter, and for tokens
    whose adapter does not change this product. product_at: index of the product's first entry in places [M, A], flat."""
    number = tl.load(numbers + token, mask=token < T, other=-1)
    place = tl.load(places + product_at + number, mask=number >= 0, other=-1)
    return tl.where(place >= 0, number, NOBODY)


@triton.jit(do_not_specialize=["T", "product_at", "bound", "blocks"])
def _shrink_kernel(
    x,  # [T, K]
    numbers,  # [T] int32
    places,  # [M, A] int64
    ranks,  # [M, A] int32
    memory,  # what the places count from
    low,  # [splits, T, P, R] float32
    T,
    K,
    product_at,  # place of the product's row in places and ranks
    bound,  # R
    blocks,  # of BLOCK_K inputs, those of a split
    WIDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token, inner = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
    chunks = tl.cdiv(bound, BLOCK_R)
    part, row = tl.program_id(1) // chunks, tl.program_id(1) % chunks * BLOCK_R + tl.arange(0, BLOCK_R)
    split, parts = tl.program_id(2), tl.num_programs(1) // chunks
    number = _adapter_of(numbers, places, product_at, token, T)
    current = tl.min(number, axis=0)
    while current < NOBODY:
        own, rank = number == current, tl.multiple_of(tl.load(ranks + product_at + current), 8)
        is_row = row < rank
        if tl.min(row, axis=0) < rank:
            down = memory + tl.multiple_of(tl.load(places + product_at + current), 16)
            rows_at = down + (part * rank + row).to(tl.int64) * K
            stored = low + ((split.to(tl.int64) * T + token) * parts + part)[:, None] * bound + row[None, :]
            if BLOCK_T == 1:
                one = x + tl.min(token, axis=0).to(tl.int64) * K
                sums = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
                for block in range(split * blocks, split * blocks + blocks):
                    at = block * BLOCK_K + inner
                    factor = tl.load(rows_at[:, None] + at[None, :], mask=is_row[:, None] & (at < K)[None, :], other=0.0)
                    value = tl.load(one + at, mask=at < K, other=0.0)
                    sums += factor.to(tl.float32) * value.to(tl.float32)[None, :]
                total = tl.sum(sums, axis=1)[None, :]
            else:
                tokens_at = x + token.to(tl.int64)[:, None] * K
                total = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
                for block in range(split * blocks, split * blocks + blocks):
                    at = block * BLOCK_K + inner
                    value = tl.load(tokens_at + at[None, :], mask=own[:, None] & (at < K)[None, :], other=0.0)
                    factor = tl.load(rows_at[None, :] + at[:, None], mask=is_row[None, :] & (at < K)[:, None], other=0.0)
                    if WIDEN:
                        value, factor = value.to(tl.float32), factor.to(tl.float32)
                    total = tl.dot(value, factor, total, input_precision="ieee")
            tl.store(stored, total, mask=own[:, None] & is_row[None, :])
        current = tl.min(tl.where(number > current, number, NOBODY), axis=0)


@triton.jit(do_not_specialize=["T", "product_at", "parts", "bound", "splits"])
def _expand_kernel(
    low,  # [splits, T, P, R] float32
    numbers,  # [T] int32
    places,  # [M, A] int64
    ranks,  # [M, A] int32
    memory,  # what the places count from
    out,  # [T, N]
    T,
    K,
    N0,  # outputs of each part, 0 of parts that there are not
    N1,
    N2,
    N3,
    product_at,  # place of the product's row in places and ranks
    parts,  # P
    bound,  # R
    splits,
    EVEN: tl.constexpr,  # whether all of K and of the parts' outputs are multiples of 16
    SPLITS: tl.constexpr,  # at least as many
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    token, block = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T), tl.program_id(1)
    end0 = tl.cdiv(N0, BLOCK_N)
    end1 = end0 + tl.cdiv(N1, BLOCK_N)
    end2 = end1 + tl.cdiv(N2, BLOCK_N)
    part = (block >= end0).to(tl.int32) + (block >= end1).to(tl.int32) + (block >= end2).to(tl.int32)
    outputs = tl.where(part == 0, N0, tl.where(part == 1, N1, tl.where(part == 2, N2, N3)))
    before = tl.where(part == 0, 0, tl.where(part == 1, N0, tl.where(part == 2, N0 + N1, N0 + N1 + N2)))
    block -= tl.where(part == 0, 0, tl.where(part == 1, end0, tl.where(part == 2, end1, end2)))
    if EVEN:
        outputs, before = tl.multiple_of(outputs, 16), tl.multiple_of(before, 16)
    output = block * BLOCK_N + tl.arange(0, BLOCK_N)
    there = output < outputs
    number = _adapter_of(numbers, places, product_at, token, T)
    out_at = out + token.to(tl.int64)[:, None] * (N0 + N1 + N2 + N3) + before + output[None, :]
    current = tl.min(number, axis=0)
    while current < NOBODY:
        own, rank = number == current, tl.multiple_of(tl.load(ranks + product_at + current), 8)
        up = memory + tl.multiple_of(tl.load(places + product_at + current), 16)
        up += rank.to(tl.int64) * K * parts + rank.to(tl.int64) * before
        total = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
        for start in range(0, rank, BLOCK_R):
            row = start + tl.arange(0, BLOCK_R)
            is_row = row < rank
            factor = tl.load(
                up + row.to(tl.int64)[:, None] * outputs + output[None, :], mask=is_row[:, None] & there[None, :], other=0.0
            ).to(tl.float32)
            if BLOCK_T == 1:
                split = tl.arange(0, SPLITS)
                sums_at = low + ((split.to(tl.int64) * T + tl.min(token, axis=0)) * parts + part)[:, None] * bound + row[None, :]
                sums = tl.sum(tl.load(sums_at, mask=(split < splits)[:, None] & is_row[None, :], other=0.0), axis=0)
                total += tl.sum(factor * sums[:, None], axis=0)[None, :]
            else:
                sums = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
                for split in tl.static_range(SPLITS):
                    sums_at = low + ((split * T + token).to(tl.int64) * parts + part)[:, None] * bound + row[None, :]
                    seen = row < tl.where(split < splits, rank, 0)
                    sums += tl.load(sums_at, mask=own[:, None] & seen[None, :], other=0.0)
                # what is widened from 16 bits loses nothing in TF32; float32 is multiplied as it is
                if memory.dtype.element_ty == tl.float32:
                    total = tl.dot(sums, factor, total, input_precision="ieee")
                else:
                    total = tl.dot(sums, factor, total, input_precision="tf32x3")
        seen = own[:, None] & there[None, :]
        added = tl.load(out_at, mask=seen, other=0.0).to(tl.float32) + total
        tl.store(out_at, added.to(out.dtype.element_ty), mask=seen)
        current = tl.min(tl.where(number > current, number, NOBODY), axis=0)


def tile_tokens(num_tokens: int, decodes: bool) -> int:
    """Returns the number of tokens in a tile, one of TILE_TOKENS, for a step of num_tokens tokens. decodes: every row of the step
    has one token."""
    return TILE_TOKENS[0] if decodes else TILE_TOKENS[1] if num_tokens <= _FEW_TOKENS else TILE_TOKENS[2]


def rank_bound(rank: int) -> int:
    """Returns the smallest of RANK_BOUNDS that is at least `rank`, which must not be above the largest of them."""
    return next(bound for bound in RANK_BOUNDS if rank <= bound)


def add_adapters(
    x: Tensor, out: Tensor, product: AdaptedProduct, adapters: BatchAdapters, bound: int, tile: int, widen: bool
) -> None:
    """Adds to out [T, N] in place, for each token of x [T, K], the token's product with the matrices of its LoRA adapter. product:
    the matrix multiplication whose result is `out`. adapters: each token's adapter, and the tables of all adapters. bound: one of
    RANK_BOUNDS; no adapter has a larger rank. tile: one of TILE_TOKENS. widen: products are computed in float32 (where kernels are
    interpreted). Raises ValueError if the product has more than MAX_PARTS parts."""
    if len(product.parts) > MAX_PARTS:
        raise ValueError(f"product {product.number} has {len(product.parts)} parts; adapters change products of up to {MAX_PARTS}")
    (num_tokens, inputs), parts, size = x.shape, len(product.parts), TILE_TOKENS.index(tile)
    tiles = ceil_div(num_tokens, tile)
    block_r = 16 if tile == 1 or bound == RANK_BOUNDS[0] else 32
    # interpreted, small blocks take long
    block_k = 256 if tile == 1 else 32 if x.element_size() == 4 and not widen else 128
    blocks = ceil_div(inputs, block_k)
    of_split = ceil_div(blocks, max(1, min(_MAX_SPLITS[size], blocks, inputs // _SPLIT_INPUTS[size])))
    splits = ceil_div(blocks, of_split)
    low = torch.empty(splits, num_tokens, parts * bound, dtype=torch.float32, device=x.device)
    product_at = product.number * adapters.places.shape[1]
    tables = adapters.numbers, adapters.places, adapters.ranks, adapters.memory
    _shrink_kernel[(tiles, parts * ceil_div(bound, block_r), splits)](
        x,
        *tables,
        low,
        num_tokens,
        inputs,
        product_at,
        bound,
        of_split,
        WIDEN=widen,
        BLOCK_T=tile,
        BLOCK_R=block_r,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=3,
    )
    block_n, own_tile = 256, _EXPAND_TOKENS[size]
    outputs = (*product.parts, *(0,) * (MAX_PARTS - parts))
    _expand_kernel[(ceil_div(num_tokens, own_tile), sum(ceil_div(own, block_n) for own in product.parts))](
        low,
        *tables,
        out,
        num_tokens,
        inputs,
        *outputs,
        product_at,
        parts,
        bound,
        splits,
        EVEN=all(size % 16 == 0 for size in (inputs, *outputs)),
        SPLITS=power_of_two(splits),
        BLOCK_T=own_tile,
        BLOCK_R=16,
        BLOCK_N=block_n,
        num_warps=2 if tile == 1 else 4,
        num_stages=2,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _numbers_kernel(
    of_slots,  # [S + 1] int32
    slots,  # [R] int32
    token_rows,  # [T] int32
    numbers,  # [T] int32
    num_tokens,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    slot = tl.load(slots + tl.load(token_rows + token, mask=inside, other=0), mask=inside, other=0)
    tl.store(numbers + token, tl.load(of_slots + slot, mask=inside, other=-1), mask=inside)


def adapter_numbers(of_slots: Tensor, slots: Tensor, token_rows: Tensor, numbers: Tensor) -> None:
    """Writes the number of each token's adapter to numbers [T] int32; -1: the token has none. of_slots [S + 1] int32: the adapter's
    number of each slot's sequence, -1 for none. slots [R] int32: the slot of each row. token_rows [T] int32: the row of each
    token."""
    block = 128
    _numbers_kernel[(ceil_div(len(numbers), block),)](of_slots, slots, token_rows, numbers, len(numbers), BLOCK=block, num_warps=4)
