"""Fixtures that several test files use."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from engine import ops
from tests.kernel_cache import CACHE_DIR


@pytest.fixture(autouse=True)
def no_runner_configures_later() -> Iterator[None]:
    """Waits for the threads in which runners configure the process's kernels: one that came late would do so in another test."""
    yield
    for thread in threading.enumerate():
        if thread.name == "kernels":
            thread.join(60)
            assert not thread.is_alive(), "a runner is still preparing its kernels"


@pytest.fixture
def gpu_kernels() -> Iterator[None]:
    """Selects the kernels that a GPU runs; on the CPU they are interpreted."""
    ops.configure_gpu(CACHE_DIR)
    yield
    ops.configure(CACHE_DIR)
