"""Gemma 4's config.json and tensors: published models, both ways of writing the heads of layers without windows, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loader.configs.hf_config import parse_config
from loader.errors import CheckpointError, UnsupportedModel
from loader.models.catalog import scan_one
from loader.shapes.kv_layout import default_max_model_len, kv_bytes_per_token, kv_groups
from loader.shapes.model_shape import ExpertShape, HeadShape, LayerInputShape, ModelShape
from loader.shapes.rope_config import RopeParameters
from loader.sizes.gpu_sizing import gpu_work_space_bytes
from loader.sizes.layout import num_parameters
from loader.sizes.work_space import work_space_bytes
from tests.loader.checkpoints import safetensors_bytes, tensors_for, write_checkpoint
from tests.loader.test_families import parameter_shapes

PUBLISHED = Path(__file__).parents[1] / "published"
DENSE, MOE, SMALL = (json.loads((PUBLISHED / f"gemma-4-{name}.json").read_text()) for name in ("31b", "26b-a4b", "e2b"))


def parse(config: dict[str, Any], **changes: Any) -> ModelShape:
    text = {key: value for key, value in (config["text_config"] | changes).items() if value != "absent"}
    return parse_config(json.dumps(config | {"text_config": text}).encode())


@pytest.mark.parametrize(
    (
        "config",
        "parameters",
        "token_bytes",
    ),  # parameters: of Gemma4ForCausalLM, as transformers builds it, with its layers' scalars
    [
        (DENSE, 30_697_345_340, (10 * 2 * 4 * 512 * 2, 50 * 2 * 16 * 256 * 2)),
        (MOE, 25_233_141_790, (5 * 2 * 2 * 512 * 2, 25 * 2 * 8 * 256 * 2)),
        (SMALL, 4_628_569_379, (3 * 2 * 512 * 2, 12 * 2 * 256 * 2)),  # 20 of 35 layers keep none
    ],
    ids=["31B", "26B A4B", "E2B"],
)
def test_published_models(config: dict[str, Any], parameters: int, token_bytes: tuple[int, int]) -> None:
    shape = parse(config)
    assert num_parameters(shape) == parameters
    groups = kv_groups(shape, "bfloat16", 16)
    assert [group.kind for group in groups] == ["full", "window"]
    assert tuple(group.block_bytes // 16 for group in groups) == token_bytes
    assert kv_bytes_per_token(shape, "bfloat16") == sum(token_bytes)
    assert shape.rope == RopeParameters("proportional", 1e6, 1.0, partial_rotary_factor=0.25)
    assert shape.local_rope == RopeParameters(theta=1e4)
    assert (shape.query_scale, shape.logit_softcap, shape.layer_windows[-1]) == (1.0, 30.0, 0)


def test_default_length_counts_each_group_by_its_own_heads() -> None:
    budget = 80 << 30
    windows = 50 * 1024 * 2 * 16 * 256 * 2
    assert default_max_model_len(parse(DENSE), "bfloat16", budget) == (budget // 4 - windows) // (10 * 2 * 4 * 512 * 2)


def test_heads_by_layer() -> None:
    shape = parse(DENSE)
    assert shape.heads_of(0) == HeadShape(16, 256)
    assert shape.heads_of(5) == HeadShape(4, 512, keys_are_values=True)
    sizes = parameter_shapes(shape)
    prefix = "language_model.model.layers."
    assert sizes[f"{prefix}0.self_attn.v_proj.weight"] == (4096, 5376)
    assert sizes[f"{prefix}5.self_attn.q_proj.weight"] == (16384, 5376)
    assert sizes[f"{prefix}5.self_attn.k_proj.weight"] == (2048, 5376)
    assert f"{prefix}5.self_attn.v_proj.weight" not in sizes
    assert sizes[f"{prefix}5.layer_scalar"] == (1,)


def test_inputs_of_layers_and_layers_that_read_the_kv_of_others() -> None:
    shape = parse(SMALL)
    assert shape.layer_inputs == LayerInputShape(262_144, 256)
    assert (shape.num_reading_layers, shape.inner_size_of(14), shape.inner_size_of(15)) == (20, 6144, 12288)
    assert [shape.kv_layer(layer) for layer in (0, 13, 14, 15, 19, 33, 34)] == [0, 13, 14, 13, 14, 13, 14]
    sizes = parameter_shapes(shape)
    prefix = "language_model.model."
    assert sizes[f"{prefix}embed_tokens_per_layer.weight"] == (262_144, 35 * 256)
    assert sizes[f"{prefix}layers.34.per_layer_input_gate.weight"] == (256, 1536)
    assert not [name for name in sizes if name.startswith(f"{prefix}layers.15.self_attn.k")]
    assert f"{prefix}layers.14.self_attn.k_norm.weight" in sizes
    plain = parse(SMALL, hidden_size_per_layer_input=0)
    assert work_space_bytes(shape, "bfloat16", 512, 8) - work_space_bytes(plain, "bfloat16", 512, 8) >= 512 * 3 * 35 * 256 * 2
    assert (
        gpu_work_space_bytes(shape, "bfloat16", 512, 8) - gpu_work_space_bytes(plain, "bfloat16", 512, 8) >= 512 * 3 * 35 * 256 * 2
    )


def test_experts_beside_the_mlp() -> None:
    shape = parse(MOE)
    assert shape.experts == ExpertShape(128, 8, 704, True, stacked=True, stack="output-major", beside=True)
    sizes = parameter_shapes(shape)
    prefix = "language_model.model.layers.29."
    assert sizes[f"{prefix}mlp.gate_proj.weight"] == (2112, 2816)
    assert sizes[f"{prefix}experts.gate_up_proj"] == (128, 1408, 2816)
    assert sizes[f"{prefix}router.per_expert_scale"] == (128,)


def test_both_dialects_say_the_same() -> None:
    """Later versions of transformers write an object for each layer that differs."""
    full = {str(layer): {"head_dim": 512, "num_key_value_heads": 4} for layer in range(5, 60, 6)}
    old_keys = {"global_head_dim": "absent", "num_global_key_value_heads": "absent"}
    assert parse(DENSE, per_layer_config=full, **old_keys) == parse(DENSE)
    assert parse(DENSE, per_layer_config=full, global_head_dim=64) == parse(DENSE), "it has precedence, as in transformers"
    left_out = ("global_head_dim", "rope_parameters", "layer_types", "head_dim", "tie_word_embeddings", "rms_norm_eps")
    assert parse(DENSE, **dict.fromkeys(left_out, "absent")) == parse(DENSE)
    untied = parse(DENSE, attention_k_eq_v=False)
    assert untied.full_heads == HeadShape(16, 512), "num_global_key_value_heads counts only where keys are values"
    alone = DENSE["text_config"] | {"architectures": ["Gemma4ForCausalLM"]}
    assert num_parameters(parse_config(json.dumps(alone).encode())) == 30_697_345_340


def test_the_last_layer_has_no_window() -> None:
    kinds = ["full_attention", *["sliding_attention"] * 59]
    assert [layer for layer, window in enumerate(parse(DENSE, layer_types=kinds).layer_windows) if not window] == [0, 59]


def test_keys_and_values_that_are_not_made_may_be_stored(tmp_path: Path) -> None:
    text = SMALL["text_config"] | {
        "architectures": ["Gemma4ForCausalLM"],
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 32,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_attention_heads": 2,
        "vocab_size": 50,
        "vocab_size_per_layer_input": 50,
        "hidden_size_per_layer_input": 4,
        "dtype": "float32",
    }
    write_checkpoint(tmp_path, text)
    for name, error in (
        ("k_norm.weight", ""),
        ("sinks", "model.layers.3.self_attn.sinks: Gemma4ForCausalLM with this config.json"),
    ):
        tensors = tensors_for(text) | {f"model.layers.3.self_attn.{name}": ("F32", (16,), bytes(64))}
        (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
        assert error in scan_one(tmp_path).error
        assert bool(scan_one(tmp_path).error) == bool(error)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (DENSE, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention: only causal attention is supported"),
        (DENSE, {"layer_types": ["chunked_attention"] * 60}, "layer_types: 'chunked_attention'"),
        (DENSE, {"per_layer_config": {"5": {"head_dim": 512}}}, "per_layer_config: is supported where all layers without windows"),
        (DENSE, {"per_layer_config": {"0": {"head_dim": 512}}}, "per_layer_config: is supported where all layers without windows"),
        (DENSE, {"per_layer_config": {"5": {"sliding_window": 9}}}, r"per_layer_config\.5\.sliding_window: is not supported"),
        (SMALL, {"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input: 100 is less than vocab_size 262144"),
        (SMALL, {"hidden_activation": "silu"}, "hidden_activation: 'silu'"),
    ],
)
def test_unsupported_variants_name_the_key(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"key text_config\.{message}"):
        parse(config, **changes)


ROPE = DENSE["text_config"]["rope_parameters"]


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (DENSE, {"num_global_key_value_heads": 5}, "num_global_key_value_heads: 5 heads do not divide num_attention_heads 32"),
        (DENSE, {"global_head_dim": 511}, "global_head_dim: head size 511 is odd"),
        (DENSE, {"attention_k_eq_v": "yes"}, "attention_k_eq_v: 'yes' is not true or false"),
        (DENSE, {"per_layer_config": {"60": {}}}, r"per_layer_config\.60: is not an object for one of the layers from 0 to 59"),
        (DENSE, {"per_layer_config": {"5": 512}}, r"per_layer_config\.5: 512 is not an object"),
        (DENSE, {"rope_parameters": ROPE | {"full_attention": ROPE["full_attention"] | {"partial_rotary_factor": 1.5}}},
         r"rope_parameters\.full_attention\.partial_rotary_factor: 1.5 of head_dim 512"),
        (SMALL, {"num_kv_shared_layers": 32}, "num_kv_shared_layers: 32 of 35 layers leave no layer of the same kind"),
        (SMALL, {"num_kv_shared_layers": 35}, "num_kv_shared_layers: 35 of 35 layers leave no layer of the same kind"),
        (SMALL, {"num_kv_shared_layers": -1}, "num_kv_shared_layers: -1 is out of range"),
        (MOE, {"num_experts": None}, "num_experts: missing"),
        (MOE, {"top_k_experts": 129}, "top_k_experts: 129 is more than there are experts"),
        (MOE, {"moe_intermediate_size": None}, "moe_intermediate_size: missing"),
    ],
)  # fmt: skip
def test_bad_values_name_the_key(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"key text_config\.{message}"):
        parse(config, **changes)


def test_the_unified_model_has_no_inputs_of_layers_and_no_experts() -> None:
    unified = DENSE | {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "model_type": "gemma4_unified"}
    text = {"model_type": "gemma4_unified_text", "hidden_size_per_layer_input": "absent", "sliding_window": "absent"}
    shape = parse(unified, **text)
    assert (shape.layer_inputs, shape.experts, shape.layer_windows[0]) == (None, None, 1024)
    with pytest.raises(
        UnsupportedModel, match=r"key text_config\.enable_moe_block: Gemma4UnifiedForCausalLM is supported with false"
    ):
        parse(unified, **text, enable_moe_block=True)
