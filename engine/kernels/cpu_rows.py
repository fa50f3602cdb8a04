"""Row-wise work on the CPU (Numba): RMS norms, rotary embedding with the write into the KV cache, gated activations.

Shapes: T tokens, W width, H query heads, G KV heads, D head size. Twins in reference.py under the same names.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import boolean, float32, float64, int64, njit, types, void

from engine.kernels.cpu_bits import FASTMATH, exp, narrow, widen

# Python's error model puts a branch for zero before each division, which keeps loops from being vectorised.
_OPTIONS: dict[str, Any] = {"fastmath": FASTMATH, "error_model": "numpy", "cache": True, "nogil": True}


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


@njit(**_OPTIONS)
def rms_norm(x: Any, weight: Any, around_one: bool, eps: float, out: Any) -> None:
    """x [T, W] -> out [T, W]; the mean in float32."""
    width = x.shape[1]
    for row in range(x.shape[0]):
        total = float32(0.0)
        for i in range(width):
            value = widen(x[row, i])
            total += value * value
        _scale(x[row], float32(1.0 / np.sqrt(float64(total) / width + eps)), weight, around_one, out[row])


def add_rms_norm_signature(element: types.Type) -> Any:
    return void(element[:, ::1], element[:, ::1], element[::1], boolean, float64, element[:, ::1])


@njit(**_OPTIONS)
def add_rms_norm(x: Any, residual: Any, weight: Any, around_one: bool, eps: float, out: Any) -> None:
    """residual += x in place, then out = rms_norm(residual)."""
    width = x.shape[1]
    for row in range(x.shape[0]):
        total = float32(0.0)
        for i in range(width):
            rounded = narrow(widen(residual[row, i]) + widen(x[row, i]), weight[i])
            residual[row, i] = rounded
            value = widen(rounded)
            total += value * value
        _scale(residual[row], float32(1.0 / np.sqrt(float64(total) / width + eps)), weight, around_one, out[row])


def rope_and_store_signature(element: types.Type) -> Any:
    sizes = (int64,) * 6
    norms = (element[::1], element[::1], boolean, float64)
    return void(element[:, ::1], float32[:, ::1], *norms, element[::1], *sizes, int64[::1])


@njit(**_OPTIONS)
def rope_and_store(
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
    half = cos_sin.shape[1] // 2
    plane = block_tokens * head_dim
    block_stride = layers * 2 * kv_heads * plane
    normed = query_norm.shape[0] > 0
    for token in range(slots.shape[0]):
        for head in range(heads + kv_heads):
            first = head * head_dim
            vector = qkv[token, first : first + head_dim]
            if normed:
                weight = query_norm if head < heads else key_norm
                total = float32(0.0)
                for d in range(head_dim):
                    value = widen(vector[d])
                    total += value * value
                _scale(vector, float32(1.0 / np.sqrt(float64(total) / head_dim + eps)), weight, around_one, vector)
            for d in range(half):
                left, right = widen(vector[d]), widen(vector[half + d])
                cosine, sine = cos_sin[token, d], cos_sin[token, half + d]
                vector[d] = narrow(left * cosine - right * sine, vector[d])
                vector[half + d] = narrow(right * cosine + left * sine, vector[half + d])
        slot = slots[token]
        if slot < 0:
            continue
        at = (slot // block_tokens) * block_stride + layer * 2 * kv_heads * plane + (slot % block_tokens) * head_dim
        for head in range(kv_heads):
            key = qkv[token, (heads + head) * head_dim : (heads + head + 1) * head_dim]
            value = qkv[token, (heads + kv_heads + head) * head_dim : (heads + kv_heads + head + 1) * head_dim]
            keys = kv[at + head * plane : at + head * plane + head_dim]
            values = kv[at + (kv_heads + head) * plane : at + (kv_heads + head) * plane + head_dim]
            for d in range(head_dim):
                keys[d] = key[d]
                values[d] = value[d]


def gate_signature(element: types.Type) -> Any:
    return void(element[:, ::1], element[:, ::1])


@njit(**_OPTIONS)
def silu_and_mul(gate_up: Any, out: Any) -> None:
    """gate_up [T, 2 W] -> out [T, W] = silu(gate) * up."""
    width = out.shape[1]
    for row in range(out.shape[0]):
        for i in range(width):
            gate = widen(gate_up[row, i])
            activated = widen(narrow(gate / (float32(1.0) + exp(-gate)), out[row, i]))
            out[row, i] = narrow(activated * widen(gate_up[row, width + i]), out[row, i])


@njit(**_OPTIONS)
def gelu_and_mul(gate_up: Any, out: Any) -> None:
    """gate_up [T, 2 W] -> out [T, W] = gelu(gate) * up, in the form with tanh: g * sigmoid(2 sqrt(2 / pi) (g + 0.044715 g**3))."""
    width = out.shape[1]
    for row in range(out.shape[0]):
        for i in range(width):
            gate = widen(gate_up[row, i])
            twice = float32(1.5957691216057308) * (gate + float32(0.044715) * gate * gate * gate)
            activated = widen(narrow(gate / (float32(1.0) + exp(-twice)), out[row, i]))
            out[row, i] = narrow(activated * widen(gate_up[row, width + i]), out[row, i])
