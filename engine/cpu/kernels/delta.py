"""Computes the gated delta rule (linear attention, https://arxiv.org/abs/2412.06464) on the CPU (Numba). Its layers keep a state of
each sequence instead of keys and values. Tokens are computed one by one, while a head's matrix stays in the first-level cache.
Reference implementation: reference.gated_delta.

There are two kernels. delta_convolve computes the convolution over queries, keys and values, and keeps its last columns in the
state. delta_rule computes the rule itself, with the norm and the gate of its output. Each has a serial form and one that is
parallel over rows and heads.

Shapes: T tokens, R rows, B blocks of a row, K key heads, V value heads, C columns of queries, keys and values, N tokens that the
convolution reads, D dimensions of values. A state is [V, dimensions of keys, D], then the last N - 1 columns [N - 1, C], in
float32."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, float64, int32, int64, njit, prange, types, void

from engine.cpu.kernels.bits import FASTMATH, exp, named, widen
from engine.cpu.kernels.lanes import exp_for_bfloat16, lanes_of, load, rounded, store, total_of
from engine.cpu.kernels.vectors import LANES

_OPTIONS: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy", "cache": True, "nogil": True}
_HELPER: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy"}
_UNIT_NORM_EPS = float32(1e-6)  # of queries and keys
_IS_ITSELF = float32(20.0)  # from here on softplus(x) is x

# Both kernels take these arguments in this order: layers, layer, numbers of a layer's state, block_tokens; block_table; starts,
# num_new, contexts; sizes; columns.
_PLACES = (*(int64,) * 4, int32[:, ::1], *(int32[::1],) * 3, int64[::1], int64[::1])


def delta_convolve_signature(element: types.Type) -> Any:
    return void(element[:, ::1], element[:, ::1], float32[::1], *_PLACES, float32[:, ::1])


def delta_rule_signature(element: types.Type) -> Any:
    rows, heads = element[:, ::1], float32[::1]
    return void(rows, rows, float32[:, ::1], heads, heads, element[::1], float64, float32[::1], *_PLACES, rows)


@njit(inline="always", fastmath=FASTMATH)
def _silu(x: Any, like: Any) -> Any:
    """Returns silu(x) = x * sigmoid(x) of 16 float32, as exact as elements of `like`'s type (float32 or bfloat16 bits) can
    represent."""
    power = exp_for_bfloat16(float32(0.0) - x) if like.itemsize == 2 else exp(float32(0.0) - x)
    return x / (power + float32(1.0))


@njit(**_HELPER)
def _place(block: int, layers: int, layer: int, state_values: int) -> int:
    """Returns the index in the flat array of states where the state of a layer in a block begins. state_values: number of values of
    one state."""
    return (int64(block) * layers + layer) * state_values


@njit(inline="always", fastmath=FASTMATH)
def _convolve_lanes(
    x: Any, own: int, first: int, width: int, weights: Any, seen: Any, i: int, count: int, mixed: Any, to: int
) -> None:
    """Convolves `count` columns (16 at most), from number i on, of one token, and writes silu of the results to `mixed` from index
    `to` + i on.

    own: the index in x of the token's first column. first: how many of the N - 1 tokens before it are in x. seen [N - 1, width]:
    the columns of the N - 1 tokens before the step, from which the other earlier tokens are read. weights: [N, width], flat."""
    before = weights.shape[0] // width - 1
    total = load(x, own + i, count) * load(weights, before * width + i, count)
    for n in range(before):
        if n >= before - first:
            total += load(x, own - (before - n) * x.shape[1] + i, count) * load(weights, n * width + i, count)
        else:
            total += load(seen, (n + first) * width + i, count) * load(weights, n * width + i, count)
    store(mixed, to + i, count, rounded(_silu(total, x), x[0, 0]))


@njit(**_HELPER)
def _convolve(
    x: Any,
    convolution: Any,
    states: Any,
    layers: int,
    layer: int,
    state_values: int,
    block_tokens: int,
    blocks: Any,  # [B]: the row's own
    start: int,
    num: int,
    context: int,
    at: int,  # the first of these columns in x
    channel: int,  # and of them all
    width: int,
    mixed: Any,
) -> None:
    """Computes the causal convolution of one row's tokens in x [T, columns] for `width` channels, and writes silu of the results to
    mixed. Also writes these channels of the last N - 1 tokens to each state for which the row has a block.

    convolution [C, N]: the weights of the C channels. at: the first of the columns of x that are read. channel: the first of these
    channels. start: the row's first token in the step. num: its number of tokens in the step. context: its number of positions
    after the step. states, layers, layer, state_values, block_tokens: where the states lie (see _delta_convolve)."""
    conv_width, before = mixed.shape[1], convolution.shape[1] - 1
    whole, first = width - width % LANES, context - num
    weights, seen = np.empty((before + 1) * width, np.float32), np.zeros(before * width, np.float32)
    for n in range(before + 1):
        for i in range(width):
            weights[n * width + i] = widen(convolution[channel + i, n])
    kept = state_values - before * conv_width + channel
    if first > 0:
        place = _place(blocks[(first - 1) // block_tokens], layers, layer, state_values) + kept
        for n in range(before):
            for i in range(width):
                seen[n * width + i] = states[place + n * conv_width + i]
    for t in range(num):
        own, to = (start + t) * x.shape[1] + at, (start + t) * conv_width + channel
        for i in range(0, whole, LANES):
            _convolve_lanes(x, own, min(t, before), width, weights, seen, i, LANES, mixed, to)
        if whole < width:
            _convolve_lanes(x, own, min(t, before), width, weights, seen, whole, width - whole, mixed, to)
    for index in range(first // block_tokens, (context - 1) // block_tokens + 1):
        if blocks[index] < 0:
            continue
        place = _place(blocks[index], layers, layer, state_values) + kept
        end = min((index + 1) * block_tokens, context) - first  # the row's tokens in the step before this state
        for n in range(before):
            t = end - before + n
            for i in range(width):
                value = widen(x[start + t, at + i]) if t >= 0 else seen[(before + t) * width + i]
                states[place + n * conv_width + i] = value


def _delta_convolve(
    x: Any,  # [T, C + V D]
    convolution: Any,  # [C, N]
    states: Any,  # float32: the arena as this group sees it
    layers: int,
    layer: int,
    state_values: int,
    block_tokens: int,
    block_table: Any,  # [R, B]
    starts: Any,  # [R]
    num_new: Any,  # [R]
    contexts: Any,  # [R]
    sizes: Any,  # K, V, dimensions of keys, D
    columns: Any,  # ops.DeltaColumns
    mixed: Any,  # [T, C] float32: silu of the convolved columns, rounded to x's dtype, head by head
) -> None:
    key_heads, key_dim = sizes[0], sizes[2]
    served = sizes[1] // key_heads * sizes[3]
    for item in prange(num_new.shape[0] * key_heads):
        row, head = item // key_heads, item % key_heads
        num = num_new[row]
        if num > 0:
            blocks = block_table[row]
            for part in range(3):  # queries, keys, values
                at = columns[part] + head * columns[2] if part < 2 else columns[3] + head * columns[5]
                channel = (part * key_heads + head) * key_dim if part < 2 else 2 * key_heads * key_dim + head * served
                width = key_dim if part < 2 else served
                _convolve(
                    x,
                    convolution,
                    states,
                    layers,
                    layer,
                    state_values,
                    block_tokens,
                    blocks,
                    starts[row],
                    num,
                    contexts[row],
                    at,
                    channel,
                    width,
                    mixed,
                )


@njit(**_HELPER)
def _unit(values: Any, at: int, factor: Any, out: Any) -> None:
    """Writes to out [n] the n values from index `at` on, divided by their Euclidean length, times factor."""
    squares = lanes_of(float32(0.0))
    for i in range(0, out.shape[0], LANES):
        part = load(values, at + i, out.shape[0] - i)
        squares += part * part
    factor /= np.sqrt(total_of(squares) + _UNIT_NORM_EPS)
    for i in range(0, out.shape[0], LANES):
        store(out, i, out.shape[0] - i, load(values, at + i, out.shape[0] - i) * factor)


@njit(inline="always", fastmath=FASTMATH)
def _advance_lanes(
    states: Any, place: int, width: int, query: Any, key: Any, mixed: Any, at: int, update: Any, keeps: Any, i: int, count: int
) -> Any:
    """Advances `count` columns, from number i on, of a head's matrix [len(key), width] in the state by one token, in place. The
    matrix begins at index `place` of states. Returns, in lanes, the token's query times these columns.

    at: the index in mixed of the token's values of this head. keeps: the factor by which the matrix decays. update: the factor of
    the change that the token writes."""
    read = lanes_of(float32(0.0))
    for d in range(key.shape[0]):
        read += load(states, place + d * width + i, count) * key[d]
    written = (load(mixed, at + i, count) - read * keeps) * update
    made = lanes_of(float32(0.0))
    for d in range(key.shape[0]):
        value = load(states, place + d * width + i, count) * keeps + written * key[d]
        store(states, place + d * width + i, count, value)
        made += value * query[d]
    return made


@njit(inline="always", fastmath=FASTMATH)
def _finish_lanes(made: Any, factor: Any, norm: Any, x: Any, gate: int, i: int, count: int, out: Any, to: int) -> None:
    normed = rounded(load(made, i, count) * factor, norm[0])
    normed = rounded(normed * load(norm, i, count), norm[0])
    store(out, to + i, count, normed * _silu(load(x, gate + i, count), x))


@njit(**_HELPER)
def _sigmoid(x: Any) -> Any:
    return float32(1.0) / (float32(1.0) + np.exp(-x))


@njit(**_HELPER)
def _row_of_head(
    x: Any,
    gates: Any,
    mixed: Any,
    decay: Any,  # of the head, as is step_bias
    step_bias: Any,
    norm: Any,
    eps: float,
    states: Any,
    layers: int,
    layer: int,
    state_values: int,
    block_tokens: int,
    blocks: Any,
    start: int,
    num: int,
    context: int,
    head: int,
    sizes: Any,
    columns: Any,
    out: Any,
) -> None:
    """Computes the outputs of one row's tokens for one value head by the gated delta rule, and writes the row's new states. The
    queries, keys and values are read from mixed [T, C], the rates and decays from gates [T, 2 V], the output's gates from x.

    decay, step_bias: numbers of this head. norm [D]: weights of the norm of the outputs. blocks [B]: the row's block table. start,
    num, context: the row's first token in the step, its number of tokens in the step, and its number of positions after the step.
    The parameters that are not explained here are commented in _delta_rule."""
    key_dim, width = sizes[2], sizes[3]
    served = sizes[1] // sizes[0]
    key_head, number = head // served, head % served
    query, key, made = np.empty(key_dim, np.float32), np.empty(key_dim, np.float32), np.empty(width, np.float32)
    first, whole, size = context - num, width - width % LANES, key_dim * width
    last, source, at = (context - 1) // block_tokens, int64(-1), 0
    if first > 0:
        source = _place(blocks[(first - 1) // block_tokens], layers, layer, state_values) + head * size
    while at < num:
        index = (first + at) // block_tokens
        while index < last and blocks[index] < 0:
            index += 1
        place = _place(blocks[index], layers, layer, state_values) + head * size
        if source < 0:
            states[place : place + size] = 0.0
        elif source != place:
            states[place : place + size] = states[source : source + size]
        end = min((index + 1) * block_tokens - first, num)
        for t in range(at, end):
            token = start + t
            own = token * mixed.shape[1]
            _unit(mixed, own + key_head * key_dim, float32(1.0) / np.sqrt(float32(key_dim)), query)
            _unit(mixed, own + (sizes[0] + key_head) * key_dim, float32(1.0), key)
            step = widen(gates[token, columns[7] + key_head * columns[8] + number]) + step_bias
            step = step if step > _IS_ITSELF else np.log1p(np.exp(step))
            keeps = np.exp(-np.exp(decay) * step)
            update = _sigmoid(widen(gates[token, columns[6] + key_head * columns[8] + number]))
            values = own + 2 * sizes[0] * key_dim + head * width
            squares = lanes_of(float32(0.0))
            for i in range(0, whole, LANES):
                part = rounded(_advance_lanes(states, place, width, query, key, mixed, values, update, keeps, i, LANES), norm[0])
                store(made, i, LANES, part)
                squares += part * part
            if whole < width:
                part = rounded(
                    _advance_lanes(states, place, width, query, key, mixed, values, update, keeps, whole, width - whole), norm[0]
                )
                store(made, whole, width - whole, part)
                squares += part * part
            factor = float32(1.0 / np.sqrt(float64(total_of(squares)) / width + eps))
            gate = token * x.shape[1] + columns[4] + key_head * columns[5] + number * width
            to = token * out.shape[1] + head * width
            for i in range(0, whole, LANES):
                _finish_lanes(made, factor, norm, x, gate, i, LANES, out, to)
            if whole < width:
                _finish_lanes(made, factor, norm, x, gate, whole, width - whole, out, to)
        source, at = place, end


def _delta_rule(
    x: Any,  # [T, C + V D], of which the gates of the output are read
    gates: Any,  # [T, 2 V]
    mixed: Any,  # [T, C], as delta_convolve leaves it
    decay: Any,  # [V]
    step_bias: Any,  # [V]
    norm: Any,  # [D]
    eps: float,
    states: Any,  # this and what follows up to columns: as in delta_convolve
    layers: int,
    layer: int,
    state_values: int,
    block_tokens: int,
    block_table: Any,
    starts: Any,
    num_new: Any,
    contexts: Any,
    sizes: Any,
    columns: Any,
    out: Any,  # [T, V D]; 0 for padding
) -> None:
    heads, total = sizes[1], 0
    for row in range(num_new.shape[0]):
        total += num_new[row]
    out[total:] = 0
    for item in prange(num_new.shape[0] * heads):
        row, head = item // heads, item % heads
        if num_new[row] > 0:
            _row_of_head(
                x,
                gates,
                mixed,
                decay[head],
                step_bias[head],
                norm,
                eps,
                states,
                layers,
                layer,
                state_values,
                block_tokens,
                block_table[row],
                starts[row],
                num_new[row],
                contexts[row],
                head,
                sizes,
                columns,
                out,
            )


delta_convolve_serial = njit(**_OPTIONS)(_delta_convolve)
delta_convolve_parallel = njit(**_OPTIONS, parallel=True)(named("_delta_convolve_parallel", _delta_convolve))
delta_rule_serial = njit(**_OPTIONS)(_delta_rule)
delta_rule_parallel = njit(**_OPTIONS, parallel=True)(named("_delta_rule_parallel", _delta_rule))
