"""Fixtures that several test files use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine import ops
from tests.kernel_cache import CACHE_DIR


@pytest.fixture
def gpu_kernels() -> Iterator[None]:
    """Selects the kernels that a GPU runs; on the CPU they are interpreted."""
    ops.configure_gpu(CACHE_DIR)
    yield
    ops.configure(CACHE_DIR)
