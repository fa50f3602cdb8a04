"""Computes multi-head latent attention (MLA) on the `cpu` device, with torch's matrix multiplications in float32.

There are two forms of the computation. In the absorbed form the key matrix of each head is applied to the head's query, which then
attends to the stored latents, and the head's value matrix is applied to the weighted sum. In the expanded form the keys and values
of a head are computed from all latents of the row. The expanded form takes fewer operations if many queries read the same latents:
171 or more at DeepSeek's sizes (benchmarks/latent_attention.py).

Shapes: T tokens, N of them in rows with few new tokens, H heads, K plain and R rotated dimensions of queries and keys, V dimensions
of values, L size of a latent, C positions of a row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.ops import reference
from engine.ops.ops import Fp8Matrix, Int4Matrix, Int8Matrix, LatentHeads, Matrix, Nvfp4Matrix, PackedMatrix
from loader.formats.int8 import WIDENED_BYTES
from loader.sizes.work_space import ABSORBED_TOKENS, PREFILL_TILE_TOKENS


def attend_short(
    queries: Tensor,
    heads: LatentHeads,
    kv: Tensor,
    layer: int,
    block_table: Any,
    tokens: Any,
    rows: Any,
    contexts: Any,
    scale: float,
    out: Tensor,
    scales: Tensor | None,
) -> None:
    """Computes latent attention in the absorbed form, token by token: query tokens[n] of queries [T, H (K + R)] attends to the
    first contexts[n] positions of row rows[n]. Writes the results to out [T, H V]; queries whose context is 0 or less are skipped.
    heads: the layer's matrices and sizes.
    kv, layer, scales: the group's KV memory, the layer's index in it, and the scales of fp8 KV (None: the KV is not fp8).
    block_table [R, B] int32: the block numbers of each row.
    tokens, rows, contexts [N] int32: numpy arrays.
    scale: factor of the scores."""
    some = np.flatnonzero(contexts > 0)
    to = out.view(len(out), heads.num_heads, -1)
    for first in range(0, len(some), ABSORBED_TOKENS):
        own = some[first : first + ABSORBED_TOKENS]
        places = torch.from_numpy(tokens[own]).long()
        query = queries[places].view(len(own), heads.num_heads, -1).float().mul_(scale)
        wide = query.new_empty(len(own), heads.num_heads, kv.shape[5])
        for part, up in _parts(heads):
            wide[:, part, : heads.rank] = _by_head(query[:, part, : heads.plain_dim], up[:, : heads.plain_dim])
        wide[..., heads.rank :] = query[..., heads.plain_dim :]
        for n, (row, context) in enumerate(zip(rows[own].tolist(), contexts[own].tolist(), strict=True)):
            held = reference.gather_latents(kv, layer, torch.from_numpy(block_table[row]), context, scales).float()
            wide[n, :, : heads.rank] = torch.softmax(wide[n] @ held.t(), dim=-1) @ held[:, : heads.rank]
        for part, up in _parts(heads):
            values = _by_head(wide[:, part, : heads.rank], up[:, heads.plain_dim :].transpose(1, 2))
            to[places, part] = values.to(out.dtype)


def attend_long(
    queries: Tensor,
    heads: LatentHeads,
    kv: Tensor,
    layer: int,
    block_table: Any,
    starts: Any,
    num_new: Any,
    contexts: Any,
    longer_than: int,
    scale: float,
    out: Tensor,
    scales: Tensor | None,
) -> None:
    """Computes latent attention of the new tokens of each row that has more than longer_than new tokens, in whichever form takes
    fewer operations. Writes the results to out [T, H V].
    queries [T, H (K + R)], heads: the queries, and the layer's matrices and sizes.
    kv, layer, scales: the group's KV memory, the layer's index in it, and the scales of fp8 KV (None: the KV is not fp8).
    block_table [R, B]: the block numbers of each row.
    starts, num_new, contexts [R]: each row's first token in the step, its number of tokens in the step, and its number of positions
    after the step.
    scale: factor of the scores."""
    for row in np.flatnonzero(num_new > longer_than):
        first, num = int(starts[row]), int(num_new[row])
        own, blocks = slice(first, first + num), torch.from_numpy(block_table[row])
        held = reference.gather_latents(kv, layer, blocks, int(contexts[row]), scales).float()
        attend_row(queries[own], heads, held, scale, out[own], absorbs(heads, num))


def attend_row(queries: Tensor, heads: LatentHeads, held: Tensor, scale: float, out: Tensor, absorbed: bool) -> None:
    """Computes causal latent attention for the last n positions of a row, one head at a time, and writes the results to out [n, H
    V]. queries [n, H (K + R)]: the queries at these positions. held [C, L + R] float32: the latents of all the row's positions.
    absorbed: whether to compute in the absorbed form, else in the expanded one."""
    query, to = queries.view(len(queries), heads.num_heads, -1), out.view(len(out), heads.num_heads, -1)
    rank, plain_dim = heads.rank, heads.plain_dim
    for part, up in _parts(heads):
        for head, matrix in zip(range(heads.num_heads)[part], up, strict=True):
            own = query[:, head].float().mul_(scale)
            if absorbed:
                sums = own.new_empty(len(own), rank)
                _attend_head(
                    torch.cat((own[:, :plain_dim] @ matrix[:plain_dim], own[:, plain_dim:]), dim=-1), held, held[:, :rank], sums
                )
                to[:, head] = sums @ matrix[plain_dim:].t()
            else:
                made = held[:, :rank] @ matrix.t()
                key = torch.cat((made[:, :plain_dim], held[:, rank:]), dim=-1)
                _attend_head(own, key, made[:, plain_dim:], to[:, head])


def absorbs(heads: LatentHeads, num_queries: int) -> bool:
    """Returns whether the attention of num_queries queries to the same row takes fewer operations in the absorbed form than in the
    expanded one. In the absorbed form a query reads 2 L + R numbers of each position, in the expanded form only K + R + V, but keys
    and values must first be computed from the latents."""
    made = heads.plain_dim + heads.value_dim
    return num_queries * (2 * heads.rank - made) < heads.rank * made


def _attend_head(query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
    """Computes causal attention of one head, for the queries [n, K + R] of the last n of C positions, with key [C, K + R] and value
    [C, V]. Writes the results to out [n, V]."""
    before = len(key) - len(query)
    for first in range(0, len(query), PREFILL_TILE_TOKENS):
        tile = query[first : first + PREFILL_TILE_TOKENS]
        seen = before + first + len(tile)
        scores = tile @ key[:seen].t()
        later = torch.ones(len(tile), len(tile), dtype=torch.bool).triu_(1)
        scores[:, seen - len(tile) :].masked_fill_(later, -torch.inf)
        out[first : first + len(tile)] = torch.softmax(scores, dim=-1) @ value[:seen]


def _by_head(x: Tensor, matrices: Tensor) -> Tensor:
    """Multiplies x [N, h, A] with matrices [h, A, B], one for each of h heads, and returns the results [N, h, B]."""
    return torch.bmm(x.transpose(0, 1), matrices).transpose(0, 1)


def _parts(heads: LatentHeads) -> Iterator[tuple[slice, Tensor]]:
    """Yields slices of the heads, in order, each with its heads' matrices [heads, K + V, L] in float32. The matrices of a slice
    take at most WIDENED_BYTES, unless a single head needs more."""
    height = heads.plain_dim + heads.value_dim
    at_once = max(1, WIDENED_BYTES // (height * heads.rank * 4))
    for first in range(0, heads.num_heads, at_once):
        part = slice(first, min(first + at_once, heads.num_heads))
        yield part, _widened(heads.up, slice(part.start * height, part.stop * height)).view(-1, height, heads.rank)


def _widened(matrix: Matrix, some: slice) -> Tensor:
    """Returns the rows `some` of a matrix [N, K], whatever its weight format is, in float32."""
    if isinstance(matrix, Fp8Matrix | Int4Matrix | Nvfp4Matrix):
        wide = torch.empty(some.stop - some.start, matrix.shape[1])
        own = matrix[some]
        if isinstance(own, Fp8Matrix):
            reference.fp8_rows(own.values, own.scales, own.group_inputs, wide)
        elif isinstance(own, Nvfp4Matrix):
            reference.nvfp4_rows(own.packed, own.scales, own.factors, wide)
        else:
            reference.int4_rows(own.packed, own.scales, own.zeros, own.group_inputs, wide)
        return wide
    if isinstance(matrix, Int8Matrix):
        return matrix.values[some].float() * matrix.scales[some, None]
    if isinstance(matrix, PackedMatrix):
        wide = torch.empty(some.stop - some.start, matrix.num_inputs)
        reference.packed_rows(matrix, some, wide)
        return wide
    return matrix[some].float()
