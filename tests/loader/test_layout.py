from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from loader.files.direct_io import BLOCK_BYTES
from loader.files.safetensors import TensorRef
from loader.formats.int8 import INT8
from loader.sizes.layout import MIN_BLOCK_ALIGNED_BYTES, block_offsets, parameter_shapes, weight_layout, weights_bytes
from tests.loader.checkpoints import shape


def test_stages_follow_the_layers() -> None:
    stage_of = {slot.name: slot.stage for slot in weight_layout(shape(tie_word_embeddings=False), "float32")}
    assert stage_of["model.embed_tokens.weight"] == 0
    for layer in range(2):
        assert {stage for name, stage in stage_of.items() if f".layers.{layer}." in name} == {layer + 1}
    assert stage_of["model.norm.weight"] == stage_of["lm_head.weight"] == 3
    encoder = shape(architectures=["BertModel"], hidden_act="gelu")
    assert {slot.name: slot.stage for slot in weight_layout(encoder, "float32")}["encoder.layer.1.output.LayerNorm.bias"] == 2


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
    slots = weight_layout(model, dtype, INT8)
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
    assert 0 <= weights_bytes(model, dtype, INT8) - spans[-1][1] < 64
    for name in ("q_proj", "gate_proj"):  # scales that one product reads together lie end to end
        first = next(number for number, slot in enumerate(slots) if slot.name.endswith(f"{name}.weight"))
        assert slots[first + 1].scales_at_bytes == slots[first].scales_at_bytes + 4 * slots[first].shape[0]


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
