"""A stand-in for FlashAttention 3: an operator of the same name and arguments that computes on CPU tensors, and refuses what the
real one refuses (`mha_fwd` in hopper/flash_api.cpp of https://github.com/Dao-AILab/flash-attention), except float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from engine.cuda.kernels import flash_attention, tiles
from engine.cuda.kernels.tiles import EXTEND_KERNEL, MeasuredTile

ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor(a!)? k_new=None, Tensor(b!)? v_new=None, Tensor? q_v=None, Tensor(out!)? out=None, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, "
    "Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor? page_table=None, Tensor? kv_batch_idx=None, "
    "Tensor? leftpad_k=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "int attention_chunk=0, float softcap=0.0, int num_splits=0, bool? pack_gqa=None, int sm_margin=0"
)
NAMES = [argument.partition("=")[0].split()[-1] for argument in ARGUMENTS.split(", ")]


class StandIn:
    """The operator. num_calls: how often it was called. refuses: text of an error to raise; "": none. off_by: added to results."""

    def __init__(self) -> None:
        self.num_calls, self.refuses, self.off_by = 0, "", 0.0

    def fwd(self, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
        given = dict(zip(NAMES[3:], others, strict=False))  # torch leaves out the last ones if they are the defaults
        self.num_calls += 1
        if self.refuses:
            raise RuntimeError(self.refuses)
        out, bounds, num_new, contexts = (given[name] for name in ("out", "cu_seqlens_q", "seqused_q", "seqused_k"))
        table, rows = given["page_table"], given["kv_batch_idx"]
        assert given["is_causal"]
        assert given["num_splits"] == 1
        assert given["max_seqlen_q"] >= int(num_new.max())
        num_rows = len(bounds) - 1
        for column in (bounds, num_new, contexts, rows):
            assert column.dtype == torch.int32
            assert column.is_contiguous()
        assert [len(column) for column in (num_new, contexts, rows)] == [num_rows] * 3
        assert table.dtype == torch.int32
        assert table.stride(-1) == 1
        assert q.dtype == k.dtype == v.dtype == out.dtype
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == out.stride(-1) == 1
        assert out.shape == q.shape
        assert q.shape[1] % k.shape[2] == 0
        assert q.shape[2] == k.shape[3] <= 256
        assert q.shape[2] % 8 == 0
        assert k.shape == v.shape
        for row in range(num_rows):
            self._attend(q, k, v, out, int(bounds[row]), int(num_new[row]), int(contexts[row]), table[rows[row]], given)
        out += self.off_by
        return out, out.new_empty(0), out.new_empty(0), out.new_empty(0)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, first: int, num: int, context: int, pages: Tensor, given: dict[str, Any]
    ) -> None:
        if not num:
            return
        pages = pages[: -(-context // k.shape[1])].long()
        keys, values = (x[pages].flatten(0, 1)[:context].float().repeat_interleave(q.shape[1] // k.shape[2], 1) for x in (k, v))
        scores = torch.einsum("thd,shd->hts", q[first : first + num].float(), keys) * given["softmax_scale"]
        position = torch.arange(context - num, context)
        scores.masked_fill_(torch.arange(context)[None, :] > position[:, None], float("-inf"))
        out[first : first + num] = torch.einsum("hts,shd->thd", scores.softmax(-1), values).to(out.dtype)


@contextmanager
def stand_in(arguments: str = ARGUMENTS) -> Iterator[StandIn]:
    """Returns a context in which torch knows the stand-in's operator, with these arguments."""
    made, library = StandIn(), torch.library.Library("flash_attn_3", "DEF")
    try:
        library.define(f"fwd({arguments}) -> (Tensor(out!), Tensor, Tensor, Tensor)")
        library.impl("fwd", made.fwd, "CPU")
        yield made
    finally:
        library._destroy()


@contextmanager
def flash_chosen(head_dim: int, dtype: torch.dtype) -> Iterator[StandIn]:
    """Returns a context in which the stand-in computes prompts with heads of this size."""
    place = (EXTEND_KERNEL, tiles.padded(head_dim), dtype.itemsize, False)
    kind = flash_attention.kind(head_dim, str(dtype).removeprefix("torch."))
    tiles.use([MeasuredTile(*place, 0, tiles.entry_of(*place).tile._replace(flash=kind))])
    try:
        with stand_in() as made:
            yield made
    finally:
        tiles.use([])
