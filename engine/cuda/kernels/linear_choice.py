"""Chooses the kernel that multiplies few rows on a GPU: ours, or the one that torch picks. Both are measured, once for each size,
when a model is warmed up.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.cuda.kernels import triton_linear

REPEATS = 7
FLUSH_BYTES = 128 << 20  # written between two measurements; more than the cache holds, so that weights come from memory

_ours_wins: dict[tuple[int, int, int, torch.dtype], bool] = {}
_noted: list[Tensor] | None = None


class _Launching(threading.local):
    both = False  # whether this thread's products of few rows launch both kernels


_launching = _Launching()


def few_rows(num_rows: int) -> int:
    """Returns the row count under which num_rows is measured: 1, 2 or 4. Returns 0 if num_rows is too large for our kernel."""
    return 0 if num_rows > triton_linear.MAX_ROWS else 1 << (num_rows - 1).bit_length()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x [M, K] @ weight [N, K] transposed, plus bias. Sizes that have not been measured use torch's kernel."""
    if _noted is not None:
        _noted.append(weight)
    rows = few_rows(x.shape[0])
    if rows and _launching.both:
        launch_ours(x, weight, bias)
    if rows and _ours_wins.get((rows, *weight.shape, x.dtype), False):
        return ours(x, weight, bias)
    return functional.linear(x, weight, bias)


def ours(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0])
    triton_linear.few_rows_linear(x, weight, bias, out)
    return out


def launch_ours(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Launches our kernel as steps do once it was measured to be the faster one, and as `measure` does."""
    ours(x, weight, None)
    if bias is not None:
        ours(x, weight, bias)


@contextmanager
def both_kernels() -> Iterator[None]:
    """Inside, this thread's products of few rows launch our kernel too, whichever is chosen, now or later."""
    _launching.both = True
    try:
        yield
    finally:
        _launching.both = False


@contextmanager
def weights_of_products() -> Iterator[list[Tensor]]:
    """Yields a list that collects the weights that `linear` is called with inside the context."""
    global _noted
    _noted = []
    try:
        yield _noted
    finally:
        _noted = None


def measure(weight: Tensor, num_rows: int) -> dict[str, float]:
    """Measures both kernels for weight [N, K] on a GPU and returns their median seconds. From then on `linear` uses the faster one.
    Returns {} if this size is already measured, or if there is not enough free memory to measure it."""
    key = (few_rows(num_rows), *weight.shape, weight.dtype)
    if key in _ours_wins:
        return {}
    try:
        x = torch.randn(num_rows, weight.shape[1], device=weight.device).to(weight.dtype)
        flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=weight.device)
        seconds = {
            "torch": _median_s(lambda: functional.linear(x, weight), flush),
            "triton": _median_s(lambda: ours(x, weight, None), flush),
        }
    except torch.OutOfMemoryError:
        return {}
    _ours_wins[key] = seconds["triton"] < seconds["torch"]
    return seconds


def _median_s(call: Callable[[], Any], flush: Tensor) -> float:
    times = []
    call()
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[REPEATS // 2]
