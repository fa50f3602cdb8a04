"""Computes operations on rows on the GPU (Triton): norms, activations, gathered rows. Reference implementations:
reference.{rms_norm, add_rms_norm, layer_norm, add_layer_norm, silu_and_mul, gelu_and_mul, gelu, gather_rows}.

Shapes: T rows, W width, V rows of a table. Sums are float32. Results are rounded where the reference implementations round.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels import triton_overlap
from engine.cuda.kernels.sizes import ceil_div, power_of_two
from engine.cuda.kernels.triton_overlap import await_earlier

GATE_BLOCK = 1024


@triton.jit
def _norm_kernel(
    x,  # [T, W]
    residual,  # [T, W], read and written if ADD
    weight,  # [W]
    bias,  # [W], read if BIASED
    out,  # [T, W]
    eps,
    scale,  # of x where it is added
    W: tl.constexpr,
    ADD: tl.constexpr,
    AROUND_ONE: tl.constexpr,
    CENTRED: tl.constexpr,  # LayerNorm, else RMS
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    at = tl.arange(0, BLOCK)
    inside = at < W
    await_earlier(OVERLAPS)
    row = tl.program_id(0).to(tl.int64) * W + at
    value = tl.load(x + row, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value = tl.load(residual + row, mask=inside, other=0.0).to(tl.float32) + value * scale
        total = value.to(residual.dtype.element_ty)
        tl.store(residual + row, total, mask=inside)
        value = total.to(tl.float32)
    if CENTRED:
        value = tl.where(inside, value - tl.sum(value, axis=0) / W, 0.0)
    normed = value * tl.rsqrt(tl.sum(value * value, axis=0) / W + eps)
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if AROUND_ONE:
        factor += 1.0
    elif not CENTRED:
        normed = normed.to(out.dtype.element_ty).to(tl.float32)
    result = normed * factor
    if BIASED:
        result += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, around_one: bool, out: Tensor, scale: float = 1.0
) -> None:
    """Writes the RMS norm of each row of x [T, W] to out [T, W], as reference.rms_norm does. With a residual [T, W], adds x times
    scale to the residual in place and writes the norm of that sum."""
    _norm(x, residual, weight, None, eps, scale, out, around_one, False)


def layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor, scale: float = 1.0
) -> None:
    """Writes the LayerNorm of each row of x [T, W] to out [T, W], as reference.layer_norm does. With a residual [T, W], adds x
    times scale to the residual in place and writes the norm of that sum."""
    _norm(x, residual, weight, bias, eps, scale, out, False, True)


def _norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    scale: float,
    out: Tensor,
    around_one: bool,
    centred: bool,
) -> None:
    rows, width = x.shape
    block = power_of_two(width)
    _norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        weight if bias is None else bias,
        out,
        eps,
        scale,
        W=width,
        ADD=residual is not None,
        AROUND_ONE=around_one,
        CENTRED=centred,
        BIASED=bias is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **triton_overlap.options(),
    )


@triton.jit
def activated(gate, GELU: tl.constexpr):
    """Returns gelu(gate) in its form with tanh if GELU, else silu(gate). Both are float32."""
    logit = gate
    if GELU:
        # 1/2 (1 + tanh u) is the logistic function of 2u, which subtracts no nearly equal numbers
        logit = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-logit))


@triton.jit
def _gate_kernel(
    gate_up,  # [T, 2 W], or [T, W] if there are gates alone
    out,  # [T, W]
    W: tl.constexpr,
    GELU: tl.constexpr,
    UP: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    await_earlier(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < W
    begin = gate_up + row * (2 * W if UP else W)
    active = activated(tl.load(begin + at, mask=inside, other=0.0).to(tl.float32), GELU)
    if UP:
        up = tl.load(begin + W + at, mask=inside, other=0.0).to(tl.float32)
        active = active.to(out.dtype.element_ty).to(tl.float32) * up
    tl.store(out + row * W + at, active.to(out.dtype.element_ty), mask=inside)


def gate_and_mul(gate_up: Tensor, gelu: bool, out: Tensor) -> None:
    """Writes gelu(gate) * up if gelu (in its form with tanh), else silu(gate) * up, to out [T, W]. gate_up [T, 2 W]: each row has W
    gates, then W ups."""
    _activate(gate_up, out, gelu, True)


def gelu(x: Tensor, out: Tensor) -> None:
    """Writes gelu(x), in its form with tanh, to out, both [T, W]."""
    _activate(x, out, True, False)


def _activate(gate_up: Tensor, out: Tensor, gelu: bool, has_up: bool) -> None:
    rows, width = out.shape
    block = min(GATE_BLOCK, power_of_two(width))
    _gate_kernel[(rows, ceil_div(width, block))](
        gate_up, out, W=width, GELU=gelu, UP=has_up, BLOCK=block, num_warps=4, **triton_overlap.options()
    )


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
    """Copies the rows `ids` [T] of table [V, W], times scale, to out [T, W]. ids are of any integer type, and must be below V."""
    rows, width = out.shape
    block = min(2048, power_of_two(width))
    _gather_kernel[(rows, ceil_div(width, block))](table, ids, out, scale, W=width, SCALED=scale != 1.0, BLOCK=block, num_warps=4)
