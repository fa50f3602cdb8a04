"""Cases for the kernels of experts: routing with ties and padding, and products of sorted pairs, with both sizes of tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.cuda.kernels import triton_experts
from engine.ops import reference
from engine.ops.ops import Fp8Matrix
from tests.engine.kernels.draw import Draw, close


def routed(scores: Tensor, kv_slots: Tensor, num_experts: int, num_chosen: int, normalised: bool) -> tuple[Tensor, ...]:
    """Returns, made with torch, what `route` and `sort` should fill in: chosen, weights, firsts and pairs (-7 behind the last)."""
    chosen, weights = reference.route(scores[:, :num_experts], num_chosen, normalised)
    chosen[kv_slots < 0] = num_experts
    experts, pairs = chosen.flatten().sort(stable=True)
    firsts = torch.searchsorted(experts, torch.arange(num_experts + 1))
    return chosen.int(), weights, firsts.int(), pairs.masked_fill(experts == num_experts, -7).int()


def placed(draw: Draw, weight: Tensor | Fp8Matrix) -> Tensor | Fp8Matrix:
    """Returns a copy of experts' weights on the device."""
    if isinstance(weight, Tensor):
        return draw.on(weight)
    return Fp8Matrix(draw.on(weight.values), draw.on(weight.scales), weight.group_inputs)


def some_padding(draw: Draw, num_tokens: int) -> Tensor:
    return torch.arange(num_tokens).masked_fill(torch.rand(num_tokens, generator=draw.generator) < draw.one_of(0.0, 0.3), -1)


def routing(draw: Draw) -> None:
    num_tokens, num_experts = draw.one_of(1, 2, 5), draw.one_of(1, 2, 5, 17)
    num_chosen, normalised = draw.between(1, min(5, num_experts)), draw.one_of(False, True)
    scores = draw.normal(num_tokens, num_experts + draw.one_of(0, 1), scale=draw.one_of(0.5, 4.0))
    if draw.one_of(False, True):
        scores = scores.round()  # many are equal
    kv_slots = some_padding(draw, num_tokens)
    wanted = routed(scores, kv_slots, num_experts, num_chosen, normalised)
    chosen, weights, firsts, pairs = (draw.like(one) for one in wanted)
    triton_experts.route(draw.on(scores), draw.on(kv_slots), num_experts, normalised, chosen, weights)
    triton_experts.sort(chosen, firsts, pairs, draw.one_of(16, 64))
    close(weights, wanted[1], torch.float32)
    for one, other in ((chosen, wanted[0]), (firsts, wanted[2]), (pairs, wanted[3])):
        assert torch.equal(one.cpu(), other)


def fp8_experts(draw: Draw, num_experts: int, outputs: int, inputs: int) -> Fp8Matrix:
    codes = torch.randint(0, 254, (num_experts, outputs, inputs), generator=draw.generator)
    group = draw.one_of(inputs, 128)
    scales = torch.rand(num_experts, outputs, -(-inputs // group), generator=draw.generator) * 0.008 * inputs**-0.5
    return Fp8Matrix((codes + (codes >= 0x7F)).to(torch.uint8), scales, group)


def experts(draw: Draw, fp8: bool = False) -> None:
    num_tokens, num_experts = draw.one_of(1, 2, 5, 17), draw.one_of(1, 3, 6)
    width, inner = draw.one_of(16, 40, 140 if fp8 else 70), draw.one_of(8, 33)
    num_chosen, normalised = draw.between(1, min(4, num_experts)), draw.one_of(False, True)
    x = draw.normal(num_tokens, width)
    gate_up = draw.normal(num_experts, 2 * inner, width, scale=width**-0.5)
    down = draw.normal(num_experts, width, inner, scale=inner**-0.5)
    if fp8:
        gate_up, down = fp8_experts(draw, num_experts, 2 * inner, width), fp8_experts(draw, num_experts, width, inner)
    shared = draw.normal(num_tokens, width) if draw.one_of(False, True) else None
    scores = draw.normal(num_tokens, num_experts + (shared is not None), scale=2.0)
    if draw.one_of(False, True):  # all tokens pass through the same experts
        scores[:] = scores[:1].clone()
    kv_slots = some_padding(draw, num_tokens)
    wanted = reference.experts(x, scores, gate_up, down, num_chosen, normalised, kv_slots < 0, shared)
    _, weights, firsts, pairs = (draw.on(one) for one in routed(scores, kv_slots, num_experts, num_chosen, normalised))
    between, made = (draw.like(torch.empty(len(pairs), columns, dtype=draw.dtype)) for columns in (inner, width))
    tile, how, out = draw.one_of(*triton_experts.TILE_ROWS), (firsts, pairs, num_chosen), draw.like(x)
    gate_up, down = (placed(draw, one) for one in (gate_up, down))
    triton_experts.grouped_linear(draw.on(x), gate_up, *how, True, tile, draw.interpreted, between)
    triton_experts.grouped_linear(between, down, *how, False, tile, draw.interpreted, made)
    also = None if shared is None else draw.on(shared)
    triton_experts.combine(made, weights, draw.on(kv_slots), draw.on(scores), also, out)
    close(out, wanted, draw.dtype)
