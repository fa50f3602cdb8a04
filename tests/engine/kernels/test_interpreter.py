"""What tests/interpreter_types.py keeps for interpreted kernels does not change what they compute, nor what they refuse."""

from __future__ import annotations

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
