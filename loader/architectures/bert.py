"""BERT and its MiniLM distillations: encoders, from texts to vectors. They have no KV, and nothing is sampled."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from loader.architectures.architecture import MAX_LAYERS, TensorGroup, one_tensor, stored_dtype
from loader.config_fields import Fields
from loader.model_shape import ModelShape
from loader.rope_config import RopeParameters

MAX_CUT_SIZES = 4096
_SUPPORTED = (("hidden_act", "gelu"), ("position_embedding_type", "absolute"))


@dataclass(slots=True, frozen=True)
class Encoder:
    """Describes BERT's family: what its config.json may say, and which tensors its checkpoints hold."""

    name: str
    model_type: str

    def parse(self, fields: Fields) -> ModelShape:
        """Implements Architecture.parse. How token vectors are pooled is read from another file (loader/pooling.py)."""
        hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        if hidden_size % num_heads:
            raise fields.fail("num_attention_heads", f"{num_heads} does not divide hidden_size {hidden_size}")
        for key, supported in _SUPPORTED:
            if (value := fields.values.get(key) or supported) != supported:
                raise fields.unsupported(key, f"{value!r} is not supported; supported: {supported}")
        for key in ("is_decoder", "add_cross_attention"):
            if fields.boolean(key):
                raise fields.unsupported(key, "only encoders are supported")
        num_layers = fields.integer("num_hidden_layers", at_most=MAX_LAYERS)
        cut_sizes = _cut_sizes(fields, hidden_size)
        return ModelShape(
            architecture=self.name,
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
            dtype=stored_dtype(fields),
            layer_windows=(0,) * num_layers,
            query_scale=(hidden_size // num_heads) ** -0.5,
            pooling="mean",
            type_vocab_size=fields.integer("type_vocab_size", 2),
            cut_sizes=cut_sizes,
            any_cut_size=not cut_sizes and fields.boolean("is_matryoshka"),
        )

    def tensor_groups(self, shape: ModelShape) -> list[TensorGroup]:
        """Implements Architecture.tensor_groups."""
        hidden, inner = shape.hidden_size, shape.intermediate_size

        def one(name: str, *dims: int) -> list[TensorGroup]:
            return [one_tensor(f"{name}.weight", *dims), one_tensor(f"{name}.bias", dims[0])]

        at = shape.tensor_prefix + "embeddings."
        tables = (("word", shape.vocab_size), ("position", shape.max_position_embeddings), ("token_type", shape.type_vocab_size))
        groups = [one_tensor(f"{at}{name}_embeddings.weight", rows, hidden) for name, rows in tables]
        groups += one(at + "LayerNorm", hidden)
        mixing = [f"attention.self.{name}" for name in ("query", "key", "value")]
        in_a_layer = [
            TensorGroup(tuple((f"{name}.weight", (hidden, hidden)) for name in mixing)),
            TensorGroup(tuple((f"{name}.bias", (hidden,)) for name in mixing)),
            *one("attention.output.dense", hidden, hidden),
            *one("attention.output.LayerNorm", hidden),
            *one("intermediate.dense", inner, hidden),
            *one("output.dense", hidden, inner),
            *one("output.LayerNorm", hidden),
        ]
        for layer in range(shape.num_layers):
            prefix = f"{shape.tensor_prefix}encoder.layer.{layer}."
            groups += [group.in_layer(layer, prefix) for group in in_a_layer]
        return groups

    def ignores(self, shape: ModelShape, name: str) -> bool:
        """Implements Architecture.ignores: the pooler is not used, and stored position numbers are not needed."""
        return name.removeprefix(shape.tensor_prefix).startswith(("pooler.", "embeddings.position_ids"))

    def as_stored(self, shape: ModelShape, names: Collection[str]) -> ModelShape:
        """Implements Architecture.as_stored: models with a head for training name their encoder `bert`."""
        return replace(shape, tensor_prefix="bert.") if any(name.startswith("bert.") for name in names) else shape


ARCHITECTURE = Encoder("BertModel", "bert")


def _cut_sizes(fields: Fields, hidden_size: int) -> tuple[int, ...]:
    """Returns the lengths to which vectors may be cut: those that `matryoshka_dimensions` lists, or any if only `is_matryoshka`
    is set."""
    if not fields.has("matryoshka_dimensions"):
        return ()
    sizes = fields.values["matryoshka_dimensions"]
    if not isinstance(sizes, list) or not all(type(size) is int and 1 <= size <= hidden_size for size in sizes):
        raise fields.fail("matryoshka_dimensions", f"{sizes!r} is not a list of sizes from 1 to hidden_size {hidden_size}")
    if len(sizes) > MAX_CUT_SIZES:
        raise fields.fail("matryoshka_dimensions", f"holds {len(sizes)} sizes (at most {MAX_CUT_SIZES})")
    return tuple(sorted(sizes))
