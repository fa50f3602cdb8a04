"""Edits logits before sampling, and computes log-probabilities and ranks of tokens, on the GPU (Triton). Reference implementations:
reference.{penalise, top_logprobs, ranks}.

Masks, biases, penalties and banned ids of all rows of a step take three launches:

1. `_widen_kernel` writes the logits as float32 to memory of their own, and gives tokens that masks rule out the lowest value.
2. `_count_kernel` adds biases, and counts the tokens of those sequences that have penalties.
3. `_penalise_kernel` penalises each counted token once, and rules out banned ids. A program replaces a token's count by 0 as it
   reads it, so only one program changes the token's logit.

Masks, tokens, biases and banned ids of all rows are in one array of words; columns with a number for each row say where those of
the row begin. Grids depend on the number of rows alone, so that a graph can hold these launches (engine/cuda/edited_graphs.py).

Shapes: N rows, V vocabulary, W = ceil(V / 32) words of a mask, E edits (an edit is what one row's request changes), K alternatives.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels.sizes import ceil_div, power_of_two

SEEN = tl.constexpr(1 << 30)  # bit of a token's count: the token occurs in the prompt or the output
BANNED = tl.constexpr(1 << 29)  # bit of a token's count: the token is ruled out, whatever its logit
LEAST = tl.constexpr(-3.4028234663852886e38)  # the least float32
# The words of an edit: its row, then where its lists begin and end in the array of words: the sequence's tokens; among them the
# tokens of the output, which end where all tokens end; the biased ids, followed by as many biases in float32; the banned ids.
EDIT_WORDS = 8
ROW, TOKENS, OUTPUT, TOKENS_END, BIASES, BIASES_END, BANS, BANS_END = map(tl.constexpr, range(EDIT_WORDS))
EDIT_SIZE = tl.constexpr(EDIT_WORDS)
PENALTIES = 4  # numbers of an edit: presence, frequency, repetition, and one that keeps edits aligned
PENALTIES_SIZE = tl.constexpr(PENALTIES)
WIDEN_BLOCK, EDIT_BLOCK = 2048, 512
EDIT_PROGRAMS = 16  # programs for each edit, which take its tokens by turns, EDIT_BLOCK at a time


# V is specialised, as below.
@triton.jit(do_not_specialize=["first"])
def _widen_kernel(
    logits,  # [>= first + N, V]
    masks,  # [N] int32: where the row's mask [W] begins in the words, -1 for none
    words,  # int32
    counted,  # [N] int32: whether the row's counts are needed
    wide,  # [N, V] float32
    counts,  # [N, V] int32
    least,  # of the logits' type
    first,
    V,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < V
    logit = tl.load(logits + (first + row) * V + at, mask=inside, other=0.0).to(tl.float32)
    mask = tl.load(masks + row)
    if mask >= 0:
        word = tl.load(words + mask + at // 32, mask=inside, other=0)
        finite = (logit == logit) & (tl.abs(logit) != float("inf"))
        logit = tl.where(finite & (((word >> (at % 32)) & 1) == 0), least, logit)
    tl.store(wide + row * V + at, logit, mask=inside)
    if tl.load(counted + row) != 0:
        tl.store(counts + row * V + at, tl.zeros([BLOCK], tl.int32), mask=inside)


@triton.jit(do_not_specialize=["V"])
def _count_kernel(
    wide,  # [N, V] float32
    counts,  # [N, V] int32
    edits,  # [E, EDIT_WORDS] int32
    words,  # int32
    V,
    BLOCK: tl.constexpr,
):
    own, program = edits + tl.program_id(0) * EDIT_SIZE, tl.program_id(1)
    place = tl.load(own + ROW).to(tl.int64) * V
    begin, output, end = tl.load(own + TOKENS), tl.load(own + OUTPUT), tl.load(own + TOKENS_END)
    for start in range(begin + program * BLOCK, end, tl.num_programs(1) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < end
        token = tl.load(words + at, mask=inside, other=0)
        tl.atomic_or(counts + place + token, SEEN, mask=inside)
        tl.atomic_add(counts + place + token, 1, mask=inside & (at >= output))
    if program == 0:
        first, last = tl.load(own + BIASES), tl.load(own + BIASES_END)
        for start in range(first, last, BLOCK):
            at = start + tl.arange(0, BLOCK)
            biased = wide + place + tl.load(words + at, mask=at < last, other=0)
            bias = tl.load(words + at + (last - first), mask=at < last, other=0).to(tl.float32, bitcast=True)
            tl.store(biased, tl.load(biased, mask=at < last) + bias, mask=at < last)
        if end > begin:
            last = tl.load(own + BANS_END)
            for start in range(tl.load(own + BANS), last, BLOCK):
                at = start + tl.arange(0, BLOCK)
                tl.atomic_or(counts + place + tl.load(words + at, mask=at < last, other=0), BANNED, mask=at < last)


@triton.jit(do_not_specialize=["V"])
def _penalise_kernel(
    wide,  # [N, V] float32
    counts,  # [N, V] int32
    edits,  # [E, EDIT_WORDS] int32
    penalties,  # [E, PENALTIES] float64
    words,  # int32
    V,
    BLOCK: tl.constexpr,
):
    edit, program = tl.program_id(0), tl.program_id(1)
    own, numbers = edits + edit * EDIT_SIZE, penalties + edit * PENALTIES_SIZE
    place = tl.load(own + ROW).to(tl.int64) * V
    presence, frequency, repetition = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    end = tl.load(own + TOKENS_END)
    for start in range(tl.load(own + TOKENS) + program * BLOCK, end, tl.num_programs(1) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < end
        token = tl.load(words + at, mask=inside, other=0)
        found = tl.atomic_xchg(counts + place + token, 0, mask=inside)
        inside = inside & (found != 0) & ((found & BANNED) == 0)
        old = tl.load(wide + place + token, mask=inside, other=0.0)
        # in float64, as on a cpu device, so that a seed has the same tokens there
        exact = old.to(tl.float64)
        output = (found & (BANNED - 1)).to(tl.float64)
        new = tl.where(exact > 0.0, exact / repetition, exact * repetition)
        new -= frequency * output + tl.where(output > 0.0, presence, 0.0)
        new = tl.minimum(tl.maximum(new, -1e30), 1e30)
        finite = (old == old) & (tl.abs(old) != float("inf"))
        tl.store(wide + place + token, new.to(tl.float32), mask=inside & finite)
    if program == 0:
        last = tl.load(own + BANS_END)
        for start in range(tl.load(own + BANS), last, BLOCK):
            at = start + tl.arange(0, BLOCK)
            ruled_out = wide + place + tl.load(words + at, mask=at < last, other=0)
            old = tl.load(ruled_out, mask=at < last, other=0.0)
            finite = (old == old) & (tl.abs(old) != float("inf"))
            tl.store(ruled_out, tl.full([BLOCK], LEAST, tl.float32), mask=(at < last) & finite)


def widen(logits: Tensor, first: int, masks: Tensor, words: Tensor, counted: Tensor, wide: Tensor, counts: Tensor) -> None:
    """Writes rows `first` to `first` + N - 1 of logits to wide [N, V] float32. Logits that a mask rules out become the lowest
    finite number of the logits' type; NaN and infinities stay.

    masks [N] int32: the index in words (int32) at which the row's mask [W] begins; -1: the row has none. A set bit of a mask allows
    its token. counted [N] int32: not 0 for rows whose counts [N, V] int32 are set to zeros."""
    rows, vocab = wide.shape
    least = torch.finfo(logits.dtype).min
    _widen_kernel[(rows, ceil_div(vocab, WIDEN_BLOCK))](
        logits, masks, words, counted, wide, counts, least, first, vocab, BLOCK=WIDEN_BLOCK, num_warps=4
    )


def add_biases_and_count(wide: Tensor, counts: Tensor, edits: Tensor, words: Tensor) -> None:
    """Adds the biases of edits [E EDIT_WORDS] int32 to wide [N, V] float32. Counts the tokens of the edits' sequences in counts [N,
    V] int32, whose rows must be zeros before. words: the int32 memory in which an edit's biases and tokens lie, at indices that the
    edit holds."""
    grid = (len(edits) // EDIT_WORDS, EDIT_PROGRAMS)
    _count_kernel[grid](wide, counts, edits, words, wide.shape[1], BLOCK=EDIT_BLOCK, num_warps=4)


def penalise_and_ban(wide: Tensor, counts: Tensor, edits: Tensor, penalties: Tensor, words: Tensor) -> None:
    """Penalises the tokens that add_biases_and_count has counted in `counts`, as reference.penalise does, and rules out the banned
    ids: changes their logits in wide [N, V] float32. Banned ids get the lowest finite float32, unless their logits are NaN or
    infinite. The counts of the edits' tokens become 0. edits [E EDIT_WORDS] int32: for each row that is edited, where its tokens
    and banned ids lie in `words`. penalties [E PENALTIES] float64."""
    grid = (len(edits) // EDIT_WORDS, EDIT_PROGRAMS)
    _penalise_kernel[grid](
        wide, counts, edits, penalties, words, wide.shape[1], BLOCK=EDIT_BLOCK, num_warps=4, enable_fp_fusion=False
    )


# V is specialised: a multiple of 16 tells that every row is aligned, and the kernel passes over rows many times.
@triton.jit(do_not_specialize=["K", "first"], do_not_specialize_on_alignment=["rows", "nums", "chosen", "picked", "top_ids", "top"])
def _logprobs_kernel(
    logits,  # [>= first + N, V]
    rows,  # [M] int32, -1 for none
    nums,  # [M] int32: how many alternatives, at most K
    chosen,  # [N] int32
    picked,  # [M] float32
    top_ids,  # [M, K] int32
    top,  # [M, K] float32
    first,
    V,
    K,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    number = tl.load(rows + row).to(tl.int64)
    if number < 0:
        return
    logits += (first + number) * V
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(logits + at, mask=at < V, other=float("-inf")).to(tl.float32))
    highest = tl.max(largest, axis=0)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mass += tl.exp(tl.load(logits + at, mask=at < V, other=float("-inf")).to(tl.float32) - highest)
    base = highest + tl.log(tl.sum(mass, axis=0))
    tl.store(picked + row, tl.load(logits + tl.load(chosen + number)).to(tl.float32) - base)
    last, last_at = float("inf"), -1
    # Each turn finds the token that follows the last one in order: the next lower logit, or an equal one at a higher index.
    for k in range(0, tl.load(nums + row)):
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        best_at = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            logit = tl.load(logits + at, mask=at < V, other=float("-inf")).to(tl.float32)
            better = (at < V) & ((logit < last) | ((logit == last) & (at > last_at))) & (logit > best)
            best = tl.where(better, logit, best)
            best_at = tl.where(better, at, best_at)
        last = tl.max(best, axis=0)
        last_at = tl.min(tl.where(best == last, best_at, 0x7FFFFFFF), axis=0)
        tl.store(top_ids + row * K + k, last_at)
        tl.store(top + row * K + k, last - base)


def top_logprobs(
    logits: Tensor, first: int, rows: Tensor, nums: Tensor, chosen: Tensor, picked: Tensor, top_ids: Tensor, top: Tensor
) -> None:
    """Computes log-probabilities of M rows, as Ops.top_logprobs does. Writes picked [M] float32 (those of the chosen tokens),
    top_ids [M, K] int32 (the ids of the most likely tokens) and top [M, K] float32 (their log-probabilities). The results of rows
    with NaN or infinite logits are undefined.

    rows [M] int32: the rows' indices among the N rows of logits that begin at row `first`; -1: nothing is written. nums [M] int32:
    how many of the K most likely tokens are written. chosen [N] int32: the chosen token of each of the N rows."""
    vocab = logits.shape[1]
    block = min(4096, max(16, power_of_two(vocab)))
    _logprobs_kernel[(len(rows),)](
        logits,
        rows,
        nums,
        chosen,
        picked,
        top_ids,
        top,
        first,
        vocab,
        top.shape[1],
        BLOCK=block,
        num_warps=16 if block == 4096 else 4,
    )


# V is specialised: it tells how rows are aligned. Of the others' addresses nothing is read but one number each.
@triton.jit(do_not_specialize_on_alignment=["chosen", "out"])
def _ranks_kernel(
    logits,  # [N, V]
    chosen,  # [N] int32
    out,  # [N] int32
    V,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    own = tl.load(logits + tl.load(chosen + row)).to(tl.float32)
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < V
        logit = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32)
        counts += (inside & (logit >= own)).to(tl.int32)
    tl.store(out + row, tl.sum(counts, axis=0))


def ranks(logits: Tensor, chosen: Tensor, out: Tensor) -> None:
    """Writes the rank of each row's token in chosen [N] int32 to out [N] int32: the number of logits in the row of logits [N, V]
    that are at least as large as the token's, its own included."""
    vocab = logits.shape[1]
    block = min(4096, max(16, power_of_two(vocab)))
    _ranks_kernel[(len(logits),)](logits, chosen, out, vocab, BLOCK=block, num_warps=16 if block == 4096 else 4)
