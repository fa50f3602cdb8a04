"""Computes the token ids, positions and KV slots of a step's tokens on the GPU (Triton) from columns that the host sends. Reference
implementation: reference.prepare_inputs.

Shapes: R rows, T tokens, S slots, B blocks that a sequence may hold. Slot S belongs to no sequence; it is used for padding.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels.sizes import ceil_div

BLOCK = tl.constexpr(128)


@triton.jit(do_not_specialize=["num_tokens", "num_slots", "table_stride"])
def _prepare_kernel(
    token_rows,  # [T] int32
    host_ids,  # [T] int32; below 0: the token is the one that the slot's last step sampled
    slots,  # [R] int32
    firsts,  # [R] int32
    starts,  # [R] int32
    last_ids,  # [S + 1] int32
    block_table,  # [S + 1, B] int32
    input_ids,  # [T] int32
    positions,  # [T] int32
    kv_slots,  # [T] int64
    num_tokens,
    num_slots,
    table_stride,
    BLOCK_TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    row = tl.load(token_rows + token, mask=inside, other=0)
    slot = tl.load(slots + row, mask=inside, other=0)
    position = tl.load(firsts + row, mask=inside, other=0) + token - tl.load(starts + row, mask=inside, other=0)
    position = tl.where(slot < num_slots, position, 0)  # padding may be longer than a block table
    known = tl.load(host_ids + token, mask=inside, other=0)
    last = tl.load(last_ids + slot, mask=inside, other=0)
    tl.store(input_ids + token, tl.where(known < 0, last, known), mask=inside)
    tl.store(positions + token, position, mask=inside)
    block = tl.load(block_table + slot.to(tl.int64) * table_stride + position // BLOCK_TOKENS, mask=inside, other=0)
    cell = block.to(tl.int64) * BLOCK_TOKENS + position % BLOCK_TOKENS
    tl.store(kv_slots + token, tl.where(slot < num_slots, cell, -1), mask=inside)


def prepare_inputs(
    token_rows: Tensor,
    host_ids: Tensor,
    slots: Tensor,
    firsts: Tensor,
    starts: Tensor,
    last_ids: Tensor,
    block_table: Tensor,
    block_tokens: int,
    input_ids: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
) -> None:
    """Fills a step's input_ids and positions [T] int32, and kv_slots [T] int64: the number of each token's block times
    block_tokens, plus the token's place in the block. Rows of slot S get the position 0 and the KV slot -1.

    token_rows [T]: the row of each token. host_ids [T]: token ids; below 0: the token that was sampled last for the row's slot is
    taken, from last_ids [S + 1].
    slots, firsts, starts [R]: each row's slot, and its first token's position in the sequence and index in the step. block_table:
    [S + 1, B]."""
    num_tokens = len(token_rows)
    _prepare_kernel[(ceil_div(num_tokens, BLOCK.value),)](
        token_rows,
        host_ids,
        slots,
        firsts,
        starts,
        last_ids,
        block_table,
        input_ids,
        positions,
        kv_slots,
        num_tokens,
        len(last_ids) - 1,
        block_table.stride(0),
        BLOCK_TOKENS=block_tokens,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_values"], do_not_specialize_on_alignment=["values"])
def _set_kernel(target, places, values, num_values):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_values
    tl.store(target + tl.load(places + at, mask=inside, other=0), tl.load(values + at, mask=inside, other=0), mask=inside)


def set_entries(target: Tensor, places: Tensor, values: Tensor) -> None:
    """Sets target.view(-1)[places] to values. All three are int32. If a place occurs twice, either value may be written."""
    _set_kernel[(ceil_div(len(places), BLOCK.value),)](target, places, values, len(places), num_warps=4)
