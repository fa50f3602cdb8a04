"""Tests of how compiled kernels are looked up and entered."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.cpu.products import array
from engine.host import compiled
from engine.host.compiled import direct
from engine.ops import reference
from tests.engine.cpu_ops import ops
from tests.engine.ops.twins import same, share_everything
from tests.kernel_cache import CACHE_DIR

pytest.importorskip("numba")
compiled.keep_in(CACHE_DIR)  # before a kernel is imported
from engine.cpu.kernels import int8  # noqa: E402


def test_threads_have_a_compilation_of_their_own() -> None:
    """Serial and parallel forms of a kernel have different names. Numba's cache goes by name: under one name it returns the form
    compiled first."""
    from engine.cpu.kernels import amx_linear, attention, linear, rows

    for serial, parallel in (
        (rows.rms_norm, rows.rms_norm_parallel),
        (attention.paged_attention_serial, attention.paged_attention_parallel),
        (linear.few_rows_linear_serial, linear.few_rows_linear_parallel),
        (int8.int8_linear_serial, int8.int8_linear_parallel),
        (amx_linear.amx_linear_serial, amx_linear.amx_linear_parallel),
        (amx_linear.amx_int8_linear_serial, amx_linear.amx_int8_linear_parallel),
    ):
        assert serial.py_func.__qualname__ != parallel.py_func.__qualname__


@pytest.mark.parametrize("threads", [1, 2])
def test_a_repeated_call_enters_the_machine_code(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, threads: int) -> None:
    """`direct` returns the machine code for the form that is due and for the types of the arguments. Calls that were not compiled
    for their types, and other functions, are returned as they are."""
    from engine.cpu.kernels import rows

    share_everything(monkeypatch)
    ops.set_num_threads(threads)
    x, weight, out = torch.randn(3, 64).to(dtype), torch.rand(64).to(dtype), torch.empty(3, 64, dtype=dtype)
    args = (array(x), array(weight), False, 1e-5, array(out))
    kernel, due = ops.kernels.rms_norm, rows.rms_norm if threads == 1 else rows.rms_norm_parallel
    entry = direct(kernel, args)
    assert entry in [found.entry_point for found in due.overloads.values()]
    entry(*args)
    same(out, reference.rms_norm(x, weight, 1e-5, False))
    assert direct(kernel, (*args[:3], 1, args[4])) is due, "an integer for eps"
    assert direct(print, args) is print


def test_kernels_refuse_to_compile_inside_a_step() -> None:
    with pytest.raises(TypeError, match="No matching definition"):
        ops.kernels.silu_and_mul(np.zeros((2, 8), np.float64), np.zeros((2, 4), np.float64))
