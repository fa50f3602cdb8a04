"""Products with NVFP4 weights on the CPU equal those with the matrix that they stand for, of single matrices and of experts."""

from __future__ import annotations

import pytest
import torch

from engine.cpu import ops as cpu_ops
from engine.cpu import products
from engine.cpu.products import array, four_bits
from engine.ops import reference
from engine.ops.ops import ExpertMatrices, Nvfp4Matrix
from tests.engine.cpu_ops import ops
from tests.engine.ops.test_experts import batch_of
from tests.engine.ops.twins import both, compiled_as_called, lost_by_adding_to, random, same, share_everything
from tests.loader.nvfp4 import meant_by

pytest.importorskip("numba")
kernels = compiled_as_called  # in place of the folder's fixture


def nvfp4(*shape: int) -> Nvfp4Matrix:
    """Returns any numbers [..., N, K] with any scales, of about the size of weights of a product with K inputs."""
    *outer, num_inputs = shape
    generator = torch.Generator().manual_seed(sum(shape))
    packed = torch.randint(0, 256, (*outer, num_inputs // 2), generator=generator, dtype=torch.uint8)
    codes = torch.randint(0, 254, (*outer, num_inputs // 16), generator=generator)
    factors = torch.rand(*outer, generator=generator) * 0.005 * num_inputs**-0.5
    return Nvfp4Matrix(packed, (codes + (codes >= 0x7F)).to(torch.uint8), factors)


def test_all_numbers_are_widened_exactly(dtype: torch.dtype) -> None:
    """Every number with every scale, of both signs, and those without a leading one too, by the kernel, the reference and the
    definition."""
    drawn = nvfp4(64, 192)
    codes = torch.arange(64 * 12) % 254
    drawn.scales.copy_((codes + (codes >= 0x7F)).view(64, 12))
    assert len(drawn.packed.unique()) == 256
    assert len(drawn.scales.unique()) == 254
    scales = drawn.scales.view(torch.float8_e4m3fn)
    wanted = meant_by(drawn.packed, scales, drawn.factors.unsqueeze(1), divides=False).to(dtype)
    for twin in (False, True):
        found = torch.empty_like(wanted)
        if twin:
            reference.nvfp4_rows(drawn.packed, drawn.scales, drawn.factors, found)
        else:
            ops.kernels.widen_four_bits(*four_bits(drawn), array(found))
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("num_rows", [1, 3, 8, 30])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(96, 36), (576, 65), (2048, 130), (320, 3)])
def test_linear(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, num_rows: int, num_inputs: int, num_outputs: int) -> None:
    """For few rows weights are not rounded to bfloat16, for many they are."""
    share_everything(monkeypatch)
    for module in (cpu_ops, products):
        monkeypatch.setattr(module, "WIDENED_BYTES", 70 * num_inputs * dtype.itemsize)
    x, added = random(num_rows, num_inputs, dtype=dtype), random(num_outputs, dtype=dtype)
    weight, dense = nvfp4(num_outputs, num_inputs), torch.empty(num_outputs, num_inputs)
    reference.nvfp4_rows(weight.packed, weight.scales, weight.factors, dense)
    rounding = 1e-6 if dtype is torch.float32 else 2**-8
    for num_threads, bias in ((1, None), (2, added)):
        ops.set_num_threads(num_threads)
        wanted = x.double() @ dense.double().T + (0 if bias is None else bias.double())
        lost = rounding * (wanted.abs() + x.abs().double() @ dense.abs().double().T)  # the most that rounding loses
        lost += lost_by_adding_to(bias, num_inputs)
        for given in both(monkeypatch, lambda bias=bias: ops.linear(x, weight, bias)):
            assert ((given.double() - wanted).abs() <= lost).all()
        if dtype is torch.bfloat16 and num_rows == 1 and num_outputs >= 4:  # the result's own rounding, and next to nothing else
            error = (ops.linear(x, weight, bias).double() - wanted).abs()
            assert (error <= rounding * wanted.abs() + 1e-5 * wanted.abs().amax()).all()


@pytest.mark.parametrize(("num_tokens", "num_threads"), [(1, 1), (23, 2), (70, 2)])
def test_experts(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, num_tokens: int, num_threads: int) -> None:
    ops.set_num_threads(num_threads)
    share_everything(monkeypatch)
    width, inner, num_experts = 96, 64, 3
    experts = ExpertMatrices(nvfp4(num_experts, 2 * inner, width), nvfp4(num_experts, width, inner), 2, True)
    x, scores = random(num_tokens, width, dtype=dtype), random(num_tokens, num_experts, dtype=dtype, scale=2.0)
    same(*both(monkeypatch, lambda: ops.experts(x, scores, experts, None, batch_of(range(num_tokens)))))
