"""Computes the attention of encoders: tokens attend to all tokens of their own text, or to those within a window. There is no
causal mask and no KV cache. Shapes: T tokens of all texts, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from loader.sizes.work_space import ENCODER_TILE_TOKENS


def attend(qkv: Tensor, lengths: Sequence[int], window: int = 0) -> Tensor:
    """Returns the attention output [T, heads * D]. qkv [T, 3, heads, D]: queries, keys and values. lengths: number of tokens of
    each text; texts lie end to end. window: the number of positions to which a token attends, with its own in their middle; 0: the
    whole text."""
    mixed = qkv.new_empty(qkv.shape[0], qkv.shape[2] * qkv.shape[3])
    start = 0
    for length in lengths:
        query, key, value = qkv[start : start + length].permute(1, 2, 0, 3)[:, None]
        for first in range(0, length, ENCODER_TILE_TOKENS):
            last = min(first + ENCODER_TILE_TOKENS, length)
            low, high, near = _seen(first, last, length, window)
            row = functional.scaled_dot_product_attention(
                query[:, :, first:last], key[:, :, low:high], value[:, :, low:high], attn_mask=near
            )[0]  # [heads, last - first, D]
            mixed[start + first : start + last] = row.transpose(0, 1).flatten(1)
        start += length
    return mixed


def _seen(first: int, last: int, length: int, window: int) -> tuple[int, int, Tensor | None]:
    """Returns the positions to which some queries of a text attend, as (low, high, mask): positions from `low` to `high` - 1, and
    mask [last - first, high - low] bool, which is True where a query attends to a position; None: all attend to all. first, last:
    the queries are those at positions `first` to `last` - 1. length: number of tokens of the text. window: the number of positions
    to which a token attends, with its own in their middle; 0: the whole text."""
    reach = window // 2
    if not window or length <= reach + 1:
        return 0, length, None
    low, high = max(0, first - reach), min(length, last + reach)
    apart = torch.arange(first, last)[:, None] - torch.arange(low, high)
    return low, high, apart.abs() <= reach
