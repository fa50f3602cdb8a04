"""Samples tokens from logits on the GPU (Triton), without a sort. Reference implementations: reference.{greedy, sample, hash32,
penalise}.

The exponential race of reference.sample is run over all tokens that top_k and min_p leave. Its winner is the answer if it lies
within top_p, which one pass over the row tells. If it does not, no token that is as light does either, and the race is repeated
over the heavier ones. After any number of rounds (nearly always one) the winner is the token that would win the race over top_p's
set alone.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ONE_BITS = tl.constexpr(0x3F800000)  # the bits of 1.0; weights are between 0 and 1, so their bits sort as they do
SEEN = tl.constexpr(1 << 30)  # bit of a token's count: the token occurs in the prompt or the output


@triton.jit
def hash32(index, key0, key1):
    """Returns 32 well mixed bits of (index, key0, key1), all uint32."""
    h = (index * 0x9E3779B1).to(tl.uint32) ^ key0
    h = ((h ^ (h >> 16)) * 0x85EBCA6B).to(tl.uint32)
    h = ((h ^ (h >> 13)) * 0xC2B2AE35).to(tl.uint32)
    h = ((h ^ (h >> 16)) + key1).to(tl.uint32)
    h = ((h ^ (h >> 15)) * 0x2C1B3C6D).to(tl.uint32)
    h = ((h ^ (h >> 12)) * 0x297A2D39).to(tl.uint32)
    return h ^ (h >> 15)


@triton.jit
def exponential(bits):
    """Returns -log(1 - (bits + 1/2) / 2**32), never 0: a unit exponential random number from uniform bits (uint32). Small numbers
    decide races, so they keep their relative precision: a series is used below 1/64."""
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = u * (1.0 + u * (0.5 + u * (0.33333334 + u * 0.25)))
    return tl.where(u < 0.015625, series, -tl.log(tl.maximum(1.0 - u, 2.9802322e-8)))


@triton.jit
def _weights(logits, start, V, top, factor, BLOCK: tl.constexpr):
    """Returns the weights of BLOCK tokens from `start` on (0 beyond the vocabulary V), and the tokens' indices."""
    at = start + tl.arange(0, BLOCK)
    logit = tl.load(logits + at, mask=at < V, other=float("-inf")).to(tl.float32)
    return tl.exp((logit - top) * factor), at


@triton.jit
def _mass_above(logits, V, top, factor, cutoff, weight, BLOCK: tl.constexpr):
    """Returns the sum of the weights that are at least `cutoff` and more than `weight`."""
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        own, _ = _weights(logits, start, V, top, factor, BLOCK)
        mass += tl.where((own >= cutoff) & (own > weight), own, 0.0)
    return tl.sum(mass, axis=0)


@triton.jit
def _top_k_cutoff(logits, V, top, factor, k, BLOCK: tl.constexpr):
    """Returns the k-th largest weight; tokens of equal weight are thus kept. Each pass over the row finds three of its bits."""
    low = tl.zeros([BLOCK], tl.int32)
    unit = 1 << 27
    for _ in range(0, 10):
        count1 = tl.zeros([BLOCK], tl.int32)
        count2, count3, count4, count5, count6, count7 = count1, count1, count1, count1, count1, count1
        for start in range(0, V, BLOCK):
            own, at = _weights(logits, start, V, top, factor, BLOCK)
            above = tl.where(at < V, own.to(tl.int32, bitcast=True), -1) - low
            count1 += (above >= unit).to(tl.int32)
            count2 += (above >= 2 * unit).to(tl.int32)
            count3 += (above >= 3 * unit).to(tl.int32)
            count4 += (above >= 4 * unit).to(tl.int32)
            count5 += (above >= 5 * unit).to(tl.int32)
            count6 += (above >= 6 * unit).to(tl.int32)
            count7 += (above >= 7 * unit).to(tl.int32)
        digit = (tl.sum(count1, axis=0) >= k).to(tl.int32) + (tl.sum(count2, axis=0) >= k).to(tl.int32)
        digit += (tl.sum(count3, axis=0) >= k).to(tl.int32) + (tl.sum(count4, axis=0) >= k).to(tl.int32)
        digit += (tl.sum(count5, axis=0) >= k).to(tl.int32) + (tl.sum(count6, axis=0) >= k).to(tl.int32)
        digit += (tl.sum(count7, axis=0) >= k).to(tl.int32)
        low += digit * unit
        unit = unit >> 3
    return tl.max(low, axis=0).to(tl.float32, bitcast=True)


# V is specialised, here and for log-probabilities: a multiple of 16 tells that every row is aligned, and these kernels pass over
# rows many times.
@triton.jit
def _sample_kernel(
    logits,  # [N, V]
    temperature,  # [N] float32; 0 and below: the largest logit wins
    top_p,  # [N] float32
    top_k,  # [N] int32
    min_p,  # [N] float32
    key0,  # [N] int64 below 2**32
    key1,
    ids,  # [N] int32
    bad,  # [N] int8
    V,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    largest_at = tl.zeros([BLOCK], tl.int32)
    odd = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        logit = tl.load(logits + at, mask=at < V, other=float("-inf")).to(tl.float32)
        odd |= ((at < V) & ((logit != logit) | (tl.abs(logit) == float("inf")))).to(tl.int32)
        better = logit > largest
        largest = tl.where(better, logit, largest)
        largest_at = tl.where(better, at, largest_at)
    is_bad = tl.max(odd, axis=0)
    top = tl.max(largest, axis=0)
    winner = tl.min(tl.where(largest == top, largest_at, 0x7FFFFFFF), axis=0)
    warmth = tl.load(temperature + row)
    if (warmth > 0.0) & (is_bad == 0):
        factor = 1.0 / warmth
        k, p = tl.load(top_k + row), tl.load(top_p + row)
        cutoff = tl.minimum(tl.load(min_p + row), 1.0)
        if (k > 0) & (k < V):
            cutoff = tl.maximum(cutoff, _top_k_cutoff(logits, V, top, factor, k, BLOCK))
        target = p
        if p < 1.0:
            target *= _mass_above(logits, V, top, factor, cutoff, -1.0, BLOCK)
        first, second = tl.load(key0 + row).to(tl.uint32), tl.load(key1 + row).to(tl.uint32)
        floor = -1.0  # tokens of this weight or less are excluded
        running = 1
        while running > 0:
            least = tl.full([BLOCK], float("inf"), tl.float32)
            least_at = tl.zeros([BLOCK], tl.int32)
            least_weight = tl.zeros([BLOCK], tl.float32)
            for start in range(0, V, BLOCK):
                own, at = _weights(logits, start, V, top, factor, BLOCK)
                time = exponential(hash32(at.to(tl.uint32), first, second)) / own
                faster = (own >= cutoff) & (own > floor) & (time < least)
                least = tl.where(faster, time, least)
                least_at = tl.where(faster, at, least_at)
                least_weight = tl.where(faster, own, least_weight)
            best = tl.min(least, axis=0)
            winner = tl.min(tl.where(least == best, least_at, 0x7FFFFFFF), axis=0)
            floor = tl.max(tl.where((least == best) & (least_at == winner), least_weight, 0.0), axis=0)
            running = 0
            if (p < 1.0) & (floor < 1.0):  # noqa: SIM102  (`&` would not spare the pass)
                if _mass_above(logits, V, top, factor, cutoff, floor, BLOCK) >= target:
                    running = 1
    tl.store(ids + row, winner)
    tl.store(bad + row, is_bad.to(tl.int8))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    min_p: Tensor,
    key0: Tensor,
    key1: Tensor,
    ids: Tensor,
    bad: Tensor,
) -> None:
    """Samples a token for each row, see reference.sample. Writes ids [N] int32 and bad [N] int8. Rows of temperature 0 take their
    largest logit."""
    rows, vocab = logits.shape
    block = min(4096, max(16, triton.next_power_of_2(vocab)))
    _sample_kernel[(rows,)](
        logits, temperature, top_p, top_k, min_p, key0, key1, ids, bad, vocab, BLOCK=block, num_warps=16 if block == 4096 else 4
    )


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
        weight, _ = _weights(logits, start, V, highest, 1.0, BLOCK)
        mass += weight
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
