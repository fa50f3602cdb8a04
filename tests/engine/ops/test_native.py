"""Tests of calls of compiled kernels that machine code makes one after the other."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from engine.cpu.products import array
from engine.host.compiled import compilation
from engine.ops import reference
from tests.engine.cpu_ops import ops
from tests.engine.ops.twins import random, same, share_everything

pytest.importorskip("numba")
from numba import float64, njit, uint64, void

from engine.cpu.programs.native import NativeCalls


def compiled(kernel: Any, *args: Any) -> tuple[Any, tuple[Any, ...]]:
    found = compilation(kernel, args)
    assert found is not None
    return found, args


@pytest.mark.parametrize("threads", [1, 2])
def test_they_compute_what_the_kernels_do(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, threads: int) -> None:
    """The calls give the kernels' results, in repeated runs: with flags, real numbers, arrays of one and two dimensions, and
    results that are the next call's inputs."""
    share_everything(monkeypatch)
    ops.set_num_threads(threads)
    x, weight, kernels = random(3, 70, dtype=dtype), random(70, dtype=dtype), ops.kernels
    normed, gated = torch.empty(3, 70, dtype=dtype), torch.empty(3, 35, dtype=dtype)
    calls = NativeCalls(
        [
            compiled(kernels.rms_norm, array(x), array(weight), True, 1e-3, array(normed)),
            compiled(kernels.silu_and_mul, array(normed), array(gated)),
            compiled(kernels.rms_norm, array(x), array(weight), False, 1e-5, array(normed)),
        ]
    )
    for _ in range(2):
        calls.run()
        same(gated, reference.silu_and_mul(reference.rms_norm(x, weight, 1e-3, True)))
        same(normed, reference.rms_norm(x, weight, 1e-5, False))
        x.mul_(torch.tensor([0.25]).to(dtype))
    NativeCalls([]).run()


@pytest.fixture(scope="module")
def divide() -> Any:
    """A kernel that divides the first number of an array, or raises. Compiling it takes a second."""

    @njit(void(float64[::1], uint64))
    def divide(numbers: Any, by: int) -> None:
        if by == 0:
            raise ZeroDivisionError("by nothing")
        numbers[0] /= by

    return next(iter(divide.overloads.values()))


def test_what_a_kernel_raises_is_raised_and_no_later_call_is_made(divide: Any) -> None:
    numbers = np.array([64.0])
    halves, fails = (divide, (numbers, np.uint64(2))), (divide, (numbers, np.uint64(0)))
    with pytest.raises(ZeroDivisionError, match="by nothing"):
        NativeCalls([halves, halves, fails, halves]).run()
    assert numbers[0] == 16.0


def test_calls_that_are_joined_are_made_in_order_and_by_themselves_as_before(divide: Any) -> None:
    numbers = np.array([64.0])
    halves, thirds = (NativeCalls([(divide, (numbers, np.uint64(by)))] * 2) for by in (2, 3))
    joined, ticks = halves.followed_by(thirds), np.zeros(5, np.int64)
    joined.run(ticks)
    assert numbers[0] == 64.0 / 4 / 9
    assert (np.diff(ticks) >= 0).all(), "aarch64 has clocks of 25 MHz, which are slower than these calls"
    assert ticks[-1] > ticks[0] > 0
    thirds.run()
    assert numbers[0] == 64.0 / 4 / 9 / 9
    fails = NativeCalls([(divide, (numbers, np.uint64(0)))])
    with pytest.raises(ZeroDivisionError, match="by nothing"):
        halves.followed_by(fails).followed_by(halves).run()
    assert numbers[0] == 64.0 / 4 / 9 / 9 / 4


def test_the_clock_is_read_around_every_call(dtype: torch.dtype) -> None:
    small, large = (random(rows, 640, dtype=dtype) for rows in (1, 4000))
    weight, kernel = random(640, dtype=dtype), ops.kernels.rms_norm.serial
    args = [(array(x), array(weight), False, 1e-5, array(torch.empty_like(x))) for x in (small, large, small)]
    calls, ticks = NativeCalls([compiled(kernel, *own) for own in args]), np.zeros(4, np.int64)
    calls.run()
    begin = time.perf_counter_ns()
    calls.run(ticks)
    assert time.perf_counter_ns() > begin
    passed = np.diff(ticks)
    assert passed.min() > 0
    assert passed[1] == passed.max(), "4,000 rows take longer than one"


def test_an_argument_that_is_no_word_is_refused() -> None:
    @njit
    def takes_a_complex_number(number: Any) -> None:
        pass

    takes_a_complex_number(1j)
    with pytest.raises(TypeError, match="complex"):
        NativeCalls([compiled(takes_a_complex_number, 1j)])
