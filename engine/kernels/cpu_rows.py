"""Row-wise work on the CPU (Numba): RMS norms, rotary embedding with the write into the KV cache, gated activations.

Each comes serial and parallel over rows. Shapes: T tokens, W width, H query heads, G KV heads, D head size. Twins in reference.py
under the same names.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import boolean, float32, float64, int64, njit, prange, types, void

from engine.kernels.cpu_bits import FASTMATH, exp, named, narrow, widen

# Python's error model puts a branch for zero before each division, which keeps loops from being vectorised.
_OPTIONS: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy", "cache": True, "nogil": True}


_HELPER: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy"}


def _compiled(function: Any) -> tuple[Any, Any]:
    """(serial, parallel)."""
    return njit(**_OPTIONS)(function), njit(**_OPTIONS, parallel=True)(named(function.__name__ + "_parallel", function))


def gather_rows_signature(element: types.Type) -> Any:
    return void(int64[::1], element[:, ::1], float64, element[:, ::1])


def _gather_rows(ids: Any, weight: Any, scale: float, out: Any) -> None:
    """Rows ids [T] of weight [V, W], times scale -> out [T, W]."""
    factor = float32(scale)
    for row in prange(ids.shape[0]):
        found, to = weight[ids[row]], out[row]
        for i in range(to.shape[0]):
            to[i] = narrow(widen(found[i]) * factor, found[i])


def rms_norm_signature(element: types.Type) -> Any:
    return void(element[:, ::1], element[::1], boolean, float64, element[:, ::1])


@njit(inline="always", fastmath=FASTMATH)
def _scale(vector: Any, factor: Any, weight: Any, around_one: bool, out: Any) -> None:
    """out = vector * factor * weight, rounded to the element type before the weight as transformers does it; around_one (Gemma):
    times 1 + weight instead, rounded once."""
    if around_one:
        for i in range(out.shape[0]):
            out[i] = narrow(widen(vector[i]) * factor * (float32(1.0) + widen(weight[i])), weight[i])
    else:
        for i in range(out.shape[0]):
            normed = widen(narrow(widen(vector[i]) * factor, weight[i]))
            out[i] = narrow(normed * widen(weight[i]), weight[i])


@njit(**_HELPER)
def _norm_row(vector: Any, weight: Any, around_one: bool, eps: float, out: Any) -> None:
    total = float32(0.0)
    for i in range(vector.shape[0]):
        value = widen(vector[i])
        total += value * value
    _scale(vector, float32(1.0 / np.sqrt(float64(total) / vector.shape[0] + eps)), weight, around_one, out)


def _rms_norm(x: Any, weight: Any, around_one: bool, eps: float, out: Any) -> None:
    """x [T, W] -> out [T, W]; the mean in float32."""
    for row in prange(x.shape[0]):
        _norm_row(x[row], weight, around_one, eps, out[row])


def add_rms_norm_signature(element: types.Type) -> Any:
    return void(element[:, ::1], element[:, ::1], element[::1], boolean, float64, element[:, ::1])


@njit(**_HELPER)
def _add_norm_row(vector: Any, residual: Any, weight: Any, around_one: bool, eps: float, out: Any) -> None:
    total = float32(0.0)
    for i in range(vector.shape[0]):
        rounded = narrow(widen(residual[i]) + widen(vector[i]), weight[i])
        residual[i] = rounded
        value = widen(rounded)
        total += value * value
    _scale(residual, float32(1.0 / np.sqrt(float64(total) / vector.shape[0] + eps)), weight, around_one, out)


def _add_rms_norm(x: Any, residual: Any, weight: Any, around_one: bool, eps: float, out: Any) -> None:
    """residual += x in place, then out = rms_norm(residual)."""
    for row in prange(x.shape[0]):
        _add_norm_row(x[row], residual[row], weight, around_one, eps, out[row])


def rope_and_store_signature(element: types.Type) -> Any:
    sizes = (int64,) * 6
    norms = (element[::1], element[::1], boolean, float64)
    return void(element[:, ::1], float32[:, ::1], *norms, element[::1], *sizes, int64[::1])


@njit(**_HELPER)
def _rope_token(
    own: Any,  # [(H + 2 G) * D]
    turns: Any,  # [2 P]
    query_norm: Any,
    key_norm: Any,
    around_one: bool,
    eps: float,
    kv: Any,
    at: int,  # element of the first KV head's key; below 0: store nothing
    heads: int,
    kv_heads: int,
    plane: int,  # elements from one KV head's keys to the next's
    head_dim: int,
) -> None:
    half = turns.shape[0] // 2
    normed = query_norm.shape[0] > 0
    for head in range(heads + kv_heads):
        vector = own[head * head_dim : (head + 1) * head_dim]
        if normed:
            _norm_row(vector, query_norm if head < heads else key_norm, around_one, eps, vector)
        for d in range(half):
            left, right = widen(vector[d]), widen(vector[half + d])
            cosine, sine = turns[d], turns[half + d]
            vector[d] = narrow(left * cosine - right * sine, vector[d])
            vector[half + d] = narrow(right * cosine + left * sine, vector[half + d])
    if at < 0:
        return
    for head in range(kv_heads):
        key = own[(heads + head) * head_dim : (heads + head + 1) * head_dim]
        value = own[(heads + kv_heads + head) * head_dim : (heads + kv_heads + head + 1) * head_dim]
        keys = kv[at + head * plane : at + head * plane + head_dim]
        values = kv[at + (kv_heads + head) * plane : at + (kv_heads + head) * plane + head_dim]
        for d in range(head_dim):
            keys[d] = key[d]
            values[d] = value[d]


def _rope_and_store(
    qkv: Any,  # [T, (H + 2 G) * D]; queries are rotated in place
    cos_sin: Any,  # [T, 2 P]: P cosines, then P sines; the first 2 P dimensions of a head turn, the others stay
    query_norm: Any,  # [D], or [0] for none
    key_norm: Any,
    around_one: bool,
    eps: float,
    kv: Any,  # the arena, flat
    layers: int,
    layer: int,
    heads: int,
    kv_heads: int,
    block_tokens: int,
    head_dim: int,
    slots: Any,  # [T] int64: block * block_tokens + place in the block; below 0: store nothing
) -> None:
    plane = block_tokens * head_dim
    for token in prange(slots.shape[0]):
        block, place = slots[token] // block_tokens, slots[token] % block_tokens
        at = ((block * layers + layer) * 2 * kv_heads) * plane + place * head_dim
        at = at if slots[token] >= 0 else -1
        _rope_token(qkv[token], cos_sin[token], query_norm, key_norm, around_one, eps, kv, at, heads, kv_heads, plane, head_dim)


def gate_signature(element: types.Type) -> Any:
    return void(element[:, ::1], element[:, ::1])


@njit(**_HELPER)
def _silu_row(gate_up: Any, out: Any) -> None:
    width = out.shape[0]
    for i in range(width):
        gate = widen(gate_up[i])
        activated = widen(narrow(gate / (float32(1.0) + exp(-gate)), out[i]))
        out[i] = narrow(activated * widen(gate_up[width + i]), out[i])


def _silu_and_mul(gate_up: Any, out: Any) -> None:
    """gate_up [T, 2 W] -> out [T, W] = silu(gate) * up."""
    for row in prange(out.shape[0]):
        _silu_row(gate_up[row], out[row])


@njit(**_HELPER)
def _gelu_row(gate_up: Any, out: Any) -> None:
    width = out.shape[0]
    for i in range(width):
        gate = widen(gate_up[i])
        twice = float32(1.5957691216057308) * (gate + float32(0.044715) * gate * gate * gate)
        activated = widen(narrow(gate / (float32(1.0) + exp(-twice)), out[i]))
        out[i] = narrow(activated * widen(gate_up[width + i]), out[i])


def _gelu_and_mul(gate_up: Any, out: Any) -> None:
    """gate_up [T, 2 W] -> out [T, W] = gelu(gate) * up, in the form with tanh: g * sigmoid(2 sqrt(2 / pi) (g + 0.044715 g**3))."""
    for row in prange(out.shape[0]):
        _gelu_row(gate_up[row], out[row])


gather_rows, gather_rows_parallel = _compiled(_gather_rows)
rms_norm, rms_norm_parallel = _compiled(_rms_norm)
add_rms_norm, add_rms_norm_parallel = _compiled(_add_rms_norm)
rope_and_store, rope_and_store_parallel = _compiled(_rope_and_store)
silu_and_mul, silu_and_mul_parallel = _compiled(_silu_and_mul)
gelu_and_mul, gelu_and_mul_parallel = _compiled(_gelu_and_mul)
