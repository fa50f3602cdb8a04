"""Work on rows of logits beside sampling on the GPU (Triton): penalties, and the log-probabilities of tokens. Reference
implementations: reference.{penalise, top_logprobs}.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SEEN = tl.constexpr(1 << 30)  # bit of a token's count: the token occurs in the prompt or the output


@triton.jit(do_not_specialize=["tokens_stride", "V"])
def _count_kernel(
    tokens,  # [N, L] int32
    lengths,  # [N] int32
    num_prompt,  # [N] int32
    counts,  # [N, V] int32
    tokens_stride,
    V,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.load(lengths + row)
    token = tl.load(tokens + row * tokens_stride + at, mask=inside, other=0)
    tl.atomic_or(counts + row * V + token, SEEN, mask=inside)
    tl.atomic_add(counts + row * V + token, 1, mask=inside & (at >= tl.load(num_prompt + row)))


# A row of a vocabulary of any size begins at any float32, and one pass over one row takes no time that matters.
@triton.jit(do_not_specialize=["V"], do_not_specialize_on_alignment=["logits"])
def _penalise_kernel(
    logits,  # [N, V] float32
    counts,  # [N, V] int32
    presence,  # [N] float32
    frequency,
    repetition,
    V,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < V
    count = tl.load(counts + row * V + at, mask=inside, other=0)
    old = tl.load(logits + row * V + at, mask=inside, other=0.0)
    output = (count & (SEEN - 1)).to(tl.float32)
    factor = tl.load(repetition + row)
    new = tl.where(old > 0.0, old / factor, old * factor) - tl.load(frequency + row) * output
    new -= tl.where(output > 0.0, tl.load(presence + row), 0.0)
    new = tl.minimum(tl.maximum(new, -1e30), 1e30)
    finite = (old == old) & (tl.abs(old) != float("inf"))
    tl.store(logits + row * V + at, tl.where(finite & (count > 0), new, old), mask=inside)


def penalise(
    logits: Tensor, tokens: Tensor, lengths: Tensor, num_prompt: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> None:
    """Applies penalties to each row of logits [N, V] float32 in place, see reference.penalise. tokens: [N, L] int32, prompts, then
    outputs, of which only the first lengths [N] are used."""
    rows, vocab = logits.shape
    counts = torch.zeros(rows, vocab, dtype=torch.int32, device=logits.device)
    block = 1024
    _count_kernel[(rows, triton.cdiv(tokens.shape[1], block))](
        tokens, lengths, num_prompt, counts, tokens.stride(0), vocab, BLOCK=block, num_warps=4
    )
    _penalise_kernel[(rows, triton.cdiv(vocab, block))](
        logits, counts, presence, frequency, repetition, vocab, BLOCK=block, num_warps=4
    )


# V is specialised: a multiple of 16 tells that every row is aligned, and the kernel passes over rows many times.
@triton.jit(do_not_specialize=["K"])
def _logprobs_kernel(
    logits,  # [N, V]
    rows,  # [M] int32
    chosen,  # [M] int32
    picked,  # [M] float32
    top_ids,  # [M, K] int32
    top,  # [M, K] float32
    V,
    K,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += tl.load(rows + row).to(tl.int64) * V
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
    tl.store(picked + row, tl.load(logits + tl.load(chosen + row)).to(tl.float32) - base)
    last, last_at = float("inf"), -1
    for k in range(0, K):  # finds the next after the last one found: a lower logit, or an equal one at a higher index
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


def top_logprobs(logits: Tensor, rows: Tensor, chosen: Tensor, picked: Tensor, top_ids: Tensor, top: Tensor) -> None:
    """Computes the log-probabilities of the chosen and of the most likely tokens, see ops.top_logprobs. The rows' logits must be
    finite.

    rows, chosen: [M]. Writes picked [M], and top_ids and top [M, K]."""
    vocab = logits.shape[1]
    block = min(4096, max(16, triton.next_power_of_2(vocab)))
    _logprobs_kernel[(len(rows),)](
        logits, rows, chosen, picked, top_ids, top, vocab, top.shape[1], BLOCK=block, num_warps=16 if block == 4096 else 4
    )
