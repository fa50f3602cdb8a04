"""Runs the same call of ops with and without the CPU kernels, and compares the results within a tolerance."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from loader.configs.kernel_sets import OF_DECODERS, KernelSet
from tests.engine.cpu_ops import SETS, ops

# Against float64, torch's own float32 product of 2,000 inputs is off by 7e-6 on aarch64, the kernels' by 9e-7.
TOLERANCE = {torch.float32: 1e-5 if platform.machine() == "aarch64" else 2e-6, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module", autouse=True)
def compiled_as_called() -> Iterator[None]:
    """Loads the kernels that are compiled, and lets others be compiled when a test calls them, so that such tests can be run for
    many kinds of processor. A call alone does not find a kernel that was compiled for a signature, since that names its result's
    type, too. Where a model was loaded in this process before, its kernels would compile no other forms."""
    from engine.cpu import kernel_units

    for dtype in ("float32", "bfloat16"):
        for name in (*OF_DECODERS, *SETS, "packed"):
            for unit in kernel_units.units(KernelSet(dtype, name), True):
                unit.load()
    for one in list(vars(ops.kernels).values()):
        for form in (one.serial, one.parallel) if isinstance(one, ops.kernels.Forms) else (one,):
            if hasattr(form, "disable_compile"):
                form.disable_compile(False)
    yield
    ops.set_num_threads(1)


def both(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> tuple[Any, Any]:
    """Returns the result of `call` with the CPU kernels and with the reference implementation."""
    with_kernels = call()
    with monkeypatch.context() as patch:
        patch.setattr(ops, "kernels", None)
        return with_kernels, call()


def lost_by_adding_to(bias: Tensor | None, num_inputs: int) -> Tensor | float:
    """Returns what a product may lose by adding the products of num_inputs inputs to the bias [N] of its dtype, as torch does on
    aarch64 (docs/aarch64.md): float32 sums are rounded at the bias's size after each input, bfloat16 sums, where the processor has
    bfloat16 products, every 256 inputs or so. 0 elsewhere. The factor 4 is for the worst of thousands."""
    if bias is None or platform.machine() != "aarch64":
        return 0.0
    rounding = num_inputs**0.5 * 2**-24 if bias.dtype is torch.float32 else (num_inputs / 256) ** 0.5 * 2**-9
    return 4 * rounding * bias.abs().double()


def share_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes kernels divide even the smallest work among threads, if there is more than one."""
    monkeypatch.setattr(ops.kernels, "_SHARED_ATTENTION", 0)
    monkeypatch.setattr(ops.kernels, "_SHARED_WEIGHTS", 0)
    monkeypatch.setattr(ops.kernels, "_SHARED_TILES", 0)
    monkeypatch.setattr(ops.kernels, "_SHARED_WIDENING", 0)
    monkeypatch.setattr(ops.kernels, "_SHARED_ROWS", 0)
    monkeypatch.setattr(ops.kernels, "_SHARED_LOGITS", 0)
    monkeypatch.setattr(ops.kernels, "_SHARED_CONVOLUTION", 0)
    monkeypatch.setattr(ops.kernels, "_SHARED_STATES", 0)


def same(left: Tensor, right: Tensor) -> None:
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    tolerance = TOLERANCE[left.dtype]
    torch.testing.assert_close(left.float(), right.float(), rtol=tolerance, atol=tolerance)


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(dtype)
