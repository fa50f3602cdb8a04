"""Compiles the CPU kernels for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.engine.cpu_ops import SETS, ops


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    for dtype in ("float32", "bfloat16"):
        ops.prepare(dtype, 2, *SETS)
    yield
    ops.set_num_threads(1)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    kind: torch.dtype = request.param
    return kind
