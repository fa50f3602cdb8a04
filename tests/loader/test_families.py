"""Each family's config.json in both dialects, with the published files' own settings, and what is refused."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from loader.architectures import registry
from loader.architectures.architecture import TensorGroup
from loader.architectures.bert import Encoder
from loader.architectures.registry import ARCHITECTURES, architecture_of
from loader.architectures.wrapper import Wrapper
from loader.configs.hf_config import parse_config, parse_generation
from loader.errors import CheckpointError, UnsupportedModel
from loader.formats.registry import stored_format
from loader.shapes.kv_layout import kv_bytes_per_token, kv_groups
from loader.shapes.model_shape import ModelShape
from loader.shapes.rope_config import RopeParameters
from loader.sizes.layout import num_parameters, parameter_shapes, weights_bytes
from loader.sizes.work_space import work_space_bytes

# As published (rope_theta, torch_dtype: the older dialect); figures: the published numbers of parameters.
MISTRAL_7B: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
QWEN25_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 152064,
}
PHI3_MINI_4K: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32064,
}
PHI4_MINI: dict[str, Any] = PHI3_MINI_4K | {
    "max_position_embeddings": 131072,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0 + i for i in range(48)]},
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}
GEMMA2_2B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "float32",
    "vocab_size": 256000,
}
GEMMA3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
OLMO2_7B: dict[str, Any] = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 100352,
}
MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 201088,
}
QWEN15_MOE: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
OLMO3_7B: dict[str, Any] = {
    "architectures": ["Olmo3ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 65536,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "rope_theta": 500000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 100278,
}
GLM45_AIR: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_qk_norm": False,
    "vocab_size": 151552,
}
GLM4_9B: dict[str, Any] = {
    "architectures": ["Glm4ForCausalLM"],
    "attention_bias": True,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151552,
}
# These are as published. What the text_config of Gemma 3 leaves out is as in its configuration class.
GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
}
MISTRAL_SMALL_31: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "text_config": {
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1024, "model_type": "pixtral", "num_hidden_layers": 24},
}
ON_FILE = {
    "SmolLM3 3B": ("smollm3-3b", 3_075_098_624),
    "Seed-OSS 36B": ("seed-oss-36b", 36_151_104_512),
    "Granite 3.1 8B": ("granite-3.1-8b", 8_170_848_256),
    "Command R 35B": ("command-r-35b", 34_980_831_232),
    "Command R7B": ("command-r7b", 8_028_033_024),
    "Phi-2": ("phi-2", 2_779_683_840),
}
PUBLISHED = {
    "Mistral 7B": (MISTRAL_7B, 7_241_732_096),
    "Qwen2.5 7B": (QWEN25_7B, 7_615_616_512),
    "Phi-3 mini": (PHI3_MINI_4K, 3_821_079_552),
    "Phi-4 mini": (PHI4_MINI, 3_836_021_760),
    "Gemma 2 2B": (GEMMA2_2B, 2_614_341_888),
    "Gemma 3 1B": (GEMMA3_1B, 999_885_952),
    "OLMo 2 7B": (OLMO2_7B, 7_298_617_344),
    "GLM-4 9B 0414": (GLM4_9B, 9_400_279_040),
    "Mixtral 8x7B": (MIXTRAL_8X7B, 46_702_792_704),
    "Qwen1.5 MoE A2.7B": (QWEN15_MOE, 14_315_784_192),
    "Qwen3 30B A3B": (QWEN3_30B_A3B, 30_532_122_624),
    "GLM-4.5-Air": (GLM45_AIR, 106_852_251_264),  # as transformers builds it; published: 106 billion
    "gpt-oss 20B": (GPT_OSS_20B, 20_914_757_184),
} | {
    name: (json.loads((Path(__file__).parents[1] / "published" / f"{file}.json").read_text()), num)
    for name, (file, num) in ON_FILE.items()
}


def parse(config: dict[str, Any], **changes: Any) -> ModelShape:
    return parse_config(json.dumps({key: value for key, value in (config | changes).items() if value != "absent"}).encode())


def tensor_groups(shape: ModelShape) -> list[TensorGroup]:
    return architecture_of(shape).tensor_groups(shape)


def newer(config: dict[str, Any]) -> dict[str, Any]:
    """The same settings as transformers 5 writes them."""
    moved = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor", "torch_dtype", "sliding_window_pattern")
    given = {key: value for key, value in config.items() if key not in moved}
    scaling = {("rope_type" if key == "type" else key): value for key, value in (config.get("rope_scaling") or {}).items()}
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]} | scaling
    if "partial_rotary_factor" in config:
        rope["partial_rotary_factor"] = config["partial_rotary_factor"]
    if "rope_local_base_freq" in config:
        local = {"rope_type": "default", "rope_theta": config["rope_local_base_freq"]}
        rope = {"full_attention": rope, "sliding_attention": local}
        given["layer_types"] = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(26)]
    if config.get("model_type") == "qwen3_moe":
        given["num_local_experts"] = given.pop("num_experts")
    return given | {"rope_parameters": rope, "dtype": config.get("torch_dtype", "bfloat16")}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_figures_and_dialects_of_published_models(name: str) -> None:
    config, num_parameters = PUBLISHED[name]
    shape = parse(config)
    assert parse(newer(config)) == shape
    assert sum(math.prod(dims) for dims in parameter_shapes(shape).values()) == num_parameters
    in_mxfp4 = sum(math.prod(dims) for dims in parameter_shapes(shape).values() if len(dims) == 3)
    in_float32 = sum(group.held_as == "float32" and math.prod(dims) for group in tensor_groups(shape) for _, dims in group.tensors)
    held_bytes = 2 * (num_parameters - in_mxfp4) + in_mxfp4 * 17 // 32 + 2 * in_float32
    assert 0 <= weights_bytes(shape, "bfloat16", stored_format(shape)) - held_bytes < 128 * len(parameter_shapes(shape))
    groups = kv_groups(shape, "bfloat16", 16)
    assert sum(group.block_bytes for group in groups) == kv_bytes_per_token(shape, "bfloat16") * 16
    assert sorted(layer for group in groups for layer in group.layers) == list(range(shape.num_layers))


def test_model_type_stands_in_for_architectures() -> None:
    for family in ARCHITECTURES.values():
        if not family.model_type:  # cross-encoders, whose model_type is that of encoders
            continue
        activation = "gelu_new" if family.name == "PhiForCausalLM" else "gelu" if isinstance(family, Encoder) else "silu"
        stored = GPT_OSS_20B["quantization_config"] if family.name == "GptOssForCausalLM" else None
        named = {"architectures": "absent", "model_type": family.model_type, "quantization_config": stored}
        text = {"text_config": QWEN25_7B} if isinstance(family, Wrapper) else {}
        shape = parse(QWEN25_7B, hidden_act=activation, **named, **text)
        assert shape.architecture == family.name


def test_text_models_in_wrappers() -> None:
    small, large = parse(GEMMA3_4B), parse(MISTRAL_SMALL_31)
    assert num_parameters(small) == 3_880_263_168
    assert small.tie_word_embeddings
    assert (small.num_heads, small.num_kv_heads, small.head_dim, small.max_position_embeddings) == (8, 4, 256, 131_072)
    assert (small.rope.kind, small.rope.theta, small.rope.factor) == ("linear", 1e6, 8.0)
    assert small.local_rope == RopeParameters(theta=1e4)
    assert small.layer_windows[:6] == (1024,) * 5 + (0,)
    assert num_parameters(large) == 23_572_403_200
    assert not large.tie_word_embeddings
    generation = parse_generation(json.dumps(GEMMA3_4B).encode(), None)
    assert generation.eos_token_ids == (1, 106)
    inner = {"eos_token_id": 7}
    assert parse_generation(json.dumps(GEMMA3_4B | {"eos_token_id": None, "text_config": inner}).encode(), None).eos_token_ids == (
        7,
    )


def test_every_description_is_listed() -> None:
    folder = Path(registry.__file__).parent
    described = {path.stem for path in folder.glob("*.py") if re.search(r"^ARCHITECTURE = ", path.read_text(), re.MULTILINE)}
    assert described == set(registry._FILES)


def test_mistral_windows() -> None:
    assert parse(MISTRAL_7B).layer_windows == (4096,) * 32
    assert parse(MISTRAL_7B, sliding_window="absent").layer_windows == (4096,) * 32  # the configuration class's own default
    assert parse(MISTRAL_7B, sliding_window=None).layer_windows == (0,) * 32
    assert parse(MISTRAL_7B, sliding_window=32768).layer_windows == (0,) * 32  # no sequence outgrows it
    assert not parse(MISTRAL_7B, attention_bias=True).attention_bias  # not a key of theirs
    (group,) = kv_groups(parse(MISTRAL_7B), "bfloat16", 16)
    assert (group.kind, group.window_tokens) == ("window", 4096)


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_qwen_windows(architecture: str) -> None:
    config = QWEN25_7B | {"architectures": [architecture], "sliding_window": 1024, "num_hidden_layers": 4}
    assert parse(config).layer_windows == (0,) * 4
    assert parse(config, use_sliding_window=True).layer_windows == (0,) * 4  # max_window_layers 28
    assert parse(config, use_sliding_window=True, max_window_layers=1).layer_windows == (0, 1024, 1024, 1024)
    kinds = ["sliding_attention", "full_attention"] * 2
    mixed = parse(config, use_sliding_window=True, max_window_layers=1, layer_types=kinds)
    assert mixed.layer_windows == (1024, 0, 1024, 0)
    full, window = kv_groups(mixed, "bfloat16", 16)
    assert (full.kind, full.layers, full.window_tokens) == ("full", (1, 3), 0)
    assert (window.kind, window.layers, window.window_tokens) == ("window", (0, 2), 1024)
    with pytest.raises(CheckpointError, match=r"key layer_types.*use_sliding_window"):
        parse(config, layer_types=kinds)


def test_olmo3_scales_the_layers_without_windows() -> None:
    shape = parse(OLMO3_7B)
    assert num_parameters(shape) == 7_298_011_136
    assert shape.layer_windows[:5] == (4096, 4096, 4096, 0, 4096)
    assert (shape.rope.kind, shape.rope.factor, shape.rope.theta) == ("yarn", 8.0, 5e5)
    assert shape.local_rope == RopeParameters(theta=5e5)


def test_qwen2_biases() -> None:
    shape = parse(QWEN25_7B)
    assert (shape.attention_bias, shape.output_bias, shape.mlp_bias) == (True, False, False)


def test_phi() -> None:
    mini, small = parse(PHI3_MINI_4K), parse(PHI4_MINI)
    assert {"qkv_proj", "gate_up_proj"} <= {name.split(".")[-2] for name in parameter_shapes(mini)}
    assert mini.layer_windows == (2047,) * 32
    assert mini.rope == RopeParameters()
    assert parse(PHI3_MINI_4K, sliding_window="absent").layer_windows == (0,) * 32
    assert small.layer_windows == (0,) * 32
    assert small.rope.kind == "longrope"
    assert small.rope.rotary_dim(small.head_dim) == 96
    assert small.rope.long_factors == tuple(range(1, 49))
    assert small.rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    assert parse(PHI4_MINI, rope_scaling=PHI4_MINI["rope_scaling"] | {"type": "su"}) == small


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def test_scalings_that_reach_further_than_the_configuration_says() -> None:
    """Qwen's model cards have the block added and the length left as it is."""
    assert parse(QWEN25_7B).max_position_embeddings == 32768
    shape = parse(QWEN25_7B, rope_scaling=YARN)
    assert shape.max_position_embeddings == 131072
    assert shape.rope == RopeParameters(
        "yarn", 1e6, 4.0, original_max_position_embeddings=32768, attention_factor=1 + 0.1 * math.log(4), extended_to=131072
    )
    assert parse(QWEN25_7B, rope_scaling=YARN, max_position_embeddings=131072) == shape, "DeepSeek's have both"
    assert parse(QWEN25_7B, rope_scaling={"type": "yarn", "factor": 4.0}).max_position_embeddings == 32768, "it may be the whole"
    windowed = parse(QWEN25_7B, rope_scaling=YARN, use_sliding_window=True, sliding_window=65536, max_window_layers=0)
    assert windowed.layer_windows == (65536,) * 28, "no longer one that no sequence can outgrow"
    assert parse(GEMMA3_1B, rope_scaling=YARN).rope.kind == "yarn"
    assert parse(PHI3_MINI_4K, rope_scaling=YARN).rope.kind == "yarn"
    dynamic = parse(MISTRAL_7B, rope_scaling={"type": "dynamic", "factor": 2.0})
    assert dynamic.max_position_embeddings == 2 * parse(MISTRAL_7B).max_position_embeddings
    assert dynamic.rope.original_max_position_embeddings == parse(MISTRAL_7B).max_position_embeddings


def test_gemma2() -> None:
    shape = parse(GEMMA2_2B, query_pre_attn_scalar=144)
    assert shape.layer_windows == (4096, 0) * 13
    assert shape.query_scale == pytest.approx(1 / 12)
    assert (shape.attention_softcap, shape.logit_softcap) == (50.0, 30.0)
    assert shape.tie_word_embeddings
    assert parameter_shapes(shape)["model.layers.25.post_feedforward_layernorm.weight"] == (2304,)
    left_out = ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window", "head_dim", "hidden_activation")
    assert parse(GEMMA2_2B, query_pre_attn_scalar=144, **dict.fromkeys(left_out, "absent")) == shape
    plain = parse(GEMMA2_2B, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (plain.attention_softcap, plain.logit_softcap) == (0.0, 0.0)


def test_gemma3() -> None:
    shape = parse(GEMMA3_1B, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert shape.layer_windows == (512, 512, 512, 512, 512, 0) * 4 + (512, 512)
    assert shape.rope == RopeParameters("linear", 1e6, 8.0)
    assert shape.local_rope == RopeParameters(theta=1e4)
    assert parameter_shapes(shape)["model.layers.25.self_attn.k_norm.weight"] == (256,)
    assert parse(GEMMA3_1B, sliding_window_pattern=2).layer_windows == (512, 0) * 13
    # a window no sequence outgrows still has its own frequencies, so it stays a group of its own
    assert len(kv_groups(parse(GEMMA3_1B, sliding_window=32768), "bfloat16", 16)) == 2
    assert parse(GEMMA3_1B, rope_theta="absent", rope_local_base_freq="absent") == parse(GEMMA3_1B)
    capped = parse(GEMMA3_1B, attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    assert (capped.attention_softcap, capped.logit_softcap) == (0.0, 30.0), "Gemma 3 has the first key and does not use it"


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (MIXTRAL_8X7B, {"architectures": ["DeepseekV32ForCausalLM"]}, "architectures: 'DeepseekV32ForCausalLM'"),
        (QWEN3_30B_A3B, {"architectures": ["JambaForCausalLM"]}, "architectures: 'JambaForCausalLM'"),
        (
            GPT_OSS_20B,
            {"quantization_config": "absent"},
            "quantization_config: GptOssForCausalLM is served with experts in MXFP4 only",
        ),
        (GPT_OSS_20B, {"hidden_size": 2890}, "hidden_size: 2890 is no multiple of 32"),
        (
            QWEN3_30B_A3B,
            {"quantization_config": {"quant_method": "mxfp4"}},
            "quantization_config: Qwen3MoeForCausalLM is not served",
        ),
        (MISTRAL_7B, {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config: MistralForCausalLM is not served"),
        (GEMMA3_4B, {"text_config": {"model_type": "gemma4_text"}}, r"text_config\.model_type: 'gemma4_text'"),
        (MISTRAL_7B, {"layer_types": ["full_attention"] * 32}, "layer_types"),
        (QWEN25_7B, {"layer_types": ["chunked_attention"] * 28}, "layer_types: 'chunked_attention'"),
        (QWEN25_7B, {"rope_scaling": {"type": "mrope"}}, r"rope_scaling\.rope_type: 'mrope'"),
        (QWEN25_7B, {"rope_scaling": PHI4_MINI["rope_scaling"]}, r"rope_scaling\.rope_type: 'longrope'"),
        (QWEN25_7B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (QWEN25_7B, {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, r"rope_parameters\.full_attention"),
        (PHI3_MINI_4K, {"rope_scaling": {"type": "proportional"}}, r"rope_scaling\.rope_type: 'proportional'"),
        (GEMMA2_2B, {"hidden_activation": "gelu"}, "hidden_activation: 'gelu'"),
        (GEMMA3_1B, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_unsupported_variants_name_the_key(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"key {message}"):
        parse(config, **changes)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (QWEN25_7B, {"layer_types": ["full_attention"]}, "layer_types: not a list of num_hidden_layers 28"),
        (QWEN25_7B, {"layer_types": "full_attention"}, "layer_types"),
        (MISTRAL_7B, {"sliding_window": 0}, "sliding_window"),
        (GEMMA2_2B, {"sliding_window": None}, "sliding_window: missing"),
        (GEMMA2_2B, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        (GEMMA2_2B, {"attn_logit_softcapping": -1}, "attn_logit_softcapping"),
        (GEMMA3_1B, {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        (QWEN25_7B, {"rope_scaling": {"type": "yarn"}}, r"rope_scaling\.factor: missing"),
        (QWEN25_7B, {"rope_scaling": YARN | {"factor": 0.5}}, r"rope_scaling\.factor: 0.5 is below 1"),
        (QWEN25_7B, {"rope_scaling": YARN | {"factor": 1e30}}, r"rope_scaling\.factor: 1e\+30 times 32768 is out of range"),
        (QWEN25_7B, {"rope_scaling": YARN | {"beta_slow": 64}}, r"rope_scaling\.beta_fast: 32.0 must be at least beta_slow 64"),
        (QWEN25_7B, {"rope_scaling": YARN | {"truncate": 1}}, r"rope_scaling\.truncate"),
        (QWEN25_7B, {"rope_scaling": YARN | {"attention_factor": 0}}, r"rope_scaling\.attention_factor"),
        (QWEN25_7B, {"rope_scaling": YARN | {"mscale": "1"}}, r"rope_scaling\.mscale"),
        (QWEN25_7B, {"rope_scaling": YARN, "rope_theta": 1}, "rope_theta: 1.0 is not above 1"),
        (MISTRAL_7B, {"rope_scaling": {"type": "dynamic", "factor": 0}}, r"rope_scaling\.factor: 0.0 is below 1"),
        (MISTRAL_7B, {"rope_scaling": {"type": "dynamic", "factor": 2}, "head_dim": 2}, r"rope_scaling\.rope_type: 'dynamic'"),
        (PHI4_MINI, {"partial_rotary_factor": 0.01}, "partial_rotary_factor"),
        (PHI4_MINI, {"partial_rotary_factor": 1.0}, r"rope_scaling\.short_factor: not a list of 64"),
        (PHI4_MINI, {"original_max_position_embeddings": "absent"}, "original_max_position_embeddings: missing"),
        (PHI4_MINI, {"rope_scaling": PHI4_MINI["rope_scaling"] | {"long_factor": [0.0] * 48}}, r"rope_scaling\.long_factor"),
    ],
)
def test_bad_values_name_the_key(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"key {message}"):
        parse(config, **changes)


def test_work_space_counts_what_families_add() -> None:
    """Scores that are capped are held in full; all-window models never gather more than window and chunk."""
    gemma = parse(GEMMA2_2B)
    plain = parse(GEMMA2_2B, attn_logit_softcapping=None)
    assert work_space_bytes(gemma, "float32", 256, 1, 8192) > work_space_bytes(plain, "float32", 256, 1, 8192)
    windowed, full = parse(MISTRAL_7B), parse(MISTRAL_7B, sliding_window=None)

    def more(max_model_len: int | None) -> int:
        """Of the full model: what it gathers, and the slices of a first step, which windowed ones have not."""
        return work_space_bytes(full, "bfloat16", 256, 1, max_model_len) - work_space_bytes(
            windowed, "bfloat16", 256, 1, max_model_len
        )

    assert 0 < more(1024) == more(2048) < more(None)


def test_olmo2() -> None:
    """Norms of queries and keys are over all their heads; no norm comes before a branch."""
    sizes = parameter_shapes(parse(OLMO2_7B, num_key_value_heads=8))
    assert sizes["model.layers.31.self_attn.q_norm.weight"] == (4096,)
    assert sizes["model.layers.31.self_attn.k_norm.weight"] == (1024,)
    assert "model.layers.31.input_layernorm.weight" not in sizes
    biased = parameter_shapes(parse(OLMO2_7B, attention_bias=True, mlp_bias=True))
    assert {name.split(".", 3)[3] for name in biased if name.startswith("model.layers.0.") and name.endswith(".bias")} == {
        f"self_attn.{name}_proj.bias" for name in "qkvo"
    }


def test_the_reference_lists_every_family() -> None:
    text = (Path(__file__).parents[2] / "docs/reference/models.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == list(ARCHITECTURES)
