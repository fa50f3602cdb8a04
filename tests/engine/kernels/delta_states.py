"""Rows of a gated delta rule with their states, for the cases of the kernels that read and write them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.layers.gated_delta import columns_of
from engine.ops import reference
from engine.ops.ops import DeltaRule
from loader.shapes.model_shape import DeltaShape
from tests.engine.kernels.draw import Draw

EPS = 1e-6


@dataclass(slots=True)
class DeltaRows:
    """A step of a layer. Its rows' blocks are scattered over states [blocks, layers, numbers], which hold NaN elsewhere.
    block_table [R, B] has -1 where no state is kept."""

    rule: DeltaRule
    x: Tensor
    gates: Tensor
    states: Tensor
    layer: int
    block_tokens: int
    block_table: Tensor
    starts: Tensor
    num_new: Tensor
    contexts: Tensor

    def compute(self) -> tuple[Tensor, Tensor]:
        """Returns the reference implementation's result, and the states after the step."""
        states, out = (
            self.states.clone(),
            torch.empty(len(self.x), self.rule.num_value_heads * self.rule.value_dim, dtype=self.x.dtype),
        )
        rows = (self.block_table, self.starts, self.num_new, self.contexts)
        reference.gated_delta(self.x, self.gates, self.rule, states, self.layer, self.block_tokens, *rows, out)
        return out, states


def delta_rule(draw: Draw, shape: DeltaShape) -> DeltaRule:
    """Draws the weights of a layer of this shape."""
    heads = shape.num_value_heads
    return DeltaRule(
        convolution=draw.normal(shape.conv_width, shape.conv_tokens, scale=0.5),
        decay=torch.empty(heads).uniform_(-4.0, 0.0, generator=draw.generator),
        step_bias=torch.randn(heads, generator=draw.generator),
        norm=draw.normal(shape.value_dim),
        eps=EPS,
        num_key_heads=shape.num_key_heads,
        num_value_heads=heads,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
        columns=columns_of(shape),
    )


def delta_rows(draw: Draw, dims: tuple[int, ...] = (8, 12, 20, 32), padding: bool = True) -> DeltaRows:
    """Draws one. dims: sizes of heads' keys and values."""
    key_heads, served, block_tokens = draw.between(1, 2), draw.between(1, 3), draw.one_of(4, 8, 16)
    sizes = (key_heads, key_heads * served, draw.one_of(*dims), draw.one_of(*dims), draw.one_of(2, 4))
    shape = DeltaShape(frozenset((0,)), *sizes, by_head=draw.one_of(True, False))
    heads, values = shape.num_value_heads, shape.num_value_heads * shape.value_dim
    rule = delta_rule(draw, shape)
    new = [draw.one_of(1, 1, draw.between(2, 9), draw.between(10, 80)) for _ in range(draw.between(1, 3))]
    new.sort(key=lambda num: num > 1)  # rows that decode come first
    firsts = [draw.one_of(0, draw.between(1, 40), block_tokens, 2 * block_tokens - 1) for _ in new]
    contexts = [first + num for first, num in zip(firsts, new, strict=True)]
    num_blocks = -(-max(contexts) // block_tokens)
    table = torch.full((len(new), num_blocks), -1, dtype=torch.int32)
    free = torch.randperm(3 * len(new) * num_blocks, generator=draw.generator).tolist()
    layers = draw.between(1, 2)
    layer = draw.between(0, layers - 1)
    states = torch.full((3 * len(new) * num_blocks, layers, shape.state_values), torch.nan)
    for row, (first, context) in enumerate(zip(firsts, contexts, strict=True)):
        last = (context - 1) // block_tokens
        for index in range(first // block_tokens, last + 1):
            if index == last or draw.one_of(True, False):
                table[row, index] = free.pop()
        if first:
            before = (first - 1) // block_tokens
            table[row, before] = free.pop() if table[row, before] < 0 else table[row, before]
            states[table[row, before], layer] = torch.randn(shape.state_values, generator=draw.generator) * 0.3
    num_tokens = sum(new) + (draw.one_of(0, 3) if padding else 0)

    def ints(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32)

    starts = [sum(new[:row]) for row in range(len(new))]
    made = (draw.normal(num_tokens, shape.conv_width + values), draw.normal(num_tokens, 2 * heads))
    return DeltaRows(rule, *made, states, layer, block_tokens, table, ints(starts), ints(new), ints(contexts))


def by_steps(rows: DeltaRows, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Returns what `compute` does, for one row whose tokens are computed in steps of so many."""
    states, parts, at = rows.states, [], 0
    first = int(rows.contexts[0]) - int(rows.num_new[0])
    for num in sizes:
        one = torch.tensor([num], dtype=torch.int32)
        own = slice(at, at + num)
        context = torch.tensor([first + at + num], dtype=torch.int32)
        part = replace(rows, x=rows.x[own], gates=rows.gates[own], states=states, starts=one * 0, num_new=one, contexts=context)
        out, states = part.compute()
        parts.append(out)
        at += num
    return torch.cat(parts), states
