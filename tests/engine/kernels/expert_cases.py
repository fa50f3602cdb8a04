"""Cases for the kernels of experts: routing with ties and padding, and products of sorted pairs, with both sizes of tiles."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.cuda.kernels import triton_experts
from engine.ops import reference
from engine.ops.ops import (
    ClampedSwiglu,
    ExpertMatrices,
    ExpertMatrix,
    Fp8Matrix,
    Int4Matrix,
    Int8Matrix,
    Mxfp4Matrix,
    Nvfp4Matrix,
    SigmoidRouting,
)
from tests.engine.kernels.draw import Draw, close, close_in_sums
from tests.engine.kernels.row_cases import int4_matrix, int4_on_device, int8_matrix, nvfp4_matrix, nvfp4_on_device


def routed(
    scores: Tensor,
    kv_slots: Tensor,
    num_experts: int,
    num_chosen: int,
    normalised: bool,
    by_sigmoid: bool = False,
    factors: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Returns, made with torch, what `route` and `sort` should fill in: chosen, weights, firsts and pairs (-7 behind the last)."""
    return arranged(*reference.route(scores[:, :num_experts], num_chosen, normalised, by_sigmoid, factors), kv_slots, num_experts)


def arranged(chosen: Tensor, weights: Tensor, kv_slots: Tensor, num_experts: int) -> tuple[Tensor, ...]:
    chosen[kv_slots < 0] = num_experts
    experts, pairs = chosen.flatten().sort(stable=True)
    firsts = torch.searchsorted(experts, torch.arange(num_experts + 1))
    return chosen.int(), weights, firsts.int(), pairs.masked_fill(experts == num_experts, -7).int()


def placed(draw: Draw, weight: ExpertMatrix) -> ExpertMatrix:
    """Returns a copy of experts' weights on the device."""
    if isinstance(weight, Tensor):
        return draw.on(weight)
    if isinstance(weight, Int4Matrix):
        return int4_on_device(draw, weight)
    if isinstance(weight, Nvfp4Matrix):
        return nvfp4_on_device(draw, weight)
    if isinstance(weight, Mxfp4Matrix):
        return Mxfp4Matrix(draw.on(weight.blocks), draw.on(weight.scales))
    if isinstance(weight, Int8Matrix):
        return Int8Matrix(draw.on(weight.values), draw.on(weight.scales))
    return Fp8Matrix(draw.on(weight.values), draw.on(weight.scales), weight.group_inputs)


def some_padding(draw: Draw, num_tokens: int) -> Tensor:
    return torch.arange(num_tokens).masked_fill(torch.rand(num_tokens, generator=draw.generator) < draw.one_of(0.0, 0.3), -1)


def routing(draw: Draw) -> None:
    num_tokens, num_experts = draw.one_of(1, 2, 5), draw.one_of(1, 2, 5, 17)
    num_chosen, normalised = draw.between(1, min(5, num_experts)), draw.one_of(False, True)
    scores = draw.normal(num_tokens, num_experts + draw.one_of(0, 1), scale=draw.one_of(0.5, 4.0))
    if draw.one_of(False, True):
        scores = scores.round()  # many are equal
    kv_slots, by_sigmoid = some_padding(draw, num_tokens), draw.one_of(False, False, True)
    factors = draw.normal(num_experts) if draw.one_of(False, True) else None
    wanted = routed(scores, kv_slots, num_experts, num_chosen, normalised, by_sigmoid, factors)
    chosen, weights, firsts, pairs = (draw.like(one) for one in wanted)
    on_device = None if factors is None else draw.on(factors)
    triton_experts.route(draw.on(scores), draw.on(kv_slots), num_experts, normalised, chosen, weights, by_sigmoid, on_device)
    counts = torch.arange(num_experts)
    added_to = draw.on(counts) if draw.one_of(False, True) else None
    triton_experts.sort(chosen, firsts, pairs, draw.one_of(16, 64), added_to)
    if added_to is not None:
        assert torch.equal(added_to.cpu() - counts, wanted[2].diff().long())
    close(weights, wanted[1], torch.float32)
    for one, other in ((chosen, wanted[0]), (firsts, wanted[2]), (pairs, wanted[3])):
        assert torch.equal(one.cpu(), other)


def routing_by_sigmoid(draw: Draw) -> None:
    num_tokens, num_groups, size = draw.one_of(1, 2, 5), draw.one_of(1, 2, 3, 8), draw.one_of(2, 3, 8)
    num_experts, num_chosen_groups = num_groups * size, draw.between(1, num_groups)
    num_chosen, normalised = draw.between(1, min(5, num_chosen_groups * size)), draw.one_of(False, True)
    logits = draw.normal(num_tokens, num_experts, scale=draw.one_of(0.5, 4.0))
    correction = draw.normal(num_experts, scale=0.3)
    if draw.one_of(False, True):  # many are equal
        logits, correction = logits.round(), torch.zeros(num_experts)
    kv_slots = some_padding(draw, num_tokens)
    sizes = (num_groups, num_chosen_groups, draw.one_of(1.0, 2.5), draw.one_of(False, True))
    routed_so = reference.route_by_sigmoid(logits, num_chosen, normalised, SigmoidRouting(correction, *sizes))
    wanted = arranged(*routed_so, kv_slots, num_experts)
    chosen, weights = draw.like(wanted[0]), draw.like(wanted[1])
    rule = SigmoidRouting(draw.on(correction), *sizes)
    triton_experts.route_by_sigmoid(draw.on(logits), draw.on(kv_slots), rule, normalised, chosen, weights)
    close(weights, wanted[1], torch.float32)
    assert torch.equal(chosen.cpu(), wanted[0])


def drawn_turns(draw: Draw, num_experts: int) -> tuple[Tensor, list[int]]:
    """Returns a table ExpertMatrices.turns of a rank that holds some experts, and the numbers of these."""
    holders = torch.randint(1, 5, (num_experts,), generator=draw.generator)
    numbers = torch.remainder(torch.randint(0, 60, (num_experts,), generator=draw.generator), holders)
    is_held = torch.rand(num_experts, generator=draw.generator) < draw.one_of(0.4, 1.0)
    is_held[draw.between(0, num_experts - 1)] = True
    index = is_held.cumsum(0) - 1
    turns = torch.stack([holders, numbers.masked_fill(~is_held, -1), index.masked_fill(~is_held, -1)], dim=1)
    return turns.int(), torch.where(is_held)[0].tolist()


def own_pairs(draw: Draw) -> None:
    num_tokens, num_experts = draw.one_of(1, 2, 5, 300), draw.one_of(1, 2, 5, 17)
    num_chosen, kv_slots = draw.between(1, min(5, num_experts)), some_padding(draw, num_tokens)
    scores = draw.normal(num_tokens, num_experts)
    chosen = routed(scores, kv_slots, num_experts, num_chosen, True)[0]
    kv_slots = torch.where(kv_slots < 0, -1, kv_slots * 7 + (1 << 33))  # a large cache
    turns, held = drawn_turns(draw, num_experts)
    found = draw.on(chosen)
    triton_experts.keep_own_pairs(found, draw.on(kv_slots), draw.on(turns), len(held))
    assert torch.equal(found.cpu().long(), reference.own_pairs(chosen.long(), kv_slots, turns, len(held)))


def mxfp4(draw: Draw, *shape: int) -> Mxfp4Matrix:
    """Returns any numbers, of about the size of weights of a product with so many inputs."""
    *outer, inputs = shape
    blocks = torch.randint(0, 256, (*outer, inputs // 32, 16), generator=draw.generator).to(torch.uint8)
    scales = torch.randint(120, 125, (*outer, inputs // 32), generator=draw.generator)
    return Mxfp4Matrix(blocks, scales.to(torch.uint8))


def fp8_experts(draw: Draw, num_experts: int, outputs: int, inputs: int) -> Fp8Matrix:
    codes = torch.randint(0, 254, (num_experts, outputs, inputs), generator=draw.generator)
    group = draw.one_of(inputs, 128)
    scales = torch.rand(num_experts, outputs, -(-inputs // group), generator=draw.generator) * 0.008 * inputs**-0.5
    return Fp8Matrix((codes + (codes >= 0x7F)).to(torch.uint8), scales, group)


def sizes_of_terms(x: Tensor, scores: Tensor, matrices: ExpertMatrices, is_padding: Tensor, shared: Tensor | None) -> Tensor:
    """Returns how large the numbers are, [T, W] float32, that are added up to an output of the experts: the absolute values of the
    terms of their second products, times the experts' weights, and of what is shared. x, scores, shared: float32. matrices: in
    NVFP4 or int8."""
    assert isinstance(matrices.gate_up, Int8Matrix | Nvfp4Matrix)
    assert isinstance(matrices.down, Int8Matrix | Nvfp4Matrix)
    num_experts, weighs = matrices.num_experts, matrices.weighs_inputs
    chosen, weights = reference.route(scores[:, :num_experts], matrices.num_chosen, matrices.normalised, weighs)
    total = torch.zeros_like(x)
    for token, place in torch.cartesian_prod(torch.where(~is_padding)[0], torch.arange(matrices.num_chosen)).tolist():
        expert, weight = int(chosen[token, place]), weights[token, place]
        gate_up, down = (dense(one[expert]) for one in (matrices.gate_up, matrices.down))
        row = x[token : token + 1] * (weight if weighs else 1.0)
        made = reference.gated(row @ gate_up.T, None, matrices.gelu)
        total[token] += (made.abs() @ down.abs().T)[0] * (1.0 if weighs else weight)
    if shared is not None:
        gates = torch.sigmoid(scores[:, num_experts:]) if scores.shape[1] > num_experts else torch.ones(len(x), 1)
        total += (shared * gates).abs()
    return total


def dense(matrix: Int8Matrix | Nvfp4Matrix) -> Tensor:
    """Returns a matrix [N, K] in float32."""
    if isinstance(matrix, Int8Matrix):
        return matrix.values.float() * matrix.scales.unsqueeze(1)
    out = torch.empty(len(matrix.packed), 2 * matrix.packed.shape[1])
    reference.nvfp4_rows(matrix.packed, matrix.scales, matrix.factors, out)
    return out


def experts(
    draw: Draw, in_mxfp4: bool = False, fp8: bool = False, int8: bool = False, int4: bool = False, nvfp4: bool = False
) -> None:
    num_tokens, num_experts = draw.one_of(1, 2, 5, 17), draw.one_of(1, 3, 6)
    width, inner = draw.one_of(16, 40, 140 if fp8 or int8 else 70), draw.one_of(8, 33)
    if in_mxfp4 or int4 or nvfp4:
        num_tokens, num_experts, width, inner = draw.one_of(1, 5), draw.one_of(1, 3), draw.one_of(32, 96), 32
    num_chosen, normalised = draw.between(1, min(4, num_experts)), draw.one_of(False, True)
    x = draw.normal(num_tokens, width)
    gate_up: ExpertMatrix = draw.normal(num_experts, 2 * inner, width, scale=width**-0.5)
    down: ExpertMatrix = draw.normal(num_experts, width, inner, scale=inner**-0.5)
    biases: tuple[Tensor | None, Tensor | None] = (None, None)
    clamped = None
    if in_mxfp4:
        gate_up, down = mxfp4(draw, num_experts, 2 * inner, width), mxfp4(draw, num_experts, width, inner)
    if fp8:
        gate_up, down = fp8_experts(draw, num_experts, 2 * inner, width), fp8_experts(draw, num_experts, width, inner)
    if int8:
        gate_up, down = int8_matrix(draw, num_experts, 2 * inner, width), int8_matrix(draw, num_experts, width, inner)
    if int4:
        gate_up, down = int4_matrix(draw, num_experts, 2 * inner, width), int4_matrix(draw, num_experts, width, inner)
    if nvfp4:
        gate_up, down = nvfp4_matrix(draw, num_experts, 2 * inner, width), nvfp4_matrix(draw, num_experts, width, inner)
    if in_mxfp4 or (isinstance(gate_up, Tensor) and draw.one_of(False, True)):
        biases = draw.normal(num_experts, 2 * inner), draw.normal(num_experts, width)
        clamped = ClampedSwiglu(draw.one_of(0.7, 7.0), 1.702)
    weighs_inputs = clamped is None and draw.one_of(False, True)
    if isinstance(gate_up, Tensor) and isinstance(down, Tensor) and clamped is None and draw.one_of(False, True):
        gate_up, down = (one.transpose(1, 2).contiguous().transpose(1, 2) for one in (gate_up, down))  # along the outputs
    shared = draw.normal(num_tokens, width) if draw.one_of(False, True) else None
    is_gated = shared is not None and draw.one_of(False, True)
    scores = draw.normal(num_tokens, num_experts + is_gated, scale=2.0)
    if draw.one_of(False, True):  # all tokens pass through the same experts
        scores[:] = scores[:1].clone()
    kv_slots = some_padding(draw, num_tokens)
    how = (num_chosen, normalised)
    gelu = clamped is None and draw.one_of(False, True)
    matrices = ExpertMatrices(gate_up, down, *how, *biases, clamped, weighs_inputs=weighs_inputs, gelu=gelu)
    own_experts = range(num_experts)
    if isinstance(gate_up, Tensor) and isinstance(down, Tensor) and draw.one_of(False, True):  # others have the other experts
        own_experts = range(first := draw.between(0, num_experts - 1), draw.between(first + 1, num_experts))
        part = slice(own_experts.start, own_experts.stop)
        gate_up, down = gate_up[part], down[part]
        biases = (None, None) if clamped is None else (biases[0][part], biases[1][part])
        matrices = replace(
            matrices,
            gate_up=gate_up,
            down=down,
            gate_up_bias=biases[0],
            down_bias=biases[1],
            first_own=own_experts.start,
            num_routed=num_experts,
        )
    all_routed = routed(scores, kv_slots, num_experts, *how, weighs_inputs)
    if isinstance(gate_up, Tensor) and isinstance(down, Tensor) and not matrices.is_part and draw.one_of(False, True):
        turns, held = drawn_turns(draw, num_experts)  # others have copies
        gate_up, down = gate_up[held], down[held]
        biases = (None, None) if clamped is None else (biases[0][held], biases[1][held])
        matrices = replace(
            matrices, gate_up=gate_up, down=down, gate_up_bias=biases[0], down_bias=biases[1], num_routed=num_experts, turns=turns
        )
        kept, own_experts = reference.own_pairs(all_routed[0].long(), kv_slots, turns, len(held)), range(len(held))
        all_routed = arranged(kept, all_routed[1], kv_slots, len(held))
    wanted = reference.experts(x, scores, matrices, kv_slots, shared)
    chosen, weights, firsts, pairs = (draw.on(one) for one in all_routed)
    firsts = firsts[own_experts.start : own_experts.stop + 1]
    between, made = (draw.like(torch.empty(len(pairs), columns, dtype=draw.dtype)) for columns in (inner, width))
    tile, where, out = draw.one_of(*triton_experts.TILE_ROWS), (firsts, pairs, num_chosen), draw.like(x)
    gate_bias, down_bias = (None if bias is None else draw.on(bias) for bias in biases)
    own = [placed(draw, one) for one in (gate_up, down)]
    factors = weights if weighs_inputs else None
    activation = (gate_bias, clamped, factors, gelu)
    triton_experts.grouped_linear(draw.on(x), own[0], *where, True, tile, draw.interpreted, between, *activation)
    triton_experts.grouped_linear(between, own[1], *where, False, tile, draw.interpreted, made, down_bias)
    also = None if shared is None else draw.on(shared)
    some = (chosen, own_experts) if matrices.is_part else ()
    gates = draw.on(scores) if is_gated else None
    triton_experts.combine(made, weights, draw.on(kv_slots), gates, also, out, not weighs_inputs, *some)
    if not nvfp4 and not int8:
        close(out, wanted, draw.dtype)
        return
    # The twin rounds each weight to the dtype; the kernel has their exact numbers, and multiplies sums by an output's factor. In
    # bfloat16 that makes the twin's gates and ups differ from the exact ones by more than all of the kernel's roundings together:
    # in 4 of 2,000 shapes its outputs are off by up to 2.8 times what is allowed elsewhere, and the kernel's by 0.7 at most. So
    # the kernel is held to the twin in float32.
    wide, also = (x.float(), scores.float(), matrices), None if shared is None else shared.float()
    close_in_sums(out, reference.experts(*wide, kv_slots, also), sizes_of_terms(*wide, kv_slots < 0, also), draw.dtype)
