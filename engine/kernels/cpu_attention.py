"""Paged attention on the CPU (Numba): any set of query tokens against their sequences' KV blocks, in one call.

Shapes: T tokens of the step, N query tokens served here, R rows, B blocks a row, H query heads, G KV heads, D head size.
KV is the arena seen flat; block b starts at element b * layers * 2 * G * block_tokens * D and holds, for each layer,
keys then values as [G, block_tokens, D]. Twin: reference.paged_attention.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, float64, int32, int64, njit, prange, types, void

from engine.kernels.cpu_bits import FASTMATH, bits_of_float, exp, float_of_bits, named, narrow, prefetch, widen


def _paged_attention(
    qkv: Any,  # [T, (H + 2 G) * D]
    kv: Any,  # [elements]
    layers: int,
    layer: int,
    heads: int,
    kv_heads: int,
    block_tokens: int,
    head_dim: int,
    block_table: Any,  # [R, B] int32
    tokens: Any,  # [N] int32: index into T
    rows: Any,  # [N] int32: index into R
    contexts: Any,  # [N] int32: positions attended to, the token's own included
    window: int,  # of these, the last `window` only; 0: all
    scale: float,
    softcap: float,  # scores become softcap * tanh(score / softcap); 0: as they are
    out: Any,  # [T, H * D]; only the N tokens' rows are written
) -> None:
    group = heads // kv_heads
    plane = block_tokens * head_dim
    block_stride = layers * 2 * kv_heads * plane
    line = 64 // kv.itemsize  # elements of a cache line
    # items of one KV head follow each other so that threads split tokens evenly whatever the number of heads
    for item in prange(tokens.shape[0] * kv_heads):
        n = item // kv_heads
        kv_head = item % kv_heads
        token, row, context = tokens[n], rows[n], contexts[n]
        # weights[g, t - first] belongs to position t; blocks before first_block are not read
        first = max(0, context - window) if window > 0 else 0
        visible = context - first
        first_block = first // block_tokens * block_tokens
        weights = np.empty((group, visible), np.float32)
        query = np.empty((group, head_dim), np.float32)
        sums = np.zeros((group, head_dim), np.float32)
        for g in range(group):
            for d in range(head_dim):
                query[g, d] = widen(qkv[token, (kv_head * group + g) * head_dim + d]) * float32(scale)
        keys_at = (layer * 2 * kv_heads + kv_head) * plane
        values_at = keys_at + kv_heads * plane
        # Blocks lie far apart, so the processor can't guess what is read next: it is told, a token's keys at a time.
        values_begin = np.int64(block_table[row, first_block // block_tokens]) * block_stride + values_at
        for start in range(first_block, context, block_tokens):
            at = np.int64(block_table[row, start // block_tokens]) * block_stride + keys_at
            next_at = values_begin
            if start + block_tokens < context:
                next_at = np.int64(block_table[row, start // block_tokens + 1]) * block_stride + keys_at
            for t in range(max(0, first - start), min(block_tokens, context - start)):
                for d in range(t * head_dim, (t + 1) * head_dim, line):
                    prefetch(kv, next_at + d)
                key = kv[at + t * head_dim : at + (t + 1) * head_dim]
                for g in range(group):
                    dot = float32(0.0)
                    for d in range(head_dim):
                        dot += query[g, d] * widen(key[d])
                    weights[g, start + t - first] = dot
        if softcap > 0.0:
            cap, twice = float32(softcap), float32(2.0 / softcap)
            for g in range(group):
                for t in range(visible):
                    # tanh(x) = 1 - 2 / (e**2x + 1)
                    weights[g, t] = cap - (cap + cap) / (exp(weights[g, t] * twice) + float32(1.0))
        for g in range(group):
            ordered = int32(-0x80000000)  # floats as integers of the same order: their maximum vectorises
            for t in range(visible):
                bits = bits_of_float(weights[g, t])
                ordered = max(ordered, bits ^ ((bits >> int32(31)) & int32(0x7FFFFFFF)))
            top = float_of_bits(ordered ^ ((ordered >> int32(31)) & int32(0x7FFFFFFF)))
            total = float32(0.0)
            for t in range(visible):
                weight = exp(weights[g, t] - top)
                weights[g, t] = weight
                total += weight
            share = float32(1.0) / total
            for t in range(visible):
                weights[g, t] *= share
        for start in range(first_block, context, block_tokens):
            at = np.int64(block_table[row, start // block_tokens]) * block_stride + values_at
            next_at = values_begin - values_at + keys_at + plane  # the next head's first keys
            if start + block_tokens < context:
                next_at = np.int64(block_table[row, start // block_tokens + 1]) * block_stride + values_at
            for t in range(max(0, first - start), min(block_tokens, context - start)):
                for d in range(t * head_dim, (t + 1) * head_dim, line):
                    prefetch(kv, next_at + d)
                value = kv[at + t * head_dim : at + (t + 1) * head_dim]
                for g in range(group):
                    weight = weights[g, start + t - first]
                    for d in range(head_dim):
                        sums[g, d] += weight * widen(value[d])
        for g in range(group):
            for d in range(head_dim):
                column = (kv_head * group + g) * head_dim + d
                out[token, column] = narrow(sums[g, d], out[token, column])


def paged_attention_signature(element: types.Type) -> Any:
    ints, table = int32[::1], int32[:, ::1]
    sizes = (int64,) * 6
    return void(element[:, ::1], element[::1], *sizes, table, ints, ints, ints, int64, float64, float64, element[:, ::1])


_OPTIONS: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy", "cache": True, "nogil": True}

paged_attention_serial = njit(**_OPTIONS)(_paged_attention)
paged_attention_parallel = njit(**_OPTIONS, parallel=True)(named("_paged_attention_parallel", _paged_attention))
