"""Computes the gated delta rule on the GPU (Triton): linear attention whose layers keep one state per sequence instead of keys and
values. Reference implementation: reference.gated_delta.

It is computed in four steps: the convolution over queries, keys and values; the store of the convolution's last inputs; the rule
itself, by one kernel for rows with one new token and another for rows with several; the norm and the gate of each head's output.
The kernel for several tokens solves a triangular system for up to _TOKENS tokens at a time, all of one block. States are float32.
Products with states are computed in float32 in float32 models, and in TF32 (11 significant bits) in others.

Shapes: T tokens, R rows, S slots, B blocks of a row, V value heads, K dimensions of keys, D dimensions of values, C columns of
queries, keys and values, N tokens that the convolution sees. Slot S belongs to no sequence: rows with this slot read and write
nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels.sizes import ceil_div, power_of_two
from engine.ops.ops import DeltaRule

UNIT_NORM_EPS = tl.constexpr(1e-6)  # of queries and keys
ITSELF = tl.constexpr(20.0)  # from here on softplus(x) is x
_TOKENS = 16
_COLUMNS = 256


@triton.jit
def _state_at(table, slot, table_stride, position, layer, block_stride, state_values, BLOCK_TOKENS: tl.constexpr):
    """Returns where the layer's state of a row after `position` begins, as an index in the flat states; -1: this state is not kept.
    table: the block table. slot: the row's index in the block table."""
    block = tl.load(table + slot.to(tl.int64) * table_stride + position // BLOCK_TOKENS).to(tl.int64)
    return tl.where(block < 0, -1, block * block_stride + layer.to(tl.int64) * state_values)


@triton.jit
def _column(
    channel,
    QUERY: tl.constexpr, KEY: tl.constexpr, KEY_STRIDE: tl.constexpr, VALUE: tl.constexpr, VALUE_STRIDE: tl.constexpr,
    KEY_HEADS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Returns the columns of x that hold these channels of the convolution. Channels are numbered through the queries of all key
    heads, then the keys of all key heads, then the values. K: dimensions of a key head. WIDTH: dimensions of all values that belong
    to one key head. QUERY, KEY, VALUE: the columns of x at which the first key head's queries, keys and values begin. KEY_STRIDE,
    VALUE_STRIDE: the number of columns from one key head to the next."""
    keys: tl.constexpr = KEY_HEADS * K
    query = QUERY + channel // K * KEY_STRIDE + channel % K
    key = KEY + (channel - keys) // K * KEY_STRIDE + (channel - keys) % K
    value = VALUE + (channel - 2 * keys) // WIDTH * VALUE_STRIDE + (channel - 2 * keys) % WIDTH
    return tl.where(channel < keys, query, tl.where(channel < 2 * keys, key, value))


@triton.jit(do_not_specialize=["num_slots", "table_stride", "layer"])
def _convolve_kernel(
    x,  # [T, x_stride]
    convolution,  # [C, N]
    mixed,  # [T, C]
    states,  # float32: the arena as this group sees it
    table,  # [S + 1, B]
    token_rows,  # [T]
    slots,  # [R], as the following
    firsts,
    starts,
    num_slots,
    table_stride,
    layer,
    block_stride,
    state_values,
    x_stride,
    C: tl.constexpr, N: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    QUERY: tl.constexpr, KEY: tl.constexpr, KEY_STRIDE: tl.constexpr, VALUE: tl.constexpr, VALUE_STRIDE: tl.constexpr,
    KEY_HEADS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    row = tl.load(token_rows + token)
    slot = tl.load(slots + row)
    if slot >= num_slots:
        return
    first = tl.load(firsts + row)
    place = tl.full((), -1, tl.int64)
    if first > 0:
        place = _state_at(table, slot, table_stride, first - 1, layer, block_stride, state_values, BLOCK_TOKENS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    at = _column(channel, QUERY, KEY, KEY_STRIDE, VALUE, VALUE_STRIDE, KEY_HEADS, K, WIDTH)
    before = token - tl.load(starts + row)
    kept = states + place + state_values - (N - 1) * C + channel
    total = tl.zeros([BLOCK], tl.float32)
    for n in tl.static_range(N):
        weight = tl.load(convolution + channel * N + n, mask=inside, other=0.0).to(tl.float32)
        back = before - (N - 1) + n
        if back >= 0:
            own = x + (token - (N - 1) + n).to(tl.int64) * x_stride + at
            total += tl.load(own, mask=inside, other=0.0).to(tl.float32) * weight
        elif place >= 0:
            total += tl.load(kept + (back + N - 1) * C, mask=inside, other=0.0) * weight
    tl.store(mixed + token.to(tl.int64) * C + channel, (total / (1.0 + tl.exp(-total))).to(mixed.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_slots", "table_stride", "layer"])
def _keep_kernel(
    x,
    states,
    table,
    slots,
    firsts,
    starts,
    contexts,  # [R]
    num_slots,
    table_stride,
    layer,
    block_stride,
    state_values,
    x_stride,
    C: tl.constexpr, N: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    QUERY: tl.constexpr, KEY: tl.constexpr, KEY_STRIDE: tl.constexpr, VALUE: tl.constexpr, VALUE_STRIDE: tl.constexpr,
    KEY_HEADS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Stores the last N - 1 inputs of the convolution in each state of a row that has a block. States are written from the last to
    the first, because the first may lie in the same memory as the state before the step, from which all of them may be computed."""
    row = tl.program_id(0)
    slot, first, context = tl.load(slots + row), tl.load(firsts + row), tl.load(contexts + row)
    if (slot >= num_slots) | (context <= first):
        return
    start = tl.load(starts + row)
    source = tl.full((), -1, tl.int64)
    if first > 0:
        source = _state_at(table, slot, table_stride, first - 1, layer, block_stride, state_values, BLOCK_TOKENS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    at = _column(channel, QUERY, KEY, KEY_STRIDE, VALUE, VALUE_STRIDE, KEY_HEADS, K, WIDTH)
    kept = state_values - (N - 1) * C + channel
    end = context - first
    while end > 0:
        place = _state_at(table, slot, table_stride, first + end - 1, layer, block_stride, state_values, BLOCK_TOKENS)
        if place >= 0:
            for n in tl.static_range(N - 1):  # what is read lies behind what is written, and belongs to the same thread
                back = end - (N - 1) + n
                value = tl.zeros([BLOCK], tl.float32)
                if back >= 0:
                    value = tl.load(x + (start + back).to(tl.int64) * x_stride + at, mask=inside, other=0.0).to(tl.float32)
                elif source >= 0:
                    value = tl.load(states + source + kept + (back + N - 1) * C, mask=inside, other=0.0)
                tl.store(states + place + kept + n * C, value, mask=inside)
        end = (first + end - 1) // BLOCK_TOKENS * BLOCK_TOKENS - first


@triton.jit
def _unit(values, AXIS: tl.constexpr):
    """Returns float32 vectors, which lie along AXIS, divided by their Euclidean lengths."""
    return values * tl.rsqrt(tl.expand_dims(tl.sum(values * values, axis=AXIS), AXIS) + UNIT_NORM_EPS)


@triton.jit
def _decay_of(step, decay, step_bias):
    """Returns the logarithm of the factor by which a state decays, -exp(decay) * softplus(step + step_bias), in float32."""
    step += step_bias
    return -tl.exp(decay) * tl.where(step > ITSELF, step, tl.log(1.0 + tl.exp(tl.minimum(step, ITSELF))))


@triton.jit(do_not_specialize=["num_slots", "table_stride", "layer"])
def _step_kernel(
    mixed,  # [T, C], after the convolution
    gates,  # [T, 2 V]
    decays,  # [V]
    step_biases,  # [V]
    made,  # [T, V D]
    states, table, slots, firsts, starts, contexts,
    num_slots, table_stride, layer, block_stride, state_values,
    C: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    UPDATE: tl.constexpr, STEP: tl.constexpr, HEAD_STRIDE: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    PADDED_K: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Applies the gated delta rule to one value head of a row with one new token: computes BLOCK_D columns of the output and of the
    state's matrix. TOKENS and PRECISION are not read; they are there because _chunk_kernel takes the same arguments."""
    row, head = tl.program_id(0), tl.program_id(1)
    slot, first = tl.load(slots + row), tl.load(firsts + row)
    if (slot >= num_slots) | (tl.load(contexts + row) != first + 1):
        return
    served: tl.constexpr = HEADS // KEY_HEADS
    key_head, token = head // served, tl.load(starts + row).to(tl.int64)
    dim, column = tl.arange(0, PADDED_K), tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_dim, is_column = dim < K, column < D
    own = mixed + token * C + key_head * K + dim
    query = _unit(tl.load(own, mask=is_dim, other=0.0).to(tl.float32), 0) * (K**-0.5)
    key = _unit(tl.load(own + KEY_HEADS * K, mask=is_dim, other=0.0).to(tl.float32), 0)
    value = tl.load(mixed + token * C + 2 * KEY_HEADS * K + head * D + column, mask=is_column, other=0.0).to(tl.float32)
    gate = gates + token * (2 * HEADS) + key_head * HEAD_STRIDE + head % served
    update = 1.0 / (1.0 + tl.exp(-tl.load(gate + UPDATE).to(tl.float32)))
    keeps = tl.exp(_decay_of(tl.load(gate + STEP).to(tl.float32), tl.load(decays + head), tl.load(step_biases + head)))
    cells = head * (K * D) + dim[:, None] * D + column[None, :]
    there = is_dim[:, None] & is_column[None, :]
    matrix = tl.zeros([PADDED_K, BLOCK_D], tl.float32)
    if first > 0:
        source = _state_at(table, slot, table_stride, first - 1, layer, block_stride, state_values, BLOCK_TOKENS)
        matrix = tl.load(states + source + cells, mask=there, other=0.0) * keeps
    written = (value - tl.sum(matrix * key[:, None], axis=0)) * update
    matrix += key[:, None] * written[None, :]
    result = tl.sum(matrix * query[:, None], axis=0)
    tl.store(made + token * (HEADS * D) + head * D + column, result.to(made.dtype.element_ty), mask=is_column)
    place = _state_at(table, slot, table_stride, first, layer, block_stride, state_values, BLOCK_TOKENS)
    if place >= 0:
        tl.store(states + place + cells, matrix, mask=there)


@triton.jit(do_not_specialize=["num_slots", "table_stride", "layer"])
def _chunk_kernel(
    mixed, gates, decays, step_biases, made,
    states, table, slots, firsts, starts, contexts,
    num_slots, table_stride, layer, block_stride, state_values,
    C: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    UPDATE: tl.constexpr, STEP: tl.constexpr, HEAD_STRIDE: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    PADDED_K: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Applies the gated delta rule to one value head of a row with several new tokens, TOKENS at a time: reads queries, keys and
    values from `mixed` and the head's state from `states`, and computes BLOCK_D columns of the outputs (in `made`) and of the
    state's matrix. PRECISION: input_precision of tl.dot. It takes the same arguments as _step_kernel, which serves rows with one
    new token."""
    row, head = tl.program_id(0), tl.program_id(1)
    slot, first = tl.load(slots + row), tl.load(firsts + row)
    num = tl.load(contexts + row) - first
    if (slot >= num_slots) | (num < 2):
        return
    served: tl.constexpr = HEADS // KEY_HEADS
    key_head, start = head // served, tl.load(starts + row)
    dim, column = tl.arange(0, PADDED_K), tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_dim, is_column = dim < K, column < D
    cells = head * (K * D) + dim[:, None] * D + column[None, :]
    there = is_dim[:, None] & is_column[None, :]
    decay, step_bias = tl.load(decays + head), tl.load(step_biases + head)
    matrix = tl.zeros([PADDED_K, BLOCK_D], tl.float32)
    if first > 0:
        source = _state_at(table, slot, table_stride, first - 1, layer, block_stride, state_values, BLOCK_TOKENS)
        matrix = tl.load(states + source + cells, mask=there, other=0.0)
    number = tl.arange(0, TOKENS)
    earlier = number[:, None] > number[None, :]
    at = 0
    while at < num:
        end = tl.minimum(tl.minimum(at + TOKENS, num), ((first + at) // BLOCK_TOKENS + 1) * BLOCK_TOKENS - first)
        is_token = at + number < end
        token = (start + at + number).to(tl.int64)
        own, seen = mixed + token[:, None] * C + key_head * K + dim[None, :], is_token[:, None] & is_dim[None, :]
        query = _unit(tl.load(own, mask=seen, other=0.0).to(tl.float32), 1) * (K**-0.5)
        key = _unit(tl.load(own + KEY_HEADS * K, mask=seen, other=0.0).to(tl.float32), 1)
        where = mixed + token[:, None] * C + 2 * KEY_HEADS * K + head * D + column[None, :]
        value = tl.load(where, mask=is_token[:, None] & is_column[None, :], other=0.0).to(tl.float32)
        gate = gates + token * (2 * HEADS) + key_head * HEAD_STRIDE + head % served
        update = 1.0 / (1.0 + tl.exp(-tl.load(gate + UPDATE, mask=is_token, other=0.0).to(tl.float32)))
        update = tl.where(is_token, update, 0.0)
        step = _decay_of(tl.load(gate + STEP, mask=is_token, other=0.0).to(tl.float32), decay, step_bias)
        since_begin = tl.cumsum(tl.where(is_token, step, 0.0), 0)
        since = tl.exp(tl.minimum(since_begin[:, None] - since_begin[None, :], 0.0))
        system = tl.dot(key, tl.trans(key), input_precision=PRECISION) * since * update[:, None]
        system = tl.where(earlier, system, 0.0)
        read = tl.dot(key, matrix, input_precision=PRECISION)
        written = update[:, None] * (value - tl.exp(since_begin)[:, None] * read)
        for i in range(1, end - at):  # what token i writes depends on what those before it write
            factors = tl.sum(tl.where(number[:, None] == i, system, 0.0), axis=0)
            less = tl.sum(factors[:, None] * written, axis=0)
            written = tl.where(number[:, None] == i, written - less[None, :], written)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * since
        scores = tl.where(number[:, None] >= number[None, :], scores, 0.0)
        result = tl.dot(query, matrix, input_precision=PRECISION) * tl.exp(since_begin)[:, None]
        result += tl.dot(scores, written, input_precision=PRECISION)
        to = made + token[:, None] * (HEADS * D) + head * D + column[None, :]
        tl.store(to, result.to(made.dtype.element_ty), mask=is_token[:, None] & is_column[None, :])
        whole = tl.min(since_begin, axis=0)
        key *= tl.exp(whole - since_begin)[:, None]
        matrix = matrix * tl.exp(whole) + tl.dot(tl.trans(key), written, input_precision=PRECISION)
        if (end == num) | ((first + end) % BLOCK_TOKENS == 0):
            place = _state_at(table, slot, table_stride, first + end - 1, layer, block_stride, state_values, BLOCK_TOKENS)
            if place >= 0:
                tl.store(states + place + cells, matrix, mask=there)
        at = end


@triton.jit
def _gated_norm_kernel(
    x,  # [T, x_stride], of which the gates of the output are read
    made,  # [T, V D]; the result, too
    norm,  # [D]
    eps,
    x_stride,
    HEADS: tl.constexpr, SERVED: tl.constexpr, D: tl.constexpr, GATE: tl.constexpr, VALUE_STRIDE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, PADDED_D: tl.constexpr,
):  # fmt: skip
    narrow: tl.constexpr = made.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head, dim = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS), tl.arange(0, PADDED_D)
    inside = (head < HEADS)[:, None] & (dim < D)[None, :]
    own = made + token * (HEADS * D) + head[:, None] * D + dim[None, :]
    value = tl.load(own, mask=inside, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, axis=1) / D + eps)[:, None]
    weight = tl.load(norm + dim, mask=dim < D, other=0.0).to(tl.float32)
    value = (value.to(narrow).to(tl.float32) * weight[None, :]).to(narrow).to(tl.float32)
    column = GATE + head // SERVED * VALUE_STRIDE + head % SERVED * D
    gate = tl.load(x + token * x_stride + column[:, None] + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(own, (value * (gate / (1.0 + tl.exp(-gate)))).to(narrow), mask=inside)


def gated_delta(
    x: Tensor,
    gates: Tensor,
    rule: DeltaRule,
    states: Tensor,
    layer: int,
    block_tokens: int,
    table: Tensor,
    token_rows: Tensor,
    slots: Tensor,
    firsts: Tensor,
    starts: Tensor,
    contexts: Tensor,
    has_chunks: bool,
    out: Tensor,
) -> None:
    """Computes the gated delta rule of a layer: writes its output to out [T, V D] and updates the states, as reference.gated_delta
    does. Results of tokens that belong to no row are undefined.

    x, gates: the outputs of the layer's two projections. states: [num_blocks, layers, numbers of a state] float32. table [S + 1, B]
    int32: the blocks of each slot; -1: no state is kept. token_rows [T]: the row of each token. slots, firsts, starts, contexts
    [R]: each row's slot, its number of positions before the step, the index of its first token in the step, and its number of
    positions after the step. has_chunks: whether a row may have several new tokens."""
    num_tokens, num_rows, at = len(x), len(slots), rule.columns
    conv_width, served = rule.conv_width, rule.num_value_heads // rule.num_key_heads
    mixed = x.new_empty(num_tokens, conv_width)
    of_rows = (len(table) - 1, table.stride(0), layer, states.stride(0), states.shape[2])
    of_columns = {
        "C": conv_width,
        "N": rule.convolution.shape[1],
        "BLOCK_TOKENS": block_tokens,
        "BLOCK": min(_COLUMNS, power_of_two(conv_width)),
        "QUERY": at.query,
        "KEY": at.key,
        "KEY_STRIDE": at.key_stride,
        "VALUE": at.value,
        "VALUE_STRIDE": at.value_stride,
        "KEY_HEADS": rule.num_key_heads,
        "K": rule.key_dim,
        "WIDTH": served * rule.value_dim,
    }
    parts = ceil_div(conv_width, min(_COLUMNS, power_of_two(conv_width)))
    _convolve_kernel[(num_tokens, parts)](
        x,
        rule.convolution,
        mixed,
        states,
        table,
        token_rows,
        slots,
        firsts,
        starts,
        *of_rows,
        x.stride(0),
        **of_columns,
        num_warps=4,
    )
    rows = (slots, firsts, starts, contexts)
    _keep_kernel[(num_rows, parts)](x, states, table, *rows, *of_rows, x.stride(0), **of_columns, num_warps=4)
    kernels = ((_step_kernel, 32, 4), (_chunk_kernel, 16, 8))  # columns of a program, and its warps: so registers suffice
    for kernel, most, num_warps in kernels if has_chunks else kernels[:1]:
        block_d = min(most, max(16, power_of_two(rule.value_dim)))
        kernel[(num_rows, rule.num_value_heads, ceil_div(rule.value_dim, block_d))](
            mixed,
            gates,
            rule.decay,
            rule.step_bias,
            out,
            states,
            table,
            *rows,
            *of_rows,
            C=conv_width,
            KEY_HEADS=rule.num_key_heads,
            HEADS=rule.num_value_heads,
            K=rule.key_dim,
            D=rule.value_dim,
            UPDATE=at.update,
            STEP=at.step,
            HEAD_STRIDE=at.head_stride,
            BLOCK_TOKENS=block_tokens,
            PADDED_K=max(16, power_of_two(rule.key_dim)),
            BLOCK_D=block_d,
            TOKENS=_TOKENS,
            PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
            num_warps=num_warps,
        )
    padded_d = power_of_two(rule.value_dim)
    block_heads = max(1, min(power_of_two(rule.num_value_heads), 1024 // padded_d))
    _gated_norm_kernel[(num_tokens, ceil_div(rule.num_value_heads, block_heads))](
        x,
        out,
        rule.norm,
        rule.eps,
        x.stride(0),
        HEADS=rule.num_value_heads,
        SERVED=served,
        D=rule.value_dim,
        GATE=at.gate,
        VALUE_STRIDE=at.value_stride,
        BLOCK_HEADS=block_heads,
        PADDED_D=padded_d,
        num_warps=4,
    )
