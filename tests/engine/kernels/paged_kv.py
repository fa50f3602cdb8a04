"""Paged KV for the cases of the kernels that read and write it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.memory.arena import kv_views
from engine.ops import reference
from loader.shapes import kv_layout
from loader.shapes.kv_dtypes import KV_FP8, kv_dtype_named
from tests.engine.kernels.draw import Draw

HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_TOKENS = (8, 16, 32)
GROUPS = (1, 2, 3, 4, 5, 7, 8, 17)  # query heads of a KV head


@dataclass(slots=True)
class Paged:
    """KV of a few rows. Their blocks are scattered over an arena that holds NaN everywhere else (for fp8, scales that are not
    finite)."""

    arena: Tensor
    view: Callable[[Tensor], tuple[Tensor, Tensor | None]]
    block_table: Tensor  # by row
    shuffled_table: Tensor  # the same, in another order
    table_rows: Tensor  # each row's index in shuffled_table
    contexts: list[int]
    heads: int
    layer: int

    @property
    def kv(self) -> Tensor:
        return self.view(self.arena)[0]

    @property
    def scales(self) -> Tensor | None:
        return self.view(self.arena)[1]

    @property
    def kv_heads(self) -> int:
        return self.kv.shape[3]

    @property
    def head_dim(self) -> int:
        return self.kv.shape[5]


def paged(
    draw: Draw,
    contexts: list[int],
    windows: list[int],
    fp8: bool,
    max_heads: int = 17,
    token_dims: tuple[int, int, int] | None = None,
) -> Paged:
    """Returns random KV for rows with these contexts. windows: positions at the end of each row that are read; blocks before them
    have index -1. max_heads: limits the query heads, because each is computed by itself and takes time. token_dims:
    kv_layout.kv_token_dims, else drawn."""
    head_dim, block_tokens, kv_heads = draw.one_of(*HEAD_DIMS), draw.one_of(*BLOCK_TOKENS), draw.one_of(1, 1, 2, 3)
    num, kv_heads, head_dim = token_dims or (2, kv_heads, head_dim)
    layers = draw.one_of(1, 2)
    layer = draw.between(0, layers - 1)
    heads = kv_heads * draw.one_of(*(group for group in GROUPS if kv_heads * group <= max_heads))
    num_blocks = sum(-(-c // block_tokens) for c in contexts) + 3
    kv_dtype = KV_FP8 if fp8 else str(draw.dtype).removeprefix("torch.")
    block_bytes = layers * num * kv_heads * block_tokens * kv_dtype_named(kv_dtype).head_bytes(head_dim)
    group = kv_layout.KVGroupSpec("full", block_tokens, block_bytes, tuple(range(layers)))
    view = partial(kv_views, group=group, token_dims=(num, kv_heads, head_dim), kv_dtype=kv_dtype)
    arena = torch.full((num_blocks * block_bytes,), 0xFF, dtype=torch.uint8)
    kv, scales = view(arena)
    table = torch.full((len(contexts), max(1, max(-(-c // block_tokens) for c in contexts))), -1, dtype=torch.int32)
    places = torch.randperm(len(contexts), generator=draw.generator)
    free = torch.randperm(num_blocks, generator=draw.generator).tolist()
    for row, (context, window) in enumerate(zip(contexts, windows, strict=True)):
        for position in range(max(0, context - window), context):
            at = position // block_tokens
            if table[row, at] < 0:
                table[row, at] = free.pop()
            place = (table[row, at], slice(None), slice(None), slice(None), position % block_tokens)
            numbers = draw.normal(layers, num, kv_heads, head_dim)
            if scales is None:
                kv[place] = numbers
            else:  # heads of very different sizes
                sizes = torch.exp2(torch.randint(-9, 1, (layers, num, kv_heads, 1), generator=draw.generator))
                kv[place], scales[place] = reference.quantize_fp8(numbers * sizes)
    return Paged(arena, view, table, table[places.argsort()], places.int(), contexts, heads, layer)
