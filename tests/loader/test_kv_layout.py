from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from loader.configs.hf_config import parse_config
from loader.shapes.kv_dtypes import KV_FP8
from loader.shapes.kv_layout import (
    block_bytes,
    default_max_model_len,
    group_chunks,
    kv_bytes_per_token,
    kv_groups,
    kv_reserved_bytes,
    kv_token_dims,
)
from loader.shapes.model_shape import ModelShape
from loader.sizes.layout import weights_bytes
from loader.sizes.work_space import logits_rows
from tests.loader.checkpoints import shape

MIB = 1 << 20
PUBLISHED = Path(__file__).parents[1] / "published"


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


def test_latents_of_deepseek_v3() -> None:
    """512 numbers of a latent and 64 that are rotated, for 128 heads: published, 70 KB a token in bfloat16."""
    deepseek = parse_config((PUBLISHED / "deepseek-v3.json").read_bytes())
    assert kv_token_dims(deepseek, 0) == (1, 1, 576)
    assert kv_bytes_per_token(deepseek, "bfloat16") == 61 * 576 * 2 == 70_272
    assert kv_bytes_per_token(deepseek, KV_FP8) == 61 * 577
    (group,) = kv_groups(deepseek, "bfloat16", 16)
    assert (group.kind, group.block_bytes, group.window_tokens) == ("latent", 70_272 * 16, 0)


def test_default_length_never_exceeds_the_checkpoints() -> None:
    assert default_max_model_len(shape(), "float32", 1 << 20) == 64


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
