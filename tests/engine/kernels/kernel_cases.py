"""One case for each Triton kernel and seed: random shapes and inputs, the kernel on a device, its reference implementation in torch
on the CPU. The same cases run interpreted (float32, float16) and on a GPU (bfloat16 too).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from tests.engine.kernels.adapter_cases import adapters, adapters_of_tokens
from tests.engine.kernels.attention_cases import decode_attention, extend_attention, joined_pieces, work_lists
from tests.engine.kernels.delta_cases import gated_delta
from tests.engine.kernels.draw import Draw
from tests.engine.kernels.expert_cases import experts, own_pairs, routing, routing_by_sigmoid
from tests.engine.kernels.kv_write_cases import fp8_rounding, rope
from tests.engine.kernels.latent_cases import decode_latents, extend_latents, products_by_head, store_latents
from tests.engine.kernels.memory_cases import checksums, inputs, packed_weights
from tests.engine.kernels.row_cases import (
    few_rows_linear,
    fp8_linear,
    gated_linear,
    gates,
    gathers,
    int4_linear,
    int8_linear,
    norms,
    nvfp4_linear,
)
from tests.engine.kernels.sampling_cases import edits, logprobs, ranks, sampling

# cases whose numbers are integers, or float32 whatever the model's dtype
ONE_DTYPE = (
    "work_lists",
    "inputs",
    "routing",
    "routing_by_sigmoid",
    "own_pairs",
    "packed_weights",
    "checksums",
    "adapters_of_tokens",
)

CASES: dict[str, Callable[[Draw], None]] = {
    case.__name__: case
    for case in (
        norms,
        gates,
        few_rows_linear,
        gated_linear,
        fp8_linear,
        int4_linear,
        int8_linear,
        nvfp4_linear,
        adapters,
        adapters_of_tokens,
        gathers,
        routing,
        routing_by_sigmoid,
        own_pairs,
        experts,
        rope,
        inputs,
        work_lists,
        decode_attention,
        joined_pieces,
        extend_attention,
        store_latents,
        products_by_head,
        decode_latents,
        extend_latents,
        gated_delta,
        sampling,
        edits,
        logprobs,
        ranks,
        packed_weights,
        checksums,
        fp8_rounding,
    )
}
_IN_FP8 = (rope, decode_attention, extend_attention, store_latents, decode_latents, extend_latents, experts)
CASES |= {f"{case.__name__}_fp8": partial(case, fp8=True) for case in _IN_FP8}
CASES["experts_mxfp4"] = partial(experts, in_mxfp4=True)
CASES |= {f"{case.__name__}_int4": partial(case, int4=True) for case in (experts, products_by_head)}
CASES |= {f"{case.__name__}_int8": partial(case, int8=True) for case in (experts, products_by_head)}
CASES |= {f"{case.__name__}_nvfp4": partial(case, nvfp4=True) for case in (experts, products_by_head)}


def of_dtypes(*dtypes: torch.dtype) -> list[object]:
    """Returns (case, dtype) parameters for a test of all kernels. float32 must be among the dtypes."""
    return [
        pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
        for name in CASES
        for dtype in dtypes
        if dtype is torch.float32 or name not in ONE_DTYPE
    ]
