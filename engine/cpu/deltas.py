"""The gated delta rule on the `cpu` device: its two kernels, or the reference implementation where they do not serve the dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.cpu.batch import HostBatch
from engine.cpu.recording.program import call, empty
from engine.ops import reference
from engine.ops.ops import DeltaRule


def gated_delta(kernels: Any, x: Tensor, gates: Tensor, rule: DeltaRule, layer: int, batch: HostBatch) -> Tensor:
    """Does what Ops.gated_delta says. kernels: the module engine.cpu.kernels.entry; None: the reference implementation computes."""
    group, place = batch.group_of(layer)
    out = empty(x, len(x), rule.num_value_heads * rule.value_dim)
    rows = (group.block_table, batch.starts, batch.num_new, batch.contexts)
    call(_by_reference, x.view(x.shape), gates.view(gates.shape), rule, group.kv, place, batch.block_tokens, *rows, out.view(out.shape))
    return out


def _by_reference(
    x: Tensor,
    gates: Tensor,
    rule: DeltaRule,
    states: Tensor,
    layer: int,
    block_tokens: int,
    block_table: Any,
    starts: Any,
    num_new: Any,
    contexts: Any,
    out: Tensor,
) -> None:
    rows = (torch.from_numpy(one) for one in (block_table, starts, num_new, contexts))
    reference.gated_delta(x, gates, rule, states, layer, block_tokens, *rows, out)
