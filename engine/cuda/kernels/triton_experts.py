"""Computes mixtures of experts on the GPU (Triton), in four steps: each token's experts are chosen; the pairs of a token and an
expert are sorted by expert; they are multiplied by the experts' weights; the results are added up for each token. Reference
implementations: reference.route, reference.route_by_sigmoid, reference.experts.

The host reads nothing back, and grids depend on shapes alone, so a captured graph serves every routing. A product has as many
programs as the most uneven routing needs. Each program finds its tile from the experts' numbers of rows; programs without a tile
end at once.

Shapes: T tokens, W width, E experts, C experts that each token passes through, P = T * C pairs of a token and one of its experts
(pair t * C + c is token t's), K inputs, N outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels import tiles
from engine.cuda.kernels.sizes import ceil_div, power_of_two
from engine.cuda.kernels.triton_four_bits import add_four_bits
from engine.cuda.kernels.triton_fp8 import code_factor, codes_as
from engine.ops.ops import ClampedSwiglu, ExpertMatrix, Fp8Matrix, Int4Matrix, Int8Matrix, Mxfp4Matrix, Nvfp4Matrix, SigmoidRouting

TILE_ROWS = (16, 64)  # the rows of a tile, which one program multiplies, for experts with few rows and for experts with many
_FEW_ROWS = 16  # up to so many rows per expert, on average, tiles have the first size
_SORT_BLOCK = 1024
_KEEP_BLOCK = 256
_COMBINE_BLOCK = 1024


def tile_rows(num_pairs: int, num_experts: int) -> int:
    return TILE_ROWS[0] if num_pairs <= _FEW_ROWS * num_experts else TILE_ROWS[1]


def _padded_experts(num_experts: int) -> int:
    return max(16, power_of_two(num_experts))


@triton.jit(do_not_specialize_on_alignment=["expert_factors"])
def _route_kernel(
    scores,  # [T, COLUMNS]; the first E columns are the router's
    kv_slots,  # [T] int64: below 0 for padding
    chosen,  # [T, C] int32: E for padding
    weights,  # [T, C] float32
    expert_factors,  # [E]: of the weights, if SCALED
    COLUMNS: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    NORMALISED: tl.constexpr,
    BY_SIGMOID: tl.constexpr,
    SCALED: tl.constexpr,
    PADDED_E: tl.constexpr,
    PADDED_C: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at, number = tl.arange(0, PADDED_E), tl.arange(0, PADDED_C)
    left = tl.load(scores + token * COLUMNS + at, mask=at < E, other=float("-inf")).to(tl.float32)
    top = tl.max(left, axis=0)
    if BY_SIGMOID:
        total = 1.0
    elif not NORMALISED:
        total = tl.sum(tl.exp(left - top), axis=0)
    experts = tl.zeros([PADDED_C], tl.int32)
    factors = tl.zeros([PADDED_C], tl.float32)
    for turn in tl.static_range(C):
        best = tl.max(left, axis=0)
        expert = tl.min(tl.where(left == best, at, E - 1), axis=0)  # of NaN, which equals nothing, the last
        experts = tl.where(number == turn, expert, experts)
        weight = 1.0 / (1.0 + tl.exp(-best)) if BY_SIGMOID else tl.exp(best - top)
        factors = tl.where(number == turn, weight, factors)
        left = tl.where(at == expert, float("-inf"), left)
    if NORMALISED:
        total = tl.sum(factors, axis=0)
    if SCALED:
        factors *= tl.load(expert_factors + experts).to(tl.float32)
    experts = tl.where(tl.load(kv_slots + token) < 0, E, experts)
    tl.store(chosen + token * C + number, experts, mask=number < C)
    tl.store(weights + token * C + number, factors / total, mask=number < C)


def route(
    scores: Tensor,
    kv_slots: Tensor,
    num_experts: int,
    normalised: bool,
    chosen: Tensor,
    weights: Tensor,
    by_sigmoid: bool = False,
    factors: Tensor | None = None,
) -> None:
    """Chooses each token's experts, as reference.route does. Fills chosen [T, C] int32 with the experts' numbers and weights [T, C]
    float32 with their weights; padding gets the expert number E.

    scores [T, >= E]: columns from E on are not read. kv_slots [T] int64: below 0 for padding.
    normalised: the weights of a token's experts add up to 1; False: they are the softmax over all experts. by_sigmoid: the weights
    are the sigmoids of the scores instead.
    factors [E]: by which the experts' weights are multiplied at last; None: they are not."""
    num_tokens, num_chosen = chosen.shape
    _route_kernel[(num_tokens,)](
        scores,
        kv_slots,
        chosen,
        weights,
        scores if factors is None else factors,
        COLUMNS=scores.shape[1],
        E=num_experts,
        C=num_chosen,
        NORMALISED=normalised and not by_sigmoid,
        BY_SIGMOID=by_sigmoid,
        SCALED=factors is not None,
        PADDED_E=_padded_experts(num_experts),
        PADDED_C=power_of_two(num_chosen),
        num_warps=1,
    )


@triton.jit
def _sigmoid_route_kernel(
    logits,  # [T, E] float32
    correction,  # [E] float32
    kv_slots,  # [T] int64: below 0 for padding
    chosen,  # [T, C] int32: E for padding
    weights,  # [T, C] float32
    factor,
    E: tl.constexpr,
    C: tl.constexpr,
    G: tl.constexpr,
    CHOSEN_G: tl.constexpr,
    NORMALISED: tl.constexpr,
    BY_SOFTMAX: tl.constexpr,
    PADDED_E: tl.constexpr,
    PADDED_C: tl.constexpr,
    PADDED_G: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at, number = tl.arange(0, PADDED_E), tl.arange(0, PADDED_C)
    if BY_SOFTMAX:
        own_logits = tl.load(logits + token * E + at, mask=at < E, other=float("-inf"))
        shares = tl.exp(own_logits - tl.max(own_logits, axis=0))
        scores = shares / tl.sum(shares, axis=0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-tl.load(logits + token * E + at, mask=at < E, other=0.0)))
    left = tl.where(at < E, scores + tl.load(correction + at, mask=at < E, other=0.0), float("-inf"))
    if CHOSEN_G < G:
        own_group, group_at = at // (E // G), tl.arange(0, PADDED_G)
        of_groups = tl.full([PADDED_G], float("-inf"), tl.float32)
        for group in range(G):
            own = tl.where(own_group == group, left, float("-inf"))
            first = tl.max(own, axis=0)
            merit = first
            if not BY_SOFTMAX:
                first_at = tl.min(tl.where(own == first, at, E - 1), axis=0)
                merit += tl.max(tl.where(at == first_at, float("-inf"), own), axis=0)
            of_groups = tl.where(group_at == group, merit, of_groups)
        allowed = tl.zeros([PADDED_E], tl.int32)
        for _turn in range(CHOSEN_G):
            highest = tl.max(of_groups, axis=0)
            highest_at = tl.min(tl.where(of_groups == highest, group_at, G - 1), axis=0)
            allowed = tl.where(own_group == highest_at, 1, allowed)
            of_groups = tl.where(group_at == highest_at, float("-inf"), of_groups)
        left = tl.where(allowed == 1, left, float("-inf"))
    experts = tl.zeros([PADDED_C], tl.int32)
    factors = tl.zeros([PADDED_C], tl.float32)
    for turn in tl.static_range(C):
        best = tl.max(left, axis=0)
        expert = tl.min(tl.where(left == best, at, E - 1), axis=0)  # of NaN, which equals nothing, the last
        experts = tl.where(number == turn, expert, experts)
        factors = tl.where(number == turn, tl.sum(tl.where(at == expert, scores, 0.0), axis=0), factors)
        left = tl.where(at == expert, float("-inf"), left)
    if NORMALISED:
        factors /= tl.sum(factors, axis=0) + 1e-20
    experts = tl.where(tl.load(kv_slots + token) < 0, E, experts)
    tl.store(chosen + token * C + number, experts, mask=number < C)
    tl.store(weights + token * C + number, factors * factor, mask=number < C)


def route_by_sigmoid(
    logits: Tensor, kv_slots: Tensor, rule: SigmoidRouting, normalised: bool, chosen: Tensor, weights: Tensor
) -> None:
    """Chooses each token's experts from logits [T, E] float32 by `rule`, as reference.route_by_sigmoid does. Fills chosen [T, C]
    int32 with the experts' numbers and weights [T, C] float32 with their weights; padding, whose kv_slots [T] are below 0, gets the
    expert number E."""
    num_tokens, num_chosen = chosen.shape
    num_experts = len(rule.correction)
    _sigmoid_route_kernel[(num_tokens,)](
        logits,
        rule.correction,
        kv_slots,
        chosen,
        weights,
        rule.factor,
        E=num_experts,
        C=num_chosen,
        G=rule.num_groups,
        CHOSEN_G=rule.num_chosen_groups,
        NORMALISED=normalised,
        BY_SOFTMAX=rule.by_softmax,
        PADDED_E=_padded_experts(num_experts),
        PADDED_C=power_of_two(num_chosen),
        PADDED_G=power_of_two(rule.num_groups),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["counts"])
def _sort_kernel(
    chosen,  # [P] int32
    firsts,  # [E + 1] int32
    pairs,  # [P] int32
    counts,  # [E] int64: each expert's number of pairs is added, if COUNTED
    num_pairs,
    E: tl.constexpr,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert, at = tl.program_id(0), tl.arange(0, BLOCK)
    lower, own = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        other = tl.load(chosen + start + at, mask=start + at < num_pairs, other=E)
        lower += (other < expert).to(tl.int32)
        own += (other == expert).to(tl.int32)
    first, num_own = tl.sum(lower, axis=0), tl.sum(own, axis=0)
    tl.store(firsts + expert, first)
    if expert == E - 1:
        tl.store(firsts + E, first + num_own)
    if COUNTED:  # no other program, and no other step at the same time, adds to this expert's
        tl.store(counts + expert, tl.load(counts + expert) + num_own)
    for start in range(0, num_pairs, BLOCK):
        is_own = tl.load(chosen + start + at, mask=start + at < num_pairs, other=E) == expert
        place = tl.cumsum(is_own.to(tl.int32), axis=0)
        tl.store(pairs + first + place - 1, start + at, mask=is_own)
        first += tl.sum(is_own.to(tl.int32), axis=0)


def sort(chosen: Tensor, firsts: Tensor, pairs: Tensor, block: int = _SORT_BLOCK, counts: Tensor | None = None) -> None:
    """Sorts the pairs of a token and an expert by expert; pairs of padding are left out.

    pairs [P] int32 receives the numbers of expert 0's pairs, then of expert 1's, and so on, each in ascending order. firsts [E + 1]
    int32 receives the index in `pairs` at which each expert's pairs begin, then the number of all pairs.
    block: how many pairs a program compares at a time. counts [E] int64: each expert's number of pairs is added to it; None:
    nothing is counted."""
    num_experts, counted = len(firsts) - 1, counts is not None
    own = (chosen, firsts, pairs, firsts if counts is None else counts, chosen.numel())
    _sort_kernel[(num_experts,)](*own, E=num_experts, COUNTED=counted, BLOCK=block, num_warps=4)


@triton.jit(do_not_specialize=["num_pairs"])
def _keep_kernel(
    chosen,  # [P] int32
    kv_slots,  # [T] int64
    turns,  # [E, 3] int32
    num_pairs,
    E: tl.constexpr,
    C: tl.constexpr,
    NUM_OWN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < num_pairs
    expert = tl.load(chosen + pair, mask=inside, other=E)
    routed = inside & (expert < E)
    row = turns + expert * 3
    holders, number = tl.load(row, mask=routed, other=1), tl.load(row + 1, mask=routed, other=-1)
    slot = tl.load(kv_slots + pair // C, mask=routed, other=0)
    index = tl.load(row + 2, mask=routed, other=NUM_OWN)
    tl.store(chosen + pair, tl.where(slot % holders == number, index, NUM_OWN), mask=inside)


def keep_own_pairs(chosen: Tensor, kv_slots: Tensor, turns: Tensor, num_own: int) -> None:
    """Replaces the experts' numbers in chosen [T, C] int32 by their indices among the num_own experts that this rank holds. Pairs
    that other ranks compute, and padding (expert E), get the number num_own. If several ranks hold an expert, the token's KV slot
    (kv_slots [T] int64) decides which of them computes the pair. turns [E, 3] int32: for each expert the number of ranks that hold
    it, this rank's index among these, and the expert's index among this rank's experts. Reference implementation:
    reference.own_pairs."""
    num_pairs, num_chosen = chosen.numel(), chosen.shape[1]
    sizes = {"E": len(turns), "C": num_chosen, "NUM_OWN": num_own, "BLOCK": _KEEP_BLOCK}
    _keep_kernel[(ceil_div(num_pairs, _KEEP_BLOCK),)](chosen, kv_slots, turns, num_pairs, **sizes, num_warps=4)


@triton.jit
def _activated(gate, up, limit, alpha, narrow: tl.constexpr, CLAMPED: tl.constexpr, GELU: tl.constexpr):
    """Returns the activation of the products `gate` and `up` in float32, after rounding both to the dtype `narrow`: silu(gate) *
    up; with GELU gelu(gate) * up; with CLAMPED (up + 1) * gate * sigmoid(alpha * gate), where gate is limited to at most `limit`,
    and up to values from -limit to limit."""
    gate, up = gate.to(narrow).to(tl.float32), up.to(narrow).to(tl.float32)
    if CLAMPED:
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
        return (up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate)))
    if GELU:  # its form with tanh, as a sigmoid
        return (gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))).to(narrow).to(tl.float32) * up
    return (gate / (1.0 + tl.exp(-gate))).to(narrow).to(tl.float32) * up


@triton.jit
def _grouped_kernel(
    x,  # [T, K] if GATED, by token; else [P, K], by place among the sorted pairs
    weight,  # [E, 2 N, K] if GATED, else [E, N, K]; bytes of two weights if FOUR_BITS
    weights,  # [P] float32 by pair: factors of what is read, if WEIGHED
    scales,  # [E, 2 N, G] or [E, N, G]; not read if there are none
    zeros,  # likewise, read if ZEROS
    factors,  # [E, 2 N] or [E, N] float32: of outputs, read if E4M3
    bias,  # [E, 2 N] or [E, N], read if BIASED
    firsts,  # [E + 1] int32
    pairs,  # [P] int32
    out,  # [P, N]: by place among the sorted pairs if GATED, else by pair
    limit,  # of the clamped activation, as is alpha
    alpha,
    E: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    GELU: tl.constexpr,
    BIASED: tl.constexpr,
    FOUR_BITS: tl.constexpr,  # weights are MXFP4, NVFP4 or INT4
    INT4: tl.constexpr,
    ZEROS: tl.constexpr,
    E4M3: tl.constexpr,  # scales are codes: weights are NVFP4
    WEIGHED: tl.constexpr,
    PER_OUTPUT: tl.constexpr,  # elements from an output's weights to the next one's, of plain weights
    PER_INPUT: tl.constexpr,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PADDED_E: tl.constexpr,
    WIDEN: tl.constexpr,
    G: tl.constexpr,  # scales of an output; 0: there are none
    GROUP: tl.constexpr,  # inputs that share a scale
):
    tile, at = tl.program_id(0), tl.arange(0, PADDED_E)
    begins = tl.load(firsts + at, mask=at < E, other=0)
    ends = tl.load(firsts + 1 + at, mask=at < E, other=0)
    num_tiles = (ends - begins + M - 1) // M  # for each expert, whose tiles come after those of the experts before it
    is_before = tl.cumsum(num_tiles, axis=0) <= tile
    expert = tl.sum(is_before.to(tl.int32), axis=0)
    if expert >= E:  # this routing has fewer tiles than there are programs
        return
    row = tl.load(firsts + expert) + (tile - tl.sum(tl.where(is_before, num_tiles, 0), axis=0)) * M + tl.arange(0, M)
    there = row < tl.load(firsts + expert + 1)
    pair = tl.load(pairs + row, mask=there, other=0)
    if GATED:
        x_row, out_row = pair // C, row
    else:
        x_row, out_row = row, pair
    output, inner = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    rows_at = x + x_row.to(tl.int64)[:, None] * K
    first_output = expert.to(tl.int64) * ((2 if GATED else 1) * N)
    # gates and ups alternate where the activation is the clamped one, else an expert's gates come before its ups
    step: tl.constexpr = 2 if CLAMPED else 1
    to_up: tl.constexpr = 1 if CLAMPED else N
    columns_at = weight + first_output * K + (output * step)[None, :] * PER_OUTPUT
    factors_at = scales + (first_output + output * step) * G
    total = tl.zeros([M, BLOCK_N], tl.float32)
    total_up = total
    for start in range(0, K, BLOCK_K):
        if FOUR_BITS:
            own, seen = first_output + output * step, output < N
            total = add_four_bits(
                rows_at, weight, scales, zeros, own, there, seen, start, total,
                K, G, GROUP, BLOCK_N, BLOCK_K, WIDEN, INT4, ZEROS, E4M3,
            )  # fmt: skip
            if GATED:
                own += to_up
                total_up = add_four_bits(
                    rows_at, weight, scales, zeros, own, there, seen, start, total_up,
                    K, G, GROUP, BLOCK_N, BLOCK_K, WIDEN, INT4, ZEROS, E4M3,
                )  # fmt: skip
        else:
            at_k = start + inner
            rows = tl.load(rows_at + at_k[None, :], mask=there[:, None] & (at_k < K)[None, :], other=0.0)
            seen = (output < N)[None, :] & (at_k < K)[:, None]
            columns = tl.load(columns_at + at_k[:, None] * PER_INPUT, mask=seen, other=0.0)
            if WIDEN:
                rows = rows.to(tl.float32)
            if G > 0:
                factor = tl.load(factors_at + start // GROUP, mask=output < N, other=0.0) * code_factor(columns.dtype)
                total += tl.dot(rows, codes_as(columns, rows.dtype), input_precision="ieee") * factor[None, :]
            else:
                total = tl.dot(rows, columns.to(rows.dtype), total, input_precision="ieee")
            if GATED:
                columns = tl.load(columns_at + to_up * PER_OUTPUT + at_k[:, None] * PER_INPUT, mask=seen, other=0.0)
                if G > 0:
                    factor = tl.load(factors_at + to_up * G + start // GROUP, mask=output < N, other=0.0) * code_factor(
                        columns.dtype
                    )
                    total_up += tl.dot(rows, codes_as(columns, rows.dtype), input_precision="ieee") * factor[None, :]
                else:
                    total_up = tl.dot(rows, columns.to(rows.dtype), total_up, input_precision="ieee")
    narrow: tl.constexpr = out.dtype.element_ty
    if E4M3:
        of_outputs = factors + first_output + output * step
        total *= tl.load(of_outputs, mask=output < N, other=0.0)[None, :]
        if GATED:
            total_up *= tl.load(of_outputs + to_up, mask=output < N, other=0.0)[None, :]
    if WEIGHED:
        factors_of_rows = tl.load(weights + pair, mask=there, other=0.0)[:, None]
        total *= factors_of_rows
        total_up *= factors_of_rows
    if BIASED:
        biases_at = bias + first_output + output * step
        total += tl.load(biases_at, mask=output < N, other=0.0).to(tl.float32)[None, :]
        if GATED:
            total_up += tl.load(biases_at + to_up, mask=output < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        total = _activated(total, total_up, limit, alpha, narrow, CLAMPED, GELU)
    place = out + out_row.to(tl.int64)[:, None] * N + output[None, :]
    tl.store(place, total.to(narrow), mask=there[:, None] & (output < N)[None, :])


def _parts(weight: ExpertMatrix) -> tuple[Tensor, Tensor, int, int]:
    """Returns the experts' weights as (values, scales, number of scales of an output, number of inputs that share a scale). For
    weights without scales returns (values, values, 0, 1)."""
    if isinstance(weight, Tensor):
        return weight, weight, 0, 1
    if isinstance(weight, Int8Matrix):
        return weight.values, weight.scales, 1, weight.values.shape[2]
    num_scales = weight.scales.shape[2]
    if isinstance(weight, Mxfp4Matrix):
        return weight.blocks, weight.scales, num_scales, 2 * weight.blocks.shape[3]  # two a byte
    values = weight.values if isinstance(weight, Fp8Matrix) else weight.packed
    return values, weight.scales, num_scales, weight.group_inputs


def grouped_linear(
    x: Tensor,
    weight: ExpertMatrix,
    firsts: Tensor,
    pairs: Tensor,
    num_chosen: int,
    gated: bool,
    tile: int,
    widen: bool,
    out: Tensor,
    bias: Tensor | None = None,
    clamped: ClampedSwiglu | None = None,
    weights: Tensor | None = None,
    gelu: bool = False,
) -> None:
    """Multiplies the sorted pairs (see `sort`) by their experts' weights, and writes the results to out [P, N]. Rows of out that
    belong to no pair are undefined.

    gated: True for an expert's first product: x is [T, K], and each pair reads its token's row; weight [E, 2 N, K] holds gates and
    ups; out receives silu(gate) * up in the order of the sorted pairs. False for its second product: x [P, K] is in the order of
    the sorted pairs, weight is [E, N, K], and out is in the order of the pairs' numbers.
    num_chosen: C. tile: one of TILE_ROWS. widen: products are computed in float32 (where kernels are interpreted).
    bias: [E, 2 N] if gated, else [E, N]; None: there is none.
    clamped: the activation that replaces silu, for weights in which gates and ups alternate; None: an expert's gates come before
    its ups.
    weights [T, C] float32, if gated: factors of the pairs' products, applied before the bias; None: there are none.
    gelu: the activation is gelu(gate) * up, in the form of gelu with tanh."""
    num_experts, num_pairs = len(firsts) - 1, len(pairs)
    num_inputs, num_outputs = x.shape[1], out.shape[1]
    wide_items, few = x.element_size() == 4, tile == TILE_ROWS[0]
    block_n, block_k = (32, 64 if wide_items else 128) if few else (64, 32 if wide_items else 64)
    of_int4, of_bytes = isinstance(weight, Int4Matrix), isinstance(weight, Fp8Matrix | Int8Matrix)
    of_nvfp4 = isinstance(weight, Nvfp4Matrix)
    of_four_bits = of_int4 or of_nvfp4 or isinstance(weight, Mxfp4Matrix)
    two_at_once = (of_int4 or of_nvfp4) and gated
    if two_at_once and not wide_items:  # registers do not hold more inputs of two matrices that are widened at once
        block_n, block_k = (64 if few else 128), 64
    if gated and not few and not wide_items and isinstance(weight, Fp8Matrix | Mxfp4Matrix) and _adds_up_in_registers():
        block_n = 32  # of two matrices; 64 would take more registers than there are
    values, scales, num_scales, group = _parts(weight)
    zeros = weight.zeros if isinstance(weight, Int4Matrix) else None
    most_tiles = min(num_experts, num_pairs) + num_pairs // tile
    _grouped_kernel[(most_tiles, ceil_div(num_outputs, block_n))](
        x,
        values,
        x if weights is None else weights,
        scales,
        values if zeros is None else zeros,
        weight.factors if isinstance(weight, Nvfp4Matrix) else scales,
        x if bias is None else bias,
        firsts,
        pairs,
        out,
        0.0 if clamped is None else clamped.limit,
        0.0 if clamped is None else clamped.alpha,
        E=num_experts,
        C=num_chosen,
        K=num_inputs,
        N=num_outputs,
        GATED=gated,
        CLAMPED=clamped is not None,
        GELU=gelu,
        BIASED=bias is not None,
        FOUR_BITS=of_four_bits,
        INT4=of_int4,
        ZEROS=zeros is not None,
        E4M3=of_nvfp4,
        WEIGHED=weights is not None,
        PER_OUTPUT=weight.stride(1) if isinstance(weight, Tensor) else num_inputs,
        PER_INPUT=weight.stride(2) if isinstance(weight, Tensor) else 1,
        M=tile,
        BLOCK_N=block_n,
        BLOCK_K=min(block_k, max(32 if of_four_bits else 16, power_of_two(num_inputs))),
        PADDED_E=_padded_experts(num_experts),
        WIDEN=widen,
        G=num_scales,
        GROUP=group,
        num_warps=8 if not few and (of_bytes or two_at_once) else 4,  # more threads, because widening codes needs registers
        num_stages=2 if wide_items else 3,
    )


def _adds_up_in_registers() -> bool:
    """Returns whether the GPU's matrix instructions take both inputs from registers and leave the sums there. Those of Hopper read
    inputs from shared memory; those of Blackwell's large GPUs have a memory of their own for sums."""
    gpu = tiles.capability()
    return gpu > 0 and tiles.architecture(gpu) not in (tiles.HOPPER, tiles.B200)


@triton.jit(do_not_specialize=["first_own", "num_own"])
def _weighted_sum_kernel(
    made,  # [T, C, W]
    weights,  # [T, C] float32
    kv_slots,  # [T] int64
    gates,  # [T, COLUMNS], the last column is read if GATED
    shared,  # [T, W], read if SHARED
    chosen,  # [T, C] int32, read if SOME
    first_own,  # read if SOME, as is num_own
    num_own,
    out,  # [T, W]
    COLUMNS: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    WEIGHED: tl.constexpr,
    SOME: tl.constexpr,  # only the pairs of experts first_own to first_own + num_own - 1 were made
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, total = at < W, tl.zeros([BLOCK], tl.float32)
    narrow: tl.constexpr = out.dtype.element_ty
    if tl.load(kv_slots + token) < 0:
        tl.store(out + token * W + at, total.to(narrow), mask=inside)
        return
    for number in tl.static_range(C):
        pair = token * C + number
        there = inside
        if SOME:
            expert = tl.zeros([BLOCK], tl.int32) + (tl.load(chosen + pair) - first_own)
            there = inside & (expert >= 0) & (expert < num_own)
        one = tl.load(made + pair * W + at, mask=there, other=0.0).to(tl.float32)
        total += one * tl.load(weights + pair) if WEIGHED else one
    if SHARED:
        also = tl.load(shared + token * W + at, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            also /= 1.0 + tl.exp(-tl.load(gates + token * COLUMNS + COLUMNS - 1).to(tl.float32))
        total += also
    tl.store(out + token * W + at, total.to(narrow), mask=inside)


def combine(
    made: Tensor,
    weights: Tensor,
    kv_slots: Tensor,
    gates: Tensor | None,
    shared: Tensor | None,
    out: Tensor,
    weighed: bool = True,
    chosen: Tensor | None = None,
    own: range = range(0),
) -> None:
    """Adds up the experts' results for each token: writes to out [T, W] the sum of made [P, W] over the token's pairs, each times
    its weight in weights [T, C], plus shared [T, W] times a gate. Padding (kv_slots [T] below 0) gets 0.

    gates [T, ...]: a token's gate is the sigmoid of the last number in its row; None: every gate is 1. shared: None: nothing is
    added. weighed: False: the pairs are added without weights.
    chosen [T, C] int32: the pairs' experts, of which only those in `own` are added; None: all are."""
    num_tokens, width = out.shape
    block = min(_COMBINE_BLOCK, power_of_two(width))
    _weighted_sum_kernel[(num_tokens, ceil_div(width, block))](
        made,
        weights,
        kv_slots,
        made if gates is None else gates,
        made if shared is None else shared,
        made if chosen is None else chosen,
        own.start,
        len(own),
        out,
        COLUMNS=0 if gates is None else gates.shape[1],
        C=weights.shape[1],
        W=width,
        WEIGHED=weighed,
        SOME=chosen is not None,
        SHARED=shared is not None,
        GATED=gates is not None,
        BLOCK=block,
        num_warps=4,
    )


def empty_routing(
    num_tokens: int, num_chosen: int, num_experts: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns uninitialised tensors for `route` and `sort`: chosen [T, C] int32, weights [T, C] float32, firsts [E + 1] int32 and
    pairs [P] int32."""
    chosen = torch.empty(num_tokens, num_chosen, dtype=torch.int32, device=device)
    firsts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    return chosen, torch.empty_like(chosen, dtype=torch.float32), firsts, torch.empty_like(chosen.view(-1))
