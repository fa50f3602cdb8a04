"""Launches attention with a given tile (how many queries and positions a kernel's program computes at a time) at the sizes of a
model: on zeros to measure times (launching), and on random numbers to compare results (Comparison). All kernels that are launched
here have been compiled before.

A tile's speed depends on the head size and on the types of numbers. In decode steps a row's context is cut into parts (`pieces`;
split-K), and the time of a tile that combines these parts itself (`joins`) also depends on the number of query heads per KV head.
Windows, softcaps and sinks change the times of all tiles alike, so models that differ only in these share a trial.

Where FlashAttention is installed, prompts are also tried with it (tiles with `flash`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.cuda.batch import QueryTiles
from engine.cuda.kernels import entry, flash_attention, tiles, triton_decode
from engine.cuda.kernels.sizes import ceil_div
from engine.cuda.kernels.tiles import DECODE_KERNEL, EXTEND_KERNEL, HALF, Entry, Place, Tile
from engine.memory.arena import kv_views
from engine.protocol import LoadModel
from loader.shapes.kv_dtypes import KV_FP8, kv_dtype_named
from loader.shapes.kv_layout import KVGroupSpec
from loader.shapes.model_shape import ModelShape

GROUP_ROWS = 16  # rows of queries in a tile of decode attention, which tensor cores take
KV_BYTES = 64 << 20  # of keys and values of a trial, at most
DECODE_ROWS, DECODE_POSITIONS = 16, 2048  # sequences of a trial's decode step, and the most positions of each
PROMPT_TOKENS = 2048
PIECES_PER_CORE = 8
# A comparison of results. A multiprocessor holds 32 programs at most (NVIDIA, "CUDA C++ Programming Guide", technical
# specifications), so that of PROGRAMS_PER_CORE some begin when others have ended.
PROGRAMS_PER_CORE = 40
# Pieces of its rows: none (a row that is padding), one, as many as are joined at once, one more; then LONG_ROWS, over and over. Of
# more than 256 what was joined is joined more than once again.
SHORT_ROWS, LONG_ROWS = (0, 1, 1, 2, 15, 16, 17), (300, 23)
RAGGED = (0, 63, 0, 1, 37)  # positions by which rows are shorter than their pieces, in turn
COMPARED_BLOCKS_BYTES = 8 << 20  # of keys and values, which the rows share
NUM_PADDING = 5  # tokens that belong to no row
LAUNCHES = 32  # of a form that joins pieces, back to back
FP8_SCALE_OF_ONE = 127  # the code of a scale of 1
NUM_DRAWN = 65521  # different numbers, over and over; a prime, so that no two rows or heads are alike
MOST_ROUNDINGS = 4  # of an output's type, by which tiles may differ, in terms of the largest output of a token's head


class Trial(NamedTuple):
    """The sizes of attention at which alternative tiles are compared. kernel: EXTEND_KERNEL (prompts) or DECODE_KERNEL. dtype: name
    of the queries' type. kv_dtype: name of the type of keys and values. tries_flash: whether FlashAttention is among what is
    compared."""

    kernel: str
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    kv_dtype: str
    block_tokens: int
    tries_flash: bool = False

    @property
    def is_fp8(self) -> bool:
        return self.kv_dtype == KV_FP8

    @property
    def item_bytes(self) -> int:
        return int(getattr(torch, self.dtype).itemsize)

    @property
    def group(self) -> int:
        """The number of query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def place(self) -> Place:
        """The key under which the tile of this trial is chosen (MeasuredTile.place in kernels/tiles.py)."""
        group = self.group if self.kernel == DECODE_KERNEL else 0
        return self.kernel, tiles.padded(self.head_dim), self.item_bytes, self.is_fp8, group

    @property
    def entry(self) -> Entry:
        return tiles.entry_of(*self.place[:4])

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """The tiles that are compared: first the table's own, then the alternatives that it names, except those with `joins` where
        the kernel cannot combine split-K parts. With tries_flash, then each of them once more with `flash`."""
        can_join = triton_decode.joins_pieces(self.group, self.head_dim)
        own = (self.entry.tile, *(tile for tile in self.entry.others if can_join or not tile.joins))
        flash = flash_attention.kind(self.head_dim, self.dtype)
        return *own, *(tile._replace(flash=flash) for tile in own if self.tries_flash)

    def __str__(self) -> str:
        what, group = ("prompts", "") if self.kernel == EXTEND_KERNEL else ("decode steps", f" in groups of {self.group}")
        over = " over fp8 KV" if self.is_fp8 else ""
        return f"{what} with heads of {tiles.padded(self.head_dim)}{group} in {self.dtype}{over}"


def trials_of(spec: LoadModel, shape: ModelShape, block_tokens: int, has_flash: bool = False) -> list[Trial]:
    """Returns the trials for a model: one for each kind of its attention for which the table names alternative tiles, or, for
    prompts, which FlashAttention can compute. There are none for latent attention, which has tiles of its own, nor for more than
    GROUP_ROWS query heads per KV head. If heads have several sizes, prompts are tried only at the widest, which decides how many
    queries all tiles have. has_flash: whether FlashAttention can be used."""
    if shape.latent is not None:
        return []
    found: dict[Place, Trial] = {}
    for heads in shape.kinds_of_heads:
        if shape.num_heads > GROUP_ROWS * heads.num_kv_heads:
            continue
        for kernel in (EXTEND_KERNEL, DECODE_KERNEL):
            if kernel == EXTEND_KERNEL and heads.head_dim != shape.widest_head_dim:
                continue
            sizes = (shape.num_heads, heads.num_kv_heads, heads.head_dim)
            trial = Trial(kernel, *sizes, spec.dtype, spec.kv_dtype, block_tokens)
            if has_flash and kernel == EXTEND_KERNEL and trial.item_bytes == HALF and not trial.is_fp8:
                trial = trial._replace(tries_flash=flash_attention.takes(heads.head_dim))
            if len(trial.tiles) > 1:
                found.setdefault(trial.place, trial)
    return list(found.values())


class Row(NamedTuple):
    """A row of a trial. context: its number of positions after the step. num_new: how many of these the step computes."""

    context: int
    num_new: int = 1


class Inputs:
    """The arguments of a trial's attention, in memory of their own.

    rows: the rows of the step.
    num_blocks: number of KV blocks. The rows use them one row after the other, each as many as the longest row needs; after the
    last block, rows begin again with block 0.
    num_pieces: the approximate number of split-K parts into which contexts are cut in decode steps.
    num_padding: number of tokens that belong to no row."""

    def __init__(
        self,
        trial: Trial,
        device: torch.device | str,
        rows: Sequence[Row],
        num_blocks: int,
        num_pieces: int,
        num_padding: int = 0,
    ) -> None:
        self.trial, self.device, self._rows = trial, device, rows
        _, block_bytes = _blocks(trial)
        group = KVGroupSpec("full", trial.block_tokens, block_bytes, (0,))
        self.arena = torch.zeros(num_blocks * block_bytes, dtype=torch.uint8, device=device)
        self.kv = kv_views(self.arena, group, (2, trial.kv_heads, trial.head_dim), trial.kv_dtype)
        number = torch.arange(len(rows), dtype=torch.int32)
        most = ceil_div(max(row.context for row in rows), trial.block_tokens)
        table = (number[:, None] * most + torch.arange(most, dtype=torch.int32)) % num_blocks
        self.table, self.numbers = table.to(device), number.to(device)
        self.contexts = self._column([row.context for row in rows])
        self.num_tokens = sum(row.num_new for row in rows) + num_padding
        self.work = entry.split_contexts(self.contexts, 0, num_pieces, trial.kv_heads) if trial.kernel == DECODE_KERNEL else None
        self.num_columns = (trial.heads + 2 * trial.kv_heads) * trial.head_dim

    def _column(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32).to(self.device)

    def qkv(self) -> Tensor:
        return torch.zeros(self.num_tokens, self.num_columns, dtype=getattr(torch, self.trial.dtype), device=self.device)

    def out(self) -> Tensor:
        """Returns memory for results: zeros, which stay the results of tokens that are not computed."""
        width = self.trial.heads * self.trial.head_dim
        return torch.zeros(self.num_tokens, width, dtype=getattr(torch, self.trial.dtype), device=self.device)

    def call(self, tile: Tile, qkv: Tensor, out: Tensor, in_order: bool = False) -> Callable[[], None]:
        """Returns a function that launches attention with this tile on the inputs, and copies nothing between host and device.
        in_order: for a tile that combines split-K parts itself, a second kernel combines them instead, with the same bits as
        result."""
        trial = self.trial
        how = (trial.head_dim**-0.5, 0.0, None)
        if trial.kernel == DECODE_KERNEL:
            columns: tuple[Any, ...] = (self.table, self.numbers, self.work, *how, entry.INTERPRETED, out, in_order)
            return partial(_with_tile, tile, triton_decode.decode_attention, qkv, *self.kv, 0, trial.heads, *columns)
        new = [row.num_new for row in self._rows]
        of_rows = enumerate(zip(new, self._rows, strict=True))
        cut = [(row, at, of.context - num + at) for row, (num, of) in of_rows if num > 1 for at in range(0, num, tile.tokens)]
        cut.sort(key=itemgetter(2), reverse=True)  # as columns.extend_step has it
        tile_rows, firsts = self._column([row for row, *_ in cut]), self._column([at for _, at, _ in cut])
        starts = self._column([sum(new[:row]) for row in range(len(new))])
        query_tiles = QueryTiles(tile_rows, firsts, tile.tokens, starts, self._column(new))
        columns = (self.table, self.numbers, query_tiles, self.contexts, 0, *how, out)
        return partial(_with_tile, tile, entry.extend_attention, qkv, *self.kv, 0, trial.heads, *columns)


def launching(trial: Trial, device: torch.device | str, num_cores: int, compared: Sequence[Tile]) -> dict[Tile, Callable[[], None]]:
    """Returns, for each tile in `compared`, a function that launches the trial's attention with this tile on the current stream.
    The functions copy nothing, because all inputs are made beforehand. num_cores: the GPU's number of multiprocessors."""
    num_blocks, _ = _blocks(trial)
    num_rows = _num_rows(trial)
    num_positions = PROMPT_TOKENS if trial.kernel == EXTEND_KERNEL else num_blocks // num_rows * trial.block_tokens
    num_pieces = max(1, num_cores * PIECES_PER_CORE // trial.kv_heads)
    row = Row(num_positions, num_positions if trial.kernel == EXTEND_KERNEL else 1)
    inputs = Inputs(trial, device, [row] * num_rows, num_blocks, num_pieces)
    qkv, out = inputs.qkv(), inputs.out()
    return {tile: inputs.call(tile, qkv, out) for tile in compared}


class Comparison:
    """The comparison of a tile's results with those of the table's tile, on the same random numbers. In decode steps the rows have
    contexts of several lengths, from none to many split-K parts, and take more programs than the GPU runs at a time.

    A tile that combines split-K parts itself (`joins`) is launched LAUNCHES times, each launch right after the one before. Each
    result must have the same bits as that of the same tile with a second kernel that combines the parts. Launches alternate between
    two inputs: with only one, a launch that reads a value too early would find the equal value of the launch before, and its result
    would be right by accident.

    num_cores: the GPU's number of multiprocessors. The comparison takes some ten MiB of the device's memory, more if there are few
    KV heads."""

    def __init__(self, trial: Trial, device: torch.device | str, num_cores: int, tile: Tile) -> None:
        self._trial, self._tile = trial, tile
        pieces, rows, num_padding = _compared_pieces(trial, num_cores), _compared_prompts(), NUM_PADDING
        if trial.kernel == DECODE_KERNEL:
            split, num_padding = triton_decode.SPLIT_TOKENS, 0
            rows = [Row(max(0, number * split - RAGGED[at % len(RAGGED)])) for at, number in enumerate(pieces)]
        num_blocks = COMPARED_BLOCKS_BYTES // _blocks(trial)[1] | 1  # odd, so that pieces begin everywhere before any is alike
        inputs = Inputs(trial, device, rows, num_blocks, sum(pieces), num_padding)  # a piece has SPLIT_TOKENS positions then
        drawn = drawn_numbers(device)
        _fill(inputs.kv, drawn)
        both = [over_and_over(drawn.flip(0).roll(by), inputs.qkv()) for by in range(2)]
        self._wanted = [inputs.out() for _ in both]
        calls = [inputs.call(trial.entry.tile, qkv, out) for qkv, out in zip(both, self._wanted, strict=True)]
        self._same = [inputs.out() for _ in both] if tile.joins else []
        calls += [inputs.call(tile, qkv, out, True) for qkv, out in zip(both, self._same, strict=False)]
        self._found = [inputs.out() for _ in range(LAUNCHES if tile.joins else len(both))]
        calls += [inputs.call(tile, both[at % 2], out) for at, out in enumerate(self._found)]
        self._calls = calls

    def launch(self) -> None:
        """Launches all calls of the comparison on the current stream."""
        for call in self._calls:
            call()

    def forget(self) -> None:
        """Removes the results of the tile under test."""
        for found in self._found:
            found.zero_()

    def is_right(self) -> bool:
        """Returns whether the tile under test had the right results in all launches. Waits for the device."""
        right = [self._is_near(found, self._wanted[at % 2]) for at, found in enumerate(self._found[:2])]
        if self._tile.joins:
            right += [(bits_of(found) == bits_of(self._same[at % 2])).all() for at, found in enumerate(self._found)]
        return bool(torch.stack(right).all())

    def _is_near(self, found: Tensor, wanted: Tensor) -> Tensor:
        """Returns, as a bool tensor, whether two results differ by no more than the rounding errors of another order of additions.
        Results with NaN or infinities always differ."""
        one, other = (x.float().unflatten(1, (self._trial.heads, -1)) for x in (found, wanted))
        allowed = MOST_ROUNDINGS * torch.finfo(found.dtype).eps * other.abs().amax(-1, keepdim=True)
        return ((one - other).abs() <= allowed).all()


def _compared_prompts() -> list[Row]:
    """Returns the rows of a comparison of prompts: one that decodes, which the kernel for prompts leaves out; pieces of prompts, of
    two tokens to many; a whole prompt; and a row that is padding."""
    most = PROMPT_TOKENS
    return [Row(most // 2), Row(most - 3, 2), Row(most - 1, most // 3), Row(most, most), Row(0, 0)]


def _compared_pieces(trial: Trial, num_cores: int) -> list[int]:
    """Returns the number of split-K parts of each row in a comparison of decode steps. There are fewer than MANY_ROWS rows, so that
    the same variant of the kernel makes the work list as in `launching`."""
    pieces = list(SHORT_ROWS)
    while len(pieces) < triton_decode.MANY_ROWS - 1:
        pieces.append(LONG_ROWS[(len(pieces) - len(SHORT_ROWS)) % len(LONG_ROWS)])
        if sum(pieces) * trial.kv_heads >= num_cores * PROGRAMS_PER_CORE:
            break
    return pieces


def drawn_numbers(device: torch.device | str) -> Tensor:
    """Returns NUM_DRAWN random numbers in float32, the same each time."""
    return torch.randn(NUM_DRAWN, generator=torch.Generator().manual_seed(1)).to(device)


def over_and_over(drawn: Tensor, target: Tensor) -> Tensor:
    """Fills a contiguous tensor with the numbers `drawn`, repeated as often as needed, and returns the tensor."""
    flat, filled = target.view(-1), min(len(drawn), target.numel())
    flat[:filled] = drawn[:filled]
    while filled < len(flat):  # without a copy of all that is filled
        more = min(filled, len(flat) - filled)
        flat[filled : filled + more] = flat[:more]
        filled += more
    return target


def _fill(kv: tuple[Tensor, Tensor | None], drawn: Tensor) -> None:
    values, scales = kv
    if scales is None:
        over_and_over(drawn, values)
        return
    codes = drawn.cpu().to(torch.float8_e4m3fn).view(torch.uint8).to(drawn.device)
    values.copy_(over_and_over(codes, torch.empty(values.shape, dtype=values.dtype, device=values.device)))
    scales.fill_(FP8_SCALE_OF_ONE)


def bits_of(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


def _with_tile(tile: Tile, launch: Callable[..., None], *arguments: Any) -> None:
    with tiles.forced(tile):
        launch(*arguments)


def _num_rows(trial: Trial) -> int:
    return 1 if trial.kernel == EXTEND_KERNEL else DECODE_ROWS


def _blocks(trial: Trial) -> tuple[int, int]:
    """Returns the number of KV blocks of a trial, which is divided evenly among its rows, and the bytes of one block."""
    block_bytes = 2 * trial.kv_heads * trial.block_tokens * kv_dtype_named(trial.kv_dtype).head_bytes(trial.head_dim)
    if trial.kernel == EXTEND_KERNEL:
        return -(-PROMPT_TOKENS // trial.block_tokens), block_bytes
    most = max(1, KV_BYTES // (block_bytes * DECODE_ROWS))
    return DECODE_ROWS * min(most, -(-DECODE_POSITIONS // trial.block_tokens)), block_bytes
