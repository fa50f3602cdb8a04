"""Row-wise work on the GPU (Triton): norms, gated activations, gathered rows. Reference implementations: reference.{rms_norm,
add_rms_norm, silu_and_mul, gelu_and_mul, gather_rows}.

Shapes: T rows, W width, V rows of a table. Sums are float32. Results are rounded where the reference implementations round.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

GATE_BLOCK = 1024


@triton.jit
def _rms_norm_kernel(
    x,  # [T, W]
    residual,  # [T, W], read and written if ADD
    weight,  # [W]
    out,  # [T, W]
    eps,
    W: tl.constexpr,
    ADD: tl.constexpr,
    AROUND_ONE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.arange(0, BLOCK)
    inside = at < W
    row = tl.program_id(0).to(tl.int64) * W + at
    value = tl.load(x + row, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row, mask=inside, other=0.0).to(tl.float32)
        total = value.to(residual.dtype.element_ty)
        tl.store(residual + row, total, mask=inside)
        value = total.to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, axis=0) / W + eps)
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if AROUND_ONE:
        factor += 1.0
    else:
        normed = normed.to(out.dtype.element_ty).to(tl.float32)
    result = normed * factor
    tl.store(out + row, result.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, around_one: bool, out: Tensor) -> None:
    """Writes the norm of x's rows to out, see reference.rms_norm. With a residual, adds x to it in place and writes the norm of the
    sum."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        eps,
        W=width,
        ADD=residual is not None,
        AROUND_ONE=around_one,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )


@triton.jit
def _gate_kernel(
    gate_up,  # [T, 2 W]
    out,  # [T, W]
    W: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < W
    gate = tl.load(gate_up + row * 2 * W + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * W + W + at, mask=inside, other=0.0).to(tl.float32)
    logit = gate
    if GELU:
        # 1/2 (1 + tanh u) is the logistic function of 2u, which subtracts no nearly equal numbers
        logit = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    active = gate / (1.0 + tl.exp(-logit))
    tl.store(out + row * W + at, (active.to(out.dtype.element_ty).to(tl.float32) * up).to(out.dtype.element_ty), mask=inside)


def gate_and_mul(gate_up: Tensor, gelu: bool, out: Tensor) -> None:
    rows, width = out.shape
    block = min(GATE_BLOCK, triton.next_power_of_2(width))
    _gate_kernel[(rows, triton.cdiv(width, block))](gate_up, out, W=width, GELU=gelu, BLOCK=block, num_warps=4)


@triton.jit
def _gather_kernel(
    table,  # [V, W]
    ids,  # [T]
    out,  # [T, W]
    scale,
    W: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < W
    value = tl.load(table + tl.load(ids + row).to(tl.int64) * W + at, mask=inside, other=0.0)
    if SCALED:
        value = (value.to(tl.float32) * scale).to(out.dtype.element_ty)
    tl.store(out + row * W + at, value, mask=inside)


def gather_rows(table: Tensor, ids: Tensor, scale: float, out: Tensor) -> None:
    """Copies the rows `ids` [T] of table [V, W], times scale, to out [T, W]. ids are below V, of any integer type."""
    rows, width = out.shape
    block = min(2048, triton.next_power_of_2(width))
    _gather_kernel[(rows, triton.cdiv(width, block))](
        table, ids, out, scale, W=width, SCALED=scale != 1.0, BLOCK=block, num_warps=4
    )
