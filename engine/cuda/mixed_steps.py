"""Pads steps with prompt chunks to a few sizes, so that each size can be one CUDA graph. Input columns (arrays) on the device
describe the content of such a step: the row of each token, the contexts of decode rows, the tiles into which queries are divided
for attention, and the tokens to sample from. All other tokens, rows and tiles of the size are padding.

Shapes: T tokens, R rows, I tiles of queries, S slots. The columns of rows have one more row, with index R, which belongs to no
sequence; padding tokens and tiles belong to it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.cuda.columns import SETTINGS, Columns, extend_step, padding_columns, sampling_columns
from engine.sampling.sampler import SamplingRows
from scheduler.batch.plan import BatchPlan, SequenceTable

# A step reads all weights, which takes a GPU as long as computing some 300 tokens with them. Below that padding costs it little.
# Beyond 512 tokens the device is busy for longer than the host needs to launch the step, and its graph would gain nothing.
TOKENS = (16, 32, 64, 128, 256, 512)
# Padding rows cost logits that nobody reads: 256 rows of 128,000 take 0.1 ms on an H100.
ROWS = (16, 64, 256)
# At least so many rows of a step may compute several tokens, and more if their tiles are full. There is one tile for each and one
# for each tile's length of tokens; so few padding tiles end in the time of one.
PROMPTS = 8


class MixedSize(NamedTuple):
    """A size of padded steps: its number of tokens T, of rows R and of tiles I."""

    num_tokens: int
    num_rows: int
    num_tiles: int

    def holds(self, num_tokens: int, num_rows: int, num_tiles: int) -> bool:
        return num_tokens <= self.num_tokens and num_rows <= self.num_rows and num_tiles <= self.num_tiles


def mixed_sizes(max_tokens: int, max_rows: int, tile_tokens: int) -> list[MixedSize]:
    """Returns the sizes, the smallest first and at most 12, for steps of up to max_tokens tokens of a model with max_rows slots.
    tile_tokens: queries in a tile. R is at most T in each size, because a row has at least one token."""
    sizes = []
    for num_tokens in TOKENS:
        for before, num_rows in zip((0, *ROWS), ROWS, strict=False):
            if num_tokens <= max_tokens and num_rows <= num_tokens and before < max_rows:
                sizes.append(MixedSize(num_tokens, num_rows, PROMPTS + num_tokens // tile_tokens))
    return sizes


def num_tiles(plan: BatchPlan, tile_tokens: int) -> int:
    """Returns the number of tiles for the queries of a step's rows with several new tokens. tile_tokens: queries in a tile."""
    return sum(-(-num_new // tile_tokens) for num_new in plan.num_new[plan.num_new > 1].tolist())


def mixed_columns(plan: BatchPlan, table: SequenceTable, rows: SamplingRows | None, tile_tokens: int) -> Columns:
    """Returns the input columns of a step with prompt chunks, without padding: they replace the beginnings of the columns of
    mixed_padding. rows: the settings of the rows that sample; None: no row samples. tile_tokens: queries in a tile."""
    step = extend_step(plan, table, tile_tokens, None)
    columns = step.columns | {"decode_contexts": step.columns["contexts"][: step.num_decode]}
    if rows is not None:
        columns |= {"sampled_slots": plan.slots[plan.samples]} | sampling_columns(rows)
    return columns


def mixed_padding(size: MixedSize, num_slots: int) -> Columns:
    """Returns the input columns of a step of this size that consists of padding only. Such a step stores no KV, and its sampled
    tokens go to slot S. num_slots: S."""
    sampling = padding_columns(size.num_rows, num_slots)
    nobody, each = np.int32(size.num_rows), size.num_rows + 1
    columns: Columns = {
        "token_rows": np.full(size.num_tokens, nobody, np.int32),
        "host_ids": np.zeros(size.num_tokens, np.int32),
        "slots": np.full(each, num_slots, np.int32),
        "firsts": np.zeros(each, np.int32),
        "starts": np.zeros(each, np.int32),
        "contexts": np.zeros(each, np.int32),
        "num_new": np.zeros(each, np.int32),
        "decode_contexts": np.zeros(size.num_rows, np.int32),
        "tile_rows": np.full(size.num_tiles, nobody, np.int32),
        "tile_firsts": np.zeros(size.num_tiles, np.int32),
        "wanted": np.zeros(size.num_rows, np.int32),
        "sampled_slots": sampling["slots"],
    }
    return columns | {name: sampling[name] for name in SETTINGS}
