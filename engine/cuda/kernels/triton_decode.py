"""Decode attention on the GPU (Triton): one query token of each row against its KV blocks, split along the context.

A work list, made once a step on the device, cuts the rows' contexts into pieces of about equal size, so one grid (and one CUDA
graph) serves every mix of lengths. All query heads of a KV head share a tile, so its keys and values are read once.

Shapes: R rows, I pieces of work (an upper bound; unused ones are empty), H query heads, G KV heads, D head size. Reference
implementations: reference.paged_attention, reference.split_contexts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels import tiles
from engine.cuda.kernels.sizes import ceil_div, power_of_two
from engine.cuda.kernels.triton_fp8 import (
    MOVED_FACTOR,
    QUERIES_FACTOR,
    WEIGHTS_FACTOR,
    as_words,
    block_of,
    finite_scale_of,
    moved_codes,
    rows_factor,
    rows_of,
    scales_at,
)
from engine.cuda.kernels.triton_softmax import LOG2_E, accumulate, log2_factor, scores_of

SPLIT_TOKENS = 64  # a piece's number of positions is a multiple of this
MANY_ROWS = 65  # with at least so many rows, another compilation of the kernel makes the work list
MAX_ROWS = 1024


@dataclass(slots=True)
class DecodeWork:
    """The pieces of work into which the contexts of R rows are cut, on the device.

    rows, begins, ends: [I] int32, each piece's row, first position and the position after its last (begin = end: the piece is
    unused). firsts: [R + 1] int32, each row's first piece, then the number of pieces. target: about how many pieces are wanted."""

    rows: Tensor
    begins: Tensor
    ends: Tensor
    firsts: Tensor
    target: int


def make_work(num_rows: int, target: int, device: torch.device | str) -> DecodeWork:
    """Allocates a DecodeWork for num_rows rows and about `target` pieces: I = target + num_rows, as each row may need one more. The
    tensors are not filled."""
    size = num_rows + target

    def column(length: int) -> Tensor:
        return torch.empty(length, dtype=torch.int32, device=device)

    return DecodeWork(column(size), column(size), column(size), column(num_rows + 1), target)


@triton.jit
def first_seen(position, reach):
    """Returns the first position that a query at `position` sees. reach R > 0: it sees the last R positions, its own included; R <
    0: those of its own chunk, when positions are cut into chunks of -R; 0: all."""
    chunk = tl.where(reach < 0, -reach, 1)
    first = tl.where(reach > 0, position - reach + 1, tl.where(reach < 0, position // chunk * chunk, 0))
    return tl.maximum(first, 0)


@triton.jit(do_not_specialize=["target", "reach", "num_rows", "num_items"])
def _split_kernel(
    contexts,  # [R] int32; 0: the row is padding
    num_rows,
    rows,  # [I]
    begins,
    ends,
    firsts,  # [R + 1]
    num_items,
    target,
    reach,
    ROWS: tl.constexpr,
    ITEMS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    context = tl.load(contexts + row, mask=row < num_rows, other=0)
    begin = first_seen(context - 1, reach)
    length = context - begin
    piece = (tl.sum(length, axis=0) + target * SPLIT - 1) // (target * SPLIT) * SPLIT
    piece = tl.maximum(piece, SPLIT)
    pieces = (length + piece - 1) // piece
    last = tl.cumsum(pieces, axis=0)
    first = last - pieces
    if tl.program_id(0) == 0:
        tl.store(firsts + 1 + row, last, mask=row < num_rows)
        tl.store(firsts, 0)
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    own = (item[:, None] >= first[None, :]) & (item[:, None] < last[None, :])  # at most one row for each item
    at = tl.sum(tl.where(own, begin[None, :] + (item[:, None] - first[None, :]) * piece, 0), axis=1)
    end = tl.minimum(at + piece, tl.sum(tl.where(own, context[None, :], 0), axis=1))
    inside = item < num_items
    tl.store(rows + item, tl.sum(tl.where(own, row[None, :], 0), axis=1), mask=inside)
    tl.store(begins + item, at, mask=inside)
    tl.store(ends + item, tl.maximum(at, end), mask=inside)


def split_contexts(contexts: Tensor, reach: int, work: DecodeWork) -> None:
    """Fills `work` with pieces of R rows' contexts [R] int32 (numbers of positions; 0: the row is padding), of which only what the
    last position sees is cut (reach: see first_seen). Raises ValueError for more than MAX_ROWS rows."""
    num_items, num_rows = len(work.rows), len(contexts)
    if num_rows > MAX_ROWS:
        raise ValueError(f"{num_rows} rows in a decode step; {MAX_ROWS} are supported")
    rows, items = (64, 64) if num_rows < MANY_ROWS else (MAX_ROWS, 8)
    _split_kernel[(ceil_div(num_items, items),)](
        contexts,
        num_rows,
        work.rows,
        work.begins,
        work.ends,
        work.firsts,
        num_items,
        work.target,
        reach,
        ROWS=rows,
        ITEMS=items,
        SPLIT=SPLIT_TOKENS,
        num_warps=8,
    )


# table_stride leads to single block numbers; block_stride is specialised, because it tells that keys are aligned to 16 bytes.
@triton.jit(do_not_specialize=["layer", "table_stride"])
def _piece_kernel(
    qkv,  # [T, WIDTH], of which the first H D columns are queries; row r's query is token r
    kv,
    scales,  # the scales of fp8 KV
    block_table,  # [S, B] int32
    table_rows,  # [R] int32: each row's index in block_table
    rows,  # [I]
    begins,
    ends,
    partial,  # [I, H, D] float32
    partial_log,  # [I, H] float32: log2 of a piece's sum of weights
    layer,
    table_stride,
    block_stride,
    scale,
    softcap,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    M: tl.constexpr,  # H / G, padded to a size that tensor cores take
    N: tl.constexpr,
    PADDED_D: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WIDEN: tl.constexpr,
    FP8: tl.constexpr,
    WORD: tl.constexpr,  # numbers in an element of kv
):
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    begin, end = tl.load(begins + item), tl.load(ends + item)
    if begin >= end:
        return
    row = tl.load(rows + item).to(tl.int64)
    group: tl.constexpr = H // G
    member, dim, place = tl.arange(0, M), tl.arange(0, PADDED_D), tl.arange(0, N)
    part = tl.arange(0, PADDED_D // WORD)
    inside = (member < group)[:, None] & (dim < D)[None, :]
    head = kv_head * group + member
    query = tl.load(qkv + row * WIDTH + head[:, None] * D + dim[None, :], mask=inside, other=0.0)
    if WIDEN:
        query = query.to(tl.float32)
    table = block_table + tl.load(table_rows + row).to(tl.int64) * table_stride
    keys_at = (layer * 2 * G + kv_head) * (BLOCK_TOKENS * D)
    values_at = keys_at + G * BLOCK_TOKENS * D
    MOVED: tl.constexpr = FP8 and WORD == 4 and query.dtype == tl.bfloat16
    if MOVED:
        query = (query.to(tl.float32) * QUERIES_FACTOR).to(query.dtype)
    elif FP8:
        scale *= rows_factor(query.dtype)
    factor = log2_factor(scale, SOFTCAP)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, PADDED_D], tl.float32)
    if FP8:
        position = begin + place
        block = block_of(table, position, position < end, BLOCK_TOKENS)
        key_scale, value_scale = scales_at(
            scales, block, position, position < end, keys_at // D, values_at // D, block_stride, BLOCK_TOKENS
        )
        next_block = block_of(table, position + N, position + N < end, BLOCK_TOKENS)
    for start in range(begin, end, N):
        position = start + place
        unsigned = position.to(tl.uint32)  # whose division by a power of two is one instruction
        visible = position < end
        block = tl.load(table + unsigned // BLOCK_TOKENS, mask=visible, other=0).to(tl.int64)
        cell = kv + (block * (block_stride // WORD) + unsigned % BLOCK_TOKENS * (D // WORD))[:, None]
        seen = visible[:, None] & (part < D // WORD)[None, :] if D < PADDED_D else visible[:, None]
        key = tl.load(cell + keys_at // WORD + part[None, :], mask=seen, other=0)
        by_key, by_value = 1.0, 1.0
        if MOVED:  # queries are few, so scores and weights are fewer numbers to scale than keys and values
            key = moved_codes(key)
            by_key = ((MOVED_FACTOR / QUERIES_FACTOR) * finite_scale_of(key_scale))[None, :]
            by_value = (WEIGHTS_FACTOR * finite_scale_of(value_scale))[None, :]
        elif FP8:
            key = rows_of(key, key_scale, query.dtype)
        scores = scores_of(query, key, scale * by_key, softcap, SOFTCAP, WIDEN)
        if not SOFTCAP:
            scores *= by_key
        scores = tl.where(visible[None, :], scores, float("-inf"))
        value = tl.load(cell + values_at // WORD + part[None, :], mask=seen, other=0)
        if FP8:
            value = moved_codes(value) if MOVED else rows_of(value, value_scale, query.dtype)
            later = position + N
            key_scale, value_scale = scales_at(
                scales, next_block, later, later < end, keys_at // D, values_at // D, block_stride, BLOCK_TOKENS
            )
            next_block = block_of(table, later + N, later + N < end, BLOCK_TOKENS)
        top, total, sums = accumulate(scores, factor, value, by_value, top, total, sums, WIDEN)
    if MOVED:
        sums *= MOVED_FACTOR / WEIGHTS_FACTOR
    elif FP8:
        sums *= rows_factor(query.dtype)
    at = (item * H + head).to(tl.int64)
    tl.store(partial + at[:, None] * D + dim[None, :], sums / total[:, None], mask=inside)
    tl.store(partial_log + at, top + tl.log2(total), mask=member < group)


@triton.jit
def _combine_kernel(
    partial,  # [I, H, D] float32
    partial_log,  # [I, H] float32
    firsts,  # [R + 1]
    sinks,  # [H] float32
    out,  # [T, H D]
    H: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    PIECES: tl.constexpr,
    SINKS: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    dim, offset = tl.arange(0, PADDED_D), tl.arange(0, PIECES)
    first, end = tl.load(firsts + row), tl.load(firsts + row + 1)
    sums = tl.zeros([PADDED_D], tl.float32)
    if SINKS:
        top = tl.load(sinks + head) * LOG2_E
        total = 1.0
    else:
        top = -1e38  # finite, so that a row that is padding gets 0
        total = 0.0
    for start in range(first, end, PIECES):
        inside = start + offset < end
        at = ((start + offset) * H + head).to(tl.int64)
        log = tl.load(partial_log + at, mask=inside, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(log, axis=0))
        weights = tl.exp2(log - new_top)
        kept = tl.exp2(top - new_top)
        part = tl.load(partial + at[:, None] * D + dim[None, :], mask=inside[:, None] & (dim < D)[None, :], other=0.0)
        sums = sums * kept + tl.sum(part * weights[:, None], axis=0)
        total = total * kept + tl.sum(weights, axis=0)
        top = new_top
    result = sums / tl.where(total > 0.0, total, 1.0)
    tl.store(out + (row * H + head).to(tl.int64) * D + dim, result.to(out.dtype.element_ty), mask=dim < D)


def decode_attention(
    qkv: Tensor,
    kv: Tensor,
    scales: Tensor | None,
    layer: int,
    heads: int,
    block_table: Tensor,
    table_rows: Tensor,
    work: DecodeWork,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    widen: bool,
    out: Tensor,
) -> None:
    """Computes the attention of R rows' queries, which are the first H D columns of the first R tokens of qkv, into out [T, H D].
    Rows without a context get zeros.

    kv: the arena as the KV group sees it, of which index `layer` is read. scales: of fp8 KV, which is widened to qkv's dtype; None:
    KV is of that dtype. block_table: [S, B] int32. table_rows: [R] int32, where each row's blocks are in block_table. softcap:
    scores become softcap * tanh(score / softcap); 0: they stay. sinks: [H] float32, a score that takes weight and gives no value,
    or None. widen: see triton_softmax."""
    kv_heads, block_tokens, head_dim = kv.shape[3:]
    num_items = len(work.rows)
    padded = max(16, power_of_two(head_dim))
    partial = torch.empty(num_items, heads, head_dim, dtype=torch.float32, device=qkv.device)
    partial_log = torch.empty(num_items, heads, dtype=torch.float32, device=qkv.device)
    stored = kv if scales is None else as_words(kv)
    tile = tiles.decode_tile(padded, qkv.element_size(), scales is not None)
    _piece_kernel[(num_items, kv_heads)](
        qkv,
        stored,
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
        softcap,
        H=heads,
        G=kv_heads,
        D=head_dim,
        WIDTH=qkv.shape[1],
        BLOCK_TOKENS=block_tokens,
        M=max(16, power_of_two(heads // kv_heads)),
        N=tile.positions,
        PADDED_D=padded,
        SOFTCAP=softcap > 0,
        WIDEN=widen,
        FP8=scales is not None,
        WORD=head_dim // stored.shape[-1],
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    combine(partial, partial_log, work, sinks, out)


def combine(partial: Tensor, partial_log: Tensor, work: DecodeWork, sinks: Tensor | None, out: Tensor) -> None:
    """Combines the attention of the pieces of each row, partial [I, H, D] with partial_log [I, H] (log2 of a piece's sum of
    weights), both float32, and writes the result to the first R rows of out [T, H D]; zeros for rows without pieces. sinks: as in
    decode_attention."""
    _, heads, head_dim = partial.shape
    padded = max(16, power_of_two(head_dim))
    _combine_kernel[(len(work.firsts) - 1, heads)](
        partial,
        partial_log,
        work.firsts,
        partial_log if sinks is None else sinks,
        out,
        H=heads,
        D=head_dim,
        PADDED_D=padded,
        PIECES=16 if padded <= 256 else 8,
        SINKS=sinks is not None,
        num_warps=2 if padded <= 256 else 4,
    )
