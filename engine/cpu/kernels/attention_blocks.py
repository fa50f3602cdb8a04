"""Computes attention to one block after another on the CPU (Numba): the functions that the kernels for decode steps (attention.py)
and for prompts (prefill.py) have in common.

Shapes: H query heads, of one token or of several, each of which is a row of the arrays; D head size. Arrays hold elements: float32,
or bfloat16 as uint16 bits. kv is the arena, flat; a block's keys, or values, of one KV head are [block_tokens, D]. The state of an
attention is tops [H] (the largest scores so far), totals [H] (the sums of the weights e**(score - top)) and sums [H, width] (the
values times the weights), all float32."""

from __future__ import annotations

from typing import Any

from numba import float32, int32, njit

from engine.cpu.kernels.attention_tiles import score_tile, value_tile
from engine.cpu.kernels.bits import FASTMATH, bits_of_float, exp, float_of_bits, narrow, ordered
from engine.cpu.kernels.lanes import first_lanes, load, store, total_of
from engine.cpu.kernels.vectors import LANES

CHUNK_TOKENS = 128  # positions that all heads process before any goes on to the next ones
_one_score, _two_scores, _three_scores, _four_scores = (score_tile(num_rows, 4) for num_rows in (1, 2, 3, 4))
_one_value, _two_values, _four_values = (value_tile(num_rows, True) for num_rows in (1, 2, 4))
_one_rest, _two_rests, _four_rests = (value_tile(num_rows, False) for num_rows in (1, 2, 4))
OPTIONS: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy", "cache": True, "nogil": True}
HELPER: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy"}


@njit(**HELPER)
def first_seen(context: int, reach: int) -> int:
    """Returns the first position to which the last of `context` positions attends. reach R > 0: it attends to the last R positions,
    its own included; R < 0: to its own chunk, if positions are cut into chunks of -R; 0: to all."""
    if reach > 0:
        return max(0, context - reach)
    return max(0, context - 1) // -reach * -reach if reach < 0 else 0


@njit(**HELPER)
def score_block(
    qkv: Any, query_at: int, kv: Any, at: int, ahead: int, tokens: int, head_dim: int, scale: float, scores: Any, scores_at: int
) -> None:
    """Writes the scores of some query heads with a block's first `tokens` positions to scores [heads, chunk], from column scores_at
    on. A score is a dot product times scale. `tokens` is rounded up to a multiple of four, so up to three further scores are
    written, which have no meaning.

    query_at: the index in qkv of the first head; the others follow end to end. at: the index in kv where the block's keys begin.
    The keys that lie `ahead` elements after these are prefetched meanwhile."""
    group, stride = scores.shape
    for t in range(0, tokens, 4):
        keys_at = at + t * head_dim
        to = scores_at + t
        g = 0
        while group - g >= 4:
            _four_scores(qkv, query_at + g * head_dim, kv, keys_at, ahead, head_dim, scale, scores, g * stride + to, stride)
            g += 4
        if group - g == 3:
            _three_scores(qkv, query_at + g * head_dim, kv, keys_at, ahead, head_dim, scale, scores, g * stride + to, stride)
        elif group - g == 2:
            _two_scores(qkv, query_at + g * head_dim, kv, keys_at, ahead, head_dim, scale, scores, g * stride + to, stride)
        elif group - g == 1:
            _one_score(qkv, query_at + g * head_dim, kv, keys_at, ahead, head_dim, scale, scores, g * stride + to, stride)


@njit(**HELPER)
def add_block(
    weights: Any, begin: int, end: int, from_at: int, kv: Any, at: int, ahead: int, head_dim: int, sums: Any, head: int
) -> None:
    """Adds weights[g, from_at + t - begin] * (values of the block's position t) to sums[head + g], for all rows g of weights and
    for positions t from begin to below end.

    at: the index in kv where the block's values begin. The values that lie `ahead` elements after these are prefetched meanwhile.
    For bfloat16, in each 32 sums even dimensions come first, then odd ones (see write_heads)."""
    group, stride = weights.shape
    width = sums.shape[1]
    num = end - begin
    at += begin * head_dim
    for d in range(0, head_dim, 64):
        to = head * width + d
        if head_dim - d >= 64:
            g = 0
            while group - g >= 4:
                _four_values(
                    weights, g * stride + from_at, stride, kv, at + d, head_dim, ahead, num, 64, sums, g * width + to, width
                )
                g += 4
            if group - g >= 2:
                _two_values(
                    weights, g * stride + from_at, stride, kv, at + d, head_dim, ahead, num, 64, sums, g * width + to, width
                )
                g += 2
            if group - g == 1:
                _one_value(weights, g * stride + from_at, stride, kv, at + d, head_dim, ahead, num, 64, sums, g * width + to, width)
        else:
            for e in range(d, head_dim, 32):
                to = head * width + e
                rest = min(32, head_dim - e)
                g = 0
                while group - g >= 4:
                    _four_rests(
                        weights, g * stride + from_at, stride, kv, at + e, head_dim, ahead, num, rest, sums, g * width + to, width
                    )
                    g += 4
                if group - g >= 2:
                    _two_rests(
                        weights, g * stride + from_at, stride, kv, at + e, head_dim, ahead, num, rest, sums, g * width + to, width
                    )
                    g += 2
                if group - g == 1:
                    _one_rest(
                        weights, g * stride + from_at, stride, kv, at + e, head_dim, ahead, num, rest, sums, g * width + to, width
                    )


@njit(**HELPER)
def soften_row(
    scores: Any, g: int, begin: int, end: int, softcap: float, weights: Any, head: int, tops: Any, totals: Any, sums: Any
) -> None:
    """Turns scores[g] from begin to below end into the weights e**(score - top), writes these to the same places of weights[g],
    rounded to its element type, and adds them to totals[head]. softcap: scores first become softcap * tanh(score / softcap); 0:
    they are unchanged.

    top is the head's largest score so far, tops[head]. If it grows, totals[head] and sums[head] are rescaled."""
    own = scores[g]
    if softcap > 0.0:
        cap, twice = float32(softcap), float32(2.0 / softcap)
        for t in range(begin, end):
            # tanh(x) = 1 - 2 / (e**2x + 1)
            own[t] = cap - (cap + cap) / (exp(own[t] * twice) + float32(1.0))
    top_bits = int32(-0x80000000)  # floats as integers of the same order, whose maximum vectorises
    for t in range(begin, end):
        top_bits = max(top_bits, ordered(bits_of_float(own[t])))
    before = tops[head]
    top = max(before, float_of_bits(ordered(top_bits)))
    # in lanes, since the vectoriser would choose by the arrays' addresses between two loops that round differently
    at, num = g * scores.shape[1] + begin, end - begin
    whole = num - num % LANES
    rest = exp(load(scores, at + whole, num - whole) - top)
    store(weights, at + whole, num - whole, rest)
    lanes = first_lanes(rest, num - whole)
    for i in range(0, whole, LANES):
        some = exp(load(scores, at + i, LANES) - top)
        store(weights, at + i, LANES, some)
        lanes += some
    total = total_of(lanes)
    if top > before and totals[head] > float32(0.0):
        shrunk = exp(before - top)
        totals[head] *= shrunk
        for d in range(sums.shape[1]):
            sums[head, d] *= shrunk
    tops[head] = top
    totals[head] += total


@njit(**HELPER)
def add_sinks(sinks: Any, head: int, tops: Any, totals: Any) -> None:
    """Adds e**(sink - top) to totals [h], for the h query heads from number `head` on, whose tops are tops [h]. sinks: for each of
    all query heads a score that has no value; [0]: there are none."""
    if sinks.shape[0] > 0:
        for h in range(totals.shape[0]):
            totals[h] += exp(sinks[head + h] - tops[h])


@njit(**HELPER)
def write_heads(sums: Any, totals: Any, out: Any, head_dim: int) -> None:
    """Writes sums [H, width] divided by totals [H] to out [H * D], rounded to out's element type. For bfloat16, each 32 sums have
    even dimensions first, then odd ones; they are written in the order of the dimensions."""
    for head in range(totals.shape[0]):
        share = float32(1.0) / totals[head]
        own, at = sums[head], head * head_dim
        if out.itemsize == 4:
            for d in range(head_dim):
                out[at + d] = narrow(own[d] * share, out[0])
        else:
            for piece in range(0, head_dim // 32 * 32, 32):
                for lane in range(16):
                    out[at + piece + 2 * lane] = narrow(own[piece + lane] * share, out[0])
                    out[at + piece + 2 * lane + 1] = narrow(own[piece + 16 + lane] * share, out[0])
            for d in range(head_dim // 32 * 32, head_dim):
                out[at + d] = narrow(own[d // 32 * 32 + (d % 2) * 16 + d % 32 // 2] * share, out[0])
