"""Products with INT4 weights on the CPU equal those with the matrix that they stand for, of single matrices and of experts."""

from __future__ import annotations

import pytest
import torch

from engine.cpu import ops as cpu_ops
from engine.cpu import products
from engine.cpu.products import array, four_bits
from engine.ops import reference
from engine.ops.ops import ExpertMatrices, Int4Matrix
from tests.engine.cpu_ops import ops
from tests.engine.ops.test_experts import batch_of
from tests.engine.ops.twins import both, compiled_as_called, lost_by_adding_to, random, same, share_everything

pytest.importorskip("numba")
kernels = compiled_as_called  # in place of the folder's fixture
SCALE_DTYPES = (torch.bfloat16, torch.float16)


def int4(*shape: int, group_inputs: int, dtype: torch.dtype = torch.bfloat16, has_zeros: bool = False) -> Int4Matrix:
    """Returns any weights [..., N, K], of about the size of those of a product with K inputs. has_zeros: with any zero points."""
    *outer, num_inputs = shape
    generator = torch.Generator().manual_seed(sum(shape))
    packed = torch.randint(0, 256, (*outer, num_inputs // 2), generator=generator, dtype=torch.uint8)
    scales = torch.rand(*outer, num_inputs // group_inputs, generator=generator) * 0.3 * num_inputs**-0.5
    zeros = torch.randint(0, 17, scales.shape, generator=generator, dtype=torch.uint8) if has_zeros else None
    return Int4Matrix(packed, scales.to(dtype), group_inputs, zeros)


@pytest.mark.parametrize(("scale_dtype", "has_zeros"), [(torch.bfloat16, False), (torch.float16, False), (torch.float16, True)])
def test_all_numbers_are_widened_exactly(dtype: torch.dtype, scale_dtype: torch.dtype, has_zeros: bool) -> None:
    """Every number with scales of any size, those without a leading one too, by the kernel, the reference and the definition."""
    drawn = int4(64, 192, group_inputs=64, dtype=scale_dtype, has_zeros=has_zeros)
    assert len(drawn.packed.unique()) == 256
    drawn.scales.view(torch.int16)[:, 0] = torch.arange(64, dtype=torch.int16) * 490  # up to 30870, which is below infinity
    drawn.scales[1::2] *= -1
    numbers = torch.stack([drawn.packed >> bits & 15 for bits in (0, 4)], dim=-1).view(64, 3, 64).double()
    numbers -= 8 if drawn.zeros is None else drawn.zeros.double().unsqueeze(-1)
    wanted = (numbers * drawn.scales.double().unsqueeze(-1)).view(64, 192).float().to(dtype)
    for twin in (False, True):
        found = torch.empty_like(wanted)
        if twin:
            reference.int4_rows(drawn.packed, drawn.scales, drawn.zeros, 64, found)
        else:
            ops.kernels.widen_four_bits(*four_bits(drawn), array(found))
        tiny = wanted.abs() < 2.0**-126  # which a processor may round to 0 where it rounds to bfloat16
        assert torch.equal(found[~tiny], wanted[~tiny])
        assert ((found - wanted).abs()[tiny] < 2.0**-126).all()


@pytest.mark.parametrize("num_rows", [1, 3, 8, 30])
@pytest.mark.parametrize(
    ("num_inputs", "num_outputs", "group_inputs", "scale_dtype", "has_zeros"),
    [
        (96, 36, 96, torch.float16, True),
        (576, 65, 64, torch.bfloat16, False),
        (576, 65, 64, torch.float16, True),
        (2048, 130, 128, torch.bfloat16, False),
        (320, 3, 32, torch.float16, False),
    ],
)
def test_linear(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    group_inputs: int,
    scale_dtype: torch.dtype,
    has_zeros: bool,
) -> None:
    """For few rows weights are not rounded to bfloat16, for many they are."""
    share_everything(monkeypatch)
    for module in (cpu_ops, products):
        monkeypatch.setattr(module, "WIDENED_BYTES", 70 * num_inputs * dtype.itemsize)
    x, added = random(num_rows, num_inputs, dtype=dtype), random(num_outputs, dtype=dtype)
    weight = int4(num_outputs, num_inputs, group_inputs=group_inputs, dtype=scale_dtype, has_zeros=has_zeros)
    dense = torch.empty(num_outputs, num_inputs)
    reference.int4_rows(weight.packed, weight.scales, weight.zeros, group_inputs, dense)
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


@pytest.mark.parametrize(("num_tokens", "num_threads", "has_zeros"), [(1, 1, False), (23, 2, True), (70, 2, False)])
def test_experts(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, num_tokens: int, num_threads: int, has_zeros: bool) -> None:
    ops.set_num_threads(num_threads)
    share_everything(monkeypatch)
    width, inner, num_experts = 96, 64, 3
    gate_up = int4(num_experts, 2 * inner, width, group_inputs=32, has_zeros=has_zeros)
    down = int4(num_experts, width, inner, group_inputs=64, dtype=torch.float16, has_zeros=has_zeros)
    experts = ExpertMatrices(gate_up, down, 2, True)
    x, scores = random(num_tokens, width, dtype=dtype), random(num_tokens, num_experts, dtype=dtype, scale=2.0)
    same(*both(monkeypatch, lambda: ops.experts(x, scores, experts, None, batch_of(range(num_tokens)))))
