"""Every Triton kernel, compiled for the GPU at hand, against its torch twin: the cases that run interpreted elsewhere."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from engine.cuda import overlap_choice, overlap_trial
from engine.cuda.graphs import captured
from engine.cuda.kernels import flash_attention, triton_overlap
from engine.cuda.kernels.tiles import DECODE_KERNEL, EXTEND_KERNEL
from engine.cuda.tile_choice import JOINED_TURNS, compared_on
from engine.cuda.tile_trials import Trial
from loader.shapes.kv_dtypes import FP8_CAPABILITY
from tests.engine.kernels.attention_cases import not_finite_fp8
from tests.engine.kernels.draw import Draw
from tests.engine.kernels.kernel_cases import CASES, of_dtypes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# each shape of attention is compiled by itself, which takes seconds
NUM_SHAPES = {"decode_attention": 14, "extend_attention": 14, "rope": 20}
# A first run of 50 shapes each took 14 processes of an H100's host over five minutes, nearly all of it in the compiler.
FIRST_SHAPES, FIRST_PROCESSES, FIRST_S = 50, 14, 300
MOST_SHAPES, SHAPES_A_TEST = 18, 6  # so many tests a kernel that workers share the compiling evenly


def shapes_of(name: str) -> int:
    return NUM_SHAPES.get(name.removesuffix("_fp8"), MOST_SHAPES)


def cases() -> list[object]:
    """Returns (case, dtype, first seed) parameters."""
    return [
        pytest.param(*each.values, first, id=f"{each.id}-{first}")
        for each in of_dtypes(torch.bfloat16, torch.float16, torch.float32)
        for first in range(0, shapes_of(each.values[0]), SHAPES_A_TEST)
    ]


@pytest.mark.parametrize(("name", "dtype", "first"), cases())
def test_kernel_equals_its_twin(name: str, dtype: torch.dtype, first: int) -> None:
    if name.endswith("fp8") and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("the GPU does not convert float8_e4m3")
    for seed in range(first, min(first + SHAPES_A_TEST, shapes_of(name))):
        CASES[name](Draw(seed, dtype, "cuda"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fp8_kv_that_is_not_finite_is_known_as_such(dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("the GPU does not convert float8_e4m3")
    for seed in range(6):
        not_finite_fp8(Draw(seed, dtype, "cuda"))


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (8, 1, 128), (32, 8, 64), (8, 4, 256), (8, 2, 512)])
def test_the_form_that_joins_pieces_has_the_same_bits(heads: int, kv_heads: int, head_dim: int) -> None:
    """In the launches by which an engine decides whether it may choose that form on this GPU."""
    device = torch.device("cuda")
    compare = compared_on(device, torch.cuda.get_device_properties(device).multi_processor_count)
    trial = Trial(DECODE_KERNEL, heads, kv_heads, head_dim, "bfloat16", "bfloat16", 16)
    joining = [tile for tile in trial.tiles if tile.joins]
    assert joining
    assert {tile: [compare(trial, tile) for _ in range(JOINED_TURNS)] for tile in joining} == dict.fromkeys(
        joining, [True] * JOINED_TURNS
    )


@pytest.mark.parametrize("num_rows", overlap_trial.ROWS)
def test_kernels_that_overlap_have_the_same_bits(num_rows: int) -> None:
    """In the comparison by which an engine decides whether its kernels may overlap on this GPU."""
    device, (major, minor) = torch.device("cuda"), torch.cuda.get_device_capability()
    if 10 * major + minor not in triton_overlap.CAPABILITIES:
        pytest.skip("kernels overlap on GPUs of compute capability 9.0 and 10 only")
    num_cores = torch.cuda.get_device_properties(device).multi_processor_count
    compare = overlap_choice.compared_on(16, device, num_cores, partial(captured, device))
    assert compare(num_rows) is True


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (8, 1, 128), (32, 8, 64), (8, 4, 256)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_flash_attention_has_the_kernels_results(dtype: str, heads: int, kv_heads: int, head_dim: int) -> None:
    """In the comparison by which an engine decides whether it may choose FlashAttention for prompts on this GPU."""
    device, (major, minor) = torch.device("cuda"), torch.cuda.get_device_capability()
    if not flash_attention.version(10 * major + minor):
        pytest.skip("flash_attn_3 is not installed, or not used on this GPU")
    num_cores = torch.cuda.get_device_properties(device).multi_processor_count
    compare = compared_on(device, num_cores, partial(captured, device))
    trial = Trial(EXTEND_KERNEL, heads, kv_heads, head_dim, dtype, dtype, 16, tries_flash=True)
    assert compare(trial, trial.entry.tile._replace(flash=flash_attention.kind(head_dim, dtype))) is True
