"""config.json and generation_config.json of a Hugging Face folder, in both dialects, as one `ModelShape`.

Dialects: `rope_parameters` + `dtype` (transformers 5) and `rope_theta` + `rope_scaling` + `torch_dtype` (before).
"""

from __future__ import annotations

from dataclasses import dataclass

from loader.config_fields import Fields, json_fields
from loader.families import FAMILIES, Family, family_of, layer_windows
from loader.rope_config import RopeParameters as RopeParameters
from loader.rope_config import parse_rope

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
DTYPES = ("float32", "bfloat16", "float16")
ARCHITECTURES = tuple(FAMILIES)
MAX_LAYERS = 1024  # the deepest models have some 130; a list of so many is built before the files can tell how many there are
MAX_CUT_SIZES = 4096


@dataclass(slots=True, frozen=True)
class ModelShape:
    """What the engine and the memory arithmetic need of a dense decoder. Counts in elements, lengths in tokens."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int  # of a scaling that reaches further: what it reaches
    rope: RopeParameters
    tie_word_embeddings: bool
    attention_bias: bool  # of queries, keys and values
    output_bias: bool  # of the attention's output
    mlp_bias: bool
    qk_norm: bool
    dtype: str
    layer_windows: tuple[int, ...]  # by layer: positions a query sees, its own included; 0: all
    query_scale: float  # of attention scores
    fused_projections: bool  # the checkpoint holds qkv_proj and gate_up_proj
    branch_norms: bool  # norms after attention and MLP as well as before
    attention_softcap: float = 0.0  # scores become cap * tanh(score / cap); 0: as they are
    logit_softcap: float = 0.0
    local_rope: RopeParameters | None = None  # of windowed layers, where theirs differs from `rope`
    pooling: str = ""  # of an encoder: mean or cls; "": it generates text
    type_vocab_size: int = 0  # of an encoder: kinds of segments
    cut_sizes: tuple[int, ...] = ()  # of an encoder trained for it (Matryoshka): what its vectors may be cut to
    any_cut_size: bool = False  # of an encoder trained for it: its vectors may be cut to any size
    tensor_prefix: str = ""  # of an encoder: what its parameters' names begin with
    block_offsets: tuple[int, ...] = ()  # where large parameters begin in the files (sizing.block_offsets); (): not known


@dataclass(slots=True, frozen=True)
class GenerationDefaults:
    """End and begin ids, and the sampling settings the checkpoint's authors recommend (only those they set)."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def parse_config(text: bytes, file: str = CONFIG_NAME) -> ModelShape:
    """Raises UnsupportedModel (architecture, activation, rope kind, kinds of layers) or CheckpointError naming the key."""
    fields = json_fields(text, file)
    family = family_of(fields)
    if family.encoder:
        return encoder_shape(fields, family)
    _refuse_variants(fields, family)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.fail("num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}")
    head_dim = fields.integer("head_dim", family.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise fields.fail("head_dim", f"{head_dim} is odd; rotary embedding needs pairs")
    num_layers = fields.integer("num_hidden_layers", at_most=MAX_LAYERS)
    max_position_embeddings = fields.integer("max_position_embeddings")
    rope, local_rope = parse_rope(fields, family, head_dim, max_position_embeddings)
    max_position_embeddings = max(max_position_embeddings, rope.extended_to)
    windows = layer_windows(fields, family, num_layers, max_position_embeddings)
    attention_bias = fields.boolean("attention_bias") if family.attention_bias is None else family.attention_bias
    return ModelShape(
        architecture=family.architecture,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size"),
        rms_norm_eps=fields.number("rms_norm_eps", family.rms_norm_eps),
        max_position_embeddings=max_position_embeddings,
        rope=rope,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", family.tie_word_embeddings),
        attention_bias=attention_bias,
        output_bias=attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=family.mlp_bias and fields.boolean("mlp_bias"),
        qk_norm=family.qk_norm,
        dtype=_dtype(fields),
        layer_windows=windows,
        query_scale=(fields.positive("query_pre_attn_scalar", 256.0) if family.gemma else head_dim) ** -0.5,
        fused_projections=family.fused_projections,
        branch_norms=family.gemma,
        attention_softcap=_softcap(fields, "attn_logit_softcapping", family.attention_softcap) if family.caps_scores else 0.0,
        logit_softcap=_softcap(fields, "final_logit_softcapping", family.logit_softcap) if family.gemma else 0.0,
        local_rope=local_rope,
    )


def _refuse_variants(fields: Fields, family: Family) -> None:
    key, supported = ("hidden_activation", "gelu_pytorch_tanh") if family.gemma else ("hidden_act", "silu")
    activation = fields.values.get(key) or supported
    if activation != supported:
        raise fields.unsupported(key, f"{activation!r} is not supported; supported: {supported}")
    if fields.boolean("use_bidirectional_attention"):
        raise fields.unsupported("use_bidirectional_attention", "only causal attention is supported")
    if fields.has("quantization_config"):
        raise fields.unsupported("quantization_config", "quantised checkpoints are not supported")


def encoder_shape(fields: Fields, family: Family) -> ModelShape:
    """As parse_config, of a BERT. Its pooling stands in a file of its own (loader/pooling.py)."""
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden_size % num_heads:
        raise fields.fail("num_attention_heads", f"{num_heads} does not divide hidden_size {hidden_size}")
    for key, supported in (("hidden_act", "gelu"), ("position_embedding_type", "absolute")):
        if (value := fields.values.get(key) or supported) != supported:
            raise fields.unsupported(key, f"{value!r} is not supported; supported: {supported}")
    for key in ("is_decoder", "add_cross_attention"):
        if fields.boolean(key):
            raise fields.unsupported(key, "only encoders are supported")
    if fields.has("quantization_config"):
        raise fields.unsupported("quantization_config", "quantised checkpoints are not supported")
    num_layers = fields.integer("num_hidden_layers", at_most=MAX_LAYERS)
    cut_sizes = _cut_sizes(fields, hidden_size)
    return ModelShape(
        architecture=family.architecture,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        vocab_size=fields.integer("vocab_size"),
        rms_norm_eps=fields.number("layer_norm_eps", 1e-12),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rope=RopeParameters(),
        tie_word_embeddings=True,
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        qk_norm=False,
        dtype=_dtype(fields),
        layer_windows=(0,) * num_layers,
        query_scale=(hidden_size // num_heads) ** -0.5,
        fused_projections=False,
        branch_norms=False,
        pooling="mean",
        type_vocab_size=fields.integer("type_vocab_size", 2),
        cut_sizes=cut_sizes,
        any_cut_size=not cut_sizes and fields.boolean("is_matryoshka"),
    )


def _cut_sizes(fields: Fields, hidden_size: int) -> tuple[int, ...]:
    """`matryoshka_dimensions` names them; `is_matryoshka` alone means any."""
    if not fields.has("matryoshka_dimensions"):
        return ()
    sizes = fields.values["matryoshka_dimensions"]
    if not isinstance(sizes, list) or not all(type(size) is int and 1 <= size <= hidden_size for size in sizes):
        raise fields.fail("matryoshka_dimensions", f"{sizes!r} is not a list of sizes from 1 to hidden_size {hidden_size}")
    if len(sizes) > MAX_CUT_SIZES:
        raise fields.fail("matryoshka_dimensions", f"holds {len(sizes)} sizes (at most {MAX_CUT_SIZES})")
    return tuple(sorted(sizes))


def _softcap(fields: Fields, key: str, default: float | None) -> float:
    """0 where the checkpoint says null."""
    if fields.is_null(key) or (default is None and not fields.has(key)):
        return 0.0
    return fields.positive(key, default)


def _dtype(fields: Fields) -> str:
    key = "dtype" if fields.has("dtype") else "torch_dtype"
    value = fields.values.get(key) or "float32"
    value = str(value).removeprefix("torch.")
    if value not in DTYPES:
        raise fields.unsupported(key, f"{value!r} is not supported; supported: {', '.join(DTYPES)}")
    return value


def parse_generation(config_text: bytes, generation_text: bytes | None) -> GenerationDefaults:
    """End ids from generation_config.json, else from config.json. Raises CheckpointError naming file and key."""
    config = json_fields(config_text, CONFIG_NAME)
    if generation_text is None:
        return GenerationDefaults(config.ids("eos_token_id"), _first(config.ids("bos_token_id")))
    given = json_fields(generation_text, GENERATION_CONFIG_NAME)
    temperature = given.number("temperature") if given.has("temperature") else None
    top_p = given.number("top_p") if given.has("top_p") else None
    top_k = given.integer("top_k", at_least=0) if given.has("top_k") else None
    min_p = given.number("min_p") if given.has("min_p") else None
    if min_p is not None and not 0 <= min_p <= 1:
        raise given.fail("min_p", f"{min_p} is not from 0 to 1")
    if temperature is not None and temperature < 0:
        raise given.fail("temperature", f"{temperature} is negative")
    if top_p is not None and not 0 < top_p <= 1:
        raise given.fail("top_p", f"{top_p} is not above 0 and at most 1")
    return GenerationDefaults(
        eos_token_ids=given.ids("eos_token_id") or config.ids("eos_token_id"),
        bos_token_id=_first(given.ids("bos_token_id") or config.ids("bos_token_id")),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=given.positive("repetition_penalty") if given.has("repetition_penalty") else None,
    )


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None
