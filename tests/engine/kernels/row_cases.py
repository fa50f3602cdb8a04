"""Cases for the kernels along rows: norms, gated activations, products of few rows, gathered rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.cuda.kernels import triton_four_bits_linear, triton_fp8_linear, triton_linear, triton_rows
from engine.ops import reference
from engine.ops.ops import Fp8Matrix, Int4Matrix, Int8Matrix, Nvfp4Matrix
from tests.engine.kernels.draw import Draw, close


def norms(draw: Draw) -> None:
    width, rows = draw.one_of(1, 7, 48, 64, 100, 513, 896), draw.between(1, 5)
    x, residual = draw.normal(rows, width, scale=draw.one_of(1e-2, 1.0, 50.0)), draw.normal(rows, width, scale=3.0)
    weight, around_one = draw.normal(width), draw.one_of(False, True)
    out = draw.like(x)
    triton_rows.rms_norm(draw.on(x), None, draw.on(weight), 1e-5, around_one, out)
    close(out, reference.rms_norm(x, weight, 1e-5, around_one), draw.dtype)
    added = draw.on(residual)
    triton_rows.rms_norm(draw.on(x), added, draw.on(weight), 1e-5, around_one, out)
    wanted = reference.add_rms_norm(x, residual, weight, 1e-5, around_one)
    close(out, wanted, draw.dtype)
    close(added, residual, draw.dtype)
    bias, scale = draw.normal(width) if draw.one_of(False, True) else None, draw.one_of(1.0, 0.22)
    held = None if bias is None else draw.on(bias)
    triton_rows.layer_norm(draw.on(x), None, draw.on(weight), held, 1e-5, out)
    close(out, reference.layer_norm(x, weight, bias, 1e-5), draw.dtype)
    triton_rows.layer_norm(draw.on(x), added, draw.on(weight), held, 1e-5, out, scale)
    close(out, reference.add_layer_norm(x, residual, weight, bias, 1e-5, scale), draw.dtype)
    triton_rows.rms_norm(draw.on(x), added, draw.on(weight), 1e-5, around_one, out, scale)
    close(out, reference.add_rms_norm(x, residual, weight, 1e-5, around_one, scale), draw.dtype)
    close(added, residual, draw.dtype)


def gates(draw: Draw) -> None:
    rows, width, scale = draw.between(1, 5), draw.one_of(1, 31, 80, 1024, 1500), draw.one_of(0.1, 3.0, 60.0)
    gate_up = draw.normal(rows, 2 * width, scale=scale)
    gate_up[:, width:] /= scale  # where gelu is almost 0, torch's has no correct digit, and a large `up` would make that visible
    for gelu, twin in ((False, reference.silu_and_mul), (True, reference.gelu_and_mul)):
        wanted = twin(gate_up)
        out = draw.like(wanted)
        triton_rows.gate_and_mul(draw.on(gate_up), gelu, out)
        close(out, wanted, draw.dtype)
    out = draw.like(gate_up)
    triton_rows.gelu(draw.on(gate_up), out)
    close(out, reference.gelu(gate_up), draw.dtype)


def few_rows_linear(draw: Draw) -> None:
    rows, outputs, inputs = draw.between(1, 4), draw.one_of(1, 3, 5, 9), draw.one_of(1, 40, 512, 700, 2049, 4500)
    x, weight = draw.normal(rows, inputs), draw.normal(outputs, inputs, scale=inputs**-0.5)
    bias = draw.normal(outputs) if draw.one_of(False, True) else None
    out = draw.like(torch.empty(rows, outputs, dtype=draw.dtype))
    triton_linear.few_rows_linear(draw.on(x), draw.on(weight), None if bias is None else draw.on(bias), out)
    wanted = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    close(out, wanted, draw.dtype)


def gated_linear(draw: Draw) -> None:
    rows, width, inputs = draw.between(1, 4), draw.one_of(1, 3, 5, 8), draw.one_of(1, 40, 512, 700, 2049)
    check_gated_linear(draw, rows, width, inputs, draw.one_of(False, True), draw.one_of(False, True))


def check_gated_linear(draw: Draw, rows: int, width: int, inputs: int, has_bias: bool, gelu: bool) -> None:
    """Asserts that the kernel with the activation in it gives the bits that the product and then the activation give."""
    x, weight = draw.normal(rows, inputs), draw.normal(2 * width, inputs, scale=2 * inputs**-0.5)
    given = (draw.on(x), draw.on(weight), draw.on(draw.normal(2 * width)) if has_bias else None)
    gate_up, wanted, out = (draw.like(torch.empty(rows, size, dtype=draw.dtype)) for size in (2 * width, width, width))
    triton_linear.few_rows_linear(*given, gate_up)
    triton_rows.gate_and_mul(gate_up, gelu, wanted)
    triton_linear.few_rows_linear(*given, out, gelu)
    assert out.isfinite().all()
    assert torch.equal(out, wanted)


def fp8_matrix(draw: Draw, outputs: int, inputs: int, group: int) -> Fp8Matrix:
    """Returns one with every code that is a number, and products of about the size of what they are given."""
    codes = torch.randint(0, 254, (outputs, inputs), generator=draw.generator)
    scales = torch.rand(outputs, -(-inputs // group), generator=draw.generator) * 0.02 * inputs**-0.5
    return Fp8Matrix((codes + (codes >= 0x7F)).to(torch.uint8), scales, group)


def fp8_linear(draw: Draw) -> None:
    """Few rows and tiles of both sizes, with one scale an output and with one for each 128 inputs of it, and with every code."""
    rows, outputs, inputs = draw.one_of(1, 2, 3, 4, 17, 70), draw.one_of(1, 5, 40), draw.one_of(1, 40, 128, 700, 2049)
    group = draw.one_of(inputs, 128)
    matrix = fp8_matrix(draw, outputs, inputs, group)
    codes, scales = matrix.values, matrix.scales
    x, bias = draw.normal(rows, inputs), draw.normal(outputs) if draw.one_of(False, True) else None
    dense = torch.empty(outputs, inputs)
    reference.fp8_rows(codes, scales, group, dense)
    wanted = torch.nn.functional.linear(x.double(), dense.double(), None if bias is None else bias.double())
    given = (draw.on(x), draw.on(codes), draw.on(scales), group, None if bias is None else draw.on(bias))
    check_quantised_linear(draw, triton_fp8_linear, given, wanted)


def int8_matrix(draw: Draw, *shape: int) -> Int8Matrix:
    """Returns matrices [..., N, K] of any numbers, with products of about the size of what they are given."""
    values = torch.randint(-128, 128, shape, generator=draw.generator).to(torch.int8)
    return Int8Matrix(values, torch.rand(shape[:-1], generator=draw.generator) * 0.02 * shape[-1] ** -0.5)


def int8_linear(draw: Draw) -> None:
    """Few rows and tiles of both sizes, with every number."""
    rows, outputs, inputs = draw.one_of(1, 2, 3, 4, 17, 70), draw.one_of(1, 5, 40), draw.one_of(1, 40, 128, 700, 2049)
    matrix = int8_matrix(draw, outputs, inputs)
    x, bias = draw.normal(rows, inputs), draw.normal(outputs) if draw.one_of(False, True) else None
    dense = matrix.values.double() * matrix.scales.double().unsqueeze(1)
    wanted = torch.nn.functional.linear(x.double(), dense, None if bias is None else bias.double())
    codes, scales = draw.on(matrix.values), draw.on(matrix.scales).unsqueeze(1)
    given = (draw.on(x), codes, scales, inputs, None if bias is None else draw.on(bias))
    check_quantised_linear(draw, triton_fp8_linear, given, wanted)


def int4_matrix(draw: Draw, *shape: int) -> Int4Matrix:
    """Returns matrices [..., N, K] of any numbers, perhaps with zero points, with products of about the size of what they are
    given."""
    *outer, inputs = shape
    group = draw.one_of(*(size for size in (32, 64, 128, inputs) if inputs % size == 0))
    packed = torch.randint(0, 256, (*outer, inputs // 2), generator=draw.generator).to(torch.uint8)
    scales = torch.rand(*outer, inputs // group, generator=draw.generator) * 0.3 * inputs**-0.5
    zeros = torch.randint(0, 17, scales.shape, generator=draw.generator).to(torch.uint8) if draw.one_of(False, True) else None
    return Int4Matrix(packed, scales.to(draw.one_of(torch.bfloat16, torch.float16)), group, zeros)


def int4_on_device(draw: Draw, matrix: Int4Matrix) -> Int4Matrix:
    zeros = None if matrix.zeros is None else draw.on(matrix.zeros)
    return Int4Matrix(draw.on(matrix.packed), draw.on(matrix.scales), matrix.group_inputs, zeros)


def int4_linear(draw: Draw) -> None:
    """Few rows and tiles of both sizes, with one scale an output and with one for each so many inputs of it."""
    rows, outputs, inputs = draw.one_of(1, 2, 3, 4, 17, 70), draw.one_of(1, 5, 40), draw.one_of(32, 96, 128, 704, 2176)
    matrix = int4_matrix(draw, outputs, inputs)
    x, bias = draw.normal(rows, inputs), draw.normal(outputs) if draw.one_of(False, True) else None
    dense = torch.empty(outputs, inputs)
    reference.int4_rows(matrix.packed, matrix.scales, matrix.zeros, matrix.group_inputs, dense)
    wanted = torch.nn.functional.linear(x.double(), dense.double(), None if bias is None else bias.double())
    given = (draw.on(x), int4_on_device(draw, matrix), None if bias is None else draw.on(bias))
    check_quantised_linear(draw, triton_four_bits_linear, given, wanted)


def nvfp4_matrix(draw: Draw, *shape: int) -> Nvfp4Matrix:
    """Returns matrices [..., N, K] of any numbers with any scales, of either sign and without a leading one too, and with products
    of about the size of what they are given."""
    *outer, inputs = shape
    packed = torch.randint(0, 256, (*outer, inputs // 2), generator=draw.generator).to(torch.uint8)
    codes = torch.randint(0, 254, (*outer, inputs // 16), generator=draw.generator)
    factors = torch.rand(*outer, generator=draw.generator) * 0.005 * inputs**-0.5
    return Nvfp4Matrix(packed, (codes + (codes >= 0x7F)).to(torch.uint8), factors)


def nvfp4_on_device(draw: Draw, matrix: Nvfp4Matrix) -> Nvfp4Matrix:
    return Nvfp4Matrix(draw.on(matrix.packed), draw.on(matrix.scales), draw.on(matrix.factors))


def nvfp4_linear(draw: Draw) -> None:
    """Few rows and tiles of both sizes."""
    rows, outputs, inputs = draw.one_of(1, 2, 3, 4, 17, 70), draw.one_of(1, 5, 40), draw.one_of(32, 96, 128, 704, 2176)
    matrix = nvfp4_matrix(draw, outputs, inputs)
    x, bias = draw.normal(rows, inputs), draw.normal(outputs) if draw.one_of(False, True) else None
    dense = torch.empty(outputs, inputs)
    reference.nvfp4_rows(matrix.packed, matrix.scales, matrix.factors, dense)
    wanted = torch.nn.functional.linear(x.double(), dense.double(), None if bias is None else bias.double())
    given = (draw.on(x), nvfp4_on_device(draw, matrix), None if bias is None else draw.on(bias))
    check_quantised_linear(draw, triton_four_bits_linear, given, wanted)


def check_quantised_linear(draw: Draw, kernels: Any, given: tuple[Any, ...], wanted: Tensor) -> None:
    """Compares the products of few rows, and those in tiles of both sizes, of a module of kernels with the result."""
    out = draw.like(wanted.to(draw.dtype))
    is_few = len(wanted) <= triton_fp8_linear.MAX_ROWS
    if is_few:
        kernels.few_rows_linear(*given, out)
        close(out, wanted, draw.dtype)
    for tile in triton_fp8_linear.TILE_ROWS[:1] if is_few else triton_fp8_linear.TILE_ROWS:
        out = draw.like(out)
        kernels.tile_linear(*given, tile, draw.interpreted, out)
        close(out, wanted, draw.dtype)


def gathers(draw: Draw) -> None:
    vocab, width, rows = draw.between(1, 90), draw.one_of(3, 64, 500, 2100), draw.between(1, 6)
    table = draw.normal(vocab, width)
    ids = torch.randint(0, vocab, (rows,), generator=draw.generator).to(draw.one_of(torch.int32, torch.int64))
    scale = draw.one_of(1.0, 22.6)
    wanted = reference.gather_rows(table, ids, scale)
    out = draw.like(wanted)
    triton_rows.gather_rows(draw.on(table), draw.on(ids), scale, out)
    close(out, wanted, draw.dtype)
