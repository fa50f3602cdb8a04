from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest

from loader.hf_config import ModelShape, parse_config
from loader.safetensors import TensorRef
from loader.sizing import (
    BLOCK_BYTES,
    KV_FP8,
    MIN_BLOCK_ALIGNED_BYTES,
    block_bytes,
    block_offsets,
    default_max_model_len,
    group_chunks,
    kv_bytes_per_token,
    kv_groups,
    kv_reserved_bytes,
    logits_rows,
    parameter_shapes,
    weight_layout,
    weights_bytes,
    work_space_bytes,
)
from tests.loader.checkpoints import CONFIG


def shape(**changes: object) -> ModelShape:
    return parse_config(json.dumps(CONFIG | changes).encode())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layout_is_aligned_and_without_overlap(dtype: str) -> None:
    model = shape(attention_bias=True, mlp_bias=True, tie_word_embeddings=False)
    slots = weight_layout(model, dtype)
    assert {slot.name: slot.shape for slot in slots} == parameter_shapes(model)
    end = 0
    for slot in slots:
        fused = any(part in slot.name for part in ("k_proj", "v_proj", "up_proj"))
        # a fused part follows its neighbour without a gap; everything else starts on 64 bytes
        assert slot.offset_bytes == end if fused else (slot.offset_bytes % 64 == 0 and 0 <= slot.offset_bytes - end < 64)
        assert slot.num_bytes == math.prod(slot.shape) * (4 if dtype == "float32" else 2)
        end = slot.offset_bytes + slot.num_bytes
    assert 0 <= weights_bytes(model, dtype) - end < 64


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_layout_is_aligned_and_without_overlap(dtype: str) -> None:
    model = shape(attention_bias=True, mlp_bias=True, tie_word_embeddings=False)
    slots = weight_layout(model, dtype, "int8")
    assert {slot.name: slot.shape for slot in slots} == parameter_shapes(model)
    spans = []
    for slot in slots:
        quantised = slot.name.endswith("_proj.weight")
        assert (slot.scales_at_bytes >= 0) == quantised
        assert slot.num_bytes == math.prod(slot.shape) * (1 if quantised else 4 if dtype == "float32" else 2)
        spans.append((slot.offset_bytes, slot.offset_bytes + slot.num_bytes))
        if quantised:
            assert slot.scales_at_bytes % 4 == 0
            spans.append((slot.scales_at_bytes, slot.scales_at_bytes + 4 * slot.shape[0]))
    spans.sort()
    assert all(0 <= begin - end < 64 for (_, end), (begin, _) in pairwise(spans))
    assert 0 <= weights_bytes(model, dtype, "int8") - spans[-1][1] < 64
    for name in ("q_proj", "gate_proj"):  # scales that one product reads together lie end to end
        first = next(number for number, slot in enumerate(slots) if slot.name.endswith(f"{name}.weight"))
        assert slots[first + 1].scales_at_bytes == slots[first].scales_at_bytes + 4 * slots[first].shape[0]


def test_figures_of_llama_3_8b() -> None:
    """Against the published numbers: 8.03 G parameters, 128 KiB of KV a token in bfloat16."""
    llama = shape(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
    )
    assert weights_bytes(llama, "bfloat16") == 8_030_261_248 * 2
    assert kv_bytes_per_token(llama, "bfloat16") == 128 << 10
    assert block_bytes(llama, "bfloat16", 16) == 2 << 20
    assert default_max_model_len(llama, "bfloat16", 24 << 30) == 49152  # a quarter of the device
    assert default_max_model_len(llama, "bfloat16", 512 << 20) == 2048  # but at least that
    assert default_max_model_len(llama, "bfloat16", 80 << 40) == 131072  # and at most what the checkpoint says
    assert logits_rows(llama, "float32", 256) == 16
    # fp8: a byte each, and one for the scale of 128 of them
    assert kv_bytes_per_token(llama, KV_FP8) == 129 * 2 * 8 * 32
    assert sum(group.block_bytes for group in kv_groups(llama, KV_FP8, 16)) == block_bytes(llama, KV_FP8, 16)
    assert default_max_model_len(llama, KV_FP8, 24 << 30) == 49152 * 256 // 129
    reserved = [kv_reserved_bytes(llama, kv_dtype, 65536, 16, 512, MIB) for kv_dtype in ("bfloat16", KV_FP8)]
    assert reserved[1] / reserved[0] == pytest.approx(129 / 256, rel=1e-3)


def test_logits_of_all_sequences_are_computed_at_once_where_they_fit() -> None:
    """Rows are padded to a multiple of 8, so logits have room for as many."""
    rows = [logits_rows(shape(), "bfloat16", num) for num in (1, 7, 8, 9, 30, 32)]
    assert rows == [1, 7, 8, 16, 32, 32]
    large = shape(vocab_size=300_000)
    assert [logits_rows(large, "bfloat16", num) for num in (9, 30)] == [8, 8]


def test_default_length_never_exceeds_the_checkpoints() -> None:
    assert default_max_model_len(shape(), "float32", 1 << 20) == 64


def test_work_space_grows_with_what_it_depends_on() -> None:
    model = shape(vocab_size=32000, max_position_embeddings=4096)
    base = work_space_bytes(model, "bfloat16", 512, 64, 1024)
    assert base < work_space_bytes(model, "bfloat16", 4096, 64, 1024)
    assert base < work_space_bytes(model, "float32", 512, 256, 1024)
    assert work_space_bytes(model, "bfloat16", 512, 64) == work_space_bytes(model, "bfloat16", 512, 64, 4096)
    assert base < 64 << 20


MIB = 1 << 20


def windowed(*windows: int) -> ModelShape:
    return replace(shape(num_hidden_layers=len(windows), max_position_embeddings=1 << 17), layer_windows=windows)


def test_layers_with_one_window_are_one_group() -> None:
    model = windowed(512, 0, 512, 1024, 0)
    groups = kv_groups(model, "float32", 16)
    assert [(group.kind, group.window_tokens, group.layers) for group in groups] == [
        ("full", 0, (1, 4)),
        ("window", 512, (0, 2)),
        ("window", 1024, (3,)),
    ]
    assert sum(group.block_bytes for group in groups) == block_bytes(model, "float32", 16)


def test_a_window_group_reserves_its_window_and_a_chunk() -> None:
    model = windowed(0, 1024, 1024, 1024)
    full, window = kv_groups(model, "float32", 16)
    assert group_chunks(full, 65536, 512, MIB) == 65536 // 16 * full.block_bytes // MIB + 1
    assert group_chunks(window, 65536, 512, MIB) == -(-97 * window.block_bytes // MIB) + 1
    assert group_chunks(window, 64, 512, MIB) == group_chunks(window, 49, 512, MIB) <= 2
    reserved = kv_reserved_bytes(model, "float32", 65536, 16, 512, MIB)
    assert reserved == (group_chunks(full, 65536, 512, MIB) + group_chunks(window, 65536, 512, MIB) - 1) * MIB
    assert reserved < 65536 * kv_bytes_per_token(model, "float32") // 2


def test_windows_make_the_default_length_longer() -> None:
    layer_bytes = kv_bytes_per_token(windowed(0), "float32")
    budget = 4 * 4 * 10_000 * layer_bytes  # 10,000 tokens of four full layers in a quarter
    assert default_max_model_len(windowed(0, 0, 0, 0), "float32", budget) == 10_000
    assert default_max_model_len(windowed(0, 4000, 4000, 4000), "float32", budget) == 40_000 - 3 * 4000
    assert default_max_model_len(windowed(4000, 4000, 4000, 4000), "float32", budget) == 1 << 17
    assert default_max_model_len(windowed(0, 20_000, 20_000, 20_000), "float32", budget) == 10_000


def test_large_parameters_lie_in_blocks_as_in_their_file() -> None:
    model = shape(hidden_size=256, intermediate_size=512, vocab_size=1024, num_key_value_heads=4, dtype="bfloat16")
    sizes = parameter_shapes(model)
    tensors, position = [], 808
    for name in sorted(sizes):
        num_bytes = math.prod(sizes[name]) * 2
        tensors.append(TensorRef("file", name, "BF16", sizes[name], position, num_bytes))
        position += num_bytes
    placed = replace(model, block_offsets=block_offsets(model, tensors))
    at = {slot.name: slot.offset_bytes for slot in weight_layout(placed, "bfloat16")}
    large = [tensor for tensor in tensors if tensor.num_bytes >= MIN_BLOCK_ALIGNED_BYTES]
    assert len(large) == 1 + 7 * 2
    assert all(at[tensor.name] % BLOCK_BYTES == tensor.offset_bytes % BLOCK_BYTES for tensor in large)
    assert all(at[tensor.name] % 64 == 0 for tensor in tensors if tensor not in large)
    padding = weights_bytes(placed, "bfloat16") - weights_bytes(model, "bfloat16")
    assert 0 <= padding < BLOCK_BYTES * len(large)
    assert weight_layout(placed, "float32") == weight_layout(model, "float32")  # nothing of it could be read in place
    odd = [replace(tensor, offset_bytes=tensor.offset_bytes + 3) for tensor in tensors]
    assert set(block_offsets(model, odd)) == {-1}
