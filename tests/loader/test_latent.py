"""Latent attention's config.json and tensors: published models, variants, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loader.configs.hf_config import parse_config
from loader.errors import CheckpointError, UnsupportedModel
from loader.shapes.model_shape import LatentShape, ModelShape, SigmoidShape
from loader.sizes.layout import is_ignored_tensor, num_parameters, parameter_shapes

PUBLISHED = Path(__file__).parents[1] / "published"


def parse(name: str, **changes: Any) -> ModelShape:
    config = json.loads((PUBLISHED / f"{name}.json").read_text()) | changes
    return parse_config(json.dumps({key: value for key, value in config.items() if value != "absent"}).encode())


# parameters without the layers that predict further tokens and without encoders; published: 671 B, 15.7 B, 30 B and 1 T
@pytest.mark.parametrize(
    ("name", "num", "latent", "factor"),
    [
        ("deepseek-v3", 671_026_419_200, LatentShape(1536, 512, 128, 64, 128), 1 + 0.1 * math.log(40)),
        ("deepseek-v2-lite", 15_706_484_224, LatentShape(0, 512, 128, 64, 128), 1 + 0.0707 * math.log(40)),
        ("glm-4.7-flash", 29_943_393_920, LatentShape(768, 512, 192, 64, 256), 1.0),
        ("kimi-k2.5", 1_026_408_232_448, LatentShape(1536, 512, 128, 64, 128), 1 + 0.1 * math.log(64)),
    ],
)
def test_published_models(name: str, num: int, latent: LatentShape, factor: float) -> None:
    shape = parse(name)
    assert num_parameters(shape) == num
    assert (shape.latent, shape.num_kv_heads) == (latent, 1)
    assert shape.query_scale == pytest.approx((latent.plain_dim + latent.rope_dim) ** -0.5 * factor**2)
    assert shape.rope.interleaved
    assert shape.rope.attention_factor == 1.0, "of cosines and sines: mscale and mscale_all_dim are the same"


def test_the_larger_deepseek_v2_chooses_experts_in_groups() -> None:
    """Published: 236 B parameters."""
    sizes = {"hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 60, "num_attention_heads": 128}
    sizes |= {"num_key_value_heads": 128, "q_lora_rank": 1536, "n_routed_experts": 160, "moe_intermediate_size": 1536}
    routing = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0}
    shape = parse("deepseek-v2-lite", **sizes, **routing)
    assert num_parameters(shape) == 235_741_434_880
    assert shape.experts is not None
    assert shape.experts.sigmoid == SigmoidShape(8, 3, 16.0, by_softmax=True)
    assert not [name for name in parameter_shapes(shape) if "correction" in name]


def test_the_dialect_of_transformers_5() -> None:
    config = json.loads((PUBLISHED / "deepseek-v3.json").read_text())
    scaling = config.pop("rope_scaling")
    rope = {"rope_type": scaling.pop("type"), "rope_theta": config.pop("rope_theta")} | scaling
    newer = config | {"rope_parameters": rope, "dtype": config.pop("torch_dtype"), "head_dim": 64, "qk_head_dim": 192}
    assert parse_config(json.dumps(newer).encode()) == parse("deepseek-v3")
    assert not parse("deepseek-v3", rope_interleave=False).rope.interleaved


def test_matrices_that_one_product_reads_lie_together() -> None:
    own, lite = (list(parameter_shapes(parse(name))) for name in ("deepseek-v3", "deepseek-v2-lite"))
    prefix = "model.layers.1.self_attn."
    at = own.index(f"{prefix}q_a_proj.weight")
    assert own[at + 1] == f"{prefix}kv_a_proj_with_mqa.weight"
    assert f"{prefix}q_proj.weight" in lite
    assert not [name for name in lite if "q_a_" in name or "q_b_" in name]


def test_layers_that_predict_further_tokens_are_not_read() -> None:
    shape = parse("deepseek-v3")
    assert is_ignored_tensor(shape, "model.layers.61.eh_proj.weight")
    assert not is_ignored_tensor(shape, "model.layers.60.eh_proj.weight")


def test_the_first_layers_without_experts() -> None:
    experts = parse("glm-4.7-flash").experts
    assert experts is not None
    assert experts.dense_layers == {0}
    types = ["dense"] * 2 + ["sparse"] * 45
    assert parse("glm-4.7-flash", mlp_layer_types=types).experts == replace(experts, dense_layers=frozenset({0, 1}))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek-v3", {"qk_rope_head_dim": 63}, "qk_rope_head_dim: 63 is odd"),
        ("deepseek-v3", {"kv_lora_rank": 0}, "kv_lora_rank: 0 is out of range"),
        ("deepseek-v3", {"q_lora_rank": "8"}, "q_lora_rank: '8' is not a whole number"),
        ("deepseek-v3", {"rope_interleave": 1}, "rope_interleave: 1 is not true or false"),
        ("glm-4.7-flash", {"mlp_layer_types": ["dense"]}, "mlp_layer_types: not a list of 47 values, each 'dense' or 'sparse'"),
        ("glm-4.7-flash", {"mlp_layer_types": ["wide"] * 47}, "mlp_layer_types: not a list"),
    ],
)
def test_bad_values_name_the_key(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"key {message}"):
        parse(name, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek-v2-lite", {"topk_method": "noaux_tc"}, "topk_method: 'noaux_tc' is not supported; supported: 'greedy'"),
        (
            "deepseek-v2-lite",
            {"topk_method": "group_limited_greedy", "norm_topk_prob": True},
            "norm_topk_prob: True is not supported; supported: False",
        ),
        ("deepseek-v2-lite", {"routed_scaling_factor": 16.0}, "routed_scaling_factor: 16.0 is not supported; supported: 1.0"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func: 'softmax' is not supported; supported: 'sigmoid'"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq: 2 is not supported; supported: 1"),
        (
            "kimi-k2.5",
            {"text_config": {"model_type": "kimi_linear"}},
            "text_config.model_type: 'kimi_linear' is not supported in KimiK25For.*; supported: deepseek_v3, kimi_k2",
        ),
    ],
)
def test_variants_that_are_not_served_name_the_key(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"key {message}"):
        parse(name, **changes)
