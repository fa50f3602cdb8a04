"""The model families: how each one's config.json is read where they differ, and what its layers have.

Defaults are those of transformers' configuration classes, which apply where a checkpoint leaves a key out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from loader.config_fields import Fields

_FULL, _SLIDING = "full_attention", "sliding_attention"


class Windows(Enum):
    """Which layers attend to a window of recent positions where the checkpoint has no key `layer_types`."""

    NONE = 0
    EVERY_LAYER = 1  # where sliding_window is set
    FROM_LAYER = 2  # where use_sliding_window is true: from layer max_window_layers on
    ALL_BUT_EVERY_NTH = 3  # the last layer of each sliding_window_pattern layers sees everything


@dataclass(slots=True, frozen=True)
class Family:
    """head_dim: where config.json gives none (None: hidden_size / num_attention_heads). query_bias: None follows key
    attention_bias. sliding_window, sliding_window_pattern: where the key is absent."""

    architecture: str
    model_type: str
    windows: Windows = Windows.NONE
    sliding_window: int | None = None
    sliding_window_pattern: int = 0
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool | None = None  # of queries, keys and values
    output_bias: bool | None = None  # of the attention's output
    mlp_bias: bool = False  # has the key
    qk_norm: bool = False
    fused_projections: bool = False  # qkv_proj and gate_up_proj in the checkpoint
    partial_rotary: bool = False  # has the key partial_rotary_factor, and LongRoPE
    local_rope: bool = False  # windowed layers have rotary frequencies of their own
    rope_theta: float = 10000.0
    gemma: bool = False  # norms around both branches, weights that start at 0, scaled embeddings, GELU
    caps_scores: bool = False  # uses the key attn_logit_softcapping; Gemma 3's configuration has it too, its attention does not
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    encoder: bool = False  # texts to vectors; no KV, no sampling


FAMILIES = {
    family.architecture: family
    for family in (
        Family("LlamaForCausalLM", "llama", mlp_bias=True),
        Family(
            "MistralForCausalLM",
            "mistral",
            Windows.EVERY_LAYER,
            sliding_window=4096,
            attention_bias=False,
            output_bias=False,
        ),
        Family("Qwen2ForCausalLM", "qwen2", Windows.FROM_LAYER, sliding_window=4096, attention_bias=True, output_bias=False),
        Family("Qwen3ForCausalLM", "qwen3", Windows.FROM_LAYER, sliding_window=4096, head_dim=128, qk_norm=True),
        Family(
            "Phi3ForCausalLM",
            "phi3",
            Windows.EVERY_LAYER,
            rms_norm_eps=1e-5,
            attention_bias=False,
            output_bias=False,
            fused_projections=True,
            partial_rotary=True,
        ),
        Family(
            "Gemma2ForCausalLM",
            "gemma2",
            Windows.ALL_BUT_EVERY_NTH,
            sliding_window=4096,
            sliding_window_pattern=2,
            head_dim=256,
            tie_word_embeddings=True,
            gemma=True,
            caps_scores=True,
            attention_softcap=50.0,
            logit_softcap=30.0,
        ),
        Family(
            "Gemma3ForCausalLM",
            "gemma3_text",
            Windows.ALL_BUT_EVERY_NTH,
            sliding_window=4096,
            sliding_window_pattern=6,
            head_dim=256,
            tie_word_embeddings=True,
            qk_norm=True,
            local_rope=True,
            rope_theta=1e6,
            gemma=True,
        ),
        Family("BertModel", "bert", encoder=True),
    )
}


def family_of(fields: Fields) -> Family:
    """Raises UnsupportedModel naming those that are supported."""
    listed = fields.values.get("architectures")
    if isinstance(listed, list) and listed:
        name = str(listed[0])
    else:
        model_type = fields.values.get("model_type")
        if model_type is None:
            raise fields.fail("architectures", "missing")
        name = next((f.architecture for f in FAMILIES.values() if f.model_type == model_type), str(model_type))
    if name not in FAMILIES:
        raise fields.unsupported("architectures", f"{name!r} is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def layer_windows(fields: Fields, family: Family, num_layers: int, max_position_embeddings: int) -> tuple[int, ...]:
    """[num_layers]: how many positions a query of the layer sees, its own included; 0: all. A window that no sequence can outgrow
    counts as none."""
    sliding = _sliding_layers(fields, family, num_layers)
    if not any(sliding):
        return (0,) * num_layers
    if fields.is_null("sliding_window") or (family.sliding_window is None and not fields.has("sliding_window")):
        raise fields.fail("sliding_window", "missing, but there are sliding_attention layers")
    window = fields.integer("sliding_window", family.sliding_window)
    if window >= max_position_embeddings and not family.local_rope:  # there they differ in more than what they see
        return (0,) * num_layers
    return tuple(window if slides else 0 for slides in sliding)


def _sliding_layers(fields: Fields, family: Family, num_layers: int) -> list[bool]:
    listed = fields.values.get("layer_types")
    if listed is not None and (not isinstance(listed, list) or len(listed) != num_layers):
        raise fields.fail("layer_types", f"not a list of num_hidden_layers {num_layers} kinds")
    for kind in listed or []:
        if kind not in (_FULL, _SLIDING):
            raise fields.unsupported("layer_types", f"{kind!r} is not supported; supported: {_FULL}, {_SLIDING}")
    sliding = [kind == _SLIDING for kind in listed] if listed is not None else None
    match family.windows:
        case Windows.NONE:
            if fields.boolean("use_sliding_window"):
                raise fields.unsupported("use_sliding_window", f"{family.architecture} is supported without windows only")
            if sliding is not None and any(sliding):
                raise fields.unsupported("layer_types", f"{family.architecture} is supported without windows only")
            return [False] * num_layers
        case Windows.EVERY_LAYER:
            window = None if fields.is_null("sliding_window") else fields.values.get("sliding_window", family.sliding_window)
            if sliding is not None and sliding != [window is not None] * num_layers:
                raise fields.unsupported("layer_types", f"{family.architecture} is supported with layers of one kind only")
            return [window is not None] * num_layers
        case Windows.FROM_LAYER:
            if not fields.boolean("use_sliding_window"):
                if sliding is not None and any(sliding):
                    raise fields.fail("layer_types", f"has {_SLIDING} layers, but use_sliding_window is false")
                return [False] * num_layers
            first = fields.integer("max_window_layers", 28, at_least=0)
            windowed = not fields.is_null("sliding_window")
            return sliding if sliding is not None else [windowed and layer >= first for layer in range(num_layers)]
        case Windows.ALL_BUT_EVERY_NTH:
            # Gemma 2 has no such key: its pattern is fixed
            pattern = fields.integer("sliding_window_pattern", 6) if family.local_rope else family.sliding_window_pattern
            return sliding if sliding is not None else [(layer + 1) % pattern != 0 for layer in range(num_layers)]
