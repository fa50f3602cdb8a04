"""Computes the experts of a mixture-of-experts layer with the CPU kernels. The pairs of a token and an expert are sorted by expert,
so that all rows of an expert are multiplied with its matrices at once.

kernels: the module engine.cpu.kernels.entry. Shapes: T tokens, W width, E experts, C experts that each token passes through, P = T
* C pairs of a token and one of its experts, sorted by expert, I the experts' intermediate size. In a split model a rank may have
only some of the experts. Arrays of P rows then begin with the pairs of these experts, and their other rows are undefined."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.cpu.products import array, four_bits, four_bits_in_parts, fp8_in_parts, write_product
from engine.cpu.programs.program import call, empty
from engine.ops.ops import ExpertMatrices, ExpertMatrix, Fp8Matrix, Int4Matrix, Int8Matrix, Mxfp4Matrix, Nvfp4Matrix

# In steps of up to so many tokens the activation also computes rows that no product has filled, so that no Python runs between the
# kernels.
_FEW_TOKENS = 16


@dataclass(slots=True, frozen=True)
class _Routing:
    """The experts to which T tokens are routed, C for each, as the routing kernels write them. Each pair of a token and one of its
    experts has a row; rows are sorted by expert.
    weights [T, C]: the weight of each pair.
    places [T, C]: the row of each pair.
    firsts [E + 1]: the first row of each expert, and the end of the last expert's rows.
    tokens [P]: the token of each row.
    memory: the memory of which these arrays are views."""

    memory: Tensor
    weights: Any  # [T, C] float32
    places: Any  # [T, C] int32
    firsts: Any  # [E + 1] int32
    tokens: Any  # [P] int64

    @classmethod
    def empty(cls, like: Tensor, num_chosen: int, num_experts: int) -> _Routing:
        """Returns a new _Routing for the tokens of `like` [T, W]: its arrays have the right sizes, but are not filled. num_chosen:
        C. num_experts: E."""
        num_pairs = len(like) * num_chosen
        num_words = 4 * num_pairs + num_experts + 1
        memory = empty(like, 1, num_words * 4 // like.element_size())
        words = memory.view(torch.int32).view(-1).numpy()
        of_tokens = (len(like), num_chosen)
        tokens, weights, places, firsts = np.split(words, (2 * num_pairs, 3 * num_pairs, 4 * num_pairs))
        return cls(memory, weights.view(np.float32).reshape(of_tokens), places.reshape(of_tokens), firsts, tokens.view(np.int64))


def experts(kernels: Any, x: Tensor, scores: Tensor, matrices: ExpertMatrices, shared: Tensor | None, slots: Any) -> Tensor:
    """Returns the output [T, W] of a layer's experts for inputs x and router scores (Ops.experts). kernels: the module of the
    kernels. matrices: the layer's experts. shared: the output of the layer's shared expert, which is added; None: there is none.
    slots [T] int64: each token's place in the KV cache; below 0 for padding."""
    num_experts, num_chosen = matrices.num_experts, matrices.num_chosen
    routing = _Routing.empty(x, num_chosen, num_experts)
    where = (routing.weights, routing.places)
    counts = np.empty(0, np.int64) if matrices.counts is None else matrices.counts.numpy()
    to = (*where, routing.firsts, routing.tokens, counts if matrices.turns is None else counts[:0])
    if (rule := matrices.sigmoid) is None:
        call(kernels.route, array(scores), slots, num_experts, matrices.normalised, matrices.weighs_inputs, *to)
    else:
        groups = (rule.num_groups, rule.num_chosen_groups)
        own = (rule.correction.numpy(), *groups, matrices.normalised, rule.factor, rule.by_softmax)
        call(kernels.route_by_sigmoid, scores.view(scores.shape).numpy(), slots, *own, *to)
    if matrices.factors is not None:
        call(_weigh_by_expert, *where, routing.firsts, slots, matrices.factors[:])
    kept = (slots, routing.places, routing.firsts, routing.tokens)
    if matrices.turns is not None:
        new_rows = empty(x, 1, len(routing.tokens) * 4 // x.element_size()).view(torch.int32).view(-1).numpy()
        call(kernels.keep_own_turns, matrices.turns.numpy(), *kept, new_rows, counts)
        del new_rows  # so that recorded steps can reuse its memory
    elif matrices.is_part:
        call(kernels.keep_own_experts, matrices.first_own, matrices.num_own, *kept)
    if is_part := matrices.is_part:
        routing = replace(routing, firsts=routing.firsts[: matrices.num_own + 1])
    rows = empty(x, len(x) * num_chosen, x.shape[1])
    call(kernels.gather_rows, routing.tokens, array(x), 0, 1.0, array(rows))
    if matrices.weighs_inputs:
        call(_weigh_rows, rows.view(rows.shape), *where, slots)
    sizes = (routing, len(x))
    gate_up = _grouped_product(kernels, rows, matrices.gate_up, matrices.gate_up_bias, *sizes)
    del rows  # so that recorded steps can reuse its memory for the next result
    activated = empty(x, len(gate_up), gate_up.shape[1] // 2)
    kernel, numbers = (kernels.gelu_and_mul if matrices.gelu else kernels.silu_and_mul), tuple[float, ...]()
    if (clamped := matrices.clamped) is not None:
        kernel, numbers = kernels.clamped_swiglu, (clamped.limit, clamped.alpha)
    if is_part and len(x) > _FEW_TOKENS:
        call(_activate_own, kernel, routing.firsts, array(gate_up), *numbers, array(activated))
    else:
        call(kernel, array(gate_up), *numbers, array(activated))
    del gate_up
    made = _grouped_product(kernels, activated, matrices.down, matrices.down_bias, *sizes)
    del activated
    if is_part:
        call(kernels.clear_behind, routing.firsts, array(made))
    out = empty(x, *x.shape)
    none = array(x)[:0]
    gates = array(scores) if scores.shape[1] > num_experts else none
    call(kernels.combine, array(made), *where, slots, gates, none if shared is None else array(shared), array(out))
    return out


def _activate_own(kernel: Any, firsts: Any, gate_up: Any, *numbers_and_out: Any) -> None:
    """Computes the activation of a rank's own experts and leaves all other rows unchanged. kernel: computes the activation. firsts
    [E + 1]: the first row of each own expert, and the end of the last one's rows. numbers_and_out: the kernel's arguments after
    gate_up, with its output as the last."""
    *numbers, out = numbers_and_out
    if num_rows := int(firsts[-1]):
        kernel(gate_up[:num_rows], *numbers, out[:num_rows])


def _weigh_rows(rows: Tensor, weights: Any, places: Any, slots: Any) -> None:
    """Multiplies the row of each pair of a token and an expert by the pair's weight, in place, and sets all weights to 1, so that
    the experts' outputs are not weighted again. rows [P, W]. weights, places [T, C]: the weight of each pair, and its index in
    rows. slots [T]: each token's place in the KV cache; below 0 for padding, which is skipped."""
    there = slots >= 0
    own = torch.from_numpy(places[there].ravel()).long()
    rows[own] = (rows[own].float() * torch.from_numpy(weights[there].reshape(-1, 1))).to(rows.dtype)
    weights[:] = 1.0


def _weigh_by_expert(weights: Any, places: Any, firsts: Any, slots: Any, factors: Tensor) -> None:
    """Multiplies the weight of each pair of a token and an expert, in place, by the expert's factor in factors [E]. weights, places
    [T, C]: the weight and the row of each pair. firsts [E + 1]: the first row of each expert, and the end of the last one's rows.
    slots [T]: each token's place in the KV cache; below 0 for padding, which is skipped."""
    there, of_rows = slots >= 0, np.repeat(factors.float().numpy(), np.diff(firsts))
    weights[there] *= of_rows[places[there]]


def _grouped_product(
    kernels: Any, x: Tensor, weight: ExpertMatrix, bias: Tensor | None, routing: _Routing, num_tokens: int
) -> Tensor:
    """Multiplies each row of x [P, K] with the transposed matrix of the row's expert, adds the expert's bias, and returns the
    results [P, N]. weight [E, N, K], bias [E, N] (None: no bias): of all experts. routing: its `firsts` says which rows belong to
    which expert. num_tokens: the most rows that an expert may have."""
    out = empty(x, len(x), weight.shape[1])
    if isinstance(weight, Mxfp4Matrix | Int4Matrix | Nvfp4Matrix):
        _grouped_four_bits_linear(kernels, x, weight, bias, routing, num_tokens, out)
    elif isinstance(weight, Fp8Matrix | Int8Matrix):
        _grouped_byte_linear(kernels, x, weight, bias, routing, num_tokens, out)
    else:
        _grouped_linear(kernels, x, weight, bias, routing, num_tokens, out)
    return out


def _grouped_linear(
    kernels: Any, x: Tensor, weight: Tensor, bias: Tensor | None, routing: _Routing, num_tokens: int, out: Tensor
) -> None:
    kernel, most_rows = kernels.grouped_linear_kernel(weight.shape[1], "bfloat16" if x.dtype is torch.bfloat16 else "float32")
    if not weight.is_contiguous():  # contiguous along the outputs, which only torch multiplies
        most_rows = 0
    if num_tokens > most_rows:
        views = (x.view(x.shape), weight.view(weight.shape), None if bias is None else bias.view(bias.shape))
        call(_many_rows, kernels, *views, routing.firsts, most_rows, out.view(out.shape))
    if most_rows:
        num_shares = kernels.num_shares()
        scratch: tuple[Any, ...] = ()
        if kernel is kernels.grouped_widened_linear:
            num_floats = kernels.grouped_widened_scratch_floats(*x.shape, num_shares)
            scratch = (empty(x, 1, 2 * num_floats).view(torch.float32).view(-1).numpy(),)  # used for this call only
        own = (array(weight), _biases(x, bias, len(weight)))
        call(kernel, array(x), *own, routing.firsts, most_rows, *scratch, num_shares, array(out))


def _grouped_four_bits_linear(
    kernels: Any,
    x: Tensor,
    weight: Mxfp4Matrix | Int4Matrix | Nvfp4Matrix,
    bias: Tensor | None,
    routing: _Routing,
    num_tokens: int,
    out: Tensor,
) -> None:
    matrices = four_bits(weight)
    most_rows = kernels.grouped_four_bits_rows(weight.shape[1], "bfloat16" if x.dtype is torch.bfloat16 else "float32")
    if num_tokens > most_rows:
        views = (x.view(x.shape), None if bias is None else bias.view(bias.shape))
        call(_many_four_bits_rows, kernels, views[0], *matrices, views[1], routing.firsts, most_rows, out.view(out.shape))
    if most_rows:
        biases, shares = _biases(x, bias, weight.shape[0]), (most_rows, kernels.num_shares())
        call(kernels.grouped_four_bits_linear, array(x), *matrices, biases, routing.firsts, *shares, array(out))


def _biases(x: Tensor, bias: Tensor | None, num_experts: int) -> Any:
    """Returns the experts' biases [E, N] as an array of the kernels' element type for x; [E, 0] if bias is None."""
    return np.empty((num_experts, 0), array(x).dtype) if bias is None else array(bias)


def _grouped_byte_linear(
    kernels: Any, x: Tensor, weight: Fp8Matrix | Int8Matrix, bias: Tensor | None, routing: _Routing, num_tokens: int, out: Tensor
) -> None:
    assert bias is None  # no family with biases has its experts in FP8 or int8
    most_rows = kernels.grouped_fp8_rows(weight.shape[1], "bfloat16" if x.dtype is torch.bfloat16 else "float32")
    scales = weight.scales.view(*weight.shape[:2], -1)
    matrices = (weight.values.numpy(), scales.numpy(), weight.group_inputs)
    if num_tokens > most_rows:
        call(_many_byte_rows, kernels, x.view(x.shape), *matrices, routing.firsts, most_rows, out.view(out.shape))
    if most_rows:
        call(kernels.grouped_fp8_linear, array(x), *matrices, routing.firsts, most_rows, kernels.num_shares(), array(out))


def _many_byte_rows(
    kernels: Any, x: Tensor, values: Any, scales: Any, group_inputs: int, firsts: Any, most_rows: int, out: Tensor
) -> None:
    """Multiplies the rows of each expert that has more than most_rows rows with the expert's FP8 or int8 matrix, and writes the
    results to those rows of out; other rows are unchanged. To save memory, the weights of only some outputs at a time are converted
    to x's dtype. values, scales, group_inputs: the fields of all experts' matrices (Fp8Matrix, Int8Matrix). firsts [E + 1]: the
    first row of each expert, and the end of the last one's rows."""
    for expert, own in _many(firsts, most_rows):
        fp8_in_parts(kernels, x[own], values[expert], scales[expert], group_inputs, None, out[own])


def _many_rows(kernels: Any, x: Tensor, weight: Tensor, bias: Tensor | None, firsts: Any, most_rows: int, out: Tensor) -> None:
    """Multiplies the rows of x [P, K] of each expert that has more than most_rows rows with the expert's matrix in weight [E, N,
    K], and writes the results to those rows of out [P, N]; other rows are unchanged. firsts [E + 1]: the first row of each expert,
    and the end of the last one's rows."""
    for expert, own in _many(firsts, most_rows):
        write_product(kernels, x[own], weight[expert], None if bias is None else bias[expert], out[own])


def _many(firsts: Any, most_rows: int) -> Iterator[tuple[int, slice]]:
    """Yields (index of an expert, slice of its rows) for each expert that has more than most_rows rows. firsts [E + 1]: the first
    row of each expert, and the end of the last one's rows."""
    for expert, (first, end) in enumerate(pairwise(firsts.tolist())):
        if end - first > most_rows:
            yield expert, slice(first, end)


def _many_four_bits_rows(
    kernels: Any,
    x: Tensor,
    scales: Any,
    blocks: Any,
    zeros: Any,
    group_inputs: int,
    halves: bool,
    bias: Tensor | None,
    firsts: Any,
    most_rows: int,
    out: Tensor,
) -> None:
    """Multiplies the rows of each expert that has more than most_rows rows with the expert's four-bit matrix, and writes the
    results to those rows of out; other rows are unchanged. To save memory, the weights of only some outputs at a time are converted
    to x's dtype. scales, blocks, zeros, group_inputs, halves: all experts' matrices, in the form that products.four_bits returns.
    firsts [E + 1]: the first row of each expert, and the end of the last one's rows."""
    parts = [of_experts.reshape(len(firsts) - 1, -1) for of_experts in (scales, blocks, zeros)]
    for expert, own in _many(firsts, most_rows):
        own_bias = None if bias is None else bias[expert]
        scale, block, zero = (of_experts[expert] for of_experts in parts)
        four_bits_in_parts(kernels, x[own], scale, block, zero, group_inputs, halves, own_bias, out[own])
