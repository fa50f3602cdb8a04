"""Multiplies bfloat16 or float32 inputs with a weight matrix on the CPU: picks the kernel and prepares its arguments.

kernels: the module engine.cpu.kernels.entry. Shapes: R rows, K inputs, N outputs. To widen weights means to convert them to the
inputs' dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.cpu.programs.program import call, empty
from engine.ops.ops import Fp8Matrix, Int4Matrix, Mxfp4Matrix, Nvfp4Matrix, PackedMatrix
from engine.ops.reference import panels_of
from engine.ops.rows_apart import rows_apart
from loader.formats.int8 import WIDENED_BYTES
from loader.formats.mxfp4 import GROUP
from loader.formats.packed_rows import PANEL_ROWS

_PART_OUTPUTS = 64  # parts of a matrix have a multiple of so many outputs, which is a multiple of all kernels' panels
_NO_SCALES = np.empty(0, np.float32)
_NO_ZEROS = np.empty(0, np.int8)  # its type tells kernels that there are no zero points


def array(x: Tensor) -> Any:
    """Returns a numpy view of a tensor's memory. For bfloat16, which numpy does not have, the elements are the bits as uint16."""
    return x.view(torch.uint16 if x.dtype is torch.bfloat16 else x.dtype).numpy()


def linear(kernels: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Returns x [R, K] @ weight [N, K] transposed, plus bias [N] (None: no bias). Returns None if the caller must use torch's
    linear instead: it is faster for this shape, or x or the weight is not contiguous."""
    is_served = x.is_contiguous() and weight.is_contiguous()
    kernel = kernels.linear_kernel(*x.shape, len(weight), _element(x)) if is_served else None
    if kernel is None:
        return None
    out = empty(x, len(x), len(weight))
    if kernel is kernels.widened_linear:
        _widened_linear(kernels, x, array(weight), _NO_SCALES, bias, out)
    elif kernel is kernels.amx_linear:
        call(kernel, x.view(torch.int32).numpy(), array(weight), _bias(x, bias), *_columns(kernels, x, False), array(out))
    else:
        call(kernel, array(x), array(weight), _NO_SCALES, _bias(x, bias), array(out))
    return out


def int8_linear(kernels: Any, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor | None:
    """Returns x [R, K] @ (values [N, K] int8 * scales [N] float32) transposed, plus bias [N] (None: no bias). Returns None if no
    kernel takes this shape or x is not contiguous."""
    kernel = kernels.int8_linear_kernel(*x.shape, len(values), _element(x)) if x.is_contiguous() else None
    if kernel is None:
        return None
    out = empty(x, len(x), len(values))  # allocated before scratch, whose memory is used for these calls only
    if kernel is kernels.widened_linear:
        _widened_linear(kernels, x, values.numpy(), scales.numpy(), bias, out)
        return out
    scratch: tuple[Any, ...] = ()
    if kernel is kernels.int8_linear:
        scratch = (_digits(x),)
    at_once = kernels.MOST_ROWS if kernel is kernels.amx_int8_linear else len(x)
    for first in range(0, len(x), at_once):
        rows = x[first : first + at_once]
        if kernel is kernels.amx_int8_linear:
            scratch = _columns(kernels, rows, True)
        to = array(out[first : first + at_once])
        call(kernel, array(rows), values.numpy(), scales.numpy(), _bias(x, bias), *scratch, to)
    return out


def packed_linear(kernels: Any, x: Tensor, weight: PackedMatrix, bias: Tensor | None) -> Tensor | None:
    """Returns x [R, K] @ the transpose of a packed matrix [N, K], plus bias [N] (None: no bias). Returns None if x is not
    contiguous. If x has many rows, the weights are unpacked before the multiplication, those of a few outputs at a time."""
    if not x.is_contiguous():
        return None
    out = empty(x, len(x), len(weight))
    if 0 < len(x) <= kernels.packed_rows(len(weight), weight.num_inputs):
        call(kernels.packed_linear, array(x), *panels_of(weight), _bias(x, bias), kernels.num_shares(), array(out))
    else:
        call(packed_in_parts, kernels, x.view(x.shape), weight, bias, out.view(out.shape))
    return out


def packed_in_parts(kernels: Any, x: Tensor, weight: PackedMatrix, bias: Tensor | None, out: Tensor) -> None:
    """Writes x [R, K] @ the transpose of a packed matrix, plus bias [N], to out [R, N]. The weights of a few outputs at a time are
    unpacked, and then multiplied like plain weights."""
    for some, part in widened_parts(x, *weight.shape):
        panels = slice(some.start // PANEL_ROWS, -(-some.stop // PANEL_ROWS))
        kernels.unpack_rows(*panels_of(weight, panels), array(part))
        write_product(kernels, x, part, None if bias is None else bias[some], out[:, some])


def fp8_linear(kernels: Any, x: Tensor, weight: Fp8Matrix, bias: Tensor | None) -> Tensor | None:
    """Returns x [R, K] @ the transpose of an FP8 matrix [N, K], plus bias [N] (None: no bias). Returns None if x is not contiguous.
    If x has many rows, the weights are widened before the multiplication, those of a few outputs at a time."""
    if not x.is_contiguous():
        return None
    kernel = kernels.fp8_linear_kernel(len(x), len(weight.values), _element(x))
    out = empty(x, len(x), len(weight.values))
    matrix = (weight.values.numpy(), weight.scales.numpy(), weight.group_inputs)
    if kernel is None:
        call(fp8_in_parts, kernels, x.view(x.shape), *matrix, bias, out.view(out.shape))
    else:
        call(kernel, array(x), *matrix, _bias(x, bias), array(out))
    return out


def fp8_in_parts(kernels: Any, x: Tensor, values: Any, scales: Any, group_inputs: int, bias: Tensor | None, out: Tensor) -> None:
    """Writes x [R, K] @ the transpose of an FP8 matrix, plus bias [N], to out [R, N]. The weights of a few outputs at a time are
    widened to x's dtype, and then multiplied like plain weights. values [N, K], scales, group_inputs: the parts of the matrix
    (Fp8Matrix); values may also be int8."""
    for some, part in widened_parts(x, *values.shape):
        kernels.fp8_rows(values[some], scales[some], group_inputs, array(part))
        write_product(kernels, x, part, None if bias is None else bias[some], out[:, some])


def four_bits_linear(kernels: Any, x: Tensor, weight: Int4Matrix | Nvfp4Matrix, bias: Tensor | None) -> Tensor | None:
    """Returns x [R, K] @ the transpose of a four-bit matrix [N, K], plus bias [N] (None: no bias). Returns None if x is not
    contiguous. If x has many rows, the weights are widened before the multiplication, those of a few outputs at a time."""
    if not x.is_contiguous():
        return None
    out = empty(x, len(x), len(weight))
    if 0 < len(x) <= kernels.grouped_four_bits_rows(len(weight), _element(x)):
        firsts, biases = np.array((0, len(x)), np.int32), _bias(x, bias).reshape(1, -1)
        shares = (len(x), kernels.num_shares())
        call(kernels.grouped_four_bits_linear, array(x), *four_bits(weight), biases, firsts, *shares, array(out))
    else:
        call(four_bits_in_parts, kernels, x.view(x.shape), *four_bits(weight), bias, out.view(out.shape))
    return out


def four_bits(weight: Mxfp4Matrix | Int4Matrix | Nvfp4Matrix) -> tuple[Any, Any, Any, int, bool]:
    """Returns a four-bit matrix in the form that the kernels take: (scales, bytes, zero points, group size, whether scales of 16
    bits are float16). The first three are flat arrays; for NVFP4 the third holds the outputs' factors instead, and it is empty if
    there are no zero points. Group size: how many inputs share a scale. The kernels recognise the format by the arrays' element
    types (four_bits_tiles.py)."""
    if isinstance(weight, Mxfp4Matrix):
        return weight.scales.view(-1).numpy(), weight.blocks.view(-1).numpy(), _NO_ZEROS, GROUP, False
    if isinstance(weight, Nvfp4Matrix):
        codes, factors = weight.scales.view(torch.int8).view(-1).numpy(), weight.factors.view(-1).numpy()
        return codes, weight.packed.view(-1).numpy(), factors, weight.group_inputs, False
    scales = weight.scales.view(torch.uint16).view(-1).numpy()
    zeros = _NO_ZEROS if weight.zeros is None else weight.zeros.view(-1).numpy()
    return scales, weight.packed.view(-1).numpy(), zeros, weight.group_inputs, weight.scales.dtype is torch.float16


def four_bits_in_parts(
    kernels: Any, x: Tensor, scales: Any, blocks: Any, zeros: Any, group_inputs: int, halves: bool, bias: Tensor | None, out: Tensor
) -> None:
    """Writes x [R, K] @ the transpose of a four-bit matrix, plus bias [N], to out [R, N]. The weights of a few outputs at a time
    are widened to x's dtype, and then multiplied like plain weights. scales, blocks, zeros, group_inputs, halves: the matrix, in
    the form that `four_bits` returns."""
    num_inputs, num_outputs = x.shape[1], out.shape[1]
    parts = [of_outputs.reshape(num_outputs, -1) for of_outputs in (scales, blocks, zeros)]
    for some, part in widened_parts(x, num_outputs, num_inputs):
        kernels.widen_four_bits(*(of_outputs[some].reshape(-1) for of_outputs in parts), group_inputs, halves, array(part))
        write_product(kernels, x, part, None if bias is None else bias[some], out[:, some])


def widened_parts(like: Tensor, num_outputs: int, num_inputs: int) -> list[tuple[slice, Tensor]]:
    """Cuts the outputs of a matrix into slices, and returns each slice, in order, with memory for its widened weights: a tensor
    [outputs of the slice, num_inputs] of like's dtype. All slices use the same memory, of at most WIDENED_BYTES unless a panel (the
    outputs that a kernel takes together) needs more."""
    at_once = max(PANEL_ROWS, WIDENED_BYTES // (num_inputs * like.element_size()))
    at_once = at_once // _PART_OUTPUTS * _PART_OUTPUTS or at_once // PANEL_ROWS * PANEL_ROWS
    held = like.new_empty(min(at_once, num_outputs), num_inputs)
    places = [slice(first, min(first + at_once, num_outputs)) for first in range(0, num_outputs, at_once)]
    return [(some, held[: some.stop - some.start]) for some in places]


def write_product(kernels: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, to: Tensor) -> None:
    """Writes rows [R, K] @ weight [N, K] transposed, plus bias [N] (None: no bias), to `to` [R, N], by a kernel or by torch."""
    product = linear(kernels, rows, weight, bias)
    if product is not None:
        to.copy_(product)
    else:
        write_torch_product(rows, weight, bias, to)


def write_torch_product(rows: Tensor, weight: Tensor, bias: Tensor | None, to: Tensor) -> None:
    """Writes rows [R, K] @ weight [N, K] transposed, plus bias [N] (None: no bias), to `to` [R, N], by torch."""
    apart = rows_apart(rows)
    if bias is None:
        torch.mm(apart, weight.t(), out=to)
    else:
        torch.addmm(bias, apart, weight.t(), out=to)


def _widened_linear(kernels: Any, x: Tensor, weight: Any, scales: Any, bias: Tensor | None, out: Tensor) -> None:
    """Writes x [R, K] @ weight [N, K] transposed, plus bias, to out [R, N], by the kernel that widens weights. Computes at most
    MOST_ROWS rows at a time, so that the widened rows stay in the caches. scales [N]: a factor for each output of int8 weights;
    empty for plain weights."""
    num_shares = kernels.num_shares()
    for first in range(0, len(x), kernels.MOST_ROWS):
        rows, to = x[first : first + kernels.MOST_ROWS], out[first : first + kernels.MOST_ROWS]
        num_floats = kernels.widened_scratch_floats(*rows.shape, num_shares)
        words = empty(x, 1, 2 * num_floats).view(torch.float32).view(-1).numpy()
        call(kernels.widened_linear, array(rows), weight, scales, _bias(x, bias), words, num_shares, array(to))


def _element(x: Tensor) -> str:
    return "bfloat16" if x.dtype is torch.bfloat16 else "float32"


def _bias(x: Tensor, bias: Tensor | None) -> Any:
    return array(x)[0, :0] if bias is None else array(bias)


def _columns(kernels: Any, x: Tensor, of_int8: bool) -> tuple[Any, int]:
    """Returns scratch memory (int32) for a multiplication by the matrix unit (AMX), which holds x in tiles of 16 rows and packed
    weights, and the number of parts into which the outputs are divided among threads. of_int8: whether the weights are int8."""
    num_shares = kernels.num_shares()
    num_words = kernels.amx_scratch_words(*x.shape, of_int8, num_shares)
    return empty(x, 1, 2 * num_words).view(torch.int32).view(-1).numpy(), num_shares


def _digits(x: Tensor) -> Any:
    """Returns scratch memory [2 R, K] int8, in which the int8 kernel stores every element of x [R, K] as two int8 digits."""
    return empty(x, len(x), x.shape[1]).view(torch.int8).view(2 * len(x), -1).numpy()
