"""What tests/interpreter_types.py keeps for interpreted kernels, and what tests/interpreter_operators.py computes of them at once,
does not change what they compute, nor what they refuse."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime import interpreter

from tests.engine.cuda_bench import INTERPRETED

pytestmark = INTERPRETED


@triton.jit
def _numbers_kernel(out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    ones = tl.full((SIZE,), 1.0, tl.float32)
    tl.store(out + at, ones / 0.0)
    tl.store(out + SIZE + at, ones / -0.0)
    tl.store(out + 2 * SIZE + at, 1 - ones)
    tl.store(out + 3 * SIZE + at, ones - 1)
    tl.store(out + 4 * SIZE + at, (ones.to(tl.float16) / 3.0).to(tl.float32))
    tl.store(out + 5 * SIZE + at, tl.sum(at[:, None] * at[None, :], 1).to(tl.float32))


@triton.jit
def _multiplies_pointers_kernel(out):
    tl.store(out + 4, 1.0)
    out * 4


def test_a_number_beside_a_block_is_what_it_was() -> None:
    out = torch.zeros(6, 4)
    for _ in range(2):  # with what was kept, too
        _numbers_kernel[(1,)](out, 4)
        found = out.numpy()
        assert (found[0] == np.inf).all()
        assert (found[1] == -np.inf).all()
        assert (found[2:4] == 0).all()
        assert (found[4] == np.float32(1) / np.float32(3)).all(), "a division of float16 is one of float32"
        assert (found[5] == np.arange(4) * 6).all()


@triton.jit
def _operators_kernel(x, y, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    a, b = tl.load(x + at)[:, None], tl.load(y + at)[None, :]
    to = out + at[:, None] * SIZE + at[None, :]
    step = SIZE * SIZE
    tl.store(to, (a + b).to(tl.float64))
    tl.store(to + step, (a - b).to(tl.float64))
    tl.store(to + 2 * step, (a * b).to(tl.float64))
    tl.store(to + 3 * step, (a / b).to(tl.float64))
    tl.store(to + 4 * step, (a < b).to(tl.float64))
    tl.store(to + 5 * step, ((a <= b) & (a != b)).to(tl.float64))
    tl.store(to + 6 * step, ((a > b) | (a == b)).to(tl.float64))
    tl.store(to + 7 * step, (a >= b).to(tl.float64))
    tl.store(to + 8 * step, (2 - a + 3 * b).to(tl.float64))
    tl.store(to + 9 * step, (a - tl.load(y)).to(tl.float64))


SIGNED = (torch.float32, torch.float64, torch.int32, torch.int64, torch.int16)


@pytest.mark.parametrize(("first", "second"), [*product(SIGNED, SIGNED), (torch.uint8, torch.uint8)], ids=str)
def test_operators_compute_as_with_everything_looked_at(first: torch.dtype, second: torch.dtype) -> None:
    """Also of two types, of which one is converted. PyTorch computes what is expected, in the type that Triton's rules give."""
    left, right = torch.tensor([3, 1, 250, 7]).to(first), torch.tensor([1, 3, 7, 100]).to(second)
    out = torch.zeros(10, 4, 4, dtype=torch.float64)
    for _ in range(2):  # with what was kept, too
        _operators_kernel[(1,)](left, right, out, 4)
    kind = torch.promote_types(first, second)
    a, b = left.to(kind)[:, None], right.to(kind)[None, :]
    quotient = a / b if kind.is_floating_point else a.float() / b.float()
    expected = [a + b, a - b, a * b, quotient, a < b, a < b, a >= b, a >= b, 2 - a + 3 * b, (a - b[:, :1]).expand(4, 4)]
    for number, (found, wanted) in enumerate(zip(out, expected, strict=True)):
        np.testing.assert_array_equal(found, wanted.double(), err_msg=str(number))


@triton.jit
def _bits_kernel(x, y, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, (a & b).to(tl.int64))
    tl.store(out + SIZE + at, (a | b).to(tl.int64))
    tl.store(out + 2 * SIZE + at, ((a ^ b) & 5).to(tl.int64))
    tl.store(out + 3 * SIZE + at, ((a > b) ^ (a == 12)).to(tl.int64))


@pytest.mark.parametrize(("first", "second"), [(torch.int32,) * 2, (torch.uint8,) * 2, (torch.int32, torch.int64)], ids=str)
def test_bits_are_those_of_both(first: torch.dtype, second: torch.dtype) -> None:
    a, b, out = torch.tensor([12, 12, 3, 127]).to(first), torch.tensor([10, 127, 0, 12]).to(second), torch.zeros(4, 4).long()
    for _ in range(2):  # with what was kept, too
        _bits_kernel[(1,)](a, b, out, 4)
        assert out.tolist() == torch.stack([a & b, a | b, (a ^ b) & 5, (a > b) ^ (a == 12)]).tolist()


@triton.jit
def _offsets_kernel(x, by, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + SIZE + tl.load(by + at)))


@pytest.mark.parametrize("kind", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint32], ids=str)
def test_offsets_have_signs_where_their_type_has(kind: torch.dtype) -> None:
    x, out = torch.arange(300, dtype=torch.int16), torch.zeros(4, dtype=torch.int16)
    by = torch.tensor([0, 1, 2, 200] if kind in (torch.uint8, torch.uint32) else [0, -1, -4, 100]).to(kind)
    _offsets_kernel[(1,)](x, by, out, 4)
    assert out.tolist() == (by.long() + 4).tolist()


@triton.jit
def _signs_kernel(out):
    zero = tl.load(out) * 0.0
    tl.store(out + 1, 1.0 / (zero * -1.0 + -0.0))
    tl.store(out + 2, 1.0 / (zero * 1.0 + 0.0))


def test_a_zero_that_was_kept_has_its_sign() -> None:
    for _ in range(2):
        out = torch.ones(3)
        _signs_kernel[(1,)](out)
        assert out[1:].tolist() == [-np.inf, np.inf]


@triton.jit
def _adds_pointers_kernel(out):
    out + out


@triton.jit
def _adds_blocks_kernel(out, TO: tl.constexpr):
    tl.arange(0, 4) + tl.arange(0, TO)


def test_operands_that_do_not_go_together_are_refused() -> None:
    for _ in range(2):
        with pytest.raises(interpreter.InterpreterError, match="cannot add pointers"):
            _adds_pointers_kernel[(1,)](torch.zeros(8))
        with pytest.raises(interpreter.InterpreterError, match="incompatible dimensions"):
            _adds_blocks_kernel[(1,)](torch.zeros(8), 8)


def test_what_is_allowed_to_a_sum_is_not_to_a_product() -> None:
    for _ in range(2):
        with pytest.raises(interpreter.InterpreterError, match=r"IncompatibleTypeError|invalid operands"):
            _multiplies_pointers_kernel[(1,)](torch.zeros(8))


def test_blocks_of_a_kind_are_one_type_and_others_are_refused() -> None:
    assert tl.block_type(tl.int32, [4, 8]) is tl.block_type(tl.int32, [tl.constexpr(4), 8])
    assert tl.block_type(tl.int32, [4, 8]) != tl.block_type(tl.int64, [4, 8])
    assert tl.block_type(tl.pointer_type(tl.int32), [4]) != tl.block_type(tl.pointer_type(tl.int32, const=True), [4])
    with pytest.raises(ValueError, match="power of 2"):
        tl.block_type(tl.int32, [3])
