"""Computes the gated delta rule (linear attention) on the `cpu` device: by two compiled kernels, or by the reference implementation
if there are no kernels for the dtype."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.cpu.batch import HostBatch
from engine.cpu.products import array
from engine.cpu.programs.program import call, empty
from engine.ops import reference
from engine.ops.ops import DeltaRule


def gated_delta(kernels: Any, x: Tensor, gates: Tensor, rule: DeltaRule, layer: int, batch: HostBatch) -> Tensor:
    """Returns the outputs of a layer's gated delta rule (linear attention) for the projected inputs x and gates (Ops.gated_delta),
    and updates the states of the batch's rows. kernels: the module engine.cpu.kernels.entry; None: the reference implementation
    computes the result."""
    group, place = batch.group_of(layer)
    out = empty(x, len(x), rule.num_value_heads * rule.value_dim)
    rows = (batch.block_tokens, group.block_table, batch.starts, batch.num_new, batch.contexts)
    if kernels is None:
        call(_by_reference, x.view(x.shape), gates.view(gates.shape), rule, group.kv, place, *rows, out.view(out.shape))
        return out
    mixed = empty(x, len(x), rule.conv_width, torch.float32)
    sizes = np.array((rule.num_key_heads, rule.num_value_heads, rule.key_dim, rule.value_dim))
    where = (group.kv_flat, *group.kv.shape[1:2], place, group.kv.shape[2], *rows, sizes, np.array(astuple(rule.columns)))
    columns = mixed.view(mixed.shape).numpy()
    call(kernels.delta_convolve, array(x), array(rule.convolution), *where, columns)
    of_heads = (rule.decay.numpy(), rule.step_bias.numpy(), array(rule.norm), rule.eps)
    call(kernels.delta_rule, array(x), array(gates), columns, *of_heads, *where, array(out))
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
    table, first, num, context = (torch.from_numpy(one) for one in (block_table, starts, num_new, contexts))
    reference.gated_delta(x, gates, rule, states, layer, block_tokens, table, first, num, context, out)
