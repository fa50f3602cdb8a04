"""Computes decode attention on the GPU (Triton): one query token of each row attends to the row's KV blocks. Contexts are split
into pieces (split-K).

A work list, made on the device once for each step, cuts the rows' contexts into pieces of about equal size, so one grid (and one
CUDA graph) serves every mix of lengths. All query heads of a KV head are computed together, so its keys and values are read once.

A second kernel combines ("joins") the pieces of each row, unless the tile's `joins` is set. With `joins`, the attention kernel
itself combines them: the program that finishes the last of up to PIECES consecutive pieces combines these in their order. If a row
has more pieces, the program that finishes the last of its groups combines the groups' results likewise. Counters tell a program
whether it is the last. They are 0 between kernels: split_contexts sets them to 0 at the beginning of a step, and the program that
was the last resets its own. This relies on orderings of the device's memory (docs/gpu.md), so an engine sets `joins` only after it
has tested and measured it on its own GPU (tile_choice.py).

With `joins`, each sum is written as a chain of multiply-adds, so its rounding does not depend on how a compiler distributes numbers
over threads. So two kernels can compute the same bits (`in_order` of decode_attention), with which results are compared.

Shapes: R rows, I pieces of work (an upper bound; unused ones are empty), H query heads, G KV heads, D head size. Reference
implementations: reference.paged_attention, reference.split_contexts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels import tiles, triton_overlap
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
from engine.cuda.kernels.triton_overlap import await_earlier
from engine.cuda.kernels.triton_softmax import LOG2_E, accumulate, log2_factor, scores_of

SPLIT_TOKENS = 64  # a piece's number of positions is a multiple of this
MANY_ROWS = 65  # with at least so many rows, another compilation of the kernel makes the work list
MAX_ROWS = 1024
# A program of four warps joins so many numbers of a piece at a time, four in a thread, and loads so many pieces at once: more would
# take registers that hold other programs back.
JOINED_VALUES = 512
LOADED = tl.constexpr(8)
# The most that a program joins at once, in some 4 us: about what a second kernel takes with its launch (docs/gpu.md).
MOST_JOINED_VALUES = 16384


@dataclass(slots=True)
class DecodeWork:
    """The pieces of work into which the contexts of R rows are cut, on the device.

    rows, begins, ends [I] int32: each piece's row, its first position, and the position after its last; begin = end in unused
    pieces.
    firsts [R + 1] int32: the index of each row's first piece, then the number of pieces.
    target: the approximate number of pieces that is wanted.
    finished, int32: counters for attention kernels that combine pieces themselves, 0 between kernels; empty if no layer has such a
    kernel. A layer reads the first I * G counters as [I, G]. The counter of the first piece of a group (of pieces that are combined
    at once) counts the pieces of the group that are computed. The counter of a row's second piece counts the row's groups that are
    combined."""

    rows: Tensor
    begins: Tensor
    ends: Tensor
    firsts: Tensor
    target: int
    finished: Tensor


def make_work(num_rows: int, target: int, counted: int, device: torch.device | str) -> DecodeWork:
    """Allocates a DecodeWork for num_rows rows and about `target` pieces; its tensors are not filled. I is target + num_rows,
    because each row may need one piece more. counted: the largest number of KV heads of the layers whose kernel combines pieces
    itself; 0: there are none."""
    size = num_rows + target

    def column(length: int) -> Tensor:
        return torch.empty(length, dtype=torch.int32, device=device)

    return DecodeWork(column(size), column(size), column(size), column(num_rows + 1), target, column(size * counted))


@triton.jit
def first_seen(position, reach):
    """Returns the first position to which a query at `position` attends. reach: above 0: the query attends to the last `reach`
    positions, its own included; below 0: within its own chunk of -reach adjacent positions (chunked attention); 0: to all."""
    chunk = tl.where(reach < 0, -reach, 1)
    first = tl.where(reach > 0, position - reach + 1, tl.where(reach < 0, position // chunk * chunk, 0))
    return tl.maximum(first, 0)


@triton.jit(do_not_specialize=["target", "reach", "num_rows", "num_items", "num_counters"])
def _split_kernel(
    contexts,  # [R] int32; 0: the row is padding
    num_rows,
    rows,  # [I]
    begins,
    ends,
    firsts,  # [R + 1]
    finished,  # [C]
    num_items,
    num_counters,  # C
    target,
    reach,
    ROWS: tl.constexpr,
    ITEMS: tl.constexpr,
    SPLIT: tl.constexpr,
    COUNTS: tl.constexpr,  # whether there are counters
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
    if COUNTS:
        for start in range(tl.program_id(0) * ROWS, num_counters, tl.num_programs(0) * ROWS):
            counter = start + tl.arange(0, ROWS)
            tl.store(finished + counter, 0, mask=counter < num_counters)


def split_contexts(contexts: Tensor, reach: int, work: DecodeWork) -> None:
    """Cuts the contexts of R rows into pieces, writes the pieces to `work`, and sets the counters of `work` to 0. contexts [R]
    int32: each row's number of positions; 0 for padding. reach: only positions to which the row's last position attends are cut
    into pieces (see first_seen). Raises ValueError for more than MAX_ROWS rows."""
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
        work.finished,
        num_items,
        len(work.finished),
        work.target,
        reach,
        ROWS=rows,
        ITEMS=items,
        SPLIT=SPLIT_TOKENS,
        COUNTS=len(work.finished) > 0,
        num_warps=8,
    )


@triton.jit
def _finishes(counter, number):
    """Adds 1 to `counter`. Returns whether this program is the last of `number` programs that do so. If it is, the counter is 0
    again, and the program sees everything that the other programs stored before."""
    tl.debug_barrier()  # all of the program's threads have stored before one of them tells so
    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()  # and none of them reads before it knows
    is_last = before == number - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def _joined(
    partial, partial_log, first, number, head, is_head,
    H: tl.constexpr, D: tl.constexpr, PADDED_D: tl.constexpr, HEADS: tl.constexpr, PIECES: tl.constexpr, STRIDE: tl.constexpr,
    CACHE: tl.constexpr,
):  # fmt: skip
    """Combines `number` pieces of a row, for some heads: piece `first` and every STRIDE-th piece after it. Returns (sums [HEADS,
    PADDED_D], top [HEADS], total [HEADS]), float32: the weighted sum of the pieces' attention, the base-2 logarithm of the largest
    weight, and the sum of the weights. Weights are relative to the largest. Without pieces sums and total are 0.

    head, is_head [HEADS]: the heads' indices, and which of the heads exist. PIECES: for how many pieces the largest weight is
    updated at a time. CACHE: cache_modifier of tl.load for the pieces. Numbers are added one by one in the order of the pieces, so
    no sum depends on the layout of the tensors."""
    dim, offset = tl.arange(0, PADDED_D), tl.arange(0, PIECES)
    sums = tl.zeros([HEADS, PADDED_D], tl.float32)
    top = tl.full([HEADS], -1e38, tl.float32)  # finite, so that a row that is padding gets 0
    total = tl.zeros([HEADS], tl.float32)
    for start in tl.range(0, number, PIECES, num_stages=1):
        inside = (start + offset < number)[None, :] & is_head[:, None]
        at = (first + (start + offset) * STRIDE)[None, :].to(tl.int64) * H + head[:, None]
        log = tl.load(partial_log + at, mask=inside, other=float("-inf"), cache_modifier=CACHE)
        new_top = tl.maximum(top, tl.max(log, axis=1))
        kept = tl.exp2(top - new_top)
        sums = sums * kept[:, None]
        added = tl.zeros([HEADS], tl.float32)
        for some in tl.range(start, tl.minimum(start + PIECES, number), LOADED, num_stages=1):
            for piece in tl.static_range(LOADED):
                place = some + piece + tl.zeros([HEADS], tl.int32)
                there = is_head & (place < number)
                at_piece = (first + place * STRIDE).to(tl.int64) * H + head
                log_of = tl.load(partial_log + at_piece, mask=there, other=float("-inf"), cache_modifier=CACHE)
                weight = tl.exp2(log_of - new_top)
                part = tl.load(
                    partial + at_piece[:, None] * D + dim[None, :],
                    mask=there[:, None] & (dim < D)[None, :],
                    other=0.0,
                    cache_modifier=CACHE,
                )
                sums = tl.fma(part, tl.broadcast_to(weight[:, None], [HEADS, PADDED_D]), sums)
                added += weight
        total = tl.fma(total, kept, added)
        top = new_top
    return sums, top, total


@triton.jit
def _with_sinks(sums, top, total, sinks, head, is_head, SINKS: tl.constexpr):
    """Adds the sinks of heads (scores without a value) to results of _joined. Returns the new sums and total. SINKS: False: there
    are no sinks, and nothing is added."""
    if SINKS:
        sink = tl.load(sinks + head, mask=is_head, other=0.0)
        factor = tl.full(sink.shape, LOG2_E, tl.float32)
        new_top = tl.maximum(sink * factor, top)
        kept = tl.exp2(top - new_top)
        sums = sums * kept[:, None]
        total = tl.fma(total, kept, tl.exp2(tl.fma(sink, factor, -new_top)))
    return sums, total


@triton.jit
def _divided(sums, total):
    """Returns sums divided by total: the attention [HEADS, PADDED_D] of some heads; 0 where total is 0."""
    return sums / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit
def _write_attention(
    sums, top, total, sinks, out, row, head, is_head,
    H: tl.constexpr, D: tl.constexpr, PADDED_D: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Writes the attention of some heads of a row to `out`, sinks included. sums, top, total: the result of _joined for all pieces
    of the row."""
    dim = tl.arange(0, PADDED_D)
    sums, total = _with_sinks(sums, top, total, sinks, head, is_head, SINKS)
    there = is_head[:, None] & (dim < D)[None, :]
    tl.store(out + (row * H + head)[:, None] * D + dim[None, :], _divided(sums, total).to(out.dtype.element_ty), mask=there)


@triton.jit
def _write_piece(
    sums, top, total, partial, partial_log, item, head, is_head, H: tl.constexpr, D: tl.constexpr, PADDED_D: tl.constexpr
):
    """Stores several combined pieces as one piece, in the place of piece `item`, which may be one of them. sums, top, total: the
    result of _joined for these pieces."""
    dim = tl.arange(0, PADDED_D)
    there = is_head[:, None] & (dim < D)[None, :]
    tl.debug_barrier()  # all threads have read what is overwritten
    where = (item * H + head).to(tl.int64)
    tl.store(partial + where[:, None] * D + dim[None, :], _divided(sums, total), mask=there)
    tl.store(partial_log + where, top + tl.log2(total), mask=is_head)


@triton.jit
def _of_one_piece(sums, log, sinks, head, is_head, SINKS: tl.constexpr):
    """Returns the attention of heads of a row that has only one piece, sinks included. sums: the attention of the piece. log: log2
    of its sum of weights."""
    if SINKS:
        sums, total = _with_sinks(sums, log, tl.full(log.shape, 1.0, tl.float32), sinks, head, is_head, SINKS)
        sums = _divided(sums, total)
    return sums


# table_stride leads to single block numbers; block_stride is specialised, because it tells that keys are aligned to 16 bytes.
@triton.jit(do_not_specialize=["layer", "table_stride", "num_rows"])
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
    firsts,  # [R + 1]
    finished,  # [I, G], 0 before and after
    sinks,  # [H] float32
    out,  # [T, H D]
    num_rows,
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
    JOINS: tl.constexpr,  # whether pieces are joined to `out`; firsts, finished, sinks and out are read and written only then
    HEADS: tl.constexpr,  # heads that are joined at a time
    PIECES: tl.constexpr,  # pieces that are joined at a time
    SINKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    await_earlier(OVERLAPS)
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    group: tl.constexpr = H // G
    if JOINS:
        is_row = item < num_rows  # of which there are no more than pieces
        is_padding = tl.load(firsts + item, mask=is_row, other=0) == tl.load(firsts + item + 1, mask=is_row, other=1)
        if is_padding:
            number = tl.arange(0, M * PADDED_D)
            unread = out + (item.to(tl.int64) * H + kv_head * group + number // PADDED_D) * D + number % PADDED_D
            there = (number // PADDED_D < group) & (number % PADDED_D < D)
            tl.store(unread, tl.zeros([M * PADDED_D], out.dtype.element_ty), mask=there)
    begin, end = tl.load(begins + item), tl.load(ends + item)
    if begin >= end:
        return
    row = tl.load(rows + item).to(tl.int64)
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
    sums, log = sums / total[:, None], top + tl.log2(total)
    first, last = 0, 0
    if JOINS:
        first, last = tl.load(firsts + row), tl.load(firsts + row + 1)
    if last - first == 1:
        sums = _of_one_piece(sums, log, sinks, head, member < group, SINKS)
        tl.store(out + (row * H + head)[:, None] * D + dim[None, :], sums.to(out.dtype.element_ty), mask=inside)
    else:
        at = (item * H + head).to(tl.int64)
        tl.store(partial + at[:, None] * D + dim[None, :], sums, mask=inside)
        tl.store(partial_log + at, log, mask=member < group)
        if JOINS:
            begun = first + (item - first) // PIECES * PIECES  # the first of the pieces with which this one is joined
            number, is_whole = tl.minimum(last - begun, PIECES), last - first <= PIECES
            if _finishes(finished + begun * G + kv_head, number):
                for own in range(0, group, HEADS):
                    joined = own + tl.arange(0, HEADS)
                    head_at, is_head = kv_head * group + joined, joined < group
                    result, top_of, total_of = _joined(
                        partial, partial_log, begun, number, head_at, is_head, H, D, PADDED_D, HEADS, PIECES, 1, ".cg"
                    )
                    if is_whole:
                        _write_attention(result, top_of, total_of, sinks, out, row, head_at, is_head, H, D, PADDED_D, SINKS)
                    else:
                        _write_piece(result, top_of, total_of, partial, partial_log, begun, head_at, is_head, H, D, PADDED_D)
                if not is_whole:
                    number = (last - first + PIECES - 1) // PIECES
                    if _finishes(finished + (first + 1) * G + kv_head, number):
                        for own in range(0, group, HEADS):
                            joined = own + tl.arange(0, HEADS)
                            head_at, is_head = kv_head * group + joined, joined < group
                            result, top_of, total_of = _joined(
                                partial, partial_log, first, number, head_at, is_head, H, D, PADDED_D, HEADS, PIECES, PIECES, ".cg"
                            )
                            _write_attention(result, top_of, total_of, sinks, out, row, head_at, is_head, H, D, PADDED_D, SINKS)


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
    OVERLAPS: tl.constexpr,
):
    await_earlier(OVERLAPS)
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


@triton.jit
def _in_order_kernel(
    partial,  # [I, H, D] float32, overwritten where rows have more than PIECES pieces
    partial_log,  # [I, H] float32, likewise
    firsts,  # [R + 1]
    sinks,  # [H] float32
    out,  # [T, H D]
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    HEADS: tl.constexpr,
    PIECES: tl.constexpr,
    SINKS: tl.constexpr,
):
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group: tl.constexpr = H // G
    dim = tl.arange(0, PADDED_D)
    first, last = tl.load(firsts + row), tl.load(firsts + row + 1)
    number = last - first
    for own in range(0, group, HEADS):
        joined = own + tl.arange(0, HEADS)
        head, is_head = kv_head * group + joined, joined < group
        there = is_head[:, None] & (dim < D)[None, :]
        if number == 1:
            where = (first * H + head).to(tl.int64)
            one = tl.load(partial + where[:, None] * D + dim[None, :], mask=there, other=0.0)
            log = tl.load(partial_log + where, mask=is_head, other=0.0)
            of_row = out + (row * H + head)[:, None] * D + dim[None, :]
            tl.store(of_row, _of_one_piece(one, log, sinks, head, is_head, SINKS).to(out.dtype.element_ty), mask=there)
        elif number <= PIECES:
            result, top, total = _joined(
                partial, partial_log, first, number, head, is_head, H, D, PADDED_D, HEADS, PIECES, 1, ""
            )  # fmt: skip
            _write_attention(result, top, total, sinks, out, row, head, is_head, H, D, PADDED_D, SINKS)
        else:
            for begun in tl.range(first, last, PIECES, num_stages=1):
                some = tl.minimum(last - begun, PIECES)
                result, top, total = _joined(
                    partial, partial_log, begun, some, head, is_head, H, D, PADDED_D, HEADS, PIECES, 1, ""
                )  # fmt: skip
                _write_piece(result, top, total, partial, partial_log, begun, head, is_head, H, D, PADDED_D)
            tl.debug_barrier()  # all threads have written what is read
            some = (number + PIECES - 1) // PIECES
            result, top, total = _joined(
                partial, partial_log, first, some, head, is_head, H, D, PADDED_D, HEADS, PIECES, PIECES, ""
            )  # fmt: skip
            _write_attention(result, top, total, sinks, out, row, head, is_head, H, D, PADDED_D, SINKS)


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
    in_order: bool = False,
) -> None:
    """Computes the attention of R rows with one new token each, and writes it to out [T, H D]. The queries are the first H D
    columns of the first R tokens of qkv. Rows without a context get zeros.

    kv: the arena as the KV group sees it, of which index `layer` is read. scales: the scales of fp8 KV; None: KV has qkv's dtype.
    block_table [S, B] int32. table_rows [R] int32: each row's index in block_table.
    heads: H. scale: factor of the scores. softcap: scores become softcap * tanh(score / softcap); 0: they stay.
    sinks [H] float32: one more score for each head, which takes weight but has no value; None: there are none.
    widen: products are computed in float32 (where kernels are interpreted).
    in_order: a second kernel combines the pieces, with the same bits as an attention kernel that combines them itself; used to test
    that kernel.

    Raises ValueError if the attention kernel is to combine the pieces and `work` has too few counters for that."""
    kv_heads, block_tokens, head_dim = kv.shape[3:]
    num_items, padded = len(work.rows), max(16, power_of_two(head_dim))
    fp8 = scales is not None
    tile = tiles.decode_tile(padded, qkv.element_size(), fp8, heads // kv_heads)
    joins = tile.joins and not in_order and joins_pieces(heads // kv_heads, head_dim)
    if joins and len(work.finished) < num_items * kv_heads:
        raise ValueError(f"{len(work.finished)} counters for {num_items} pieces of {kv_heads} KV heads")
    partial = torch.empty(num_items, heads, head_dim, dtype=torch.float32, device=qkv.device)
    partial_log = torch.empty(num_items, heads, dtype=torch.float32, device=qkv.device)
    stored = kv if scales is None else as_words(kv)
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
        work.firsts,
        work.finished,
        partial_log if sinks is None else sinks,
        out,
        len(work.firsts) - 1,
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
        FP8=fp8,
        WORD=head_dim // stored.shape[-1],
        JOINS=joins,
        HEADS=_heads_at_once(heads // kv_heads, padded) if joins else 1,
        PIECES=_pieces_at_once(padded),
        SINKS=joins and sinks is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **triton_overlap.options(),
    )
    if in_order:
        join_in_order(partial, partial_log, work, kv_heads, sinks, out)
    elif not joins:
        combine(partial, partial_log, work, sinks, out)


def joins_pieces(group: int, head_dim: int) -> bool:
    """Returns whether the attention kernel can combine pieces itself: whether the pieces that are combined at once, for all query
    heads of a KV head, have at most MOST_JOINED_VALUES numbers together. group: number of query heads per KV head. head_dim: the
    head size."""
    padded = max(16, power_of_two(head_dim))
    return group * _pieces_at_once(padded) * padded <= MOST_JOINED_VALUES


def _pieces_at_once(padded: int) -> int:
    """Returns how many pieces are combined at once. padded: the head size, padded to a power of two."""
    return 16 if padded <= 256 else 8


def _heads_at_once(group: int, padded: int) -> int:
    """Returns the number of heads for which a program combines pieces at a time. group: number of query heads per KV head. padded:
    the head size, padded to a power of two."""
    return min(power_of_two(group), max(1, JOINED_VALUES // padded))


def join_in_order(partial: Tensor, partial_log: Tensor, work: DecodeWork, kv_heads: int, sinks: Tensor | None, out: Tensor) -> None:
    """Combines the pieces of each row and writes the rows' attention to `out`, as `combine` does, but in the order and with the
    arithmetic of an attention kernel that combines them itself, so that the results have the same bits. Overwrites partial and
    partial_log."""
    _, heads, head_dim = partial.shape
    padded = max(16, power_of_two(head_dim))
    _in_order_kernel[(len(work.firsts) - 1, kv_heads)](
        partial,
        partial_log,
        work.firsts,
        partial_log if sinks is None else sinks,
        out,
        H=heads,
        G=kv_heads,
        D=head_dim,
        PADDED_D=padded,
        HEADS=_heads_at_once(heads // kv_heads, padded),
        PIECES=_pieces_at_once(padded),
        SINKS=sinks is not None,
        num_warps=4,
    )


def combine(partial: Tensor, partial_log: Tensor, work: DecodeWork, sinks: Tensor | None, out: Tensor) -> None:
    """Combines the pieces of each row and writes the rows' attention to the first R rows of out [T, H D]; zeros for rows without
    pieces. partial [I, H, D] float32: each piece's attention. partial_log [I, H] float32: log2 of each piece's sum of weights.
    sinks: as in decode_attention."""
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
        PIECES=_pieces_at_once(padded),
        SINKS=sinks is not None,
        num_warps=2 if padded <= 256 else 4,
        **triton_overlap.options(),
    )
