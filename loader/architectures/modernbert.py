"""Describes ModernBERT (gte-modernbert): an encoder with rotary embedding (RoPE), norms before attention and MLP, and a gated MLP.
In most layers a token attends only to a window of tokens on both sides of it. modernbert_reranker.py describes the family's
cross-encoders.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from loader.architectures.architecture import MAX_LAYERS, TensorGroup, one_tensor, stored_dtype
from loader.architectures.cut_sizes import cut_sizes
from loader.architectures.scoring import scoring_of
from loader.architectures.windows import Asked, Windows
from loader.shapes.config_fields import Fields
from loader.shapes.model_shape import ModelShape
from loader.shapes.rope_config import RopeParameters, RopeRules, parse_rope

_BODY = "model."  # prefix of the encoder's tensors in models that have a head
_THETA = (("global_rope_theta", 160_000.0), ("local_rope_theta", 10_000.0))
_ROPE = RopeRules(is_local=True)
_POOLINGS = ("cls", "mean")


def _all_but_first_of_every(asked: Asked) -> list[bool]:
    """Returns which layers of ModernBERT have a sliding window: those that `layer_types` lists or, if that key is absent, all
    except the first of every `global_attn_every_n_layers`."""
    every = asked.fields.integer("global_attn_every_n_layers", 3)
    return asked.listed if asked.listed is not None else [layer % every != 0 for layer in range(asked.num_layers)]


_WINDOWS = Windows(_all_but_first_of_every, 128, "local_attention")


@dataclass(slots=True, frozen=True)
class ModernEncoder:
    """The description of ModernBERT: what its config.json may say, and which tensors its checkpoints hold. scores: whether the
    model is a cross-encoder, with a head that scores a pair of texts."""

    name: str
    model_type: str
    scores: bool = False

    def parse(self, fields: Fields) -> ModelShape:
        """Returns the shape of the encoder that a config.json describes. Raises UnsupportedModel for a variant that is not served,
        and CheckpointError, which names a key with a wrong value. For models other than cross-encoders, the pooling of token
        vectors is read from another file (loader/configs/pooling.py)."""
        hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        if hidden_size % (2 * num_heads):
            raise fields.fail("num_attention_heads", f"{num_heads} heads of hidden_size {hidden_size} are no pairs of dimensions")
        for key in ("hidden_activation", "classifier_activation"):
            if (value := fields.values.get(key) or "gelu") != "gelu":
                raise fields.unsupported(key, f"{value!r} is not supported; supported: gelu")
        for key in ("norm_bias", "classifier_bias"):
            if fields.boolean(key):
                raise fields.unsupported(key, "true is not supported")
        num_layers = fields.integer("num_hidden_layers", at_most=MAX_LAYERS)
        head_dim, max_position_embeddings = hidden_size // num_heads, fields.integer("max_position_embeddings")
        rope, local_rope = self._ropes(fields, head_dim, max_position_embeddings)
        has_bias = fields.boolean("attention_bias")
        sizes, any_size = ((), False) if self.scores else cut_sizes(fields, hidden_size)
        return ModelShape(
            architecture=self.name,
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            vocab_size=fields.integer("vocab_size"),
            rms_norm_eps=fields.positive("norm_eps", 1e-5),
            max_position_embeddings=max_position_embeddings,
            rope=rope,
            local_rope=local_rope,
            tie_word_embeddings=True,
            attention_bias=has_bias,
            output_bias=has_bias,
            mlp_bias=fields.boolean("mlp_bias"),
            dtype=stored_dtype(fields),
            layer_windows=self._windows(fields, num_layers),
            query_scale=head_dim**-0.5,
            pooling=self._pooling(fields) if self.scores else "mean",
            scoring=scoring_of(fields) if self.scores else "",
            cut_sizes=sizes,
            any_cut_size=any_size,
        )

    def _ropes(self, fields: Fields, head_dim: int, max_position_embeddings: int) -> tuple[RopeParameters, RopeParameters | None]:
        """Returns the settings of rotary embedding (RoPE): (for layers with full attention, for layers with a window). Older config
        files give the base frequencies under `global_rope_theta` and `local_rope_theta`. Raises UnsupportedModel for scaled
        frequencies."""
        wide, near = (fields.positive(key, default) for key, default in _THETA)
        if fields.has("rope_scaling"):
            raise fields.unsupported("rope_scaling", f"{self.name} is supported without it")
        named = Fields(fields.values | {"rope_theta": wide, "rope_local_base_freq": near}, fields.file)
        ropes = parse_rope(named, self.name, _ROPE, head_dim, head_dim, max_position_embeddings)
        if any(rope is not None and rope.kind != "default" for rope in ropes):
            raise fields.unsupported("rope_parameters", f"{self.name} is supported with rope_type default only")
        return ropes

    def _windows(self, fields: Fields, num_layers: int) -> tuple[int, ...]:
        """Returns, for each layer, how many positions a token attends to, its own included; 0: all of them. The key
        `local_attention` of config.json gives the number of positions on both sides of a token together, without its own."""
        windows = _WINDOWS.by_layer(fields, _WINDOWS.sliding(fields, self.name, num_layers), 0, keeps_all=True)
        return tuple(2 * (window // 2) + 1 if window else 0 for window in windows)

    def _pooling(self, fields: Fields) -> str:
        value = fields.values.get("classifier_pooling") or "cls"
        if value not in _POOLINGS:
            raise fields.unsupported("classifier_pooling", f"{value!r} is not supported; supported: {', '.join(_POOLINGS)}")
        return str(value)

    def tensor_groups(self, shape: ModelShape) -> list[TensorGroup]:
        """Returns the tensors that an encoder's checkpoint must hold, in the order in which they lie in the model's memory. A group
        has the tensors that one matrix multiplication reads together."""
        hidden, inner, at = shape.hidden_size, shape.intermediate_size, shape.tensor_prefix

        def one(name: str, has_bias: bool, *dims: int) -> list[TensorGroup]:
            weight = one_tensor(f"{name}.weight", *dims)
            return [weight, one_tensor(f"{name}.bias", dims[0])] if has_bias else [weight]

        groups = one(f"{at}embeddings.tok_embeddings", False, shape.vocab_size, hidden)
        groups += one(f"{at}embeddings.norm", False, hidden)
        for layer in range(shape.num_layers):
            in_layer = [
                *(one("attn_norm", False, hidden) if layer else ()),  # the first layer reads the normed embeddings
                *one("attn.Wqkv", shape.attention_bias, 3 * hidden, hidden),
                *one("attn.Wo", shape.output_bias, hidden, hidden),
                *one("mlp_norm", False, hidden),
                *one("mlp.Wi", shape.mlp_bias, 2 * inner, hidden),
                *one("mlp.Wo", shape.mlp_bias, hidden, inner),
            ]
            groups += [group.in_layer(layer, f"{at}layers.{layer}.") for group in in_layer]
        groups += one(f"{at}final_norm", False, hidden)
        if self.scores:
            groups += one("head.dense", False, hidden, hidden)
            groups += one("head.norm", False, hidden)
            groups += one("classifier", True, 1, hidden)
        return groups

    def ignores(self, shape: ModelShape, name: str) -> bool:
        """Returns whether a checkpoint may contain the tensor `name` although it is not read: in a model that is no cross-encoder,
        a tensor of the head that predicts masked words."""
        return not self.scores and name.startswith(("head.", "decoder."))

    def as_stored(self, shape: ModelShape, names: Collection[str]) -> ModelShape:
        """Returns the shape with tensor_prefix set to the prefix that the encoder's tensors have in this checkpoint: "model." if
        the model was saved with a head, otherwise "". names: the names of the checkpoint's tensors."""
        return replace(shape, tensor_prefix=_BODY) if any(name.startswith(_BODY) for name in names) else shape


ARCHITECTURE = ModernEncoder("ModernBertModel", "modernbert")
