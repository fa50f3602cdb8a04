"""The operations of the `cpu` device for tests that call them directly, and runners that compute with given operations."""

from __future__ import annotations

import os

from engine.cpu.backend import CpuBackend
from engine.cpu.ops import CpuOps
from engine.loading.runner import TorchRunner
from tests.kernel_cache import CACHE_DIR

# of kernels besides those that decoders call (loader/configs/kernel_sets.py)
SETS = ("int8", "int8_experts", "fp8", "mxfp4", "nvfp4", "int4", "int4_zeros", "adapters", "ranks")
MOST_THREADS = "HEARTHD_TESTS_MOST_THREADS"  # so many at most share an operation of a test: kernels have other forms for several


class _TestedOps(CpuOps):
    def set_num_threads(self, num_threads: int) -> None:
        super().set_num_threads(min(num_threads, int(os.environ.get(MOST_THREADS, num_threads))))


ops = _TestedOps(CACHE_DIR)


def compute_with(runner: TorchRunner, use_kernels: bool) -> TorchRunner:
    """Lets the models of a runner compute with kernels, or with their reference implementation. Returns the runner."""
    runner._kernels.result()
    assert isinstance(runner.backend, CpuBackend)
    runner.backend._ops = CpuOps(CACHE_DIR, use_kernels)
    return runner
