"""config.json and generation_config.json of a Hugging Face folder, in both dialects, as one `ModelShape`.

Dialects: `rope_parameters` + `dtype` (transformers 5) and `rope_theta` + `rope_scaling` + `torch_dtype` (before).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from loader.errors import CheckpointError, UnsupportedModel

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
DTYPES = ("float32", "bfloat16", "float16")
ROPE_TYPES = ("default", "linear", "llama3")

# architecture -> has RMS norms on queries and keys
ARCHITECTURES = {"LlamaForCausalLM": False, "Qwen3ForCausalLM": True}
_BY_MODEL_TYPE = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclass(slots=True, frozen=True)
class RopeParameters:
    """Rotary embedding: base `theta` and how its frequencies are scaled. See engine/layers/rope.py."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


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
    max_position_embeddings: int
    rope: RopeParameters
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str
    layer_windows: tuple[int, ...] = ()  # positions each layer attends to, the token's own included (0: all); empty: all layers all


@dataclass(slots=True, frozen=True)
class GenerationDefaults:
    """End and begin ids, and the sampling settings the checkpoint's authors recommend (only those they set)."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


class _Fields:
    """Typed look-ups in one JSON object; errors name file and key."""

    def __init__(self, values: dict[str, Any], file: str, prefix: str = "") -> None:
        self.values, self.file, self.prefix = values, file, prefix

    def fail(self, key: str, message: str) -> CheckpointError:
        return CheckpointError(self.file, None, f"key {self.prefix}{key}: {message}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None, at_least: int = 1) -> int:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.fail(key, "missing")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"{value!r} is not a whole number")
        if not at_least <= value <= 1 << 40:
            raise self.fail(key, f"{value} is out of range (at least {at_least})")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.fail(key, "missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, f"{value!r} is not a number")
        return float(value)

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, f"{value!r} is not true or false")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """A token id, a list of them, or null."""
        value = self.values.get(key)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in values):
            raise self.fail(key, f"{value!r} is neither a token id nor a list of token ids")
        return tuple(dict.fromkeys(values))

    def mapping(self, key: str) -> _Fields | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(key, f"{value!r} is not an object")
        return _Fields(value, self.file, f"{self.prefix}{key}.")


def _fields(text: bytes, file: str) -> _Fields:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(file, None, f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(file, None, "not a JSON object")
    return _Fields(value, file)


def parse_config(text: bytes, file: str = CONFIG_NAME) -> ModelShape:
    """Raises UnsupportedModel (architecture, activation, rope kind, sliding window) or CheckpointError naming the key."""
    fields = _fields(text, file)
    architecture = _architecture(fields)
    activation = fields.values.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(file, None, f"key hidden_act: {activation!r} is not supported; supported: silu")
    windowed = fields.boolean("use_sliding_window")
    layer_types = fields.values.get("layer_types") or []
    if windowed or (isinstance(layer_types, list) and any(kind != "full_attention" for kind in layer_types)):
        raise UnsupportedModel(file, None, "key layer_types: only full_attention layers are supported")
    if fields.has("quantization_config"):
        raise UnsupportedModel(file, None, "key quantization_config: quantised checkpoints are not supported")
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.fail("num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}")
    qk_norm = ARCHITECTURES[architecture]
    head_dim = fields.integer("head_dim", 128 if qk_norm else hidden_size // num_heads)
    if head_dim % 2:
        raise fields.fail("head_dim", f"{head_dim} is odd; rotary embedding needs pairs")
    max_position_embeddings = fields.integer("max_position_embeddings")
    return ModelShape(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=max_position_embeddings,
        rope=_rope(fields, max_position_embeddings),
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
        attention_bias=fields.boolean("attention_bias"),
        mlp_bias=fields.boolean("mlp_bias") and not qk_norm,
        qk_norm=qk_norm,
        dtype=_dtype(fields),
    )


def _architecture(fields: _Fields) -> str:
    listed = fields.values.get("architectures")
    if isinstance(listed, list) and listed:
        name = str(listed[0])
    else:
        model_type = fields.values.get("model_type")
        if model_type is None:
            raise fields.fail("architectures", "missing")
        name = _BY_MODEL_TYPE.get(str(model_type), str(model_type))
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            fields.file, None, f"key architectures: {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return name


def _dtype(fields: _Fields) -> str:
    key = "dtype" if fields.has("dtype") else "torch_dtype"
    value = fields.values.get(key) or "float32"
    value = str(value).removeprefix("torch.")
    if value not in DTYPES:
        raise UnsupportedModel(fields.file, None, f"key {key}: {value!r} is not supported; supported: {', '.join(DTYPES)}")
    return value


def _rope(fields: _Fields, max_position_embeddings: int) -> RopeParameters:
    new, old = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    given = new or old or _Fields({}, fields.file)
    kind = str(given.values.get("rope_type") or given.values.get("type") or "default")
    if kind not in ROPE_TYPES:
        name = "rope_parameters" if new else "rope_scaling"
        raise UnsupportedModel(
            fields.file, None, f"key {name}.rope_type: {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    theta = given.number("rope_theta", fields.number("rope_theta", 10000.0))
    if theta <= 0:
        raise fields.fail("rope_theta", f"{theta} is not positive")
    if kind == "default":
        return RopeParameters(theta=theta)
    factor = given.number("factor")
    if factor < 1:
        raise given.fail("factor", f"{factor} is below 1")
    if kind == "linear":
        return RopeParameters("linear", theta, factor)
    low, high = given.number("low_freq_factor"), given.number("high_freq_factor")
    if not 0 < low < high:
        raise given.fail("high_freq_factor", f"{high} must be above low_freq_factor {low}, which must be positive")
    original = given.integer("original_max_position_embeddings", max_position_embeddings)
    return RopeParameters("llama3", theta, factor, low, high, original)


def parse_generation(config_text: bytes, generation_text: bytes | None) -> GenerationDefaults:
    """End ids from generation_config.json, else from config.json. Raises CheckpointError naming file and key."""
    config = _fields(config_text, CONFIG_NAME)
    if generation_text is None:
        return GenerationDefaults(config.ids("eos_token_id"), _first(config.ids("bos_token_id")))
    given = _fields(generation_text, GENERATION_CONFIG_NAME)
    temperature = given.number("temperature") if given.has("temperature") else None
    top_p = given.number("top_p") if given.has("top_p") else None
    top_k = given.integer("top_k", at_least=0) if given.has("top_k") else None
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
    )


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None
