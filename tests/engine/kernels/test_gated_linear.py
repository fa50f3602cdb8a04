"""A product of few rows with the activation in it has the bits of the product and the activation one after the other."""

from __future__ import annotations

from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from tests.engine.kernels.draw import Draw
from tests.engine.kernels.row_cases import check_gated_linear


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu runs the case")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_activation_in_the_product_changes_no_bit(dtype: torch.dtype, gelu: bool, has_bias: bool) -> None:
    for seed, (rows, width) in enumerate(product((1, 2, 3, 4), (1, 2, 7, 9))):
        check_gated_linear(Draw(seed, dtype, "cpu"), rows, width, 2049 if rows == 1 else 600, has_bias, gelu)
