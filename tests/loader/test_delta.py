"""Layers of the gated delta rule: config.json, tensors, what they keep of a sequence, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loader.configs.hf_config import parse_config
from loader.errors import CheckpointError, UnsupportedModel
from loader.shapes.kv_dtypes import KV_FP8
from loader.shapes.kv_layout import (
    default_max_model_len,
    group_chunks,
    kv_bytes_per_token,
    kv_groups,
    kv_reserved_bytes,
    state_bytes,
)
from loader.shapes.model_shape import DeltaShape, ModelShape
from loader.sizes.layout import is_ignored_tensor, num_parameters, parameter_shapes, weight_layout

PUBLISHED = Path(__file__).parents[1] / "published"
MIB = 1 << 20


def parse(**changes: Any) -> ModelShape:
    config = json.loads((PUBLISHED / "qwen3-next-80b-a3b.json").read_text()) | changes
    return parse_config(json.dumps({key: value for key, value in config.items() if value != "absent"}).encode())


def test_qwen3_next() -> None:
    """Published: 80 B parameters; transformers counts the same."""
    shape = parse()
    assert num_parameters(shape) == 79_674_391_296
    attention = tuple(range(3, 48, 4))
    assert shape.delta == DeltaShape(frozenset(range(48)) - frozenset(attention), 16, 32, 128, 128, 4, by_head=True)
    assert shape.attention_layers == attention
    assert (shape.rope.rotary_dim(shape.head_dim), shape.gated_attention) == (64, True)
    assert shape.experts is not None
    assert (shape.experts.normalised, shape.experts.shared_size) == (True, 512)
    assert parse(layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 12) == shape
    assert is_ignored_tensor(shape, "mtp.layers.0.input_layernorm.weight")


def test_qwen35() -> None:
    """The sizes of the 9B, which transformers' configuration has as its defaults; it counts the same."""
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4}
    config = {"model_type": "qwen3_5_text", "vocab_size": 248_320, "intermediate_size": 12_288, "max_position_embeddings": 32_768}
    shape = parse_config(json.dumps(config | sizes).encode())
    assert num_parameters(shape) == 8_953_803_264
    assert shape.delta is not None
    assert (len(shape.delta.layers), shape.delta.by_head, shape.gated_attention) == (24, False, True)
    own = list(parameter_shapes(shape))
    at = own.index("model.layers.0.linear_attn.in_proj_qkv.weight")
    assert own[at + 1 : at + 4] == [f"model.layers.0.linear_attn.in_proj_{name}.weight" for name in "zba"]
    assert is_ignored_tensor(shape, "mtp.fc.weight")


def test_qwen35_mixture() -> None:
    """The sizes of the 35B-A3B, which are transformers' defaults; it counts the same. The experts of a layer are
    one tensor, or stored one by one where they are quantised."""
    sizes = {"hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2}
    config = {"model_type": "qwen3_5_moe_text", "vocab_size": 248_320, "max_position_embeddings": 32_768} | sizes
    shape = parse_config(json.dumps(config).encode())
    assert num_parameters(shape) == 34_660_610_688
    shapes = parameter_shapes(shape)
    assert shapes["model.layers.0.mlp.experts.gate_up_proj"] == (256, 1024, 2048)
    assert shapes["model.layers.0.mlp.experts.down_proj"] == (256, 2048, 512)
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    quantised = parse_config(json.dumps(config | {"quantization_config": fp8}).encode())
    assert num_parameters(quantised) == num_parameters(shape)
    assert parameter_shapes(quantised)["model.layers.0.mlp.experts.255.up_proj.weight"] == (512, 2048)


def test_what_is_kept_of_a_sequence() -> None:
    """KV in 12 layers, and in 36 a matrix of 128 x 128 float32 for each of 32 heads with three columns of the convolution."""
    shape = parse()
    assert state_bytes(shape) == 36 * 4 * (32 * 128 * 128 + 3 * 8192) == 79_036_416
    assert kv_bytes_per_token(shape, "bfloat16") == 12 * 2 * 2 * 256 * 2
    full, state = kv_groups(shape, "bfloat16", 16)
    assert (full.kind, full.block_bytes, full.layers) == ("full", 24_576 * 16, shape.attention_layers)
    assert (state.kind, state.block_bytes, state.window_tokens, state.snapshot_tokens) == ("state", 79_036_416, 17, 1024)
    assert kv_groups(shape, KV_FP8, 16)[1] == state, "states stay float32"
    assert group_chunks(state, 262_144, 4096, MIB) == -(-8 * state.block_bytes // MIB) + -(-state.block_bytes // MIB)
    assert group_chunks(state, 16, 4096, MIB) == 2 * -(-state.block_bytes // MIB)
    reserved = kv_reserved_bytes(shape, "bfloat16", 262_144, 16, 4096, MIB)
    assert reserved == (262_144 * 24_576 // MIB + 1 + group_chunks(state, 262_144, 4096, MIB) - 1) * MIB
    assert default_max_model_len(shape, "bfloat16", 8 << 30) == ((2 << 30) - 8 * 79_036_416) // 24_576


def test_matrices_that_one_product_reads_lie_together_and_gates_are_float32() -> None:
    shape = parse(num_hidden_layers=4)
    slots = {slot.name: slot for slot in weight_layout(shape, "bfloat16")}
    prefix = "model.layers.0.linear_attn."
    assert [slots[prefix + name].held_as for name in ("A_log", "dt_bias")] == ["float32"] * 2
    shapes = parameter_shapes(shape)
    assert shapes[f"{prefix}in_proj_qkvz.weight"] == (12_288, 2048)
    assert shapes[f"{prefix}conv1d.weight"] == (8192, 1, 4)
    assert shapes["model.layers.3.self_attn.q_proj.weight"] == (2 * 16 * 256, 2048)
    assert "model.layers.3.linear_attn.A_log" not in shapes
    assert "model.layers.0.self_attn.q_proj.weight" not in shapes


@pytest.mark.parametrize(
    ("changes", "error", "why"),
    [
        ({"layer_types": ["mamba"] * 48}, UnsupportedModel, "layer_types: 'mamba' is not supported"),
        ({"layer_types": ["linear_attention"] * 48}, UnsupportedModel, "no layer is full_attention"),
        ({"layer_types": ["full_attention"]}, CheckpointError, "not a list of num_hidden_layers 48 kinds"),
        ({"linear_num_value_heads": 24}, CheckpointError, "24 is no multiple of linear_num_key_heads 16"),
        ({"linear_conv_kernel_dim": 1}, CheckpointError, "linear_conv_kernel_dim"),
        ({"attn_output_gate": False}, UnsupportedModel, "attn_output_gate"),
    ],
)
def test_refused(changes: dict[str, Any], error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        parse(**changes)
