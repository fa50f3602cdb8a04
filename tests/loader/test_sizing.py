from __future__ import annotations

import json
import math

import pytest

from loader.hf_config import ModelShape, parse_config
from loader.sizing import (
    block_bytes,
    default_max_model_len,
    kv_bytes_per_token,
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


def test_default_length_never_exceeds_the_checkpoints() -> None:
    assert default_max_model_len(shape(), "float32", 1 << 20) == 64


def test_work_space_grows_with_what_it_depends_on() -> None:
    model = shape(vocab_size=32000, max_position_embeddings=4096)
    base = work_space_bytes(model, "bfloat16", 512, 64, 1024)
    assert base < work_space_bytes(model, "bfloat16", 4096, 64, 1024)
    assert base < work_space_bytes(model, "float32", 512, 256, 1024)
    assert work_space_bytes(model, "bfloat16", 512, 64) == work_space_bytes(model, "bfloat16", 512, 64, 4096)
    assert base < 64 << 20
