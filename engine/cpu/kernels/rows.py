"""Computes row-wise operations on the CPU (Numba): embeddings, RMS norms and LayerNorms, rotary embedding with the write into the
KV cache, and gated activations.

Each kernel has a serial form and one that is parallel over rows. The reference implementations in reference.py have the same names.
Elements are float32, or bfloat16 as uint16 bits; work is done in float32.

Shapes: T tokens, W width, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import boolean, float32, float64, int64, njit, prange, types, void

from engine.cpu.kernels.bits import FASTMATH, exp, named, narrow, prefetch, widen
from engine.cpu.kernels.lanes import exp_for_bfloat16, first_lanes, limited, load, load_even, load_odd, rounded, store, total_of
from engine.cpu.kernels.vectors import LANES

# Python's error model puts a branch for zero before each division, which keeps loops from being vectorised.
_OPTIONS: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy", "cache": True, "nogil": True}


_FETCHED_AHEAD = 2  # how many tokens ahead their places in the KV cache are prefetched, before they are written
_HELPER: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy"}


def _compiled(function: Any) -> tuple[Any, Any]:
    """Returns two compiled forms of a kernel's Python function: one for one thread, and one whose prange loop runs in several
    threads."""
    return njit(**_OPTIONS)(function), njit(**_OPTIONS, parallel=True)(named(function.__name__ + "_parallel", function))


def gather_rows_signature(element: types.Type) -> Any:
    return void(int64[::1], element[:, ::1], int64, float64, element[:, ::1])


def _gather_rows(ids: Any, weight: Any, first: int, scale: float, out: Any) -> None:
    """Writes the rows of a table with the indices ids [T], times scale, to out [T, W], rounded to out's element type. weight [V,
    W]: a part of the table, whose first row has index `first`. Rows of the table outside of this part are written as zeros."""
    factor = float32(scale)
    for row in prange(ids.shape[0]):
        at, to = ids[row] - first, out[row]
        if 0 <= at < weight.shape[0]:
            found = weight[at]
            for i in range(to.shape[0]):
                to[i] = narrow(widen(found[i]) * factor, found[i])
        else:
            for i in range(to.shape[0]):
                to[i] = narrow(float32(0.0), to[i])


def rms_norm_signature(element: types.Type) -> Any:
    return void(element[:, ::1], element[::1], boolean, float64, element[:, ::1])


@njit(inline="always", fastmath=FASTMATH)
def _squares(values: Any, at: int, count: int) -> Any:
    own = load(values, at, count)
    return own * own


@njit(inline="always", fastmath=FASTMATH)
def _scale_lanes(values: Any, at: int, factor: Any, weight: Any, around_one: bool, out: Any, i: int, count: int) -> None:
    scaled, weights = load(values, at + i, count) * factor, load(weight, i, count)
    if around_one:
        store(out, at + i, count, scaled * (weights + float32(1.0)))
    else:
        store(out, at + i, count, rounded(scaled, weight[0]) * weights)


@njit(**_HELPER)
def _scale(values: Any, at: int, total: Any, eps: float, weight: Any, around_one: bool, out: Any) -> None:
    """Writes to out the values at indices `at` to below at + W, divided by sqrt(total / W + eps), times weight [W], at the same
    indices.

    total: the sum of the values' squares. The quotients are rounded to the element type before they are multiplied by the weight,
    as in transformers. around_one (Gemma): they are multiplied by 1 + weight instead, and only the product is rounded."""
    width = weight.shape[0]
    factor = float32(1.0 / np.sqrt(float64(total) / width + eps))
    whole = width - width % LANES
    for i in range(0, whole, LANES):
        _scale_lanes(values, at, factor, weight, around_one, out, i, LANES)
    if whole < width:
        _scale_lanes(values, at, factor, weight, around_one, out, whole, width - whole)


@njit(**_HELPER)
def _norm_vector(values: Any, at: int, weight: Any, around_one: bool, eps: float, out: Any) -> None:
    width = weight.shape[0]
    whole = width - width % LANES
    squares = _squares(values, at + whole, width - whole)
    for i in range(0, whole, LANES):
        squares += _squares(values, at + i, LANES)
    _scale(values, at, total_of(squares), eps, weight, around_one, out)


def _rms_norm(x: Any, weight: Any, around_one: bool, eps: float, out: Any) -> None:
    """Writes the RMS norm of each row of x [T, W] to out [T, W]: x / sqrt(mean(x**2) + eps) * weight [W]. The mean is computed in
    float32. around_one: the factor is 1 + weight (see _scale)."""
    for row in prange(x.shape[0]):
        _norm_vector(x, row * x.shape[1], weight, around_one, eps, out)


def add_rms_norm_signature(element: types.Type) -> Any:
    return void(element[:, ::1], element[:, ::1], float64, element[::1], boolean, float64, element[:, ::1])


@njit(inline="always", fastmath=FASTMATH)
def _add_lanes(x: Any, residual: Any, at: int, count: int, scale: Any, weight: Any) -> Any:
    """Adds `count` elements of x from index `at` on, times scale, to the same elements of residual, in place. Returns the rounded
    sums in float32 lanes. weight: read for its element type alone, to which the sums are rounded."""
    values = rounded(load(residual, at, count) + load(x, at, count) * scale, weight[0])
    store(residual, at, count, values)
    return values


@njit(inline="always", fastmath=FASTMATH)
def _add_squares(x: Any, residual: Any, at: int, count: int, scale: Any, weight: Any) -> Any:
    """Adds `count` elements of x from index `at` on, times scale, to the same elements of residual, in place, and returns the
    squares of the rounded sums in float32 lanes. weight: read for its element type alone, to which the sums are rounded."""
    values = _add_lanes(x, residual, at, count, scale, weight)
    return values * values


@njit(**_HELPER)
def _add_norm_vector(x: Any, residual: Any, at: int, scale: Any, weight: Any, around_one: bool, eps: float, out: Any) -> None:
    width = weight.shape[0]
    whole = width - width % LANES
    squares = _add_squares(x, residual, at + whole, width - whole, scale, weight)
    for i in range(0, whole, LANES):
        squares += _add_squares(x, residual, at + i, LANES, scale, weight)
    _scale(residual, at, total_of(squares), eps, weight, around_one, out)


def _add_rms_norm(x: Any, residual: Any, scale: float, weight: Any, around_one: bool, eps: float, out: Any) -> None:
    """Adds x [T, W], times scale, to residual [T, W] in place, rounded, then writes the RMS norm of each row of the sum to out [T,
    W] as _rms_norm does."""
    factor = float32(scale)
    for row in prange(x.shape[0]):
        _add_norm_vector(x, residual, row * x.shape[1], factor, weight, around_one, eps, out)


def layer_norm_signature(element: types.Type) -> Any:
    return void(element[:, ::1], element[:, ::1], float64, element[::1], element[::1], float64, element[:, ::1])


@njit(inline="always", fastmath=FASTMATH)
def _spread(values: Any, at: int, count: int, mean: Any) -> Any:
    """Returns in float32 lanes the squares of (value - mean) for `count` values from index `at` on. Lanes from `count` on have no
    meaning."""
    own = load(values, at, count) - mean
    return own * own


@njit(inline="always", fastmath=FASTMATH)
def _even_lanes(
    values: Any, at: int, mean: Any, factor: Any, weight: Any, bias: Any, has_bias: bool, out: Any, i: int, count: int
) -> None:
    made = (load(values, at + i, count) - mean) * factor * load(weight, i, count)
    if has_bias:
        made += load(bias, i, count)
    store(out, at + i, count, made)


@njit(**_HELPER)
def _even(values: Any, at: int, total: Any, weight: Any, bias: Any, eps: float, out: Any) -> None:
    """Writes to out the LayerNorm of the values at indices `at` to below at + W, at the same indices: (value - mean) /
    sqrt(variance + eps) * weight [W] + bias. bias: [W], or [0] for none. total: the sum of the values."""
    width, has_bias = weight.shape[0], bias.shape[0] > 0
    mean, whole = float32(total / float32(width)), width - width % LANES
    squares = first_lanes(_spread(values, at + whole, width - whole, mean), width - whole)
    for i in range(0, whole, LANES):
        squares += _spread(values, at + i, LANES, mean)
    factor = float32(1.0 / np.sqrt(float64(total_of(squares)) / width + eps))
    for i in range(0, whole, LANES):
        _even_lanes(values, at, mean, factor, weight, bias, has_bias, out, i, LANES)
    if whole < width:
        _even_lanes(values, at, mean, factor, weight, bias, has_bias, out, whole, width - whole)


@njit(**_HELPER)
def _layer_norm_vector(x: Any, residual: Any, at: int, scale: Any, weight: Any, bias: Any, eps: float, out: Any) -> None:
    width = weight.shape[0]
    whole = width - width % LANES
    if residual.shape[0] > 0:
        total = _add_lanes(x, residual, at + whole, width - whole, scale, weight)
        for i in range(0, whole, LANES):
            total += _add_lanes(x, residual, at + i, LANES, scale, weight)
        _even(residual, at, total_of(total), weight, bias, eps, out)
    else:
        total = load(x, at + whole, width - whole)
        for i in range(0, whole, LANES):
            total += load(x, at + i, LANES)
        _even(x, at, total_of(total), weight, bias, eps, out)


def _layer_norm(x: Any, residual: Any, scale: float, weight: Any, bias: Any, eps: float, out: Any) -> None:
    """Writes the LayerNorm of each row of x [T, W] to out [T, W]. If there is a residual [T, W], first adds x times scale to it in
    place, and writes the LayerNorm of that sum instead. residual: [0, W] for none. bias: [W], or [0] for none. The norm is computed
    in float32 and rounded once."""
    factor = float32(scale)
    for row in prange(x.shape[0]):
        _layer_norm_vector(x, residual, row * x.shape[1], factor, weight, bias, eps, out)


def rope_and_store_signature(element: types.Type) -> Any:
    sizes = (int64,) * 6
    norms = (element[::1], element[::1], element[::1], boolean, float64)
    return void(element[:, ::1], float32[:, ::1], *norms, element[::1], *sizes, int64[::1], boolean, int64)


@njit(inline="always", fastmath=FASTMATH)
def _turn_lanes(qkv: Any, at: int, turns: Any, turns_at: int, half: int, d: int, count: int) -> None:
    """Rotates `count` pairs of a head's dimensions, (d, half + d) and the next ones, in place. at: the index in qkv of the head's
    first dimension. turns: from index turns_at on, `half` cosines, then `half` sines."""
    left, right = load(qkv, at + d, count), load(qkv, at + half + d, count)
    cosine, sine = load(turns, turns_at + d, count), load(turns, turns_at + half + d, count)
    store(qkv, at + d, count, left * cosine - right * sine)
    store(qkv, at + half + d, count, right * cosine + left * sine)


@njit(**_HELPER)
def _turn(qkv: Any, at: int, turns: Any, turns_at: int, half: int) -> None:
    whole = half - half % LANES
    for d in range(0, whole, LANES):
        _turn_lanes(qkv, at, turns, turns_at, half, d, LANES)
    if whole < half:
        _turn_lanes(qkv, at, turns, turns_at, half, whole, half - whole)


@njit(**_HELPER)
def _turn_neighbours(qkv: Any, token: int, begin: int, turns: Any, half: int) -> None:
    """Rotates `half` pairs of neighbouring columns of a token's row of qkv, from column `begin` on, in place. turns: [T, 2 half],
    cosines, then sines."""
    for d in range(half):
        left, right = widen(qkv[token, begin + 2 * d]), widen(qkv[token, begin + 2 * d + 1])
        cosine, sine = turns[token, d], turns[token, half + d]
        qkv[token, begin + 2 * d] = narrow(left * cosine - right * sine, qkv[0, 0])
        qkv[token, begin + 2 * d + 1] = narrow(right * cosine + left * sine, qkv[0, 0])


@njit(**_HELPER)
def _copy(values: Any, at: int, out: Any, out_at: int, width: int) -> None:
    whole = width - width % LANES
    for i in range(0, whole, LANES):
        store(out, out_at + i, LANES, load(values, at + i, LANES))
    if whole < width:
        store(out, out_at + whole, width - whole, load(values, at + whole, width - whole))


@njit(inline="always")
def _place_of(slot: int, layers: int, layer: int, kv_heads: int, block_tokens: int, head_dim: int) -> int:
    """Returns the index in the flat arena where the key of a token's first KV head begins in this layer. slot: the token's block
    times block_tokens, plus its place in the block."""
    block, place = slot // block_tokens, slot % block_tokens
    return ((block * layers + layer) * 2 * kv_heads * block_tokens + place) * head_dim


def _rope_and_store(
    qkv: Any,  # [T, (H + 2 G) * D]; queries and keys are rotated in place
    cos_sin: Any,  # [T, 2 P]: P cosines, then P sines; the first 2 P dimensions of a head are rotated, the others unchanged
    query_norm: Any,  # [D], or [0] for none
    key_norm: Any,
    value_norm: Any,
    around_one: bool,  # of queries and keys
    eps: float,
    kv: Any,  # the arena, flat
    layers: int,
    layer: int,
    heads: int,
    kv_heads: int,
    block_tokens: int,
    head_dim: int,
    slots: Any,  # [T] int64: block * block_tokens + place in the block; below 0: store nothing
    interleaved: bool,  # pairs are neighbouring dimensions, else i and P + i
    num_turned: int,  # heads that are rotated, the first ones
) -> None:
    plane, turning = block_tokens * head_dim, cos_sin.shape[1]  # elements from one KV head's keys to the next's
    line = 64 // kv.itemsize
    for token in prange(slots.shape[0]):
        following = min(token + _FETCHED_AHEAD, slots.shape[0] - 1)
        if slots[following] >= 0:  # these places are unlikely to be in a cache
            to = _place_of(slots[following], layers, layer, kv_heads, block_tokens, head_dim)
            for head in range(2 * kv_heads):
                for i in range(0, head_dim, line):
                    prefetch(kv, to + head * plane + i)
        own = token * qkv.shape[1]
        for head in range(heads + kv_heads):
            at = own + head * head_dim
            if query_norm.shape[0] > 0:
                _norm_vector(qkv, at, query_norm if head < heads else key_norm, around_one, eps, qkv)
            if head >= num_turned:
                continue
            if interleaved:
                _turn_neighbours(qkv, token, head * head_dim, cos_sin, turning // 2)
            else:
                _turn(qkv, at, cos_sin, token * turning, turning // 2)
        if value_norm.shape[0] > 0:
            for head in range(heads + kv_heads, heads + 2 * kv_heads):
                _norm_vector(qkv, own + head * head_dim, value_norm, False, eps, qkv)
        if slots[token] >= 0:
            to = _place_of(slots[token], layers, layer, kv_heads, block_tokens, head_dim)
            for head in range(2 * kv_heads):
                _copy(qkv, own + (heads + head) * head_dim, kv, to + head * plane, head_dim)


def gate_signature(element: types.Type) -> Any:
    return void(element[:, ::1], element[:, ::1])


@njit(inline="always", fastmath=FASTMATH)
def _exp(x: Any, out: Any) -> Any:
    """Returns e**x of float32 lanes, about as exact as the element type of `out` (float32 or bfloat16 bits) can represent."""
    return exp_for_bfloat16(x) if out.itemsize == 2 else exp(x)


@njit(inline="always", fastmath=FASTMATH)
def _silu_lanes(gate_up: Any, at: int, width: int, out: Any, out_at: int, count: int) -> None:
    gate, up = load(gate_up, at, count), load(gate_up, at + width, count)
    activated = rounded(gate / (_exp(float32(0.0) - gate, out) + float32(1.0)), out[0, 0])
    store(out, out_at, count, activated * up)


def _silu_and_mul(gate_up: Any, out: Any) -> None:
    """Writes silu(gate) * up to out [T, W]. gate_up [T, 2 W]: each row has W gates, then W ups. silu(gate) is rounded to the
    element type before the product."""
    width = out.shape[1]
    whole = width - width % LANES
    for row in prange(out.shape[0]):
        for i in range(0, whole, LANES):
            _silu_lanes(gate_up, 2 * row * width + i, width, out, row * width + i, LANES)
        if whole < width:
            _silu_lanes(gate_up, 2 * row * width + whole, width, out, row * width + whole, width - whole)


@njit(inline="always", fastmath=FASTMATH)
def _gelu_of(x: Any, out: Any) -> Any:
    """Returns the tanh approximation of gelu of float32 lanes, computed as x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x**3)). out:
    read for its element type alone, which decides how exact the exponential is."""
    twice = (x + x * x * x * float32(0.044715)) * float32(1.5957691216057308)
    return x / (_exp(float32(0.0) - twice, out) + float32(1.0))


@njit(inline="always", fastmath=FASTMATH)
def _gelu_lanes(gate_up: Any, at: int, width: int, out: Any, out_at: int, count: int) -> None:
    gate, up = load(gate_up, at, count), load(gate_up, at + width, count)
    activated = rounded(_gelu_of(gate, out), out[0, 0])
    store(out, out_at, count, activated * up)


def _gelu(x: Any, out: Any) -> None:
    """Writes gelu(x), in its form with tanh, to out, both [T, W]."""
    width = out.shape[1]
    whole = width - width % LANES
    for row in prange(out.shape[0]):
        at = row * width
        for i in range(0, whole, LANES):
            store(out, at + i, LANES, _gelu_of(load(x, at + i, LANES), out))
        if whole < width:
            store(out, at + whole, width - whole, _gelu_of(load(x, at + whole, width - whole), out))


def _gelu_and_mul(gate_up: Any, out: Any) -> None:
    """Writes gelu(gate) * up to out [T, W], gelu in its form with tanh. gate_up [T, 2 W]: each row has W gates, then W ups.
    gelu(gate) is rounded to the element type before the product."""
    width = out.shape[1]
    whole = width - width % LANES
    for row in prange(out.shape[0]):
        for i in range(0, whole, LANES):
            _gelu_lanes(gate_up, 2 * row * width + i, width, out, row * width + i, LANES)
        if whole < width:
            _gelu_lanes(gate_up, 2 * row * width + whole, width, out, row * width + whole, width - whole)


def clamped_swiglu_signature(element: types.Type) -> Any:
    return void(element[:, ::1], float64, float64, element[:, ::1])


@njit(inline="always", fastmath=FASTMATH)
def _clamped_lanes(gate_up: Any, at: int, limit: Any, alpha: Any, out: Any, out_at: int, count: int) -> None:
    gate = limited(load_even(gate_up, at, count), float32(-np.inf), limit)
    up = limited(load_odd(gate_up, at, count), -limit, limit)
    sigmoid = float32(1.0) / (_exp(gate * (-alpha), out) + float32(1.0))
    store(out, out_at, count, (up + float32(1.0)) * (gate * sigmoid))


def _clamped_swiglu(gate_up: Any, limit: float, alpha: float, out: Any) -> None:
    """Writes (up + 1) * gate * sigmoid(alpha * gate) to out [T, W]. gate_up [T, 2 W]: gates and ups alternate. They are clamped
    first: gates to at most limit, ups to between -limit and limit."""
    width, most, factor = out.shape[1], float32(limit), float32(alpha)
    whole = width - width % LANES
    for row in prange(out.shape[0]):
        for i in range(0, whole, LANES):
            _clamped_lanes(gate_up, 2 * (row * width + i), most, factor, out, row * width + i, LANES)
        if whole < width:
            _clamped_lanes(gate_up, 2 * (row * width + whole), most, factor, out, row * width + whole, width - whole)


gather_rows, gather_rows_parallel = _compiled(_gather_rows)
rms_norm, rms_norm_parallel = _compiled(_rms_norm)
add_rms_norm, add_rms_norm_parallel = _compiled(_add_rms_norm)
layer_norm, layer_norm_parallel = _compiled(_layer_norm)
rope_and_store, rope_and_store_parallel = _compiled(_rope_and_store)
silu_and_mul, silu_and_mul_parallel = _compiled(_silu_and_mul)
gelu, gelu_parallel = _compiled(_gelu)
gelu_and_mul, gelu_and_mul_parallel = _compiled(_gelu_and_mul)
clamped_swiglu, clamped_swiglu_parallel = _compiled(_clamped_swiglu)
