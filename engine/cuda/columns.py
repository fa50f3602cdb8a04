"""Makes the input columns that the host sends to a GPU for a step: arrays with one value for each row and, in steps with prompts,
also arrays with one value for each token. The device computes the other inputs from them (kernels/triton_inputs.py).

A row is one sequence's part of a step; a sampling row is one after which a token is sampled.

Shapes: R rows, T tokens, N sampling rows, S slots. Slot S belongs to no sequence: padding rows point at it.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.sampling.sampler import SamplingRows
from scheduler.batch.plan import BatchPlan, IntArray, LongArray, SequenceTable

Columns = dict[str, npt.NDArray[Any]]
SETTINGS = ("temperature", "top_p", "top_k", "min_p", "key0", "key1")  # columns with the settings of sampling rows


def sampling_columns(rows: SamplingRows) -> Columns:
    """Returns the settings of the N sampling rows as columns [N] for the sampling kernel, by the names in SETTINGS. The columns
    key0 and key1, keys of the rows' random noise, are 0 if no row needs noise."""
    keys = rows.key0, rows.key1
    if rows.all_greedy:
        keys = (np.zeros(len(rows.temperature), np.uint32),) * 2
    return {
        "temperature": rows.temperature,
        "top_p": rows.top_p,
        "top_k": rows.top_k,
        "min_p": rows.min_p,
        "key0": keys[0],
        "key1": keys[1],
    }


def decode_columns(plan: BatchPlan, table: SequenceTable, rows: SamplingRows | None, num_rows: int) -> Columns:
    """Returns the input columns, each [num_rows], of a step in which every row has one new token and samples. Rows after those of
    the plan are padding. rows: the sampling settings; None: the device samples no row in this step, and all rows get the sampling
    settings of padding."""
    missing = num_rows - len(plan.slots)
    columns: Columns = {
        "slots": plan.slots,
        "firsts": plan.num_computed,
        "contexts": plan.num_computed + np.int32(1),
        "host_ids": _host_ids(plan, table, plan.slots, plan.num_computed),
    }
    if rows is None:
        without = padding_columns(len(plan.slots), len(table.request_id))
        columns |= {name: without[name] for name in SETTINGS}
    else:
        columns |= sampling_columns(rows)
    if missing:
        nothing = padding_columns(missing, len(table.request_id))
        columns = {name: np.concatenate((column, nothing[name])) for name, column in columns.items()}
    columns["numbers"] = np.arange(num_rows, dtype=np.int32)
    return columns


def padding_columns(num_rows: int, num_slots: int) -> Columns:
    """Returns the input columns of a decode step that consists of num_rows padding rows. Such a step stores no KV, and its sampled
    tokens go to slot S. num_slots: S."""
    ints, floats = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.float32)
    columns: Columns = {"slots": ints + np.int32(num_slots), "firsts": ints, "contexts": ints, "host_ids": ints}
    columns |= {"temperature": floats, "top_p": floats + np.float32(1), "top_k": ints, "min_p": floats}
    keys = np.zeros(num_rows, np.uint32)
    return columns | {"key0": keys, "key1": keys, "numbers": np.arange(num_rows, dtype=np.int32)}


@dataclass(slots=True)
class ExtendStep:
    """The inputs of a step that computes prompt tokens.

    columns: the input columns, among them `wanted`: the indices in the step of the tokens whose hidden states are returned.
    num_decode: number of rows with one new token; they come first.
    num_tiles: number of tiles into which the queries of the other rows are divided.
    num_sampling: how many tokens of `wanted`, the first ones, are tokens after which the step samples; the others are those given
    to extend_step as `also`."""

    columns: Columns
    num_decode: int
    num_tiles: int
    num_sampling: int


def extend_step(plan: BatchPlan, table: SequenceTable, tile_tokens: int, also: LongArray | None) -> ExtendStep:
    """Returns the inputs of a step that computes prompt tokens. tile_tokens: queries in a tile (kernels/triton_extend.py). also:
    indices into the step's T tokens of further tokens whose hidden states are wanted; None: no others."""
    num_new = plan.num_new
    starts = num_new.cumsum(dtype=np.int32) - num_new
    token_rows = np.arange(len(num_new), dtype=np.int32).repeat(num_new)
    positions = np.arange(len(token_rows), dtype=np.int32)
    positions += (plan.num_computed - starts).take(token_rows)
    num_decode = int(np.count_nonzero(num_new == 1))
    longer = zip(num_new[num_decode:].tolist(), plan.num_computed[num_decode:].tolist(), strict=True)
    of_rows = enumerate(longer, num_decode)
    tiles = [(row, at, computed + at) for row, (new, computed) in of_rows for at in range(0, new, tile_tokens)]
    tiles.sort(key=itemgetter(2), reverse=True)  # longest context first: short tiles then fill gaps
    wanted = (starts + num_new - 1)[plan.samples]
    columns: Columns = {
        "token_rows": token_rows,
        "host_ids": _host_ids(plan, table, plan.slots.take(token_rows), positions),
        "slots": plan.slots,
        "firsts": plan.num_computed,
        "starts": starts,
        "contexts": plan.num_computed + num_new,
        "num_new": num_new,
        "tile_rows": np.array([tile[0] for tile in tiles], np.int32),
        "tile_firsts": np.array([tile[1] for tile in tiles], np.int32),
        "wanted": (wanted if also is None else np.concatenate((wanted, also))).astype(np.int32),
    }
    return ExtendStep(columns, num_decode, len(tiles), len(wanted))


def _host_ids(plan: BatchPlan, table: SequenceTable, slots: IntArray, positions: IntArray) -> IntArray:
    """Returns the token ids at these positions of the sequences in these slots. An id is -1 if the host does not know the token
    yet, because the step that samples it is still running."""
    if plan.drafted:  # every token was known when the step was planned; drafted tokens are in the table, too
        return table.tokens[slots, positions]
    known = positions < table.num_tokens.take(slots)
    num_known = np.count_nonzero(known)
    if num_known == len(known):
        return table.tokens[slots, positions]
    if not num_known:
        return np.full(len(slots), -1, np.int32)
    last = np.int32(table.tokens.shape[1] - 1)
    return np.where(known, table.tokens[slots, np.minimum(positions, last)], np.int32(-1))
