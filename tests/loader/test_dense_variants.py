"""Dense families that differ from Llama in more than tensors' names: their config.json, as published and changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loader.configs.hf_config import parse_config
from loader.errors import CheckpointError, UnsupportedModel
from loader.shapes.kv_layout import kv_groups
from loader.shapes.model_shape import ModelShape
from loader.sizes.layout import parameter_shapes

PUBLISHED = Path(__file__).parents[1] / "published"
SMOLLM3, SEED_OSS, GRANITE, COHERE, COHERE2, PHI = (
    json.loads((PUBLISHED / f"{name}.json").read_text())
    for name in ("smollm3-3b", "seed-oss-36b", "granite-3.1-8b", "command-r-35b", "command-r7b", "phi-2")
)


def parse(config: dict[str, Any], **changes: Any) -> ModelShape:
    return parse_config(json.dumps({key: value for key, value in (config | changes).items() if value != "absent"}).encode())


def test_smollm3_has_layers_without_rotation() -> None:
    shape = parse(SMOLLM3)
    assert shape.unrotated_layers == frozenset(range(3, 36, 4))
    assert [group.kind for group in kv_groups(shape, "bfloat16", 16)] == ["full"]
    assert parse(SMOLLM3, no_rope_layers="absent") == shape
    assert parse(SMOLLM3, no_rope_layers=None, no_rope_layer_interval=2).unrotated_layers == frozenset(range(1, 36, 2))
    windows = {"use_sliding_window": True, "sliding_window": 100, "layer_types": "absent"}
    assert parse(SMOLLM3, **windows).layer_windows == (0, 0, 0, 100) * 9
    assert parse(SMOLLM3, **windows | {"sliding_window": None}).layer_windows == (0,) * 36
    listed = ["sliding_attention"] * 18 + ["full_attention"] * 18
    assert parse(SMOLLM3, **windows | {"layer_types": listed}).layer_windows == (100,) * 18 + (0,) * 18


def test_seed_oss_has_a_key_for_the_bias_of_the_output() -> None:
    shape = parse(SEED_OSS)
    assert (shape.attention_bias, shape.output_bias, shape.head_dim) == (True, False, 128)
    assert parse(SEED_OSS, attention_bias="absent", attention_out_bias="absent") == shape
    assert parse(SEED_OSS, attention_out_bias=True).output_bias


def test_granite_has_factors() -> None:
    shape = parse(GRANITE)
    assert (shape.embedding_scale, shape.branch_scale, shape.query_scale, shape.logit_scale) == (12.0, 0.22, 1 / 128, 1 / 16)
    keys = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    plain = parse(GRANITE, **dict.fromkeys(keys, "absent"))
    assert (plain.embedding_scale, plain.branch_scale, plain.query_scale, plain.logit_scale) == (1.0, 1.0, 1.0, 1.0)


def test_cohere_has_one_layer_norm_a_layer() -> None:
    shape = parse(COHERE2)
    assert shape.layer_windows == (4096, 4096, 4096, 0) * 8
    assert shape.unrotated_layers == frozenset(range(3, 32, 4))
    assert (shape.parallel_branches, shape.rope.interleaved, shape.local_rope) == (True, True, None)
    assert (shape.logit_scale, shape.rms_norm_eps, shape.tie_word_embeddings) == (0.25, 1e-5, True)
    assert [name for name in parameter_shapes(shape) if "norm" in name and ".31." in name] == [
        "model.layers.31.input_layernorm.weight"
    ]
    # a window that no sequence outgrows leaves one group, in which some layers are rotated
    wide = parse(COHERE2, sliding_window=8192)
    assert (wide.layer_windows, wide.unrotated_layers) == ((0,) * 32, shape.unrotated_layers)
    older = parse(COHERE)
    assert (older.unrotated_layers, older.layer_windows, older.logit_scale) == (frozenset(), (0,) * 40, 0.0625)
    assert parse(COHERE, logit_scale="absent") == older


def test_phi2_has_biases_throughout() -> None:
    shape = parse(PHI)
    sizes = parameter_shapes(shape)
    assert {name for name in sizes if name.endswith("weight") and name[:-6] + "bias" not in sizes} == {"model.embed_tokens.weight"}
    assert sizes["model.layers.31.mlp.fc1.weight"] == (10240, 2560)
    assert shape.rope.rotary_dim(shape.head_dim) == 32
    assert parse(PHI, partial_rotary_factor="absent").rope.partial_rotary_factor == 0.5


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (SEED_OSS, {"attention_out_bias": "no"}, "attention_out_bias: 'no' is not true or false"),
        (GRANITE, {"residual_multiplier": 0}, "residual_multiplier: 0.0 is not positive"),
        (GRANITE, {"embedding_multiplier": "12"}, "embedding_multiplier: '12' is not a number"),
        (GRANITE, {"attention_multiplier": -1}, "attention_multiplier: -1.0 is not positive"),
        (GRANITE, {"logits_scaling": 0}, "logits_scaling: 0.0 is not positive"),
        (COHERE, {"use_qk_norm": True}, "use_qk_norm: CohereForCausalLM is supported with false only"),
        (COHERE, {"logit_scale": 0}, "logit_scale: 0.0 is not positive"),
        (COHERE2, {"use_parallel_block": False}, "use_parallel_block: Cohere2ForCausalLM is supported with true only"),
        (COHERE2, {"rotary_pct": 0.5}, "rotary_pct: Cohere2ForCausalLM is supported with 1.0 only"),
        (COHERE2, {"sliding_window": None}, "sliding_window: missing"),
        (COHERE2, {"sliding_window_pattern": 0}, "sliding_window_pattern: 0 is out of range"),
        (COHERE2, {"layer_norm_eps": "small"}, "layer_norm_eps: 'small' is not a number"),
        (COHERE2, {"layer_norm_eps": -1e-5}, "layer_norm_eps: -1e-05 is not positive"),
        (PHI, {"layer_norm_eps": 0}, "layer_norm_eps: 0.0 is not positive"),
        (PHI, {"qk_layernorm": True}, "qk_layernorm: PhiForCausalLM is supported with false only"),
        (PHI, {"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported; supported: gelu_new"),
        (SMOLLM3, {"no_rope_layers": [1]}, "no_rope_layers: not a list of num_hidden_layers 36 numbers"),
        (SMOLLM3, {"no_rope_layer_interval": 0, "no_rope_layers": None}, "no_rope_layer_interval: 0 is out of range"),
        (SMOLLM3, {"layer_types": ["sliding_attention"] * 36}, "layer_types: has sliding_attention layers, but use_sliding_window"),
        (SMOLLM3, {"layer_types": ["sliding_attention"] * 36, "use_sliding_window": True}, "sliding_window: missing"),
    ],
)
def test_what_is_not_served_names_the_key(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModel), match=f"key {message}"):
        parse(config, **changes)
