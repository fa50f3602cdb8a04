"""Every Triton kernel, interpreted, gives the results of its reference implementation in torch, for random shapes.

HEARTHD_TEST_SHAPES=50 draws more of them than the suite has time for: by default it draws 4 in float32 and 2 in float16.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from tests.engine.kernels.draw import Draw
from tests.engine.kernels.kernel_cases import CASES, of_dtypes

NUM_SHAPES = {dtype: int(os.environ.get("HEARTHD_TEST_SHAPES", num)) for dtype, num in ((torch.float32, 4), (torch.float16, 2))}
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of infinities, a GPU does not


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu runs the same cases")
@pytest.mark.parametrize(("name", "dtype"), of_dtypes(torch.float32, torch.float16))
def test_kernel_equals_its_twin(name: str, dtype: torch.dtype) -> None:
    for seed in range(NUM_SHAPES[dtype]):
        CASES[name](Draw(seed, dtype, "cpu"))
